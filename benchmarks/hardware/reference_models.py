"""What the models of the published latency rows ask of a processor: `hw_profiles/latency/reference_models.json`.

The rows name models (`mobilenet-v2-0.5-160`, `GoogLeNet`); `ARCHITECTURES` says which torchvision or timm network each
is taken to be, and where they are known to differ. Each is built with random weights, exported to ONNX, read as a
workload by the same code that reads a user's bundle, and reduced to its demand by operator class. The product ships the
result, so that neither it nor the fit needs torch.

    python -m benchmarks.hardware.reference_models [--out hw_profiles/latency/reference_models.json] [--only NAME]
"""

from __future__ import annotations

import argparse
import json
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from protofleet.export.backbones import vision
from protofleet.hw_profiles.latency.operator_classes import CLASSES, demand
from protofleet.hw_profiles.workload.from_onnx import read_workload

ROOT = Path(__file__).resolve().parents[2]
WIDTHS_V1 = {"0.25": (128, 160, 192, 224), "0.5": (160, 192, 224), "0.75": (128, 160, 224), "1.0": (128, 160, 192, 224)}
WIDTHS_V2 = {
    "0.35": (96, 128, 160, 192, 224),
    "0.5": (96, 128, 160, 224),
    "0.75": (96, 160, 192),
    "1.0": (96, 128, 160, 192, 224),
    "1.3": (224,),
}
# the rows' model -> (input sizes, network, what is known to differ)
PLAIN: dict[str, tuple[tuple[int, ...], str, str]] = {
    "MobileNetV1-1.0": ((224,), "timm:mobilenetv1@1.0", ""),
    "MobileNetV3-Small": ((224,), "torchvision:mobilenet_v3_small", ""),
    "MnasNet-1.0": ((224,), "torchvision:mnasnet1_0", ""),
    "EfficientNet-B0": ((224,), "torchvision:efficientnet_b0", ""),
    "SqueezeNet1.0": ((224,), "torchvision:squeezenet1_0", ""),
    "SqueezeNet1.1": ((224, 227), "torchvision:squeezenet1_1", ""),
    "GoogLeNet": (
        (224,),
        "torchvision:googlenet",
        "its 3x3 third branch set to the 5x5 of the paper, as in Caffe's; Caffe's two LRN layers are not in it",
    ),
    "ResNet18": ((224, 256), "torchvision:resnet18", ""),
    "ResNet34": ((224, 256), "torchvision:resnet34", ""),
    "resnet50": ((224,), "torchvision:resnet50", "MLPerf's v1.5: stride in the 3x3 convolution, as torchvision's"),
    "PP-ResNet50": ((224,), "torchvision:resnet50", "PaddlePaddle's ResNet50, taken to be the plain one"),
    "WideResNet50-2": ((224,), "torchvision:wide_resnet50_2", ""),
    "VGG16": ((224,), "torchvision:vgg16", ""),
    "DenseNet121": ((224,), "torchvision:densenet121", ""),
    "efficientnet-lite0": ((224,), "timm:efficientnet_lite0", ""),
    "efficientnet-lite2": ((260,), "timm:efficientnet_lite2", ""),
    "efficientnet-lite4": ((300,), "timm:efficientnet_lite4", ""),
    "mobilenet-v3-small_224_1.0": ((224,), "timm:tf_mobilenetv3_small_100", ""),
    "mobilenet-v3-small_224_0.75": ((224,), "timm:tf_mobilenetv3_small_075", ""),
    "mobilenet-v3-small-minimalistic_224_1.0": ((224,), "timm:tf_mobilenetv3_small_minimal_100", ""),
    "mobilenet-v3-large_224_0.75": ((224,), "timm:tf_mobilenetv3_large_075", ""),
    "mobilenet-v3-large-minimalistic_224_1.0": ((224,), "timm:tf_mobilenetv3_large_minimal_100", ""),
}


def architectures() -> dict[str, tuple[str, str]]:
    """`model|HxW` as the rows write it -> (network, what is known to differ)."""
    named = {f"{model}|{s}x{s}": (net, note) for model, (sizes, net, note) in PLAIN.items() for s in sizes}
    for template, net, table in (
        ("mobilenet-v1-{w}-{s}", "timm:mobilenetv1@{w}", WIDTHS_V1),
        ("mobilenet-v2-{w}-{s}", "torchvision:mobilenet_v2@{w}", WIDTHS_V2),
    ):
        for width, sizes in table.items():
            for size in sizes:
                named[f"{template.format(w=width, s=size)}|{size}x{size}"] = (net.format(w=width), "")
    return named


def build(network: str) -> nn.Module:
    """The network of this name, with random weights, in inference mode."""
    library, name, width = re.fullmatch(r"(\w+):(\w+)(?:@([\d.]+))?", network).groups()  # type: ignore[union-attr]
    torchvision_models = vision.models()  # before timm, which imports torchvision
    if library == "timm":
        return _timm(name, width)
    options: dict[str, Any] = {"width_mult": float(width)} if width else {}
    if name == "googlenet":
        options = {"aux_logits": False, "init_weights": False}
    model = getattr(torchvision_models, name)(weights=None, **options).eval()
    return _five_by_five(model) if name == "googlenet" else model


def _timm(name: str, width: str | None) -> nn.Module:
    import timm
    from timm.models.efficientnet import _gen_mobilenet_v1

    if name == "mobilenetv1":
        return _gen_mobilenet_v1("mobilenetv1_100", channel_multiplier=float(width or 1), pretrained=False).eval()
    return timm.create_model(name, pretrained=False).eval()


def main() -> None:
    """Export what is asked for and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "hw_profiles" / "latency" / "reference_models.json")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    found = {}
    for key, (network, note) in sorted(architectures().items()):
        if args.only in key:
            amounts = demand(_workload(build(network), int(key.rsplit("x", 1)[1]), key))
            found[key] = {"network": network, "note": note, "demand": [float(f"{a:.7g}") for a in amounts]}
            print(key, network, f"{sum(amounts[:4]) / 1e6:.1f} M multiply-accumulates", flush=True)
    rows = ",\n  ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items())
    provenance = {"torch": torch.__version__, "batch": 1, "made_by": "benchmarks/hardware/reference_models.py"}
    head = f'"schema": 1, "provenance": {json.dumps(provenance)}, "classes": {json.dumps(CLASSES)}'
    args.out.write_text(f'{{{head}, "models": {{\n  {rows}\n}}}}\n', encoding="utf-8")


def _workload(model: nn.Module, size: int, name: str) -> Any:
    program = torch.onnx.export(model, (torch.zeros(1, 3, size, size),), dynamo=True, optimize=True, verbose=False)
    return read_workload(program.model_proto, name=name)  # type: ignore[union-attr]


def _five_by_five(model: nn.Module) -> nn.Module:
    """torchvision's GoogLeNet has a 3x3 where the paper (and the benchmarked Caffe network) has a 5x5."""
    for module in model.modules():
        if type(module).__name__ == "Inception":
            old = module.branch3[1].conv
            module.branch3[1].conv = nn.Conv2d(old.in_channels, old.out_channels, 5, padding=2, bias=False)
    return model


if __name__ == "__main__":
    main()

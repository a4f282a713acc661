"""The possible names of a backbone, the place where each network is built, and the possible values of `--weights`.

Nothing here loads torch, so a wrong name gets its error at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from protofleet.contract.errors import UsageError, near_names

__all__ = [
    "LIBRARY_NAMES",
    "NETWORKS",
    "PREFIX",
    "PRETRAINED",
    "TORCHVISION",
    "check_backbone_name",
    "check_weights_name",
]

PRETRAINED = "pretrained"  # instead of a weights file: those that the library publishes
PREFIX = "onnx:"  # before a file of ONNX (export/bundles/onnx_features.py)
LIBRARY_NAMES = ("timm", "torchvision", "hub")  # before a network's name there (export/backbones/libraries.py)
_SOURCES = (*LIBRARY_NAMES, PREFIX.rstrip(":"))
TORCHVISION = ("mobilenet_v2", "mobilenet_v3_small", "resnet18", "vgg13", "efficientnet_b0", "squeezenet1_1")
NETWORKS: Mapping[str, tuple[str, tuple[int | str, ...]]] = MappingProxyType(
    {
        "small_cnn": ("small_cnn", ()),
        "fedproto_mnist": ("fedproto_mnist", (20,)),
        "fedproto_mnist_18": ("fedproto_mnist", (18,)),
        "fedproto_mnist_22": ("fedproto_mnist", (22,)),
        "fedhp_mnist": ("fedhp", (32,)),
        "fedhp_cifar": ("fedhp", (64,)),
        "fedhp_mnist_512": ("fedhp", (32, 512)),
        "fedhp_cifar_384": ("fedhp", (64, 384)),
        "spherefed_convnet": ("spherefed_convnet", ()),
        **{name: ("torchvision", (name,)) for name in TORCHVISION},
    }
)
"""For each network, its kind in `export/backbones/networks.py` and the arguments of that kind."""


def check_backbone_name(name: str, option: str = "--backbone") -> None:
    """Check that a name may be a backbone's. The part after a colon is only looked for when the network is built.

    Args:
        option: the option that the error names.

    Raises:
        UsageError: it is no such name; or the part before its colon is no module, but nearly the name of a library.
    """
    source, colon, network = name.partition(":")
    if name in NETWORKS or (source and network and not _is_misspelt(source)):
        return
    known = (*NETWORKS, *(f"{library}:{network or 'NAME'}" for library in _SOURCES)) if colon else NETWORKS
    raise UsageError(option, expected="a known backbone or module:callable", got=name, hint=near_names(name, known))


def check_weights_name(weights: str, backbone: str) -> None:
    """Check that `--weights` names published weights of a library's network, or an existing file.

    Raises:
        UsageError: it names neither.
    """
    if weights == PRETRAINED:
        if backbone in NETWORKS:
            hint = f"torchvision:{backbone} or timm:{backbone}"
            raise UsageError("--weights pretrained", expected="a library's network", got=backbone, hint=hint)
        return
    if not Path(weights).is_file():
        is_near = get_close_matches(weights, (PRETRAINED,), cutoff=0.6)
        hint = PRETRAINED if is_near else "the path of safetensors, or of a torch state dict"
        raise UsageError("--weights", expected="pretrained, or a file that is there", got=weights, hint=hint)


def _is_misspelt(source: str) -> bool:
    """Whether it is nearly the name of a source, and Python finds no package of that name. Nothing is imported."""
    outermost = source.partition(".")[0]
    if source in _SOURCES or not get_close_matches(source, _SOURCES, n=1, cutoff=0.6) or outermost in sys.modules:
        return False
    sys.path.insert(0, os.getcwd())  # where a callable of your own may lie
    try:
        return find_spec(outermost) is None
    except (ValueError, ImportError):
        return True
    finally:
        del sys.path[0]

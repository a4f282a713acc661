"""The networks that can be exported by their bare names, each cut at its features: (B, c, H, W) float32 → (B, D).

The papers' small networks are written out here; the larger ones are torchvision's, whose classifier is replaced by
nothing and whose stem takes as many channels as the images have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import torch
from torch import nn

from protofleet.contract.errors import ExportError
from protofleet.export.backbones import vision
from protofleet.export.backbones.backbone_names import NETWORKS, TORCHVISION
from protofleet.export.modules.norms import to_group_norm

__all__ = ["BACKBONES", "IMAGENET_MEAN", "IMAGENET_STD", "Norm", "Shape", "default_statistics", "restem"]

Norm = Literal["batch", "group"]
Shape = tuple[int, int, int]
Builder = Callable[[Shape, Norm | None], nn.Module]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def default_statistics(name: str, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std per channel of x / 255: ImageNet's for torchvision's networks on colour images, else ½ and ½."""
    if name in TORCHVISION and channels == 3:
        return IMAGENET_MEAN, IMAGENET_STD
    return (0.5,) * channels, (0.5,) * channels


def _norm(norm: Norm | None, default: Norm, channels: int) -> nn.Module:
    if (norm or default) == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(max(n for n in range(1, 9) if channels % n == 0), channels)


def _flat(shape: Shape, *layers: nn.Module) -> int:
    """How many numbers `layers` make of one image."""
    height, width, channels = shape
    try:
        with torch.no_grad():
            probe = torch.zeros(1, channels, height, width)
            return int(nn.Sequential(*layers).eval()(probe).numel())
    except RuntimeError as error:
        raise ExportError(
            "the backbone does not fit the images", expected="larger images", got=f"{shape}: {error}"
        ) from None


def _small_cnn(shape: Shape, norm: Norm | None) -> nn.Module:
    """The default: two 3×3 convolutions with normalisation and pooling, then 128 features."""
    body = [
        *(nn.Conv2d(shape[2], 32, 3, padding=1), _norm(norm, "group", 32), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), _norm(norm, "group", 64), nn.MaxPool2d(2), nn.ReLU()),
        nn.Flatten(),
    ]
    return nn.Sequential(*body, nn.Linear(_flat(shape, *body), 128), nn.ReLU())


def _fedproto_mnist(second_channels: int) -> Builder:
    def build(shape: Shape, norm: Norm | None) -> nn.Module:
        """FedProto's MNIST network: conv5×5(10), conv5×5(18, 20 or 22), 50 features."""
        body = [
            *(nn.Conv2d(shape[2], 10, 5), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Conv2d(10, second_channels, 5), nn.MaxPool2d(2), nn.ReLU()),
            nn.Flatten(),
        ]
        return nn.Sequential(*body, nn.Linear(_flat(shape, *body), 50), nn.ReLU())

    return build


def _fedhp(first_channels: int, hidden: int = 0) -> Builder:
    def build(shape: Shape, norm: Norm | None) -> nn.Module:
        """FedHP's networks: two 5×5 convolutions of 64 features at last, flattened: 1024 (MNIST) or 1600 (CIFAR). With
        `hidden`, the first layer of the two-layer head that its FedAvg has."""
        body = [
            *(nn.Conv2d(shape[2], first_channels, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(first_channels, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Flatten(),
        ]
        return nn.Sequential(*body, *([nn.Linear(_flat(shape, *body), hidden), nn.ReLU()] if hidden else []))

    return build


def _spherefed_convnet(shape: Shape, norm: Norm | None) -> nn.Module:
    """SphereFed, Tab. 11: seven 3×3 convolutions. Padding 1, which the table omits, is what makes 32×32 into 1024."""
    layers: list[nn.Module] = []
    channels = shape[2]
    for width, stride in ((32, 1), (64, 2), (64, 2), (64, 1), (128, 2), (128, 1), (256, 2)):
        layers += [nn.Conv2d(channels, width, 3, stride, padding=1), _norm(norm, "group", width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.Flatten())


def _torchvision(name: str) -> Builder:
    def build(shape: Shape, norm: Norm | None) -> nn.Module:
        net = getattr(vision.models(), _WITH_NORM.get(name, name) if norm else name)(weights=None)
        if hasattr(net, "fc"):
            net.fc = nn.Identity()
        else:
            pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1)) if name == "squeezenet1_1" else nn.Identity()
            net.classifier = pooled
        if name == "vgg13":
            net.avgpool = nn.AdaptiveAvgPool2d(1)
        if shape[2] != 3:
            restem(net, shape[2])
        return to_group_norm(net) if norm == "group" else net

    return build


def restem(net: nn.Module, channels: int) -> None:
    """Let the first convolution take that many channels, freshly initialised."""
    name, stem = next((n, m) for n, m in net.named_modules() if isinstance(m, nn.Conv2d))
    parent, _, leaf = name.rpartition(".")
    fresh = nn.Conv2d(
        channels, stem.out_channels, stem.kernel_size, stem.stride, stem.padding, bias=stem.bias is not None
    )
    setattr(net.get_submodule(parent), leaf, fresh)


_WITH_NORM = {"vgg13": "vgg13_bn"}
_KINDS: Mapping[str, Callable[..., Builder]] = {
    "small_cnn": lambda: _small_cnn,
    "fedproto_mnist": _fedproto_mnist,
    "fedhp": _fedhp,
    "spherefed_convnet": lambda: _spherefed_convnet,
    "torchvision": _torchvision,
}
BACKBONES: Mapping[str, Builder] = MappingProxyType(
    {name: _KINDS[kind](*arguments) for name, (kind, arguments) in NETWORKS.items()}
)

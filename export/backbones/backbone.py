"""A backbone by name, from any source: the network cut at its features, (B, c, H, W) float32 → (B, D), and its facts.

    small_cnn, resnet18, …     a network of export/backbones/networks.py, initialised from a seed
    timm:NAME                  timm's, with `--weights pretrained` its published weights (export/backbones/libraries.py)
    torchvision:NAME           torchvision's classifiers
    hub:ORG/NAME               a repository of the Hugging Face hub that timm can read
    module:callable            a user's own: called without arguments, it returns an `nn.Module`

A library's network has an input size and statistics of its own. They hold where none are given. `find_backbone` returns
them, and the origin of the weights: their SHA-256, and their licence as the library states it.

`onnx:FILE` is not handled here: without a torch module there is no training step (export/bundles/onnx_features.py).
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from protofleet.contract.errors import ExportError, UsageError
from protofleet.contract.methods.moved_imports import new_import
from protofleet.export.backbones import vision
from protofleet.export.backbones.backbone_names import PRETRAINED, check_backbone_name, check_weights_name
from protofleet.export.backbones.libraries import LIBRARIES, Shelf
from protofleet.export.backbones.networks import (
    BACKBONES,
    IMAGENET_MEAN,
    IMAGENET_STD,
    Norm,
    Shape,
    default_statistics,
    restem,
)
from protofleet.export.backbones.weights import file_sha256, load_weights, tensors_sha256
from protofleet.export.modules.norms import to_group_norm

__all__ = [
    "BACKBONES",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "PRETRAINED",
    "Backbone",
    "Norm",
    "build_backbone",
    "default_statistics",
    "find_backbone",
]


@dataclass(frozen=True)
class Backbone:
    """A network and its facts.

    Attributes:
        net: maps (B, c, H, W) to features.
        width: D.
        input_shape: (H, W, c) of the images.
        mean, std: of x / 255, per channel.
        origin: how the weights were obtained, in words.
        facts: their SHA-256 and their licence, in words; empty for random ones.
        ignored: tensors of the weights file that the network does not have.
    """

    net: nn.Module
    width: int
    input_shape: Shape
    mean: tuple[float, ...]
    std: tuple[float, ...]
    origin: str
    facts: str = ""
    ignored: tuple[str, ...] = ()


def find_backbone(
    name: str,
    input_shape: Shape | None,
    norm: Norm | None = None,
    *,
    seed: int = 0,
    weights: str | Path | None = None,
) -> Backbone:
    """A backbone with its weights.

    Args:
        name: see the module's docstring.
        input_shape: (H, W, c); None for the size that a library's network is used to.
        norm: BatchNorm or GroupNorm, if the network normalises; None for the network's own choice.
        seed: of the initial weights.
        weights: a file, "pretrained", or None for random ones.

    Raises:
        UsageError: for an unknown name, a library that is not installed, weights that nobody has published, a missing
            size, or a norm that the network does not have.
        DownloadError: when the weights cannot be fetched.
        ExportError: when it cannot be built, does not fit the weights, or does not map such images to (B, D).
    """
    pretrained = weights == PRETRAINED
    if pretrained and norm is not None:
        raise UsageError(
            "--norm", expected="the network's own with pretrained weights", got=norm, hint="leaving it out"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shelf, is_own = _network(name, input_shape, norm, pretrained)
    if norm is not None:
        _check_norm(shelf.net, name, norm)
    width = _feature_width(shelf.net, name, shelf.input_shape)
    ignored = load_weights(shelf.net, weights) if weights is not None and not pretrained else []
    origin, facts = _origin(name, shelf, seed, weights, is_own)
    return Backbone(shelf.net, width, shelf.input_shape, shelf.mean, shelf.std, origin, facts, tuple(ignored))


def build_backbone(name: str, input_shape: Shape, norm: Norm | None = None, *, seed: int = 0) -> tuple[nn.Module, int]:
    """A freshly initialised backbone and its feature width D: `find_backbone` without weights."""
    backbone = find_backbone(name, input_shape, norm, seed=seed)
    return backbone.net, backbone.width


def _network(name: str, shape: Shape | None, norm: Norm | None, pretrained: bool) -> tuple[Shelf, bool]:
    """The network, and whether it is a user's own."""
    source, _, network = name.partition(":")
    if source in LIBRARIES and network:
        shelf = LIBRARIES[source](network, shape, pretrained)
        if source == "torchvision" and shelf.input_shape[2] != 3:
            restem(shelf.net, shelf.input_shape[2])
        return (shelf if norm != "group" else _grouped(shelf)), False
    check_backbone_name(name)
    if shape is None:
        raise UsageError("--input", expected="HxWxc, since this backbone has none of its own", got="none")
    if ":" in name:
        net = _users_own(name)
        shelf = Shelf(net, shape, *default_statistics(name, shape[2]), "", "")
        return (shelf if norm != "group" else _grouped(shelf)), True
    if pretrained:
        check_weights_name(PRETRAINED, name)
    return Shelf(BACKBONES[name](shape, norm), shape, *default_statistics(name, shape[2]), "", ""), False


def _grouped(shelf: Shelf) -> Shelf:
    to_group_norm(shelf.net)
    return shelf


def _origin(name: str, shelf: Shelf, seed: int, weights: str | Path | None, is_own: bool) -> tuple[str, str]:
    """How the weights were obtained, and their hash and licence."""
    if shelf.weights:
        facts = f"sha256 {tensors_sha256(shelf.net)} of the backbone's tensors"
        licence = f"licence {shelf.licence}" if shelf.licence else "licence not stated by the library"
        return f"pretrained weights {shelf.weights} of {name}", f"{facts}, {licence}"
    if weights is not None and weights != PRETRAINED:
        return f"loaded from {Path(weights).name}", f"sha256 {file_sha256(weights)}"
    if is_own:  # it may have loaded weights by itself
        return f"as {name} returned it (seed {seed})", f"sha256 {tensors_sha256(shelf.net)} of the backbone's tensors"
    return f"initialised from seed {seed}", ""


def _users_own(name: str) -> nn.Module:
    """Import and call `module:callable`, looking in the working directory too."""
    module_name, _, attribute = name.partition(":")
    vision.make_importable()  # the module may import torchvision, or timm, which does
    folder = os.getcwd()
    added = folder not in sys.path
    if added:
        sys.path.insert(0, folder)
    try:
        target = getattr(importlib.import_module(module_name), attribute)
        net = target()
    except (Exception, SystemExit) as error:  # a stranger's code may raise anything
        raise ExportError(
            f"--backbone {name} cannot be imported and called",
            expected="module:callable, a callable without arguments",
            got=f"{type(error).__name__}: {error}",
            hint=new_import(error) or "running it in python first",
        ) from None
    finally:
        if added:
            sys.path.remove(folder)
    if not isinstance(net, nn.Module):
        raise ExportError(f"--backbone {name}", expected="a callable that returns an nn.Module", got=type(net).__name__)
    return net


def _check_norm(net: nn.Module, name: str, norm: Norm) -> None:
    kinds = {"batch": nn.BatchNorm2d, "group": nn.GroupNorm}
    if not any(isinstance(m, kinds[norm]) for m in net.modules()):
        raise UsageError(
            "--norm", expected=f"a backbone with {norm} normalisation", got=name, hint="leaving --norm out"
        )


def _feature_width(net: nn.Module, name: str, shape: Shape) -> int:
    height, width, channels = shape
    training = net.training
    try:
        with torch.no_grad():
            z = net.eval()(torch.zeros(2, channels, height, width))
    except Exception as error:  # a stranger's code may raise anything
        raise ExportError(
            f"--backbone {name} does not take images of {height}x{width}x{channels}",
            expected=f"a module for ({channels}, {height}, {width}) float images",
            got=error,
            hint="another --input",
        ) from None
    finally:
        net.train(training)
    if not isinstance(z, Tensor) or z.dim() != 2 or z.shape[0] != 2 or z.shape[1] < 1:
        got = tuple(z.shape) if isinstance(z, Tensor) else type(z).__name__
        raise ExportError(f"--backbone {name}", expected="features (B, D)", got=got, hint="ending it with nn.Flatten()")
    return int(z.shape[1])

"""Networks of timm, torchvision and the Hugging Face hub by name, cut at their features, with their own configuration.

Each of the three functions builds the network twice at most:

1. Without weights. This gives the input size and the statistics that the network is used to.
2. With the pretrained weights, if they are wanted.

The library's own code fetches the weights into its own cache (`~/.cache/torch/hub`, `~/.cache/huggingface`), and takes
them from there the next time. If the hub does not answer, only the cache is used: otherwise huggingface_hub would try
for most of a minute. Hugging Face's count of uses is off (contract/console/telemetry.py).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import nn

from protofleet.contract.errors import DownloadError, ExportError, UsageError, near_names
from protofleet.contract.extras import install_command
from protofleet.export.backbones import vision
from protofleet.export.backbones.backbone_names import LIBRARY_NAMES

__all__ = ["LIBRARIES", "Shelf", "cut_at_features"]

_PATIENCE_S = 5.0  # for a first answer
_STALLED_S = 30.0  # for the next bytes of a download
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Shelf:
    """A network from a library, with the configuration that it is used to.

    Attributes:
        net: cut at its features, in the shape's channels.
        input_shape: (H, W, c).
        mean, std: of x / 255, per channel.
        weights: which weights these are; empty for random ones.
        licence: as the library states it; empty where it does not.
    """

    net: nn.Module
    input_shape: Shape
    mean: tuple[float, ...]
    std: tuple[float, ...]
    weights: str
    licence: str


def _of_timm(name: str, shape: Shape | None, pretrained: bool) -> Shelf:
    """`timm:resnet18.a1_in1k`: the name, and after a point which weights of it."""
    timm = _timm()
    plain = name.partition(".")[0]
    if not timm.is_model(plain):
        raise _unknown("timm", name, timm.list_models())
    if pretrained:
        published = set(timm.list_pretrained())
        tagged = sorted(tag for tag in published if tag.startswith(f"{plain}."))
        if name not in published and not (tagged and name == plain):
            raise _no_weights(f"timm:{name}", tagged)
    return _by_timm(timm, f"timm:{name}", name, shape, pretrained)


def _of_hub(name: str, shape: Shape | None, pretrained: bool) -> Shelf:
    """`hub:ORG/NAME`: a repository of the hub that timm can read, whose configuration is fetched in any case."""
    timm = _timm()
    if name.count("/") != 1 or not all(name.split("/")):
        raise UsageError("--backbone", expected="hub:ORG/NAME", got=f"hub:{name}", hint="hub:timm/resnet18.a1_in1k")
    return _by_timm(timm, f"hub:{name}", f"hf-hub:{name}", shape, pretrained)


def _of_torchvision(name: str, shape: Shape | None, pretrained: bool) -> Shelf:
    """`torchvision:resnet18`, a classifier of torchvision's, up to its last linear layer."""
    models = _installed("torchvision", vision.models, "export")
    names = models.list_models(module=models)
    if name not in names:
        raise _unknown("torchvision", name, names)
    weights = models.get_model_weights(name).DEFAULT
    usual = weights.transforms()
    shape = shape or (usual.crop_size[0], usual.crop_size[0], 3)
    if shape[2] != 3 and pretrained:
        raise UsageError(
            f"--backbone torchvision:{name} pretrained", expected="images of 3 channels", got=shape, hint="timm:NAME"
        )
    with _fetching(f"torchvision:{name}", weights.url):
        net = models.get_model(name, weights=weights if pretrained else None)
    mean, std = _for_channels(usual.mean, shape[2]), _for_channels(usual.std, shape[2])
    return Shelf(
        cut_at_features(_without_side_classifiers(net)), shape, mean, std, weights.name if pretrained else "", ""
    )


def _without_side_classifiers(net: nn.Module) -> nn.Module:
    """GoogLeNet and Inception without the classifiers that they have on the way, where they train, in place."""
    if getattr(net, "aux_logits", False):
        net.aux_logits = False
        for name in {"aux1", "aux2", "AuxLogits"} & {name for name, _ in net.named_children()}:
            setattr(net, name, None)
    return net


LIBRARIES: dict[str, Callable[[str, Shape | None, bool], Shelf]] = dict(
    zip(LIBRARY_NAMES, (_of_timm, _of_torchvision, _of_hub), strict=True)
)


def cut_at_features(net: nn.Module) -> nn.Module:
    """The network up to its last linear layer, in place; SqueezeNet, which has none, up to its average over the plane.

    Raises:
        ExportError: when there is neither.
    """
    linear = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    if linear:
        parent, _, leaf = linear[-1].rpartition(".")
        setattr(net.get_submodule(parent), leaf, nn.Identity())
    elif hasattr(net, "classifier"):
        net.classifier = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    else:
        raise ExportError("the backbone cannot be cut at its features", expected="a last linear layer", got="none")
    return net


def _by_timm(timm: ModuleType, label: str, name: str, shape: Shape | None, pretrained: bool) -> Shelf:
    """A network that timm builds. One whose size is fixed (a vision transformer) is built for the size asked for."""
    with _hub_within_reach(label), _quiet_timm():
        probe = _created(timm, label, name, False, {})
        config = probe.pretrained_cfg
        usual = timm.data.resolve_model_data_config(probe)
        channels, height, width = usual["input_size"]
        shape = shape or (height, width, channels)
        options: dict[str, Any] = {"in_chans": shape[2]}
        if config.get("fixed_input_size") and shape[:2] != (height, width):
            options["img_size"] = shape[:2]
        net = _created(timm, label, name, pretrained, options)
    weights = str(config.get("tag") or "pretrained") if pretrained else ""
    mean, std = _for_channels(usual["mean"], shape[2]), _for_channels(usual["std"], shape[2])
    return Shelf(net, shape, mean, std, weights, str(config.get("license") or ""))


def _created(timm: ModuleType, label: str, name: str, pretrained: bool, options: dict[str, Any]) -> nn.Module:
    try:
        return timm.create_model(name, pretrained=pretrained, num_classes=0, **options)
    except OSError:
        raise
    except Exception as error:  # a stranger's code and files may raise anything
        raise ExportError(
            f"--backbone {label}", expected="a network that timm can build", got=f"{type(error).__name__}: {error}"
        ) from None


@contextmanager
def _hub_within_reach(label: str) -> Iterator[None]:
    """Within the block, the hub is used; only the cache if the hub does not answer."""
    constants = importlib.import_module("huggingface_hub.constants")
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not _answers(constants.ENDPOINT)
    try:
        with _fetching(label, constants.ENDPOINT):
            yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def _fetching(label: str, source: str) -> Iterator[None]:
    """A download that ends: with the file, or with one line.

    Raises:
        DownloadError: the weights are not in the cache, and cannot be fetched.
    """
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_STALLED_S)
    try:
        yield
    except (OSError, RuntimeError) as error:  # a hash that is wrong is a RuntimeError of torch's
        raise DownloadError(
            f"--backbone {label} cannot be fetched",
            expected=f"an answer of {source}, or the file in the cache",
            got=f"{type(error).__name__}: {error}",
            hint="once with a network, or --weights FILE",
        ) from None
    finally:
        socket.setdefaulttimeout(before)


def _answers(endpoint: str) -> bool:
    """Whether the endpoint gives any answer, through a proxy if the environment names one."""
    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=_PATIENCE_S):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return error.code < 500  # a gateway's answer for a host that it does not reach
    except (OSError, ValueError):
        return False


def _timm() -> ModuleType:
    vision.make_importable()  # timm imports torchvision
    return _installed("timm", lambda: importlib.import_module("timm"), "timm")


def _installed(package: str, load: Callable[[], ModuleType], extra: str) -> ModuleType:
    try:
        return load()
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--backbone {package}:…",
            expected=f"the package {package}",
            got=f"no module {error.name}",
            hint=install_command(extra),
        ) from None


@contextmanager
def _quiet_timm() -> Iterator[None]:
    """Within the block, timm logs nothing: an error is raised anyway, and is reported once."""
    loggers = [logging.getLogger(name) for name in ("timm", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _for_channels(values: Any, channels: int) -> tuple[float, ...]:
    """Values per channel. For another number of channels, each is the mean over the known channels."""
    per_channel = tuple(float(value) for value in values)
    return per_channel if len(per_channel) == channels else (sum(per_channel) / len(per_channel),) * channels


def _unknown(library: str, name: str, names: list[str]) -> UsageError:
    return UsageError(
        "--backbone", expected=f"a network of {library}", got=f"{library}:{name}", hint=near_names(name, names)
    )


def _no_weights(label: str, tags: list[str]) -> UsageError:
    hint = f"one of {', '.join(tags[:4])}" if tags else "another network"
    return UsageError(f"--backbone {label}", expected="pretrained weights of that name", got="none in timm", hint=hint)

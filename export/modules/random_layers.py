"""The layers of a network that draw random numbers while it trains: found by name, and switched off.

An ONNX graph that draws random numbers cannot be compared with torch, so a training step has none. Three kinds are
known:

- modules that drop something (dropout, torchvision's StochasticDepth, timm's DropPath);
- attention that drops out at a rate it holds;
- networks that read a rate of their own in `forward`: `drop_rate` (DenseNet, timm's heads), or the `drop_connect_rate`
  of the EfficientNet packages, which lies in a named tuple.

Other kinds are not found here. Recording the step then ends at the operator that draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["chance_of", "switch_off"]

_MODULES = ("StochasticDepth", "DropPath", "DropBlock2d")  # known by name: neither torchvision nor timm need be there
_RATES = ("drop_rate", "dropout_rate", "drop_prob", "drop_path_rate", "drop_connect_rate", "attn_drop_rate")


def chance_of(net: nn.Module) -> tuple[str, ...]:
    """The names of the random layers and rates of a network while it trains, each once: `Dropout`, …"""
    names = [_name(module) for module in net.modules() if _drops(module)]
    names += [rate for module in net.modules() if not _drops(module) for rate, _ in _rates(module)]
    return tuple(sorted(set(names)))


def switch_off(net: nn.Module) -> nn.Module:
    """Switch random layers off, in place: modules are put into inference mode, rates are set to zero."""
    for module in net.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) or type(module).__name__ in _MODULES:
            module.eval()
        elif "Attention" in type(module).__name__:  # drops out by a number it holds, not by a module
            module.training = False
        for rate, holder in list(_rates(module)):
            if holder is None:
                setattr(module, rate, 0.0)
            else:
                setattr(module, holder, getattr(module, holder)._replace(**{rate: 0.0}))
    return net


def _drops(module: nn.Module) -> bool:
    """Whether it is a module that drops, and at a rate above zero."""
    is_dropout = isinstance(module, nn.modules.dropout._DropoutNd) or type(module).__name__ in _MODULES
    return is_dropout and any(_above_zero(getattr(module, name, None)) for name in ("p", "drop_prob"))


def _name(module: nn.Module) -> str:
    return type(module).__name__


def _rates(module: nn.Module) -> Iterator[tuple[str, str | None]]:
    """The rates above zero that a module holds: the name of each, and of the named tuple that it lies in, or None."""
    if type(module).__name__ in _MODULES:
        return
    for name, value in vars(module).items():
        if name in _RATES and _above_zero(value):
            yield name, None
        for rate in _RATES if hasattr(value, "_replace") and hasattr(value, "_fields") else ():
            if _above_zero(getattr(value, rate, None)):
                yield rate, name


def _above_zero(value: Any) -> bool:
    return isinstance(value, float) and value > 0.0

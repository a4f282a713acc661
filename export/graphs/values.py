"""A tensor of a trace, and under which names, in which order and in how many pieces the graph holds it.

Orders are told in export/operators/translation.py. Further things keep large activations cheap
(docs/decisions/170):

    runs      a large activation is several, one for each run of its channels, so that what is done to one run, one
              operator after another, stays in the processor's cache
    blocks    of 16 channels, (B, C/16, H, W, 16), for the operators of the wheel protofleet-kernels
    a factor  a number per channel that the values still have to be multiplied by: a gradient on its way to a
              convolution leaves that to the convolution's small kernel
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

__all__ = ["Blocks", "ChannelMajor", "Form", "Meta", "Rows", "Value", "as_values"]


@dataclass(frozen=True)
class Meta:
    """Shape and type of a traced tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Value:
    """A tensor of the trace and the names under which the graph holds it.

    Attributes:
        plain, channel_major, rows: its names in these orders, as far as they were asked for.
        fill: every element is this number: broadcasting may use a scalar.
        runs: its pieces along the channels, where it is held in runs.
        scaled: it is this number times that tensor.
        blocks: its name in blocks of channels.
        pending: makes it, where it is only made when it is asked for.
        masked: it is this gradient where that result of an activation let it through; 1 for ReLU, 6 for ReLU6.
        unscaled, factor: rows (1, C, B·H·W), and by what (C,) they are still to be multiplied.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    plain: str | None = None
    channel_major: str | None = None
    rows: str | None = None
    fill: float | None = field(default=None)
    runs: tuple[Value, ...] = ()
    unscaled: str | None = None
    factor: str | None = None
    scaled: tuple[float, Value] | None = None
    blocks: str | None = None
    pending: Callable[[], None] | None = None
    masked: tuple[Value, Value, int] | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def is_in_rows(self) -> bool:
        """Whether nothing has to be done to have its rows, or something that is done to rows."""
        return self.rows is not None or self.unscaled is not None or bool(self.runs)

    @property
    def is_swapped(self) -> bool:
        """Whether it is held channel-major and not in torch's own order."""
        if self.runs:
            return self.plain is None and len(self.shape) == 4 and self.shape[1] != 1
        return self.plain is None and (self.channel_major or self.rows or self.unscaled) is not None


class ChannelMajor(str):
    """The name of a result that is in channel-major order, (C, B, H, W)."""


class Blocks(str):
    """The name of a result in blocks of 16 channels, (B, C/16, H, W, 16)."""


class Rows(str):
    """The name of a result that is channel-major without its planes, (1, C, B·H·W)."""


Form = type[str] | type[ChannelMajor] | type[Rows] | type[Blocks]


def as_values(result: Any, meta: Any) -> Any:
    """What a translation returned, as values; `meta` is the node's, a tuple where it has several results."""
    if isinstance(meta, tuple):
        return tuple(None if r is None else as_values(r, m) for r, m in zip(result, meta, strict=True))
    if isinstance(result, Value):
        return result
    if isinstance(result, ChannelMajor):
        return Value(meta.shape, meta.dtype, channel_major=str(result))
    if isinstance(result, Blocks):
        return Value(meta.shape, meta.dtype, blocks=str(result))
    if isinstance(result, Rows):
        return Value(meta.shape, meta.dtype, rows=str(result))
    return Value(meta.shape, meta.dtype, plain=result)

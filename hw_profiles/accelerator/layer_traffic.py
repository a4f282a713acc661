"""What of a layer crosses the DMA of an array, and how long that takes.

- A product's operands come from DDR and its results go there, as `memory_system` says. A convolution's operand is the
  product's: each window is read. Of the layer's tensors the two largest that are read and the largest that is written
  are the products' own; others (a bias, its gradient) are moved before and after, while nothing computes.
- A layer without products passes by the special unit: in parts that fit half a buffer, read, computed and written
  side by side, by the recurrence of `memory_system`.

Nothing stays on the chip from one layer to the next: results of the array lie in banks by column, operands in banks by
row, and the DMA is the only way from one to the other. A view moves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from protofleet.hw_profiles.accelerator.memory_timing import Lanes, Streams, run
from protofleet.hw_profiles.workload.model import Layer, Workload

__all__ = ["Stream", "Traffic", "bytes_beside", "stream_cycles"]


@dataclass(frozen=True)
class Traffic:
    """Bytes between DDR and the chip for one layer; `spilled` are partial sums, out and back."""

    read: int = 0
    written: int = 0
    spilled: int = 0

    @property
    def total(self) -> int:
        """All bytes that cross the pins."""
        return self.read + self.written + self.spilled


@dataclass(frozen=True)
class Stream:
    """A layer's tensors on their way past the special unit: bytes, and the unit's cycles; `half` is what a part has."""

    read: int
    written: int
    unit_cycles: int
    half: int
    rate: Fraction


def bytes_beside(workload: Workload, float_bytes: int) -> list[tuple[int, int]]:
    """Of each layer, in order, bytes read and written beside its products' own tensors."""
    return [_beside(layer, workload, float_bytes) for layer in workload.layers]


def _beside(layer: Layer, workload: Workload, float_bytes: int) -> tuple[int, int]:
    if layer.kind == "view":
        return 0, 0
    reads, writes = (
        sorted((workload.tensors[name].nbytes(float_bytes) for name in names), reverse=True)
        for names in (layer.reads, layer.writes)
    )
    return (sum(reads[2:]), sum(writes[1:])) if layer.gemms else (sum(reads), sum(writes))


def stream_cycles(streams: Sequence[Stream]) -> NDArray[np.int64]:
    """Cycles of each, (N,), from the first transfer to the last; 0 for what neither moves nor computes."""
    idle = np.array([not (each.read or each.written or each.unit_cycles) for each in streams], dtype=np.bool_)
    if not streams:
        return np.zeros(0, dtype=np.int64)
    read, written, cycles, half = (
        np.array([getattr(each, name) for each in streams], dtype=np.int64)
        for name in ("read", "written", "unit_cycles", "half")
    )
    parts = np.maximum(-(-np.maximum(read, written) // np.maximum(half, 1)), 1)
    one, no = np.ones_like(parts), np.zeros_like(idle)
    lanes = Lanes(
        tile=one,
        size=-(-read // parts),
        tile_2=one,
        size_2=-(-written // parts),
        length=-(-cycles // parts),
        chunk=one,
        chunks=parts,
        block=one,
        blocks=one,
        groups=one,
        rows=one,
        skew=one,
        resident=no,
        spills=no,
        operand_bytes=one,
        result_bytes=one,
        rate=np.array([each.rate.numerator for each in streams], dtype=np.int64),
        per=np.array([each.rate.denominator for each in streams], dtype=np.int64),
    )
    return np.where(idle, 0, run(Streams, lanes)[1])

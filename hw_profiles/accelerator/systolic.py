"""Cycles of a matrix product on a systolic array, in closed form.

A product of (M, K) by (K, N) on an array of `rows` x `cols` multiply-accumulate cells is done in F *folds*, each of
which fills the array, streams operands through it and drains it in P cycles. What stays in the cells during a fold
names the dataflow; `dataflows.py` says F and P of each.

Folds follow each other without overlap, and the first
cycle is number 0, so the last cycle, which is what the published simulator SCALE-Sim 3.0.0 reports, is F*P - 1.
A partly filled fold costs as much as a full one.

`sram_traffic` counts what the array takes from its on-chip buffers: a streamed operand is read again for every fold
that the other operand is cut into, a stationary one once. `map_gemm` puts a layer's products on the array: many small
products of one depthwise layer either one after the other (`per-channel`, as SCALE-Sim does) or several side by side
as one block-diagonal product (`packed`). See docs/hardware.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from protofleet.contract.errors import UsageError
from protofleet.contract.names import named
from protofleet.hw_profiles.accelerator.dataflows import DATAFLOWS, Dataflow
from protofleet.hw_profiles.workload.model import Gemm

__all__ = ["DEPTHWISE", "Depthwise", "Placed", "gemm_cycles", "map_gemm", "sram_traffic"]

Depthwise = Literal["per-channel", "packed"]


@dataclass(frozen=True)
class _Channels:
    """How the products of a depthwise layer's channels share the array.

    Attributes:
        words: for a person.
        most: how many lie side by side at most, of a product whose channels can, by rows and columns.
    """

    words: str
    most: Callable[[int, int], int]


DEPTHWISE: Mapping[Depthwise, _Channels] = MappingProxyType(
    {
        "per-channel": _Channels("one channel after the other, as SCALE-Sim runs it", lambda rows, cols: 1),
        "packed": _Channels(
            "as many channels side by side, as one block-diagonal product, as take the fewest cycles", max
        ),
    }
)


def gemm_cycles(m: int, n: int, k: int, *, rows: int = 32, cols: int = 64, dataflow: str = "os") -> int:
    """Compute cycles of (M, K) times (K, N) on a rows x cols array, as SCALE-Sim 3.0.0 counts them.

    Memory stalls are not in it: operands are taken to arrive in time.

    Args:
        m: rows of the first operand; for a convolution B * OH * OW.
        n: columns of the second operand; for a convolution C_out.
        k: the shared dimension; for a convolution kh * kw * C_in.
        rows, cols: the array's cells; the default is that of the profile fpga-vc707-32x64.
        dataflow: a name of `dataflows.DATAFLOWS`: `os`, `ws` or `is`.

    Returns:
        F*P - 1 cycles, a positive integer except for a single cell and a single product, where it is 0.

    Raises:
        UsageError: for a size that is not a positive integer, or an unknown dataflow.

    Source: docs/hardware.md; equal to SCALE-Sim 3.0.0.
    """
    folds, fold_cycles = _checked(m, n, k, rows, cols, dataflow).folds(m, n, k, rows, cols)
    return folds * fold_cycles - 1


def sram_traffic(
    m: int, n: int, k: int, *, rows: int = 32, cols: int = 64, dataflow: str = "os"
) -> tuple[int, int, int]:
    """Elements read of the first operand, read of the second, and written to the result, on-chip.

    In ws and is a result is written once per fold of K, as a partial sum.

    Raises:
        UsageError: as `gemm_cycles`.

    Source: docs/hardware.md.
    """
    return _checked(m, n, k, rows, cols, dataflow).sram_traffic(m, n, k, rows, cols)


@dataclass(frozen=True)
class Placed:
    """A layer's products as the array runs them: `count` equal products (m, k) by (k, n), one after the other.

    Attributes:
        cycles: of all of them, each counted as SCALE-Sim counts a layer.
        sram_reads, sram_writes: elements, on-chip.
        channels: how many of the layer's own products share one of these; 1 unless packed.
    """

    m: int
    n: int
    k: int
    count: int
    cycles: int
    sram_reads: int
    sram_writes: int
    channels: int = 1


@lru_cache(maxsize=65_536)
def map_gemm(
    gemm: Gemm, *, rows: int = 32, cols: int = 64, dataflow: str = "os", depthwise: Depthwise = "per-channel"
) -> Placed:
    """Put a layer's products on the array.

    `packed` lays c channels side by side, zeros off the diagonal, with the c that takes the fewest cycles: contraction
    c*k and width c*n where every channel has its own contraction, c*m by c*n where they share it.

    Raises:
        UsageError: as `gemm_cycles`, or for an unknown depthwise mapping.
    """
    most = named(DEPTHWISE, depthwise, "depthwise mapping").most(rows, cols)
    limit = min(gemm.count, most) if gemm.diagonal else 1
    return min((_place(gemm, c, rows, cols, dataflow) for c in range(1, max(limit, 1) + 1)), key=lambda p: p.cycles)


def _place(gemm: Gemm, channels: int, rows: int, cols: int, dataflow: str) -> Placed:
    m, n, k = gemm.m, gemm.n * channels, gemm.k
    m, k = (m, k * channels) if gemm.diagonal != "mn" else (m * channels, k)
    count = -(-gemm.count // channels)
    cycles = gemm_cycles(m, n, k, rows=rows, cols=cols, dataflow=dataflow)
    first, second, written = sram_traffic(m, n, k, rows=rows, cols=cols, dataflow=dataflow)
    return Placed(m, n, k, count, count * cycles, count * (first + second), count * written, channels)


def _checked(m: int, n: int, k: int, rows: int, cols: int, dataflow: str) -> Dataflow:
    """The dataflow of that name, for sizes that can be."""
    for name, size in {"m": m, "n": n, "k": k, "rows": rows, "cols": cols}.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"systolic array: {name}", expected="a positive integer", got=repr(size))
    return named(DATAFLOWS, dataflow, "dataflow")

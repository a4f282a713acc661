"""Dataflows of a systolic array, one class each, found by name in `DATAFLOWS`.

A dataflow is named after what stays in the cells during a fold. It says in how many folds a product is done and how
long one takes, and what the array reads and writes on-chip:

    os   the outputs accumulate in place   F = ceil(M/rows) * ceil(N/cols)   P = K + rows + cols - 2
    ws   the second operand stays          F = ceil(K/rows) * ceil(N/cols)   P = M + 2*rows + cols - 2
    is   the first operand stays           F = ceil(K/rows) * ceil(M/cols)   P = N + 2*rows + cols - 2

`rows + cols - 2` is the skew of operands that enter the array diagonally; the second `rows` of ws and is loads the
stationary operand, row by row, before the stream starts. A new one is a class here and its line in `DATAFLOWS`; behind
a DMA it also needs the order of its folds (`memory_system`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

__all__ = ["DATAFLOWS", "Dataflow"]


class Dataflow(Protocol):
    """What an array of `rows` x `cols` cells does with a product of (M, K) by (K, N)."""

    def folds(self, m: int, n: int, k: int, rows: int, cols: int) -> tuple[int, int]:
        """How many folds F, and the cycles P of each."""
        ...

    def sram_traffic(self, m: int, n: int, k: int, rows: int, cols: int) -> tuple[int, int, int]:
        """Elements read of the first operand, read of the second, and written to the result, on-chip."""
        ...


class OutputStationary:
    def folds(self, m: int, n: int, k: int, rows: int, cols: int) -> tuple[int, int]:
        return -(-m // rows) * -(-n // cols), k + rows + cols - 2

    def sram_traffic(self, m: int, n: int, k: int, rows: int, cols: int) -> tuple[int, int, int]:
        return m * k * -(-n // cols), k * n * -(-m // rows), m * n


class WeightStationary:
    def folds(self, m: int, n: int, k: int, rows: int, cols: int) -> tuple[int, int]:
        return -(-k // rows) * -(-n // cols), m + 2 * rows + cols - 2

    def sram_traffic(self, m: int, n: int, k: int, rows: int, cols: int) -> tuple[int, int, int]:
        return m * k * -(-n // cols), k * n, m * n * -(-k // rows)


class InputStationary:
    def folds(self, m: int, n: int, k: int, rows: int, cols: int) -> tuple[int, int]:
        return -(-k // rows) * -(-m // cols), n + 2 * rows + cols - 2

    def sram_traffic(self, m: int, n: int, k: int, rows: int, cols: int) -> tuple[int, int, int]:
        return m * k, k * n * -(-m // cols), m * n * -(-k // rows)


DATAFLOWS: Mapping[str, Dataflow] = MappingProxyType(
    {"os": OutputStationary(), "ws": WeightStationary(), "is": InputStationary()}
)

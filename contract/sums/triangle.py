"""Σ z zᵀ as its upper triangle: summed up block by block, packed, unpacked.

1. `add_products` adds a block's products in panels of columns, each one matrix product of what lies on and to the right
   of the diagonal: half of the full product's work, at BLAS's speed (benchmarks/heads/ffc_speed.py), and no second D ×
   D.
2. `pack_triangle` lays the rows end to end, from the diagonal rightwards; `unpack_triangle` is its inverse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["add_products", "pack_triangle", "row_slices", "triangle_width", "unpack_triangle"]

Float64 = NDArray[np.float64]
_PANEL = 256  # columns: what a panel's product takes beside the sum is 256 · D numbers


def add_products(upper: Float64, z: Float64) -> None:
    """Add zᵀ z of a block z (N, D) to `upper` (D, D), in place; what is below its panels of the diagonal stays 0."""
    width = len(upper)
    for start in range(0, width, _PANEL):
        end = min(start + _PANEL, width)
        upper[start:end, start:] += z[:, start:end].T @ z[:, start:]


def pack_triangle(matrix: ArrayLike) -> Float64:
    """The upper triangle of a symmetric (D, D) matrix, row by row: (D(D+1)/2,)."""
    full = np.asarray(matrix, dtype=np.float64)
    packed = np.empty(len(full) * (len(full) + 1) // 2)
    for row, span in enumerate(row_slices(len(full))):
        packed[span] = full[row, row:]
    return packed


def unpack_triangle(packed: Float64, width: int) -> Float64:
    """The symmetric (D, D) matrix of a packed upper triangle."""
    full = np.zeros((width, width))
    for row, span in enumerate(row_slices(width)):
        full[row, row:] = packed[span]
    for start in range(0, width, _PANEL):  # mirrored in blocks, each of which a cache holds
        end = min(start + _PANEL, width)
        full[end:, start:end] = full[start:end, end:].T
        full[start:end, start:end] += np.triu(full[start:end, start:end], 1).T
    return full


def row_slices(width: int) -> Iterator[slice]:
    """Where each row of a (D, D) matrix, from its diagonal on, stands in the packed triangle."""
    start = 0
    for row in range(width):
        yield slice(start, start + width - row)
        start += width - row


def triangle_width(numbers: int) -> int:
    """D of a triangle of D(D+1)/2 numbers; of any other length that of the largest that fits."""
    return (math.isqrt(8 * numbers + 1) - 1) // 2

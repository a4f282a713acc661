"""Numbers as 32-bit integers, in units that follow from the data: the bytes of float32, with a hundredth of its error.

    rows (K, D)      value = unit_k · n               unit_k = the largest magnitude of the row / (2³¹ − 1)
    triangle (D)     value = unit_i · unit_j · n      unit_i = √(A_ii / (2³¹ − 1))

In a sum of squares, no product is larger than its diagonal allows: |A_ij| ≤ √(A_ii A_jj). So n fits. Half a unit is
2⁻³² of that bound, while float32 rounds each number by up to 2⁻²⁵ of itself.

Sums with added noise do not keep the bound. All their units are then equal, from the largest magnitude.

Units travel as float64, n as int32 (docs/decisions/177).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.sums.triangle import row_slices, triangle_width

__all__ = ["STEPS", "row_values", "scaled_rows", "scaled_triangle", "triangle_values"]

Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]
STEPS = 2.0**31 - 1
_OF_ROUNDING = 1 + 1e-9


def scaled_rows(rows: NDArray[np.floating]) -> tuple[Float64, Int32]:
    """Units (K,) and integers (K, D) of finite rows (K, D)."""
    wide = np.asarray(rows, dtype=np.float64)
    units = np.abs(wide).max(axis=-1, initial=0.0) / STEPS
    return units, _integers(wide, units[:, None])


def row_values(units: NDArray[np.floating], integers: Int32) -> Float64:
    """(K, D) of what `scaled_rows` gave."""
    return np.asarray(integers * units.astype(np.float64)[:, None])


def scaled_triangle(packed: NDArray[np.floating]) -> tuple[Float64, Int32]:
    """Units (D,) and integers (D(D+1)/2,) of a packed triangle of finite numbers."""
    wide = np.asarray(packed, dtype=np.float64)
    width = triangle_width(wide.size)
    diagonal = np.array([wide[span.start] for span in row_slices(width)])
    units = np.sqrt(np.maximum(diagonal, 0.0) / STEPS)
    if not all((np.abs(wide[w]) <= STEPS * units[i] * units[i:] * _OF_ROUNDING).all() for i, w in _rows(width)):
        units = np.full(width, np.sqrt(np.abs(wide).max(initial=0.0) / STEPS))
    integers = np.empty(wide.size, np.int32)
    for row, span in _rows(width):
        integers[span] = _integers(wide[span], units[row] * units[row:])
    return units, integers


def triangle_values(units: NDArray[np.floating], integers: Int32) -> Float64:
    """(D(D+1)/2,) of what `scaled_triangle` gave, or of whatever else came, which may overflow."""
    wide, values = units.astype(np.float64), np.empty(integers.size)
    for row, span in _rows(len(wide)):
        np.multiply(wide[row] * wide[row:], integers[span], out=values[span])
    return values


def _rows(width: int) -> list[tuple[int, slice]]:
    return list(enumerate(row_slices(width)))


def _integers(values: Float64, units: Float64) -> Int32:
    counted = np.rint(np.divide(values, units, out=np.zeros_like(values), where=units > 0))
    return np.clip(counted, -STEPS, STEPS).astype(np.int32)

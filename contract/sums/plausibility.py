"""The bounds of plausible class rows. The aggregator checks contributions with them, and a device a global state.

A forged row can be refused only because it contradicts a known fact:

- No network that trains in float32 has features of norm `LARGEST_NORM` or more: beside them, a step of training is
  smaller than the rounding. Where there is nothing to compare with, this is the only bound.
- Where the usual norm is known, a row may exceed it by a factor. The factors are wide, because training changes
  lengths and backbones differ. docs/decisions/076 has the factors and the reasons.
- Where the bundle declares a method's noise, the noise says how long its rows can be
  (`contract/privacy/mechanism.py`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["INT8_STEPS", "LARGEST_NORM", "improbable", "largest_norm", "row_norms", "usual_norm"]

LARGEST_NORM = 1e6
INT8_STEPS = 254.0  # half a step of int8 is this part of the row's largest number


def row_norms(rows: NDArray[np.floating]) -> NDArray[np.float64]:
    """(K,) the norms of rows (K, D); infinity or NaN where a number is."""
    wide = rows.astype(np.float64, copy=False)
    return np.asarray(np.sqrt(np.einsum("kd,kd->k", wide, wide)), dtype=np.float64)


def largest_norm(rows: NDArray[np.floating]) -> float:
    """The norm of the longest of rows (K, D); 0 when there is none, infinity or NaN when a number is."""
    return float(row_norms(rows).max(initial=0.0))


def improbable(soft: NDArray[np.floating], slack: NDArray[np.floating]) -> NDArray[np.bool_]:
    """(K,) which of mean soft predictions (K, C) are no probabilities: not from 0 to 1, or not summing to 1.

    Args:
        slack: (K,) that noise may have added to a number; what float16 and int8 round is allowed for beside it.
    """
    rows = soft.astype(np.float64)
    if not rows.size:
        return np.zeros(len(rows), dtype=bool)
    step = 1e-3 + np.abs(rows).max(axis=1) / INT8_STEPS  # (K,)
    classes = rows.shape[1]
    beyond = np.maximum(-rows.min(axis=1), rows.max(axis=1) - 1.0) > step + slack
    off = np.abs(rows.sum(axis=1) - 1.0) > classes * step + np.sqrt(classes) * slack
    return np.asarray(beyond | off, dtype=bool)


def usual_norm(norms: list[float]) -> float:
    """The middle one of the norms above zero, the lower of two middle ones; 0 when there is none.

    Liars cannot raise it while fewer than half of those who give one lie.
    """
    above = sorted(norm for norm in norms if norm > 0)
    return above[(len(above) - 1) // 2] if above else 0.0

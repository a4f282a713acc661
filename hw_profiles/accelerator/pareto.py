"""The Pareto front: of several things that are all to be small, what no other beats.

A row beats another where it is nowhere larger and somewhere smaller. Equal rows beat neither each other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["pareto_front"]


def pareto_front(values: ArrayLike) -> NDArray[np.bool_]:
    """Which rows of (N, K) no other row beats, (N,).

    Rows are taken by the sum of their ranks: what beats a row has a smaller one, so each meets the front alone.
    """
    rows = np.asarray(values, dtype=np.float64)
    on_front = np.zeros(len(rows), dtype=np.bool_)
    if not len(rows):
        return on_front
    order = np.argsort(_dense_ranks(rows).sum(axis=1), kind="stable")
    front = np.empty((0, rows.shape[1]))
    for index in order:
        row = rows[index]
        no_larger = (front <= row).all(axis=1)
        if not (no_larger & (front < row).any(axis=1)).any():
            on_front[index] = True
            front = np.vstack((front, row))
    return on_front


def _dense_ranks(rows: NDArray[np.float64]) -> NDArray[np.int64]:
    """Each column's values as 0, 1, 2, …, equal ones alike: sums of these are exact."""
    return np.stack([np.unique(column, return_inverse=True)[1].reshape(-1) for column in rows.T], axis=1)

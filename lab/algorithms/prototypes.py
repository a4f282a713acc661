"""Shared by the algorithms that send class rows beside weights: guides for clients, missing rows, and byte counts.

Sums and means are `protofleet.contract.sums.statistics`, merged by `protofleet.contract.sums.merge_rules`. So the lab
computes what an aggregator would. Bytes are those of the tensors as float32, without an envelope.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protofleet.contract.heads.answers import nearest_answer
from protofleet.contract.sums.statistics import ClassMeans
from protofleet.lab.training.local_training import Guide

__all__ = ["as_float", "guide", "nearest", "newer_rows", "row_bytes"]

Table = NDArray[np.float64]


def guide(means: ClassMeans, soft: Table | None = None) -> Guide | None:
    """Class means, and soft predictions if any, as a guide for clients; None before the first."""
    if not means.present.any():
        return None
    tables = torch.zeros(means.classes, means.classes) if soft is None else as_float(soft)
    return Guide(as_float(means.means), as_float(means.present), tables)


def nearest(means: ClassMeans, features: NDArray[np.float32]) -> dict[str, NDArray[np.int64]]:
    """Answers by the nearest class mean; empty before the first mean."""
    return {"prototype": nearest_answer(means.means, means.present)(features)} if means.present.any() else {}


def newer_rows(newer: Table, before: Table, present: NDArray[np.bool_]) -> Table:
    """The newer rows of the classes that are present. A class that no client sent keeps its row of before."""
    return np.where(present.reshape(-1, *[1] * (newer.ndim - 1)), newer, before)


def as_float(values: NDArray[np.generic]) -> Tensor:
    """The same numbers as a float32 tensor."""
    return torch.from_numpy(values.astype(np.float32))


def row_bytes(present: NDArray[np.bool_], *widths: int) -> int:
    """Bytes of the rows of the classes that are present, and their counts."""
    return 4 * int(present.sum()) * (sum(widths) + 1)

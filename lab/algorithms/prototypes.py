"""What algorithms that send class rows beside weights share: rows as a guide for clients, rows that nobody sent, bytes.

Sums and means are `contract.statistics`, merged by `contract.rules`: what the lab simulates of a method here is what
an aggregator would do. Bytes are those of the tensors as float32, without an envelope.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contract.answers import nearest_answer
from contract.statistics import ClassMeans
from lab.engine.local_training import Guide

__all__ = ["as_float", "guide", "nearest", "newer_rows", "row_bytes"]

Table = NDArray[np.float64]


def guide(means: ClassMeans, soft: Table | None = None) -> Guide | None:
    """Class means, and soft predictions where there are some, as clients take them; None before there is any."""
    if not means.present.any():
        return None
    tables = torch.zeros(means.classes, means.classes) if soft is None else as_float(soft)
    return Guide(as_float(means.means), as_float(means.present), tables)


def nearest(means: ClassMeans, features: NDArray[np.float32]) -> dict[str, NDArray[np.int64]]:
    """Answers by the nearest class mean; none before there is any."""
    return {"prototype": nearest_answer(means.means, means.present)(features)} if means.present.any() else {}


def newer_rows(found: Table, before: Table, here: NDArray[np.bool_]) -> Table:
    """Rows of `found` where a class is here; a class that nobody sent keeps what it had."""
    return np.where(here.reshape(-1, *[1] * (found.ndim - 1)), found, before)


def as_float(values: NDArray[np.generic]) -> Tensor:
    """The same numbers as a float32 tensor."""
    return torch.from_numpy(values.astype(np.float32))


def row_bytes(present: NDArray[np.bool_], *widths: int) -> int:
    """Bytes of the rows of the classes that are present, and their counts."""
    return 4 * int(present.sum()) * (sum(widths) + 1)

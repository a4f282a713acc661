"""How good the device's answers are, on test images that never trained anything.

A method has one or more ways of answering (`Method.answers`, `Method.shared_answers`), and each is measured: on all
test images, and on those of the classes that the device itself holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contract.answers import Answer
from edge_client.data import LocalData
from edge_client.extractor import Extractor

__all__ = ["Evaluation", "score", "summary"]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Accuracy as fractions, by who was asked about what.

    Attributes:
        all_classes: by way of answering, over all test images.
        own_classes: the same over the test images of the device's own classes; empty when there are none.
        confusion: by way of answering, (C, C) int64 over all test images: rows true, columns answered.
        samples: how many test images.
    """

    all_classes: Mapping[str, float]
    own_classes: Mapping[str, float]
    confusion: Mapping[str, NDArray[np.int64]]
    samples: int


def score(
    extractor: Extractor, answers: Mapping[str, Answer], test: LocalData, *, classes: int
) -> dict[str, NDArray[np.int64]]:
    """Confusion counts (C, C) of each way of answering, in one pass over the test images."""
    confusion = {name: np.zeros((classes, classes), np.int64) for name in answers}
    for rows, features in extractor.blocks(test.x):
        for name, answer in answers.items():
            np.add.at(confusion[name], (test.y[rows], answer(features)), 1)
    return confusion


def summary(confusion: Mapping[str, NDArray[np.int64]], own: NDArray[np.bool_]) -> Evaluation:
    """Accuracies from confusion counts; `own` (C,) says which classes the device holds."""
    return Evaluation(
        all_classes={name: _accuracy(counts) for name, counts in confusion.items() if counts.any()},
        own_classes={name: _accuracy(counts, own) for name, counts in confusion.items() if counts[own].any()},
        confusion=confusion,
        samples=max((int(counts.sum()) for counts in confusion.values()), default=0),
    )


def _accuracy(counts: NDArray[np.int64], rows: NDArray[np.bool_] | slice = slice(None)) -> float:
    return float(np.diag(counts)[rows].sum() / counts[rows].sum())

"""How good the device's answers are, on test images that never trained anything.

A method has one or more ways of answering (`Method.answers`, `Method.shared_answers`), and each is measured: on all
test images, and on those of the classes that the device itself holds. Of these figures `measured` picks the few that
are told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contract.accuracy import Accuracy
from contract.answers import Answer
from edge_client.data import LocalData
from edge_client.extractor import Extractor

__all__ = ["Evaluation", "in_words", "measured", "score", "summary"]


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


def measured(evaluation: Evaluation, way: str, *, shipped: float | None, alone: float | None) -> Accuracy | None:
    """The figures that a person is told and the fleet may know: of one way of answering, beside what others give.

    Args:
        way: the round's own.
        shipped, alone: see `contract.accuracy`.

    Returns:
        None where there is no such way yet: before the first global state of a method that answers by it alone.
    """
    if way not in evaluation.all_classes:
        return None
    return Accuracy(
        evaluation.samples, evaluation.all_classes[way], evaluation.own_classes.get(way), shipped=shipped, alone=alone
    )


def in_words(found: Accuracy, photos: str, personal: float | None = None) -> str:
    """One line for a person; `photos` says which they are, `personal` what a head of the device's own gets right."""
    line = f"{found.all_classes:.1%} right on {found.samples:,} {photos}"
    if found.own_classes is not None and found.own_classes != found.all_classes:
        line += f", {found.own_classes:.1%} on those of its own classes"
    beside = {"bundle as shipped": found.shipped, "alone": found.alone, "personal head": personal}
    told = ", ".join(f"{name} {share:.1%}" for name, share in beside.items() if share is not None)
    return line + (f" ({told})" if told else "")


def _accuracy(counts: NDArray[np.int64], rows: NDArray[np.bool_] | slice = slice(None)) -> float:
    return float(np.diag(counts)[rows].sum() / counts[rows].sum())

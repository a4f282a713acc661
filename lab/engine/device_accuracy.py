"""Accuracies of devices put together: their mean, each one's, and each class's over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from edge_client.evaluate import Evaluation
from lab.engine.tally import recalls

__all__ = ["class_accuracy", "each_accuracy", "mean_accuracy"]


def mean_accuracy(evaluations: Sequence[Evaluation]) -> tuple[dict[str, float], dict[str, float]]:
    """Accuracy on own classes and on all classes by way of answering: the mean over devices of each device's own."""
    means = []
    for part in ("own_classes", "all_classes"):
        tables = [getattr(evaluation, part) for evaluation in evaluations]
        ways = sorted({way for table in tables for way in table})
        means.append({way: float(np.mean([table[way] for table in tables if way in table])) for way in ways})
    return means[0], means[1]


def each_accuracy(evaluations: Sequence[Evaluation], parts: Mapping[str, str] | None = None) -> dict[str, list[float]]:
    """Each device's accuracy, by `part/way`.

    Args:
        parts: what an evaluation's parts are called here; their own names when None.
    """
    found: dict[str, list[float]] = {}
    for evaluation in evaluations:
        for part, name in (parts or {"own_classes": "own_classes", "all_classes": "all_classes"}).items():
            for way, value in getattr(evaluation, part).items():
                found.setdefault(f"{name}/{way}", []).append(value)
    return found


def class_accuracy(evaluations: Sequence[Evaluation]) -> dict[str, list[float | None]]:
    """Over all test images, by way of answering."""
    total: dict[str, NDArray[np.int64]] = {}
    for evaluation in evaluations:
        for way, counts in evaluation.confusion.items():
            total[way] = total.get(way, 0) + counts
    return {f"all_classes/{way}": recalls(np.diag(each), each.sum(axis=1)) for way, each in total.items()}

"""Accuracies over devices: their mean, the accuracy of each device, and that of each class over all devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from protofleet.edge_client.device.evaluation import Evaluation
from protofleet.lab.engine.tally import recalls

__all__ = ["class_accuracy", "each_accuracy", "mean_accuracy"]


def mean_accuracy(evaluations: Sequence[Evaluation]) -> tuple[dict[str, float], dict[str, float]]:
    """Mean accuracy over devices, on own classes and on all classes, by way of answering."""
    means = []
    for part in ("own_classes", "all_classes"):
        tables = [getattr(evaluation, part) for evaluation in evaluations]
        ways = sorted({way for table in tables for way in table})
        means.append({way: float(np.mean([table[way] for table in tables if way in table])) for way in ways})
    return means[0], means[1]


def each_accuracy(evaluations: Sequence[Evaluation], parts: Mapping[str, str] | None = None) -> dict[str, list[float]]:
    """Each device's accuracy, by `part/way`.

    Args:
        parts: names to use for the parts of an evaluation; None for their own names.
    """
    accuracies: dict[str, list[float]] = {}
    for evaluation in evaluations:
        for part, name in (parts or {"own_classes": "own_classes", "all_classes": "all_classes"}).items():
            for way, value in getattr(evaluation, part).items():
                accuracies.setdefault(f"{name}/{way}", []).append(value)
    return accuracies


def class_accuracy(evaluations: Sequence[Evaluation]) -> dict[str, list[float | None]]:
    """The share of right answers for each class over all devices, by way of answering."""
    total: dict[str, NDArray[np.int64]] = {}
    for evaluation in evaluations:
        for way, counts in evaluation.confusion.items():
            total[way] = total.get(way, 0) + counts
    return {
        f"all_classes/{way}": recalls(np.diag(confusion), confusion.sum(axis=1)) for way, confusion in total.items()
    }

"""Counts answers: the accuracy of each client and of each class, and the head's calibration error.

A `Tally` collects client by client, by part (`lab/engine/evaluation.py`) and way of answering. Tallies of several
processes add up.

The calibration error is that of Guo et al., ICML 2017. Answers are put into 15 bins of equal width by the probability
of the answered class. In each bin the error is the distance between mean probability and share of right answers. The
bins are weighted by their number of answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from protofleet.contract.heads.answers import softmax

__all__ = ["Tally", "calibration_error", "recalls"]

_BINS = 15


def calibration_error(logits: ArrayLike, truth: ArrayLike) -> float:
    """The expected calibration error, 0 to 1, of logits (N, C) against classes (N,); N is at least 1."""
    probabilities = softmax(np.asarray(logits, np.float64))
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == np.asarray(truth)
    bins = np.minimum((confidence * _BINS).astype(np.int64), _BINS - 1)
    apart = np.bincount(bins, right - confidence, minlength=_BINS)  # over each bin: n · (share right − mean confidence)
    return float(np.abs(apart).sum() / len(right))


def recalls(right: NDArray[np.int64], asked: NDArray[np.int64]) -> list[float | None]:
    """The share of right answers for each class (C,); None for a class without images."""
    return [float(r / n) if n else None for r, n in zip(right, asked, strict=True)]


@dataclass
class Tally:
    """The counted answers of clients.

    Attributes:
        values: each client's accuracy, by part and way.
        counts: by part/way, (2, C): images of each class with a right answer, and all images.
        errors: each client's calibration error, by part/way.
    """

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    counts: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    errors: dict[str, list[float]] = field(default_factory=dict)

    def add(self, part: str, way: str, answers: NDArray[np.int64], truth: NDArray[np.int64]) -> None:
        """Add one client's answers (N,) with the truth (N,). N = 0 adds nothing."""
        if not len(truth):
            return
        right = answers == truth
        self.values.setdefault(part, {}).setdefault(way, []).append(float(right.mean()))
        asked = np.bincount(truth)
        self._count(f"{part}/{way}", np.stack([np.bincount(truth[right], minlength=len(asked)), asked]))

    def add_error(self, part: str, way: str, logits: NDArray[np.floating], truth: NDArray[np.int64]) -> None:
        """Add one client's calibration error from logits (N, C). N = 0 adds nothing."""
        if len(truth):
            self.errors.setdefault(f"{part}/{way}", []).append(calibration_error(logits, truth))

    def extend(self, other: Tally) -> None:
        """Add the tally of further clients."""
        for part, table in other.values.items():
            for way, accuracies in table.items():
                self.values.setdefault(part, {}).setdefault(way, []).extend(accuracies)
        for name, counts in other.counts.items():
            self._count(name, counts)
        for name, errors in other.errors.items():
            self.errors.setdefault(name, []).extend(errors)

    def means(self, part: str) -> dict[str, float]:
        """Mean accuracy over clients in one part, by way of answering."""
        return {way: float(np.mean(accuracies)) for way, accuracies in self.values.get(part, {}).items()}

    def spread(self) -> dict[str, float]:
        """Standard deviation of the accuracy over clients, by part/way."""
        return {name: float(np.std(accuracies)) for name, accuracies in self.clients().items() if len(accuracies) > 1}

    def clients(self) -> dict[str, list[float]]:
        """Each client's accuracy, by part/way."""
        return {f"{part}/{way}": accuracies for part, table in self.values.items() for way, accuracies in table.items()}

    def per_class(self) -> dict[str, list[float | None]]:
        """The share of right answers for each class over all clients, by part/way."""
        return {name: recalls(right, asked) for name, (right, asked) in self.counts.items()}

    def calibration(self) -> dict[str, float]:
        """Mean calibration error over clients, by part/way."""
        return {name: float(np.mean(errors)) for name, errors in self.errors.items()}

    def _count(self, name: str, counts: NDArray[np.int64]) -> None:
        before = self.counts.get(name, np.zeros((2, 0), np.int64))
        total = np.zeros((2, max(before.shape[1], counts.shape[1])), np.int64)
        total[:, : before.shape[1]] += before
        total[:, : counts.shape[1]] += counts
        self.counts[name] = total

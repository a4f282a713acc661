"""Answers counted: each client's accuracy, each class's, and how far the head's confidence is from what it gets right.

A `Tally` is gathered client by client, by part (`lab/engine/evaluation.py`) and way of answering, and adds up over
processes. The calibration error is that of Guo et al., ICML 2017: answers in 15 bins of equal width by the probability
of the class that was answered, and in each the distance between mean probability and share of right ones, weighted by
how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from contract.answers import softmax

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
    """The share of each class's images (C,) that were named right; None for a class that nobody was asked about."""
    return [float(r / n) if n else None for r, n in zip(right, asked, strict=True)]


@dataclass
class Tally:
    """What clients answered.

    Attributes:
        values: each client's accuracy, by part and way.
        counts: by part/way, (2, C): images of each class that were named right, and all.
        errors: each client's calibration error, by part/way.
    """

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    counts: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    errors: dict[str, list[float]] = field(default_factory=dict)

    def add(self, part: str, way: str, found: NDArray[np.int64], truth: NDArray[np.int64]) -> None:
        """One client's answers (N,) and the truth (N,); none are no accuracy."""
        if not len(truth):
            return
        right = found == truth
        self.values.setdefault(part, {}).setdefault(way, []).append(float(right.mean()))
        asked = np.bincount(truth)
        self._count(f"{part}/{way}", np.stack([np.bincount(truth[right], minlength=len(asked)), asked]))

    def add_error(self, part: str, way: str, logits: NDArray[np.floating], truth: NDArray[np.int64]) -> None:
        """One client's calibration error from logits (N, C); none for N = 0."""
        if len(truth):
            self.errors.setdefault(f"{part}/{way}", []).append(calibration_error(logits, truth))

    def extend(self, other: Tally) -> None:
        """Those of further clients."""
        for part, table in other.values.items():
            for way, found in table.items():
                self.values.setdefault(part, {}).setdefault(way, []).extend(found)
        for name, counts in other.counts.items():
            self._count(name, counts)
        for name, errors in other.errors.items():
            self.errors.setdefault(name, []).extend(errors)

    def means(self, part: str) -> dict[str, float]:
        """By way of answering."""
        return {way: float(np.mean(found)) for way, found in self.values.get(part, {}).items()}

    def spread(self) -> dict[str, float]:
        """By part and way, over clients."""
        return {name: float(np.std(found)) for name, found in self.clients().items() if len(found) > 1}

    def clients(self) -> dict[str, list[float]]:
        """Each client's accuracy, by part/way."""
        return {f"{part}/{way}": found for part, table in self.values.items() for way, found in table.items()}

    def per_class(self) -> dict[str, list[float | None]]:
        """The share of each class's images that were named right, over all clients, by part/way."""
        return {name: recalls(right, asked) for name, (right, asked) in self.counts.items()}

    def calibration(self) -> dict[str, float]:
        """Mean over clients, by part/way."""
        return {name: float(np.mean(found)) for name, found in self.errors.items()}

    def _count(self, name: str, counts: NDArray[np.int64]) -> None:
        before = self.counts.get(name, np.zeros((2, 0), np.int64))
        total = np.zeros((2, max(before.shape[1], counts.shape[1])), np.int64)
        total[:, : before.shape[1]] += before
        total[:, : counts.shape[1]] += counts
        self.counts[name] = total

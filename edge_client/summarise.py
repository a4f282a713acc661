"""From local samples to the one thing that may leave the device: a statistic.

What each method sums is in the methods table (`contract/methods.py`): FedProto the class means of the device's own
features (eq. 1), FFC the Gram and cross sums of unit features of the extractor that all devices share (SphereFed,
eq. 10). Statistics merge by addition, so they are summed block by block. Classes with fewer than `min_samples`
local examples are withheld before anything is summed: DESIGN section 2.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from contract.errors import MethodError
from contract.methods import Method
from contract.sphere import unit_rows
from contract.statistics import ClassMeans, FeatureGram, Statistic, shareable
from edge_client.data import LocalData
from edge_client.extractor import Extractor

__all__ = ["class_means", "method_features", "summarise", "withhold"]


def method_features(method: Method, features: NDArray[np.float32]) -> NDArray[np.float64]:
    """Features (N, D) as the method summarises and classifies them: float64, on the unit sphere where it says so."""
    wide = features.astype(np.float64)
    return np.asarray(unit_rows(wide), dtype=np.float64) if method.unit_features else wide


def summarise(method: Method, extractor: Extractor, data: LocalData, *, classes: int, min_samples: int) -> Statistic:
    """The method's statistic of `data` for a fleet of C classes.

    Args:
        min_samples: classes with fewer local examples are left out; 1 leaves none out.

    Raises:
        MethodError: when the method sends nothing.
    """
    if method.statistic is None:
        raise MethodError(f"{method.name} sends no statistic", expected="a method that does", got=method.name)
    kind = ClassMeans if method.statistic == "class-means" else FeatureGram
    total: Statistic = kind.zero(classes, extractor.width)
    keep = shareable(data.y, classes, min_samples)  # (N,)
    for rows, features in extractor.blocks(data.x):
        kept = keep[rows]
        if kept.any():
            part = kind.of(method_features(method, features[kept]), data.y[rows][kept], classes)
            total = total.merge(part)  # type: ignore[arg-type]  # both are of one kind
    return total


def class_means(extractor: Extractor, data: LocalData, *, classes: int) -> ClassMeans:
    """The class means of `data` as the extractor gives them, nothing withheld: for use on the device itself."""
    total = ClassMeans.zero(classes, extractor.width)
    for rows, features in extractor.blocks(data.x):
        total = total.merge(ClassMeans.of(features, data.y[rows], classes))
    return total


def withhold(means: ClassMeans, min_samples: int) -> ClassMeans:
    """The part of class means that may leave the device: classes with at least `min_samples` examples."""
    keep = means.counts >= max(min_samples, 1)
    return ClassMeans(np.where(keep[:, None], means.sums, 0.0), np.where(keep, means.counts, 0))

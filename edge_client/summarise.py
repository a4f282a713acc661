"""From local samples to the one thing that may leave the device: a statistic.

What each method sums is in the methods table (`contract/methods.py`): FedProto and FedPR the class means of the
device's own features (eq. 1), FedHKD those and the mean soft predictions of its head, FFC the Gram and cross sums of
unit features of the extractor that all devices share (SphereFed, eq. 10), projected where that is agreed. Statistics
merge by addition, so they are summed block by block. Classes with fewer than `min_samples` local examples are withheld.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from contract.methods import Calibration
from contract.sphere import projection, unit_rows
from contract.statistics import ClassMeans, FeatureGram, HyperKnowledge, shareable
from edge_client.data import LocalData
from edge_client.evaluate import linear_logits
from edge_client.extractor import Extractor
from edge_client.privacy import Mechanism

__all__ = ["calibrated_features", "class_means", "feature_gram", "hyper_knowledge", "withhold"]


def feature_gram(
    extractor: Extractor, data: LocalData, settings: Calibration, *, classes: int, min_samples: int = 1
) -> FeatureGram:
    """FFC's sums of the unit features of `data`, projected where the settings say so.

    Args:
        min_samples: classes with fewer local examples are left out; 1 leaves none out.
    """
    total = FeatureGram.zero(classes, settings.width(extractor.width))
    keep = shareable(data.y, classes, min_samples)  # (N,)
    for rows, features in extractor.blocks(data.x):
        kept = keep[rows]
        if kept.any():
            z = calibrated_features(features[kept], settings)
            total = total.merge(FeatureGram.of(z, data.y[rows][kept], classes))
    return total


def calibrated_features(features: NDArray[np.floating], settings: Calibration) -> NDArray[np.float64]:
    """Features (N, D) as FFC sums and classifies them: float64 on the unit sphere, projected to (N, D') if agreed."""
    z = np.asarray(unit_rows(features.astype(np.float64)), dtype=np.float64)
    if not settings.project:
        return z
    return np.asarray(z @ projection(z.shape[1], settings.project, settings.project_seed), dtype=np.float64)


def hyper_knowledge(
    extractor: Extractor,
    head: tuple[NDArray[np.floating], NDArray[np.floating] | None],
    data: LocalData,
    mechanism: Mechanism,
    *,
    classes: int,
    temperature: float,
    min_samples: int,
) -> HyperKnowledge:
    """FedHKD's sums of `data`: features, clipped where noise is to come, and softmax(logits / T) of the head.

    Args:
        head: weight (C, D) and bias (C,).
    """
    total = HyperKnowledge.zero(classes, extractor.width)
    keep = shareable(data.y, classes, min_samples)  # (N,)
    for rows, features in extractor.blocks(data.x):
        kept = keep[rows]
        if kept.any():
            soft = _softmax(linear_logits(features[kept], *head) / temperature)
            part = HyperKnowledge.of(mechanism.clipped(features[kept]), soft, data.y[rows][kept], classes)
            total = total.merge(part)
    return total


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=1, keepdims=True), dtype=np.float64)


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

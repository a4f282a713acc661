"""How the tail of a pretrained network starts to train: with what the class means of its frozen features know already.

A head that starts at random sends large gradients into the tail, while it learns what class means give at once. So
before a device's first round its head becomes the nearest class mean,

    logit_j = −(s/2)·‖z − μ_j‖² + (s/2)·‖z − m‖² = s·(μ_j − m)·z − (s/2)·(‖μ_j‖² − ‖m‖²),    m the mean of all μ_j.

The scale s is the one, of a few, that gives the samples' labels the highest likelihood. For this, each sample is left
out of its own class's mean: its distance is then n/(n − 1) times as long. A class without samples gets the lowest
offset of the other classes. A prototype that no fleet has sent yet starts at the class mean, too (`anchored`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from protofleet.edge_client.data import LocalData
from protofleet.edge_client.training.extractor import Extractor
from protofleet.edge_client.training.local_samples import OwnMeans
from protofleet.edge_client.training.trainer import Weights

__all__ = ["anchored", "class_mean_head"]

Float32 = NDArray[np.float32]
_SCALES = 2.0 ** np.arange(-4, 13)  # times 1 over the mean squared distance within classes


def class_mean_head(extractor: Extractor, data: LocalData, means: OwnMeans) -> dict[str, Float32]:
    """A head that answers with the nearest class mean: `head.weight` (C, D) and `head.bias` (C,).

    Args:
        extractor: of the frozen features that the means are of.
        data: at least one labelled sample.
    """
    mu, present = means.classes.means, means.classes.present  # (C, D), (C,)
    middle = mu[present].mean(axis=0)  # (D,)
    weight = np.where(present[:, None], mu - middle, 0.0)
    bias = -0.5 * ((mu**2).sum(axis=1) - (middle**2).sum())
    bias = np.where(present, bias, bias[present].min())
    spread = float(np.average(means.spread[present], weights=means.classes.counts[present]))
    scales = np.asarray(_SCALES / spread if spread > 0 else np.ones(1), dtype=np.float64)
    scale = scales[_surprise(extractor, data, means, weight, bias, scales).argmin()]
    return {"head.weight": (scale * weight).astype(np.float32), "head.bias": (scale * bias).astype(np.float32)}


def anchored(given: Weights, means: OwnMeans) -> dict[str, Float32]:
    """A training step's inputs with the device's own class means where there is no global prototype."""
    own = means.classes.present & (given["prototype_mask"] == 0)
    prototypes = np.where(own[:, None], means.classes.means, given["prototypes"])
    mask = np.where(own, 1.0, given["prototype_mask"])
    return {**given, "prototypes": prototypes.astype(np.float32), "prototype_mask": mask.astype(np.float32)}


def _surprise(
    extractor: Extractor,
    data: LocalData,
    means: OwnMeans,
    weight: NDArray[np.float64],
    bias: NDArray[np.float64],
    scales: NDArray[np.float64],
) -> NDArray[np.float64]:
    """−log likelihood of the labels for each scale, each sample left out of its class's mean; classes of one apart."""
    total = np.zeros(len(scales))
    for rows, features in extractor.blocks(data.x):
        z, y = features.astype(np.float64), data.y[rows]
        counts = means.classes.counts[y]  # (n,)
        several = np.flatnonzero(counts > 1)
        z, y, counts = z[several], y[several], counts[several]
        logits = z @ weight.T + bias  # (n, C)
        own = ((z - means.classes.means[y]) ** 2).sum(axis=1)  # (n,)
        longer = 0.5 * own * ((counts / np.maximum(counts - 1, 1)) ** 2 - 1.0)
        logits[np.arange(len(y)), y] -= longer
        for place, scale in enumerate(scales):
            scaled = scale * logits
            highest = scaled.max(axis=1, initial=-np.inf)
            likely = highest + np.log(np.exp(scaled - highest[:, None]).sum(axis=1))
            total[place] += float((likely - scaled[np.arange(len(y)), y]).sum())
    return total

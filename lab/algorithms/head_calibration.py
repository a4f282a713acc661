"""Optional steps after the last round: a new head over the trained backbone, for all clients or for each.

- `ffc` (SphereFed, eq. 6 to 12): every client's Gram and cross sums of unit features, and the closed-form head.
- `ccvr` (Luo et al., NeurIPS 2021): every client's count, mean and covariance of each class's features; the server
  merges them into one Gaussian for each class (their eq. 4 and 5), draws virtual features and trains a linear head on
  them by cross-entropy.
- `head_by_sgd`, `head_by_ffc`: personalised heads of SphereFed: on one client's own features alone.

Features are those of the model as it stands: (N, D) float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from protofleet.contract.heads.answers import LinearAnswer
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import Value
from protofleet.contract.methods.ffc import closed_form, of_one_device
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.edge_client.data import LocalData
from protofleet.lab.training.local_training import EagerModel

__all__ = ["calibrated_head", "ccvr_bytes", "ccvr_head", "client_gram", "ffc_bytes", "head_by_ffc", "head_by_sgd"]

_BATCH = 64

Features = NDArray[np.float32]
Labels = NDArray[np.int64]


def client_gram(features: Features, y: Labels, classes: int) -> FeatureGram:
    """FFC's statistic of one client: Gram and cross sums of its features on the unit sphere."""
    return FeatureGram.of(unit_rows(features.astype(np.float64)), y, classes)


def calibrated_head(total: FeatureGram, hyper: Mapping[str, Value]) -> LinearAnswer:
    """FFC: the head from all clients' sums.

    Args:
        hyper: FFC's `ridge` and `form`.
    """
    return LinearAnswer(closed_form(total, hyper), unit=True)


def ffc_bytes(classes: int, width: int) -> int:
    """One client's FFC contribution: the triangle, the cross sums and the counts, as float64."""
    return 8 * (width * (width + 1) // 2 + classes * (width + 1))


def ccvr_bytes(classes: int, width: int) -> int:
    """One client's class Gaussians: counts, means and the covariances' triangles, as float32."""
    return 4 * classes * (width * (width + 1) // 2 + width + 1)


def ccvr_head(model: EagerModel, shares: Sequence[LocalData], hyper: Mapping[str, Value], seed: int) -> LinearAnswer:
    """CCVR's head: the model's own, with a bias, retrained on virtual features.

    Args:
        hyper: `ccvr_virtual` features of each class, `ccvr_lr`, `ccvr_epochs`.
    """
    classes, width = model.head_weight.shape
    counts, sums = np.zeros(classes), np.zeros((classes, width))
    squares = np.zeros((classes, width, width))
    for share in (client_share.labelled for client_share in shares):
        z = model.features(share.x).astype(np.float64)
        for j in np.unique(share.y):
            rows = z[share.y == j]
            counts[j] += len(rows)
            sums[j] += rows.sum(axis=0)
            squares[j] += rows.T @ rows
    z, y = _virtual(counts, sums, squares, int(hyper["ccvr_virtual"]), np.random.default_rng(seed))
    weight, bias = model.head_copy()
    start = (weight, torch.zeros(classes) if bias is None else bias)
    lr, epochs = float(hyper["ccvr_lr"]), int(hyper["ccvr_epochs"])
    return _fit(z, y, start, lr=lr, momentum=0.9, epochs=epochs, unit=False, seed=seed)


def head_by_ffc(features: Features, y: Labels, classes: int, hyper: Mapping[str, Value]) -> LinearAnswer:
    """SphereFed's personalised FFC: the closed form over one client's own samples."""
    return LinearAnswer(closed_form(client_gram(features, y, classes), of_one_device(hyper)), unit=True)


def head_by_sgd(
    model: EagerModel, features: Features, y: Labels, *, lr: float, momentum: float, epochs: int, seed: int
) -> LinearAnswer:
    """The model's head, trained further on one client's own features.

    The loss is cross-entropy where the head has a bias, else SphereFed's squared error over unit features.
    """
    start = model.head_copy()
    return _fit(features, y, start, lr=lr, momentum=momentum, epochs=epochs, unit=start[1] is None, seed=seed)


def _virtual(
    counts: NDArray[np.float64],
    sums: NDArray[np.float64],
    squares: NDArray[np.float64],
    count: int,
    rng: np.random.Generator,
) -> tuple[Features, Labels]:
    """`count` draws from the Gaussian of every class with samples: features (V, D) and labels (V,)."""
    z, y = [], []
    for j in np.flatnonzero(counts):
        mean = sums[j] / counts[j]
        covariance = (squares[j] - counts[j] * np.outer(mean, mean)) / max(counts[j] - 1, 1)
        values, vectors = np.linalg.eigh(covariance)
        root = vectors * np.sqrt(np.maximum(values, 0.0))  # (D, D): root rootᵀ = covariance, singular or not
        noise = rng.standard_normal((count, len(mean)))
        z.append((mean + noise @ root.T).astype(np.float32))
        y.append(np.full(count, j, dtype=np.int64))
    return np.concatenate(z), np.concatenate(y)


def _fit(
    features: Features,
    y: Labels,
    start: tuple[Tensor, Tensor | None],
    *,
    lr: float,
    momentum: float,
    epochs: int,
    unit: bool,
    seed: int,
) -> LinearAnswer:
    """A linear head by SGD: cross-entropy, or SphereFed's squared error where `unit`."""
    weight, bias = nn.Parameter(start[0]), None if start[1] is None else nn.Parameter(start[1])
    optimizer = torch.optim.SGD([weight] + ([bias] if bias is not None else []), lr=lr, momentum=momentum)
    z, labels = torch.from_numpy(unit_rows(features) if unit else features), torch.from_numpy(y)
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        for chosen in torch.from_numpy(rng.permutation(len(labels))).split(_BATCH):
            logits = nn.functional.linear(z[chosen], weight, bias)
            if unit:
                target = nn.functional.one_hot(labels[chosen], len(weight)).to(torch.float32)
                loss = nn.functional.mse_loss(logits, target)
            else:
                loss = nn.functional.cross_entropy(logits, labels[chosen])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    bias_array = None if bias is None else bias.detach().numpy().astype(np.float64)
    return LinearAnswer(weight.detach().numpy().astype(np.float64), bias_array, unit)

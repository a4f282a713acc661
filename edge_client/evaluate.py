"""How good the device's answers are, on test images that never trained anything.

These ways to answer are measured, each where it exists:

- `head`: the device's own head on its own features (or the frozen head on unit features);
- `prototype`: the nearest prototype, arg min_j ‖f(x) − c_j‖₂ (FedProto, eq. 2), over the global prototypes, and the
  device's own class means for classes that have no global one;
- `own_prototype`: the nearest of the prototypes that the device has itself, learned ones (FedHP) included;
- `personal`: the closed-form head of the device's own samples and features (SphereFed's personalised FFC);
- `linear`: the closed-form FFC head on unit features of the bundle's shared extractor (SphereFed, eq. 12).

Each is reported on all test images, and on those of the classes that the device itself holds. FedProto's public code
answers among the device's own classes only; that reading is reported beside as `prototype_among_own`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_client.data import LocalData
from edge_client.extractor import Extractor

__all__ = ["Answer", "Evaluation", "linear_answer", "linear_logits", "nearest_answer", "score", "summary"]

Answer = Callable[[NDArray[np.float32]], NDArray[np.int64]]
"""Features (N, D) to class numbers (N,)."""
Prepare = Callable[[NDArray[np.float32]], NDArray[np.float64]]
"""Features (N, D) to what a head takes."""


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


def linear_logits(
    features: NDArray[np.floating], weight: NDArray[np.floating], bias: NDArray[np.floating] | None = None
) -> NDArray[np.float64]:
    """W z + b for features (N, D) and a head (C, D): (N, C) float64."""
    logits = features.astype(np.float64) @ weight.astype(np.float64).T
    return np.asarray(logits if bias is None else logits + bias, dtype=np.float64)


def linear_answer(
    weight: NDArray[np.floating], bias: NDArray[np.floating] | None = None, *, prepare: Prepare | None = None
) -> Answer:
    """The class of the largest logit of a head W (C, D), on features that `prepare` has made ready, if it is given.

    The norm of a feature does not change which of W z is largest, so a head without bias needs no unit features.
    """

    def answer(features: NDArray[np.float32]) -> NDArray[np.int64]:
        z = features if prepare is None else prepare(features)
        return np.asarray(linear_logits(z, weight, bias).argmax(axis=1), dtype=np.int64)

    return answer


def nearest_answer(prototypes: NDArray[np.floating], present: NDArray[np.bool_]) -> Answer:
    """The class of the nearest present prototype: prototypes (C, D), present (C,), at least one of them true."""
    numbers = np.flatnonzero(present)
    centres = prototypes[numbers].astype(np.float64)  # (K, D)

    def answer(features: NDArray[np.float32]) -> NDArray[np.int64]:
        # ‖z − c‖² = ‖z‖² − 2 z·c + ‖c‖², and ‖z‖² is the same for every c
        distance = (centres**2).sum(axis=1) - 2.0 * features.astype(np.float64) @ centres.T  # (N, K)
        return np.asarray(numbers[distance.argmin(axis=1)], dtype=np.int64)

    return answer


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

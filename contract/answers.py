"""From features to class numbers: the ways in which a device answers, as plain functions.

A way is made from what was learned, a head or prototypes, and takes features (N, D) to class numbers (N,). Which ways a
method has is said in its class (`contract/methods/`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["Answer", "linear_answer", "linear_logits", "nearest_answer", "softmax"]

Answer = Callable[[NDArray[np.float32]], NDArray[np.int64]]
"""Features (N, D) to class numbers (N,)."""
Prepare = Callable[[NDArray[np.float32]], NDArray[np.float64]]
"""Features (N, D) to what a head takes."""


def linear_logits(
    features: NDArray[np.floating], weight: NDArray[np.floating], bias: NDArray[np.floating] | None = None
) -> NDArray[np.float64]:
    """W z + b for features (N, D) and a head (C, D): (N, C) float64."""
    logits = features.astype(np.float64) @ weight.astype(np.float64).T
    return np.asarray(logits if bias is None else logits + bias, dtype=np.float64)


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rows of logits (N, C) as probabilities."""
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=1, keepdims=True), dtype=np.float64)


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

"""From features to answers: a score of every class, higher is better, and the number of the class with the highest.

An `Answer` is one way of answering, made from a head or from prototypes. The class of a method says which ways it has
(`contract/methods/`). All of Protofleet's ways, the nearest prototype included, are linear in features that were first
put on the unit sphere or projected. So one small graph can hold any of them (`export/bundles/classifier.py`). A method
with another way writes a class over `Answer`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.heads.sphere import unit_rows

__all__ = ["Answer", "LinearAnswer", "linear_answer", "linear_logits", "nearest_answer", "softmax", "way_in_words"]

Float64 = NDArray[np.float64]
_WORDS = {
    "head": "the device's own head",
    "prototype": "the nearest prototype",
    "prototype_among_own": "the nearest prototype of the device's own classes",
    "own_prototype": "the nearest of the device's own prototypes",
    "personal": "a head of the device's own samples",
    "linear": "the fleet's linear head",
    "class_mean": "the fleet's nearest class mean",
    "discriminant": "the fleet's linear discriminant",
}


def way_in_words(name: str, *, whose: str = "the fleet's") -> str:
    """A way of answering in words for a person, with the name that `--way` takes. An unknown way is its name alone.

    Args:
        whose: the owner of the result, if it is not the fleet. A device that was left out may answer with the result of
            a fleet of itself alone, or of itself and the devices that agree with it.
    """
    if name not in _WORDS:
        return name
    words = _WORDS[name].replace("the fleet's", whose)
    return f"{words} ({name})"


class Answer(ABC):
    """One way of answering."""

    @abstractmethod
    def scores(self, features: NDArray[np.float32]) -> Float64:
        """Features (N, D) to scores (N, C), higher is better; −inf for a class that is never answered."""

    @property
    def scale(self) -> float:
        """What a difference of two scores is measured in, above 0: about the same on all devices that answer alike.

        Temperatures are in this unit (`protofleet.contract.calibration`), so that one list of them does for all.
        """
        return 1.0

    def __call__(self, features: NDArray[np.float32]) -> NDArray[np.int64]:
        """Features (N, D) to class numbers (N,)."""
        return np.asarray(self.scores(features).argmax(axis=1), dtype=np.int64)


@dataclass(frozen=True, eq=False)
class LinearAnswer(Answer):
    """Scores W z + w.

    Attributes:
        weight: W (C, W).
        bias: w (C,), −inf for a class that is never answered; None for none.
        unit: whether features are put on the unit sphere first.
        project: (D, W) the matrix that projects them after that; None for no projection.
        length: the usual length of a feature as the head takes it; None where that is not known.
    """

    weight: NDArray[np.floating]
    bias: NDArray[np.floating] | None = None
    unit: bool = False
    project: NDArray[np.floating] | None = None
    length: float | None = None

    def scores(self, features: NDArray[np.float32]) -> Float64:
        return linear_logits(self.prepared(features), self.weight, self.bias)

    @property
    def scale(self) -> float:
        """The usual difference of two classes' scores of a feature in any direction: ‖w_i − w_j‖ · length / √D.

        1 where no length is known: the scores of a trained head are logits already.
        """
        rows = self.weight if self.bias is None else self.weight[np.isfinite(self.bias)]
        if self.length is None or len(rows) < 2:
            return 1.0
        apart = np.asarray(rows, dtype=np.float64) - rows.mean(axis=0, dtype=np.float64)
        squares = 2.0 * float((apart**2).sum()) / (len(rows) - 1) / rows.shape[1]
        return float(self.length * squares**0.5) or 1.0

    def prepared(self, features: NDArray[np.floating]) -> Float64:
        """Features (N, D) as the head takes them: (N, W) float64."""
        z = np.asarray(features, dtype=np.float64)
        if self.unit:
            z = np.asarray(unit_rows(z), dtype=np.float64)
        return z if self.project is None else np.asarray(z @ self.project, dtype=np.float64)


def linear_logits(
    features: NDArray[np.floating], weight: NDArray[np.floating], bias: NDArray[np.floating] | None = None
) -> Float64:
    """W z + b for features (N, D) and a head (C, D): (N, C) float64."""
    logits = features.astype(np.float64) @ weight.astype(np.float64).T
    return np.asarray(logits if bias is None else logits + bias, dtype=np.float64)


def softmax(logits: Float64) -> Float64:
    """Rows of logits (N, C) as probabilities."""
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=1, keepdims=True), dtype=np.float64)


def linear_answer(
    weight: NDArray[np.floating],
    bias: NDArray[np.floating] | None = None,
    *,
    present: NDArray[np.bool_] | None = None,
    unit: bool = False,
    project: NDArray[np.floating] | None = None,
) -> LinearAnswer:
    """The class of the largest logit of a head W (C, W), among the classes that are present (C,), or all.

    The norm of a feature does not change which of W z is largest, so a head without bias needs no unit features.
    """
    if present is not None and not present.all():
        bias = np.where(present, 0.0 if bias is None else bias, -np.inf)
    return LinearAnswer(weight, bias, unit, project, 1.0 if unit else None)


def nearest_answer(prototypes: NDArray[np.floating], present: NDArray[np.bool_], *, unit: bool = False) -> LinearAnswer:
    """The class of the nearest present prototype: prototypes (C, D), present (C,), at least one of them true.

    −½‖z − c‖² = z·c − ½‖c‖² − ½‖z‖², and ‖z‖² is the same for every c: the nearest has the highest linear score.
    """
    centres = prototypes.astype(np.float64)
    squares = (centres**2).sum(axis=1)
    answer = linear_answer(centres, -0.5 * squares, present=present, unit=unit)
    return answer if unit else replace(answer, length=float(squares[present].mean() ** 0.5))

"""How unlike every known class an image is, so that what nobody has taught can be answered *unknown*.

Where class centres μ_j are known, novelty is the squared distance to the nearest centre, in units of that class's own
spread: min_j ‖z − μ_j‖² / s_j. A member of a class has 1 on average. The spread needs nothing further:

- For unit features, E‖z − μ‖² = 1 − ‖μ‖². So it follows from the class means that the fleet merged.
- For a device's own features, it comes with the device's own class means (`local_samples.py`). A class that the device
  does not hold has the mean spread of those that it holds.

For a head over unit features, with or without centres, novelty is minus the largest score, in units of the head's own
scale: what is like no class has no large score for any. For the nearest class mean that is the distance to it. Its
limit comes from the device's own held-out photos, of which `KEPT` are to stay known (`calibration.py`); with fewer than
20 of them, the centres say one where there are some.

Without either, novelty is one minus the largest probability, softmax over the scores (Hendrycks and Gimpel, ICLR 2017).
`benchmarks/heads/unknown.py` and `benchmarks/answers/novelty.py` compare them; docs/decisions/252 says what was chosen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.contract.heads.answers import Answer, LinearAnswer, softmax
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.wire.global_state import GlobalState
from protofleet.edge_client.device.answer_choice import Answering
from protofleet.edge_client.training.local_samples import OwnMeans

__all__ = ["USUAL_THRESHOLD", "CentreNovelty", "LargestScoreNovelty", "Novelty", "ScoreNovelty", "novelty_of"]

USUAL_THRESHOLD = 2.0  # twice a class's own mean squared distance; benchmarks/heads/unknown.py says what that keeps
_LEAST_SPREAD = 1e-6


class Novelty(ABC):
    """A measure of novelty.

    Attributes:
        description: what it is, for a person.
        threshold: above it an image is unknown; None where the fleet's statistics do not say one.
    """

    description: str
    threshold: float | None

    @abstractmethod
    def of(self, features: NDArray[np.float32]) -> NDArray[np.float64]:
        """Of features (N, D): (N,), higher is less like anything known."""


@dataclass(frozen=True, eq=False)
class CentreNovelty(Novelty):
    """Distance to the nearest class centre, in units of its spread.

    Attributes:
        centres: (K, D) of the classes that have one.
        spread: (K,) their mean squared distances.
        unit: whether features are put on the unit sphere first.
    """

    centres: NDArray[np.float64]
    spread: NDArray[np.float64]
    unit: bool
    description = "distance to the nearest class mean in units of the class's spread"
    threshold = USUAL_THRESHOLD

    def of(self, features: NDArray[np.float32]) -> NDArray[np.float64]:
        z = features.astype(np.float64)
        z = np.asarray(unit_rows(z), dtype=np.float64) if self.unit else z
        squares = (z**2).sum(axis=1)[:, None] - 2.0 * z @ self.centres.T + (self.centres**2).sum(axis=1)  # (N, K)
        ratio = np.maximum(squares, 0.0) / np.maximum(self.spread, _LEAST_SPREAD)
        return np.asarray(ratio.min(axis=1), dtype=np.float64)


@dataclass(frozen=True, eq=False)
class ScoreNovelty(Novelty):
    """One minus the largest probability."""

    answer: Answer
    description = "1 − the largest probability, by softmax over the scores"
    threshold = None

    def of(self, features: NDArray[np.float32]) -> NDArray[np.float64]:
        return np.asarray(1.0 - softmax(self.answer.scores(features)).max(axis=1), dtype=np.float64)


@dataclass(frozen=True, eq=False)
class LargestScoreNovelty(Novelty):
    """Minus the largest score, in units of the head's own scale.

    Attributes:
        threshold: of held-out photos; None where there are too few.
    """

    answer: Answer
    threshold: float | None = None
    description = "minus the largest score, divided by the head's scale"

    def of(self, features: NDArray[np.float32]) -> NDArray[np.float64]:
        return np.asarray(-self.answer.scores(features).max(axis=1) / self.answer.scale, dtype=np.float64)


def novelty_of(
    answering: Answering,
    means: OwnMeans | None,
    state: GlobalState | None,
    manifest: Manifest,
    limit: float | None = None,
) -> Novelty:
    """The best measure that is known here for features as this way of answering takes them.

    Args:
        limit: of the largest score's novelty, for this way of answering; None where no held-out photos say one.
    """
    rows = {} if state is None else state.filled().rows
    is_over_unit = answering.extractor == "bundle" and isinstance(answering.answer, LinearAnswer)
    if is_over_unit and (limit is not None or "means" not in rows):
        return LargestScoreNovelty(answering.answer, limit)
    if answering.extractor == "bundle" and "means" in rows:
        centres, present = rows["means"].dense(manifest.classes, manifest.features)
        return CentreNovelty(centres[present], 1.0 - (centres[present] ** 2).sum(axis=1), unit=True)
    if answering.extractor == "local" and means is not None and means.classes.present.any():
        own_present = means.classes.present
        centres, present, spread = (
            means.classes.means,
            own_present,
            np.where(own_present, means.spread, means.spread[own_present].mean()),
        )
        if "prototypes" in rows:
            shared, shared_present = rows["prototypes"].dense(manifest.classes, manifest.features)
            centres, present = np.where(shared_present[:, None], shared, centres), own_present | shared_present
        return CentreNovelty(centres[present], spread[present], unit=False)
    return ScoreNovelty(answering.answer)

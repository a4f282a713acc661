"""The Gaussian mechanism: what a method does to class rows before they leave, and what others may then expect of them.

Features are clipped to norm ζ; then normal noise of deviation 2ζσ/n is added to a class mean over n samples, and of
√2 σ/n to a mean soft prediction, fresh for every class and round (FedHKD; Chen, Wang, Vikalo, ICLR 2023, section 3,
which noises the features alone). The same numbers bound what can plausibly come out of it: features are no longer than
ζ, and what lies beyond is noise of a known deviation, ten of which are never reached by chance.

What a round of it costs in privacy is counted by `edge_client/privacy.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from contract.statistics import Rows, Statistic

__all__ = ["Mechanism"]

_DEVIATIONS = 10.0
Released = TypeVar("Released", bound=Statistic)


@dataclass(frozen=True)
class Mechanism:
    """The mechanism as a bundle declares it.

    Attributes:
        clip: ζ, the largest norm of a feature; longer ones are shortened to it.
        noise: σ > 0, the noise multiplier.
        predictions: whether soft predictions are noised, too.
    """

    clip: float
    noise: float
    predictions: bool

    @classmethod
    def of(cls, hyper: Mapping[str, int | float | str]) -> Mechanism | None:
        """From a method's settled hyper-parameters `clip`, `noise` and `noise_on`; None where `noise` is 0."""
        noise = float(hyper.get("noise", 0.0))
        if not noise:
            return None
        return cls(float(hyper.get("clip", 1.0)), noise, hyper.get("noise_on", "all") == "all")

    # ── before it leaves ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def releases(self) -> int:
        """Gaussian releases about a sample in each round."""
        return 1 + self.predictions

    def clipped(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """Features (N, D) with norms of at most ζ."""
        wide = features.astype(np.float64)
        norms = np.linalg.norm(wide, axis=1, keepdims=True)
        return np.asarray(wide * np.minimum(1.0, self.clip / np.maximum(norms, 1e-12)), dtype=np.float64)

    def released(self, statistic: Released, rng: np.random.Generator) -> Released:
        """`statistic`, of clipped features, with noise on the rows of each class that is present."""
        held, counts = statistic.present[:, None], np.maximum(statistic.counts, 1)[:, None]
        noised = []
        for field in statistic.row_fields():
            rows, deviation = statistic.as_sent(field), self._deviation(field)
            if deviation:
                over = counts if field.travels == "means" else 1
                rows = rows + held * rng.standard_normal(rows.shape) * (deviation / over)
            noised.append(rows)
        return type(statistic).travelled(noised, None, statistic.counts)

    def _deviation(self, field: Rows) -> float:
        """Of the noise on a sum, which is that on a mean over one sample."""
        if field.holds == "probabilities":
            return self.noise * math.sqrt(2.0) if self.predictions else 0.0
        return self.noise * 2.0 * self.clip

    # ── when it has come ────────────────────────────────────────────────────────────────────────────────────────────

    def largest_norm(self, counts: NDArray[np.integer], width: int) -> NDArray[np.float64]:
        """(K,) the longest that means over `counts` (K,) samples of width D can be."""
        return self.clip + self.on_mean(counts, width)

    def on_mean(self, counts: NDArray[np.integer], width: int) -> NDArray[np.float64]:
        """(K,) the longest that the noise on means over `counts` (K,) samples of width D can be."""
        deviation = 2.0 * self.clip * self.noise / counts.astype(np.float64)
        return np.asarray(deviation * (math.sqrt(width) + _DEVIATIONS), dtype=np.float64)

    def soft_slack(self, counts: NDArray[np.integer]) -> NDArray[np.float64]:
        """(K,) how far noise moves a mean soft prediction over `counts` (K,) samples, at most."""
        deviation = math.sqrt(2.0) * self.noise if self.predictions else 0.0
        return np.asarray(_DEVIATIONS * deviation / counts.astype(np.float64), dtype=np.float64)

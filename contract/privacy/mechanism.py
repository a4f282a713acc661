"""The noise that a method adds to what it sends: what one release costs, and how far off it may be.

A mechanism itself states what its proof gives (`Release`): noise multipliers, separately for one sample more or fewer
and for one sample replaced, and what goes out without noise. The accountant of ε (`edge_client/privacy/accountant.py`)
asks nothing else, and knows no method.

`RowNoise` is FedHKD's (Chen, Wang, Vikalo, ICLR 2023, section 3, which noises the features alone):

1. Features are clipped to norm ζ.
2. A class mean over n samples gets normal noise of deviation 2ζσ/n.
3. A mean soft prediction gets noise of deviation √2 σ/n.

The noise is fresh for every class and round. The same numbers bound what is plausible: features are no longer than ζ,
and the rest is noise of a known deviation, ten of which are never reached by chance.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.sums.statistics import Rows, Statistic

__all__ = ["DEVIATIONS", "Mechanism", "Normal", "Release", "RowNoise"]

DEVIATIONS = 10.0
Released = TypeVar("Released", bound=Statistic)


class Normal(Protocol):
    """Gives independent normal numbers of mean 0 and deviation 1: `protofleet.contract.privacy.secret_noise`, or a
    numpy generator."""

    def standard_normal(self, shape: tuple[int, ...], /) -> NDArray[np.float64]: ...


@dataclass(frozen=True)
class Release:
    """The cost of one release: it is a Gaussian mechanism with these noise multipliers.

    A noise multiplier is the deviation of the noise, divided by the ℓ2 sensitivity of all numbers that are released
    together. Releases of multipliers m₁, m₂, … tell together no more than one release of (Σ m⁻²)^(−1/2). This also
    holds where a later release was chosen after seeing the earlier ones.

    Attributes:
        add_remove: the multiplier for data sets of which one has a sample more; None where no guarantee holds for them.
        replace: the multiplier for data sets that differ in one sample; None where no guarantee holds for them.
        bare: what goes out without any noise, in words. If there is any, no ε holds for the whole release.
        public: what follows from the samples and is taken to be known to all, in words. Data sets that differ in it are
            not neighbours.
    """

    add_remove: float | None
    replace: float | None
    bare: tuple[str, ...] = ()
    public: tuple[str, ...] = ()

    @property
    def covers_all(self) -> bool:
        """Whether ε covers everything in the release."""
        return not self.bare

    @property
    def multiplier(self) -> float:
        """The multiplier of the stated ε: for one sample more or fewer, or else for one replaced; 0 without either."""
        multiplier = self.replace if self.add_remove is None else self.add_remove
        return 0.0 if multiplier is None else multiplier


class Mechanism(ABC):
    """The noise that a method adds to its statistic, as a bundle declares it.

    Attributes:
        shared_extractor: whether its proof needs an extractor that has never seen the samples. If not, the proof holds
            whatever the network was trained on.
    """

    shared_extractor: ClassVar[bool]

    @abstractmethod
    def release(self, counts: NDArray[np.integer]) -> Release:
        """The cost of one release, for a device that sums `counts` (C,) samples of each class."""

    # ── when it has come ────────────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def largest_norm(self, counts: NDArray[np.integer], width: int) -> NDArray[np.float64]:
        """(K,) the largest norm of means over `counts` (K,) samples, for width D."""

    @abstractmethod
    def on_mean(self, counts: NDArray[np.integer], width: int) -> NDArray[np.float64]:
        """(K,) the largest norm of the noise on means over `counts` (K,) samples, for width D."""

    @abstractmethod
    def soft_slack(self, counts: NDArray[np.integer]) -> NDArray[np.float64]:
        """(K,) the most that noise moves a mean soft prediction over `counts` (K,) samples."""


@dataclass(frozen=True)
class RowNoise(Mechanism):
    """FedHKD's.

    Attributes:
        clip: ζ, the largest norm of a feature; longer ones are shortened to it.
        noise: σ > 0, the noise multiplier of the paper, which takes the network for fixed.
        predictions: whether soft predictions are noised, too.
    """

    shared_extractor: ClassVar[bool] = False

    clip: float
    noise: float
    predictions: bool

    @classmethod
    def of(cls, hyper: Mapping[str, int | float | str]) -> RowNoise | None:
        """From a method's resolved hyper-parameters `clip`, `noise` and `noise_on`; None where `noise` is 0."""
        noise = float(hyper.get("noise", 0.0))
        if not noise:
            return None
        return cls(float(hyper.get("clip", 1.0)), noise, hyper.get("noise_on", "all") == "all")

    # ── before it leaves ────────────────────────────────────────────────────────────────────────────────────────────

    def release(self, counts: NDArray[np.integer]) -> Release:
        """For one sample replaced by another of its class, whatever the network was trained on (decision 095).

        All class means of features move by 2ζ at most, which is n/σ deviations each, and so do the soft predictions.
        """
        squares = max(float((counts.astype(np.float64) ** 2).sum()), 1.0) * (1 + self.predictions)
        bare = () if self.predictions else ("soft predictions",)
        return Release(None, self.noise / math.sqrt(squares), bare, ("which classes it has", "how many of each"))

    def clipped(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """Features (N, D) with norms of at most ζ."""
        wide = features.astype(np.float64)
        norms = np.linalg.norm(wide, axis=1, keepdims=True)
        return np.asarray(wide * np.minimum(1.0, self.clip / np.maximum(norms, 1e-12)), dtype=np.float64)

    def released(self, statistic: Released, rng: Normal) -> Released:
        """`statistic`, of clipped features, with noise on the rows of each class that is present."""
        present, counts = statistic.present[:, None], np.maximum(statistic.counts, 1)[:, None]
        noised = []
        for field in statistic.row_fields():
            rows, deviation = statistic.as_sent(field), self._deviation(field)
            if deviation:
                over = counts if field.travels == "means" else 1
                rows = rows + present * rng.standard_normal(rows.shape) * (deviation / over)
            noised.append(rows)
        return type(statistic).travelled(noised, None, statistic.counts)

    def _deviation(self, field: Rows) -> float:
        """Of the noise on a sum, which is that on a mean over one sample."""
        if field.holds == "probabilities":
            return self.noise * math.sqrt(2.0) if self.predictions else 0.0
        return self.noise * 2.0 * self.clip

    # ── when it has come ────────────────────────────────────────────────────────────────────────────────────────────

    def largest_norm(self, counts: NDArray[np.integer], width: int) -> NDArray[np.float64]:
        return self.clip + self.on_mean(counts, width)

    def on_mean(self, counts: NDArray[np.integer], width: int) -> NDArray[np.float64]:
        deviation = 2.0 * self.clip * self.noise / counts.astype(np.float64)
        return np.asarray(deviation * (math.sqrt(width) + DEVIATIONS), dtype=np.float64)

    def soft_slack(self, counts: NDArray[np.integer]) -> NDArray[np.float64]:
        deviation = math.sqrt(2.0) * self.noise if self.predictions else 0.0
        return np.asarray(DEVIATIONS * deviation / counts.astype(np.float64), dtype=np.float64)

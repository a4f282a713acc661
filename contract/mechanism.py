"""What noise a method adds to what it sends: what one release of it costs, and what others may then expect of it.

A mechanism says by itself what its proof gives (`Release`): noise multipliers, separately for one sample more or fewer
and for one replaced, and what goes out beside the noise. Whoever counts ε (`edge_client/privacy.py`) asks nothing else,
and needs to know no method.

`RowNoise` is FedHKD's (Chen, Wang, Vikalo, ICLR 2023, section 3, which noises the features alone). Features are clipped
to norm ζ; then normal noise of deviation 2ζσ/n is added to a class mean over n samples, and of √2 σ/n to a mean soft
prediction, fresh for every class and round. The same numbers bound what can plausibly come out of it: features are no
longer than ζ, and what lies beyond is noise of a known deviation, ten of which are never reached by chance.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from contract.statistics import Rows, Statistic

__all__ = ["DEVIATIONS", "Mechanism", "Normal", "Release", "RowNoise"]

DEVIATIONS = 10.0
Released = TypeVar("Released", bound=Statistic)


class Normal(Protocol):
    """Gives independent normal numbers of mean 0 and deviation 1: `contract.secret_noise`, or a numpy generator."""

    def standard_normal(self, shape: tuple[int, ...], /) -> NDArray[np.float64]: ...


@dataclass(frozen=True)
class Release:
    """What one release costs: it is a Gaussian mechanism of these noise multipliers, whatever else is known.

    A noise multiplier is the deviation of the noise over the ℓ2 sensitivity of what it is added to, of all that is
    released together. Releases of multipliers m₁, m₂, … tell no more together than one of (Σ m⁻²)^(−1/2), also where
    what a later one is of was chosen after seeing the earlier.

    Attributes:
        add_remove: for data sets of which one has a sample more than the other; None where nothing holds for these.
        replace: for data sets that differ in one sample; None where nothing holds.
        bare: what goes out without any noise, in words. Where there is any, no ε holds of the whole.
        public: what follows from the samples and is taken to be known to all, in words: data sets that differ in it are
            no neighbours.
    """

    add_remove: float | None
    replace: float | None
    bare: tuple[str, ...] = ()
    public: tuple[str, ...] = ()

    @property
    def covers_all(self) -> bool:
        """Whether ε says something of all that the release holds."""
        return not self.bare

    @property
    def multiplier(self) -> float:
        """That which ε is stated with: for one sample more or fewer; one replaced, where nothing holds for these."""
        found = self.replace if self.add_remove is None else self.add_remove
        return 0.0 if found is None else found


class Mechanism(ABC):
    """The noise that a method adds to its statistic, as a bundle declares it.

    Attributes:
        shared_extractor: whether its proof needs features of an extractor that has never seen the samples; otherwise it
            holds whatever the network was trained on.
    """

    shared_extractor: ClassVar[bool]

    @abstractmethod
    def release(self, counts: NDArray[np.integer]) -> Release:
        """What one release costs a device that sums `counts` (C,) samples of each class."""

    # ── when it has come ────────────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def largest_norm(self, counts: NDArray[np.integer], width: int) -> NDArray[np.float64]:
        """(K,) the longest that means over `counts` (K,) samples of width D can be."""

    @abstractmethod
    def on_mean(self, counts: NDArray[np.integer], width: int) -> NDArray[np.float64]:
        """(K,) the longest that the noise on means over `counts` (K,) samples of width D can be."""

    @abstractmethod
    def soft_slack(self, counts: NDArray[np.integer]) -> NDArray[np.float64]:
        """(K,) how far noise moves a mean soft prediction over `counts` (K,) samples, at most."""


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
        """From a method's settled hyper-parameters `clip`, `noise` and `noise_on`; None where `noise` is 0."""
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
        return self.clip + self.on_mean(counts, width)

    def on_mean(self, counts: NDArray[np.integer], width: int) -> NDArray[np.float64]:
        deviation = 2.0 * self.clip * self.noise / counts.astype(np.float64)
        return np.asarray(deviation * (math.sqrt(width) + DEVIATIONS), dtype=np.float64)

    def soft_slack(self, counts: NDArray[np.integer]) -> NDArray[np.float64]:
        deviation = math.sqrt(2.0) * self.noise if self.predictions else 0.0
        return np.asarray(DEVIATIONS * deviation / counts.astype(np.float64), dtype=np.float64)

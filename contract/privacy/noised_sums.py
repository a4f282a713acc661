"""Sums of unit features with noise: what one sample can change in all of them together, and what that costs.

A device has samples with features z (D,), ‖z‖ ≤ 1, of an extractor that has never seen them, and classes y. It releases

    A = Σ z zᵀ  (D, D),   B = Σ e_y zᵀ  (C, D),   n = Σ e_y  (C,),

each with normal noise: σ_A on A's diagonal and σ_A/√2 beside it, σ_B on B, σ_n on n.

**One sample more or fewer** changes A's triangle by zzᵀ, one row of B by z, and one count by 1. In units of the noise

    Σ_i z_i⁴/σ_A² + Σ_{i<j} 2 z_i² z_j²/σ_A² + ‖z‖²/σ_B² + 1/σ_n² = ‖z‖⁴/σ_A² + ‖z‖²/σ_B² + 1/σ_n² ≤ 1/m²

with 1/m² = 1/σ_A² + 1/σ_B² + 1/σ_n². So the release is one Gaussian mechanism of noise multiplier m. A part's share of
the budget is s = m²/σ², and the shares add up to 1. Three equal shares are the ℓ2 sensitivity √3 under noise √3·m.
(With σ_A beside the diagonal too, the first two terms are (‖z‖⁴ + Σ z_i⁴)/2σ_A². That is never more, so √2 more noise
buys nothing.)

**One sample replaced** changes A's part by 2 − 2t². It changes B's and n's parts by 2 and 2 if the class changes, and
by 2 − 2t and 0 if it stays; t = z·z′, and both have norm 1. So 1/m² grows by the factor

    ρ² = max(2, max_t 2 s_A (1 − t²) + 2 s_B (1 − t)),   which is 2 for equal shares: √6 and, without A, 2 in ℓ2.

Both bounds are reached: the first by any unit feature, the second by two orthogonal ones of different classes. Decision
144 derives this at length.

Guarantees:

- **Exact sums.** Features are cut towards zero to multiples of 2⁻¹⁶ (`on_grid`). So products are multiples of 2⁻³², and
  sums of up to two million of them are exact in float64, in any order. No norm exceeds 1, and no rounding is hidden.
- **Noise that leaves no trace.** Float64 noise has gaps that show what it was added to (Mironov, CCS 2012). Here noise
  is a whole number of steps of 2⁻³², as the sums are: a discrete Gaussian (Canonne, Kamath, Steinke, NeurIPS 2020). At
  2²⁰ and more steps for a deviation, it is the continuous one rounded. Both are added as whole numbers. Decision 145
  says by how much ε is off.
- **Nothing beside.** Every class is sent, whether it has samples or not. No class is withheld for having few samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import MethodError
from protofleet.contract.privacy.mechanism import DEVIATIONS, Mechanism, Release

__all__ = ["SumNoise", "feature_sums", "on_grid"]

Float64 = NDArray[np.float64]
_STEPS = 2.0**16  # of a feature's coordinate
_FINEST = 2.0**-32  # the grid of products, of which all sums and all noise are multiples
_DEVIATIONS = 2.0**-12, 2.0**27  # between which a discrete Gaussian on that grid can be told from no other
_WITHIN = 1.0 - 2.0**-40  # what float64 may have added to a norm of 1


class Whole(Protocol):
    """Gives independent whole numbers with a discrete Gaussian's probabilities:
    `protofleet.contract.privacy.secret_noise`."""

    def whole_normal(self, shape: tuple[int, ...], deviation: float, /) -> NDArray[np.int64]: ...


@dataclass(frozen=True)
class SumNoise(Mechanism):
    """The noise on (A, B, n), or on (B, n).

    Attributes:
        multiplier: m > 0, the noise multiplier of one release, for one sample more or fewer.
        gram_share, count_share: the shares of the budget for A and n; B gets the rest. If A's share is 0, A is not
            sent.

    Raises:
        MethodError: the multiplier is not above 0, or the shares leave nothing for a part.
    """

    shared_extractor: ClassVar[bool] = True

    multiplier: float
    gram_share: float
    count_share: float

    def __post_init__(self) -> None:
        if not 0 < self.multiplier < math.inf:
            raise MethodError("noise multiplier", expected="a number above 0", got=self.multiplier)
        if min(self.gram_share, self.row_share) < 0 or min(self.count_share, self.row_share) <= 0:
            got = f"{self.gram_share:g} and {self.count_share:g}"
            raise MethodError("shares of the noise budget", expected="some for each part, 1 in all", got=got)
        least, most = _DEVIATIONS
        if not (least <= min(self._deviations()) / math.sqrt(2.0) and max(self._deviations()) < most):
            got = ", ".join(f"{deviation:.3g}" for deviation in self._deviations())
            raise MethodError("noise", expected=f"deviations of {2 * least:.1g} to {most:.1g}", got=got)

    @property
    def row_share(self) -> float:
        """The share of B."""
        return 1.0 - self.gram_share - self.count_share

    def release(self, counts: NDArray[np.integer]) -> Release:
        """The cost of one release. It is the same for all samples, so it tells nothing about them."""
        return Release(self.multiplier, self.multiplier / math.sqrt(self.replaced()))

    def replaced(self) -> float:
        """ρ²: how many times as much in 1/m² one replaced sample costs as one sample more or fewer."""
        a, b = self.gram_share, self.row_share
        same_class = 4 * b if b >= 2 * a else 2 * a + 2 * b + b * b / (2 * a)
        return max(2.0, same_class)

    # ── before it leaves ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def gram_deviation(self) -> float:
        """σ_A, on A's diagonal; beside it the noise has σ_A/√2."""
        return self.multiplier / math.sqrt(self.gram_share)

    @property
    def row_deviation(self) -> float:
        """σ_B."""
        return self.multiplier / math.sqrt(self.row_share)

    @property
    def count_deviation(self) -> float:
        """σ_n."""
        return self.multiplier / math.sqrt(self.count_share)

    def _deviations(self) -> tuple[float, ...]:
        """The deviations of the noise on each part that is sent."""
        return (self.row_deviation, self.count_deviation, *((self.gram_deviation,) if self.gram_share else ()))

    def noised_triangle(self, packed: Float64, width: int, normal: Whole) -> Float64:
        """A's packed upper triangle (D(D+1)/2,) with noise."""
        diagonal = np.arange(width)
        diagonal = diagonal * width - diagonal * (diagonal - 1) // 2
        noised = _noised(packed, self.gram_deviation / math.sqrt(2.0), normal)
        noised[diagonal] = _noised(packed[diagonal], self.gram_deviation, normal)
        return noised

    def noised_rows(self, rows: Float64, normal: Whole) -> Float64:
        """B (C, D) with noise."""
        return _noised(rows, self.row_deviation, normal)

    def noised_counts(self, counts: NDArray[np.integer], normal: Whole) -> Float64:
        """n (C,) with noise: signed fractions, (C, 1)."""
        return _noised(counts.astype(np.float64)[:, None], self.count_deviation, normal)

    # ── when it has come ────────────────────────────────────────────────────────────────────────────────────────────

    def longest(self, numbers: int) -> float:
        """The norm that noise on so many numbers never exceeds, for every part."""
        return max(self._deviations()) * (math.sqrt(numbers) + DEVIATIONS)

    def largest_norm(self, counts: NDArray[np.integer], width: int) -> Float64:
        """Infinite: the number of samples in a sum is not known."""
        return np.full(len(counts), math.inf)

    def on_mean(self, counts: NDArray[np.integer], width: int) -> Float64:
        """The largest norm of the noise on a row of B."""
        return np.full(len(counts), self.row_deviation * (math.sqrt(width) + DEVIATIONS))

    def soft_slack(self, counts: NDArray[np.integer]) -> Float64:
        """Zero: there are no soft predictions."""
        return np.zeros(len(counts))


def on_grid(z: NDArray[np.floating]) -> Float64:
    """Features (N, D) of norm 1, up to rounding, as they are summed: multiples of 2⁻¹⁶, of norm at most 1.

    NaN and infinity count as zero, so a sample that has them changes a sum no more than any other sample.
    """
    sound = np.nan_to_num(np.asarray(z, dtype=np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    return np.asarray(np.trunc(sound * (_WITHIN * _STEPS)) / _STEPS)


def feature_sums(z: Float64, labels: NDArray[np.integer], classes: int) -> Float64:
    """B (C, D) of features (N, D) on the grid: exact."""
    return np.asarray((np.arange(classes)[:, None] == labels[None]).astype(np.float64) @ z)


def _noised(values: Float64, deviation: float, normal: Whole) -> Float64:
    """Multiples of 2⁻³² plus noise that is a multiple, too. Both are whole numbers, so only their sum is rounded."""
    integers = np.rint(values / _FINEST).astype(np.int64) + normal.whole_normal(values.shape, deviation / _FINEST)
    return np.asarray(integers.astype(np.float64) * _FINEST)

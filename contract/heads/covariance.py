"""The covariance of features within classes, from class means alone (FedCOF) or from FFC's sums.

FedCOF (Goswami et al., Covariances for Free, NeurIPS 2025, arXiv 2412.14326, proposition 1): the mean m of n samples of
a class scatters around the class's mean with covariance Σ / n. Let class c come as the means m_k of K_c disjoint groups
of n_k samples, drawn alike, with M_c = Σ n_k m_k / Σ n_k. Then

    E Σ_k n_k (m_k − M_c)(m_k − M_c)ᵀ = (K_c − 1) Σ_c,

and dividing by K_c − 1 is unbiased for any sizes n_k. Devices that send class means, as they do anyway, are such
groups.

1. Where devices are few, each sends the means of several random groups of a class. `random_groups` assigns the samples.
2. `MeanSpread` sums Σ n m mᵀ, class sums, counts and groups. So merging is addition. Groups are kept as they are while
   they are few beside D: no (D, D) matrix is made of them, and the spectrum of their covariance costs little.
3. All classes are taken to share one covariance: the sums over classes are divided by Σ_c (K_c − 1), the degrees of
   freedom. The paper estimates a covariance for each class and weighs them by their samples. That is the same where
   every class has as many groups and samples; here each class is weighed by what is known of it.
4. With FFC's sums the covariance is known better. `within_gram` takes Σ z zᵀ less what class means explain, with N − C
   degrees of freedom (what GH-OFL uses: Turazza et al., ICLR 2026, arXiv 2602.01186).

`contract/heads/discriminant.py` chooses how far to trust an estimate from few groups. Differences between devices
beyond chance (other cameras, other light) add to the spread, and so to the covariance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from protofleet.contract.errors import StatisticError
from protofleet.contract.heads.spectrum import Spectrum

__all__ = ["MeanSpread", "WithinClass", "random_groups", "within_gram"]

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
_FEW = 2  # D for each group and class that is kept, at least


@dataclass(frozen=True, eq=False)
class WithinClass:
    """Class means and the covariance within classes, for a linear discriminant.

    Attributes:
        means: (C, D) float64, class means; zero where a class has no examples.
        counts: (C,) int64, examples of each class.
        covariance: (D, D) float64, within classes, unbiased; zero where `freedom` is.
        freedom: the number of independent deviations that it is the mean of; 0 where there is none.
    """

    means: Float64
    counts: Int64
    covariance: Float64
    freedom: int

    @property
    def present(self) -> NDArray[np.bool_]:
        """(C,) whether a class has examples."""
        return self.counts > 0

    def is_scarce(self, few: int) -> bool:
        """Whether nothing is known of the covariance, or classes have fewer than `few` samples on the average."""
        return self.freedom == 0 or int(self.counts.sum()) < few * int(self.present.sum())

    @cached_property
    def spectrum(self) -> Spectrum:
        """The spectrum of the covariance. It is computed once, at first use: nothing else here takes as much time."""
        return Spectrum.of(self.covariance)


class _FewGroups(WithinClass):
    """The same, of few deviations (G, D) whose squares sum up to the covariance; it is only made where it is asked."""

    def __init__(self, means: Float64, counts: Int64, deviations: Float64, freedom: int) -> None:
        for name, value in (("means", means), ("counts", counts), ("_deviations", deviations), ("freedom", freedom)):
            object.__setattr__(self, name, value)

    _deviations: Float64

    @cached_property
    def covariance(self) -> Float64:
        return np.asarray(self._deviations.T @ self._deviations)

    @cached_property
    def spectrum(self) -> Spectrum:
        return Spectrum.of_rows(self._deviations, self.means[self.present])


@dataclass(frozen=True, eq=False)
class MeanSpread:
    """The sums of the means of groups.

    Attributes:
        few: the groups that are kept: m (G, D) float64, n and their classes (G,) int64.
        rest: (D, D) float64, Σ n m mᵀ over the groups that are not; None where all are kept.
        sums: (C, D) float64, Σ n m over each class's groups.
        counts: (C,) int64, Σ n.
        groups: (C,) int64, the number of groups of each class.
    """

    few: tuple[Float64, Int64, Int64]
    rest: Float64 | None
    sums: Float64
    counts: Int64
    groups: Int64

    @classmethod
    def of(cls, means: ArrayLike, counts: ArrayLike, labels: ArrayLike, classes: int) -> MeanSpread:
        """From the means (G, D) of G groups of samples, their sizes (G,) and classes (G,); empty ones are left out.

        Raises:
            StatisticError: on shapes that do not fit, or numbers that are not finite.
        """
        m, n, y = np.asarray(means, dtype=np.float64), np.asarray(counts, np.int64), np.asarray(labels, np.int64)
        if m.ndim != 2 or n.shape != (len(m),) or y.shape != (len(m),) or not np.isfinite(m).all():
            got = f"{m.shape}, {n.shape}, {y.shape}"
            raise StatisticError("group means", expected="finite (G, D), G counts, G classes", got=got)
        if n.size and (n.min() < 0 or y.min() < 0 or y.max() >= classes):
            got = f"a count of {n.min()}, classes {y.min()} to {y.max()}"
            raise StatisticError("group means", expected=f"counts from 0, classes 0 to {classes - 1}", got=got)
        m, n, y = m[n > 0], n[n > 0], y[n > 0]
        sums = np.zeros((classes, m.shape[1]))
        np.add.at(sums, y, m * n[:, None])
        totals = np.bincount(y, weights=n, minlength=classes).astype(np.int64)
        return cls((m, n, y), None, sums, totals, np.bincount(y, minlength=classes))._settled()

    def merge(self, other: MeanSpread) -> MeanSpread:
        """The spread of both sets of groups together."""
        if self.sums.shape != other.sums.shape:
            raise StatisticError("merge", expected=f"means of {self.sums.shape}", got=other.sums.shape)
        few = tuple(np.concatenate(both) for both in zip(self.few, other.few, strict=True))
        rests = [each.rest for each in (self, other) if each.rest is not None]
        rest = rests[0] if len(rests) == 1 else rests[0] + rests[1] if rests else None
        added = (self.sums + other.sums, self.counts + other.counts, self.groups + other.groups)
        return MeanSpread(few, rest, *added)._settled()  # type: ignore[arg-type]

    def _settled(self) -> MeanSpread:
        """The same, with its groups summed up where they are many, or some are already."""
        m, n, y = self.few
        if self.rest is None and _FEW * (len(m) + len(self.counts)) <= m.shape[1]:
            return self
        second = (m * n[:, None]).T @ m
        rest = second if self.rest is None else self.rest + second if len(m) else self.rest
        return replace(self, few=(m[:0], n[:0], y[:0]), rest=rest)

    @property
    def present(self) -> NDArray[np.bool_]:
        """(C,) whether a class has examples."""
        return self.counts > 0

    @cached_property
    def within(self) -> WithinClass:
        """Class means, and the unbiased covariance within classes."""
        freedom = int(np.maximum(self.groups - 1, 0).sum())
        if self.rest is not None:
            return _within(self.rest, self.sums, self.counts, freedom)
        (m, n, y), means = self.few, self.sums / np.maximum(self.counts, 1)[:, None]
        deviations = np.sqrt(n / freedom)[:, None] * (m - means[y]) if freedom else m[:0]
        return _FewGroups(means, self.counts, deviations, freedom)


def within_gram(gram: ArrayLike, cross: ArrayLike, counts: ArrayLike) -> WithinClass:
    """Class means and the covariance within classes from FFC's sums: A (D, D), class sums (C, D), counts (C,)."""
    n = np.asarray(counts, np.int64)
    sums = np.asarray(cross, dtype=np.float64)
    return _within(np.asarray(gram, dtype=np.float64), sums, n, int(np.maximum(n - 1, 0).sum()))


def random_groups(labels: ArrayLike, groups: int, min_samples: int, rng: np.random.Generator) -> Int64:
    """(N,) which group of its class each sample belongs to: 0 up to groups − 1, at random, of sizes that differ by one.

    A class with fewer than groups · min_samples samples has fewer groups, of at least `min_samples` each. With fewer
    than `min_samples` samples in all it has one group.

    Args:
        labels: (N,) classes, 0 and up.
        groups: of each class, at most; 1 or more.
        min_samples: no group is smaller, unless the class itself is. This function does not withhold such a class.
    """
    y = np.asarray(labels, dtype=np.int64)
    chosen = np.zeros(len(y), np.int64)
    for label in np.unique(y):
        mine = rng.permutation(np.flatnonzero(y == label))
        into = max(1, min(groups, len(mine) // max(min_samples, 1)))
        chosen[mine] = np.arange(len(mine)) % into
    return chosen


def _within(second: Float64, sums: Float64, counts: Int64, freedom: int) -> WithinClass:
    """The covariance within classes: Σ n m mᵀ over groups or samples, less the part of the class means, divided by the
    degrees of freedom."""
    means = sums / np.maximum(counts, 1)[:, None]
    if freedom == 0:
        return WithinClass(means, counts, np.zeros_like(second), 0)
    left = second - means.T @ (means * counts[:, None])
    return WithinClass(means, counts, (left + left.T) / (2 * freedom), freedom)

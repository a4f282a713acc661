"""FFC's closed form: from summed Gram and cross sums to a linear head, and the choice of its ridge.

Over unit features z (D,) and one-hot labels y (C,), devices send A_i = Σ z zᵀ and b_i = Σ z yᵀ (SphereFed: Dong et al.,
ECCV 2022, eq. 10). Their sums are the sums over the pooled data. So the head

    W = ((A + λ I)⁻¹ b)ᵀ        (eq. 12), with λ = ridge · trace(A) / D,

is exactly the ridge regression of the pooled data, however the data was spread. λ is relative to the mean of A's
diagonal, so one setting serves any number of samples. The paper's λ = 0 is the limit.

1. `contract/heads/spectrum.py` takes A's eigenvalues s and eigenvectors V once; every ridge is cheap from there. If the
   ridge is given, the equations are solved directly (`solved_directly`).
2. `choose_ridge` picks the ridge with the least generalised cross-validation (Golub, Heath, Wahba, Technometrics 1979),

       GCV(λ) = (R(λ) / N) / (1 − df(λ) / N)²,

   among those with df(λ) ≤ N / 3 + 2 C, because repeated photos reward a head that fits single ones
   (`contract/heads/spectrum.py`). R(λ) = N − Σ_i ‖Vᵀb‖_i² (s_i + 2λ) / (s_i + λ)² is the squared error on the samples
   themselves, as Σ ‖y‖² = N for one-hot labels. df(λ) = Σ_i s_i / (s_i + λ) are the effective degrees of freedom. GCV
   estimates the error on samples that were not seen, and needs nothing but the sums. Leave-one-out would need each
   sample's leverage, which sums do not hold.
3. `solve` gives the head. Ridge 0 gives the least-squares head of least norm, as `numpy.linalg.lstsq` on the pooled
   features would.

Sums that are not exact:

- Sums that were rounded on their way have eigenvalues that are off by ν (see `Spectrum`). Ridges with λ below 10 ν are
  not chosen.
- Sums with noise added on purpose have no criterion, because R(λ) is off by the noise in b, too. They get the fixed
  ridge 0.3, or λ = ν where that is more, which makes A + λI positive again. A sender need not say that it added noise:
  ν above a tenth of A's mean diagonal is no rounding (half precision comes to 0.01).

Where classes are unequal, a ridge on one-hot labels prefers those with most samples: it fits P(c | z), and with it how
often each class was named. `evened` takes half of that back, row by row, from the counts alone.

The head is that of Fed3R (Fanì et al., ICML 2024) and, for the same λ, of AFL (He et al., CVPR 2025), whose devices
send other numbers that amount to the same sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from protofleet.contract.errors import StatisticError
from protofleet.contract.heads.spectrum import CLEAR_OF_NOISE, RIDGES, Spectrum, divided, least_error, solved_directly
from protofleet.contract.sums.statistics import FeatureGram

__all__ = [
    "FIXED",
    "Ridge",
    "RidgeChoice",
    "RidgeHead",
    "choose_ridge",
    "doubt",
    "evened",
    "is_uneven",
    "scarce",
    "scarce_or_uneven",
    "solve",
    "solve_in",
]

Float64 = NDArray[np.float64]
Ridge = float | Literal["auto"]
FIXED = 0.3  # the one ridge that loses least in its worst case (decision 078)
NEAR = 4  # so many times more, or fewer, samples than features are near as many
SAFE_RIDGE = 0.1  # below it, accuracy falls near N = D (results/ridge.md has the figures)
FEW = 4  # samples a class, on the average, below which the nearest class mean is the better guess (decision 101)
UNEVEN = 5  # so many times more samples of one class than of another are worth a word (decision 100)
EVENED = 2  # so many times more samples of one class than of another, and the rows of a head are evened (decision 261)
ROOT = 0.5  # the power of a class's share that its row is divided by (decision 261)
NOISED = 0.1  # ν / scale above which sums were noised on purpose


@dataclass(frozen=True, eq=False)
class RidgeChoice:
    """A ridge, and the criterion that it was chosen by.

    Attributes:
        ridge: in units of trace(A)/D.
        by: `gcv`; or why there was no criterion: `noised`, or `flat` where no ridge has a finite one.
        ridges: (R,) the grid.
        criterion: (R,) GCV of each, above 0; infinite where it means nothing.
        freedom: (R,) effective degrees of freedom of each.
        is_limited: whether a smaller ridge has a tenth less GCV, but too many degrees of freedom for so many samples.
    """

    ridge: float
    by: Literal["gcv", "noised", "flat"]
    ridges: Float64
    criterion: Float64
    freedom: Float64
    is_limited: bool = False


@dataclass(frozen=True, eq=False)
class RidgeHead:
    """The head, and how its ridge was chosen.

    Attributes:
        weights: W (C, D) float64; zero rows for classes without examples, whose b is zero.
        ridge: λ in units of trace(A)/D.
        choice: None where the ridge was given.
    """

    weights: Float64
    ridge: float
    choice: RidgeChoice | None


def solve(gram: ArrayLike, cross: ArrayLike, counts: ArrayLike, ridge: Ridge, *, noised: bool = False) -> RidgeHead:
    """The head of summed A (D, D), class sums bᵀ (C, D) and counts (C,).

    Args:
        ridge: λ in units of trace(A)/D, 0 or more, or `auto` for the one that `choose_ridge` takes.
        noised: whether noise was added to the sums on purpose.

    Raises:
        StatisticError: on shapes that do not fit, numbers that are not finite, or a ridge below 0.
    """
    a, sums, n = _checked(gram, cross, counts)
    direct = None if ridge == "auto" else solved_directly(a, sums, ridge)
    if direct is not None:
        return RidgeHead(direct, float(ridge), None)
    return solve_in(Spectrum.of(a), sums, n, ridge, noised=noised)


def solve_in(
    spectrum: Spectrum, cross: ArrayLike, counts: ArrayLike, ridge: Ridge, *, noised: bool = False
) -> RidgeHead:
    """As `solve`, of an A whose spectrum is known: of few rows (`Spectrum.of_rows`) no (D, D) matrix is made."""
    sums = np.asarray(cross, dtype=np.float64)
    choice = choose_ridge(spectrum, sums, counts, noised=noised) if ridge == "auto" else None
    used = choice.ridge if choice is not None else float(ridge)
    return RidgeHead(spectrum.solve(sums, used), used, choice)


def choose_ridge(
    spectrum: Spectrum, cross: ArrayLike, counts: ArrayLike, *, noised: bool = False, ridges: ArrayLike = RIDGES
) -> RidgeChoice:
    """The ridge with the least GCV of those with df ≤ N / 3 + 2 C. Of several within rounding, it is the largest.

    Args:
        spectrum: of A.
        cross: (C, D) class sums; zero rows where a class has no examples.
        counts: (C,) examples of each class; N is their sum.
        noised: whether noise was added to the sums on purpose. Then there is no criterion.
        ridges: (R,) the grid, ascending.
    """
    grid = np.asarray(ridges, dtype=np.float64)
    samples = float(np.sum(counts))
    floor = spectrum.noise / spectrum.scale if spectrum.scale > 0 else 0.0
    criterion = np.where(grid >= CLEAR_OF_NOISE * floor, _gcv(spectrum, cross, samples, grid), np.inf)
    freedom = spectrum.freedom(grid)
    noised = noised or floor > NOISED
    least = None if noised else least_error(criterion, freedom, samples, int(np.count_nonzero(counts)))
    if least is None:
        return RidgeChoice(max(FIXED, floor), "noised" if noised else "flat", grid, criterion, freedom)
    return RidgeChoice(float(grid[least.place]), "gcv", grid, criterion, freedom, least.is_limited)


def doubt(gram: FeatureGram, ridge: Ridge) -> str:
    """Why the head of these sums may be bad, in one line; empty where there is no reason.

    With nearly as many samples as features, the head without a ridge fits noise. It answers worse than with half the
    samples.
    """
    samples, width = int(gram.counts.sum()), gram.width
    if ridge == "auto" or ridge >= SAFE_RIDGE or not width / NEAR <= samples <= NEAR * width:
        return ""
    return (
        f"{samples:,} samples for {width:,} features, and a ridge of {ridge:g}: so near as many, a head needs a ridge "
        f"of {SAFE_RIDGE:g} or more; try --ridge {SAFE_RIDGE:g}"
    )


def is_uneven(counts: NDArray[np.int64], times: float = EVENED) -> bool:
    """Whether one of the classes that there are has so many times the samples of another; of counts (C,)."""
    positive = counts[counts > 0]
    return bool(positive.size and positive.max() >= times * positive.min())


def evened(weights: Float64, counts: NDArray[np.int64], power: float = ROOT) -> Float64:
    """A head (C, D) whose rows are divided by a power of their class's share, so that no class is preferred for its
    many samples.

    Scores of least squares on one-hot labels estimate P(c | z). Bayes' rule divides by the share of class c: power 1.
    It does so for scores that are probabilities; those of a ridge are drawn towards 0 instead, rare classes' most, and
    their errors grow with what they are divided by. So the power is a half, as for classifiers of networks whose rows
    are divided by a power of their norm (τ-normalisation: Kang et al., ICLR 2020). The mean share of the classes that
    there are is taken for 1: equal counts leave the head as it is.

    Args:
        counts: (C,) samples of each class; rows of classes without any stay as they are.
    """
    present = counts > 0
    if not present.any():
        return weights
    share = np.ones(len(counts))
    share[present] = counts[present] / counts[present].mean()
    return np.asarray(weights / share[:, None] ** power)


def scarce(counts: NDArray[np.int64]) -> str:
    """Why the nearest class mean may answer better, in one line: with few samples in a class no ridge can be chosen
    well. Empty where there are enough; of counts (C,)."""
    positive = counts[counts > 0]
    if not positive.size or positive.sum() >= FEW * len(positive):
        return ""
    average = positive.sum() / len(positive)
    return f"{average:.1f} samples a class are few: the nearest class mean may be better; try --form discriminant"


def scarce_or_uneven(counts: NDArray[np.int64]) -> str:
    """Why another head of the same sums may answer better, in one line; empty where there is no reason.

    Samples may be few (`scarce`). And a ridge on one-hot labels prefers the classes with most samples. That is right
    only where people ask about these classes as often.

    Args:
        counts: (C,) samples of each class.
    """
    few = scarce(counts)
    if few or not is_uneven(counts, UNEVEN):
        return few
    positive = counts[counts > 0]
    return (
        f"one class has {positive.max():,} samples, another {positive.min():,}, and a ridge head prefers what is "
        "frequent: where all are asked about alike, try --form discriminant or even"
    )


def _gcv(spectrum: Spectrum, cross: ArrayLike, samples: float, ridges: Float64) -> Float64:
    """(R,) GCV. It is infinite where the error, or the samples less the degrees of freedom, are within rounding of 0.

    Both are sums of terms above 0. Subtracting nearly all from N would lose them to rounding: with fewer samples than
    features, a small ridge leaves little of either. Features that span all N samples leave no part of the labels
    outside.
    """
    penalty, values = spectrum.penalties(ridges), spectrum.values
    share = divided(penalty, values + penalty) * (values > 0)  # (R, D) what the ridge leaves in each direction
    energy = divided((spectrum.rotated(cross) ** 2).sum(axis=0), values)  # (D,) of the labels, in each direction
    rank = int((values > 0).sum())
    outside = 0.0 if rank == samples else samples - energy.sum()
    error = outside + (energy * share**2).sum(axis=1)
    left = samples - rank + share.sum(axis=1)
    rounding = 0.0 if rank == samples else spectrum.width * np.finfo(np.float64).eps * samples
    sound = (error > rounding) & (left > rounding)
    return np.where(sound, divided(samples * error, left**2), np.inf)


def _checked(gram: ArrayLike, cross: ArrayLike, counts: ArrayLike) -> tuple[Float64, Float64, Float64]:
    a, sums, n = (np.asarray(array, dtype=np.float64) for array in (gram, cross, counts))
    if sums.ndim != 2 or a.shape != (sums.shape[1],) * 2 or n.shape != (len(sums),):
        got = f"{a.shape}, {sums.shape}, {n.shape}"
        raise StatisticError("ridge", expected="A (D, D), class sums (C, D), counts (C,)", got=got)
    if not (np.isfinite(sums).all() and np.isfinite(n).all() and (n >= 0).all()):
        raise StatisticError("ridge", expected="finite sums, and counts from 0", got="others")
    if not np.isfinite(a).all():
        raise StatisticError("ridge", expected="a square matrix of finite numbers", got=f"shape {a.shape}")
    return a, sums * (n > 0)[:, None], n

"""FFC's closed form: from summed Gram and cross sums to a linear head, and which ridge it is solved with.

Over unit features z (D,) and one-hot labels y (C,), devices send A_i = Σ z zᵀ and b_i = Σ z yᵀ (SphereFed: Dong et al.,
ECCV 2022, eq. 10). Their sums are the sums over the pooled data, so the head

    W = ((A + λ I)⁻¹ b)ᵀ        (eq. 12), with λ = ridge · trace(A) / D,

is exactly the ridge regression of the pooled data, whatever way the data was spread. λ is relative to the mean of A's
diagonal, so that one setting serves any number of samples; the paper's λ = 0 is the limit.

1. `contract/spectrum.py` takes A's eigenvalues s and eigenvectors V, once; every ridge is cheap from there. Where the
   ridge is given, the equations are solved as they stand (`solved_directly`).
2. `choose_ridge` picks the ridge with the least generalised cross-validation (Golub, Heath, Wahba, Technometrics 1979)
   among those with df(λ) ≤ N / 3 + 2 C, since repeated photos reward a head that fits single ones
   (`contract/spectrum.py`),

       GCV(λ) = (R(λ) / N) / (1 − df(λ) / N)²,

   where R(λ) = N − Σ_i ‖Vᵀb‖_i² (s_i + 2λ) / (s_i + λ)² is the squared error on the samples themselves, as Σ ‖y‖² = N
   for one-hot labels, and df(λ) = Σ_i s_i / (s_i + λ) the effective degrees of freedom. It estimates the error on
   samples that were not seen, and needs nothing but the sums; leave-one-out needs each sample's leverage, which sums
   do not hold.
3. `solve` gives the head. Ridge 0 gives the least-squares head of least norm, as `numpy.linalg.lstsq` on the pooled
   features would.

Sums that were rounded on their way have eigenvalues that are off by ν (see `Spectrum`): ridges with λ below 10 ν are
not chosen. Sums with noise added on purpose have no criterion, since R(λ) is off by the noise in b, too. They get the
fixed ridge 0.3, or λ = ν where that is more, which makes A + λI positive again. Who noised need not say so: where ν is
more than a tenth of A's mean diagonal, no rounding did it (half precision comes to 0.01).

The head is that of Fed3R (Fanì et al., ICML 2024) and, for the same λ, of AFL (He et al., CVPR 2025), whose devices
send other numbers that amount to the same sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from contract.errors import StatisticError
from contract.spectrum import CLEAR_OF_NOISE, RIDGES, Spectrum, divided, least_error, solved_directly
from contract.statistics import FeatureGram

__all__ = [
    "FIXED",
    "Ridge",
    "RidgeChoice",
    "RidgeHead",
    "choose_ridge",
    "doubt",
    "scarce_or_uneven",
    "solve",
    "solve_head",
]

Float64 = NDArray[np.float64]
Ridge = float | Literal["auto"]
FIXED = 0.3  # the one ridge that loses least in its worst case (decision 078)
NEAR = 4  # so many times more, or fewer, samples than features are near as many
SAFE_RIDGE = 0.1  # below it, accuracy falls near N = D (docs/methods.md has the figures)
FEW = 4  # samples a class, on the average, below which the nearest class mean is the better guess (decision 101)
UNEVEN = 5  # so many times more samples of one class than of another are worth a word (decision 100)
NOISED = 0.1  # ν / scale above which sums were noised on purpose


@dataclass(frozen=True, eq=False)
class RidgeChoice:
    """Which ridge, and what spoke for it.

    Attributes:
        ridge: in units of trace(A)/D.
        by: `gcv`, or why there was nothing to go by: `noised`, or `flat` where no ridge has a finite criterion.
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
    """The head, and how its ridge came about.

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
    spectrum = Spectrum.of(a)
    choice = choose_ridge(spectrum, sums, n, noised=noised) if ridge == "auto" else None
    used = choice.ridge if choice is not None else float(ridge)
    return RidgeHead(spectrum.solve(sums, used), used, choice)


def choose_ridge(
    spectrum: Spectrum, cross: ArrayLike, counts: ArrayLike, *, noised: bool = False, ridges: ArrayLike = RIDGES
) -> RidgeChoice:
    """The ridge with the least GCV of those with df ≤ N / 3 + 2 C; of several within rounding of it, the largest.

    Args:
        spectrum: of A.
        cross: (C, D) class sums; zero rows where a class has no examples.
        counts: (C,) examples of each class; N is their sum.
        noised: whether noise is known to be in the sums on purpose; then there is no criterion to go by.
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


def solve_head(gram: FeatureGram, ridge: Ridge) -> Float64:
    """The head W (C, D), float64, that fits the pooled data behind `gram`; see `solve`."""
    return solve(gram.matrix, gram.cross, gram.counts, ridge).weights


def doubt(gram: FeatureGram, ridge: Ridge) -> str:
    """Why the head of these sums may be bad, in one line; empty where nothing speaks against it.

    Near as many samples as features the unregularised head fits noise, and answers worse than with half the samples.
    """
    samples, width = int(gram.counts.sum()), gram.width
    if ridge == "auto" or ridge >= SAFE_RIDGE or not width / NEAR <= samples <= NEAR * width:
        return ""
    return (
        f"{samples:,} samples for {width:,} features, and a ridge of {ridge:g}: so near as many, a head needs a ridge "
        f"of {SAFE_RIDGE:g} or more; try --ridge {SAFE_RIDGE:g}"
    )


def scarce_or_uneven(counts: NDArray[np.int64]) -> str:
    """Why another head of the same sums may answer better, in one line; empty where nothing says so.

    From few samples a class nothing can be chosen well, and a ridge on one-hot labels prefers the classes that it saw
    most of, as is right only where they are asked about as often.

    Args:
        counts: (C,) samples of each class.
    """
    held = counts[counts > 0]
    if not held.size:
        return ""
    if held.sum() < FEW * len(held):
        each = held.sum() / len(held)
        return f"{each:.1f} samples a class are few: the nearest class mean may be better; try --form discriminant"
    if held.max() < UNEVEN * held.min():
        return ""
    return (
        f"one class has {held.max():,} samples, another {held.min():,}, and a ridge head prefers what is frequent: "
        "where all are asked about alike, try --form discriminant"
    )


def _gcv(spectrum: Spectrum, cross: ArrayLike, samples: float, ridges: Float64) -> Float64:
    """(R,) GCV; infinite where the error, or the samples beside the degrees of freedom, are within rounding of 0.

    Both are put together from what is above 0, not by subtracting nearly all from N: with fewer samples than features a
    small ridge leaves little of either. Features that span all N samples leave nothing of the labels outside of them.
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
    a, sums, n = (np.asarray(given, dtype=np.float64) for given in (gram, cross, counts))
    if sums.ndim != 2 or a.shape != (sums.shape[1],) * 2 or n.shape != (len(sums),):
        got = f"{a.shape}, {sums.shape}, {n.shape}"
        raise StatisticError("ridge", expected="A (D, D), class sums (C, D), counts (C,)", got=got)
    if not (np.isfinite(sums).all() and np.isfinite(n).all() and (n >= 0).all()):
        raise StatisticError("ridge", expected="finite sums, and counts from 0", got="others")
    if not np.isfinite(a).all():
        raise StatisticError("ridge", expected="a square matrix of finite numbers", got=f"shape {a.shape}")
    return a, sums * (n > 0)[:, None], n

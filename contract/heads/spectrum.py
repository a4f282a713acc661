"""A symmetric matrix by its eigenvalues, so that every ridge after the first one is cheap.

For A = V diag(s) Vᵀ, (A + λ I)⁻¹ = V diag(1 / (s + λ)) Vᵀ. In this folder a ridge is always λ in units of trace(A) / D,
the mean of A's diagonal. So one setting serves features of any length and any number of samples.

**The choice of a ridge.** `least_error` takes the ridge with the least estimated error among those whose degrees of
freedom are not too many for the samples. Such estimates assume that samples are independent. If photos are there twice,
or nearly, a head that fits single samples is right about their copies. With fewer distinct samples than features the
estimate then falls to 0, and rewards exactly that.

**Errors in A.** A sum of squares has no negative eigenvalue. If A has one, A was rounded on its way or noised on
purpose. The size ν of the lowest eigenvalue says how far any of them may be off. Eigenvalues that are not above
rounding count as 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from protofleet.contract.errors import StatisticError

__all__ = ["CLEAR_OF_NOISE", "RIDGES", "Least", "Spectrum", "divided", "least_error", "repeated", "solved_directly"]

Float64 = NDArray[np.float64]
RIDGES: Float64 = np.logspace(-4, 3, 29)  # four for each power of ten
RIDGES.flags.writeable = False
_CLEAR_OF_ROUNDING = 1e6  # λ in units of rounding, from which an eigenvalue that is rounding plays no part
FREEDOM_A_SAMPLE, FREEDOM_A_CLASS = 1 / 3, 2  # together the most that a chosen ridge may have (decision 223)
WORTH_A_WORD = 0.9  # of the error that is taken: estimates differ by as much without any copy
CLEAR_OF_NOISE = 10.0  # λ / ν from which what is chosen by the spectrum is taken to mean something


@dataclass(frozen=True, eq=False)
class Spectrum:
    """A (D, D) = V diag(s) Vᵀ.

    A matrix of few rows may leave eigenvalues of 0 out (`of_rows`): then there are K ≤ D of them.

    Attributes:
        values: (K,) float64, s, ascending, 0 or more.
        vectors: (D, K) float64, V, a column for each of them.
        scale: trace(A) / D, or 0 where that is negative: the unit of a ridge.
        noise: ν, how far below 0 the lowest eigenvalue was; 0 where that is rounding of float64.
    """

    values: Float64
    vectors: Float64
    scale: float
    noise: float

    @classmethod
    def of(cls, matrix: ArrayLike) -> Spectrum:
        """Of a symmetric (D, D) matrix; only its lower triangle is read.

        Raises:
            StatisticError: when it is not square, or not finite.
        """
        a = np.asarray(matrix, dtype=np.float64)
        if a.ndim != 2 or a.shape[0] != a.shape[1] or not a.size or not np.isfinite(a).all():
            raise StatisticError("ridge", expected="a square matrix of finite numbers", got=f"shape {a.shape}")
        values, vectors = np.linalg.eigh(a)
        rounding = len(a) * np.finfo(np.float64).eps * max(float(values[-1]), 0.0)
        noise = float(-values[0]) if -values[0] > rounding else 0.0
        scale = max(float(np.trace(a)) / len(a), 0.0)
        return cls(np.where(values > rounding, values, 0.0), vectors, scale, noise)

    @classmethod
    def of_rows(cls, rows: ArrayLike, asked: ArrayLike) -> Spectrum:
        """Of A = XᵀX for few rows X (N, D), in the directions of X and of `asked` (M, D): K = N + M < D of them.

        It takes D (N + M)² operations and no (D, D) matrix. `rotated` and `solve` are right for rows that are sums of
        these.

        Raises:
            StatisticError: the numbers are not finite.
        """
        x = np.asarray(rows, dtype=np.float64)
        both = np.concatenate([x, np.asarray(asked, dtype=np.float64)])
        if not np.isfinite(both).all():
            raise StatisticError("ridge", expected="finite numbers", got="others")
        if not len(both):
            return cls(np.zeros(0), np.zeros((x.shape[1], 0)), 0.0, 0.0)
        basis, _ = np.linalg.qr(both.T)  # (D, K), orthonormal columns
        within = x @ basis
        small = cls.of(within.T @ within)
        return cls(small.values, basis @ small.vectors, small.scale * len(small.values) / x.shape[1], small.noise)

    @property
    def width(self) -> int:
        return len(self.vectors)

    def penalties(self, ridges: ArrayLike) -> Float64:
        """(R, 1) λ of each ridge (R,), or of one."""
        return np.atleast_1d(np.asarray(ridges, dtype=np.float64))[:, None] * self.scale

    def freedom(self, ridges: ArrayLike) -> Float64:
        """(R,) effective degrees of freedom Σ s / (s + λ): how many directions a solution makes use of."""
        return np.asarray(divided(self.values, self.values + self.penalties(ridges)).sum(axis=1))

    def rotated(self, rows: ArrayLike) -> Float64:
        """Rows (C, D) in the coordinates of the eigenvectors: (C, D)."""
        return np.asarray(np.asarray(rows, dtype=np.float64) @ self.vectors)

    def solve(self, rows: ArrayLike, ridge: float) -> Float64:
        """Rows (C, D) times (A + λ I)⁻¹: (C, D). Directions in which that is singular are left out: the least norm.

        Raises:
            StatisticError: when `ridge` is negative or not finite.
        """
        if not np.isfinite(ridge) or ridge < 0:
            raise StatisticError("ridge", expected="0 or more", got=ridge)
        penalised = self.values + ridge * self.scale
        is_regular = penalised > self.width * np.finfo(np.float64).eps * penalised[-1]
        return np.ascontiguousarray(self.rotated(rows) * divided(is_regular * 1.0, penalised) @ self.vectors.T)


def solved_directly(matrix: Float64, rows: Float64, ridge: float) -> Float64 | None:
    """Rows (C, D) times (A + λ I)⁻¹, without A's eigenvalues, which take most of a head's time; None where they matter.

    They matter where λ is not far above rounding. They also matter where A has an eigenvalue below 0 by more than
    rounding, because such a one counts as 0. A Cholesky factor of A + τ I shows that none is below −τ.

    Args:
        matrix: A (D, D), symmetric and finite.
        ridge: λ in units of trace(A)/D.
    """
    width, trace = len(matrix), float(np.trace(matrix))
    rounding = width * np.finfo(np.float64).eps * trace  # no eigenvalue of a sum of squares is above the trace
    if not ridge * trace / width > _CLEAR_OF_ROUNDING * rounding > 0:
        return None
    shifted, diagonal = matrix.copy(), np.diag_indices(width)
    shifted[diagonal] += rounding
    try:
        np.linalg.cholesky(shifted)
    except np.linalg.LinAlgError:
        return None
    shifted[diagonal] += ridge * trace / width - rounding
    return np.ascontiguousarray(np.linalg.solve(shifted, rows.T).T)


@dataclass(frozen=True)
class Least:
    """Which ridge of a grid has the least estimated error.

    Attributes:
        place: in the grid.
        is_limited: whether a ridge with too many degrees of freedom has a tenth less estimated error.
    """

    place: int
    is_limited: bool


def least_error(error: ArrayLike, freedom: ArrayLike, samples: float, classes: int) -> Least | None:
    """The ridge with the least error of those with df ≤ N / 3 + 2 C. Of several within rounding, it is the largest.

    If every ridge of the grid has more degrees of freedom than that, it is the largest ridge.

    Args:
        error: (R,) the estimate for each ridge of an ascending grid, 0 or more; infinite where it means nothing.
        freedom: (R,) effective degrees of freedom of each, falling.
        samples: N, or the degrees of freedom that are known of a covariance.
        classes: C, those with samples.

    Returns:
        None if no allowed ridge has a finite error.
    """
    errors, df = np.asarray(error, dtype=np.float64), np.asarray(freedom, dtype=np.float64)
    most = max(FREEDOM_A_SAMPLE * samples + FREEDOM_A_CLASS * classes, float(df[-1]))
    allowed_errors = np.where(df <= most, errors, np.inf)
    if not np.isfinite(allowed_errors.min()):
        return None
    rounding = 1 + 1e-9
    place = int(np.flatnonzero(allowed_errors <= allowed_errors.min() * rounding)[-1])
    return Least(place, bool(errors.min() < WORTH_A_WORD * allowed_errors[place]))


def repeated(ridge: float) -> str:
    """What a limited choice (`Least.is_limited`) may mean, in one line for a person."""
    return (
        f"ridge {ridge:.2g} is the best that fits no single photos; a smaller one only seems better, as with few photos"
        " or where photos are there twice: leave such copies out, if there are any"
    )


def divided(above: Float64, below: Float64) -> Float64:
    """above / below, broadcast, and 0 where `below` is 0."""
    return np.divide(above, below, out=np.zeros(np.broadcast(above, below).shape), where=below > 0)

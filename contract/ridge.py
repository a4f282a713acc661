"""FFC's closed form: from summed Gram and cross sums to a linear head. SphereFed (Dong et al., ECCV 2022), eq. 6 to 12.

Over unit features z (D,) and one-hot labels y (C,), devices send A_i = Σ z zᵀ and b_i = Σ z yᵀ (eq. 10). Their sums
are the sums over the pooled data, so the head

    W = ((A + λ I)⁻¹ b)ᵀ        (eq. 12), with λ = ridge · trace(A) / D,

is exactly the ridge regression of the pooled data, whatever way the data was spread. λ is relative to the mean of A's
diagonal, so that one setting serves any number of samples; the paper's λ = 0 is the limit.

A + λ I is symmetric and positive, and is factored by Cholesky. Where it is singular to working precision (ridge 0 and
fewer samples than features, or a feature that is always zero), the least-squares head of least norm is taken, by the
eigenvectors of A, which is what `numpy.linalg.lstsq` on the pooled features gives.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from contract.errors import StatisticError
from contract.statistics import FeatureGram

__all__ = ["doubt", "solve_head"]

Float64 = NDArray[np.float64]
NEAR = 4  # so many times more, or fewer, samples than features are near as many
SAFE_RIDGE = 0.1  # below it, accuracy falls near N = D (docs/methods.md has the figures)


def solve_head(gram: FeatureGram, ridge: float) -> Float64:
    """The head W (C, D), float64, that fits the pooled data behind `gram`.

    Rows of classes without examples are zero: their b is zero, so the solution is.

    Args:
        ridge: λ in units of trace(A)/D, 0 or more.

    Raises:
        StatisticError: when `ridge` is negative or not finite.
    """
    if not np.isfinite(ridge) or ridge < 0:
        raise StatisticError("ridge", expected="0 or more", got=ridge)
    a = gram.matrix  # (D, D)
    width = gram.width
    a[np.diag_indices(width)] += ridge * np.trace(a) / width
    b = gram.cross.T  # (D, C)
    if _regular(a):
        head = np.linalg.solve(a, b)
    else:
        head = np.linalg.pinv(a, rcond=width * np.finfo(np.float64).eps, hermitian=True) @ b
    head[:, gram.counts == 0] = 0.0
    return np.ascontiguousarray(head.T)


def doubt(gram: FeatureGram, ridge: float) -> str:
    """Why the head of these sums may be bad, in one line; empty where nothing speaks against it.

    Near as many samples as features the unregularised head fits noise, and answers worse than with half the samples.
    """
    samples, width = int(gram.counts.sum()), gram.width
    if ridge >= SAFE_RIDGE or not width / NEAR <= samples <= NEAR * width:
        return ""
    return (
        f"{samples:,} samples for {width:,} features, and a ridge of {ridge:g}: so near as many, a head needs a ridge "
        f"of {SAFE_RIDGE:g} or more; try --ridge {SAFE_RIDGE:g}"
    )


def _regular(a: Float64) -> bool:
    """Whether Cholesky's pivots stay above rounding: the matrix is positive to working precision."""
    try:
        pivots = np.diag(np.linalg.cholesky(a)) ** 2
    except np.linalg.LinAlgError:
        return False
    return bool(pivots.min() > len(a) * np.finfo(np.float64).eps * pivots.max())

"""What FFC's Gram matrix A = Σ z zᵀ shows of the N samples in it.

1. Membership. The quadratic form zᵀ A⁻¹ z is at most 1 for each sample of A, whatever the others are (its leverage);
   with N below the rank of features it is 1, and without bound for everything outside the samples' span. So with few
   samples A alone says of any photo whether it is in it.
2. Recovery. A = Bᵀ B with B = Λ^½ Vᵀ (r × D) leaves a rotation open: samples are uᵀ B with unit vectors u. Features
   behind a ReLU are never negative, and many are exactly zero; so a sample is an extreme ray of the cone {u : uᵀ B ≥ 0}
   wherever zeros enough are its own. A linear programme with a random aim finds such rays; one whose feature has
   length 1 and whose u has length 1, too, is a sample, and the attacker knows it without any candidate. It is taken
   out of A, whose rank falls by one, and the search goes on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

__all__ = ["Span", "recovered"]

Float64 = NDArray[np.float64]
FLOAT32 = 1e-7  # what the attacker's own features of a photo may differ by from the device's, relatively
_KNOWN = 1e-4  # a ray counts as a sample if both lengths are 1 to within this


class Span:
    """What the spectrum of A (D, D) says of candidates.

    Args:
        rounding: of an entry of A, relatively; no less than `FLOAT32` counts.
    """

    def __init__(self, gram: Float64, rounding: float = FLOAT32) -> None:
        noise = 2.0 * max(rounding, FLOAT32) * float(np.linalg.norm(gram)) / np.sqrt(len(gram))  # of a random matrix
        values, self._vectors = np.linalg.eigh(gram)
        self._values = np.maximum(values, 0.0) + noise

    def leverage(self, candidates: Float64) -> Float64:
        """(K,) zᵀ (A + ε I)⁻¹ z of candidates (K, D), ε what rounding of A's entries does to its spectrum."""
        return np.asarray(((candidates @ self._vectors) ** 2 / self._values).sum(axis=1))


def recovered(gram: Float64, tries: int, rng: np.random.Generator) -> Float64:
    """(R, D) unit features that are in the sums for certain, found from A (D, D) alone.

    Args:
        tries: linear programmes in all.
    """
    left, found = gram.copy(), []
    root = _root(left)
    for _ in range(tries):
        if not len(root):
            break
        ray = _extreme_ray(root, rng)
        if ray is None:
            continue
        feature = ray @ root
        length = float(np.linalg.norm(feature))
        if length > 0 and abs(float(np.linalg.norm(ray)) / length - 1.0) < _KNOWN:
            found.append(feature / length)
            left = left - np.outer(found[-1], found[-1])
            root = _root(left, len(root) - 1)
    return np.array(found).reshape(len(found), len(gram))


def _root(gram: Float64, rank: int | None = None) -> Float64:
    """B (r, D) with Bᵀ B = A; r is what stands above rounding, or as given."""
    values, vectors = np.linalg.eigh(gram)
    count = int((values > 1e-9 * values[-1]).sum()) if rank is None else rank
    chosen = slice(len(values) - count, None)
    return np.asarray((vectors[:, chosen] * np.sqrt(np.maximum(values[chosen], 0.0))).T)


def _extreme_ray(root: Float64, rng: np.random.Generator) -> Float64 | None:
    """u (r,), an extreme ray of {u : uᵀ B ≥ 0}, where the sum of its feature's numbers is 1."""
    slack = 1e-9
    programme = linprog(
        rng.standard_normal(len(root)),
        A_ub=-root.T,
        b_ub=np.full(root.shape[1], slack),
        A_eq=root.sum(axis=1)[None],
        b_eq=[1.0],
        bounds=(None, None),
        method="highs-ds",
    )
    return np.asarray(programme.x) if programme.status == 0 else None

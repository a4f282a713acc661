"""Whether a photo is among those of a released class mean: a likelihood-ratio test, and how often it is right.

The attacker knows the extractor, as every device does, has public images of the same kind, and holds candidates. With
μ the mean and Σ the covariance within classes of public features, a mean m over n samples, and noise of deviation τ on
each of its numbers (the mechanism's, or the encoding's rounding), the class's deviation d = m − μ is

    of n others            d ~ N(0,              Σ / n + τ² I)
    with the candidate z   d ~ N((z − μ) / n,    Σ (n − 1) / n² + τ² I)

and the log-ratio of these two densities orders the candidates; no other test does better where features are Gaussian
(Neyman and Pearson). For n = 1 it is the distance of z from m. Without the covariance, the projection of z − μ on
m − μ is what is left (`projection`).

Features behind a ReLU are never negative, so no sample of a mean exceeds n times that mean in any number: who does is
out for certain, whatever the densities say (`possible`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["FALSE_POSITIVES", "Population", "Success", "likelihood_ratio", "possible", "projection", "success"]

Float64 = NDArray[np.float64]
FALSE_POSITIVES = (0.001, 0.01, 0.1)
_SHRINKAGE = 0.01  # of the mean variance, added to each; never looked for
_EXPANDS = 1e-4  # noise below which a difference of squares would lose what a single sample shows
_LEAST = 1e-9  # deviation of what no encoding rounds


@dataclass(frozen=True, eq=False)
class Population:
    """What the attacker knows of features from public images.

    Attributes:
        means: (C, D) class means.
        basis: (D, D) eigenvectors of the covariance within classes, in columns.
        variances: (D,) along them.
    """

    means: Float64
    basis: Float64
    variances: Float64

    @classmethod
    def of(cls, features: Float64, labels: NDArray[np.int64], classes: int) -> Population:
        """From public features (N, D) and their labels (N,)."""
        means = np.stack([features[labels == label].mean(axis=0) for label in range(classes)])
        left = features - means[labels]
        variances, basis = np.linalg.eigh(left.T @ left / max(len(left) - classes, 1))
        return cls(means, basis, np.maximum(variances, 0.0) + _SHRINKAGE * variances.mean())

    @property
    def effective(self) -> float:
        """Directions that features vary in enough to tell photos apart: (Σ λ)² / Σ λ²."""
        return float(self.variances.sum() ** 2 / (self.variances**2).sum())

    def deviations(self, features: Float64, labels: NDArray[np.int64] | int) -> Float64:
        """What features (…, D) of these classes deviate from their mean by, along the eigenvectors: (…, D)."""
        return np.asarray((features - self.means[labels]) @ self.basis)


@dataclass(frozen=True)
class Success:
    """How well a test tells members from others.

    Attributes:
        auc: area under the receiver operating characteristic; 0.5 by chance.
        found: share of members found at each of `FALSE_POSITIVES`, which is that share itself by chance.
        first: share of members that rank before all others of their class, as many as `among` in all.
        among: candidates, the member included.
    """

    auc: float
    found: tuple[float, ...]
    first: float
    among: int


def likelihood_ratio(
    released: Float64, candidates: NDArray[np.floating], count: int, variances: Float64, noise: float = 0.0
) -> Float64:
    """(K,) log-ratio for candidates (K, D), up to a constant of the release.

    Args:
        released: (D,) deviation d of the class mean from the public one, along the eigenvectors.
        candidates: (K, D) theirs.
        count: n, samples in the mean.
        noise: τ, known to the attacker.
    """
    extra = noise**2 + _LEAST**2
    with_it = variances * (count - 1) / count**2 + extra
    without = variances / count + extra
    if count == 1 and noise < _EXPANDS:
        distance = ((released - candidates) ** 2 / with_it).sum(axis=1)
    else:  # the square expanded: two products with a vector
        crossed = candidates @ (released / with_it).astype(candidates.dtype)
        squared = candidates**2 @ (1.0 / with_it).astype(candidates.dtype)
        distance = (released**2 / with_it).sum() - 2.0 / count * crossed + squared / count**2
    return np.asarray((released**2 / without).sum() - distance, dtype=np.float64) / 2


def projection(released: Float64, candidates: Float64) -> Float64:
    """(K,) how far candidates (K, D) lie in the direction of the release (D,)."""
    return np.asarray(candidates @ released / max(float(np.linalg.norm(released)), 1e-12))


def possible(total: Float64, candidates: Float64, slack: float) -> NDArray[np.bool_]:
    """(K,) whether non-negative features (K, D) can be among those of a sum (D,), known to within `slack`."""
    return np.asarray((candidates <= total + slack).all(axis=1))


def success(members: list[Float64], others: list[Float64]) -> Success:
    """Of scores of members and of others, an array of each for every class mean that was attacked.

    The area is the share of pairs in which the member scores higher, ties counting half (Mann and Whitney).
    """
    inside, outside = np.concatenate(members), np.sort(np.concatenate(others))
    below = (np.searchsorted(outside, inside, "left") + np.searchsorted(outside, inside, "right")) / 2
    limits = [outside[-1 - int(rate * len(outside))] for rate in FALSE_POSITIVES]
    ahead = [mine > theirs.max() for mine, theirs in zip(members, others, strict=True)]
    return Success(
        auc=float(below.mean() / len(outside)),
        found=tuple(float((inside > limit).mean()) for limit in limits),
        first=float(np.concatenate(ahead).mean()),
        among=1 + min(map(len, others)),
    )

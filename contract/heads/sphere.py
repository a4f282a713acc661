"""Geometry of the class frame: where C prototypes or head rows lie on the unit sphere in R^D.

The methods need two constructions:

- SphereFed's frozen head has orthonormal rows (Dong et al., ECCV 2022, eq. 4; QR of a Gaussian matrix).
- FedHP's anchors minimise the uniform loss of its eq. 3, mean_i max_j M_ij with M = P Pᵀ − 2I. For C ≤ D + 1 the
  minimum is the regular simplex, where every pair has cosine −1/(C − 1); it is built exactly. For more classes there
  is no closed form, and the loss is minimised numerically.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import MethodError

__all__ = ["orthonormal_frame", "projection", "simplex", "uniform_loss", "uniform_prototypes", "unit_rows"]

FloatArray = NDArray[np.floating]


def unit_rows(x: FloatArray, *, eps: float = 1e-12) -> FloatArray:
    """Each row of `x` (N, D) divided by its Euclidean norm, rows shorter than `eps` by `eps` (as torch's normalize)."""
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), eps).astype(x.dtype)


def orthonormal_frame(classes: int, width: int, seed: int = 0) -> NDArray[np.float64]:
    """A head W (C, D) with orthonormal rows, W Wᵀ = I, from the QR of a seeded Gaussian matrix.

    The sign of each column of Q is fixed by R's diagonal, so the frame is uniform over the Stiefel manifold.

    Raises:
        MethodError: when C > D, since no more than D orthonormal rows exist.
    """
    if not 1 <= classes <= width:
        raise MethodError(
            "orthonormal head",
            expected=f"between 1 and {width} classes for features of width {width}",
            got=f"{classes} classes",
            hint="a backbone with wider features, or the uniform prototypes",
        )
    gaussian = np.random.default_rng(seed).standard_normal((width, classes))  # (D, C)
    q, r = np.linalg.qr(gaussian)
    return np.ascontiguousarray((q * np.where(np.diag(r) < 0, -1.0, 1.0)).T)  # (C, D)


def projection(width: int, to: int, seed: int) -> NDArray[np.float64]:
    """The agreed random projection of features from R^D to R^D': (D, D') with orthonormal columns, from the seed alone.

    Lengths shrink by about √(D'/D), the same for all; ridge regression on projected features loses what lies outside.

    Raises:
        MethodError: unless 1 ≤ D' ≤ D.
    """
    if not 1 <= to <= width:
        raise MethodError("projection", expected=f"a width of 1 to {width}", got=to)
    return np.ascontiguousarray(orthonormal_frame(to, width, seed).T)


def simplex(classes: int, width: int, seed: int = 0) -> NDArray[np.float64]:
    """The regular simplex: C unit rows in R^D with pairwise cosine exactly −1/(C − 1), randomly rotated.

    Raises:
        MethodError: unless 2 ≤ C ≤ D + 1.
    """
    if not 2 <= classes <= width + 1:
        raise MethodError("regular simplex", expected=f"2 to {width + 1} classes in R^{width}", got=classes)
    centred = np.eye(classes) - 1.0 / classes  # C points in a (C − 1)-dimensional subspace
    basis = np.linalg.svd(centred)[2][: classes - 1]  # (C−1, C), orthonormal rows spanning that subspace
    rotation = orthonormal_frame(classes - 1, width, seed)  # (C−1, D)
    return np.asarray(unit_rows(centred @ basis.T) @ rotation, dtype=np.float64)


def uniform_loss(prototypes: FloatArray) -> float:
    """FedHP's eq. 3 for unit rows P (C, D): mean over i of the largest cosine to another row."""
    cosines = prototypes @ prototypes.T - 2.0 * np.eye(len(prototypes))
    return float(cosines.max(axis=1).mean())


def uniform_prototypes(classes: int, width: int, seed: int = 0, *, steps: int = 2000) -> NDArray[np.float64]:
    """C unit rows in R^D spread as far apart as FedHP's eq. 3 asks: (C, D), float64.

    Exact (a regular simplex) when C ≤ D + 1. Otherwise a smooth maximum of each row's cosines is minimised by projected
    gradient descent with a sharpening temperature, keeping the iterate of least uniform loss.
    """
    if classes <= width + 1:
        return simplex(classes, width, seed)
    points = unit_rows(np.random.default_rng(seed).standard_normal((classes, width)))
    best, best_loss = points, uniform_loss(points)
    for step in range(steps):
        sharpness = 2.0 * 200.0 ** (step / steps)  # the smooth maximum, and with it the curvature, grows from 2 to 400
        cosines = points @ points.T
        np.fill_diagonal(cosines, -np.inf)
        weights = np.exp(sharpness * (cosines - cosines.max(axis=1, keepdims=True)))
        weights /= weights.sum(axis=1, keepdims=True)  # (C, C), row i: how much each neighbour counts in its maximum
        gradient = (weights + weights.T) @ points  # (C, D)
        points = unit_rows(points - gradient / sharpness)
        loss = uniform_loss(points)
        if loss < best_loss:
            best, best_loss = points, loss
    return np.asarray(best, dtype=np.float64)

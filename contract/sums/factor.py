"""Σ z zᵀ as a factor: few rows R with Rᵀ R = Σ z zᵀ, in whole numbers of 2⁻ᵏ, instead of D(D+1)/2 numbers.

A device with n samples and D features has a sum of rank n at most. With fewer samples than features, a factor is
smaller than the triangle: 205 kB in place of 6.6 MB for 80 samples of 1,280 features.

1. `Factor.of` takes the samples Z (n, D), turns them, R = Q Z, and rounds: R = 2⁻ᵏ · int16, with the largest k up to
   `MAX_BITS` at which every number fits. Class sums are made of the rounded rows, bᵀ = (Q Y)ᵀ R for one-hot labels Y.
   So both belong together: they are the sums of samples that differ from Z by the rounding.
2. `Factor.triangle` multiplies it out. Each number is a sum of at most D products up to 2³⁰. So float64 holds it
   exactly in any order of summation, and every machine gets the same numbers. They are multiples of 2⁻²ᵏ, with at most
   40 bits behind the point, so they enter exact sums (`fixed_point.py`) unrounded.

Q is a rotation drawn evenly from all rotations (Haar measure), and its seed is a secret of the device. So what R shows
has the same distribution for all samples with the same Σ z zᵀ: R says nothing of them that the triangle does not say.
Rows of Z itself never travel, unless there is one. The rotation also spreads the numbers evenly, which int16 needs.

Directions in which the samples do not vary, as where there are copies, have no row (docs/decisions/249).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.sums.triangle import add_products, pack_triangle

__all__ = ["COARSEST", "MAX_BITS", "Factor", "most_rows"]

Float64 = NDArray[np.float64]
MAX_BITS = 20  # twice as many bits behind the point are as many as exact sums have
_LARGEST = 2**15 - 1
_NOTHING = 1e-12  # of the trace: a direction with less is rounding
COARSEST = 2.0**-8  # of the samples: what rounding may raise the trace by


@dataclass(frozen=True, eq=False)
class Factor:
    """A factor of Σ z zᵀ.

    Attributes:
        rows: (r, D) int16, in units of 2⁻ᵏ; r is at most D.
        bits: k, 0 to `MAX_BITS`.
    """

    rows: NDArray[np.int16]
    bits: int

    @classmethod
    def of(cls, z: Float64, generator: np.random.Generator) -> tuple[Self, Float64] | None:
        """The factor of samples Z (n, D), and Q (r, n); None where int16 would be too coarse for them.

        Args:
            generator: of the rotation; nobody else may know its seed.
        """
        values, vectors = np.linalg.eigh(z @ z.T)  # (n, n): U Λ Uᵀ, smallest first
        vectors = vectors[:, values > _NOTHING * values.sum()]
        rank = vectors.shape[1]
        if not rank:
            return cls(np.zeros((0, z.shape[1]), np.int16), MAX_BITS), np.zeros((0, len(z)))
        turn = _rotation(rank, generator) @ vectors.T  # (r, n)
        rows = turn @ z  # (r, D)
        bits = min(MAX_BITS, math.floor(math.log2(_LARGEST / float(np.abs(rows).max()))))
        if bits < 0:
            return None
        factor = cls(np.rint(np.ldexp(rows, bits)).astype(np.int16), bits)
        return (factor, turn) if factor.is_fine(len(z)) else None

    @property
    def values(self) -> Float64:
        """R (r, D)."""
        return np.ldexp(self.rows.astype(np.float64), -self.bits)

    def triangle(self) -> Float64:
        """The packed upper triangle (D(D+1)/2,) of Rᵀ R: exact."""
        rows = self.rows.astype(np.float64)
        upper = np.zeros((rows.shape[1], rows.shape[1]))
        add_products(upper, rows)
        packed = pack_triangle(upper)
        return np.ldexp(packed, -2 * self.bits, out=packed)

    def slack(self, samples: float) -> float:
        """By how much rounding may have raised the trace of Rᵀ R, for unit features of so many samples.

        With R + E for R, it is 2 Σ R_ij E_ij + Σ E_ij². The numbers of E are up to 2⁻ᵏ⁻¹, and ‖R‖² is at most the
        number of samples. The first sum has a standard deviation of 0.58 · 2⁻ᵏ √n; six of them are allowed.
        """
        step = math.ldexp(1.0, -self.bits)
        return 3.5 * step * math.sqrt(samples) + 0.25 * step * step * self.rows.size

    def is_fine(self, samples: float) -> bool:
        """Whether rounding raises the trace by no more than a 256th of the samples. A coarser factor is refused."""
        return self.slack(samples) <= COARSEST * max(samples, 1.0)


def most_rows(width: int, number_bytes: int) -> int:
    """The most samples of width D whose sum goes up as a factor, beside a triangle whose numbers take so many bytes.

    A factor of more rows than half the columns saves little, and takes more memory and time to make than the triangle.
    """
    return min(width // 2, (number_bytes * (width + 1) - 1) // 4)


def _rotation(size: int, generator: np.random.Generator) -> Float64:
    """An orthogonal matrix (r, r) drawn evenly from all (Mezzadri, Notices of the AMS 54, 2007)."""
    q, upper = np.linalg.qr(generator.standard_normal((size, size)))
    return np.asarray(q * np.where(np.diagonal(upper) < 0, -1.0, 1.0))

"""What a server makes of noised sums whose noise it knows: a ridge head, and class means.

All of it is computed from what devices sent, so it costs no privacy. The sums of K devices have √K times the noise of
one device.

- **Which classes there are** (`told_apart`). Counts are noisy, too. If the largest count is ten deviations above 0, a
  class that is less than two deviations above 0 is taken to have no samples. If none is, counts tell too little, and
  every class stays.
- **Ridge head** (`noised_head`). W = B (Â + λI)⁻¹. Â is A with its negative eigenvalues set to 0, because a sum of
  squares has none. λ follows from the noise: the largest eigenvalue of noise alone is near σ_A √(2D) (Wigner's
  semicircle, the off-diagonal deviation being σ_A/√2), and `auto` takes half of it. Generalised cross-validation, which
  chooses a ridge from sums without noise, does not work here: the error that it estimates is off by B's noise.
- **AdaSSP's λ** (Wang, UAI 2018, algorithm 2), to compare with: max(0, β − λ_min). β = σ_A √(D ln(2D²/ρ)) bounds the
  noise except with probability ρ = 0.05. λ_min is the smallest eigenvalue, estimated with noise. The paper spends a
  third of its budget on λ_min. Sums that are noised anyway give it for nothing: their smallest eigenvalue less β.
- **Class means** (`noised_means`): sums over noisy counts, drawn towards the mean of all by the part of their spread
  that noise explains (James and Stein, 1961): μ + α(μ_c − μ), α = 1 − Σ_c D σ_B²/n_c² / Σ_c ‖μ_c − μ‖², at least 0.01.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.heads.spectrum import divided

__all__ = ["adassp_penalty", "edge", "noised_head", "noised_means", "told_apart"]

Float64 = NDArray[np.float64]
OF_EDGE = 0.5  # decision 146: chosen on training images
CLEAR = 2.0  # deviations above 0 from which a class is there
TELLING = 10.0  # deviations above 0 of the largest class from which counts tell anything
LEAST = 0.01  # of the way from the mean of all: means that lie on one another would name the first class
_FAILS = 0.05  # ρ of AdaSSP


def told_apart(counts: Float64, deviation: Float64) -> NDArray[np.bool_]:
    """(C,) which classes have samples, by noisy counts (C,) whose noise has these deviations (C,)."""
    if (counts <= TELLING * deviation).all():
        return np.ones(len(counts), dtype=bool)
    return np.asarray(counts >= CLEAR * deviation)


def edge(width: int, deviation: float) -> float:
    """The largest eigenvalue of the noise on A (D, D); `deviation` is that of the noise on A's diagonal."""
    return deviation * math.sqrt(2.0 * width)


def adassp_penalty(smallest: float, width: int, deviation: float) -> float:
    """AdaSSP's λ for A (D, D) with noise of this deviation, whose smallest eigenvalue is `smallest`, noise and all."""
    bound = deviation * math.sqrt(width * math.log(2.0 * width**2 / _FAILS))
    return max(0.0, bound - max(0.0, smallest - bound))


def noised_head(gram: Float64, cross: Float64, deviation: float, ridge: float | str) -> tuple[Float64, str]:
    """The head W (C, D) of noised A (D, D) and B (C, D), and how its ridge was chosen, in words.

    Args:
        deviation: of the noise on A's diagonal.
        ridge: `auto`, `adassp`, or λ in units of trace(A)/D.
    """
    values, vectors = np.linalg.eigh(gram)
    width, clipped = len(values), np.maximum(values, 0.0)
    if ridge == "adassp":
        penalty, why = adassp_penalty(float(values[0]), width, deviation), "as AdaSSP takes it from the noise"
    elif ridge == "auto":
        penalty, why = OF_EDGE * edge(width, deviation), "from the noise"
    else:
        penalty, why = float(ridge) * float(clipped.mean()), "as given"
    penalised = clipped + penalty
    inverse = divided((penalised > width * np.finfo(np.float64).eps * penalised[-1]) * 1.0, penalised)
    unit = float(clipped.mean()) or 1.0
    return np.ascontiguousarray((cross @ vectors * inverse) @ vectors.T), f"ridge {penalty / unit:.2g}, {why}"


def noised_means(sums: Float64, counts: Float64, deviation: Float64, present: NDArray[np.bool_]) -> Float64:
    """Class means (C, D) of noised sums (C, D) and counts (C,); zero for classes that are not present.

    Args:
        deviation: (C,) of the noise on each class's sum.
    """
    means = np.zeros_like(sums)
    n = np.maximum(counts[present], 1.0)[:, None]
    own, overall = sums[present] / n, sums[present].sum(axis=0) / n.sum()
    apart = own - overall
    explained, spread = sums.shape[1] * float((deviation[present, None] ** 2 / n**2).sum()), float((apart**2).sum())
    weight = max(LEAST, 1.0 - explained / spread) if spread > explained else LEAST
    means[present] = overall + weight * apart
    return means

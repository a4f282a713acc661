"""What noise leaves of an attack, and what (ε, δ) allows at most: by NCM-DP's sums and FFC-DP's.

    by samples         what the attacker of the other tables finds: of NCM-DP by the likelihood ratio over the class
                       sum, being given the number of samples; of FFC-DP by zᵀ (A − what public images let expect) z
    all others known   the attacker knows every photo of the device but one, takes them off the sums that leave, and
                       asks which of 1,000 the last one is: likelihood ratio over every number, the best test there is.
                       How many others there are plays no part
    allowed at most    what no test exceeds. All that leaves is one Gaussian mechanism of noise multiplier m for one
                       sample more or fewer, and m/ρ for one replaced (decision 144); here one is replaced. With
                       μ = ρ √releases / m an area is at most Φ(μ/√2), and at a false positives no more than
                       Φ(Φ⁻¹(a) + μ) are found (Dong, Roth and Su, JRSS B 2022); among K candidates a = 1/K.

ρ is that of any two photos. Two of one class with features that are never negative, as here, can be told apart less, so
the best test stays below; a figure above would be a mistake in the noise or in what is stated: `exceeded` says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp
from scipy.stats import norm

from benchmarks.attacks.attack_membership import FALSE_POSITIVES, Success, success
from benchmarks.attacks.attack_releases import EPSILONS, Part, draw, noise_for
from protofleet.contract.methods import METHODS
from protofleet.contract.privacy.noised_sums import SumNoise, feature_sums, on_grid
from protofleet.contract.privacy.secret_noise import SecretNoise
from protofleet.contract.sums.triangle import pack_triangle, unpack_triangle

__all__ = [
    "KNOWN",
    "MOST",
    "Allowed",
    "allowed",
    "exceeded",
    "mechanism_of",
    "noised_gram",
    "others_known",
    "quadratic",
]

KNOWN, MOST = "all others known", "allowed at most"
TARGETED, OTHERS = 20, 999  # of each class and release
RELEASES = 5
_SIGMAS = 4.0  # how far above what is allowed chance does not reach
Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Allowed:
    """What no test exceeds: the area, members found at each of `FALSE_POSITIVES`, and the right one of 1,000."""

    auc: float
    found: tuple[float, ...]
    first: float


def mechanism_of(method: str, epsilon: float) -> SumNoise:
    """That of one release at δ = 1e-5 for one sample more or fewer, with the method's own shares."""
    hyper = METHODS[method].hyper
    shares = [float(hyper[name].default) if name in hyper else 0.0 for name in ("count_share", "gram_share")]
    return noise_for(epsilon, *shares)


def allowed(noise: SumNoise, releases: int = 1) -> Allowed:
    """By the Gaussian mechanism that a release is, for a photo replaced by another."""
    mu = math.sqrt(noise.replaced() * releases) / noise.multiplier
    found, first = (norm.cdf(norm.ppf(np.array(at)) + mu) for at in (FALSE_POSITIVES, [1.0 / (OTHERS + 1)]))
    return Allowed(float(norm.cdf(mu / math.sqrt(2.0))), tuple(map(float, found)), float(first[0]))


def noised_gram(noise: SumNoise, z: Float64, rng: np.random.Generator) -> Float64:
    """FFC-DP's matrix A (D, D) of samples (N, D)."""
    exact, width = on_grid(z), z.shape[1]
    noised = noise.noised_triangle(pack_triangle(exact.T @ exact), width, SecretNoise(rng.bytes(32)))
    return unpack_triangle(noised, width)


def quadratic(z: Float64, matrix: Float64) -> Float64:
    """(N,) zᵀ M z of features (N, D); in single precision, far below the noise."""
    narrow = z.astype(np.float32)
    return np.asarray(((narrow @ matrix.astype(np.float32)) * narrow).sum(axis=1), dtype=np.float64)


def others_known(part: Part, method: str, epsilon: float, seed: int, releases: int = 1) -> list[Success]:
    """How well somebody does who knows all photos but one, for each of `RELEASES` devices.

    Args:
        releases: how often the same samples leave, with fresh noise each time; the attacker averages.
    """
    noise, found = mechanism_of(method, epsilon), []
    classes, width = int(part.y.max()) + 1, part.z.shape[1]
    for number in range(RELEASES):
        rng = np.random.default_rng([seed, number])
        members, others = draw(part, TARGETED, rng)
        z, labels = on_grid(part.z[np.concatenate(members)]), np.repeat(np.arange(classes), TARGETED)
        sums, on_gram = feature_sums(z, labels, classes), np.zeros((width, width))
        on_rows = np.mean([noise.noised_rows(sums, SecretNoise(rng.bytes(32))) - sums for _ in range(releases)], axis=0)
        if noise.gram_share:
            exact = z.T @ z
            on_gram = np.mean([noised_gram(noise, z, rng) - exact for _ in range(releases)], axis=0)
        ours, theirs = [], []
        for label in range(classes):
            for scores in _each(noise, part, members[label], others[label][:OTHERS], on_rows[label], on_gram):
                ours.append(scores[:1])
                theirs.append(scores[1:])
        found.append(success(ours, theirs))
    return found


def _each(
    noise: SumNoise, part: Part, mine: NDArray[np.intp], rest: NDArray[np.intp], on_row: Float64, on_gram: Float64
) -> Iterator[Float64]:
    """Of each photo x in turn: log-ratios of it and of `rest`, each to all of them, against x xᵀ + noise and x + noise.

    A's noise is σ_A on the diagonal and σ_A/√2 beside it, so its density is that of a Frobenius norm over σ_A.
    """
    targets = len(mine)
    z = on_grid(part.z[np.concatenate([mine, rest])])
    squared, linear, squares = (z**2).sum(axis=1), z @ on_row, np.zeros(len(z))
    if noise.gram_share:
        squares = quadratic(z, on_gram)
    for target in range(targets):
        inner = z @ z[target]
        scores = (inner + linear - squared / 2) / noise.row_deviation**2
        if noise.gram_share:
            scores = scores + (inner**2 + squares - squared**2 / 2) / noise.gram_deviation**2
        scores = scores[[target, *range(targets, len(z))]]
        yield scores - logsumexp(scores)  # so that those of different releases compare


def exceeded(found: list[Success], most: Allowed) -> list[str]:
    """Which figures of several releases lie above what is allowed, by more than chance explains."""
    told = []
    pairs = {
        "area": ([each.auc for each in found], most.auc),
        **{
            f"found at {rate:.1%}": ([each.found[at] for each in found], most.found[at])
            for at, rate in enumerate(FALSE_POSITIVES)
        },
        "first": ([each.first for each in found], most.first),
    }
    for name, (values, limit) in pairs.items():
        chance = max(float(np.std(values)), 0.002) * _SIGMAS / math.sqrt(len(values))
        if float(np.mean(values)) > limit + chance:
            told.append(f"{name} {np.mean(values):.3f} above {limit:.3f}")
    return told


def as_success(most: Allowed) -> Success:
    """What is allowed, as a cell of a table."""
    return Success(most.auc, most.found, most.first, OTHERS + 1)


def columns() -> list[tuple[str, float, int]]:
    """Name, ε and number of releases of each column with noise."""
    return [*((f"ε = {epsilon:g}", epsilon, 1) for epsilon in EPSILONS), ("ε = 8, ten times", EPSILONS[0], 10)]

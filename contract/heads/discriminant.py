"""Linear heads from class means and the covariance within classes: nearest mean, discriminant, and FedCOF's ridge form.

A head answers arg max_c (W z + w)_c for features z (D,). μ_c is the mean of class c, Σ the covariance within classes.

1. `nearest_mean_head`: arg min ‖z − μ_c‖ is W = μ, w_c = −½ ‖μ_c‖². It needs class means alone.
2. `discriminant_head`: the distance is measured by H = (Σ + λ I)⁻¹, so W = μ H, w_c = −½ μ_cᵀ H μ_c. This is Fisher's
   linear discriminant with a ridge λ, in units of trace(Σ) / D. A large λ makes it the nearest mean.
3. `choose_ridge_within` picks the λ with the least estimated error on samples that nobody has seen. With δ = μ_i − μ_j
   a sample of class i is taken for j with probability Φ(−m / √v), where

       m = ½ δᵀ H δ − tr(HΣ) / n_i,     v = δᵀ H Σ H δ.

   The second term of m is how far class i's own mean leans to its n_i samples. Σ is known from f degrees of freedom
   only, and H was made of the same estimate S. So with df = tr(HS) (effective degrees of freedom), tr(HΣ) is near
   df / (1 − df/f), and v is near δᵀ H S H δ / (1 − df/f)². Generalised cross-validation makes this correction, too;
   here it is the one for the discriminant (Zollanvari and Dougherty, IEEE TSP 2015, for f and D large).

   - The criterion is the mean over pairs of classes.
   - df is at most f / 3 + 2 C. Where photos are there twice, the estimate would prefer what fits each of them
     (`contract/heads/spectrum.py`). There is no such bound if the covariance is that of means of several photos each,
     in which a copy is one of them.
   - With fewer than `FEW` samples for each class, the head is the nearest mean. The means are then so uncertain that
     the estimate prefers whatever fits them, and chooses badly, by up to six points (decision 101).
   - Sums that were rounded on their way have eigenvalues that are off by ν (`contract/heads/spectrum.py`). Ridges
     with λ below 10 ν are not chosen.
4. `within_ridge_head` is FedCOF's own form (Goswami et al., arXiv 2412.14326): ridge regression whose Gram is put
   together again from Σ and the mean of all features, without what lies between classes. Rows have norm 1; there is no
   bias.
5. `without_bias` puts a head's bias into its rows, for devices that answer by W z alone.

No head here uses how frequent a class is: counts say what devices photographed, not what they will be asked. Ridge
regression on one-hot labels (FFC) uses it, and prefers the frequent classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from protofleet.contract.heads.covariance import WithinClass
from protofleet.contract.heads.spectrum import CLEAR_OF_NOISE, RIDGES, divided, least_error, repeated

__all__ = [
    "FEW",
    "Discriminant",
    "LinearHead",
    "choose_ridge_within",
    "chosen_in_words",
    "discriminant_head",
    "doubted_choice",
    "nearest_mean_head",
    "within_ridge_head",
    "without_bias",
]

Float64 = NDArray[np.float64]
SEVERAL = 3  # photos for each degree of freedom, from which a copy is lost in its group's mean
FEW = 4  # samples for each class, on the average, from which a ridge can be chosen


@dataclass(frozen=True, eq=False)
class LinearHead:
    """Scores W z + w.

    Attributes:
        weights: (C, D) float64, W; zero rows for classes without examples.
        bias: (C,) float64, w; −∞ for classes without examples, so that they are never the answer.
    """

    weights: Float64
    bias: Float64

    def scores(self, features: NDArray[np.floating]) -> Float64:
        """(N, C) for features (N, D)."""
        return np.asarray(features @ self.weights.T + self.bias)


@dataclass(frozen=True, eq=False)
class Discriminant:
    """The ridge of a discriminant, and the estimates that it was chosen by.

    Attributes:
        ridge: λ in units of trace(Σ)/D; infinite where too little is known of Σ: the head is then the nearest mean.
        ridges: (R,) the grid.
        error: (R,) estimated share of wrong answers between two classes, mean over pairs.
        freedom: (R,) effective degrees of freedom of each.
        is_limited: whether a smaller ridge has a tenth less error, but too many degrees of freedom for what is known.
    """

    ridge: float
    ridges: Float64
    error: Float64
    freedom: Float64
    is_limited: bool = False


def nearest_mean_head(within: WithinClass) -> LinearHead:
    """arg min ‖z − μ_c‖ as a linear head."""
    return _by_distance(within, within.means)


def discriminant_head(within: WithinClass, ridge: float | None = None) -> LinearHead:
    """Fisher's linear discriminant; the nearest mean where nothing is known of the covariance.

    Args:
        ridge: λ in units of trace(Σ)/D; what `choose_ridge_within` picks when None.
    """
    spectrum = within.spectrum
    used = choose_ridge_within(within).ridge if ridge is None else ridge
    if not np.isfinite(used) or spectrum.scale == 0:
        return nearest_mean_head(within)
    return _by_distance(within, spectrum.solve(within.means, used))


def within_ridge_head(within: WithinClass, ridge: float | None = None) -> LinearHead:
    """FedCOF's ridge form: G = Σ + λI + μ μᵀ with μ the mean of all samples, W = μ_c G⁻¹, each row of norm 1.

    G is the paper's over N, and its Σ n_c μ_c is n_c times our row before that gets norm 1.

    Args:
        ridge: λ in units of trace(Σ)/D; what `choose_ridge_within` picks when None.
    """
    spectrum = within.spectrum
    used = choose_ridge_within(within).ridge if ridge is None else ridge
    if not np.isfinite(used) or spectrum.scale == 0:
        rows = within.means
    else:
        overall = within.counts @ within.means / within.counts.sum()
        half, means = spectrum.solve(overall[None], used)[0], spectrum.solve(within.means, used)
        # Sherman-Morrison: (B + μμᵀ)⁻¹ = B⁻¹ − B⁻¹μ μᵀB⁻¹ / (1 + μᵀB⁻¹μ)
        rows = means - np.outer(means @ overall, half) / (1 + overall @ half)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return LinearHead(divided(rows, norms), _bias(within, 0.0))


def choose_ridge_within(within: WithinClass, *, ridges: ArrayLike = RIDGES, few: int = FEW) -> Discriminant:
    """The ridge whose discriminant has the least estimated error, of those with df ≤ f / 3 + 2 C.

    Of several within rounding of the least error, it is the largest.

    Args:
        ridges: (R,) the grid, ascending, above 0.
        few: nothing is chosen from fewer samples for each class, on the average; 0 chooses from any.
    """
    grid = np.asarray(ridges, dtype=np.float64)
    spectrum = within.spectrum
    freedom = spectrum.freedom(grid)
    if within.is_scarce(few) or spectrum.scale == 0 or within.present.sum() < 2:
        return Discriminant(np.inf, grid, np.full(len(grid), 0.5), freedom)
    means = spectrum.rotated(within.means[within.present])
    counts = within.counts[within.present]
    remaining = np.where(grid * spectrum.scale >= CLEAR_OF_NOISE * spectrum.noise, 1 - freedom / within.freedom, 0.0)
    error = [
        _pair_error(means, counts, spectrum.values, penalty, df, remaining_share) if remaining_share > 0 else 0.5
        for penalty, df, remaining_share in zip(spectrum.penalties(grid)[:, 0], freedom, remaining, strict=True)
    ]
    several = SEVERAL * within.freedom < int(counts.sum()) - len(counts)  # photos in each group: no single one counts
    least = least_error(error, freedom, np.inf if several else within.freedom, len(counts))
    assert least is not None  # an estimated error is a half at worst
    return Discriminant(float(grid[least.place]), grid, np.array(error), freedom, least.is_limited)


def chosen_in_words(within: WithinClass, ridge: float | None = None) -> str:
    """The ridge of a discriminant and the reason for it, in words.

    Args:
        ridge: the given ridge; None where it is chosen.
    """
    used = choose_ridge_within(within).ridge if ridge is None else ridge
    if np.isfinite(used) and within.spectrum.scale > 0:
        return (
            f"discriminant, ridge {used:.2g}, {'as given' if ridge is not None else 'chosen by the error it expects'}"
        )
    if within.freedom and within.is_scarce(FEW):
        samples_per_class = within.counts.sum() / within.present.sum()
        return f"nearest class mean, since {samples_per_class:.1f} samples a class are too few for a discriminant"
    return "nearest class mean, since nothing tells how features vary within a class"


def doubted_choice(within: WithinClass) -> str:
    """Why the chosen ridge may be bad, in one line; empty where there is no reason."""
    choice = choose_ridge_within(within)
    return repeated(choice.ridge) if choice.is_limited else ""


def without_bias(head: LinearHead, within: WithinClass) -> Float64:
    """Rows (C, D) whose W z answers nearly as `head` does on unit features, and as much on features of any norm.

    For W̄ and μ̄, the means over classes, a = W̄ / (W̄ μ̄) gives a z = 1 on the average, and no row with that property
    varies less by the distance that the head measures. Times q² / (q² + W̄ Σ W̄ᵀ), q = W̄ μ̄, it is the multiple of W̄ with
    the least squared error: where features have no mean in common there is nothing to build on, and a is 0. w_c a
    stands for w_c. All rows are then moved alike, so that some present class scores about 1 or more where a is not 0.
    """
    present = within.present
    rows = np.zeros_like(head.weights)
    if not present.any():
        return rows
    weights, bias = head.weights[present], head.bias[present]
    mean = weights.mean(axis=0)
    q, varies = float(mean @ within.means[present].mean(axis=0)), float(mean @ within.covariance @ mean)
    unit_row = mean * (q / max(q**2 + varies, np.finfo(np.float64).tiny))
    rows[present] = weights - weights.mean(axis=0) + np.outer(bias - bias.mean() + 1.0, unit_row)
    return rows


def _pair_error(
    means: Float64, counts: NDArray[np.int64], values: Float64, penalty: float, freedom: float, left: float
) -> float:
    """The mean over ordered pairs of Φ(−m / √v), for rotated means (K, D) and Σ's eigenvalues (D,)."""
    inverse = 1.0 / (values + penalty)
    apart = _squares((means * inverse) @ means.T)  # δᵀ H δ
    spread = _squares((means * (inverse**2 * values)) @ means.T) / left**2  # δᵀ H Σ H δ
    margin = 0.5 * apart - (freedom / left) / counts[:, None]
    pairs = ~np.eye(len(means), dtype=bool)
    return float(_normal_tail(margin[pairs], np.sqrt(np.maximum(spread[pairs], 0.0))).mean())


def _squares(products: Float64) -> Float64:
    """(K, K) squared distances from inner products (K, K)."""
    own = np.diag(products)
    return own[:, None] + own[None] - 2 * products


def _normal_tail(margin: Float64, deviation: Float64) -> Float64:
    """Φ(−margin / deviation), to 2e-7 absolutely (Abramowitz and Stegun, 26.2.17); a half where both are 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        x = np.nan_to_num(margin / deviation, nan=0.0, posinf=40.0, neginf=-40.0)
    t = 1.0 / (1.0 + 0.2316419 * np.abs(x))
    series = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    upper = np.exp(-0.5 * np.minimum(np.abs(x), 40.0) ** 2) / np.sqrt(2 * np.pi) * series
    return np.where(x >= 0, upper, 1.0 - upper)


def _by_distance(within: WithinClass, weights: Float64) -> LinearHead:
    return LinearHead(weights, _bias(within, -0.5 * (weights * within.means).sum(axis=1)))


def _bias(within: WithinClass, bias: Float64 | float) -> Float64:
    return np.where(within.present, bias, -np.inf)

"""Statistics over seeds: an interval around their mean, and whether two rows differ on the same seeds.

Both are Student's: the 95 % interval of the mean of n values, and the paired test of the differences, seed by seed. The
test is paired because two rows share a seed's division of the data. With two or three seeds the interval is wide and
the test weak.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Paired", "half_interval", "paired"]


@dataclass(frozen=True)
class Paired:
    """How two rows differ: the mean of the differences, half the 95 % interval around it, p of no difference, pairs.

    p is not a number where all pairs differ by the same.
    """

    mean: float
    half: float
    p: float
    pairs: int


def half_interval(values: Sequence[float]) -> float | None:
    """Half the 95 % confidence interval of the mean; None for fewer than two."""
    from scipy import stats

    if len(values) < 2:
        return None
    return float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))


def paired(
    ours: Sequence[float], our_seeds: Sequence[int], theirs: Sequence[float], their_seeds: Sequence[int]
) -> Paired | None:
    """Our values minus theirs on the common seeds; None for fewer than two common seeds.

    Args:
        our_seeds, their_seeds: the seed of each value.
    """
    from scipy import stats

    mine, other = dict(zip(our_seeds, ours, strict=True)), dict(zip(their_seeds, theirs, strict=True))
    common = sorted(set(mine) & set(other))
    if len(common) < 2:
        return None
    apart = np.array([mine[seed] - other[seed] for seed in common])
    half = half_interval(apart.tolist()) or 0.0
    if np.ptp(apart) < 1e-12:  # nothing for a test to go by
        return Paired(float(apart.mean()), 0.0, math.nan if apart.any() else 1.0, len(common))
    test = stats.ttest_rel([mine[seed] for seed in common], [other[seed] for seed in common])
    return Paired(float(apart.mean()), half, float(test.pvalue), len(common))

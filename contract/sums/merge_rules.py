"""The aggregation rules: how contributions merge.

`merge` reads a round's statistics, one at a time and in the order given, and returns one statistic.

- `mean` (default): Σ_i w_ij r_ij / Σ_i w_ij for each class j, by the method's weighting of device i's row r_ij:
  - `count`: sums and counts add up. This is FedProto eq. 4 without its second division by the number of clients,
    FedHKD's p_ij, and FFC's Gram and cross sums (SphereFed eq. 11, 12).
  - `client`: each holder counts the same. This is FedPR eq. 3, and FedProto's public code.
  - `share`: w_ij = n_ij / n_i. This is FedHP eq. 5, divided by Σ_i w_ij.
  - `printed`: as `share`, but divided by the number of devices, as that equation stands in the paper. It shrinks every
    prototype.
  - `twice`: as `count`, and divided once more by the number of devices that hold the class, as FedProto's eq. 4 stands.
    It shrinks every prototype, too.
- `median`: for each class and coordinate the median over the devices that hold the class.
- `trimmed-mean`: the mean over these devices, without the lowest and the highest tenth of the holders, at least one at
  either end.

A further rule is a function of ordered values and its line in `RULES`; a further weighting its line in `WEIGHTINGS`.

**What the robust rules give.** With three or more holders of a class, `median` and `trimmed-mean` let no single
holder move a prototype beyond what the others say. With two holders nobody can tell which of them lies, so both rules
give the midpoint. With one holder they give what it sent. Then only the aggregator's bounds for contributions are
left (`aggregator/ingest/validation.py`, `aggregator/screening/`). Both rules ignore how many examples a device
claims, because a claim costs nothing; the counts of the result are still the sums of the counts. They exist for class
means only: a median of Gram entries is no Gram matrix.

**Memory** is bounded for any number of devices. Sums are accumulated in place. A median needs all values of a
coordinate at once, so coordinates are processed in blocks, and the statistics are read again for each block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import StatisticError, UsageError
from protofleet.contract.names import known, named
from protofleet.contract.sums.statistics import ClassMeans, Statistic

__all__ = ["RULES", "WEIGHTINGS", "Rule", "Source", "Weighting", "check_rule", "merge"]

Weighting = Literal["count", "client", "share", "printed", "twice"]
Rule = Literal["mean", "median", "trimmed-mean"]
Source = Callable[[], Iterable[Statistic]]

TRIM = 0.1  # share of a class's holders left out at either end by `trimmed-mean`, rounded up to one
_BLOCK_BYTES = 32 << 20

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class _Weights:
    """One way to weigh class means.

    Attributes:
        own: the weights (C,) of one device's rows.
        divisor: what the weighted sums are divided by (C,), given the sum of the weights (C,), how many devices hold
            each class (C,), and how many devices there are.
    """

    own: Callable[[ClassMeans], Float64]
    divisor: Callable[[Float64, Float64, int], Float64]


def _counts(statistic: ClassMeans) -> Float64:
    return statistic.counts.astype(np.float64)


def _votes(statistic: ClassMeans) -> Float64:
    return statistic.present.astype(np.float64)


def _shares(statistic: ClassMeans) -> Float64:
    return np.asarray(statistic.counts / max(int(statistic.counts.sum()), 1), dtype=np.float64)


def _sum_of_weights(weights: Float64, holders: Float64, devices: int) -> Float64:
    return weights


WEIGHTINGS: Mapping[Weighting, _Weights | None] = MappingProxyType(
    {
        "count": None,  # sums and counts add up
        "client": _Weights(_votes, _sum_of_weights),
        "share": _Weights(_shares, _sum_of_weights),
        "printed": _Weights(_shares, lambda weights, holders, devices: np.full_like(weights, devices)),
        "twice": _Weights(_counts, lambda weights, holders, devices: weights * holders),
    }
)


def _median(ordered: Float64) -> Float64:
    """(…,) the middle of values (K, …) in rising order, the midpoint of two middle ones."""
    count = len(ordered)
    return np.asarray((ordered[(count - 1) // 2] + ordered[count // 2]) / 2, dtype=np.float64)


def _trimmed_mean(ordered: Float64) -> Float64:
    """(…,) the mean of values (K, …) in rising order without the ends; of two or one there is nothing to trim."""
    count = len(ordered)
    cut = max(int(TRIM * count), 1) if count > 2 else 0
    return np.asarray(ordered[cut : count - cut].mean(axis=0), dtype=np.float64)


RULES: Mapping[Rule, Callable[[Float64], Float64] | None] = MappingProxyType(
    {"mean": None, "median": _median, "trimmed-mean": _trimmed_mean}  # of the ordered values; None: by its weighting
)


def check_rule(rule: str, kind: type[Statistic]) -> Rule:
    """`rule` when it can merge statistics of this kind.

    Raises:
        UsageError: when it is unknown, or robust and asked of sums.
    """
    found = known(RULES, rule, "--rule")
    if RULES[found] is not None and not kind.is_class_means():
        raise UsageError("--rule", expected=f"mean for {kind.NAME}", got=rule, hint="--rule mean")
    return found


def merge(source: Source, rule: Rule = "mean", weighting: Weighting = "count") -> Statistic:
    """One statistic out of all that `source` yields.

    Args:
        source: called for each pass; must yield the same statistics in the same order every time, at least one, all
            of one kind, C and D.
        rule: robust rules take `ClassMeans` only, and weigh nothing.
        weighting: of the mean; others than `count` take `ClassMeans` only.

    Raises:
        StatisticError: when there is none, they differ in kind or shape, or the rule does not fit them.
        UsageError: there is no such rule or weighting.
    """
    middle, weigh = named(RULES, rule, "rule"), named(WEIGHTINGS, weighting, "weighting")
    if middle is None and weigh is not None:
        return _weighted(source(), weigh)
    total, devices = _add_up(source())
    if middle is None:
        return total
    if not (isinstance(total, ClassMeans) and total.is_class_means()):
        raise StatisticError(f"rule {rule}", expected="class means", got=type(total).__name__, hint="the rule mean")
    means = np.zeros_like(total.sums)  # (C, D)
    step = max(1, _BLOCK_BYTES // (8 * devices))
    for start in range(0, means.size, step):
        stop = min(start + step, means.size)
        means.flat[start:stop] = _by_column(_columns(source(), devices, start, stop), middle)
    return type(total).from_means(means, total.counts)


def _weighted(statistics: Iterable[Statistic], weigh: _Weights) -> ClassMeans:
    """The mean of each class's rows by weights other than `count` alone; counts are the sums of the counts."""
    stream = iter(statistics)
    first = next(stream, None)
    if first is None:
        raise StatisticError("merge", expected="at least one statistic", got="none")
    kind = type(first) if isinstance(first, ClassMeans) else ClassMeans
    nothing = kind.zero(first.classes, first.width)
    total, counts = np.zeros(nothing.sums.shape), np.zeros_like(nothing.counts)  # (C, D), (C,)
    weights, holders, devices = np.zeros(first.classes), np.zeros(first.classes), 0  # (C,), (C,)
    for statistic in chain((first,), stream):
        if not isinstance(statistic, ClassMeans):
            raise StatisticError("weighted means", expected="class means", got=type(statistic).__name__)
        nothing.merge(statistic)  # raises, and says what differs
        own = weigh.own(statistic)
        total += own[:, None] * statistic.means
        weights += own
        holders += _votes(statistic)
        counts += statistic.counts
        devices += 1
    divisor = weigh.divisor(weights, holders, devices)
    return kind.from_means(total / np.where(divisor > 0, divisor, 1.0)[:, None], counts)


def _add_up(statistics: Iterable[Statistic]) -> tuple[Statistic, int]:
    """The sum, accumulated in place (what a chain of `merge` gives, without an array for every step), and how many."""
    stream: Iterator[Statistic] = iter(statistics)
    first = next(stream, None)
    if first is None:
        raise StatisticError("merge", expected="at least one statistic", got="none")
    parts = [np.array(part) for part in (*first.arrays(), first.counts)]
    kind, shapes, devices = type(first), [part.shape for part in parts], 1
    for statistic in stream:
        others = (*statistic.arrays(), statistic.counts)
        if type(statistic) is not kind or [other.shape for other in others] != shapes:
            first.merge(statistic)  # raises, and says what differs
        for mine, other in zip(parts, others, strict=True):
            mine += other
        devices += 1
    return first.build(parts[:-1], parts[-1]), devices


def _columns(statistics: Iterable[Statistic], devices: int, start: int, stop: int) -> Float64:
    """(devices, stop − start) means at those places of the flattened (C, D); NaN where a class is absent."""
    block = np.full((devices, stop - start), np.nan)
    for row, statistic in zip(block, statistics, strict=True):
        assert isinstance(statistic, ClassMeans)
        width = statistic.width
        classes = slice(start // width, -(-stop // width))
        counts = statistic.counts[classes, None]
        means = np.where(counts > 0, statistic.sums[classes] / np.maximum(counts, 1), np.nan)
        offset = start - classes.start * width
        row[:] = means.reshape(-1)[offset : offset + stop - start]
    return block


def _by_column(block: Float64, middle: Callable[[Float64], Float64]) -> Float64:
    """(columns,) the middle of each column's values that are there; 0 where none is."""
    block.sort(axis=0)  # NaN last
    held = block.shape[0] - np.isnan(block).sum(axis=0)
    result = np.zeros(block.shape[1])
    for count in np.unique(held[held > 0]):
        columns = held == count
        result[columns] = middle(block[:count, columns])
    return result

"""How contributions merge: the aggregation rules.

`merge` reads a round's statistics, one at a time and in the order given, and returns one statistic:

- `mean` (default): Σ_i w_ij r_ij / Σ_i w_ij for each class j, by the method's weighting of device i's row r_ij.
  Weighted by `count`, sums and counts add up: FedProto eq. 4 without its second division by the number of clients,
  FedHKD's p_ij, and FFC's Gram and cross sums (SphereFed eq. 11, 12). By `client`, each holder counts the same: FedPR
  eq. 3 and FedProto's public code. By `share`, w_ij = n_ij / n_i: FedHP eq. 5, divided by Σ_i w_ij; `printed` divides
  by the number of devices instead, as that equation stands in the paper, which shrinks every prototype. So does
  `twice`: by `count`, and once more by the number of devices that hold the class, as FedProto's eq. 4 stands.
- `median`: for each class and coordinate the median over the devices that hold the class.
- `trimmed-mean`: the same, with the lowest and the highest tenth of the devices left out and the rest averaged.

The last two let no single device move a prototype far. They ignore how many examples a device claims, since a claim
costs nothing; the counts of the result are still the sums of the counts. They exist for class means only: a median of
Gram entries is no Gram matrix.

Memory is bounded whatever the number of devices: sums are accumulated in place; a median needs all values of a
coordinate at once, so coordinates are dealt with in blocks, reading the statistics again for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from contract.errors import StatisticError, UsageError, near_names
from contract.methods import Weighting
from contract.statistics import ClassMeans, FeatureGram, HyperKnowledge, Statistic

__all__ = ["ROBUST", "RULES", "Rule", "Source", "check_rule", "merge"]

Rule = Literal["mean", "median", "trimmed-mean"]
RULES: tuple[Rule, ...] = get_args(Rule)
Source = Callable[[], Iterable[Statistic]]

ROBUST = ("class-means", "learned-prototypes")  # kinds of statistic that a median makes sense of
TRIM = 0.1  # share of devices left out at either end by `trimmed-mean`
_BLOCK_BYTES = 32 << 20

Float64 = NDArray[np.float64]


def check_rule(rule: str, statistic: str | None) -> Rule:
    """`rule` when it can merge statistics of this kind.

    Raises:
        UsageError: when it is unknown, or robust and asked of sums.
    """
    for known in RULES:
        if rule == known and (rule == "mean" or statistic in ROBUST):
            return known
    if rule in RULES:
        raise UsageError("--rule", expected=f"mean for {statistic}", got=rule, hint="--rule mean")
    raise UsageError("--rule", expected="an aggregation rule", got=rule, hint=near_names(rule, RULES))


def merge(source: Source, rule: Rule = "mean", weighting: Weighting = "count") -> Statistic:
    """One statistic out of all that `source` yields.

    Args:
        source: called for each pass; must yield the same statistics in the same order every time, at least one, all
            of one kind, C and D.
        rule: robust rules take `ClassMeans` only, and weigh nothing.
        weighting: of the mean; others than `count` take `ClassMeans` only.

    Raises:
        StatisticError: when there is none, they differ in kind or shape, or the rule does not fit them.
    """
    if rule == "mean" and weighting != "count":
        return _weighted(source(), weighting)
    total, devices = _add_up(source())
    if rule == "mean":
        return total
    if not isinstance(total, ClassMeans):
        raise StatisticError(f"rule {rule}", expected="class means", got=type(total).__name__, hint="the rule mean")
    means = np.zeros_like(total.sums)  # (C, D)
    step = max(1, _BLOCK_BYTES // (8 * devices))
    for start in range(0, means.size, step):
        stop = min(start + step, means.size)
        means.flat[start:stop] = _robust(_columns(source(), devices, start, stop), rule)
    return ClassMeans.from_means(means, total.counts)


def _weighted(statistics: Iterable[Statistic], weighting: Weighting) -> ClassMeans:
    """The mean of each class's rows by weights other than `count` alone; counts are the sums of the counts."""
    stream = iter(statistics)
    first = next(stream, None)
    if first is None:
        raise StatisticError("merge", expected="at least one statistic", got="none")
    nothing = ClassMeans.zero(first.classes, first.width)
    total, counts = np.zeros(nothing.sums.shape), np.zeros_like(nothing.counts)  # (C, D), (C,)
    weights, holders, devices = np.zeros(first.classes), np.zeros(first.classes), 0  # (C,), (C,)
    for statistic in chain((first,), stream):
        if not isinstance(statistic, ClassMeans):
            raise StatisticError(f"weighting by {weighting}", expected="class means", got=type(statistic).__name__)
        nothing.merge(statistic)  # raises, and says what differs
        held = statistic.present.astype(np.float64)
        shares = statistic.counts / max(int(statistic.counts.sum()), 1)
        own = {"client": held, "twice": statistic.counts.astype(np.float64)}.get(weighting, shares)  # (C,)
        total += own[:, None] * statistic.means
        weights += own
        holders += held
        counts += statistic.counts
        devices += 1
    divisor = {"printed": np.full_like(weights, devices), "twice": weights * holders}.get(weighting, weights)
    return ClassMeans.from_means(total / np.where(divisor > 0, divisor, 1.0)[:, None], counts)


def _add_up(statistics: Iterable[Statistic]) -> tuple[Statistic, int]:
    """The sum, accumulated in place (what a chain of `merge` gives, without an array for every step), and how many."""
    stream: Iterator[Statistic] = iter(statistics)
    first = next(stream, None)
    if first is None:
        raise StatisticError("merge", expected="at least one statistic", got="none")
    parts = [np.array(part) for part in _arrays(first)]
    devices = 1
    for statistic in stream:
        if type(statistic) is not type(first) or (statistic.classes, statistic.width) != (first.classes, first.width):
            first.merge(statistic)  # type: ignore[arg-type]  # raises, and says what differs
        for mine, other in zip(parts, _arrays(statistic), strict=True):
            mine += other
        devices += 1
    return type(first)(*parts), devices


def _arrays(statistic: Statistic) -> tuple[NDArray[np.generic], ...]:
    if isinstance(statistic, FeatureGram):
        return statistic.gram, statistic.cross, statistic.counts
    if isinstance(statistic, HyperKnowledge):
        return statistic.sums, statistic.soft_sums, statistic.counts
    return statistic.sums, statistic.counts


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


def _robust(block: Float64, rule: Rule) -> Float64:
    """(columns,) the median or trimmed mean of each column's values that are there; 0 where none is."""
    block.sort(axis=0)  # NaN last
    held = block.shape[0] - np.isnan(block).sum(axis=0)
    result = np.zeros(block.shape[1])
    for count in np.unique(held[held > 0]):
        columns = held == count
        values = block[:count, columns]  # (count, …)
        if rule == "median":
            result[columns] = (values[(count - 1) // 2] + values[count // 2]) / 2
        else:
            cut = int(TRIM * count)
            result[columns] = values[cut : count - cut].mean(axis=0)
    return result

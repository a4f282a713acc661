"""Aggregation rules against naive loops, and the next global state."""

from __future__ import annotations

import itertools
import tracemalloc
from functools import reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protofleet.aggregator.merging.next_global import next_global
from protofleet.contract.errors import StatisticError, UsageError
from protofleet.contract.methods import method
from protofleet.contract.sums import merge_rules as rules
from protofleet.contract.sums.merge_rules import check_rule, merge
from protofleet.contract.sums.statistics import ClassMeans, FeatureGram
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import ClassRows

RUN = b"abcd"


def _devices(seed: int, devices: int, classes: int, width: int) -> list[ClassMeans]:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 4, (devices, classes))  # about a quarter of the classes absent on each device
    means = rng.normal(size=(devices, classes, width)) * (counts > 0)[..., None]
    return [ClassMeans.from_means(m, c) for m, c in zip(means, counts, strict=True)]


def _naive(statistics: list[ClassMeans], rule: str) -> np.ndarray:
    classes, width = statistics[0].sums.shape
    result = np.zeros((classes, width))
    for j in range(classes):
        held = [s.means[j] for s in statistics if s.counts[j] > 0]
        for d in range(width):
            values = sorted(float(mean[d]) for mean in held)
            if values and rule == "median":
                result[j, d] = np.median(values)
            elif values:
                cut = max(int(0.1 * len(values)), 1) if len(values) > 2 else 0
                kept = values[cut : len(values) - cut]
                result[j, d] = sum(kept) / len(kept)
    return result


@given(st.integers(0, 10_000), st.integers(1, 25), st.integers(1, 5), st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_mean_is_the_chain_of_merges(seed: int, devices: int, classes: int, width: int) -> None:
    statistics = _devices(seed, devices, classes, width)
    chained = reduce(ClassMeans.merge, statistics)
    merged = merge(lambda: statistics)
    np.testing.assert_array_equal(merged.counts, chained.counts)
    np.testing.assert_array_equal(merged.sums, chained.sums)


@pytest.mark.parametrize("rule", ["mean", "median", "trimmed-mean"])
def test_a_rule_keeps_the_kind_that_a_method_makes_its_state_of(rule: str) -> None:
    ncm = method("ncm")
    devices = [ncm.statistic.from_means(each.means / 10, each.counts) for each in _devices(3, 5, 4, 6)]
    merged = ncm.merge(lambda: iter(devices), check_rule(rule, ncm.statistic), ncm.resolve({}))
    assert isinstance(merged, ncm.statistic)
    rows = ncm.next_rows({}, merged, ncm.resolve({}))["means"]
    np.testing.assert_array_equal(rows.rows, merged.means[merged.present])


@pytest.mark.parametrize("rule", ["median", "trimmed-mean"])
@given(seed=st.integers(0, 10_000), devices=st.integers(1, 25), block_bytes=st.integers(8, 4000))
@settings(max_examples=25, deadline=None)
def test_robust_rules_equal_a_naive_loop_for_any_block_size(rule, seed, devices, block_bytes) -> None:
    statistics = _devices(seed, devices, 4, 5)
    before = rules._BLOCK_BYTES
    rules._BLOCK_BYTES = block_bytes
    try:
        merged = merge(lambda: statistics, rule)
    finally:
        rules._BLOCK_BYTES = before
    np.testing.assert_allclose(merged.means, _naive(statistics, rule) * merged.present[:, None], atol=1e-12)
    np.testing.assert_array_equal(merged.counts, sum(s.counts for s in statistics))


def test_a_median_of_many_devices_takes_the_memory_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_BLOCK_BYTES", 1 << 18)
    one = ClassMeans.from_means(np.ones((4, 256)), [3] * 4)
    tracemalloc.start()
    try:
        merge(lambda: itertools.repeat(one, 256), "median")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 * (1 << 18), "all 256 of them at once take 13 MB"


@pytest.mark.parametrize("rule", ["median", "trimmed-mean"])
def test_robust_rules_withstand_one_liar_and_the_mean_does_not(rule) -> None:
    honest = [ClassMeans.from_means([[1.0 + 0.01 * i, -1.0]], [10]) for i in range(12)]
    liar = ClassMeans.from_means([[1e9, 1e9]], [10**6])
    assert np.abs(merge(lambda: [*honest, liar], rule).means - [[1.05, -1.0]]).max() < 0.1
    assert np.abs(merge(lambda: [*honest, liar]).means).max() > 1e8


@pytest.mark.parametrize("rule", ["median", "trimmed-mean"])
@pytest.mark.parametrize("holders", [3, 4, 5, 9, 12])
def test_one_liar_among_three_or_more_holders_cannot_leave_what_the_others_say(rule: str, holders: int) -> None:
    honest = [ClassMeans.from_means([[1.0 + 0.01 * i, -1.0]], [10]) for i in range(holders - 1)]
    for lie in (1e15, -1e15):
        merged = merge(lambda lie=lie: [*honest, ClassMeans.from_means([[lie, lie]], [10])], rule).means[0]
        assert 1.0 <= merged[0] <= 1.0 + 0.01 * (holders - 2) + 1e-12
        assert merged[1] == pytest.approx(-1.0)


@pytest.mark.parametrize("rule", ["median", "trimmed-mean"])
def test_of_two_holders_the_midpoint_and_of_one_what_it_sent(rule: str) -> None:
    one, other = ClassMeans.from_means([[1.0, 4.0]], [10]), ClassMeans.from_means([[3.0, 0.0]], [99])
    np.testing.assert_array_equal(merge(lambda: [one, other], rule).means, [[2.0, 2.0]])
    np.testing.assert_array_equal(merge(lambda: [one], rule).means, one.means)


def test_gram_sums_add_up_and_refuse_a_median() -> None:
    rng = np.random.default_rng(0)
    z, y = rng.normal(size=(60, 4)), rng.integers(0, 3, 60)
    parts = [FeatureGram.of(z[i::3], y[i::3], 3) for i in range(3)]
    merged = merge(lambda: parts)
    np.testing.assert_allclose(merged.matrix, z.T @ z)
    with pytest.raises(StatisticError, match="expected class means"):
        merge(lambda: parts, "median")


def test_nothing_to_merge_and_mixed_shapes_are_refused() -> None:
    with pytest.raises(StatisticError, match="at least one"):
        merge(list)
    with pytest.raises(StatisticError, match="width 3"):
        merge(lambda: [ClassMeans.zero(2, 3), ClassMeans.zero(2, 4)])


def test_rule_names() -> None:
    assert check_rule("median", ClassMeans) == "median"
    with pytest.raises(UsageError, match="one of median"):
        check_rule("medain", ClassMeans)
    with pytest.raises(UsageError, match="mean for feature-gram"):
        check_rule("median", FeatureGram)


def test_a_class_that_nobody_held_keeps_its_prototype() -> None:
    previous = GlobalState(
        RUN, 3, 3, {"prototypes": ClassRows(np.array([0, 2], np.uint16), np.array([[1.0, 1.0], [3.0, 3.0]]))}
    )
    merged = ClassMeans.from_means([[5.0, 5.0], [6.0, 6.0], [0.0, 0.0], [0.0, 0.0]], [2, 1, 0, 0])
    state = next_global(previous, method("fedproto"), merged, round=4, hyper={})
    assert (state.run, state.version, state.round) == (RUN, 4, 4)
    np.testing.assert_array_equal(state.prototypes.classes, [0, 1, 2])
    np.testing.assert_array_equal(state.prototypes.rows, [[5, 5], [6, 6], [3, 3]])


def test_a_calibration_round_sets_the_head_and_keeps_the_prototypes() -> None:
    rng = np.random.default_rng(1)
    z, y = rng.normal(size=(50, 3)), rng.integers(0, 2, 50)  # class 2 has no examples
    prototypes = ClassRows(np.array([1], np.uint16), np.ones((1, 3)))
    before, sums = GlobalState(RUN, 1, 1, {"prototypes": prototypes}), FeatureGram.of(z, y, 3)
    state = next_global(before, method("ffc"), sums, round=2, hyper=method("ffc").resolve({"ridge": 0.0}))
    assert state.prototypes is prototypes
    np.testing.assert_array_equal(state.head.classes, [0, 1])
    expected = np.linalg.lstsq(z, np.eye(3)[y], rcond=None)[0].T
    np.testing.assert_allclose(state.head.rows, expected[:2], atol=1e-12)


def test_a_statistic_of_another_method_is_refused() -> None:
    with pytest.raises(StatisticError, match="class-means"):
        next_global(GlobalState(RUN, 0, 0), method("fedproto"), FeatureGram.zero(2, 2), round=1, hyper={})

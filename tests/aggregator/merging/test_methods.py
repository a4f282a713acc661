"""What each method merges: weightings against naive loops, hyper-knowledge, next states, and refusals at the door."""

from __future__ import annotations

import dataclasses
import itertools
from contextlib import nullcontext

import numpy as np
import pytest
from aggregator_samples import BUNDLE, CLASSES, RUN, WIDTH, contribution, gram, means
from hypothesis import given, settings
from hypothesis import strategies as st

from protofleet.aggregator.ingest.ingest import Decision, Ingest, View, largest_contribution_bytes
from protofleet.aggregator.merging.next_global import next_global
from protofleet.contract.errors import MethodError, StatisticError, WireError
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import METHODS, method
from protofleet.contract.methods.fedcof import GroupMeans
from protofleet.contract.methods.fedhkd import HyperKnowledge
from protofleet.contract.methods.ncm import UnitMeans
from protofleet.contract.sums.merge_rules import merge
from protofleet.contract.sums.statistics import ClassMeans, FeatureGram, Participation, Statistic
from protofleet.contract.wire.chunks import split
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import ClassRows, Contribution

WEIGHTINGS = ("count", "client", "share", "printed", "twice")
OTHER = bytes(range(32, 64))


def _devices(seed: int, devices: int, classes: int = 4, width: int = 5) -> list[ClassMeans]:
    """Uneven ones: about a third of the classes absent on each, and sometimes a device that holds none."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 60, (devices, classes)) * (rng.random((devices, classes)) > 0.3)
    return [ClassMeans.from_means(rng.normal(size=(classes, width)), n) for n in counts]


def _naive(devices: list[ClassMeans], weighting: str) -> list[list[float]]:
    """Σ_i w_ij r_ij over its divisor, one number at a time."""
    classes, width = devices[0].sums.shape
    rows = []
    for j in range(classes):
        total, weights, holders = [0.0] * width, 0.0, 0
        for device in devices:
            n, n_all = int(device.counts[j]), sum(int(c) for c in device.counts)
            if not n:
                continue
            w = {"count": n, "client": 1.0, "share": n / n_all, "printed": n / n_all, "twice": n}[weighting]
            weights += w
            holders += 1
            total = [t + w * float(r) for t, r in zip(total, device.means[j], strict=True)]
        divisor = {"printed": len(devices), "twice": weights * holders}.get(weighting, weights)
        rows.append([t / divisor if weights else 0.0 for t in total])
    return rows


# ── weightings ──


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@given(seed=st.integers(0, 10_000), devices=st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_a_weighting_is_its_naive_loop_in_any_order(weighting, seed, devices) -> None:
    statistics = _devices(seed, devices)
    merged = merge(lambda: statistics, weighting=weighting)
    np.testing.assert_allclose(merged.means, _naive(statistics, weighting), rtol=1e-10, atol=1e-12)
    np.testing.assert_array_equal(merged.counts, sum(s.counts for s in statistics))
    shuffled = [statistics[i] for i in np.random.default_rng(seed).permutation(devices)]
    np.testing.assert_allclose(merge(lambda: shuffled, weighting=weighting).means, merged.means, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_a_weighting_of_two_is_commutative_to_the_last_bit(weighting) -> None:
    one, other = _devices(3, 2)
    forth, back = (merge(lambda pair=pair: pair, weighting=weighting) for pair in ([one, other], [other, one]))
    np.testing.assert_array_equal(forth.sums, back.sums)


def test_weightings_differ_where_devices_do() -> None:
    statistics = _devices(0, 5)
    found = [merge(lambda: statistics, weighting=weighting).means for weighting in WEIGHTINGS]
    assert all(np.abs(a - b).max() > 1e-3 for a, b in itertools.combinations(found, 2))


def test_the_printed_equations_shrink_what_all_agree_on() -> None:
    same = [ClassMeans.from_means([[2.0], [4.0]], [10, 30]) for _ in range(3)]
    np.testing.assert_allclose(merge(lambda: same, weighting="share").means, [[2.0], [4.0]])
    np.testing.assert_allclose(merge(lambda: same, weighting="printed").means, [[0.5], [3.0]])  # times n_j / n
    np.testing.assert_allclose(merge(lambda: same, weighting="twice").means, [[2 / 3], [4 / 3]])  # three hold each


@pytest.mark.parametrize("weighting", WEIGHTINGS[1:])
@pytest.mark.parametrize("statistic", [gram(), HyperKnowledge.zero(CLASSES, WIDTH)])
def test_only_class_means_are_weighted(weighting, statistic) -> None:
    with pytest.raises(StatisticError, match="expected class means"):
        merge(lambda: [statistic], weighting=weighting)


@pytest.mark.parametrize(
    ("name", "given", "weighting"),
    [
        ("fedproto", {}, "count"),
        ("fedproto", {"aggregation": "client"}, "client"),
        ("fedproto", {"aggregation": "twice"}, "twice"),
        ("fedpr", {}, "client"),
        ("fedhp", {}, "share"),
        ("fedhp", {"aggregation": "printed"}, "printed"),
        ("fedhkd", {}, "count"),
        ("ffc", {}, "count"),
    ],
)
def test_each_method_has_the_weighting_of_its_paper(name, given, weighting) -> None:
    assert method(name).weighting_of(method(name).resolve(given)) == weighting


def test_an_ffc_round_adds_up_whatever_the_bundles_own_aggregation() -> None:
    for own in ({"aggregation": "client"}, {"aggregation": "printed"}):
        assert method("ffc").weighting_of(own) == "count"


# ── hyper-knowledge ──


def _knowledge(seed: int = 0, samples: int = 40, classes: int = CLASSES, width: int = WIDTH, *, last: bool = True):
    """(features, soft predictions, labels); without `last` the last class has no sample."""
    rng = np.random.default_rng(seed)
    soft = rng.random((samples, classes))
    y = rng.integers(0, classes - (not last), samples)
    return rng.normal(size=(samples, width)), soft / soft.sum(axis=1, keepdims=True), y


@given(seed=st.integers(0, 10_000), devices=st.integers(1, 6), samples=st.integers(1, 60))
@settings(max_examples=30, deadline=None)
def test_hyper_knowledge_of_a_fleet_is_that_of_the_pooled_data_over_the_wire(seed, devices, samples) -> None:
    z, q, y = _knowledge(seed, samples)
    parts = [HyperKnowledge.of(z[i::devices], q[i::devices], y[i::devices], CLASSES) for i in range(devices)]
    messages = [encode(contribution(part, method="fedhkd"), "f64") for part in parts]
    merged = merge(lambda: [decode(payload).statistic(HyperKnowledge, CLASSES, WIDTH) for payload in messages])
    for j in range(CLASSES):
        held = [k for k in range(samples) if y[k] == j]
        assert merged.counts[j] == len(held)
        for rows, found in ((z, merged.means), (q, merged.soft_means)):
            wanted = sum(rows[k] for k in held) / len(held) if held else np.zeros(rows.shape[1])
            np.testing.assert_allclose(found[j], wanted, rtol=1e-10, atol=1e-12)


# ── the next global state ──


def _statistic(kind: type[Statistic]) -> Statistic:
    """Of the first two classes only."""
    if kind is HyperKnowledge:
        return HyperKnowledge.of(*_knowledge(last=False), CLASSES)
    if kind is Participation:
        return Participation.zero(CLASSES, WIDTH)
    if not kind.COUNTED:  # of every class, whatever there is
        zero = kind.zero(CLASSES, WIDTH)
        return zero.build([np.ones_like(each) for each in zero.arrays()], np.ones(CLASSES, np.int64))
    if kind in (UnitMeans, GroupMeans):
        z = unit_rows(np.random.default_rng(3).normal(size=(20, WIDTH)))
        labels = np.arange(20) % 2 * kind.GROUPS + np.arange(20) // 2 % 2 * (kind.GROUPS > 1)
        return kind.of(z, labels, CLASSES * kind.GROUPS)
    return gram() if kind is FeatureGram else means()


@pytest.mark.parametrize("name", METHODS)
def test_a_round_changes_what_its_method_says_and_a_class_that_nobody_holds_keeps_its_row(name) -> None:
    rows, classes = np.arange(CLASSES * WIDTH, dtype=float).reshape(CLASSES, WIDTH), np.arange(CLASSES, dtype=np.uint16)
    held = {"prototypes": rows, "head": -rows, "soft": rows[:, :3]}
    before = GlobalState(RUN, 6, 4, {kind: ClassRows(classes, values) for kind, values in held.items()})
    found = METHODS[name]
    merged = found.merge(lambda: [_statistic(found.statistic)], "mean", found.resolve({}))
    after = next_global(before, found, merged, round=5, hyper=found.resolve({}))
    if found.statistic is Participation:
        assert after is before
        return
    assert (after.run, after.version, after.round) == (RUN, 7, 5)
    own = {"fedhkd": {"prototypes", "soft"}, "ffc": {"head"}, "ncm": {"means"}, "ffc-dp": {"head"}, "ncm-dp": {"means"}}
    own["fedcof"] = {"discriminant", "discriminant-bias"}
    changed = own.get(name, {"prototypes"})
    assert set(found.global_rows) == changed
    for kind in held:
        assert (after.rows[kind] is before.rows[kind]) == (kind not in changed)
    if "prototypes" in changed:
        dense, present = after.prototypes.dense(CLASSES, WIDTH)
        assert present.all()
        np.testing.assert_allclose(dense[:2], merged.means[:2])
        np.testing.assert_array_equal(dense[2], rows[2])
    if "soft" in changed:
        soft, _ = after.rows["soft"].dense(CLASSES, CLASSES)
        np.testing.assert_allclose(soft[:2], merged.soft_means[:2])
        np.testing.assert_array_equal(soft[2], rows[2, :3])


@pytest.mark.parametrize("name", [name for name, found in METHODS.items() if found.statistic is not Participation])
def test_another_methods_statistic_makes_no_state(name) -> None:
    found = METHODS[name]
    wrong = means() if found.statistic is FeatureGram else gram()
    with pytest.raises(StatisticError, match=found.statistic.NAME):
        next_global(GlobalState(RUN, 0, 0), found, wrong, round=1, hyper=found.resolve({}))


# ── at the door ──


def _decide(message: Contribution, name: str, **view: object) -> Decision:
    given = View(RUN, BUNDLE, CLASSES, WIDTH, round=1, method=name, open=True)
    return Ingest(lambda *key: False).decide("d1", encode(message, "f64"), dataclasses.replace(given, **view), now=0.0)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("other", [ClassMeans, HyperKnowledge, FeatureGram, Participation])
def test_a_round_takes_its_own_kind_and_no_other(name, other) -> None:
    decision = _decide(contribution(_statistic(other), method=name), name)
    own = METHODS[name].statistic
    alike = {UnitMeans, GroupMeans, ClassMeans}  # what cannot be told apart by its fields is by the lengths of its rows
    nothing = other is Participation  # what a device says that abstains, of samples of whatever kind
    assert (decision.outcome == "committed") == (own is other or nothing), decision.reason
    alike_too = {HyperKnowledge, METHODS["ncm-dp"].statistic}  # two fields of rows, of other widths
    if decision.outcome != "committed" and not {own, other} <= alike and not {own, other} <= alike_too:
        assert decision.receipt.status == "rejected"
        assert f"round of {name}, expected" in decision.receipt.reason


def test_a_device_that_withholds_all_it_knows_still_takes_part() -> None:
    decision = _decide(contribution(HyperKnowledge.zero(CLASSES, WIDTH), method="fedhkd"), "fedhkd")
    assert decision.outcome == "committed", decision.reason


def test_class_rows_in_a_round_of_participation_are_refused_by_name() -> None:
    decision = _decide(contribution(means(), method="spherefed"), "spherefed")
    assert decision.outcome == "rejected"
    assert decision.receipt.reason == "round of spherefed, expected no class rows, got class rows"


def test_a_class_that_there_is_not_is_refused_where_it_has_no_row_either() -> None:
    for number, refused in ((CLASSES - 1, False), (CLASSES, True)):
        body = ClassRows(np.array([number], np.uint16), np.zeros((1, 0), np.float32))
        message = dataclasses.replace(
            contribution(Participation.zero(CLASSES, WIDTH), method="spherefed"), body=body, counts=np.ones(1, np.int64)
        )
        with pytest.raises(WireError, match=f"class numbers, expected below {CLASSES}") if refused else nullcontext():
            message.check(Participation, CLASSES, WIDTH)


@pytest.mark.parametrize("others", [(), (OTHER,)])
def test_a_bundle_is_of_the_fleet_or_refused(others) -> None:
    decision = _decide(contribution(bundle=OTHER), "fedproto", others=others)
    assert decision.outcome == ("committed" if others else "rejected")
    stranger = _decide(contribution(bundle=b"\xff" * 32), "fedproto", others=others)
    assert stranger.outcome == "rejected"
    assert "bundle, expected sha256 00010203" in stranger.receipt.reason
    assert ("20212223" in stranger.receipt.reason) == bool(others)


def _hyper(soft: np.ndarray) -> Contribution:
    rows = ClassRows(np.arange(2, dtype=np.uint16), np.ones((2, WIDTH)))
    return Contribution(RUN, 1, "fedhkd", BUNDLE[:4], rows, np.array([3, 4], np.uint64), further=(soft,))


@pytest.mark.parametrize(
    ("soft", "words"),
    [
        (np.ones((2, CLASSES + 1)), "width 4"),
        (np.ones((2, CLASSES - 1)), "width 2"),
        (np.full((2, CLASSES), 1e30), "probabilities that sum to 1"),
    ],
)
def test_soft_rows_of_another_size_or_without_measure_are_refused(soft, words) -> None:
    assert _decide(_hyper(np.full((2, CLASSES), 1 / 3)), "fedhkd").outcome == "committed"
    decision = _decide(_hyper(soft), "fedhkd")
    assert decision.outcome == "rejected"
    assert words in decision.receipt.reason


def test_chunks_that_promise_more_than_hyper_knowledge_can_take_are_refused() -> None:
    view = View(RUN, BUNDLE, CLASSES, 200, round=1, method="fedhkd", open=True)
    largest = largest_contribution_bytes(view)
    assert largest > len(encode(contribution(HyperKnowledge.of(*_knowledge(width=200), CLASSES)), "f64"))
    payload = encode(_hyper(np.full((2, CLASSES), 1 / 3)), "f64") + bytes(largest)
    first = split(payload, 1024, run=RUN, round=1, method="fedhkd")[0]
    decision = Ingest(lambda *key: False).decide("d1", encode(first), view, now=0.0)
    assert decision.outcome == "rejected"
    assert f"at most {largest} for fedhkd" in decision.receipt.reason


@pytest.mark.parametrize("rows", [{"means": 5}, {"secret": ClassRows.of(np.ones((3, 4)), np.ones(3, bool))}])
def test_rows_that_a_method_does_not_declare_never_become_the_global_state(rows, monkeypatch):
    found = method("ncm")
    monkeypatch.setattr(type(found), "next_rows", lambda *_: rows)
    with pytest.raises(MethodError, match="next_rows of method ncm, expected class rows of means, got "):
        next_global(GlobalState(RUN, 0, 0), found, found.statistic.zero(3, 4), round=1, hyper={})

"""Who contradicts the others: liars are found, and honest devices never are, whatever they hold."""

from __future__ import annotations

import dataclasses
import itertools
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protofleet.aggregator.screening import contradictions
from protofleet.aggregator.screening.contradictions import Contradicted, agreeing, contradicted, has_means
from protofleet.aggregator.screening.outliers import Traits, screen
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import METHODS
from protofleet.contract.methods.fedcof import GroupMeans
from protofleet.contract.sums.statistics import ClassMeans, FeatureGram, Participation, Statistic
from protofleet.contract.wire.messages import Contribution

CLASSES, WIDTH = 6, 24
CENTRES = unit_rows(np.random.default_rng(3).normal(size=(CLASSES, WIDTH)))


def photos(seed: int, held: Sequence[int], each: int = 30, spread: float = 0.8) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([5, seed])
    y = np.repeat(np.asarray(held, np.int64), each)
    noise = spread * rng.normal(size=(len(y), WIDTH)) / np.sqrt(WIDTH)
    return np.asarray(unit_rows(CENTRES[y] + noise)), y


def device(seed: int, held: Sequence[int] = range(CLASSES), each: int = 30, shift: int = 0) -> ClassMeans:
    z, y = photos(seed, held, each)
    return ClassMeans.of(z, (y + shift) % CLASSES, CLASSES)


def told(fleet: Sequence[Statistic]) -> list[Contradicted]:
    return contradicted(lambda: iter(fleet), [f"d{at:03}" for at in range(len(fleet))])


def accused(fleet: Sequence[Statistic]) -> list[int]:
    return sorted(int(each.device[1:]) for each in told(fleet) if each.accused)


@pytest.mark.parametrize("devices", [3, 4, 5, 10, 20])
def test_as_many_liars_as_may_lie_are_all_accused_and_nobody_else(devices: int) -> None:
    liars = max(1, round(devices / 3)) if devices > 3 else 1
    liars = min(liars, (devices - 1) // 2)
    fleet = [device(at, shift=int(at < liars)) for at in range(devices)]
    assert accused(fleet) == list(range(liars))
    (worst, *_) = told(fleet)
    assert worst.looks_like == (worst.label - 1) % CLASSES  # it says class j of photos of class j − 1
    assert (worst.by, worst.of) == (devices - liars, devices - 1)


def test_what_a_liar_does_to_its_rows_does_not_hide_it() -> None:
    rng = np.random.default_rng(0)
    honest = [device(at) for at in range(1, 7)]
    own = device(0)
    for rows in (-own.means, unit_rows(rng.normal(size=own.means.shape)), np.roll(own.means, 2, axis=0)):
        assert accused([ClassMeans.from_means(rows, own.counts), *honest]) == [0]
    to_one = ClassMeans.of(photos(0, range(CLASSES))[0], np.zeros(30 * CLASSES, np.int64), CLASSES)
    assert accused([to_one, *honest]) == [0]


@given(st.integers(0, 10_000), st.integers(3, 14), st.integers(1, CLASSES))
@settings(max_examples=40, deadline=None)
def test_honest_devices_are_left_alone_whatever_they_hold(seed: int, devices: int, most: int) -> None:
    rng = np.random.default_rng(seed)
    fleet = []
    for at in range(devices):
        held = rng.permutation(CLASSES)[: rng.integers(1, most + 1)]
        parts = [device(1000 * seed + 10 * at + int(j), [int(j)], int(rng.integers(1, 60))) for j in held]
        fleet.append(ClassMeans(sum(p.sums for p in parts), sum(p.counts for p in parts)))
    assert not told(fleet)


def test_what_chance_does_where_features_hardly_tell_classes_apart_is_no_lie() -> None:
    """Means of a few samples then often lie nearer to another class than to their own."""
    kept = [
        told([ClassMeans.of(*photos(99 * seed + at, range(CLASSES), 4, 3.0), CLASSES) for at in range(7)])
        for seed in range(12)
    ]
    assert not any(kept)


@given(st.integers(0, 10_000), st.integers(2, 20))
@settings(max_examples=40, deadline=None)
def test_no_third_of_a_fleet_can_have_an_honest_device_accused(seed: int, devices: int) -> None:
    """Also where liars agree on every class, and honest devices hold one or two: they are outvoted in each."""
    rng = np.random.default_rng(seed)
    liars = min(max(1, round(devices / 3)), (devices - 1) // 2) if devices > 2 else 0
    together = int(rng.integers(1, CLASSES))
    fleet = [device(seed, range(CLASSES), 50, shift=together) for _ in range(liars)]
    for at in range(devices - liars):
        fleet.append(device(100 + seed + at, rng.permutation(CLASSES)[: rng.integers(1, 3)]))
    assert set(accused(fleet)) <= set(range(liars))


@given(st.integers(0, 1_000), st.permutations(range(8)))
@settings(max_examples=20, deadline=None)
def test_the_order_of_devices_plays_no_part(seed: int, order: list[int]) -> None:
    names = [f"d{at}" for at in range(8)]
    fleet = [
        device(seed + at, np.random.default_rng([seed, at]).permutation(CLASSES)[:4], shift=at < 2) for at in range(8)
    ]
    first = contradicted(lambda: iter(fleet), names)
    mixed = [fleet[at] for at in order]
    again = contradicted(lambda: iter(mixed), [names[at] for at in order])
    assert {dataclasses.astuple(each) for each in first} == {dataclasses.astuple(each) for each in again}


def test_how_many_samples_a_liar_claims_or_how_long_features_are_plays_no_part() -> None:
    honest, liar = [device(at) for at in range(1, 6)], device(0, shift=1)
    for count in (30, 10**6, 2**32 - 1):
        assert accused([ClassMeans.from_means(liar.means, np.full(CLASSES, count)), *honest]) == [0]
    for factor in (1e-3, 1e4):
        assert accused([ClassMeans(s.sums * factor, s.counts) for s in (liar, *honest)]) == [0]


def test_a_class_with_few_samples_speaks_neither_for_nor_against() -> None:
    assert contradictions.LEAST == 3  # decision 158
    fleet = [device(0, each=contradictions.LEAST - 1, shift=1), *(device(at) for at in range(1, 6))]
    assert not told(fleet)
    assert accused([device(0, each=20, shift=1), *fleet[1:]]) == [0]
    many = [device(at, each=300) for at in range(1, 6)]
    assert accused([device(0, each=contradictions.LEAST, shift=1), *many]) == [0]


def test_half_the_way_to_another_class_is_what_a_mean_may_go() -> None:
    """Of 3,000 samples, so that chance plays no part."""
    honest = [device(at, each=3_000) for at in range(6)]
    for way, found in ((0.4, []), (0.6, [0])):
        rows = (1 - way) * honest[0].means + way * np.roll(honest[0].means, 1, axis=0)
        assert accused([ClassMeans.from_means(rows, honest[0].counts), *honest[1:]]) == found


def test_who_is_compared_with_is_not_chosen_by_the_alphabet_and_bounded_by_memory() -> None:
    names = [f"d{at:03}" for at in range(300)]
    assert contradictions._chosen(names, 10, 10, ()) not in (set(range(256)), set(range(44, 300)))
    assert len(contradictions._chosen(names, 10, 10, ())) == 256
    assert len(contradictions._chosen(names, 100, 4_000, ())) == 20  # of 32 MiB
    assert len(contradictions._chosen(names, 1_000, 10_000, ())) == 16


def test_one_device_alone_makes_nobody_suspected() -> None:
    """Two that share classes with nobody else contradict each other; who lies, nobody can say."""
    fleet = [device(0, [0, 1], shift=1), device(1, [0, 1]), device(2, [3, 4]), device(3, [3, 4]), device(4, [3, 4])]
    assert not told(fleet)


def test_a_class_that_one_alone_holds_accuses_nobody_and_two_devices_neither() -> None:
    rare = ClassMeans(device(9, [5]).sums + device(9, [0]).sums, device(9, [5]).counts + device(9, [0]).counts)
    assert not told([rare, *(device(at, range(5)) for at in range(5))])
    assert not told([device(0), device(1, shift=1)])
    assert not told([device(at, [at]) for at in range(CLASSES)])
    assert not told([ClassMeans.zero(CLASSES, WIDTH)] * 4)


def test_who_most_contradict_but_too_few_is_suspected() -> None:
    """Twelve devices of which four share classes with the liar: as many as may lie."""
    others = [device(at, [0, 1, 2]) for at in range(1, 5)] + [device(at, [3, 4, 5]) for at in range(5, 12)]
    (found,) = told([device(0, [0, 1], shift=1), *others])
    assert (found.device, found.accused, found.by, found.of) == ("d000", False, 4, 4)
    more = [device(at, [0, 1, 2]) for at in range(1, 7)] + [device(at, [3, 4, 5]) for at in range(7, 12)]
    assert accused([device(0, [0, 1], shift=1), *more]) == [0]


def test_each_liar_that_is_found_leaves_one_fewer_to_be_found() -> None:
    """Of nine devices three may lie. One is contradicted by four; then the three who contradict another suffice."""
    others = [device(at, [0, 1, 2]) for at in range(2, 6)] + [device(at, [3, 4, 5]) for at in range(6, 9)]
    assert accused([device(0, [0, 1], shift=1), device(1, [3, 4], shift=1), *others]) == [0, 1]
    (found,) = told([device(0, [0, 1]), device(1, [3, 4], shift=1), *others])
    assert (found.device, found.accused, found.by) == ("d001", False, 3)


def test_who_holds_one_class_alone_can_tell_a_liar_by_the_liars_own_rows() -> None:
    fleet = [device(0, shift=1), *(device(at) for at in range(1, 4)), *(device(4 + at, [at]) for at in range(CLASSES))]
    (found,) = told([*fleet, device(20, [0]), device(21, [1])])
    assert (found.device, found.accused, found.by, found.of) == ("d000", True, 11, 11)


def test_ffcs_sums_and_groups_of_means_are_judged_by_their_class_means() -> None:
    grams, groups = [], []
    for at in range(6):
        z, y = photos(at, range(CLASSES))
        labels = (y + (at == 0)) % CLASSES
        grams.append(FeatureGram.of(z, labels, CLASSES))
        places = labels * GroupMeans.GROUPS + np.arange(len(y)) % 4
        groups.append(GroupMeans.of(z, places, CLASSES * GroupMeans.GROUPS))
    expected = told([device(at, shift=int(at == 0)) for at in range(6)])
    assert [each.device for each in expected] == ["d000"]
    assert told(grams) == told(groups) == expected
    assert {name for name, found in METHODS.items() if not has_means(found.statistic)} <= {"spherefed"}
    assert not has_means(Participation)


def test_of_many_devices_some_are_compared_with_and_memory_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contradictions, "REFERENCES", 20)
    fleet = [device(at % 40, shift=int(at % 10 == 3)) for at in range(300)]
    assert accused(fleet) == list(range(3, 300, 10))
    tracemalloc.start()
    try:
        contradicted(lambda: itertools.islice(itertools.cycle(fleet[:20]), 300), [f"d{at}" for at in range(300)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 << 20, "300 devices' means and products take 1.7 MB in float32 alone, and the pairs 26 MB"


def _agree(fleet: Sequence[Statistic], among: Sequence[int]) -> list[int]:
    names = [f"d{at:03}" for at in range(len(fleet))]

    def some(devices: object) -> object:
        return (each for name, each in zip(names, fleet, strict=True) if name in devices)  # type: ignore[operator]

    return [int(name[1:]) for name in agreeing(some, names, [names[at] for at in among])]  # type: ignore[arg-type]


def test_those_agree_that_do_not_contradict_each_other_by_what_chance_does_in_the_fleet() -> None:
    shifts = [1, 1, 1, 2, 2, 3] + [0] * 12
    fleet = [device(at, shift=shift) for at, shift in enumerate(shifts)]
    assert _agree(fleet, range(6)) == [0, 1, 2]
    assert _agree(fleet, [0, 1, 3, 4, 5]) == [0, 1]
    assert _agree(fleet, [3, 5]) in ([3], [5])
    assert _agree(fleet, [1, 2, 7]) == [1, 2]


def test_who_shares_no_class_agrees_with_nobody() -> None:
    fleet = [device(0, range(3)), device(1, range(3)), device(2, range(3, 6))] + [device(at) for at in range(3, 9)]
    assert _agree(fleet, [0, 1, 2]) == [0, 1]


def _screened(fleet: Sequence[Statistic], **options: object) -> list[tuple[str, str]]:
    names = [f"d{at:03}" for at in range(len(fleet))]
    made = [Contribution.of(s, run=b"run1", round=1, method="fedproto", bundle=bytes(32)) for s in fleet]
    traits = {name: Traits.of(message) for name, message in zip(names, made, strict=True)}
    found = screen(lambda: iter(fleet), traits, **options)  # type: ignore[arg-type]
    left = len(list(found.source()))
    assert left == len(fleet) - sum(each.left_out for each in found.findings)
    return [(each.device, each.verdict) for each in found.findings]


def test_what_becomes_of_who_is_accused_is_the_operators_choice() -> None:
    fleet = [device(0, shift=1), *(device(at) for at in range(1, 6))]
    assert _screened(fleet, suspects="leave-out") == [("d000", "left out")]
    assert _screened(fleet, suspects="name") == [("d000", "suspected")]
    assert _screened(fleet, suspects="ignore") == []
    assert _screened(fleet) == []
    others = [device(at, [0, 1, 2]) for at in range(1, 5)] + [device(at, [3, 4, 5]) for at in range(5, 12)]
    assert _screened([device(0, [0, 1], shift=1), *others], suspects="leave-out") == [("d000", "suspected")]


def test_an_outlier_is_not_asked_and_a_claim_of_a_liar_left_out_weighs_nothing() -> None:
    long = ClassMeans(device(1).sums * 1e4, device(1).counts)
    heavy = ClassMeans.from_means(device(0, shift=1).means, np.full(CLASSES, 10**5))
    fleet = [heavy, long, *(device(at) for at in range(2, 7))]
    assert _screened(fleet, suspects="leave-out") == [("d001", "left out"), ("d000", "left out")]


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=9), st.floats(0.02, 1.0))
@settings(max_examples=100, deadline=None)
def test_no_device_counts_for_more_than_the_share_and_the_light_ones_are_left_alone(
    samples: list[int], share: float
) -> None:
    fleet = [ClassMeans.from_means(np.ones((1, 1)), [count]) for count in samples]
    traits = {f"d{at}": Traits(1.0, count, 1.0) for at, count in enumerate(samples)}
    after = [int(s.counts.sum()) for s in screen(lambda: iter(fleet), traits, max_share=share).source()]
    there = [count for count in samples if count]
    assert all(counted <= said for counted, said in zip(after, samples, strict=True))
    if len(there) < 3:
        assert after == samples
        return
    light = min(there)
    assert max(after) <= max(share * sum(after) + len(after), light)
    assert all(counted == said or max(after) - counted <= 1 for counted, said in zip(after, samples, strict=True))

"""Fleets of more devices than are compared with: who is drawn, by liars that know how, and by chance."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import pytest

from protofleet.aggregator.screening import contradictions
from protofleet.aggregator.screening.contradictions import contradicted
from protofleet.contract.sums.statistics import ClassMeans

CENTRES = 3.0 * np.random.default_rng(0).normal(size=(4, 8))


def device(seed: int, held: Sequence[int], *, swapped: bool = False) -> ClassMeans:
    """Means of 30 photos of some classes; the first two of them exchanged."""
    rows, counts = CENTRES[[1, 0, 2, 3]] if swapped else CENTRES, np.zeros(4, np.int64)
    counts[list(held)] = 30
    noise = np.random.default_rng(seed).normal(size=rows.shape) / np.sqrt(30)
    return ClassMeans.from_means(np.where(counts[:, None] > 0, rows + noise, 0.0), counts)


def framed(names: Sequence[str], liars: int, victims: int) -> list[ClassMeans]:
    """Liars that hold two classes, exchanged; few honest devices hold one of them, and are outvoted there."""
    others = [device(at, [0, 2]) for at in range(liars, liars + victims)]
    rest = [device(at, [2, 3]) for at in range(liars + victims, len(names))]
    return [*(device(at, [0, 1], swapped=True) for at in range(liars)), *others, *rest]


def accused(fleet: Sequence[ClassMeans], names: Sequence[str]) -> set[int]:
    return {names.index(each.device) for each in contradicted(lambda: iter(fleet), names) if each.accused}


def test_liars_that_choose_their_names_are_not_all_that_is_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifteen of ninety, whose names alone come first by their hash."""
    monkeypatch.setattr(contradictions, "REFERENCES", 30)
    drawn = sorted((f"x{at}" for at in range(600)), key=lambda name: hashlib.sha256(name.encode()).digest())
    names = [*drawn[:15], *(f"d{at:03}" for at in range(75))]
    assert not accused(framed(names, 15, 5), names) & set(range(15, 90))


def test_a_third_that_lies_is_no_more_than_may_lie_whoever_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contradictions, "REFERENCES", 36)
    for draw in range(12):
        names = [f"{draw}-{at:03}" for at in range(90)]
        assert not accused(framed(names, 30, 5), names) & set(range(30, 90)), draw


def test_liars_are_found_among_more_devices_than_are_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contradictions, "REFERENCES", 36)
    names = [f"d{at:03}" for at in range(120)]
    fleet = [device(at, range(4), swapped=at < 36) for at in range(120)]
    assert accused(fleet, names) == set(range(36))


def test_who_is_vouched_for_is_always_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contradictions, "REFERENCES", 16)
    names = [f"d{at:03}" for at in range(60)]
    fleet = [device(at, range(4), swapped=at < 40) for at in range(60)]  # most of them lie together
    for sure in ("d045", "d059"):
        told = contradicted(lambda: iter(fleet), names, [sure])
        assert [each.device for each in told if each.accused] == names[:40]


def test_who_can_read_some_devices_alone_reads_no_others_for_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contradictions, "REFERENCES", 16)
    names = [f"d{at:03}" for at in range(40)]
    fleet, asked = {name: device(at, range(4), swapped=at < 5) for at, name in enumerate(names)}, []

    def some(devices: Collection[str]) -> Iterator[ClassMeans]:
        asked.append(list(devices))
        return (fleet[name] for name in devices)

    source = lambda: iter(fleet.values())  # noqa: E731
    assert contradicted(source, names, some=some) == contradicted(source, names) != []
    assert [len(each) for each in asked] == [16]

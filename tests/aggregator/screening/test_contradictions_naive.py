"""How far means go towards another class, and what chance does, against loops that say it as the docstrings do."""

from __future__ import annotations

from itertools import product
from statistics import NormalDist

import numpy as np
import pytest

from protofleet.aggregator.screening import contradictions
from protofleet.aggregator.screening.class_displacements import (
    Means,
    References,
    cross,
    displacement,
    displacement_back,
)
from protofleet.aggregator.screening.contradictions import contradicted
from protofleet.contract.sums.statistics import ClassMeans

CLASSES, WIDTH, NAN = 4, 5, float("nan")
Rows = dict[int, np.ndarray]


def fleet(seed: int, devices: int) -> list[ClassMeans]:
    """Means around shared centres, a few of them missing, of 2 to 40 photos."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(CLASSES, WIDTH))
    counts = rng.integers(2, 40, (devices, CLASSES)) * (rng.random((devices, CLASSES)) < 0.85)
    return [ClassMeans.from_means(centres + rng.normal(size=centres.shape) / 3, n) for n in counts]


def lower(values: list[float]) -> float:
    there = sorted(value for value in values if not np.isnan(value))
    return there[(len(there) - 1) // 2] if there else NAN


def rows(device: ClassMeans) -> Rows:
    return {int(j): device.means[j].astype(np.float32).astype(float) for j in np.flatnonzero(device.counts >= 3)}


def gone(
    point: np.ndarray, among: Rows, counts: np.ndarray, j: int, k: int, n: float, total: float
) -> tuple[float, float]:
    """(chance, beyond) of a mean of j over n photos on the way from `among`'s j to its k."""
    if j == k or j not in among or k not in among:
        return NAN, -np.inf
    displacement = among[k] - among[j]
    length, far = float(displacement @ displacement), float((point - among[j]) @ displacement) - total / counts[j]
    blur = total * (1 / counts[j] + 1 / counts[k])
    return far / np.sqrt(length * (1 / n + 1 / counts[j])), far - max(length - blur, 0.0) / 2


def naive_spread(devices: list[ClassMeans]) -> tuple[float, np.ndarray]:
    held, counts, every = [rows(d) for d in devices], [d.counts for d in devices], range(len(devices))
    apart = [
        [
            float(np.sum((held[i][j] - held[r][j]) ** 2)) / (1 / counts[i][j] + 1 / counts[r][j])
            for j, r in product(held[i], every)
            if r != i and j in held[r]
        ]
        for i in every
    ]
    total = lower([lower(each) for each in apart])
    by_pair, nearest = np.full((len(devices), CLASSES, CLASSES), NAN), []
    for i in every:
        closest = []
        for j in held[i]:
            found = {
                (r, k): gone(held[i][j], held[r], counts[r], j, k, counts[i][j], total)
                for r, k in product(every, range(CLASSES))
                if r != i
            }
            for k in range(CLASSES):
                by_pair[i, j, k] = lower([abs(found[r, k][0]) for r in every if r != i])
            for r in every:
                if r != i and any(np.isfinite(found[r, k][0]) for k in range(CLASSES)):
                    closest.append(abs(max((found[r, k][::-1] for k in range(CLASSES)), key=lambda each: each[0])[1]))
        nearest.append(lower(closest))
    usual, along = lower(nearest), np.zeros((CLASSES, CLASSES))
    for j, k in product(range(CLASSES), repeat=2):
        told = [float(value) for value in by_pair[:, j, k] if not np.isnan(value)]
        widest = max(usual, lower(told)) if len(told) >= 3 else usual
        along[j, k] = min(widest, np.sqrt(total)) / 0.6745
    return total, along


@pytest.mark.parametrize("devices", [3, 4, 7])
def test_what_chance_does_is_what_a_loop_finds(devices: int) -> None:
    made = fleet(devices, devices)
    means = [Means.of(each) for each in made]
    references = References.of(means, CLASSES)
    found = contradictions._spread(means, references, np.zeros(devices, bool))
    assert found is not None
    total, along = naive_spread(made)
    assert found.total == pytest.approx(total, rel=1e-4)
    np.testing.assert_allclose(found.along, along, rtol=2e-3)  # float32 rows


@pytest.mark.parametrize("seed", [1, 2])
def test_both_ways_between_two_devices_are_what_a_loop_finds(seed: int) -> None:
    made, total = fleet(seed, 5), 0.7
    means = [Means.of(each) for each in made]
    references = References.of(means[:4], CLASSES)
    mine, own, n = means[4], rows(made[4]), made[4].counts
    products = cross(mine, references)
    there = displacement(mine, references, products, total)
    back = displacement_back(mine, references, products, total)
    for at, r in product(range(len(mine.classes)), range(4)):
        j, theirs, m = int(mine.classes[at]), rows(made[r]), made[r].counts
        for k in range(CLASSES):
            expected = gone(own[j], theirs, m, j, k, n[j], total)
            found = there.chance[at, r, k], there.beyond[at, r, k]
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
        for to, k in enumerate(map(int, mine.classes)):
            expected = gone(theirs[j], own, n, j, k, m[j], total) if j in theirs else (NAN, -np.inf)
            found = back.chance[at, r, to], back.beyond[at, r, to]
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("seed", "offset"), [(3, 0.0), (4, 0.0), (5, 300.0)])
def test_what_is_screened_out_goes_nowhere(seed: int, offset: float) -> None:
    """Who contradicts whom, and in what, is the same as where every way is worked out; liars and lone holders too."""
    made = [
        ClassMeans.from_means(
            (np.roll(each.means, at % 5 == 0, axis=0) + offset) * (each.counts > 0)[:, None], each.counts
        )
        for at, each in enumerate(fleet(seed, 24))
    ]
    means, sure, places = [Means.of(each) for each in made], np.zeros(16, bool), range(16)
    references = References.of(means[:16], CLASSES)
    spread = contradictions._spread(means[:16], references, sure)
    assert spread is not None
    told = contradictions._Verdicts.of(iter(means), references, places, sure, spread, len(means))
    limit = NormalDist().inv_cdf(1 - 1 / (1_000 * len(means) * np.isfinite(references.inverse).sum(axis=1).mean()))
    for at, mine in enumerate(means):
        products, own = cross(mine, references), spread.along[mine.classes]
        there = displacement(mine, references, products, spread.total, but=at)
        back = displacement_back(mine, references, products, spread.total)
        votes, against, could = np.zeros((len(mine.classes), CLASSES), int), np.zeros(16, bool), np.zeros(16, bool)
        for gone, along, is_back in ((there, own, False), (back, own[:, mine.classes], True)):
            found = ((gone.beyond > 0) & (gone.chance > limit * along[:, None])).any(axis=2)
            against |= found.any(axis=0)
            could |= np.isfinite(gone.chance).any(axis=(0, 2))
            label, nearest = np.nonzero(found)[0], gone.beyond.argmax(axis=2)[found]
            np.add.at(votes, (nearest, mine.classes[label]) if is_back else (label, nearest), 1)
        own_place = np.arange(16) == at
        np.testing.assert_array_equal(told.against[at], against & ~own_place)
        np.testing.assert_array_equal(told.could[at], could & ~own_place)
        row, column = np.unravel_index(votes.argmax(), votes.shape)
        assert told.worst[at].tolist() == [mine.classes[row], column]
    assert told.against.any()
    assert not told.against.all()


def test_three_photos_of_a_class_are_enough_and_two_are_not() -> None:
    centres = 3.0 * np.eye(CLASSES, WIDTH)

    def sent(seed: int, each: int, shift: int = 0) -> ClassMeans:
        noise = 0.1 * np.random.default_rng(seed).normal(size=centres.shape)
        return ClassMeans.from_means(np.roll(centres, shift, axis=0) + noise, np.full(CLASSES, each))

    honest = [sent(at, 30) for at in range(1, 6)]
    for each, found in ((2, 0), (3, 1)):
        told = contradicted(lambda each=each: iter([sent(0, each, 1), *honest]), list("abcdef"))
        assert len([one for one in told if one.accused]) == found


def test_photos_that_look_otherwise_are_no_lie_however_many_there_are() -> None:
    """A third of the way to the next class is far beyond chance, and still nearest to its own."""
    rng, centres = np.random.default_rng(0), 3.0 * np.eye(CLASSES, WIDTH)
    other = centres + (np.roll(centres, 1, axis=0) - centres) / 3
    means = [each + 0.01 * rng.normal(size=each.shape) for each in (other, *[centres] * 6)]
    fleet = [ClassMeans.from_means(each, np.full(CLASSES, 10_000)) for each in means]
    assert not contradicted(lambda: iter(fleet), list("abcdefg"))


def test_liars_are_not_the_measure_of_their_own_lie() -> None:
    """Most holders of class 0 lie, each of another class: what they call chance would hide them; then most devices."""
    rng, centres = np.random.default_rng(0), 3.0 * np.eye(CLASSES, WIDTH)
    whole = [
        ClassMeans.from_means(centres + 0.1 * rng.normal(size=centres.shape), np.full(CLASSES, 30)) for _ in range(2)
    ]

    def one(claimed: int, of: int) -> ClassMeans:
        counts = np.where(np.arange(CLASSES) == claimed, 30, 0)
        return ClassMeans.from_means(
            (centres[of] + 0.1 * rng.normal(size=WIDTH)) * (counts > 0)[:, None], counts
        )  # fmt: skip

    devices = [*whole, one(0, 1), one(0, 1), one(0, 2), *(one(at % 3 + 1, at % 3 + 1) for at in range(7))]
    names = [f"d{at:02}" for at in range(len(devices))]
    found = [each.device for each in contradicted(lambda: iter(devices), names, ["d00"]) if each.accused]
    assert found == ["d02", "d03", "d04"]
    wild = [ClassMeans.from_means(9 * rng.normal(size=centres.shape), np.full(CLASSES, 30)) for _ in range(6)]
    names = [f"d{at:02}" for at in range(11)]
    fleet = [*whole, *(ClassMeans(w.sums, w.counts) for w in whole), whole[0], *wild]
    assert not [e for e in contradicted(lambda: iter(fleet), names, ["d00"]) if e.accused], "otherwise this shows less"
    found = [each.device for each in contradicted(lambda: iter(fleet), names, ["d00", "d01"]) if each.accused]
    assert found == names[5:]

"""Partitions: nobody's image is another's, and everybody can train."""

from __future__ import annotations

import numpy as np
import pytest

from protofleet.contract.errors import DataError, UsageError
from protofleet.edge_client.data.samples import UNLABELLED
from protofleet.lab.data.partition import PARTITIONS, Partition, hold_back, liars_of, mislabelled, partition, unlabel

LABELS = np.repeat(np.arange(6), 80)
SOURCES = np.arange(480) % 2


@pytest.mark.parametrize("scheme", PARTITIONS)
@pytest.mark.parametrize("seed", [0, 1, 7])
def test_parts_are_disjoint_reproducible_and_trainable(scheme: str, seed: int) -> None:
    spec = Partition(scheme, clients=5, alpha=0.3, classes_per_client=2, shots=12)
    parts = partition(LABELS, spec, seed=seed, sources=SOURCES)
    joined = np.concatenate(parts)
    assert len(parts) == 5
    assert len(set(joined.tolist())) == len(joined)
    assert joined.min() >= 0
    assert joined.max() < len(LABELS)
    assert all(len(np.unique(LABELS[part])) >= 2 for part in parts)
    again = partition(LABELS, spec, seed=seed, sources=SOURCES)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_iid_and_dirichlet_leave_nothing_out() -> None:
    for scheme in ("iid", "dirichlet"):
        assert sum(len(part) for part in partition(LABELS, Partition(scheme, 4))) == len(LABELS)


def test_iid_spreads_classes_evenly_and_dirichlet_does_not() -> None:
    def unevenness(scheme: str) -> float:
        parts = partition(LABELS, Partition(scheme, 4, alpha=0.3))
        return float(np.std([np.bincount(LABELS[part], minlength=6) for part in parts]))

    assert unevenness("iid") < 6 < unevenness("dirichlet")


def test_pathological_gives_each_client_that_many_classes() -> None:
    parts = partition(LABELS, Partition("pathological", 6, classes_per_client=3), seed=2)
    assert all(len(np.unique(LABELS[part])) == 3 for part in parts)


@pytest.mark.parametrize("seed", range(4))
def test_uneven_drops_rare_classes_and_nobody_has_all(seed: int) -> None:
    parts = partition(LABELS, Partition("uneven", 3, alpha=5.0, min_samples=12), seed=seed)
    for part in parts:
        counts = np.bincount(LABELS[part], minlength=6)
        assert counts[counts > 0].min() >= 12
        assert (counts == 0).any()


def test_an_impossible_partition_is_one_line() -> None:
    with pytest.raises(DataError, match="at least two classes for every client"):
        partition(np.zeros(40, np.int64), Partition("iid", 2))
    with pytest.raises(UsageError, match="classes_per_client, expected up to 6, the data's classes, got 7"):
        partition(LABELS, Partition("pathological", 3, classes_per_client=7))
    with pytest.raises(DataError, match="got 40 ways of 6 classes, try fewer clients, ways or shots"):
        partition(LABELS, Partition("shots", 3, ways=40))
    with pytest.raises(UsageError, match=r"partition, expected iid, dirichlet.* or uneven, got irid, try one of iid"):
        Partition("irid")
    with pytest.raises(UsageError, match="clients, expected 1 or more, got 0"):
        Partition("iid", 0)


def test_shots_gives_each_client_its_own_classes_and_shots() -> None:
    parts = partition(LABELS, Partition("shots", 4, ways=3, ways_spread=1, shots=15), seed=1)
    for part in parts:
        counts = np.bincount(LABELS[part], minlength=6)
        assert set(counts.tolist()) <= {0, 15}
        assert 2 <= (counts > 0).sum() <= 4
    assert len({(np.bincount(LABELS[part], minlength=6) > 0).tobytes() for part in parts}) > 1
    with pytest.raises(DataError, match="fewer than 70 samples left of class"):
        partition(LABELS, Partition("shots", 9, ways=3, shots=70))


def test_only_thins_out_and_every_client_has_its_least() -> None:
    spec = Partition("dirichlet", 4, alpha=0.05, only=120, min_classes=1, min_client_samples=9)
    parts = partition(LABELS, spec, seed=2)
    assert sum(len(part) for part in parts) == 120
    assert min(len(part) for part in parts) >= 9
    with pytest.raises(DataError, match="only, expected up to 480, the training samples, got 481"):
        partition(LABELS, Partition("iid", 2, only=481))


def test_hold_back_cuts_and_leaves_one_to_train() -> None:
    part = np.arange(50, 100)
    kept, held = hold_back(part, 0.2, seed=3)
    assert (len(kept), len(held)) == (40, 10)
    assert sorted([*kept, *held]) == part.tolist()
    kept, held = hold_back(np.array([7]), 0.9, seed=0)
    assert (kept.tolist(), held.tolist()) == ([7], [])
    kept, held = hold_back(part, 0.0, seed=3)
    assert kept is part
    assert len(held) == 0


def test_a_liars_labels_are_the_next_ones_and_who_lies_is_drawn_by_the_seed() -> None:
    assert mislabelled(np.array([0, 1, 2, UNLABELLED]), 3).tolist() == [1, 2, 0, UNLABELLED]
    assert liars_of(5, 0, 0) == []
    drawn = [liars_of(10, 3, seed) for seed in range(5)]
    assert all(len(set(one)) == 3 for one in drawn)
    assert drawn[0] == liars_of(10, 3, 0)
    assert len(set(map(tuple, drawn))) > 1


def test_unlabel_keeps_the_rate_of_each_class() -> None:
    labels = np.array([0] * 50 + [3] * 30 + [5] * 2)
    known = unlabel(labels, 0.1, seed=1)
    assert np.bincount(known[known >= 0], minlength=6).tolist() == [5, 0, 0, 3, 0, 1]
    assert (known[known >= 0] == labels[known >= 0]).all()
    assert not np.array_equal(known, unlabel(labels, 0.1, seed=2))


def test_quantity_makes_sizes_uneven_and_keeps_the_mix() -> None:
    parts = partition(LABELS, Partition("quantity", 4, alpha=0.5, min_client_samples=20))
    sizes = [len(part) for part in parts]
    assert sum(sizes) == len(LABELS)
    assert max(sizes) > 2 * min(sizes)
    largest = max(parts, key=len)
    assert np.bincount(LABELS[largest], minlength=6) == pytest.approx(len(largest) / 6, rel=0.4)


def test_each_client_has_one_source() -> None:
    parts = partition(LABELS, Partition("source", 5), sources=SOURCES)
    assert [set(SOURCES[part].tolist()) for part in parts] == [{0}, {1}, {0}, {1}, {0}]
    assert sum(len(part) for part in parts) == len(LABELS)
    few = partition(LABELS, Partition("source", 2, only=100), sources=SOURCES)
    assert sum(len(part) for part in few) == 100
    with pytest.raises(UsageError, match="partition source, expected several data sets, got one, try --data A"):
        partition(LABELS, Partition("source", 2))
    with pytest.raises(UsageError, match="expected a client for each of 2 data sets, got 1"):
        partition(LABELS, Partition("source", 1), sources=SOURCES)

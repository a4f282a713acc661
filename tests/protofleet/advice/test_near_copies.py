"""Photos that are there twice, or nearly: found, kept on one side of `advise`, and worth no false promise."""

from __future__ import annotations

import numpy as np
import pytest
from edge_samples import FASHION
from hypothesis import given, settings
from hypothesis import strategies as st

from protofleet.advice.advice import Plan, advise, apart
from protofleet.advice.near_copies import near_copies
from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.errors import DataError
from protofleet.contract.methods import method
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.data.load import hold_back, load_data
from protofleet.lab.demo.shipped import BUNDLE


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return read_bundle(BUNDLE)


@pytest.fixture(scope="module")
def photos(bundle: Bundle) -> LocalData:
    whole = load_data(FASHION / "train.parquet", bundle.manifest)
    rows = np.random.default_rng(0).permutation(len(whole))[:400]
    return LocalData(whole.x[rows], whole.y[rows])


def _frames(x: np.ndarray, seed: int) -> np.ndarray:
    """What a camera that stands still sees a moment later: 3 % lighter or darker, noise of 2 grey levels."""
    rng = np.random.default_rng(seed)
    light = rng.uniform(0.97, 1.03, (len(x), 1, 1, 1))
    return np.clip(np.rint(x * light + rng.normal(0, 2.0, x.shape)), 0, 255).astype(np.uint8)


def test_frames_of_a_camera_that_stands_are_found_and_different_photos_are_not(photos: LocalData) -> None:
    burst = np.concatenate([_frames(photos.x[:50], seed) for seed in range(20)])  # longer than the surroundings
    found = near_copies([photos.x, burst, photos.x[50:60]])
    expected = np.r_[np.tile(found[:50], 20), found[50:60]]
    assert (found[400:] == expected).mean() > 0.98  # noise hides a dark one now and then
    alone = near_copies([photos.x])
    assert len(np.unique(alone)) >= 0.97 * len(photos)
    np.testing.assert_array_equal(alone[alone], alone)  # each group by one of its own, the first
    assert (alone <= np.arange(400)).all()


def test_few_photos_and_those_of_one_colour() -> None:
    grey = np.full((2, 28, 28, 3), 9, np.uint8)
    other = np.random.default_rng(0).integers(0, 255, (6, 28, 28, 3)).astype(np.uint8)
    assert near_copies([grey[:0]]).tolist() == []
    assert near_copies([grey]).tolist() == [0, 0]
    assert near_copies([grey[:1], grey[:1] + 7]).tolist() == [0, 1]
    assert near_copies([other, grey, other[2:3]]).tolist() == [0, 1, 2, 3, 4, 5, 6, 6, 2]


@given(
    labels=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8), st.booleans()), min_size=2, max_size=40),
    seed=st.integers(0, 99),
)
@settings(max_examples=100, deadline=None)
def test_no_group_is_on_both_sides_and_of_those_held_out_there_is_one_of_each(labels: list, seed: int) -> None:
    rows = sorted(labels, key=lambda row: row[2])
    y, alike = (np.array([row[k] for row in rows], np.int64) for k in (0, 1))
    first, x = sum(not row[2] for row in rows), np.arange(len(rows))
    learn, held = apart(LocalData(x[:first], y[:first]), LocalData(x[first:], y[first:]), alike, seed)
    if first in (0, len(rows)) or not set(held.x) - set(x[first:]) <= set(x):
        return
    assert not set(alike[held.x]) & set(alike[learn.x])
    assert len(set(alike[held.x])) == len(held)
    assert not set(learn.x) & set(held.x)
    assert set(y[learn.x]) >= set(y[:first])  # no class loses all that it had
    single = [row for row in x if (alike == alike[row]).sum() == 1]
    assert {row for row in single if row >= first} <= set(held.x)
    assert {row for row in single if row < first} <= set(learn.x)


def test_where_there_are_copies_alone_to_test_with_nothing_is_promised(photos: LocalData, bundle: Bundle) -> None:
    """One burst of each class: whoever is asked about its frames has learned from the others."""
    first = np.unique(photos.y, return_index=True)[1]
    burst = np.concatenate([_frames(photos.x[first], seed) for seed in range(10)])
    learn, held = hold_back(LocalData(burst, np.tile(photos.y[first], 10)), share=0.2)
    with pytest.raises(DataError, match="photos to test with, expected some that are not like those to learn from"):
        advise(bundle, (learn, held), Plan())


def test_advice_on_photos_with_copies_promises_what_others_give(photos: LocalData, bundle: Bundle) -> None:
    again = np.repeat(np.arange(200), 5)  # on both sides, copies flatter every promise
    x = np.concatenate([photos.x[:200], _frames(photos.x[again], 1)])
    y = np.concatenate([photos.y[:200], photos.y[again]])
    order = np.random.default_rng(1).permutation(len(y))
    learn, held = hold_back(LocalData(x[order], y[order]), share=0.2)
    others = load_data(FASHION / "test.parquet", bundle.manifest, purpose="test")
    steps: list[str] = []
    found = advise(bundle, (learn, held), Plan(), on_done=lambda what, done, whole: steps.append(what))
    truth = {way["way"]: way for way in advise(bundle, (learn, others), Plan()).as_json()["ways"]}
    told = found.as_json()
    assert 1_000 <= told["copies"] <= 1_010
    assert told["held_out"] < 0.3 * len(held)
    for way in told["ways"]:
        if method(way["way"].split()[0]).statistic.COUNTED:
            assert abs(way["accuracy"] - truth[way["way"]]["accuracy"]) <= 3 * way["standard_error"], way["way"]
    assert {"photos", "comparing photos", "measuring ncm", "measuring ffc"} <= set(steps)

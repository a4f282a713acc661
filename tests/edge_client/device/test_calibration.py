"""What a device makes of its held-out photos: the report, its own calibration, and the limit of what is known."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protofleet.contract.calibration import LEAST_PHOTOS, Bins, log_shares
from protofleet.contract.errors import WireError
from protofleet.contract.heads.answers import linear_answer
from protofleet.contract.wire.calibration_messages import AnnouncedCalibration, CalibrationReport
from protofleet.edge_client.answers.class_shares import HALF_LIFE, ClassShares
from protofleet.edge_client.device.calibration import CUT, Gathered, HeldOut, Known, first_counts
from protofleet.edge_client.device.unknown import LargestScoreNovelty

CLASSES = 4


def held_out(photos: int, seed: int = 0) -> HeldOut:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, photos)
    scores = rng.normal(size=(photos, CLASSES)) + 2.0 * np.eye(CLASSES)[labels]
    return HeldOut("linear", scores.astype(np.float32), labels, np.array([5, 60, 0, 3]), b"run1", 7)


def test_shares_begin_with_labels_cut_to_thirty() -> None:
    np.testing.assert_array_equal(first_counts(np.array([2, 3])), [2, 3])
    assert first_counts(np.array([300, 900])).sum() == pytest.approx(CUT)
    np.testing.assert_allclose(first_counts(np.array([300, 900])), [7.5, 22.5])
    np.testing.assert_array_equal(first_counts(np.zeros(3, int)), np.zeros(3))


def test_shares_follow_what_is_seen_and_forget_by_half_after_a_hundred_photos() -> None:
    shares = ClassShares(np.array([30, 0]))
    seen = np.tile([0.0, 1.0], (int(HALF_LIFE), 1))
    before = np.exp(shares.follow(seen))
    counts = np.array([30.0, 0.0])
    for row in before:
        expected = (counts + 0.5) / (counts.sum() + 1.0)
        np.testing.assert_allclose(row, expected)
        counts = counts * 2.0 ** (-1 / HALF_LIFE) + [0.0, 1.0]
    assert counts[0] == pytest.approx(15.0)
    assert before[0, 1] < 0.02
    assert before[-1, 1] > 0.7
    assert shares.is_of(np.array([30, 0]))
    assert not shares.is_of(np.array([29, 0]))


def test_a_report_says_the_table_first_and_counts_at_what_was_announced() -> None:
    held = held_out(30)
    first = held.report(AnnouncedCalibration())
    assert first is not None
    assert (first.run, first.version, first.way, first.photos, first.counts) == (b"run1", 7, "linear", 30, b"")
    announced = AnnouncedCalibration("linear", 0.5, 0.75, 30, 1)
    second = held.report(announced)
    assert second is not None
    assert (second.surprise, second.calibration) == (first.surprise, announced.calibration)
    scores = held.scores.astype(np.float64)
    shares = log_shares(first_counts(held.counts))
    expected = Bins.of(announced.calibration.log_probabilities(scores, shares), held.labels)
    assert second.bins == expected
    assert held.report(replace(announced, way="prototype")) == first  # of another way: no counts
    assert replace(held, version=0).report(announced) is None  # there is no global state
    assert held_out(0).report(announced) is None


def test_a_report_that_cannot_be_true_does_not_exist() -> None:
    told = held_out(30).report(AnnouncedCalibration("linear", 0.5, 0.75, 30, 1))
    assert told is not None
    with pytest.raises(WireError, match="counts of 31 photos"):
        replace(told, photos=31)
    with pytest.raises(WireError, match="mean surprise up to 20 nats"):
        replace(told, surprise=b"\xff" * len(told.surprise))
    with pytest.raises(WireError):
        CalibrationReport(b"run1", 1, "linear", 30, told.surprise[:-1])


@given(st.integers(0, 60), st.integers(0, 1_000))
def test_what_is_known_comes_back_and_few_photos_say_nothing(photos: int, seed: int) -> None:
    known = held_out(photos, seed).known()
    assert Known.read(known.written()) == known
    assert (known.own.way == "linear") == (known.limit is not None) == (photos >= LEAST_PHOTOS)
    assert known.limit_of("prototype") is None
    if known.limit is not None:
        novelty = -held_out(photos, seed).scores.max(axis=1)
        assert (novelty > known.limit).mean() <= 0.05
        assert known.limit_of("linear") == known.limit


def test_the_fleets_calibration_comes_before_the_devices_own() -> None:
    own, fleet = AnnouncedCalibration("linear", 0.5), AnnouncedCalibration("linear", 2.0)
    assert Known(own=own).of_way("linear") == (own, "this device's")
    assert Known(own=own, fleet=fleet).of_way("linear") == (fleet, "the fleet's")
    assert Known(own=own, fleet=replace(fleet, way="head")).of_way("linear") == (own, "this device's")
    assert Known(own=own).of_way("head") is None


@pytest.mark.parametrize(
    "written",
    ["{}", "[]", json.dumps({"counts": [-1], "fleet": {}, "own": {}, "limit": None}), '{"counts": [1], "fleet": 3}'],
)
def test_what_no_device_wrote_is_refused(written: str) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, WireError)):
        Known.read(written)


def test_scores_are_gathered_block_by_block_in_units_of_their_scale_and_only_so_many(monkeypatch) -> None:
    rng = np.random.default_rng(0)
    answer, features = linear_answer(rng.normal(size=(3, 8)), unit=True), rng.normal(size=(50, 8)).astype(np.float32)
    labels = rng.integers(0, 3, 50)
    for most in (10**6, 30):
        monkeypatch.setattr("protofleet.edge_client.device.calibration._KEPT_NUMBERS", most)
        gathered = Gathered("linear", answer, 50, 3)
        for start in range(0, 50, 20):
            gathered.add(slice(start, min(start + 20, 50)), features[start : start + 20])
        held = gathered.held_out(labels, np.ones(3, int), b"run1", 1)
        assert held is not None
        assert len(held.labels) == min(50, most // 3)
        rows = np.linspace(0, 49, len(held.labels)).astype(int)
        np.testing.assert_allclose(held.scores, answer.scores(features[rows]) / answer.scale, rtol=1e-6)
        np.testing.assert_array_equal(held.labels, labels[rows])
    assert Gathered("linear", answer, 50, 3).held_out(labels, np.ones(3, int), b"run1", 1) is None


def test_novelty_is_minus_the_largest_score_in_its_units() -> None:
    rng = np.random.default_rng(0)
    answer, features = linear_answer(rng.normal(size=(3, 8)), unit=True), rng.normal(size=(5, 8)).astype(np.float32)
    found = LargestScoreNovelty(answer, 0.5)
    np.testing.assert_allclose(found.of(features), -answer.scores(features).max(axis=1) / answer.scale)
    assert (found.threshold, LargestScoreNovelty(answer).threshold) == (0.5, None)


@pytest.mark.parametrize("temperature", [5e-324, 1e6])
def test_no_announced_temperature_ends_a_device(temperature: float) -> None:
    told = held_out(30).report(AnnouncedCalibration("linear", temperature, 1.0, 30, 1))
    assert told is not None
    assert told.bins is not None
    assert told.bins.photos == 30


def test_photos_are_put_into_a_table_once(monkeypatch) -> None:
    held = held_out(30)
    first = held.report(AnnouncedCalibration())
    monkeypatch.setattr("protofleet.edge_client.device.calibration.surprise_table", None)
    assert held.report(AnnouncedCalibration()) == first
    assert held.known().own.way == "linear"


def test_bins_that_cannot_be_of_the_same_photos_are_not_announced() -> None:
    counts = np.zeros(Bins.BYTES // 4, "<u4")
    counts[0] = 1  # by the right class one photo, by the answer none
    with pytest.raises(WireError, match="counts of the same photos"):
        AnnouncedCalibration("linear", counts=counts.tobytes())


def test_of_twenty_photos_all_stay_known_and_of_thirty_nine_all_but_one() -> None:
    for photos, lost in ((LEAST_PHOTOS, 0), (39, 1)):
        held = held_out(photos)
        limit = held.known().limit
        assert limit is not None
        assert (-held.scores.max(axis=1) > limit).sum() == lost


@pytest.mark.parametrize("limit", [float("nan"), float("inf")])
def test_a_limit_that_is_no_number_is_refused(limit: float) -> None:
    with pytest.raises(ValueError, match="a limit of novelty"):
        Known.read(replace(held_out(30).known(), limit=limit).written())

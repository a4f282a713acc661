"""From scores to probabilities, beside naive sums, and what tables and bins promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protofleet.contract.calibration import (
    LEAST_PHOTOS,
    MOST_SURPRISE,
    STRENGTHS,
    TABLE_BYTES,
    TEMPERATURES,
    Bins,
    Calibration,
    SurpriseTable,
    chosen,
    log_shares,
    pooled,
    surprise_table,
)
from protofleet.contract.heads.answers import linear_answer, nearest_answer

CLASSES = 4


def photos(seed: int, count: int = 400, *, skewed: bool = False, sharp: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Scores (N, C) whose softmax at temperature 1 / sharp is the truth that labels are drawn by."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(count, CLASSES)) * 1.5
    prior = np.log([0.85, 0.05, 0.05, 0.05]) if skewed else np.zeros(CLASSES)
    truth = np.exp(logits + prior)
    truth /= truth.sum(axis=1, keepdims=True)
    labels = np.array([rng.choice(CLASSES, p=row) for row in truth])
    return logits * sharp, labels


@given(st.integers(0, 10_000), st.sampled_from(TEMPERATURES), st.sampled_from(STRENGTHS))
def test_probabilities_are_those_of_the_formula(seed: int, temperature: float, strength: float) -> None:
    rng = np.random.default_rng(seed)
    scores, counts = rng.normal(size=(3, CLASSES)) * 4, rng.integers(0, 30, CLASSES)
    found = np.exp(Calibration(temperature, strength).log_probabilities(scores, log_shares(counts)))
    for row, photo in zip(found, scores, strict=True):
        share = [(count + 1 / CLASSES) / (counts.sum() + 1) for count in counts]
        raised = [math.exp((s - photo.max()) / temperature) * p**strength for s, p in zip(photo, share, strict=True)]
        np.testing.assert_allclose(row, np.array(raised) / sum(raised), rtol=1e-9, atol=1e-300)


def test_a_class_that_is_never_answered_has_probability_zero_and_surprises_as_much_as_is_possible() -> None:
    scores = np.array([[1.0, -np.inf, 0.0, 2.0]])
    assert np.exp(Calibration().log_probabilities(scores))[0, 1] == 0.0
    table = surprise_table(scores, np.array([1]), log_shares(np.ones(CLASSES)))
    np.testing.assert_array_equal(table.surprise, np.full((len(TEMPERATURES), len(STRENGTHS)), MOST_SURPRISE))


@pytest.mark.parametrize(("sharp", "temperature"), [(0.125, 0.125), (1.0, 1.0), (8.0, 8.0)])
def test_the_temperature_is_the_one_that_labels_were_drawn_by(sharp: float, temperature: float) -> None:
    scores, labels = photos(1, 2_000, sharp=sharp)
    best = chosen(surprise_table(scores, labels, log_shares(np.ones(CLASSES))))
    assert best is not None
    assert temperature / 2**0.5 <= best.temperature <= temperature * 2**0.5
    assert best.strength == 0.0


def test_class_shares_count_where_photos_come_by_them_and_not_where_they_come_evenly() -> None:
    counts = np.array([26, 1, 2, 1])
    scores, labels = photos(2, skewed=True)
    best = chosen(surprise_table(scores, labels, log_shares(counts)))
    assert best is not None
    assert best.strength >= 0.75
    scores, labels = photos(3)
    best = chosen(surprise_table(scores, labels, log_shares(counts)))
    assert best is not None
    assert best.strength == 0.0


def test_few_photos_choose_nothing_and_a_gain_of_chance_chooses_no_strength() -> None:
    scores, labels = photos(4, LEAST_PHOTOS)
    shares = log_shares(np.ones(CLASSES))
    assert chosen(surprise_table(scores[:-1], labels[:-1], shares)) is None
    assert chosen(surprise_table(scores, labels, shares)) is not None
    assert chosen(None) is None
    surprise = np.ones((len(TEMPERATURES), len(STRENGTHS)))
    surprise[3, 2] -= 1.9 / 40  # saves less than two nats over 40 photos
    assert chosen(SurpriseTable(surprise, 40)) == Calibration(TEMPERATURES[0], 0.0)
    surprise[3, 2] -= 0.2 / 40
    assert chosen(SurpriseTable(surprise, 40)) == Calibration(TEMPERATURES[3], STRENGTHS[2])


def test_what_is_in_force_stays_until_something_is_clearly_better() -> None:
    surprise = np.ones((len(TEMPERATURES), len(STRENGTHS)))
    surprise[3, 0], surprise[5, 0] = 0.5, 0.496
    table, before = SurpriseTable(surprise, 1_000), Calibration(TEMPERATURES[3])
    assert chosen(table, before, 0.005) == before
    assert chosen(table, before, 0.003) == Calibration(TEMPERATURES[5])
    assert chosen(table, Calibration(0.123), 0.005) == Calibration(TEMPERATURES[5])


def test_pooling_is_by_photos_and_no_device_counts_for_more_than_three_times_the_median() -> None:
    flat = np.ones((len(TEMPERATURES), len(STRENGTHS)))
    both = pooled([SurpriseTable(flat, 10), SurpriseTable(3 * flat, 30)])
    assert both is not None
    np.testing.assert_allclose(both.surprise, (10 + 90) / 40)
    assert both.photos == 40
    liar = pooled([SurpriseTable(flat, 10)] * 9 + [SurpriseTable(3 * flat, 10**6)])
    assert liar is not None
    weight = 3 * 10
    np.testing.assert_allclose(liar.surprise, (90 + 3 * weight) / (90 + weight))
    assert pooled([]) is None


@given(st.integers(0, 10_000), st.integers(1, 50))
def test_a_table_comes_back_from_its_bytes_to_half_a_step(seed: int, count: int) -> None:
    scores, labels = photos(seed, count)
    table = surprise_table(scores, labels, log_shares(np.ones(CLASSES)))
    written = table.to_bytes()
    assert len(written) == TABLE_BYTES
    again = SurpriseTable.of_bytes(written, count)
    assert again is not None
    np.testing.assert_allclose(again.surprise, table.surprise, atol=0.5 / 1024 + 1e-12)
    assert again.to_bytes() == written


def test_bytes_that_are_no_table_or_no_bins_are_none() -> None:
    assert SurpriseTable.of_bytes(bytes(TABLE_BYTES - 1), 1) is None
    assert SurpriseTable.of_bytes(bytes(TABLE_BYTES), 0) is None
    assert SurpriseTable.of_bytes(b"\xff" * TABLE_BYTES, 1) is None
    assert Bins.of_bytes(bytes(Bins.BYTES)) == Bins((0,) * 20, (0,) * 10, (0,) * 10, (0,) * 10)
    assert Bins.of_bytes(bytes(4)) is None
    counts = np.zeros(50, "<u4")
    for place, value in ((0, 1), (30, 1), (40, 2_000)):  # one right class counted; then an answer right that is none
        counts[:] = 0
        counts[place] = value
        assert Bins.of_bytes(counts.tobytes()) is None


@given(st.integers(0, 10_000), st.integers(1, 70))
def test_bins_of_fewer_photos_keep_their_shares(seed: int, photos_left: int) -> None:
    scores, labels = photos(seed, 60)
    bins = Bins.of(Calibration().log_probabilities(scores), labels)
    fewer = bins.at_most(photos_left)
    assert fewer.photos == min(photos_left, 60) == sum(fewer.answered)
    assert Bins.of_bytes(fewer.to_bytes()) == fewer
    for before, after in zip((*bins.true, *bins.answered), (*fewer.true, *fewer.answered), strict=True):
        assert abs(after - before * fewer.photos / 60) < 1


def naive_error(probabilities: np.ndarray, labels: np.ndarray) -> float:
    gaps = 0.0
    for place in range(10):
        rows = [n for n, row in enumerate(probabilities) if min(int(row.max() * 10), 9) == place]
        gaps += abs(
            sum(probabilities[n].max() for n in rows) - sum(probabilities[n].argmax() == labels[n] for n in rows)
        )
    return gaps / len(labels)


@given(st.integers(0, 10_000), st.sampled_from([0.25, 1.0, 4.0]))
def test_bins_say_the_expected_calibration_error_and_add_up(seed: int, temperature: float) -> None:
    scores, labels = photos(seed, 60)
    found = Calibration(temperature).log_probabilities(scores)
    bins = Bins.of(found, labels)
    assert bins.photos == 60
    assert bins.error == pytest.approx(naive_error(np.exp(found), labels), abs=0.011)
    assert Bins.of_bytes(bins.to_bytes()) == bins
    assert sum(Bins.of(found[:25], labels[:25]).right) + sum(Bins.of(found[25:], labels[25:]).right) == sum(bins.right)
    assert (Bins.of(found[:25], labels[:25]) + Bins.of(found[25:], labels[25:])).true == bins.true


@pytest.mark.parametrize("coverage", [0.8, 0.9, 0.95])
def test_sets_hold_the_right_class_as_often_as_stated(coverage: float) -> None:
    held, size = [], []
    for seed in range(20):
        scores, labels = photos(seed, 200)
        least = Bins.of(Calibration(2.0).log_probabilities(scores), labels).least_in_set(coverage)
        scores, labels = photos(seed + 1_000, 500)
        members = np.exp(Calibration(2.0).log_probabilities(scores)) >= least
        held.append(members[np.arange(500), labels].mean())
        size.append(members.sum(axis=1).mean())
    assert np.mean(held) >= coverage - 0.005
    assert np.mean(size) < CLASSES


def test_too_few_photos_for_a_coverage_make_the_set_of_all_classes() -> None:
    scores, labels = photos(0, 18)
    assert Bins.of(Calibration().log_probabilities(scores), labels).least_in_set(0.95) == 0.0
    assert Bins.of(Calibration().log_probabilities(scores), labels).least_in_set(0.5) > 0.0


def test_the_scale_of_a_head_follows_its_size_and_that_of_logits_is_one() -> None:
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(5, 16))
    plain = linear_answer(weight, unit=True)
    apart = [np.linalg.norm(weight[i] - weight[j]) ** 2 for i in range(5) for j in range(5) if i != j]
    assert plain.scale == pytest.approx((np.mean(apart) / 16) ** 0.5)
    assert linear_answer(10 * weight, unit=True).scale == pytest.approx(10 * plain.scale)
    assert linear_answer(weight).scale == 1.0
    present = np.array([True, True, True, True, False])
    far = weight.copy()
    far[4] = 1e6
    assert linear_answer(far, present=present, unit=True).scale == pytest.approx(
        linear_answer(weight[:4], unit=True).scale
    )
    assert nearest_answer(10 * weight, np.ones(5, bool)).scale == pytest.approx(
        100 * nearest_answer(weight, np.ones(5, bool)).scale
    )
    assert linear_answer(np.zeros((3, 4)), unit=True).scale == 1.0


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e6])
@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_any_temperature_that_may_be_announced_gives_probabilities(temperature: float, strength: float) -> None:
    scores, labels = photos(11, 30)
    found = Calibration(temperature, strength).log_probabilities(scores, log_shares(np.array([9, 0, 1, 0])))
    np.testing.assert_allclose(np.exp(found).sum(axis=1), 1.0)
    assert Bins.of(found, labels).photos == 30
    if temperature < 1:
        np.testing.assert_array_equal(found.argmax(axis=1), scores.argmax(axis=1))


def test_a_device_that_counts_for_fewer_photos_loses_no_right_answers_by_rounding() -> None:
    answered, right = (0,) * 5 + (30, 30, 30, 30, 180), (0,) * 5 + (16, 20, 22, 26, 171)
    expected = tuple(1_000 * count for count in right)
    bins = Bins((0,) * 10 + (300,) + (0,) * 9, answered, right, expected)
    fewer = bins.at_most(30)
    assert fewer.answered == (0,) * 5 + (3, 3, 3, 3, 18)
    assert fewer.right == (0,) * 5 + (2, 2, 2, 3, 17)
    assert bins.at_most(299).right[-1] in (170, 171)


def test_what_saves_as_much_as_asked_for_and_no_more_changes_nothing() -> None:
    surprise = np.ones((len(TEMPERATURES), len(STRENGTHS)))
    surprise[3, 0], surprise[5, 0] = 0.5, 0.25
    before = Calibration(TEMPERATURES[3])
    assert chosen(SurpriseTable(surprise, 1_000), before, 0.25) == before


def test_a_table_ends_at_twenty_nats() -> None:
    most = np.full(TABLE_BYTES // 2, 20 * 1_024, "<u2")
    assert SurpriseTable.of_bytes(most.tobytes(), 1) is not None
    assert SurpriseTable.of_bytes((most + np.uint16(1)).tobytes(), 1) is None


def test_bins_and_sets_of_a_few_photos_by_hand() -> None:
    """Log-odds of 0.3 are −0.85, those of 0.9 are 2.20: below 0 and below 3."""
    right = np.array([0.3] + [0.9] * 18)
    found, labels = np.log(np.stack([right, 1.0 - right], axis=1)), np.zeros(19, int)
    bins = Bins.of(found, labels)
    assert [(place, count) for place, count in enumerate(bins.true) if count] == [(9, 1), (12, 18)]
    assert bins.least_in_set(0.9) == pytest.approx(1 / (1 + math.exp(-2)))  # two of twenty may be left out, less one
    assert bins.least_in_set(0.95) == pytest.approx(1 / (1 + math.exp(1)))  # none, and none is below −1
    assert bins.least_in_set(0.96) == 0.0
    assert Bins.of(found[1:10], labels[1:10]).least_in_set(0.9) == pytest.approx(1 / (1 + math.exp(-2)))

"""The Gaussian mechanism: its noise measured, and the bounds that others hold what comes out of it to."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protofleet.contract.methods import METHODS, method
from protofleet.contract.methods.fedhkd import HyperKnowledge
from protofleet.contract.privacy.mechanism import Release, RowNoise
from protofleet.contract.sums.plausibility import improbable
from protofleet.contract.sums.statistics import Rows, Statistic

C, D = 48, 200
CLIP, NOISE = 2.5, 0.7


def _knowledge(seed: int = 0) -> HyperKnowledge:
    """Class j has j + 1 samples; the last class none."""
    rng = np.random.default_rng(seed)
    counts = np.append(np.arange(1, C), 0)
    return HyperKnowledge.from_means(rng.normal(size=(C, D)), rng.random((C, C)), counts)


def _noise(mechanism: RowNoise, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """What was added to features and soft predictions, in units of their sensitivity: should be N(0, σ²)."""
    before = _knowledge()
    after = mechanism.released(before, np.random.default_rng(seed))
    np.testing.assert_array_equal(after.counts, before.counts)
    counts = np.maximum(before.counts, 1)[:, None]
    features = (after.means - before.means) * counts / (2 * mechanism.clip)
    return features, (after.soft_means - before.soft_means) * counts / math.sqrt(2)


@dataclass(frozen=True, eq=False)
class _Sums(Statistic):
    """Sums of features that travel as sums."""

    NAME: ClassVar[str] = "sums"
    FIELDS: ClassVar = (Rows("sums", travels="sums"),)
    sums: np.ndarray
    counts: np.ndarray


def test_epsilon_is_stated_for_one_sample_more_or_fewer_and_else_for_one_replaced() -> None:
    assert [Release(*each).multiplier for each in ((2.0, 1.0), (None, 3.0), (None, None))] == [2.0, 3.0, 0.0]


def test_the_least_noise_is_noise_and_none_is_none() -> None:
    assert RowNoise.of({"noise": 1e-9}) == RowNoise(1.0, 1e-9, True)
    assert RowNoise.of({"noise": 0.0}) is None


def test_sums_get_the_noise_of_a_sum() -> None:
    """One sample moves a sum by 2ζ at most, however many there are beside it."""
    before = _knowledge()
    after = RowNoise(CLIP, NOISE, True).released(_Sums(before.sums, before.counts), np.random.default_rng(1))
    noise = (after.sums - before.sums) / (2 * CLIP)
    assert not noise[-1].any()  # nobody holds the last class
    assert noise[:3].std() == pytest.approx(NOISE, rel=0.1)
    assert noise[-4:-1].std() == pytest.approx(NOISE, rel=0.1)


@given(seed=st.integers(0, 10_000), clip=st.floats(1e-3, 1e3))
@settings(max_examples=40, deadline=None)
def test_features_are_shortened_to_the_clip_and_no_further(seed: int, clip: float) -> None:
    z = np.random.default_rng(seed).normal(size=(9, 5)).astype(np.float32) * np.logspace(-4, 4, 9)[:, None]
    z[4] = 0.0
    clipped = RowNoise(clip, NOISE, True).clipped(z)
    for one, kept in zip(z.astype(np.float64), clipped, strict=True):
        norm = math.sqrt(sum(v * v for v in one))
        wanted = one if norm <= clip else one * (clip / norm)
        np.testing.assert_allclose(kept, wanted, rtol=1e-9)
        assert np.linalg.norm(kept) <= clip * (1 + 1e-12)


def test_the_noise_is_normal_of_the_stated_scale() -> None:
    """9400 and 2256 numbers: their deviation is known to a percent or two, and every count has its own scale."""
    features, soft = _noise(RowNoise(CLIP, NOISE, True))
    assert not features[-1].any()  # nobody holds the last class
    assert not soft[-1].any()
    for held, tolerance in ((features[:-1], 0.03), (soft[:-1], 0.06)):
        assert held.std() == pytest.approx(NOISE, rel=tolerance)
        assert abs(held.mean()) < 4 * NOISE / math.sqrt(held.size)
        assert (np.abs(held) < NOISE).mean() == pytest.approx(0.6827, abs=0.04)
    few, many = features[: C // 4].std(), features[-C // 4 : -1].std()
    assert few == pytest.approx(many, rel=0.1)


def test_the_noise_follows_sigma() -> None:
    half, whole = (_noise(RowNoise(CLIP, noise, True))[0] for noise in (NOISE / 2, NOISE))
    np.testing.assert_allclose(2 * half, whole, rtol=1e-6, atol=1e-9)


def test_the_noise_is_fresh_for_each_class_and_draw_and_the_same_for_the_same_generator() -> None:
    mechanism = RowNoise(CLIP, NOISE, True)
    features, soft = _noise(mechanism)
    again = _noise(mechanism)
    np.testing.assert_array_equal(features, again[0])
    np.testing.assert_array_equal(soft, again[1])
    rows = features[:-1]
    correlation = np.corrcoef(rows) - np.eye(C - 1)
    assert np.abs(correlation).max() < 0.4  # 200 numbers each: 0.07 for independent rows
    others = [_noise(mechanism, seed) for seed in (2, 3, 4)]
    for one, other in itertools.combinations([(features, soft), *others], 2):
        for a, b in zip(one, other, strict=True):
            assert abs(np.corrcoef(a[:-1].ravel(), b[:-1].ravel())[0, 1]) < 0.1


def test_as_published_soft_predictions_stay_as_they_are() -> None:
    hyper = method("fedhkd").resolve({"noise": NOISE, "clip": CLIP, "noise_on": "features"})
    mechanism = method("fedhkd").mechanism(hyper)
    assert mechanism == RowNoise(CLIP, NOISE, False)
    features, soft = _noise(mechanism)
    assert features[:-1].std() == pytest.approx(NOISE, rel=0.03)
    np.testing.assert_allclose(soft, 0.0, atol=1e-12)
    counts = np.array([3, 0, 4])
    told, both = mechanism.release(counts), RowNoise(CLIP, NOISE, True).release(counts)
    assert (told.covers_all, told.bare, both.covers_all) == (False, ("soft predictions",), True)
    assert (told.multiplier, both.multiplier) == pytest.approx((NOISE / 5, NOISE / 5 / math.sqrt(2)))
    assert told.add_remove is both.add_remove is None  # counts are public: only a replaced sample is hidden


@pytest.mark.parametrize("name", [name for name, found in METHODS.items() if found.statistic.COUNTED])
def test_a_method_without_noise_has_no_mechanism(name: str) -> None:
    assert method(name).mechanism(method(name).resolve({})) is None
    assert RowNoise.of(method(name).resolve({})) is None


@given(seed=st.integers(0, 10_000), noise=st.floats(1e-3, 10.0), clip=st.floats(1e-2, 1e2))
@settings(max_examples=30, deadline=None)
def test_what_comes_out_is_within_what_others_are_told_to_expect(seed: int, noise: float, clip: float) -> None:
    """Means of clipped features, and soft predictions, noised: no device of a bundle that declares it is refused."""
    mechanism, rng = RowNoise(clip, noise, True), np.random.default_rng(seed)
    held = np.arange(C) < C - 1
    means = mechanism.clipped(rng.normal(size=(C, D)) * clip) * held[:, None]
    soft = rng.dirichlet(np.ones(C), C) * held[:, None]
    sent = mechanism.released(HyperKnowledge.from_means(means, soft, np.append(np.arange(1, C), 0)), rng)
    counts = sent.counts[held]
    norms = np.linalg.norm(sent.means[held], axis=1)
    assert (norms <= mechanism.largest_norm(counts, D)).all()
    assert (np.linalg.norm((sent.means - means)[held], axis=1) <= mechanism.on_mean(counts, D)).all()
    assert not improbable(sent.soft_means[held], mechanism.soft_slack(counts)).any()
    assert not RowNoise(clip, noise, False).soft_slack(counts).any()


def test_the_bounds_are_the_clip_and_ten_deviations() -> None:
    mechanism, counts = RowNoise(3.0, 0.5, True), np.array([1, 6])
    np.testing.assert_allclose(mechanism.on_mean(counts, 16), [3.0 * 14, 3.0 * 14 / 6])
    np.testing.assert_allclose(mechanism.largest_norm(counts, 16), [45.0, 10.0])
    np.testing.assert_allclose(mechanism.soft_slack(counts), [10 * math.sqrt(2) / 2, 10 * math.sqrt(2) / 12])

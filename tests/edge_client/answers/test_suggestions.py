"""Which photos are suggested: properties of the choice, and what it is worth beside random choice on real photos."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protofleet.contract.heads.sphere import unit_rows
from protofleet.edge_client.answers.suggestions import groups_of, suggested, uncertainty_of

D = 16


def photos(seed: int, kinds: int, each: int, spread: float = 0.05) -> tuple[np.ndarray, np.ndarray]:
    """Unit features of `each` photos of each kind, and their kinds."""
    rng = np.random.default_rng(seed)
    kind = np.repeat(np.arange(kinds), each)
    middles = rng.normal(size=(kinds, D))
    features = unit_rows(middles[kind] + spread * rng.normal(size=(len(kind), D)) * np.sqrt(D))
    return np.asarray(features, np.float32), kind


NONE = np.empty((0, D), np.float32)


@settings(max_examples=50)
@given(
    seed=st.integers(0, 1_000),
    kinds=st.integers(1, 6),
    each=st.integers(1, 12),
    count=st.integers(0, 40),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    named=st.integers(0, 8),
)
def test_each_photo_is_suggested_once_as_many_as_asked_for_and_the_same_again(
    seed: int, kinds: int, each: int, count: int, share: float, named: int
) -> None:
    features, _ = photos(seed, kinds, each)
    labelled = photos(seed + 1, 1, named)[0] if named else NONE
    unsure = np.random.default_rng(seed).random(len(features))
    found = suggested(features, unsure, labelled, count, seed=seed, random_share=share)
    rows = [one.row for one in found]
    assert len(rows) == len(set(rows)) == min(count, len(features))
    assert sum(one.why == "random" for one in found) == min(round(share * min(count, len(features))), len(rows))
    assert all(0 <= one.row < len(features) and one.alike >= 1 for one in found)
    assert all(one.uncertainty == unsure[one.row] for one in found)
    assert found == suggested(features, unsure, labelled, count, seed=seed, random_share=share)


def test_a_kind_without_a_name_comes_before_kinds_with_one() -> None:
    features, kind = photos(3, 4, 10)
    named = features[kind < 3][::10]  # one of each of three kinds
    (first, *_) = suggested(features, np.ones(len(features)), named, 4, random_share=0.0)
    assert (kind[first.row], first.why) == (3, "new")


def test_copies_are_asked_about_once_before_other_kinds_were() -> None:
    features, _ = photos(5, 6, 1)
    copies = np.concatenate([np.repeat(features[:1], 50, axis=0), features[1:]])
    found = suggested(copies, np.ones(len(copies)), NONE, 6, random_share=0.0)
    assert sorted(0 if one.row < 50 else one.row - 49 for one in found) == [0, 1, 2, 3, 4, 5]
    assert (found[0].alike, found[0].row < 50) == (50, True)  # what there is most of comes first


def test_what_the_head_is_unsure_of_comes_first() -> None:
    features, kind = photos(7, 2, 10)
    for first in (0, 1):
        unsure = np.where(kind == first, 0.9, 0.1)
        found = suggested(features, unsure, NONE, 2, random_share=0.0)
        assert [int(kind[one.row]) for one in found] == [first, 1 - first]


def test_of_a_group_the_photo_in_its_middle_is_suggested_and_its_others_are_no_news() -> None:
    features, _ = photos(11, 1, 12)
    found = suggested(features, np.ones(12), NONE, 1, random_share=0.0)
    assert [one.row for one in found] == [int((features @ features.mean(axis=0)).argmax())]
    copies = suggested(np.repeat(features[:1], 4, axis=0), np.ones(4), NONE, 3, random_share=0.0)
    assert [one.why for one in copies] == ["new", "unsure", "unsure"]


def test_uncertainty_is_the_entropy_by_hand() -> None:
    assert uncertainty_of(np.array([[0.0, 0.0, 0.0, 0.0]]), 1.0) == pytest.approx([1.0])
    of_three = np.array([[0.0, 0.0, 0.0, -np.inf]])  # one is never answered
    assert uncertainty_of(of_three, 1.0) == pytest.approx([1.0])
    p = math.exp(4.0) / (1.0 + math.exp(4.0))  # a difference of four, in units of 2, at the temperature ½
    expected = -(p * math.log(p) + (1.0 - p) * math.log(1.0 - p)) / math.log(2.0)
    assert uncertainty_of(np.array([[4.0, 0.0]]), 2.0) == pytest.approx([expected])
    calibrated = np.array([[p, 1.0 - p]])
    assert uncertainty_of(np.array([[9.0, 0.0]]), 1.0, calibrated) == pytest.approx([expected])


def test_groups_are_those_of_lloyds_algorithm() -> None:
    features, _ = photos(9, 5, 20)
    group, middles = groups_of(features, 5, np.random.default_rng(0))
    for row, photo in enumerate(features):
        apart = [((photo - middle) ** 2).sum() for middle in middles]
        assert apart[group[row]] == pytest.approx(min(apart), abs=1e-6)
    for number in np.unique(group):
        np.testing.assert_allclose(middles[number], features[group == number].mean(axis=0), atol=1e-5)


def test_each_photo_is_in_the_group_of_the_nearest_middle_where_middles_are_not_alike_long() -> None:
    features, _ = photos(13, 5, 20, spread=0.5)
    features[:20] = features[0]  # a middle on the sphere, beside others well within it
    group, middles = groups_of(features, 5, np.random.default_rng(0))
    assert np.ptp(np.linalg.norm(middles, axis=1)) > 0.2
    for row, photo in enumerate(features):
        apart = ((photo - middles) ** 2).sum(axis=1)
        assert apart[group[row]] == pytest.approx(apart.min(), abs=1e-6)


def test_more_groups_than_different_photos_are_as_many_as_these() -> None:
    features = np.repeat(photos(1, 3, 1)[0], 4, axis=0)
    group, middles = groups_of(features, 8, np.random.default_rng(0))
    assert len(middles) == 3
    assert len(set(group.tolist())) == 3

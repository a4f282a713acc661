"""Novelty against naive loops, and what it says of features that belong to nothing known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from protofleet.contract.heads.answers import linear_answer
from protofleet.edge_client.device.answer_choice import Answering
from protofleet.edge_client.device.unknown import (
    USUAL_THRESHOLD,
    CentreNovelty,
    LargestScoreNovelty,
    ScoreNovelty,
    novelty_of,
)


@pytest.mark.parametrize("unit", [False, True])
def test_distance_to_the_nearest_centre_in_units_of_its_spread(unit: bool) -> None:
    rng = np.random.default_rng(3)
    z, centres, spread = rng.normal(size=(7, 4)).astype(np.float32), rng.normal(size=(3, 4)), rng.uniform(0.5, 2, 3)
    found = CentreNovelty(centres, spread, unit).of(z)
    for f, value in zip(z.astype(np.float64), found, strict=True):
        f = f / math.sqrt(f @ f) if unit else f
        assert value == pytest.approx(min((f - c) @ (f - c) / s for c, s in zip(centres, spread, strict=True)))


def test_a_member_of_a_class_has_1_on_average_and_a_stranger_more() -> None:
    """1 − ‖μ‖² of a mean of unit features is their mean squared distance from it, whatever their distribution."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(500, 32)) + 6 * np.eye(32)[0]
    unit = z / np.linalg.norm(z, axis=1, keepdims=True)
    mean = unit.mean(axis=0)
    novelty = CentreNovelty(mean[None], np.array([1 - mean @ mean]), unit=True)
    assert novelty.of(z.astype(np.float32)).mean() == pytest.approx(1.0, rel=1e-5)
    assert (novelty.of(rng.normal(size=(50, 32)).astype(np.float32)) > novelty.threshold).all()
    assert novelty.threshold == USUAL_THRESHOLD


def test_without_centres_it_is_one_minus_the_largest_probability() -> None:
    novelty = ScoreNovelty(linear_answer(np.eye(3)))
    found = novelty.of(np.array([[0.0, 0.0, 0.0], [9.0, 0.0, 0.0]], np.float32))
    assert found == pytest.approx([2 / 3, 1 - math.exp(9) / (math.exp(9) + 2)])
    assert novelty.threshold is None


@pytest.mark.parametrize("limit", [None, -0.5])
def test_a_head_without_centres_has_the_largest_score_with_a_limit_or_without(limit: float | None) -> None:
    answer = linear_answer(np.eye(3), unit=True)
    found = novelty_of(Answering(answer, "bundle"), None, None, None, limit)  # type: ignore[arg-type]
    assert isinstance(found, LargestScoreNovelty)
    assert (found.answer, found.threshold) == (answer, limit)

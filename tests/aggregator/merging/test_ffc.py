"""FFC's closed form against pooled least squares on the raw features, over the wire's encodings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pooled_head import solve_head

from protofleet.contract.errors import StatisticError
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import method
from protofleet.contract.sums.merge_rules import merge
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Contribution


def _features(samples: int, width: int, classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Unit features as a ReLU backbone gives them: non-negative, clustered by class. (N, D), (N,)"""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, samples)
    centres = rng.normal(size=(classes, width))
    return unit_rows(np.maximum(centres[y] + rng.normal(size=(samples, width)), 0)).astype(np.float32), y


def _pooled(z: np.ndarray, y: np.ndarray, classes: int, ridge: float) -> np.ndarray:
    """Ridge regression by least squares on the features themselves: rows [Z; sqrt(λ) I], never a Gram matrix."""
    z = z.astype(np.float64)
    width = z.shape[1]
    penalty = np.sqrt(ridge * (z**2).sum() / width) * np.eye(width)
    targets = np.concatenate([np.eye(classes)[y], np.zeros((width, classes))])
    return np.linalg.lstsq(np.concatenate([z, penalty]), targets, rcond=None)[0].T


def _over_the_wire(part: FeatureGram, encoding: str) -> FeatureGram:
    message = Contribution.of(part, run=b"runx", round=1, method="ffc", bundle=bytes(32))
    return decode(encode(message, encoding)).statistic(FeatureGram, part.classes, part.width)


def _relative(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


@pytest.mark.parametrize(("width", "samples"), [(16, 200), (128, 900), (1280, 3000)])
def test_five_devices_equal_the_pooled_data_over_the_wire(width: int, samples: int) -> None:
    z, y = _features(samples, width, 10)
    parts = [_over_the_wire(FeatureGram.of(z[i::5], y[i::5], 10), "f64") for i in range(5)]
    head, pooled = solve_head(merge(lambda: parts), 1e-6), _pooled(z, y, 10, 1e-6)
    assert _relative(head, pooled) <= 1e-6
    np.testing.assert_array_equal((z @ head.T).argmax(1), (z @ pooled.T).argmax(1))


def test_single_precision_on_the_wire_stays_close() -> None:
    z, y = _features(2000, 64, 10)
    parts = [_over_the_wire(FeatureGram.of(z[i::5], y[i::5], 10), "f32") for i in range(5)]
    assert _relative(solve_head(merge(lambda: parts), 1e-6), _pooled(z, y, 10, 1e-6)) <= 1e-4


@given(st.integers(0, 10_000), st.integers(2, 12), st.integers(1, 40), st.sampled_from([0.0, 1e-6, 1e-2, 1.0]))
@settings(max_examples=60, deadline=None)
def test_any_shape_equals_pooled_least_squares(seed: int, width: int, samples: int, ridge: float) -> None:
    rng = np.random.default_rng(seed)
    z, y = rng.normal(size=(samples, width)), rng.integers(0, 3, samples)
    z[:, 0] = 0.0  # a dead feature: singular without a ridge
    head, pooled = solve_head(FeatureGram.of(z, y, 3), ridge), _pooled(z, y, 3, ridge)
    np.testing.assert_allclose(z @ head.T, z @ pooled.T, atol=1e-5)


def test_fewer_samples_than_features_takes_the_head_of_least_norm() -> None:
    rng = np.random.default_rng(3)
    z, y = rng.normal(size=(10, 30)), rng.integers(0, 2, 10)
    head = solve_head(FeatureGram.of(z, y, 2), 0.0)
    np.testing.assert_allclose(head, np.linalg.lstsq(z, np.eye(2)[y], rcond=None)[0].T, atol=1e-9)


def test_a_class_without_examples_has_a_zero_row() -> None:
    z, y = _features(100, 8, 3)
    head = solve_head(FeatureGram.of(z[y != 1], y[y != 1], 3), 1e-6)
    assert not head[1].any()
    assert head[0].any()


@pytest.mark.parametrize("ridge", [-1.0, float("nan"), float("inf")])
def test_a_bad_ridge_is_refused(ridge: float) -> None:
    with pytest.raises(StatisticError, match="expected 0 or more"):
        solve_head(FeatureGram.zero(2, 3), ridge)


def test_each_ridge_has_its_own_head_though_heads_are_kept() -> None:
    gram, found = FeatureGram.of(*_features(60, 6, 3), 3), method("ffc")
    for ridge in (1.0, "auto", 0.1, 1.0):
        expected = solve_head(gram, ridge)
        np.testing.assert_array_equal(found.next_rows({}, gram, found.resolve({"ridge": ridge}))["head"].rows, expected)


def test_no_data_gives_a_zero_head() -> None:
    assert not solve_head(FeatureGram.zero(2, 3), 1e-6).any()

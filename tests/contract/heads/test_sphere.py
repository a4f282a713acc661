"""The class frame's geometry: orthonormal rows, exact simplices, and spread beyond them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protofleet.contract.errors import MethodError
from protofleet.contract.heads.sphere import orthonormal_frame, simplex, uniform_loss, uniform_prototypes, unit_rows


def off_diagonal(points):
    cosines = points @ points.T
    return cosines[~np.eye(len(points), dtype=bool)]


@given(width=st.integers(1, 40), share=st.floats(0, 1), seed=st.integers(0, 2**32 - 1))
def test_a_frame_has_orthonormal_rows_and_is_its_seeds_alone(width, share, seed):
    classes = max(1, round(share * width))
    frame = orthonormal_frame(classes, width, seed)
    assert frame.shape == (classes, width)
    np.testing.assert_allclose(frame @ frame.T, np.eye(classes), atol=1e-12)
    np.testing.assert_array_equal(frame, orthonormal_frame(classes, width, seed))


def test_frames_of_two_seeds_differ_and_no_sign_is_preferred():
    firsts = np.array([orthonormal_frame(2, 4, seed)[:, 0] for seed in range(200)])
    assert 60 < (firsts > 0).sum(axis=0).min() <= (firsts > 0).sum(axis=0).max() < 140  # 200 fair coins


@given(classes=st.integers(2, 30), extra=st.integers(0, 10), seed=st.integers(0, 1000))
def test_every_pair_of_a_simplex_has_cosine_minus_one_over_c_minus_one(classes, extra, seed):
    points = simplex(classes, classes - 1 + extra, seed)
    np.testing.assert_allclose(np.linalg.norm(points, axis=1), 1.0, atol=1e-12)
    np.testing.assert_allclose(off_diagonal(points), -1.0 / (classes - 1), atol=1e-12)
    assert uniform_loss(points) == pytest.approx(-1.0 / (classes - 1), abs=1e-12)


@given(classes=st.integers(2, 12))
def test_uniform_prototypes_are_that_simplex_where_it_exists(classes):
    np.testing.assert_array_equal(uniform_prototypes(classes, classes - 1, 3), simplex(classes, classes - 1, 3))


KNOWN = [  # the cross-polytope's right angles, the pentagon's 72 degrees, the icosahedron's 63.4
    (6, 3, 0.0),
    (20, 10, 0.0),
    (5, 2, np.cos(2 * np.pi / 5)),
    (12, 3, 1 / np.sqrt(5)),
]


@pytest.mark.parametrize(("classes", "width", "optimum"), KNOWN)
def test_beyond_the_simplex_they_come_near_the_known_optimum(classes, width, optimum):
    points = uniform_prototypes(classes, width, seed=1)
    np.testing.assert_allclose(np.linalg.norm(points, axis=1), 1.0, atol=1e-9)
    assert uniform_loss(points) == pytest.approx(optimum, abs=0.005)
    assert uniform_loss(points) < uniform_loss(unit_rows(np.random.default_rng(1).standard_normal((classes, width))))


@settings(max_examples=20, deadline=None)
@given(classes=st.integers(2, 8), width=st.integers(2, 5))
def test_the_uniform_loss_is_the_papers_mean_of_each_rows_largest_cosine(classes, width):
    points = unit_rows(np.random.default_rng(classes * 10 + width).standard_normal((classes, width)))
    largest = [max(points[i] @ points[j] for j in range(classes) if j != i) for i in range(classes)]
    assert uniform_loss(points) == pytest.approx(np.mean(largest))


def test_unit_rows_keep_their_dtype_and_leave_zero_rows_zero():
    rows = unit_rows(np.array([[3.0, 4.0], [0.0, 0.0]], np.float32))
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, [[0.6, 0.8], [0.0, 0.0]], rtol=1e-6)


@pytest.mark.parametrize(
    "make",
    [lambda: orthonormal_frame(4, 3), lambda: orthonormal_frame(0, 3), lambda: simplex(5, 3), lambda: simplex(1, 3)],
)
def test_what_geometry_forbids_is_refused_with_what_it_allows(make):
    with pytest.raises(MethodError, match="expected"):
        make()

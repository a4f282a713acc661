"""The ways of answering, against naive loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protofleet.contract.heads.answers import linear_answer, linear_logits, nearest_answer, softmax

N, C, D = 9, 5, 3
cases = given(seed=st.integers(0, 10_000))
few = settings(max_examples=50, deadline=None)


@cases
@few
def test_logits_are_w_z_plus_b_in_float64(seed: int) -> None:
    rng = np.random.default_rng(seed)
    z, w, b = (rng.normal(size=shape).astype(np.float32) for shape in ((N, D), (C, D), (C,)))
    for bias in (None, b):
        wanted = [[sum(float(p) * float(q) for p, q in zip(f, row, strict=True)) for row in w] for f in z]
        found = linear_logits(z, w, bias)
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, np.array(wanted) + (0.0 if bias is None else b), rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(linear_answer(w, bias)(z), found.argmax(axis=1))


@cases
@few
def test_a_softmax_sums_to_one_and_large_logits_do_not_overflow(seed: int) -> None:
    logits = np.random.default_rng(seed).normal(size=(N, C))
    for row, given_logits in zip(softmax(logits), logits, strict=True):
        total = sum(math.exp(v) for v in given_logits)
        np.testing.assert_allclose(row, [math.exp(v) / total for v in given_logits], rtol=1e-12)
    np.testing.assert_allclose(softmax(logits + 5e4), softmax(logits), rtol=1e-6)
    assert softmax(np.array([[1e6, 0.0, -1e6]])).tolist() == [[1.0, 0.0, 0.0]]


@cases
@few
def test_features_are_made_ready_before_the_head_sees_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    z, w = rng.normal(size=(N, D)).astype(np.float32), rng.normal(size=(C, 2))
    turn = rng.normal(size=(D, 2))
    answer = linear_answer(w, project=turn)
    assert answer(z).tolist() == [int(np.argmax(w @ (turn.T @ f))) for f in z]


@cases
@few
def test_the_nearest_prototype_is_the_nearest_of_those_that_are_there(seed: int) -> None:
    rng = np.random.default_rng(seed)
    z, prototypes = rng.normal(size=(N, D)).astype(np.float32), rng.normal(size=(C, D))
    present = rng.random(C) < 0.5
    present[rng.integers(C)] = True
    prototypes[~present] = z[0]  # what is absent is not looked at, however near it is
    wanted = [min(np.flatnonzero(present), key=lambda j: math.dist(f, prototypes[j])) for f in z]
    found = nearest_answer(prototypes, present)(z)
    assert found.dtype == np.int64
    assert found.tolist() == wanted


@pytest.mark.parametrize("answer", [linear_answer(np.eye(C, D)), nearest_answer(np.eye(C, D), np.ones(C, bool))])
def test_no_features_get_no_answers(answer) -> None:
    assert answer(np.zeros((0, D), np.float32)).shape == (0,)


@cases
@few
def test_the_highest_score_is_the_answer_and_what_is_absent_has_none(seed: int) -> None:
    rng = np.random.default_rng(seed)
    z, w, bias, present = rng.normal(size=(N, D)), rng.normal(size=(C, D)), rng.normal(size=C), rng.random(C) < 0.7
    present[rng.integers(C)] = True
    answer = linear_answer(w, bias, present=present, unit=True)
    scores = answer.scores(z)
    for f, row, found in zip(z, scores, answer(z), strict=True):
        unit = f / math.sqrt(sum(v * v for v in f))
        wanted = [sum(a * b for a, b in zip(w[j], unit, strict=True)) + bias[j] for j in range(C)]
        assert [math.isfinite(v) for v in row] == present.tolist()
        np.testing.assert_allclose(row[present], np.array(wanted)[present], rtol=1e-9, atol=1e-12)
        assert found == max(np.flatnonzero(present), key=lambda j: wanted[j])

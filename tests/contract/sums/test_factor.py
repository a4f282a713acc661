"""A factor in place of a triangle: exact integers, sums of one data set, and nothing of single samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protofleet.aggregator.ingest.validation import check_sums
from protofleet.contract.errors import WireError
from protofleet.contract.heads.ridge import solve
from protofleet.contract.sums.factor import MAX_BITS, Factor, most_rows
from protofleet.contract.sums.fixed_point import FixedPoint
from protofleet.contract.sums.statistics import FactoredGram, FeatureGram
from protofleet.contract.sums.triangle import unpack_triangle


def unit(seed: int, samples: int, width: int, shift: float = 0.5) -> np.ndarray:
    """Features as a network with ReLUs has them: unequal columns, many zeros, length 1."""
    rng = np.random.default_rng(seed)
    z = np.maximum(rng.normal(shift, 1, (samples, width)) * rng.gamma(0.5, 1, width), 0)
    z[:, 0] += 1e-3
    return z / np.linalg.norm(z, axis=1, keepdims=True)


def factored(z: np.ndarray, labels: np.ndarray, classes: int, seed: int = 1) -> FactoredGram:
    statistic = FactoredGram.of(z, labels, classes, np.random.default_rng(seed))
    assert statistic is not None
    return statistic


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    width=st.integers(9, 40),
    bits=st.integers(0, MAX_BITS),
    seed=st.integers(0, 2**32 - 1),
    extreme=st.booleans(),
)
def test_the_triangle_is_the_integers_that_python_counts(rows, width, bits, seed, extreme) -> None:
    rng = np.random.default_rng(seed)
    whole = rng.choice([-32768, 32767], (rows, width)) if extreme else rng.integers(-32768, 32768, (rows, width))
    triangle = Factor(whole.astype(np.int16), bits).triangle()
    columns = [list(map(int, column)) for column in whole.T]
    counted = [
        sum(a * b for a, b in zip(columns[i], columns[j], strict=True)) for i in range(width) for j in range(i, width)
    ]
    assert [int(number * 4**bits) for number in triangle] == counted
    assert (triangle * 4.0**bits == np.rint(triangle * 4.0**bits)).all()
    if np.abs(triangle).max() < 2**24:  # what exact sums take: nothing is rounded there
        assert FixedPoint.of(triangle).integers() == [number << (40 - 2 * bits) for number in counted]


@settings(max_examples=60, deadline=None)
@given(samples=st.integers(1, 60), width=st.integers(60, 90), classes=st.integers(1, 12), seed=st.integers(0, 10**6))
def test_rounded_sums_are_those_of_some_samples_and_near_to_the_true_ones(samples, width, classes, seed) -> None:
    z = unit(seed, samples, width)
    labels = np.random.default_rng(seed).integers(0, classes, samples)
    sent, true = factored(z, labels, classes), FeatureGram.of(z, labels, classes)
    check_sums(sent.whole, "f64", sent.products.slack(samples))  # no eigenvalue below 0: no allowance for the rounding
    step = 2.0**-sent.products.bits
    assert np.abs(sent.whole.gram - true.gram).max() <= step * np.sqrt(samples) * 6
    assert np.abs(sent.cross - true.cross).max() <= step * np.sqrt(true.counts.max()) * 6
    assert (sent.counts == true.counts).all()


@pytest.mark.parametrize("samples", [5, 40, 300])
@pytest.mark.parametrize("ridge", ["auto", 0.01, 0.3])
def test_the_head_is_that_of_the_triangle(samples: int, ridge) -> None:
    z, labels = unit(3, samples, 320), np.arange(samples) % 5
    sent, true = factored(z, labels, 5), FeatureGram.of(z, labels, 5)
    asked = unit(4, 2_000, 320)
    heads = [solve(s.matrix, s.cross, s.counts, ridge) for s in (sent.whole, true)]
    assert heads[0].ridge == heads[1].ridge
    scores = [asked @ head.weights.T for head in heads]
    differ = scores[0].argmax(axis=1) != scores[1].argmax(axis=1)
    best = np.sort(scores[1], axis=1)
    assert (best[differ, -1] - best[differ, -2] < 1e-2).all()  # only where two classes are nearly equal
    assert differ.mean() < 0.01


def test_no_row_is_a_sample_not_even_of_samples_that_are_orthogonal() -> None:
    z = np.eye(40, 64)
    rows = factored(z, np.zeros(40, int), 1).products.values
    assert np.abs(rows @ z.T / np.linalg.norm(rows, axis=1, keepdims=True)).max() < 0.9


def test_what_is_sent_has_one_distribution_for_all_samples_of_one_sum() -> None:
    """Moments over many rotations: of orthogonal samples, and of the same turned, whose Σ z zᵀ is the same."""
    z = np.array([[1.0, 0, 0, 0], [0, 1.0, 0, 0]])
    turned = np.array([[0.6, 0.8], [-0.8, 0.6]]) @ z
    both = []
    for samples in (z, turned):
        made = [Factor.of(samples, np.random.default_rng(seed)) for seed in range(4_000)]
        first = np.array([factor[0].values[0, :2] for factor in made if factor is not None])
        both.append([first.mean(axis=0), (first**2).mean(axis=0), (first**4).mean(axis=0)])
    assert np.abs(np.array(both[0]) - np.array(both[1])).max() < 0.05
    assert np.abs(both[0][0]).max() < 0.05  # as likely one way as the other
    assert both[0][1] == pytest.approx([0.5, 0.5], abs=0.05)


def test_copies_have_no_rows_of_their_own() -> None:
    z = unit(0, 6, 30)
    copied = factored(np.repeat(z, 5, axis=0), np.repeat(np.arange(6), 5), 6)
    assert len(copied.products.rows) == 6
    check_sums(copied.whole, "f64", copied.products.slack(30))
    true = FeatureGram.of(np.repeat(z, 5, axis=0), np.repeat(np.arange(6), 5), 6)
    assert copied.whole.matrix == pytest.approx(unpack_triangle(true.gram, 30), abs=2e-3)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others() -> None:
    z = unit(0, 6, 30)
    first, again, other = (factored(z, np.zeros(6, int), 1, seed).products.rows for seed in (1, 1, 2))
    assert first.tobytes() == again.tobytes()
    assert first.tobytes() != other.tobytes()


def test_samples_of_length_0_have_no_rows_and_sum_to_0() -> None:
    nothing = factored(np.zeros((3, 8)), np.zeros(3, int), 2)
    assert nothing.products.rows.shape == (0, 8)
    assert not nothing.whole.gram.any()
    assert not nothing.cross.any()


def test_what_int16_is_too_coarse_for_has_no_factor() -> None:
    assert Factor.of(np.full((2, 3), 1e6), np.random.default_rng(0)) is None


def test_a_coarse_factor_is_not_fine() -> None:
    rows = np.ones((10, 40), np.int16)
    assert Factor(rows, 14).is_fine(10)
    assert not Factor(rows, 6).is_fine(10)


def test_lengthened_rows_break_the_trace() -> None:
    sent = factored(unit(0, 20, 64), np.zeros(20, int), 1)
    longer = Factor(np.rint(sent.products.rows * 1.01).astype(np.int16), sent.products.bits)
    with pytest.raises(WireError, match="trace"):
        check_sums(FactoredGram(sent.cross, sent.counts, longer).whole, "f64", longer.slack(20))


@pytest.mark.parametrize(
    ("width", "number_bytes", "rows"), [(1280, 8, 640), (1280, 4, 640), (1280, 2, 640), (4, 2, 2), (3, 2, 1), (1, 2, 0)]
)
def test_a_factor_is_used_up_to_half_as_many_samples_as_columns(width: int, number_bytes: int, rows: int) -> None:
    assert most_rows(width, number_bytes) == rows
    assert 2 * width * rows < number_bytes * width * (width + 1) // 2

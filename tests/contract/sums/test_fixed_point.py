"""Exact sums against Python's integers: what is added can be taken out again, in any order, and nothing is left."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protofleet.contract.errors import StatisticError
from protofleet.contract.sums.fixed_point import FRACTION_BITS, LARGEST, FixedPoint

numbers = st.floats(-LARGEST, LARGEST, allow_nan=False)
vectors = st.lists(numbers, min_size=1, max_size=5)


def exactly(value: float) -> int:
    """The integer of a number, by exact arithmetic; Python rounds half to even, too."""
    return round(Fraction(value) * 2**FRACTION_BITS)


@given(values=vectors)
def test_a_number_is_the_nearest_integer_of_its_units(values):
    made = FixedPoint.of(values)
    assert made.integers() == [exactly(value) for value in values]
    assert made.low.min() >= 0
    assert made.low.max() < 2**32


@settings(max_examples=60)
@given(data=st.data(), count=st.integers(1, 12))
def test_sums_and_differences_are_those_of_pythons_integers_in_any_order(data, count):
    rows = data.draw(st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=count, max_size=count))
    out = data.draw(st.sets(st.integers(0, count - 1)))
    total = FixedPoint.zero(3)
    for row in rows:
        total = total.add(FixedPoint.of(row))
    for index in data.draw(st.permutations(sorted(out))):
        total = total.subtract(FixedPoint.of(rows[index]))
    kept = FixedPoint.zero(3)
    for index in data.draw(st.permutations(sorted(set(range(count)) - out))):
        kept = kept.add(FixedPoint.of(rows[index]))
    expected = [sum(exactly(rows[i][column]) for i in range(count) if i not in out) for column in range(3)]
    assert total.integers() == kept.integers() == expected
    assert total.equal(kept)
    assert total.digest() == kept.digest()


@example(values=[LARGEST, -LARGEST], times=2**30)
@given(values=vectors, times=st.integers(1, 2**30))
def test_so_many_of_the_largest_do_not_overflow_and_come_back_as_the_nearest_float(values, times):
    made = FixedPoint.of(values)
    many = FixedPoint(made.high * times, made.low * 0)  # what the high words come to; the low ones carry 2**31 at most
    assert many.high.tolist() == [high * times for high in made.high.tolist()]
    assert int(np.abs(many.high).max()) + 2**30 < 2**63
    np.testing.assert_array_equal(made.to_float(), [float(Fraction(n, 2**FRACTION_BITS)) for n in made.integers()])


@pytest.mark.parametrize("by", [2.0**-FRACTION_BITS, 2.0 ** (32 - FRACTION_BITS)], ids=["low word", "high word"])
def test_a_sum_that_is_another_differs(by):
    one, other = FixedPoint.of([1.0, 2.0]), FixedPoint.of([1.0, 2.0 + by])
    assert not one.equal(other)
    assert one.digest() != other.digest()


def test_what_lies_in_the_middle_goes_to_the_even_one():
    halves = np.ldexp([-1.5, -0.5, 0.5, 1.5, 2.5], -FRACTION_BITS)
    assert FixedPoint.of(halves).integers() == [-2, 0, 0, 2, 2]


@pytest.mark.parametrize(
    ("values", "got"),
    [([np.nan], "nan"), ([np.inf], "inf"), ([LARGEST * 1.001], "1.67"), ([[1.0]], "shape|\\(1, 1\\)")],
)
def test_what_is_no_number_of_a_sum_is_refused(values, got):
    with pytest.raises(StatisticError, match=got):
        FixedPoint.of(values)

"""int32 in units of the data: what is rounded, what it does to a head, and what else is refused."""

import cbor2
import numpy as np
import pytest
from pooled_head import solve_head

from protofleet.contract.errors import WireError
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.contract.sums.triangle import pack_triangle
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Contribution
from protofleet.contract.wire.scaled_integers import row_values, scaled_rows, scaled_triangle, triangle_values

WIDTH = 60


def sums(samples=300, dead=0):
    rng = np.random.default_rng(0)
    z = np.maximum(rng.standard_normal((samples, 8)) @ rng.standard_normal((8, WIDTH)), 0)
    z = z * np.logspace(0, -2, WIDTH) + 0.02 * rng.random((samples, WIDTH))  # columns of very different length
    z[:, :dead] = 0
    return FeatureGram.of(unit_rows(z), rng.integers(0, 5, samples), 5)


def sent(statistic, encoding):
    message = Contribution.of(statistic, run=b"runx", round=1, method="ffc", bundle=bytes(32))
    payload = encode(message, encoding)
    return decode(payload).statistic(FeatureGram, 5, WIDTH), len(payload)


@pytest.mark.parametrize("dead", [0, 3, WIDTH])
def test_no_product_is_off_by_more_than_half_a_step_of_what_its_diagonal_allows(dead):
    statistic = sums(dead=dead)
    back, _ = sent(statistic, "int32")
    length = np.sqrt(statistic.matrix.diagonal())
    allowed = np.outer(length, length) * 2.0**-32 * 1.001
    assert (np.abs(back.matrix - statistic.matrix) <= allowed + 1e-300).all()
    np.testing.assert_allclose(back.matrix.diagonal(), statistic.matrix.diagonal(), rtol=1e-14)
    steps = np.abs(statistic.cross).max(axis=1, keepdims=True) * 2.0**-32 * 1.001
    assert (np.abs(back.cross - statistic.cross) <= steps).all()


def test_a_head_of_int32_sums_is_good_to_1e_6_where_float32_is_not_and_costs_as_much():
    statistic = sums()
    exact = solve_head(statistic, 1e-5)
    off, size = {}, {}
    for encoding in ("f64", "int32", "f32"):
        back, size[encoding] = sent(statistic, encoding)
        off[encoding] = np.linalg.norm(solve_head(back, 1e-5) - exact) / np.linalg.norm(exact)
    assert off["int32"] < 1e-6 < off["f32"]
    assert size["int32"] < size["f32"] + 8 * (WIDTH + 5) + 40 < 0.6 * size["f64"]


def test_noised_products_that_no_diagonal_allows_have_one_unit():
    rng = np.random.default_rng(1)
    packed = pack_triangle(rng.standard_normal((9, 9)))
    units, integers = scaled_triangle(packed)
    assert len(set(units)) == 1
    assert np.abs(triangle_values(units, integers) - packed).max() <= np.abs(packed).max() * 2.0**-32 * 1.001
    rows = rng.standard_normal((0, 4))
    assert row_values(*scaled_rows(rows)).shape == (0, 4)


def units_of(*numbers):
    return cbor2.CBORTag(86, np.array(numbers, "<f8").tobytes())


def integers_of(*numbers):
    return cbor2.CBORTag(78, np.array(numbers, "<i4").tobytes())


@pytest.mark.parametrize(
    ("pair", "why"),
    [
        ([units_of(1, 1), integers_of(1, 1)], "a scale for each"),  # two numbers are no triangle
        ([units_of(1), integers_of(1, 1, 1)], "a scale for each"),
        ([units_of(1, -1), integers_of(1, 1, 1)], "0 or more"),
        ([units_of(1, np.nan), integers_of(1, 1, 1)], "finite scales"),
        ([units_of(1e200, 1e200), integers_of(1, 1, 1)], "finite numbers"),
        ([units_of(1, 1), integers_of(1, 1, 1), integers_of(1)], "scales, int8 or int32"),
    ],
)
def test_other_units_than_a_triangle_has_are_refused(pair, why):
    rng = np.random.default_rng(2)
    plain = FeatureGram.of(unit_rows(rng.standard_normal((4, 2))), np.array([0, 0, 1, 1]), 5)
    message = Contribution.of(plain, run=b"runx", round=1, method="ffc", bundle=bytes(32))
    body = cbor2.loads(encode(message, "int32"))
    decode(cbor2.dumps(body, canonical=True))
    with pytest.raises(WireError, match=why):
        decode(cbor2.dumps({**body, 9: pair}, canonical=True))


@pytest.mark.parametrize("over", [5e-10, 5e-3])
def test_a_product_that_is_larger_than_its_diagonal_allows_is_no_negative_number(over):
    """By rounding: the largest integer. By more: one unit for all, of the largest magnitude."""
    packed = np.array([1.0, 1.0 + over, 1.0])
    units, integers = scaled_triangle(packed)
    assert integers.min() > 0
    allowed = max(2.0**-32, over if over < 1e-9 else 0.0) * 1.01
    np.testing.assert_allclose(triangle_values(units, integers), packed, rtol=0, atol=allowed)

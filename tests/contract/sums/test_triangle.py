"""Sums of products as a packed triangle: beside the naive products, over panels that end inside the matrix."""

import numpy as np
import pytest

from protofleet.contract.heads.spectrum import Spectrum, solved_directly
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.contract.sums.triangle import add_products, pack_triangle, row_slices, triangle_width, unpack_triangle


@pytest.mark.parametrize("width", [1, 2, 255, 256, 257, 600])
def test_a_triangle_is_packed_row_by_row_and_unpacked_again(width):
    full = np.random.default_rng(width).standard_normal((width, width))
    full += full.T
    packed = pack_triangle(full)
    assert np.array_equal(packed, full[np.triu_indices(width)])
    assert np.array_equal(unpack_triangle(packed, width), full)
    assert triangle_width(packed.size) == width
    assert [packed[where][0] for where in row_slices(width)] == full.diagonal().tolist()


@pytest.mark.parametrize("width", [3, 300, 513])
def test_products_of_blocks_add_up_to_those_of_all_samples(width):
    z = np.random.default_rng(0).integers(-9, 10, (70, width)).astype(np.float64)  # whole numbers: nothing rounds
    upper = np.zeros((width, width))
    for block in (z[:1], z[1:40], z[40:]):
        add_products(upper, block)
    assert np.array_equal(pack_triangle(upper), (z.T @ z)[np.triu_indices(width)])


def test_sums_over_blocks_are_those_of_their_samples_together():
    rng = np.random.default_rng(1)
    z, y = rng.integers(-9, 10, (50, 20)).astype(np.float64), rng.integers(0, 4, 50)
    whole = FeatureGram.of(z, y, 5)
    blocks = FeatureGram.over([(z[:7], y[:7]), (z[7:7], y[7:7]), (z[7:], y[7:])], 5, 20)
    for mine, theirs in zip((*whole.arrays(), whole.counts), (*blocks.arrays(), blocks.counts), strict=True):
        assert np.array_equal(mine, theirs)
    for label in range(5):
        assert np.array_equal(whole.cross[label], z[y == label].sum(axis=0))


def test_a_given_ridge_is_solved_without_eigenvalues_where_these_play_no_part():
    rng = np.random.default_rng(2)
    z, b = rng.standard_normal((40, 60)), rng.standard_normal((3, 60))  # fewer samples than features: singular
    a = z.T @ z
    direct = solved_directly(a, b, 0.3)
    np.testing.assert_allclose(direct, Spectrum.of(a).solve(b, 0.3), rtol=1e-10, atol=1e-12)
    assert solved_directly(a, b, 0.0) is None  # the least norm is the spectrum's
    assert solved_directly(a, b, 1e-12) is None
    assert solved_directly(0 * a, b, 0.3) is None
    noised = a - 0.01 * np.trace(a) / 60 * np.eye(60)
    assert solved_directly(noised, b, 0.3) is None  # an eigenvalue below 0 counts as 0

"""Statistics merge exactly, hold only what is valid, and never change."""

from __future__ import annotations

import numpy as np
import pytest
from contract_samples import floats
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from protofleet.contract.errors import StatisticError
from protofleet.contract.methods import METHODS
from protofleet.contract.methods.fedhkd import HyperKnowledge
from protofleet.contract.sums.statistics import (
    MAX_FIELDS,
    ClassMeans,
    FeatureGram,
    Participation,
    Rows,
    Statistic,
    Triangle,
    shareable,
)
from protofleet.contract.sums.triangle import pack_triangle, unpack_triangle
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Contribution

C, D = 4, 3
KINDS = [ClassMeans, FeatureGram]


@st.composite
def samples(draw):
    n = draw(st.integers(0, 12))
    z = draw(hnp.arrays(np.float64, (n, D), elements=floats()))
    y = draw(hnp.arrays(np.int64, n, elements=st.integers(0, C - 1)))
    return z, y


def arrays(statistic):
    return (*statistic.arrays(), statistic.counts)


def assert_close(one, other):
    for a, b in zip(arrays(one), arrays(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@given(one=samples(), other=samples())
def test_merging_is_commutative_to_the_last_bit(kind, one, other):
    a, b = kind.of(*one, C), kind.of(*other, C)
    for left, right in zip(arrays(a.merge(b)), arrays(b.merge(a)), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("kind", KINDS)
@given(parts=st.tuples(samples(), samples(), samples()))
def test_merging_is_associative_and_equals_the_pooled_data(kind, parts):
    a, b, c = (kind.of(*part, C) for part in parts)
    pooled = kind.of(np.concatenate([z for z, _ in parts]), np.concatenate([y for _, y in parts]), C)
    assert_close(a.merge(b).merge(c), a.merge(b.merge(c)))
    assert_close(a.merge(b).merge(c), pooled)
    np.testing.assert_array_equal(a.merge(b).merge(c).counts, pooled.counts)


@pytest.mark.parametrize("kind", KINDS)
@given(data=samples())
def test_the_statistic_of_no_data_changes_nothing(kind, data):
    a = kind.of(*data, C)
    for merged in (a.merge(kind.zero(C, D)), kind.zero(C, D).merge(a)):
        for left, right in zip(arrays(merged), arrays(a), strict=True):
            np.testing.assert_array_equal(left, right)


@given(data=samples())
def test_both_equal_naive_loops(data):
    z, y = data
    sums, counts, gram = np.zeros((C, D)), np.zeros(C, int), np.zeros((D, D))
    for row, label in zip(z, y, strict=True):
        counts[label] += 1
        for i in range(D):
            sums[label, i] += row[i]
            for j in range(D):
                gram[i, j] += row[i] * row[j]
    means = ClassMeans.of(z, y, C)
    ffc = FeatureGram.of(z, y, C)
    np.testing.assert_allclose(means.sums, sums, atol=1e-9)
    np.testing.assert_array_equal(means.counts, counts)
    np.testing.assert_array_equal(means.present, counts > 0)
    for label in range(C):
        expected = z[y == label].mean(axis=0) if counts[label] else np.zeros(D)
        np.testing.assert_allclose(means.means[label], expected, atol=1e-9)
    np.testing.assert_allclose(ffc.matrix, gram, rtol=1e-12, atol=1e-6)
    np.testing.assert_allclose(ffc.cross, sums, atol=1e-9)
    np.testing.assert_array_equal(ffc.counts, counts)


@given(data=samples())
def test_means_and_counts_as_they_travel_give_the_same_statistic_back(data):
    whole = ClassMeans.of(*data, C)
    assert_close(ClassMeans.from_means(whole.means, whole.counts), whole)


@given(width=st.integers(1, 9), seed=st.integers(0, 99))
def test_a_packed_triangle_is_the_upper_one_row_by_row_and_comes_back(width, seed):
    half = np.random.default_rng(seed).standard_normal((width, width))
    full = half + half.T
    packed = pack_triangle(full)
    assert packed.tolist() == [full[i, j] for i in range(width) for j in range(i, width)]
    np.testing.assert_array_equal(unpack_triangle(packed, width), full)


@pytest.mark.parametrize("kind", KINDS)
def test_a_statistic_can_be_changed_neither_in_place_nor_through_what_it_was_made_of(kind):
    statistic = kind.of(np.ones((2, D)), np.array([0, 1]), C)
    for array in arrays(statistic):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 5
    with pytest.raises(AttributeError):
        statistic.counts = np.zeros(C)
    sums, counts = np.ones((C, D)), np.ones(C, np.int64)
    kept = ClassMeans(sums, counts)
    sums[:], counts[:] = 9, 9
    assert kept.sums.max() == 1
    assert kept.counts.max() == 1


ONE = np.ones(C, np.int64)
BAD = [
    (lambda: ClassMeans(np.ones(D), ONE), "2 dimensions"),
    (lambda: ClassMeans(np.ones((C, D)), ONE[:2]), "4 counts"),
    (lambda: ClassMeans(np.full((C, D), np.nan), ONE), "finite"),
    (lambda: ClassMeans(np.full((C, D), np.inf), ONE), "finite"),
    (lambda: ClassMeans(np.ones((C, D)), -ONE), "0 to 2"),
    (lambda: ClassMeans(np.ones((C, D)), ONE * 2**54), "0 to 2"),
    (lambda: ClassMeans(np.ones((C, D)), ONE * 0), "zero sums"),
    (lambda: ClassMeans(np.array([["a"] * D] * C), ONE), "numbers"),
    (lambda: FeatureGram(np.ones(5), np.ones((C, D)), ONE), "6 numbers"),
    (lambda: FeatureGram(np.full(6, np.nan), np.ones((C, D)), ONE), "finite"),
    (lambda: FeatureGram(np.array([1, 0, 0, -1, 0, 1.0]), np.ones((C, D)), ONE), "diagonal of squares"),
    (lambda: FeatureGram(np.ones(6), np.ones((C, D)), ONE * 0), "zero sums"),
    (lambda: HyperKnowledge(np.zeros((C, D)), np.ones((C, C)), ONE * 0), "zero sums"),
    (lambda: HyperKnowledge(np.ones((C, D)), np.zeros((C, C)), ONE * 0), "zero sums"),
    (lambda: HyperKnowledge(np.ones((C, D)), np.ones((C, D)), ONE), "soft_sums, expected 4 rows of 4, got"),
    (lambda: HyperKnowledge(np.ones((C, D)), np.ones((C - 1, C)), ONE), "soft_sums, expected 4 rows of 4, got"),
    (lambda: FeatureGram(np.ones(6), np.ones((C, D + 1)), ONE), "10 numbers"),
    (lambda: Participation(ONE), "counts of zero, got 1"),
    (lambda: ClassMeans.of(np.ones((2, D)), np.array([0, C]), C), "0 to 3"),
    (lambda: ClassMeans.of(np.ones((2, D)), np.array([0, -1]), C), "0 to 3"),
    (lambda: ClassMeans.of(np.ones((2, D)), np.array([0]), C), "N labels"),
    (lambda: FeatureGram.of(np.ones((2, D)), np.array([0.0, 1.0]), C), "N labels"),
    (lambda: FeatureGram.of(np.ones(D), np.array([0]), C), "N, D"),
    (lambda: ClassMeans.zero(C, D).merge(ClassMeans.zero(C, D + 1)), "width 3"),
    (lambda: ClassMeans.zero(C, D).merge(ClassMeans.zero(C + 1, D)), "4 classes"),
    (lambda: ClassMeans.zero(C, D).merge(FeatureGram.zero(C, D)), "ClassMeans"),
]


@pytest.mark.parametrize(("make", "words"), BAD)
def test_what_breaks_an_invariant_is_refused_and_says_what_was_expected(make, words):
    with pytest.raises(StatisticError, match=words):
        make()


def test_classes_with_too_few_local_examples_are_withheld():
    y = np.array([0, 0, 0, 1, 2, 2])
    assert shareable(y, C, 2).tolist() == [True, True, True, False, True, True]
    assert shareable(y, C, 3).tolist() == [True, True, True, False, False, False]
    assert shareable(y, C, 0).all()
    assert shareable(np.array([], int), C, 2).shape == (0,)


UNSENDABLE = {
    "a triangle alone": ((Triangle("gram"),), "beside rows of features first, got gram"),
    "two triangles": ((Rows("sums"), Triangle("one"), Triangle("other")), "one triangle, .* got sums, one, other"),
    "a triangle of another width than the first rows": (
        (Rows("soft", "classes"), Rows("sums"), Triangle("gram")),
        "beside rows of features first, got soft, sums, gram",
    ),
    "more rows than a message has room for": (
        tuple(Rows(f"field_{n}") for n in range(MAX_FIELDS + 1)),
        "at most 4 fields of rows, got 5",
    ),
}


@pytest.mark.parametrize("name", UNSENDABLE)
def test_fields_that_no_message_can_carry_are_refused_where_they_are_declared(name):
    fields, words = UNSENDABLE[name]
    with pytest.raises(StatisticError, match=f"Invented, expected .*{words}"):
        type("Invented", (Statistic,), {"FIELDS": fields})


@pytest.mark.parametrize("name", [name for name, found in METHODS.items() if not found.statistic.has_checks()])
def test_what_a_message_carries_is_the_same_statistic_with_and_without_another_look(name):
    kind, rng = METHODS[name].statistic, np.random.default_rng(5)
    drawn = np.sort(rng.integers(0, 4, (6, kind.GROUPS)))[:, ::-1].ravel()  # a class's empty groups come last
    counts = drawn if kind.FIELDS else np.zeros(6, np.int64)
    sums = [rng.normal(size=(len(counts), f.columns(6, 3))) * counts[:, None] for f in kind.row_fields()]
    sent = Contribution.of(kind.build(sums, counts), run=b"runs", round=1, method=name, bundle=bytes(32))
    message = decode(encode(sent))
    assert isinstance(message, Contribution)
    rows = [np.zeros((len(counts), table.shape[1])) for table in message._tables()]
    for dense, table in zip(rows, message._tables(), strict=True):
        dense[counts > 0] = table
    looked_at, made = kind.travelled(rows, None, counts), message.statistic(kind, 6, 3)
    for one, other in zip((*looked_at.arrays(), looked_at.counts), (*made.arrays(), made.counts), strict=True):
        assert one.tobytes() == other.tobytes()
        assert one.dtype == other.dtype
        assert not other.flags.writeable


@pytest.mark.parametrize("own", ["travelled", "build"])
def test_a_kind_that_makes_its_values_itself_is_looked_at(own):
    assert not ClassMeans.has_checks()
    assert type("Own", (ClassMeans,), {own: classmethod(lambda cls, *given: None)}).has_checks()

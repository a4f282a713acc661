"""What every statistic is by its declared fields alone: those of all methods, and one that no method has.

Each is made of random samples by nothing but its fields: features z, probabilities p, and Σ z zᵀ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from contract_samples import ENCODINGS
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from protofleet.contract.errors import StatisticError, WireError
from protofleet.contract.methods import METHODS
from protofleet.contract.sums.merge_rules import merge
from protofleet.contract.sums.plausibility import improbable
from protofleet.contract.sums.statistics import ClassMeans, Field, Participation, Rows, Statistic, Triangle, class_sums
from protofleet.contract.sums.triangle import pack_triangle
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import ClassRows, Contribution, GlobalPart

C, D = 4, 3
Samples = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]


@dataclass(frozen=True, eq=False)
class Invented(Statistic):
    """Two fields of rows of different widths, one sent as means and one as sums, and a triangle between them."""

    NAME: ClassVar[str] = "invented"
    FIELDS: ClassVar[tuple[Field, ...]] = (
        Rows("centres", travels="sums"),
        Triangle("spread"),
        Rows("soft", "classes", holds="probabilities"),
    )

    centres: NDArray[np.float64]
    spread: NDArray[np.float64]
    soft: NDArray[np.float64]
    counts: NDArray[np.int64]


KINDS: Mapping[str, type[Statistic]] = {
    kind.NAME: kind for kind in (*(found.statistic for found in METHODS.values()), Invented) if kind.GROUPS == 1
}  # several groups of a class have tests of their own, below
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
thirty_each = settings(max_examples=30)  # of every kind, or in every encoding: some hundreds of the same property


@st.composite
def samples(draw: st.DrawFn) -> Samples:
    """Features (n, D), probabilities (n, C) and labels (n,); sums of squares of them all fit float16.

    What they are like is drawn one by one, their numbers all at once: that takes a tenth of the time.
    """
    n, rng = draw(st.integers(0, 10)), np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dense, largest = draw(st.sampled_from([0.3, 1.0])), draw(st.sampled_from([1e-6, 1.0, 30.0]))
    z = rng.uniform(-largest, largest, (n, D)) * (rng.random((n, D)) < dense)
    raw = rng.uniform(0.01, 1.0, (n, C))
    return z, raw / raw.sum(axis=1, keepdims=True), rng.integers(0, draw(st.integers(1, C)), n)


def of(kind: type[Statistic], data: Samples) -> Statistic:
    """The statistic of samples, by its fields."""
    z, p, y = data
    if kind is Participation:
        return Participation(np.zeros(C, np.int64))
    made: list[NDArray[Any]] = []
    for field in kind.FIELDS:
        if isinstance(field, Triangle):
            made.append(pack_triangle(z.T @ z))
        else:
            rows = {"features": z, "classes": p, "one": np.ones((len(z), 1))}[field.width]
            made.append(class_sums(rows, y, C)[0])
    return kind.build(made, np.bincount(y, minlength=C))


def pooled(parts: tuple[Samples, ...]) -> Samples:
    z, p, y = (np.concatenate([part[index] for part in parts]) for index in range(3))
    return z, p, y.astype(np.int64)


def assert_close(one: Statistic, other: Statistic, rtol: float = 1e-12, atol: float = 1e-8) -> None:
    assert type(one) is type(other)
    np.testing.assert_array_equal(one.counts, other.counts)
    for mine, theirs in zip(one.arrays(), other.arrays(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=atol)


def sent(statistic: Statistic, encoding: Any = "f64") -> Contribution:
    """The contribution of it, there and back."""
    made = Contribution.of(statistic, run=b"run1", round=1, method="m", bundle=bytes(32))
    back = decode(encode(made, encoding))
    assert isinstance(back, Contribution)
    return back


def test_there_is_one_statistic_of_each_name() -> None:
    every = {found.statistic for found in METHODS.values()}
    assert len({kind.NAME for kind in every}) == len(every)
    assert {"class-means", "hyper-knowledge", "feature-gram", "noised-gram", "participation"} < set(KINDS)


@every_kind
@thirty_each
@given(parts=st.tuples(samples(), samples(), samples()))
def test_merging_is_commutative_associative_and_that_of_the_pooled_data(
    kind: type[Statistic], parts: tuple[Samples, Samples, Samples]
) -> None:
    a, b, c = (of(kind, part) for part in parts)
    assert_close(a.merge(b), b.merge(a), rtol=0.0, atol=0.0)
    assert_close(a.merge(b).merge(c), a.merge(b.merge(c)))
    whole = of(kind, pooled(parts))
    assert_close(a.merge(b).merge(c), whole)
    assert_close(merge(lambda: [a, b, c]), whole)
    assert_close(a.merge(kind.zero(C, a.width)), a, rtol=0.0, atol=0.0)


@every_kind
@thirty_each
@given(data=samples())
def test_it_travels_and_comes_back(kind: type[Statistic], data: Samples) -> None:
    statistic = of(kind, data)
    assert_close(sent(statistic).statistic(kind, C, D), statistic)


@every_kind
@thirty_each
@given(data=samples())
def test_what_is_merged_after_the_journey_is_what_was_merged_before(kind: type[Statistic], data: Samples) -> None:
    half = len(data[0]) // 2
    parts = [of(kind, (z, p, y)) for z, p, y in ([v[:half] for v in data], [v[half:] for v in data])]
    back = [sent(part).statistic(kind, C, D) for part in parts]
    assert_close(merge(lambda: back), of(kind, data))


@every_kind
@thirty_each
@given(data=samples(), factor=st.floats(0.0, 1.0))
def test_lightened_it_says_the_same_of_fewer_samples(kind: type[Statistic], data: Samples, factor: float) -> None:
    statistic = of(kind, data)
    light = statistic.lightened(factor)
    assert type(light) is kind
    expected = [max(int(n * factor), 1) if n else 0 for n in statistic.counts]
    assert light.counts.tolist() == expected
    for field in kind.row_fields():
        wanted = statistic.as_sent(field) * (1.0 if field.travels == "means" else factor)
        np.testing.assert_allclose(light.as_sent(field), wanted, rtol=1e-9, atol=1e-9)
    if statistic.triangle is not None:
        np.testing.assert_allclose(light.triangle, statistic.triangle * factor, rtol=1e-12)
    assert_close(statistic.lightened(1.0), statistic)


@every_kind
@thirty_each
@given(classes=st.integers(1, 9), width=st.integers(1, 9))
def test_numbers_are_those_that_a_device_with_every_class_sends(
    kind: type[Statistic], classes: int, width: int
) -> None:
    zero = kind.zero(classes, width)
    statistic = zero if kind is Participation else replace(zero, counts=np.ones(classes, np.int64))  # type: ignore[type-var]
    message = sent(statistic)
    triangle = 0 if message.triangle is None else message.triangle.size
    assert kind.numbers(classes, width) == message.body.rows.size + sum(f.size for f in message.further) + triangle


@every_kind
@thirty_each
@given(data=samples())
def test_another_number_of_fields_is_refused(kind: type[Statistic], data: Samples) -> None:
    assume(len(data[0]))
    message = sent(of(kind, data))
    rows = message.body.rows
    width = rows.shape[1] if rows.shape[1] else D
    body = ClassRows(message.body.classes, rows if rows.shape[1] else np.zeros((len(rows), width)))
    triangle = np.zeros(width * (width + 1) // 2) if message.triangle is None else None
    wrong = {
        "one field of rows more": replace(message, body=body, further=(*message.further, np.ones((len(rows), 2)))),
        "a triangle more or less": replace(message, body=body, triangle=triangle),
    }
    if message.further:
        wrong["one field of rows less"] = replace(message, further=message.further[:-1])
    for altered in wrong.values():
        with pytest.raises(WireError, match=f"expected {kind.NAME}, got another statistic"):
            altered.statistic(kind, C, D)


@pytest.mark.parametrize("kind", [kind for kind in KINDS.values() if kind.FIELDS], ids=lambda kind: kind.NAME)
@pytest.mark.parametrize(("classes", "width"), [(C, D + 1), (C - 1, D), (C + 1, D)])
def test_fields_of_another_fleet_are_refused_where_they_can_be_told(
    kind: type[Statistic], classes: int, width: int
) -> None:
    """More classes are only told by fields with a number for each class: class rows say which classes they are of."""
    data = np.ones((C, D)), np.full((C, C), 1 / C), np.arange(C)
    message = sent(of(kind, data))
    if classes > C and all(field.width != "classes" for field in kind.row_fields()):
        assert message.statistic(kind, classes, width).classes == classes
        return
    with pytest.raises(WireError, match=f"classes below {classes} and width|class numbers"):
        message.statistic(kind, classes, width)


@every_kind
def test_statistics_of_another_kind_or_size_do_not_merge(kind: type[Statistic]) -> None:
    mine = kind.zero(C, D)
    others = [other.zero(C, D) for other in KINDS.values() if other is not kind] + [kind.zero(C + 1, D)]
    if kind.FIELDS:
        others.append(kind.zero(C, D + 1))
    for other in others:
        with pytest.raises(StatisticError, match=f"expected {kind.__name__} of 4 classes, width {mine.width}"):
            mine.merge(other)  # type: ignore[arg-type]
        with pytest.raises(StatisticError):
            merge(lambda other=other: [mine, other])  # type: ignore[misc]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("kind", [Invented, KINDS["hyper-knowledge"]], ids=lambda kind: kind.NAME)
@thirty_each
@given(parts=st.tuples(samples(), samples()), factor=st.floats(0.0, 1.0))
def test_probabilities_stay_probabilities(
    kind: type[Statistic], encoding: str, parts: tuple[Samples, Samples], factor: float
) -> None:
    """Merged, lightened, sent in any encoding: none is taken for something else by an aggregator."""
    (field,) = [field for field in kind.row_fields() if field.holds == "probabilities"]
    one, other = (of(kind, part) for part in parts)
    merged = one.merge(other).lightened(factor)
    soft = merged.as_sent(field)
    np.testing.assert_allclose(soft[merged.present].sum(axis=1), 1.0, rtol=1e-9)
    for given_rows in (soft[merged.present], sent(merged, encoding).further[-1]):
        assert not improbable(given_rows, np.zeros(len(given_rows))).any()


@every_kind
def test_means_are_what_a_median_makes_sense_of(kind: type[Statistic]) -> None:
    assert kind.is_class_means() == (kind.NAME in ("class-means", "unit-means"))


@dataclass(frozen=True, eq=False)
class TwoGroups(Statistic):
    """Means of up to two groups of each class."""

    NAME: ClassVar[str] = "two-groups"
    FIELDS: ClassVar[tuple[Field, ...]] = (Rows("sums"),)
    GROUPS: ClassVar[int] = 2

    sums: np.ndarray
    counts: np.ndarray


@settings(deadline=None)
@given(counts=st.lists(st.integers(0, 3), min_size=6, max_size=6), seed=st.integers(0, 99))
def test_several_groups_of_a_class_travel_side_by_side(counts, seed):
    """Class numbers repeat; a group that is missing closes up, and what a group says of its class stays the same."""
    n = np.array(counts)
    means = np.random.default_rng(seed).normal(size=(6, 4)) * (n > 0)[:, None]
    sent = TwoGroups.travelled([means], None, n)
    assert (sent.classes, TwoGroups.numbers(3, 4)) == (3, 24)
    message = Contribution.of(sent, run=b"run1", round=1, method="m", bundle=bytes(32))
    assert message.body.classes.tolist() == [place // 2 for place in range(6) if n[place]]
    got = decode(encode(message, "f64")).statistic(TwoGroups, 3, 4)
    for label in range(3):
        mine, theirs = (
            sorted(
                (int(k), row.round(9).tolist()) for k, row in zip(s.counts, s.as_sent(s.row_fields()[0]), strict=True)
            )
            for s in (
                TwoGroups(sent.sums[2 * label : 2 * label + 2], n[2 * label : 2 * label + 2]),
                TwoGroups(got.sums[2 * label : 2 * label + 2], got.counts[2 * label : 2 * label + 2]),
            )
        )
        assert mine == theirs
    np.testing.assert_array_equal(got.merge(got).counts, 2 * got.counts)


def test_groups_of_a_class_are_no_class_means():
    """A median of devices needs one row of each class from each."""
    assert not TwoGroups.is_class_means()


def test_a_class_twice_is_refused_where_the_statistic_has_one_group():
    sent = TwoGroups.travelled([np.ones((4, 3))], None, np.array([1, 1, 1, 0]))
    message = Contribution.of(sent, run=b"run1", round=1, method="m", bundle=bytes(32))
    with pytest.raises(WireError, match="each once at most"):
        message.statistic(ClassMeans, 2, 3)
    with pytest.raises(WireError, match="each once at most"):
        GlobalPart(b"run1", 1, 1, 0, 1, "prototypes", message.body)
    with pytest.raises(StatisticError, match="1 to 8 groups"):
        type("Nine", (TwoGroups,), {"GROUPS": 9})

"""The global state travels in parts of any size and is put together from any order of them."""

from __future__ import annotations

import numpy as np
import pytest
from contract_samples import class_rows
from hypothesis import given
from hypothesis import strategies as st

from protofleet.contract.errors import WireError
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.global_state import GlobalCollector, GlobalState
from protofleet.contract.wire.messages import ClassRows, GlobalPart

RUN = b"run1"


def rows(classes, width, scale=1.0) -> ClassRows:
    return ClassRows(
        np.asarray(classes, np.uint16), scale * np.arange(len(classes) * width, dtype=float).reshape(-1, width)
    )


def assert_same_rows(one: ClassRows | None, other: ClassRows | None) -> None:
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        np.testing.assert_array_equal(one.classes, other.classes)
        np.testing.assert_array_equal(np.asarray(one.rows, np.float32), np.asarray(other.rows, np.float32))


def of_prototypes(body: ClassRows) -> dict[str, ClassRows]:
    return {"prototypes": body}


@given(
    kinds=st.dictionaries(st.sampled_from(["prototypes", "head", "soft", "a kind of later"]), class_rows()),
    limit=st.integers(200, 2000),
    data=st.data(),
)
def test_any_state_comes_back_from_its_parts_in_any_order_with_repetitions(kinds, limit, data):
    state = GlobalState(RUN, 3, 2, kinds)
    parts = state.parts(limit)
    if not kinds:
        assert parts == []
        return
    payloads = [encode(part) for part in parts]
    assert all(len(payload) <= limit for payload in payloads)
    order = data.draw(st.permutations(payloads))
    collector = GlobalCollector()
    answers = [collector.add(decode(payload)) for payload in [*order[:-1], *order]]
    assert all(answer is None for answer in answers[: len(order) - 1])
    got = answers[-1]
    assert got is not None
    assert (got.run, got.version, got.round) == (RUN, 3, 2)
    assert set(got.rows) == set(kinds)
    for kind in kinds:
        assert_same_rows(got.rows[kind], kinds[kind])
    assert_same_rows(got.prototypes, kinds.get("prototypes"))
    assert_same_rows(got.head, kinds.get("head"))


def test_a_part_is_useful_by_itself_and_never_larger_than_the_limit():
    parts = GlobalState(RUN, 1, 1, of_prototypes(rows(range(100), 128))).parts(4096)
    assert len(parts) > 10
    assert all(part.body.rows.shape[1] == 128 and len(part.body.classes) > 0 for part in parts)


def test_a_row_larger_than_the_limit_is_refused():
    with pytest.raises(WireError, match="limit"):
        GlobalState(RUN, 1, 1, of_prototypes(rows([1], 1000))).parts(2048)


def test_a_newer_version_replaces_an_unfinished_one_and_an_older_part_is_ignored():
    old, new = (GlobalState(RUN, v, v, of_prototypes(rows(range(9), 40))).parts(400) for v in (1, 2))
    collector = GlobalCollector()
    collector.add(old[0])
    assert [collector.add(part) for part in new[:-1]] == [None] * (len(new) - 1)
    assert collector.add(old[1]) is None
    done = collector.add(new[-1])
    assert done is not None
    assert done.version == 2


def test_another_run_starts_from_scratch_even_with_a_lower_version():
    collector = GlobalCollector()
    collector.add(GlobalState(RUN, 9, 9, of_prototypes(rows(range(9), 40))).parts(400)[0])
    other = GlobalState(b"run2", 1, 1, of_prototypes(rows([1], 4))).parts(400)
    done = collector.add(other[0])
    assert done is not None
    assert done.run == b"run2"


def test_a_version_that_is_cut_otherwise_takes_the_place_of_what_came_of_it():
    """An aggregator that was started with another limit, while a device had some of the parts: it waited for ever."""
    state, collector = GlobalState(RUN, 1, 1, of_prototypes(rows(range(9), 40))), GlobalCollector()
    for part in state.parts(400)[:-1]:
        assert collector.add(part) is None
    *first, last = state.parts(1_000)
    assert [collector.add(part) for part in first] == [None] * len(first)
    done = collector.add(last)
    assert done is not None
    np.testing.assert_array_equal(done.rows["prototypes"].rows, state.rows["prototypes"].rows)


def test_parts_of_one_version_that_contradict_each_other_are_refused():
    collector = GlobalCollector()
    collector.add(GlobalPart(RUN, 1, 1, 0, 2, "prototypes", rows([0], 4)))
    with pytest.raises(WireError, match="one width"):
        collector.add(GlobalPart(RUN, 1, 1, 1, 2, "prototypes", rows([1], 5)))


def test_dense_prototypes_are_what_the_training_step_takes():
    state = GlobalState(RUN, 1, 1, of_prototypes(rows([0, 2], 3, scale=0.5)))
    prototypes, mask = state.dense("prototypes", 4, 3)
    assert (prototypes.dtype, mask.dtype, mask.tolist()) == (np.float32, np.float32, [1, 0, 1, 0])
    np.testing.assert_array_equal(prototypes, [[0, 0.5, 1], [0, 0, 0], [1.5, 2, 2.5], [0, 0, 0]])
    prototypes, mask = GlobalState(RUN, 0, 0).dense("prototypes", 4, 3)
    assert not prototypes.any()
    assert not mask.any()


@pytest.mark.parametrize(("classes", "width"), [(2, 3), (4, 2)])
def test_prototypes_of_another_fleet_are_refused(classes, width):
    with pytest.raises(WireError, match="class rows"):
        GlobalState(RUN, 1, 1, of_prototypes(rows([0, 2], 3))).dense("prototypes", classes, width)

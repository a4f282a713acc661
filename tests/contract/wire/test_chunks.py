"""Chunks: a contribution is admitted whole or not at all, in any order, with any loss, within bounded memory."""

from __future__ import annotations

import contextlib
import hashlib
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from protofleet.contract.errors import WireError
from protofleet.contract.wire.chunks import OVERHEAD_BYTES, PART_COST_BYTES, Assembler, bitmap, in_bitmap, split
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Chunk

LIMIT = OVERHEAD_BYTES + 10
AT = {"run": b"run1", "round": 3, "method": "ffc"}


@given(
    payload=st.binary(min_size=1, max_size=5000),
    limit=st.integers(OVERHEAD_BYTES + 1, 3000),
    method=st.text(min_size=1, max_size=32),
)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_every_chunk_fits_the_limit_when_encoded_and_together_they_are_the_payload(payload, limit, method):
    pieces = split(payload, limit, run=b"\xff" * 4, round=2**32 - 1, method=method)
    assert b"".join(piece.data for piece in pieces) == payload
    assert [piece.index for piece in pieces] == list(range(len(pieces)))
    assert all(len(encode(piece)) <= limit + 3 * len(method) for piece in pieces)
    assert all(len(encode(replace(piece, method="fedproto"))) <= limit for piece in pieces)


def test_a_chunks_envelope_at_its_largest_is_within_the_overhead_that_split_allows():
    largest = Chunk(b"\xff" * 4, 2**32 - 1, "\U0010ffff" * 16, 65_534, 65_535, 1 << 32, bytes(8), bytes(70_000))
    assert len(encode(largest)) - 70_000 <= OVERHEAD_BYTES


@pytest.mark.parametrize(
    ("payload", "limit"), [(b"x", OVERHEAD_BYTES), (b"x", 0), (b"", 1000), (bytes(70_000), OVERHEAD_BYTES + 1)]
)
def test_a_limit_without_room_and_too_many_chunks_are_refused(payload, limit):
    with pytest.raises(WireError, match="1 to 65535 chunks"):
        split(payload, limit, **AT)


@given(payload=st.binary(min_size=1, max_size=300), data=st.data())
def test_any_order_and_any_number_of_times_gives_the_payload_once(payload, data):
    pieces = split(payload, LIMIT, **AT)
    extra = data.draw(st.lists(st.sampled_from(pieces), max_size=10))
    order = data.draw(st.permutations(pieces + extra))
    assembler, got = Assembler(), []
    seen: set[int] = set()
    for piece in order:
        whole = assembler.add("device", piece)
        seen.add(piece.index)
        assert (whole is not None) == (len(seen) == len(pieces))
        if whole is not None:
            got.append(whole)
            seen.clear()  # complete: what comes now is a repetition and starts over
    assert got
    assert set(got) == {payload}


@given(payload=st.binary(min_size=11, max_size=300), data=st.data())
def test_what_is_lost_is_named_and_resending_just_that_completes_it(payload, data):
    pieces = split(payload, LIMIT, **AT)
    lost = data.draw(st.sets(st.sampled_from(range(len(pieces))), min_size=1, max_size=len(pieces) - 1))
    assembler = Assembler()
    for piece in pieces:
        if piece.index not in lost:
            assert assembler.add("device", piece) is None
    missing = assembler.missing("device", "ffc")
    assert missing is not None
    assert {i for i in range(len(pieces)) if in_bitmap(i, missing)} == lost
    answers = [assembler.add("device", piece) for piece in pieces if in_bitmap(piece.index, missing)]
    assert answers[-1] == payload
    assert answers[:-1] == [None] * (len(lost) - 1)
    assert assembler.missing("device", "ffc") is None


@given(indices=st.sets(st.integers(0, 99)), count=st.integers(100, 200))
def test_a_bitmap_holds_its_set_lowest_bit_first(indices, count):
    bits = bitmap(indices, count)
    assert len(bits) == -(-count // 8)
    assert {i for i in range(count + 50) if in_bitmap(i, bits)} == indices
    assert bitmap({0, 9}, 10) == b"\x01\x02"


def test_devices_and_methods_do_not_mix():
    assembler = Assembler()
    for name in ("one", "two"):
        for method in ("ffc", "fedproto"):
            first, _ = split(name.encode() * 4 + method.encode()[:2], LIMIT, run=b"run1", round=3, method=method)
            assert assembler.add(name, first) is None
    for name in ("one", "two"):
        for method in ("ffc", "fedproto"):
            whole = name.encode() * 4 + method.encode()[:2]
            assert assembler.add(name, split(whole, LIMIT, run=b"run1", round=3, method=method)[1]) == whole


def test_a_newer_contribution_of_a_device_replaces_the_unfinished_one():
    assembler = Assembler()
    old, new = split(b"a" * 25, LIMIT, **AT), split(b"b" * 25, LIMIT, **AT | {"round": 4})
    assembler.add("device", old[0])
    assert [assembler.add("device", piece) for piece in new] == [None, None, b"b" * 25]


def test_a_whole_that_does_not_hash_to_what_its_chunks_said_is_refused_and_forgotten():
    assembler, pieces = Assembler(), split(b"a" * 25, LIMIT, **AT)
    assembler.add("device", pieces[0])
    assembler.add("device", pieces[1])
    with pytest.raises(WireError, match="other bytes"):
        assembler.add("device", replace(pieces[2], data=b"bbbbb"))
    assert assembler.missing("device", "ffc") is None
    assert [assembler.add("device", piece) for piece in pieces] == [None, None, b"a" * 25]


def test_chunks_that_hold_more_than_they_announced_are_refused():
    assembler, pieces = Assembler(), split(b"a" * 25, LIMIT, **AT)
    assembler.add("device", replace(pieces[0], data=b"a" * 20))
    with pytest.raises(WireError, match="25 bytes in all"):
        assembler.add("device", replace(pieces[1], data=b"a" * 20))


def test_a_contribution_that_says_it_is_too_large_is_refused_at_its_first_chunk():
    assembler = Assembler(max_contribution_bytes=100)
    with pytest.raises(WireError, match="at most 100 bytes"):
        assembler.add("device", Chunk(b"run1", 1, "ffc", 0, 2, 101, bytes(8), b"x"))
    small = Assembler(capacity_bytes=50, max_contribution_bytes=100)
    with pytest.raises(WireError, match="at most 50 bytes, got 51"):  # its chunks would push each other out for ever
        small.add("device", Chunk(b"run1", 1, "ffc", 0, 2, 51, bytes(8), b"x"))


def test_a_device_that_opens_contribution_after_contribution_keeps_only_its_last():
    assembler = Assembler()
    for n in range(1000):
        digest = hashlib.sha256(str(n).encode()).digest()[:8]
        assembler.add("device", Chunk(b"run1", 1 + n, "ffc", 0, 65_535, 1 << 20, digest, bytes(100)))
    assert assembler.held_bytes == 100 + PART_COST_BYTES
    assert len(assembler) == 1


def test_a_flood_of_one_byte_chunks_of_ever_other_methods_is_bounded_in_real_memory():
    assembler = Assembler(capacity_bytes=4 << 20)
    tracemalloc.start()
    for n in range(30_000):
        assembler.add("device", Chunk(b"run1", 1, f"method-{n}", 0, 65_535, 65_535, n.to_bytes(8), n.to_bytes(4)[-1:]))
    held_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 1000 < len(assembler) <= (4 << 20) // PART_COST_BYTES
    assert held_bytes < 2 * (4 << 20)


class Flood(RuleBasedStateMachine):
    """Devices, some of them hostile, send chunks against a small capacity; a model keeps what each has sent since its
    contribution was last known to be open."""

    CAPACITY = 4 * PART_COST_BYTES

    def __init__(self) -> None:
        super().__init__()
        self.assembler = Assembler(capacity_bytes=self.CAPACITY, max_contribution_bytes=200)
        self.sent: dict[tuple[str, int], bytes] = {}

    @rule(device=st.sampled_from("abcdef"), salt=st.integers(0, 2), index=st.integers(0, 9), size=st.integers(1, 100))
    def an_honest_chunk(self, device: str, salt: int, index: int, size: int) -> None:
        payload = hashlib.sha256(f"{device}{salt}".encode()).digest() * 4
        pieces = split(payload[:size], LIMIT, run=b"run1", round=1 + salt, method="ffc")
        piece = pieces[index % len(pieces)]
        whole = self.assembler.add(device, piece)
        assert whole in (None, payload[:size])

    @rule(
        device=st.sampled_from("abcdef"),
        total=st.integers(1, 300),
        count=st.integers(1, 5),
        data=st.binary(min_size=1, max_size=150),
    )
    def a_hostile_chunk(self, device: str, total: int, count: int, data: bytes) -> None:
        if len(data) <= total:
            with contextlib.suppress(WireError):
                self.assembler.add(device, Chunk(b"run1", 9, "ffc", count - 1, count, total, bytes(8), data))

    @invariant()
    def memory_is_bounded(self) -> None:
        assert 0 <= self.assembler.held_bytes <= self.CAPACITY
        assert len(self.assembler) <= 6


TestFlood = Flood.TestCase
TestFlood.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_longest_untouched_is_dropped_first_and_the_newest_completes():
    assembler = Assembler(capacity_bytes=5 * (10 + PART_COST_BYTES))
    old, new = split(b"a" * 40, LIMIT, **AT), split(b"b" * 40, LIMIT, **AT)
    for piece in old[:3]:
        assembler.add("old", piece)
    for piece in new[:3]:
        assembler.add("new", piece)
    assert assembler.missing("old", "ffc") is None
    assert assembler.add("new", new[3]) == b"b" * 40
    assert assembler.held_bytes == 0


def test_who_began_first_but_is_still_sending_is_not_the_one_dropped():
    assembler = Assembler(capacity_bytes=5 * (10 + PART_COST_BYTES))
    steady, silent = split(b"a" * 60, LIMIT, **AT), split(b"b" * 60, LIMIT, **AT)
    for device, piece in (("steady", steady[0]), ("silent", silent[0]), ("silent", silent[1])):
        assembler.add(device, piece)
    for piece in steady[1:4]:
        assembler.add("steady", piece)
    assert assembler.missing("silent", "ffc") is None
    assert [assembler.add("steady", piece) for piece in steady[4:]] == [None, b"a" * 60]


@given(piece=st.binary(max_size=64))
def test_a_chunk_is_one_message_like_any_other(piece):
    for chunk in split(b"abc" + piece, LIMIT, **AT):
        assert decode(encode(chunk)) == chunk

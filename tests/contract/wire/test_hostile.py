"""Hostile bytes: whatever arrives, `decode` returns a valid message or raises `WireError`, within bounded memory."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import struct
import subprocess
import sys
import time
import tracemalloc
import warnings
from pathlib import Path

import cbor2
import pytest
from contract_samples import ENCODINGS, readable_messages
from hypothesis import given, settings
from hypothesis import strategies as st

from protofleet.contract.errors import WireError
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import (
    Announcement,
    Chunk,
    Contribution,
    Enrolment,
    GlobalPart,
    Opened,
    Opening,
    Piece,
    Receipt,
    Request,
    SealedSeed,
    Signed,
    Status,
)

MUTANTS = int(os.environ.get("PROTOFLEET_MUTANTS", "40000"))
VALID = [encode(message, encoding) for message in readable_messages().values() for encoding in ENCODINGS]
HEADS = bytes.fromhex("ff 9f bf 5f 7f c2 c4 d8 d9 db 1b 3b 5b 7b 9b bb f6 f7 f9 fa fb f8")
TYPES = (Announcement, Chunk, Contribution, Enrolment, GlobalPart, Piece, Receipt, Request, Signed, Status)
TYPES += (Opened, Opening, SealedSeed)


def mutate(payload: bytes, rng: random.Random) -> bytes:
    data = bytearray(payload)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data)) if data else 0
        change = rng.random()
        if change < 0.5 and data:
            data[at] = rng.randrange(256)
        elif change < 0.65:
            del data[at : at + rng.randint(1, 30)]
        elif change < 0.8:
            data[at:at] = rng.randbytes(rng.randint(1, 9))
        elif change < 0.9 and data:
            data[at] = rng.choice(HEADS)
        else:
            other = rng.choice(VALID)
            data[at:at] = other[rng.randrange(len(other)) :][: rng.randint(1, 40)]
    return bytes(data)


def test_mutated_messages_raise_only_wire_errors():
    rng, outcome, longest = random.Random(1), collections.Counter(), 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an overflow that only warns would be a hole, too
        for _ in range(MUTANTS):
            payload = mutate(rng.choice(VALID), rng)
            try:
                outcome[isinstance(decode(payload), TYPES)] += 1
            except WireError as error:
                outcome["refused"] += 1
                longest = max(longest, len(str(error)))
    print(
        f"{MUTANTS:,} mutated messages: {outcome['refused']:,} refused, {outcome[True]:,} still valid, no other error"
    )
    assert longest < 1000  # a hostile message does not write our log
    assert outcome[False] == 0
    assert outcome["refused"] > 0.5 * MUTANTS
    assert outcome[True] > 0  # the mutations are not all so coarse that nothing deep is reached


@settings(max_examples=300, deadline=None)
@given(payload=st.binary(max_size=300))
def test_arbitrary_bytes_raise_only_wire_errors(payload):
    with pytest.raises(WireError):
        decode(payload)


keys = st.integers(-1, 18) | st.text(max_size=3)
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=40)
)
tags = st.builds(
    cbor2.CBORTag, st.sampled_from([2, 3, 4, 28, 29, 30, 35, 40, 64, 69, 72, 79, 84, 85, 86]), st.binary(max_size=32)
)
items = st.recursive(
    leaves | tags, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=6
)


@settings(max_examples=300, deadline=None)
@given(kind=st.integers(0, 14), fields=st.dictionaries(keys, items, max_size=14), base=st.sampled_from(VALID))
def test_any_well_formed_cbor_in_any_field_raises_only_wire_errors(kind, fields, base):
    for payload in ({0: kind, 1: 1, **fields}, cbor2.loads(base) | fields):
        with contextlib.suppress(WireError):
            assert isinstance(decode(cbor2.dumps(payload)), TYPES)


def contribution(**changes) -> bytes:
    fields = {
        0: 3,
        1: 2,
        2: b"run1",
        3: 1,
        4: "fedproto",
        5: b"bndl",
        6: cbor2.CBORTag(64, b"\x01"),
        7: cbor2.CBORTag(64, b"\x05"),
        8: cbor2.CBORTag(40, [[1, 2], cbor2.CBORTag(85, struct.pack("<2f", 1.0, 2.0))]),
    }
    fields |= {int(key[1:]): value for key, value in changes.items()}
    return cbor2.dumps({key: value for key, value in fields.items() if value is not None}, canonical=True)


def f8(*numbers: float) -> cbor2.CBORTag:
    return cbor2.CBORTag(86, struct.pack(f"<{len(numbers)}d", *numbers))


def shaped(dims: list[int], flat: object) -> cbor2.CBORTag:
    return cbor2.CBORTag(40, [dims, flat])


NAN, INF = float("nan"), float("inf")
INT8 = shaped([1, 2], cbor2.CBORTag(72, b"\x7f\x01"))
CRAFTED = {
    "wire version 1": (contribution(_1=1), "expected wire version 2, got 1, try the same release on both ends"),
    "a later wire version": (contribution(_1=3), "expected wire version 2, got 3"),
    "an array for a version": (contribution(_1=cbor2.CBORTag(64, b"")), "expected wire version 2, got "),
    "an array for a type": (contribution(_0=cbor2.CBORTag(64, b"\x03")), "type from 1 to"),
    "an unknown type": (contribution(_0=30), "type from 1 to"),
    "a missing field": (contribution(_7=None), "field 7"),
    "an extra field": (contribution(_22=1), "no further fields, got field 22"),
    "a text key": (cbor2.dumps({**cbor2.loads(contribution()), "x": 1}), "no further fields"),
    "a round of true": (contribution(_3=True), "unsigned integer"),
    "a negative round": (contribution(_3=-1), "expected 1 to 4294967295, got -1"),
    "round zero": (contribution(_3=0), "round"),
    "a round past 32 bits": (contribution(_3=2**32), "round"),
    "a big-number round": (contribution(_3=2**80), "another CBOR tag"),
    "NaN": (contribution(_8=shaped([1, 2], f8(NAN, 1))), "finite"),
    "infinity": (contribution(_8=shaped([1, 2], f8(INF, 1))), "finite"),
    "numbers that would overflow a sum": (contribution(_8=shaped([1, 2], f8(1e300, 1))), "finite numbers up to"),
    "a number above the largest": (contribution(_8=shaped([1, 2], f8(1.01e30, 1))), r"finite numbers up to 1e\+30"),
    "an int8 scale that overflows": (contribution(_8=[f8(1e300), INT8]), "finite numbers up to"),
    "a NaN scale": (contribution(_8=[f8(NAN), INT8]), "finite scales"),
    "a negative scale": (contribution(_8=[f8(-1), INT8]), "finite scales"),
    "too few scales": (contribution(_8=[f8(), INT8]), "scale for each int8 row"),
    "int8 without scales": (contribution(_8=INT8), "floats in 2 dimensions"),
    "unshaped rows": (contribution(_8=f8(1, 2)), "floats in 2 dimensions"),
    "dimensions that do not fit": (contribution(_8=shaped([2, 2], f8(1, 2))), "fit the array"),
    "huge dimensions": (contribution(_8=shaped([2**31, 2**33], f8(1))), "fit the array"),
    "negative dimensions": (contribution(_8=shaped([-1, -2], f8(1, 2))), "fit the array"),
    "three dimensions": (contribution(_8=shaped([1, 1, 2], f8(1, 2))), "fit the array"),
    "a ragged typed array": (contribution(_8=shaped([1, 2], cbor2.CBORTag(86, b"1234567"))), "typed array"),
    "a big-endian array": (contribution(_8=shaped([1, 2], cbor2.CBORTag(82, bytes(16)))), "typed array"),
    "a shaped array within a shaped one": (contribution(_8=shaped([1, 2], shaped([1, 2], f8(1, 2)))), "fit the array"),
    "a list for an array": (contribution(_8=[1.0, 2.0]), "scales"),
    "classes out of order": (contribution(_6=cbor2.CBORTag(64, b"\x02\x01")), "field|rising|rows"),
    "a class nine times": (
        contribution(
            _6=cbor2.CBORTag(64, b"\1" * 9), _7=cbor2.CBORTag(64, b"\5" * 9), _8=shaped([9, 1], f8(*range(9)))
        ),
        "each 8 times at most",
    ),
    "class numbers of 32 bits": (contribution(_6=cbor2.CBORTag(70, bytes(4))), "uint8 or uint16"),
    "counts of 64 bits": (contribution(_7=cbor2.CBORTag(71, bytes(8))), "an unsigned array"),
    "a count of zero": (contribution(_7=cbor2.CBORTag(64, b"\0")), "positive"),
    "counts of another number": (contribution(_7=cbor2.CBORTag(64, b"\5\5")), "counts"),
    "a triangle of another width": (contribution(_9=f8(1, 2)), "triangle of width 2"),
    "a NaN soft prediction": (contribution(_10=shaped([1, 2], f8(NAN, 1))), "class rows, expected finite"),
    "a row too many in a further field": (contribution(_10=shaped([2, 2], f8(1, 0, 0, 1))), "expected 1 rows"),
    "a further field without the one before": (contribution(_11=shaped([1, 2], f8(1, 0))), "no further fields"),
    "a fifth field of rows": (
        contribution(**{f"_{key}": shaped([1, 1], f8(1)) for key in (10, 11, 12, 14)}),
        "no further fields, got field 14",
    ),
    "an extractor of 5 bytes": (contribution(_13=b"12345"), r"extractor \(field 13\), expected 4 bytes or none"),
    "a shaped triangle": (contribution(_9=shaped([1, 3], f8(1, 2, 3))), "1 dimensions"),
    "a run of 5 bytes": (contribution(_2=b"run12"), "4 bytes"),
    "an empty method": (contribution(_4=""), "1 to 32 characters"),
    "a long method": (contribution(_4="m" * 33), "1 to 32 characters"),
    "a date": (contribution(_4=cbor2.CBORTag(0, "2020-01-01T00:00:00Z")), "CBOR tag"),
    "a shared reference": (contribution(_4=cbor2.CBORTag(28, "x")), "CBOR tag"),
    "a regular expression": (contribution(_4=cbor2.CBORTag(35, "(a+)+$")), "CBOR tag"),
    "two items": (contribution() + b"\0", "one CBOR item"),
    "not a map": (cbor2.dumps([1, 2]), "a map"),
    "nothing": (b"", "CBOR"),
    "a map of no end": (bytes.fromhex("bf0003ff"), "CBOR"),
    "a key twice": (bytes.fromhex("a200030004"), "CBOR"),
    "text that is not UTF-8": (contribution(_4="xxxx").replace(b"dxxxx", b"d\xff\xff\xff\xff"), "CBOR"),
    "an array of four billion": (bytes.fromhex("a1009affffffff"), "CBOR"),
    "bytes of an exabyte": (bytes.fromhex("a1005b1000000000000000"), "CBOR"),
    "nested deeply": (b"\xa1\x00" + b"\x81" * 4_000, "CBOR"),
    "nested without end": (b"\xa1\x00" + b"\x81" * 100_000, "at most 4,096 keys, values and entries"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_message_is_refused_for_its_reason(name):
    payload, reason = CRAFTED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(WireError, match=reason):
            decode(payload)


def test_the_message_that_the_crafted_ones_depart_from_is_valid():
    assert decode(contribution()).body.rows.tolist() == [[1.0, 2.0]]


def test_a_message_above_the_limit_is_refused_before_it_is_parsed():
    with pytest.raises(WireError, match="at most 1024 bytes"):
        decode(b"\x00" * 2000, limit_bytes=1024)


_STARVED = """
import resource, sys
sys.path[:0] = [{tests!r}, {root!r}]
from protofleet.contract.errors import WireError
from protofleet.contract.wire.codec import decode
import tests.contract.wire.test_hostile as hostile, random
now_bytes = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now_bytes + (48 << 20),) * 2)
rng = random.Random(2)
lengths = [bytes.fromhex(h) for h in ("5b00000000ffffffff", "7b00000001ffffffff", "9b00000000ffffffff",
           "bb00000000ffffffff", "9affffffff", "baffffffff", "5affffffff", "7affffffff")]
for n in range(4000):
    payload = hostile.mutate(rng.choice(hostile.VALID), rng)
    at = rng.randrange(len(payload) + 1)
    for data in (payload, payload[:at] + rng.choice(lengths) + payload[at:]):
        try:
            decode(data)
        except WireError as error:
            assert "MemoryError" not in repr(error.__context__), error
print("bounded")
"""


def test_no_message_makes_decoding_allocate_more_than_it_was_given():
    """48 MiB of address space are left to a process that decodes messages which claim gigabytes."""
    tests = Path(__file__).parents[2]
    script = _STARVED.format(tests=str(tests / "support"), root=str(tests.parent))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "bounded", done.stderr[-2000:]


_UNITS = {
    "empty maps": b"\xa0",
    "empty arrays": b"\x80",
    "arrays in arrays": b"\x81\x81\x81\x81\x80",
    "maps in maps": b"\xa1\x00\xa0",
    "empty tensors": b"\xd8\x40\x40",
    "numbers": b"\x1b" + b"\xff" * 8,
}


@pytest.mark.parametrize("unit", _UNITS)
@pytest.mark.parametrize("wrap", ["a field too many", "a field of later", "the message itself", "versions"])
def test_a_message_of_many_small_items_takes_no_more_memory_than_its_bytes(unit: str, wrap: str) -> None:
    """A megabyte of empty maps was 72 megabytes of Python, and seconds."""
    count = 1_000_000 // len(_UNITS[unit])
    many = b"\x9a" + count.to_bytes(4, "big") + _UNITS[unit] * count
    receipt = cbor2.dumps({0: 5, 1: 2, 2: b"run1", 3: 1, 4: "fedproto", 5: 0, 6: "", 7: b""})
    payload = {
        "a field too many": b"\xa3\x00\x03\x01\x02\x18\x63" + many,
        "a field of later": bytes([receipt[0] + 1]) + receipt[1:] + b"\x18\x63" + many,
        "the message itself": many,
        "versions": b"\xa3\x00\x06\x01\x02\x06\xba" + count.to_bytes(4, "big") + _UNITS[unit] * 2 * count,
    }[wrap]
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="at most 4,096 keys, values and entries"):
            decode(payload)
        assert tracemalloc.get_traced_memory()[1] < len(payload)
    finally:
        tracemalloc.stop()


def test_a_message_of_later_may_have_some_further_values() -> None:
    later = cbor2.dumps({0: 5, 1: 2, 2: b"run1", 3: 1, 4: "ffc", 5: 0, 6: "", 7: b"", 99: [{}] * 1_000}, canonical=True)
    assert decode(later) == Receipt(b"run1", 1, "ffc", "committed")
    for key in (-1, 1 << 32):
        with pytest.raises(WireError, match=f"no further fields, got field {key}"):
            decode(cbor2.dumps({**cbor2.loads(later), key: 0}, canonical=True))


def test_a_deep_or_wide_message_costs_time_in_proportion():
    wide = cbor2.dumps({0: 6, 1: 2, 2: True, 3: bytes(8), 4: 1, 5: "", 6: {str(i): "" for i in range(50_000)}, 7: {}})
    began_s = time.process_time()  # this process's alone, however busy the machine; it takes about 0.02 s
    with pytest.raises(WireError, match="at most 4,096"):
        decode(wide)
    assert time.process_time() - began_s < 2.0

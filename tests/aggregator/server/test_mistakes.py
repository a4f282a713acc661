"""Honest mistakes of somebody's own client: each gets an answer that ends it, and ends nothing else."""

from __future__ import annotations

import hashlib

import cbor2
import numpy as np
import pytest
from aggregator_samples import BUNDLE, CLASSES, RUN, WIDTH, contribution
from hypothesis import given, settings
from hypothesis import strategies as st

from protofleet.aggregator.ingest.broken_message import tie
from protofleet.aggregator.ingest.ingest import Ingest, View
from protofleet.aggregator.ingest.refusal_rate import Pace
from protofleet.contract.wire.chunks import split
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Announcement, Receipt, Status

VIEW = View(RUN, BUNDLE, CLASSES, WIDTH, round=1, method="fedproto", open=True)


def _raw(change: dict[int, object], base: bytes | None = None, drop: tuple[int, ...] = ()) -> bytes:
    """A contribution whose outer map was changed by someone with another encoder."""
    whole = cbor2.loads(base or encode(contribution(), "f32"))
    return cbor2.dumps({k: v for k, v in (whole | change).items() if k not in drop})


def _typed(tag: int, values: object, dtype: str) -> cbor2.CBORTag:
    return cbor2.CBORTag(tag, np.asarray(values, dtype).tobytes())


def _shaped(values: object, shape: list[int]) -> cbor2.CBORTag:
    return cbor2.CBORTag(40, [shape, _typed(85, values, "<f4")])


_GOOD = encode(contribution(), "f32")
_CHUNK = encode(split(_GOOD, 1024, run=RUN, round=1, method="fedproto")[0])
_NAN = _shaped([np.nan] + [0.0] * 7, [2, 4])
MISTAKES = {
    "NaN sent whole": _raw({8: _NAN}),
    "infinity": _raw({8: _shaped([np.inf] + [0.0] * 7, [2, 4])}),
    "a number above the largest": _raw({8: _shaped([3e38] + [0.0] * 7, [2, 4])}),
    "NaN in float64": _raw({8: cbor2.CBORTag(40, [[2, 4], _typed(86, [np.nan] * 8, "<f8")])}),
    "counts as floats": _raw({7: _typed(85, [10, 11], "<f4")}),
    "counts as a list": _raw({7: [10, 11]}),
    "counts signed": _raw({7: _typed(72, [10, 11], "i1")}),
    "a count of zero": _raw({7: _typed(64, [0, 11], "u1")}),
    "one count too few": _raw({7: _typed(64, [10], "u1")}),
    "counts of 64 bits": _raw({7: _typed(71, [10, 11], "<u8")}),
    "a class twice": _raw({6: _typed(64, [1, 1], "u1")}),
    "classes falling": _raw({6: _typed(64, [1, 0], "u1")}),
    "classes as a list": _raw({6: [0, 1]}),
    "classes as uint32": _raw({6: _typed(70, [0, 1], "<u4")}),
    "a class of another fleet": _raw({6: _typed(64, [0, 9], "u1")}),
    "rows as a list": _raw({8: [[0.0] * 4, [0.0] * 4]}),
    "rows without shape": _raw({8: _typed(85, [0.0] * 8, "<f4")}),
    "rows of another shape": _raw({8: _shaped([0.0] * 8, [4, 2])}),
    "rows of three dimensions": _raw({8: cbor2.CBORTag(40, [[1, 2, 4], _typed(85, [0.0] * 8, "<f4")])}),
    "a shape that does not fit": _raw({8: _shaped([0.0] * 7, [2, 4])}),
    "rows big-endian": _raw({8: cbor2.CBORTag(40, [[2, 4], _typed(81, [0.0] * 8, ">f4")])}),
    "rows as integers": _raw({8: cbor2.CBORTag(40, [[2, 4], _typed(72, [1] * 8, "i1")])}),
    "int8 with a negative scale": _raw(
        {8: [_typed(85, [-1.0, 1.0], "<f4"), cbor2.CBORTag(40, [[2, 4], _typed(72, [1] * 8, "i1")])]}
    ),
    "a Gram for class means": _raw({9: _typed(85, [1.0] * 10, "<f4")}),
    "soft rows for class means": _raw({10: _shaped([0.5] * 6, [2, 3])}),
    "an extra key": _raw({42: "mine"}),
    "a key of text": cbor2.dumps(cbor2.loads(_GOOD) | {"note": 1}),
    "round 0": _raw({3: 0}),
    "round as float": _raw({3: 1.0}),
    "round as text": _raw({3: "1"}),
    "a round too large": _raw({3: 2**40}),
    "a negative round": _raw({3: -1}),
    "a round that is not open": _raw({3: 5}),
    "run as text": _raw({2: "run1"}),
    "run of 8 bytes": _raw({2: b"run1run1"}),
    "another run": _raw({2: b"run2"}),
    "no run": _raw({}, drop=(2,)),
    "no round": _raw({}, drop=(3,)),
    "no method": _raw({}, drop=(4,)),
    "no rows": _raw({}, drop=(8,)),
    "no counts": _raw({}, drop=(7,)),
    "method as bytes": _raw({4: b"fedproto"}),
    "an empty method": _raw({4: ""}),
    "a method too long": _raw({4: "x" * 40}),
    "another method": _raw({4: "fedavg"}),
    "the whole hash of the bundle": _raw({5: BUNDLE}),
    "another bundle": _raw({5: b"\x09" * 4}),
    "wire version 2": _raw({1: 2}),
    "version as text": _raw({1: "1"}),
    "no type": _raw({}, drop=(0,)),
    "an unknown type": _raw({0: 77}),
    "a receipt": encode(Receipt(RUN, 1, "fedproto", "committed")),
    "a status": encode(Status(True, b"instance", 1)),
    "an announcement": encode(Announcement(RUN, 1, "open", "fedproto", BUNDLE)),
    "a global part": encode(GlobalState(RUN, 1, 1, {"prototypes": contribution().body}).parts(4096)[0]),
    "a map of indefinite length": b"\xbf" + _GOOD[1:] + b"\xff",
    "a string of indefinite length": _GOOD.replace(b"\x68fedproto", b"\x7f\x64fedp\x64roto\xff"),
    "a field twice": b"\xaa" + _GOOD[1:] + b"\x03\x01",
    "a contradicting field twice": b"\xaa" + _GOOD[1:] + b"\x03\x02",
    "cut short": _GOOD[:-3],
    "bytes after it": _GOOD + b"\x00",
    "a tag around it": b"\xd9\xd9\xf7" + _GOOD,
    "an array": cbor2.dumps([3, 1, RUN, 1, "fedproto"]),
    "a date inside": _raw({5: cbor2.CBORTag(1, 1_700_000_000)}),
    "JSON": b'{"run": "run1", "round": 1}',
    "noise": bytes(range(7, 90)),
    "a chunk without data": _raw({9: b""}, _CHUNK),
    "a chunk index beyond its count": _raw({5: 7}, _CHUNK),
    "a chunk with a short digest": _raw({8: b"four"}, _CHUNK),
    "a chunk whose index is a float": _raw({5: 0.0}, _CHUNK),
    "a chunk of a NaN": encode(split(_raw({8: _NAN}), 1024, run=RUN, round=1, method="fedproto")[0]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_honest_mistake_gets_an_answer_that_ends_it(mistake: str) -> None:
    """Rejected with a reason, under the digest of what was sent; or committed, should a reader be lenient about it."""
    payload = MISTAKES[mistake]
    decision = Ingest(lambda *key: False).decide("d1", payload, VIEW, now=0.0)
    receipt = decision.receipt
    assert receipt is not None
    assert receipt.status in ("rejected", "committed")
    if receipt.status == "rejected":
        assert receipt.reason
        own = hashlib.sha256(payload).digest()[:8]
        assert (
            receipt.digest == (decode(payload).digest if mistake == "a chunk of a NaN" else own) or "chunk" in mistake
        )
    named = tie(payload)
    if named is not None:
        assert (receipt.run, receipt.round, receipt.method) == (named.run, named.round, named.method)
    assert decode(encode(receipt)) == receipt  # it can be sent


def test_a_mistake_in_a_key_that_is_committed_does_not_unmake_it() -> None:
    decision = Ingest(lambda *key: True).decide("d1", MISTAKES["NaN sent whole"], VIEW, now=0.0)
    assert decision.receipt.status == "duplicate"


@given(st.binary(max_size=400), st.integers(0, 120))
@settings(max_examples=300, deadline=None)
def test_reading_the_key_of_anything_never_raises(noise: bytes, at: int) -> None:
    for payload in (noise, _GOOD[:at] + noise, noise + _GOOD[at:]):
        named = tie(payload)
        assert named is None or len(named.digest) == 8


def test_a_flood_of_refusals_is_answered_now_and_then() -> None:
    pace = Pace()
    assert sum(pace.allows("d1", 0.0) for _ in range(100)) == 4
    assert [pace.allows("d1", 0.5), pace.allows("d1", 1.0), pace.allows("d1", 1.1)] == [False, True, False]
    assert pace.allows("d2", 1.1)
    assert sum(pace.allows(f"x{i}", 2.0) for i in range(10_000)) <= 1_000

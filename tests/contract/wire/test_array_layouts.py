"""A message that is read by another's layout is what decoding it alone gives, whichever of its bytes differ."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from protofleet.contract.errors import WireError
from protofleet.contract.wire import codec
from protofleet.contract.wire.array_layouts import MAX_ITEMS, Layout, arrays_in
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import ClassRows, Contribution
from tests.attacks.targets.wire import frozen_messages

RUN = b"\x01\x02\x03\x04"
CONTRIBUTIONS = [payload for payload in frozen_messages() if isinstance(decode(payload), Contribution)]


def _told(payload: bytes) -> bytes | str:
    try:
        return encode(decode(payload), "f64")
    except WireError as error:
        return str(error)


@contextmanager
def _learned(*payloads: bytes) -> Iterator[None]:
    """With the layouts of these messages and no other."""
    before = dict(codec._LAYOUTS)
    codec._LAYOUTS.clear()
    try:
        for payload in payloads:
            decode(payload)
        yield
    finally:
        codec._LAYOUTS.clear()
        codec._LAYOUTS.update(before)


def _alone(payload: bytes) -> bytes | str:
    with _learned():
        return _told(payload)


def _contribution(rows: NDArray[np.floating], counts: list[int], classes: list[int] | None = None) -> Contribution:
    numbers = np.array(range(len(rows)) if classes is None else classes, np.uint16)
    return Contribution(RUN, 1, "fedproto", RUN, ClassRows(numbers, rows), np.array(counts, np.uint64))


def test_of_messages_of_one_shape_one_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    monkeypatch.setattr(codec, "_load", lambda payload, load=codec._load: loaded.append(payload) or load(payload))
    rng = np.random.default_rng(0)
    tables = [rng.normal(size=(3, 5)).astype(np.float32) for _ in range(4)]
    payloads = [encode(_contribution(rows, [at + 1, 7, 9])) for at, rows in enumerate(tables)]
    with _learned():
        for at, (payload, rows) in enumerate(zip(payloads, tables, strict=True)):
            message = decode(payload)
            assert isinstance(message, Contribution)
            assert message.body.rows.tobytes() == rows.tobytes()
            assert message.counts.tolist() == [at + 1, 7, 9]
            assert message.counts.dtype == np.uint64
            assert message.samples == at + 17
            assert not message.body.rows.flags.writeable
    assert loaded == payloads[:1]


@pytest.mark.parametrize("payload", CONTRIBUTIONS, ids=range(len(CONTRIBUTIONS)))
def test_any_byte_may_differ(payload: bytes) -> None:
    drawn = random.Random(0)
    for at in sorted(drawn.sample(range(len(payload)), min(40, len(payload)))):
        other = payload[:at] + bytes([payload[at] ^ (1 << drawn.randrange(8))]) + payload[at + 1 :]
        with _learned(payload):
            found = _told(other)
        assert found == _alone(other)


@pytest.mark.parametrize("payload", CONTRIBUTIONS, ids=range(len(CONTRIBUTIONS)))
def test_only_what_is_in_arrays_may_differ(payload: bytes) -> None:
    layout, spans = Layout(payload, arrays_in(payload), codec._load(payload)), arrays_in(payload)
    inside = {at for start, stop in spans for at in range(start, stop)}
    for at in range(len(payload)):
        other = payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :]
        assert layout.fits(other) == (at in inside)


@pytest.mark.parametrize(
    ("rows", "counts", "classes"),
    [
        ([[1.0, np.nan]], [1], [0]),
        ([[1.0, np.inf]], [1], [0]),
        ([[1.0, -2e30]], [1], [0]),
        ([[1.0, 2.0]], [0], [0]),
        ([[1.0, 2.0], [3.0, 4.0]], [1, 1], [1, 0]),
    ],
)
def test_wrong_numbers_are_refused_in_the_same_words(
    rows: list[list[float]], counts: list[int], classes: list[int]
) -> None:
    good = encode(_contribution(np.ones((len(rows), 2)), [1] * len(rows)))
    (of_classes, of_counts, of_rows) = (slice(*span) for span in arrays_in(good))
    forged = bytearray(good)
    forged[of_classes], forged[of_counts] = bytes(classes), bytes(counts)
    forged[of_rows] = np.array(rows, "<f4").tobytes()
    with _learned(good):
        found = _told(bytes(forged))
    assert isinstance(found, str)
    assert found == _alone(bytes(forged))


def test_a_limit_holds_for_a_message_of_a_known_layout_too() -> None:
    payload = encode(_contribution(np.ones((1, 2)), [1]))
    with _learned(payload), pytest.raises(WireError, match="at most"):
        decode(payload, limit_bytes=len(payload) - 1)


@pytest.mark.parametrize(("devices", "what"), [(0, "triangle"), (2, "exact sums")])
def test_a_triangle_and_exact_sums_are_looked_at(devices: int, what: str) -> None:
    kind = np.int64 if devices else np.float64
    rows = ClassRows(np.zeros(1, np.uint16), np.ones((1, 1), kind))
    good = encode(
        replace(_contribution(np.ones((1, 1)), [1]), body=rows, triangle=np.ones(1, kind), devices=devices), "f64"
    )
    wrong = np.array([(1 << 62) + 1], "<i8") if devices else np.array([np.nan], "<f8")
    start, stop = arrays_in(good)[-1]
    forged = good[:start] + wrong.tobytes() + good[stop:]
    with _learned(good):
        decode(good)
        with pytest.raises(WireError, match=what):
            decode(forged)


def test_layouts_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_MAX_LAYOUTS", 4)
    with _learned():
        for width in range(1, 12):
            decode(encode(_contribution(np.ones((1, width)), [1])))
            assert len(codec._LAYOUTS) <= codec._MAX_LAYOUTS


def test_too_many_items_are_refused_before_anything_is_built() -> None:
    with pytest.raises(WireError, match="at most 4,096 keys"):
        arrays_in(b"\x99\xff\xff" + b"\xa0" * (MAX_ITEMS + 1))


def test_what_is_cut_off_is_refused_as_such_however_much_it_announces() -> None:
    with pytest.raises(WireError, match="deterministic CBOR"):
        decode(b"\x99\xff\xff" + b"\xa0" * 100)

"""Any bytes as a message: they are refused with a `WireError`, or are a message that comes back as it was; and what
they are does not depend on which messages were decoded before."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path

from protofleet.contract.errors import WireError
from protofleet.contract.wire import codec
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Message
from tests.attacks.promises import is_one_line

LONGEST_BYTES = 4096
EXACT = ("f64", "f32", "f16")  # int8 rounds again: its scale comes of the numbers
_TESTS = Path(__file__).parents[2]


def run(data: bytes) -> None:
    found = _decoded(data)
    before = dict(codec._LAYOUTS)
    codec._LAYOUTS.clear()
    alone = _decoded(data)
    codec._LAYOUTS.update(before)
    if isinstance(found, WireError):
        is_one_line(found)
        assert str(alone) == str(found), "refused otherwise than by itself"
        return
    assert not isinstance(alone, WireError), "read by another's layout, and no message by itself"
    assert encode(found, "f64") == encode(alone, "f64"), "another message by another's layout"
    check_message(found)


def _decoded(data: bytes) -> Message | WireError:
    try:
        return decode(data)
    except WireError as error:
        return error


def check_message(message: Message) -> None:
    """What was decoded is encoded in every encoding that holds its numbers, and that is a fixed point."""
    widest = encode(message, "f64")
    assert encode(decode(widest), "f64") == widest, "f64 loses something"
    for encoding in EXACT[1:]:
        with contextlib.suppress(WireError):  # numbers that do not fit
            once = encode(message, encoding)
            assert encode(decode(once), encoding) == once, f"{encoding} is no fixed point"
    with contextlib.suppress(WireError):
        assert type(decode(encode(message, "int8"))) is type(message)


def frozen_messages() -> Iterable[bytes]:
    """Every message of the golden file, and of the sample files of each version."""
    golden = json.loads((_TESTS / "golden" / "wire_v2.json").read_text())
    for each in golden["messages"].values():
        yield from map(bytes.fromhex, each["bytes"].values())


def seeds() -> Iterable[bytes]:
    yield from frozen_messages()
    for path in sorted((_TESTS / "files").glob("v*/messages.json")):
        yield from map(bytes.fromhex, _hex_strings(json.loads(path.read_text())))


def _hex_strings(found: object) -> Iterable[str]:
    if isinstance(found, dict):
        for inner in found.values():
            yield from _hex_strings(inner)
    elif isinstance(found, list):
        for inner in found:
            yield from _hex_strings(inner)
    elif isinstance(found, str) and len(found) > 8 and len(found) % 2 == 0 and set(found) <= set("0123456789abcdef"):
        yield found

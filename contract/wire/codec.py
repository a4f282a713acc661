"""Messages to bytes and back: CBOR with typed arrays, as `messages.cddl` says.

Guarantees:

- `encode` is deterministic (RFC 8949 section 4.2): a message has one encoding for each tensor encoding.
- `decode` takes any bytes from anyone. It returns a valid message or raises `WireError`, and nothing else.
- `decode` never allocates more than a small multiple of the bytes it was given.

Unknown fields:

- What comes down may gain fields. A device ignores unknown keys of an announcement, its offer, a global part, a receipt
  or a piece.
- What goes up is closed: a contribution, a chunk, a status, a request or an enrolment has the keys that `messages.cddl`
  lists and no other, so nothing else can be sent (docs/decisions/084). Closed are also a signed message, and the
  question to a helper and its answer.
- The content of a signed message is decoded only after its signature was found to hold.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any, Final

import cbor2

from protofleet.contract.errors import WireError
from protofleet.contract.wire.array_layouts import Layout, arrays_in
from protofleet.contract.wire.fields import WIRE_VERSION, read_map, table_of, write_map
from protofleet.contract.wire.messages import Contribution, Encoding, Message
from protofleet.contract.wire.tensors import typed_array

__all__ = ["CONTENT_TYPE", "MAX_MESSAGE_BYTES", "ODD_TAGS", "WIRE_VERSION", "decode", "encode"]

CONTENT_TYPE: Final = "application/cbor"
MAX_MESSAGE_BYTES: Final = 1 << 28

_MAX_DEPTH = 8
_MAX_LAYOUTS = 256  # a fleet has one for each number of classes that its devices hold, and each width of their counts


def encode(message: Message, encoding: Encoding = "f32") -> bytes:
    """The bytes of `message`.

    Args:
        encoding: for the tensors of contributions and global parts; other messages have none.

    Raises:
        WireError: when a number does not fit the encoding (float16 overflows at 65,504).
    """
    return bytes(cbor2.dumps(write_map(message, encoding), canonical=True))


def decode(payload: bytes, *, limit_bytes: int = MAX_MESSAGE_BYTES) -> Message:
    """The message in `payload`.

    Raises:
        WireError: and only that, when the bytes are not exactly one message of this wire version.
    """
    if len(payload) > limit_bytes:
        raise WireError("message", expected=f"at most {limit_bytes} bytes", got=f"{len(payload)} bytes")
    known = _LAYOUTS.get(len(payload))
    if known is not None and known[0].fits(payload):
        layout, words, read_again = known
        return Contribution.in_words(words, **read_again(layout.arrays(payload)))
    spans = arrays_in(payload)
    raw = _load(payload)
    number, version = raw.get(0), raw.get(1)
    if type(version) is not int or version != WIRE_VERSION:  # it may be an array, which compares otherwise
        raise WireError(
            "message", expected=f"wire version {WIRE_VERSION}", got=version, hint="the same release on both ends"
        )
    kind = Message.by_number.get(number) if type(number) is int else None
    if kind is None:
        raise WireError("message", expected=f"a type from 1 to {len(Message.by_number)}", got=number)
    message = read_map(kind, raw)
    if isinstance(message, Contribution) and message.share is None:  # beside a share is a seed like no other
        if len(_LAYOUTS) >= _MAX_LAYOUTS:
            _LAYOUTS.clear()
        _LAYOUTS[len(payload)] = Layout(payload, spans, raw), message.words, table_of(Contribution).reader_again(raw)
    return message


def _load(payload: bytes) -> dict[int, Any]:
    stream = io.BytesIO(payload)
    try:
        decoder = cbor2.CBORDecoder(
            stream,
            tag_hook=typed_array,
            semantic_decoders=_REFUSED,
            max_depth=_MAX_DEPTH,
            allow_indefinite=False,
            allow_duplicate_keys=False,
        )
        value = decoder.decode()
    except WireError:
        raise
    except Exception as error:  # whatever cbor2 raises for hostile bytes, and it is not one class, is a WireError to us
        if isinstance(error.__cause__, WireError):  # ours, from within a tag
            raise error.__cause__ from None
        raise WireError("message", expected="deterministic CBOR", got=error) from None
    if stream.tell() != len(payload):
        raise WireError("message", expected="one CBOR item", got=f"{len(payload) - stream.tell()} bytes after it")
    if type(value) is not dict:
        raise WireError("message", expected="a map", got=type(value).__name__)
    return value


def _refuse(*_: Any) -> Any:
    raise WireError("message", expected="only typed-array tags", got="another CBOR tag")


# cbor2 turns these tags into dates, big numbers, regular expressions and shared references: none belongs on this wire.
ODD_TAGS = (0, 1, 2, 3, 4, 5, 25, 28, 29, 30, 35, 36, 37, 52, 54, 100, 256, 258, 260, 261, 1004, 43000, 55799)
_REFUSED: Mapping[int, Callable[..., Any]] = dict.fromkeys(ODD_TAGS, _refuse)

# Of contributions, by length: the layout of the last one that had it, its words, and what reads arrays like its own.
_LAYOUTS: dict[int, tuple[Layout, Mapping[str, Any], Callable[[Mapping[int, Any]], dict[str, Any]]]] = {}

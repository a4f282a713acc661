"""Which contribution a message is about, when the message itself cannot be decoded.

A device that makes an honest mistake (a NaN, a count as float, a field too many) must get an answer, or it sends the
same bytes for ever. `decode` refuses such a message as a whole. Here only its outer map is read, field by field until
something cannot be read at all. Of the fields only those count that name a contribution: type, run, round, method and,
in a chunk, the digest.

The work is bounded for any bytes: the first `_HEAD_BYTES`, at most `_MOST_FIELDS` fields, no nesting beyond `_DEPTH`.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from typing import Any

import cbor2

from protofleet.contract.wire.messages import MAX_ROUND

__all__ = ["Tie", "digest_of", "tie"]

_HEAD_BYTES = 1 << 16  # what names a contribution comes first, in the order that the wire asks for
_MOST_FIELDS = 32
_DEPTH = 8
_TYPE, _RUN, _ROUND, _METHOD, _DIGEST = 0, 2, 3, 4, 8
_CHUNK = 4
_NAMED = (_TYPE, _RUN, _ROUND, _METHOD, _DIGEST)
_ODD_TAGS = (0, 1, 2, 3, 4, 5, 25, 28, 29, 30, 35, 36, 37, 52, 54, 100, 256, 258, 260, 261, 1004, 43000, 55799)


@dataclass(frozen=True)
class Tie:
    """The key that a message names, and the digest of the contribution that it is, or is a slice of."""

    run: bytes
    round: int
    method: str
    digest: bytes


def tie(payload: bytes) -> Tie | None:
    """What `payload` names; None when it names no contribution, or two."""
    fields = _outer(payload[:_HEAD_BYTES])
    run, method, number = fields.get(_RUN), fields.get(_METHOD), fields.get(_ROUND)
    if type(number) is float and number.is_integer():
        number = int(number)
    if type(run) is not bytes or len(run) != 4 or type(method) is not str or not 1 <= len(method) <= 32:
        return None
    if type(number) is not int or not 1 <= number <= MAX_ROUND:
        return None
    digest = fields.get(_DIGEST)
    if fields.get(_TYPE) != _CHUNK or type(digest) is not bytes or len(digest) != 8:
        digest = digest_of(payload)
    return Tie(run, number, method, digest)


def digest_of(payload: bytes) -> bytes:
    """The first 8 bytes of the SHA-256 of an encoded contribution: what chunks and refusals call it."""
    return hashlib.sha256(payload).digest()[:8]


def _outer(payload: bytes) -> dict[int, Any]:
    """The named fields of the outer map, as far as it can be read; empty when one of them is there twice."""
    head = payload[:1]
    count = _MOST_FIELDS if head == b"\xbf" else head[0] & 0x1F if head and head[0] >> 5 == 5 else 0
    fields: dict[int, Any] = {}
    offset = 1
    for _ in range(min(count, _MOST_FIELDS)):
        key, offset = _item(payload, offset)
        value, offset = _item(payload, offset)
        if type(key) is not int or offset > len(payload):
            break
        if key in fields and fields[key] != value:
            return {}
        if key in _NAMED:
            fields[key] = value
    return fields


def _item(payload: bytes, offset: int) -> tuple[Any, int]:
    """One CBOR item and where the next begins; past the end when it cannot be read. Tensors are skipped."""
    stream = io.BytesIO(payload)
    stream.seek(offset)
    try:
        decoder = cbor2.CBORDecoder(stream, tag_hook=_skip, semantic_decoders=_SKIPPED, max_depth=_DEPTH)
        value = decoder.decode()
    except Exception:  # whatever cbor2 raises for hostile bytes: nothing further can be read
        return None, len(payload) + 1
    return value, stream.tell()


def _skip(*_: object) -> None:
    return None


_SKIPPED = dict.fromkeys(_ODD_TAGS, _skip)

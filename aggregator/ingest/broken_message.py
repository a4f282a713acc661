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
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import cbor2

from protofleet.contract.wire.codec import ODD_TAGS
from protofleet.contract.wire.fields import table_of
from protofleet.contract.wire.messages import Chunk, Contribution

__all__ = ["Tie", "digest_of", "tie"]

_HEAD_BYTES = 1 << 16  # what names a contribution comes first, in the order that the wire asks for
_MOST_FIELDS = 32
_DEPTH = 8
_TYPE = 0


@dataclass(frozen=True)
class Tie:
    """The key that a message names, and the digest of the contribution that it is, or is a slice of."""

    run: bytes
    round: int
    method: str
    digest: bytes


def tie(payload: bytes) -> Tie | None:
    """What `payload` names; None when it names no contribution, or two."""
    run, number, method = (table_of(Contribution)[name] for name in ("run", "round", "method"))
    of_chunk = table_of(Chunk)["digest"]
    fields = _outer(payload[:_HEAD_BYTES], {_TYPE, run.key, number.key, method.key, of_chunk.key})
    if type(fields.get(number.key)) is float and fields[number.key].is_integer():
        fields[number.key] = int(fields[number.key])
    if not all(slot.is_one(fields.get(slot.key)) for slot in (run, number, method)):
        return None
    is_chunk = fields.get(_TYPE) == Chunk.number and of_chunk.is_one(fields.get(of_chunk.key))
    digest = fields[of_chunk.key] if is_chunk else digest_of(payload)
    return Tie(fields[run.key], fields[number.key], fields[method.key], digest)


def digest_of(payload: bytes) -> bytes:
    """The first 8 bytes of the SHA-256 of an encoded contribution: what chunks and refusals call it."""
    return hashlib.sha256(payload).digest()[:8]


def _outer(payload: bytes, named: Container[int | None]) -> dict[int | None, Any]:
    """The named fields of the outer map, as far as it can be read; empty when one of them is there twice."""
    head = payload[:1]
    count = _MOST_FIELDS if head == b"\xbf" else head[0] & 0x1F if head and head[0] >> 5 == 5 else 0
    fields: dict[int | None, Any] = {}
    offset = 1
    for _ in range(min(count, _MOST_FIELDS)):
        key, offset = _item(payload, offset)
        value, offset = _item(payload, offset)
        if type(key) is not int or offset > len(payload):
            break
        if key in fields and fields[key] != value:
            return {}
        if key in named:
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


_SKIPPED = dict.fromkeys(ODD_TAGS, _skip)

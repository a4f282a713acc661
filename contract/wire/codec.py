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

Tensors travel little-endian, in one of these forms:

- f64, f32, f16 (RFC 8746 tags 86, 85, 84);
- int8, with one float32 scale for each row (value = scale · int8);
- int32, with float64 units (`contract/wire/scaled_integers.py`);
- int64 (tag 79), for the sums of a gateway;
- integers, as the narrowest unsigned array that holds them.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Final, get_args

import cbor2
import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import WireError
from protofleet.contract.sums.triangle import triangle_width
from protofleet.contract.wire.array_layouts import Layout, arrays_in
from protofleet.contract.wire.envelopes import Enrolment, Mark, Signed
from protofleet.contract.wire.helper_messages import HelperTerms, Opened, Opening, OpeningStatus, SealedSeed
from protofleet.contract.wire.messages import (
    Announcement,
    Chunk,
    ClassRows,
    Contribution,
    Encoding,
    GlobalPart,
    Message,
    Offer,
    Phase,
    Piece,
    Receipt,
    ReceiptStatus,
    Request,
    Rival,
    Standing,
    Status,
)
from protofleet.contract.wire.scaled_integers import row_values, scaled_rows, scaled_triangle, triangle_values

__all__ = ["CONTENT_TYPE", "MAX_MESSAGE_BYTES", "WIRE_VERSION", "decode", "encode"]

WIRE_VERSION: Final = 2
CONTENT_TYPE: Final = "application/cbor"
MAX_MESSAGE_BYTES: Final = 1 << 28

_PHASES: tuple[Phase, ...] = get_args(Phase)
_ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
_STANDINGS: tuple[Standing, ...] = get_args(Standing)
_STATUSES: tuple[ReceiptStatus, ...] = get_args(ReceiptStatus)
_OPENINGS: tuple[OpeningStatus, ...] = get_args(OpeningStatus)

_FURTHER = (10, 11, 12)  # keys of a contribution's fields of class rows after the first
_MULTI_DIMENSIONAL = 40
_NAMES = {64: "u1", 69: "<u2", 70: "<u4", 71: "<u8", 72: "i1", 78: "<i4", 79: "<i8", 84: "<f2", 85: "<f4", 86: "<f8"}
_DTYPES: dict[int, np.dtype[Any]] = {tag: np.dtype(name) for tag, name in _NAMES.items()}
_TAGS = {dtype: tag for tag, dtype in _DTYPES.items()}
_FLOATS: dict[str, np.dtype[np.floating]] = {"f64": np.dtype("<f8"), "f32": np.dtype("<f4"), "f16": np.dtype("<f2")}
_MAX_DEPTH = 8
_MAX_LAYOUTS = 256  # a fleet has one for each number of classes that its devices hold, and each width of their counts


# ── encode ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def encode(message: Message, encoding: Encoding = "f32") -> bytes:
    """The bytes of `message`.

    Args:
        encoding: for the tensors of contributions and global parts; other messages have none.

    Raises:
        WireError: when a number does not fit the encoding (float16 overflows at 65,504).
    """
    body = _ENCODERS[type(message)](message, encoding)
    return bytes(cbor2.dumps({0: _TYPES[type(message)], 1: WIRE_VERSION, **body}, canonical=True))


def _encode_announcement(m: Announcement, encoding: Encoding) -> dict[int, Any]:
    return {
        2: m.run,
        3: m.round,
        4: _PHASES.index(m.phase),
        5: m.method,
        6: m.bundle,
        7: float(m.deadline_s),
        8: float(m.fraction),
        9: m.seed,
        10: m.global_version,
        11: _ENCODINGS.index(m.encoding),
        12: m.min_samples,
        13: m.limit_bytes,
        **({14: list(m.others)} if m.others else {}),
        **({15: m.extractor} if m.extractor else {}),
        **({16: list(m.class_lists)} if m.class_lists else {}),
        **({17: _encode_offer(m.offer)} if m.offer else {}),
        **({18: _integers(np.array(m.withheld))} if m.withheld else {}),
        **({19: m.issued} if m.issued else {}),
        **({20: _encode_helper_terms(m.helper)} if m.helper else {}),
        **({21: m.epoch} if m.epoch else {}),
        **({22: m.max_samples} if m.max_samples else {}),
        **({24: m.proof} if m.proof else {}),
    }


def _encode_helper_terms(m: HelperTerms) -> dict[int, Any]:
    return {0: m.key, 1: m.least, 2: m.scale_bits}


def _encode_offer(m: Offer) -> dict[int, Any]:
    return {0: m.sha256, 1: m.version, 2: m.size_bytes, 3: float(m.fraction), 4: m.fleet}


def _encode_global_part(m: GlobalPart, encoding: Encoding) -> dict[int, Any]:
    return {
        2: m.run,
        3: m.round,
        4: m.version,
        5: m.part,
        6: m.parts,
        7: m.kind,
        8: _integers(m.body.classes),
        9: _rows(m.body.rows, encoding),
    }


def _encode_contribution(m: Contribution, encoding: Encoding) -> dict[int, Any]:
    body = {
        2: m.run,
        3: m.round,
        4: m.method,
        5: m.bundle,
        6: _integers(m.body.classes),
        7: _integers(m.counts),
        8: _rows(m.body.rows, encoding),
    }
    if m.triangle is not None:
        body[9] = _vector(m.triangle, encoding)
    body |= {key: _rows(rows, encoding) for key, rows in zip(_FURTHER, m.further, strict=False)}
    if m.extractor:
        body[13] = m.extractor
    if m.standing is not None:
        body[15] = _STANDINGS.index(m.standing)
    if m.class_list:
        body[16] = m.class_list
    if m.share is not None:
        body |= {17: _typed(m.share), 18: m.seed}
    if m.devices:
        body[19] = m.devices
    return body


def _encode_chunk(m: Chunk, encoding: Encoding) -> dict[int, Any]:
    return {2: m.run, 3: m.round, 4: m.method, 5: m.index, 6: m.count, 7: m.total_bytes, 8: m.digest, 9: m.data}


def _encode_receipt(m: Receipt, encoding: Encoding) -> dict[int, Any]:
    fields = {2: m.run, 3: m.round, 4: m.method, 5: _STATUSES.index(m.status), 6: m.reason, 7: m.missing}
    fields |= ({8: m.digest} if m.digest else {}) | ({9: m.held} if m.held else {})
    return fields | ({} if m.counts is None else {10: m.counts}) | ({11: m.why} if m.why else {})


def _encode_status(m: Status, encoding: Encoding) -> dict[int, Any]:
    fields = {2: m.online, 3: m.instance, 4: m.boot, 5: m.profile, 6: dict(m.versions), 7: dict(m.metrics)}
    return (
        fields
        | ({8: m.issued} if m.issued else {})
        | ({9: dict(map(_encode_mark, m.heard))} if m.heard else {})
        | ({10: {0: m.rival.instance, 1: m.rival.age_s, 2: m.rival.boot, 3: m.rival.board}} if m.rival else {})
    )


def _encode_mark(m: Mark) -> tuple[bytes, dict[int, Any]]:
    return m.key_id, {0: m.issued, 1: m.proof}


def _encode_request(m: Request, encoding: Encoding) -> dict[int, Any]:
    return {2: m.run, 3: m.bundle, 4: m.offset, 5: m.wanted_bytes}


def _encode_piece(m: Piece, encoding: Encoding) -> dict[int, Any]:
    return {2: m.run, 3: m.bundle, 4: m.offset, 5: m.data}


def _encode_signed(m: Signed, encoding: Encoding) -> dict[int, Any]:
    return {2: m.key_id, 3: m.payload, 4: m.signature}


def _encode_enrolment(m: Enrolment, encoding: Encoding) -> dict[int, Any]:
    return {2: m.key, 3: m.proof}


def _encode_opening(m: Opening, encoding: Encoding) -> dict[int, Any]:
    return {2: m.run, 3: m.round, 4: m.method, 5: m.digest, 6: m.part, 7: m.parts, 8: dict(m.seeds)}


def _encode_opened(m: Opened, encoding: Encoding) -> dict[int, Any]:
    fields = {2: m.run, 3: m.round, 4: m.method, 5: m.digest, 6: m.part, 7: m.parts, 8: _OPENINGS.index(m.status)}
    return fields | {9: _typed(m.words), 10: m.reason, 11: dict(m.refused)}


def _encode_sealed_seed(m: SealedSeed, encoding: Encoding) -> dict[int, Any]:
    fields = {2: m.run, 3: m.round, 4: m.method, 5: m.words, 6: m.share}
    return fields | {7: m.least, 8: m.terms, 9: m.sealed}


def _typed(array: NDArray[Any]) -> cbor2.CBORTag:
    return cbor2.CBORTag(_TAGS[array.dtype], np.ascontiguousarray(array).tobytes())


def _integers(values: NDArray[Any]) -> cbor2.CBORTag:
    top = int(values.max()) if values.size else 0
    dtype = next(d for d in ("u1", "<u2", "<u4") if top <= np.iinfo(d).max)
    return _typed(values.astype(dtype))


def _cast(values: NDArray[np.floating], encoding: Encoding) -> NDArray[np.floating]:
    with np.errstate(over="ignore"):
        cast = values.astype(_FLOATS[encoding])
    if not np.isfinite(cast).all():
        raise WireError(
            "tensor", expected=f"numbers that fit {encoding}", got=float(np.abs(values).max()), hint="a wider encoding"
        )
    return cast


def _quantise(rows: NDArray[np.floating]) -> tuple[NDArray[np.floating], NDArray[np.int8]]:
    scales = _cast(np.abs(rows).max(axis=-1, initial=0.0) / 127.0, "f32")
    safe = np.where(scales > 0, scales, 1.0)[..., None]
    return scales, np.clip(np.rint(rows / safe), -127, 127).astype(np.int8)


def _rows(rows: NDArray[np.floating], encoding: Encoding) -> Any:
    dims = list(rows.shape)
    if rows.dtype.kind == "i":
        return cbor2.CBORTag(_MULTI_DIMENSIONAL, [dims, _typed(rows.astype("<i8"))])
    if encoding == "int8":
        scales, values = _quantise(rows)
        return [_typed(scales), cbor2.CBORTag(_MULTI_DIMENSIONAL, [dims, _typed(values)])]
    if encoding == "int32":
        units, integers = scaled_rows(rows)
        return [_typed(units), cbor2.CBORTag(_MULTI_DIMENSIONAL, [dims, _typed(integers)])]
    return cbor2.CBORTag(_MULTI_DIMENSIONAL, [dims, _typed(_cast(rows, encoding))])


def _vector(values: NDArray[np.floating], encoding: Encoding) -> Any:
    if values.dtype.kind == "i":
        return _typed(values.astype("<i8"))
    if encoding == "int8":
        scales, quantised = _quantise(values[None])
        return [_typed(scales), _typed(quantised[0])]
    if encoding == "int32":
        return [_typed(part) for part in scaled_triangle(values)]
    return _typed(_cast(values, encoding))


# ── decode ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def decode(payload: bytes, *, limit_bytes: int = MAX_MESSAGE_BYTES) -> Message:
    """The message in `payload`.

    Raises:
        WireError: and only that, when the bytes are not exactly one message of this wire version.
    """
    if len(payload) > limit_bytes:
        raise WireError("message", expected=f"at most {limit_bytes} bytes", got=f"{len(payload)} bytes")
    layout, words = _LAYOUTS.get(len(payload), _NO_LAYOUT)
    if layout is not None and layout.fits(payload):
        return Contribution.in_words(words, **_numbers(_LikeFields(layout.fields(payload))))
    spans = arrays_in(payload)
    raw = _load(payload)
    fields = _Fields(raw)
    kind, version = fields.integer(0), fields.integer(1)
    if version != WIRE_VERSION:
        raise WireError(
            "message", expected=f"wire version {WIRE_VERSION}", got=version, hint="the same release on both ends"
        )
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise WireError("message", expected="a type from 1 to 13", got=kind)
    message = decoder(fields)
    fields.finish(closed=kind in _CLOSED)
    if isinstance(message, Contribution) and message.share is None:  # beside a share is a seed like no other
        if len(_LAYOUTS) >= _MAX_LAYOUTS:
            _LAYOUTS.clear()
        _LAYOUTS[len(payload)] = Layout(payload, spans, raw), message.words
    return message


def _load(payload: bytes) -> dict[int, Any]:
    stream = io.BytesIO(payload)
    try:
        decoder = cbor2.CBORDecoder(
            stream,
            tag_hook=_tag,
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


def _tag(tag: cbor2.CBORTag, immutable: bool = False) -> NDArray[Any]:
    """Typed arrays, and shaped ones, as numpy views of the received bytes."""
    if tag.tag == _MULTI_DIMENSIONAL:
        return _shaped(tag.value)
    dtype = _DTYPES.get(tag.tag)
    if dtype is None or type(tag.value) is not bytes or len(tag.value) % dtype.itemsize:
        raise WireError("tensor", expected="a typed array of RFC 8746", got=f"tag {tag.tag}")
    return np.frombuffer(tag.value, dtype)


def _shaped(value: Any) -> NDArray[Any]:
    if not isinstance(value, list | tuple) or len(value) != 2 or not isinstance(value[1], np.ndarray):
        raise WireError("tensor", expected="[dimensions, typed array]", got=type(value).__name__)
    dims, flat = value
    is_pair = isinstance(dims, list | tuple) and len(dims) == 2
    fits = is_pair and all(type(size) is int and 0 <= size < 1 << 32 for size in dims)
    if not fits or flat.ndim != 1 or dims[0] * dims[1] != flat.size:
        raise WireError(
            "tensor", expected="two dimensions that fit the array", got=f"{dims!r} for {flat.size} numbers"[:120]
        )
    return flat.reshape(dims)


def _refuse(*_: Any) -> Any:
    raise WireError("message", expected="only typed-array tags", got="another CBOR tag")


# cbor2 turns these tags into dates, big numbers, regular expressions and shared references: none belongs on this wire.
_REFUSED: Mapping[int, Callable[..., Any]] = dict.fromkeys(
    (0, 1, 2, 3, 4, 5, 25, 28, 29, 30, 35, 36, 37, 52, 54, 100, 256, 258, 260, 261, 1004, 43000, 55799), _refuse
)


class _Fields:
    """Typed access to a decoded map; each field must be taken exactly once."""

    __slots__ = ("_raw", "_taken")

    def __init__(self, raw: dict[int, Any]) -> None:
        self._raw = raw
        self._taken: set[int] = set()

    def take(self, key: int, what: str, *kinds: type) -> Any:
        value = self._raw.get(key)
        if type(value) not in kinds:
            raise WireError(f"field {key}", expected=what, got=type(value).__name__ if key in self._raw else "nothing")
        self._taken.add(key)
        return value

    def integer(self, key: int) -> int:
        value: int = self.take(key, "an unsigned integer", int)
        if value < 0:  # it has 64 bits at most, since larger ones come under a tag that is refused
            raise WireError(f"field {key}", expected="an unsigned integer", got=value)
        return value

    def number(self, key: int) -> float:
        return float(self.take(key, "a float", float))

    def text(self, key: int) -> str:
        value: str = self.take(key, "text", str)
        return value

    def binary(self, key: int) -> bytes:
        value: bytes = self.take(key, "bytes", bytes)
        return value

    def binaries(self, key: int) -> tuple[bytes, ...]:
        value = self.take(key, "a list of bytes", list, tuple)
        if not value or not all(type(entry) is bytes for entry in value):
            raise WireError(f"field {key}", expected="a list of bytes", got="another")
        return tuple(value)

    def inner(self, key: int) -> _Fields:
        return _Fields(self.take(key, "a map", dict))

    def inners(self, key: int) -> dict[bytes, _Fields]:
        value = self.take(key, "a map of maps", dict)
        if not value or not all(type(name) is bytes and type(entry) is dict for name, entry in value.items()):
            raise WireError(f"field {key}", expected="bytes to maps", got="another")
        return {name: _Fields(entry) for name, entry in value.items()}

    def one_of(self, key: int, names: tuple[Any, ...]) -> Any:
        index = self.integer(key)
        if index >= len(names):
            raise WireError(f"field {key}", expected=f"0 to {len(names) - 1}", got=index)
        return names[index]

    def entries(self, key: int, kind: type) -> dict[str, Any]:
        value = self.take(key, "a map of text", dict)
        if not all(type(name) is str and type(entry) is kind for name, entry in value.items()):
            raise WireError(f"field {key}", expected=f"text to {kind.__name__}", got="other entries")
        return dict(value)

    def figures(self, key: int) -> dict[str, float]:
        """Text to numbers; a whole number may have been written as an integer."""
        value = self.take(key, "a map of text", dict)
        if not all(type(name) is str and type(entry) in (float, int) for name, entry in value.items()):
            raise WireError(f"field {key}", expected="text to numbers", got="other entries")
        return {name: float(entry) for name, entry in value.items()}

    def unsigned(self, key: int) -> NDArray[Any]:
        value = self.take(key, "an unsigned array", np.ndarray)
        if value.ndim != 1 or value.dtype.kind != "u" or value.dtype.itemsize > 4:
            raise WireError(f"field {key}", expected="an unsigned array", got=f"{value.dtype} {value.shape}")
        return np.asarray(value)

    def words(self, key: int) -> NDArray[np.uint64]:
        value = self.take(key, "64-bit words", np.ndarray)
        if value.ndim != 1 or value.dtype != np.dtype("<u8"):
            raise WireError(f"field {key}", expected="64-bit words", got=f"{value.dtype} {value.shape}")
        return np.asarray(value)

    def reals(self, key: int, ndim: int) -> NDArray[np.floating]:
        value = self.take(key, "an array of numbers", np.ndarray, list, tuple)
        array = _dequantise(key, value) if isinstance(value, list | tuple) else value
        if array.ndim != ndim or array.dtype.kind != "f":
            raise WireError(f"field {key}", expected=f"floats in {ndim} dimensions", got=f"{array.dtype} {array.shape}")
        return np.asarray(array)

    def exact(self, key: int, ndim: int) -> NDArray[Any]:
        """A gateway's numbers, as 64-bit integers."""
        array = self.take(key, "64-bit integers", np.ndarray)
        if array.ndim != ndim or array.dtype != np.dtype("<i8"):
            got = f"{array.dtype} {array.shape}"
            raise WireError(f"field {key}", expected=f"64-bit integers in {ndim} dimensions", got=got)
        return np.asarray(array)

    def rows(self, classes_key: int, rows_key: int) -> ClassRows:
        return ClassRows(self.class_numbers(classes_key), self.reals(rows_key, 2))

    def class_numbers(self, key: int) -> NDArray[np.uint16]:
        classes = self.unsigned(key)
        if classes.dtype.itemsize > 2:
            raise WireError(f"field {key}", expected="uint8 or uint16 class numbers", got=str(classes.dtype))
        return classes.astype(np.uint16)

    def has(self, key: int) -> bool:
        return key in self._raw

    def finish(self, *, closed: bool) -> None:
        for key in self._raw:
            is_known = type(key) is int and (key in self._taken or (not closed and max(self._taken) < key < 1 << 32))
            if not is_known:
                raise WireError("message", expected="no further fields", got=f"field {str(key)[:40]}")


class _LikeFields(_Fields):
    """The fields of a message that a layout fits. Its arrays have the types and shapes of the layout's message, and
    that message was valid."""

    __slots__ = ()

    def unsigned(self, key: int) -> NDArray[Any]:
        array: NDArray[Any] = self._raw[key]
        return array

    def words(self, key: int) -> NDArray[np.uint64]:
        return self.unsigned(key)

    def reals(self, key: int, ndim: int) -> NDArray[np.floating]:
        array = self._raw[key]
        return array if isinstance(array, np.ndarray) else _dequantise(key, array)

    def exact(self, key: int, ndim: int) -> NDArray[Any]:
        return self.unsigned(key)


def _dequantise(key: int, pair: Any) -> NDArray[np.floating]:
    if len(pair) != 2 or not all(isinstance(part, np.ndarray) for part in pair):
        raise WireError(f"field {key}", expected="[scales, int8 or int32 values]", got="another array")
    scales, values = pair
    is_wide = values.dtype == np.dtype("<i4")
    rows = values.shape[0] if values.ndim == 2 else _units(values) if is_wide else 1
    if not (is_wide or values.dtype == np.int8) or scales.dtype.kind != "f" or scales.shape != (rows,):
        raise WireError(f"field {key}", expected="a scale for each int8 row", got=f"{scales.shape} for {values.shape}")
    if not np.isfinite(scales).all() or (scales < 0).any():
        raise WireError(f"field {key}", expected="finite scales of 0 or more", got="another")
    wide = scales.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # the message that is built of it refuses what is not finite
        if is_wide:
            return row_values(wide, values) if values.ndim == 2 else triangle_values(wide, values)
        return np.asarray(values * (wide[:, None] if values.ndim == 2 else wide[0]), dtype=np.float32)


def _units(triangle: NDArray[np.integer]) -> int:
    """How many units a triangle of int32 has: D, or none where it is no triangle."""
    width = triangle_width(triangle.size)
    return width if width * (width + 1) // 2 == triangle.size else -1


def _decode_announcement(f: _Fields) -> Announcement:
    return Announcement(
        run=f.binary(2),
        round=f.integer(3),
        phase=f.one_of(4, _PHASES),
        method=f.text(5),
        bundle=f.binary(6),
        deadline_s=f.number(7),
        fraction=f.number(8),
        seed=f.integer(9),
        global_version=f.integer(10),
        encoding=f.one_of(11, _ENCODINGS),
        min_samples=f.integer(12),
        limit_bytes=f.integer(13),
        others=f.binaries(14) if f.has(14) else (),
        extractor=f.binary(15) if f.has(15) else b"",
        class_lists=f.binaries(16) if f.has(16) else (),
        offer=_decode_offer(f.inner(17)) if f.has(17) else None,
        withheld=tuple(f.class_numbers(18).tolist()) if f.has(18) else (),
        issued=f.integer(19) if f.has(19) else 0,
        helper=_decode_helper_terms(f.inner(20)) if f.has(20) else None,
        epoch=f.integer(21) if f.has(21) else 0,
        max_samples=f.integer(22) if f.has(22) else 0,
        proof=f.binary(24) if f.has(24) else b"",
    )


def _decode_helper_terms(f: _Fields) -> HelperTerms:
    terms = HelperTerms(f.binary(0), f.integer(1), f.integer(2))
    f.finish(closed=False)
    return terms


def _decode_offer(f: _Fields) -> Offer:
    offer = Offer(f.binary(0), f.integer(1), f.integer(2), f.number(3), f.text(4))
    f.finish(closed=False)
    return offer


def _decode_global_part(f: _Fields) -> GlobalPart:
    return GlobalPart(
        run=f.binary(2),
        round=f.integer(3),
        version=f.integer(4),
        part=f.integer(5),
        parts=f.integer(6),
        kind=f.text(7),
        body=f.rows(8, 9),
    )


def _decode_contribution(f: _Fields) -> Contribution:
    return Contribution(
        run=f.binary(2),
        round=f.integer(3),
        method=f.text(4),
        bundle=f.binary(5),
        **_numbers(f),
        extractor=f.binary(13) if f.has(13) else b"",
        standing=f.one_of(15, _STANDINGS) if f.has(15) else None,
        class_list=f.binary(16) if f.has(16) else b"",
        seed=f.binary(18) if f.has(18) else b"",
        devices=f.integer(19) if f.has(19) else 0,
    )


def _numbers(f: _Fields) -> dict[str, Any]:
    """The attributes of a contribution that are arrays."""
    numbers = f.exact if f.has(19) else f.reals
    return {
        "body": ClassRows(f.class_numbers(6), numbers(8, 2)),
        "counts": f.unsigned(7).astype(np.uint64),
        "triangle": numbers(9, 1) if f.has(9) else None,
        "further": tuple(numbers(key, 2) for key in itertools.takewhile(f.has, _FURTHER)),
        "share": f.words(17) if f.has(17) else None,
    }


def _decode_chunk(f: _Fields) -> Chunk:
    return Chunk(
        run=f.binary(2),
        round=f.integer(3),
        method=f.text(4),
        index=f.integer(5),
        count=f.integer(6),
        total_bytes=f.integer(7),
        digest=f.binary(8),
        data=f.binary(9),
    )


def _decode_receipt(f: _Fields) -> Receipt:
    return Receipt(
        run=f.binary(2),
        round=f.integer(3),
        method=f.text(4),
        status=f.one_of(5, _STATUSES),
        reason=f.text(6),
        missing=f.binary(7),
        digest=f.binary(8) if f.has(8) else b"",
        held=f.integer(9) if f.has(9) else 0,
        counts=bool(f.take(10, "a boolean", bool)) if f.has(10) else None,
        why=f.text(11) if f.has(11) else "",
    )


def _decode_status(f: _Fields) -> Status:
    return Status(
        online=bool(f.take(2, "a boolean", bool)),
        instance=f.binary(3),
        boot=f.integer(4),
        profile=f.text(5),
        versions=f.entries(6, str),
        metrics=f.figures(7),
        issued=f.integer(8) if f.has(8) else 0,
        heard=tuple(_decode_mark(*entry) for entry in f.inners(9).items()) if f.has(9) else (),
        rival=_decode_rival(f.inner(10)) if f.has(10) else None,
    )


def _decode_rival(f: _Fields) -> Rival:
    rival = Rival(f.binary(0), f.integer(1), f.integer(2), f.text(3))
    f.finish(closed=True)
    return rival


def _decode_mark(key_id: bytes, f: _Fields) -> Mark:
    mark = Mark(key_id, f.integer(0), f.binary(1))
    f.finish(closed=True)
    return mark


def _decode_request(f: _Fields) -> Request:
    return Request(run=f.binary(2), bundle=f.binary(3), offset=f.integer(4), wanted_bytes=f.integer(5))


def _decode_piece(f: _Fields) -> Piece:
    return Piece(run=f.binary(2), bundle=f.binary(3), offset=f.integer(4), data=f.binary(5))


def _decode_signed(f: _Fields) -> Signed:
    return Signed(key_id=f.binary(2), payload=f.binary(3), signature=f.binary(4))


def _decode_enrolment(f: _Fields) -> Enrolment:
    return Enrolment(key=f.binary(2), proof=f.binary(3))


def _decode_opening(f: _Fields) -> Opening:
    return Opening(f.binary(2), f.integer(3), f.text(4), f.binary(5), f.integer(6), f.integer(7), f.entries(8, bytes))


def _decode_opened(f: _Fields) -> Opened:
    return Opened(
        run=f.binary(2),
        round=f.integer(3),
        method=f.text(4),
        digest=f.binary(5),
        part=f.integer(6),
        parts=f.integer(7),
        status=f.one_of(8, _OPENINGS),
        words=f.words(9),
        reason=f.text(10),
        refused=f.entries(11, str),
    )


def _decode_sealed_seed(f: _Fields) -> SealedSeed:
    return SealedSeed(
        run=f.binary(2),
        round=f.integer(3),
        method=f.text(4),
        words=f.integer(5),
        share=f.binary(6),
        least=f.integer(7),
        terms=f.binary(8),
        sealed=f.binary(9),
    )


_TYPES: dict[type, int] = {
    Announcement: 1,
    GlobalPart: 2,
    Contribution: 3,
    Chunk: 4,
    Receipt: 5,
    Status: 6,
    Request: 7,
    Piece: 8,
    Signed: 9,
    Enrolment: 10,
    Opening: 11,
    Opened: 12,
    SealedSeed: 13,
}
_LAYOUTS: dict[int, tuple[Layout, Mapping[str, Any]]] = {}  # of contributions, by length: the last one's that had it
_NO_LAYOUT: tuple[None, Mapping[str, Any]] = None, {}
_CLOSED = (3, 4, 6, 7, 9, 10, 11, 12, 13)
_ENCODERS: dict[type, Callable[[Any, Encoding], dict[int, Any]]] = {
    Announcement: _encode_announcement,
    GlobalPart: _encode_global_part,
    Contribution: _encode_contribution,
    Chunk: _encode_chunk,
    Receipt: _encode_receipt,
    Status: _encode_status,
    Request: _encode_request,
    Piece: _encode_piece,
    Signed: _encode_signed,
    Enrolment: _encode_enrolment,
    Opening: _encode_opening,
    Opened: _encode_opened,
    SealedSeed: _encode_sealed_seed,
}
_DECODERS: dict[int, Callable[[_Fields], Message]] = {
    1: _decode_announcement,
    2: _decode_global_part,
    3: _decode_contribution,
    4: _decode_chunk,
    5: _decode_receipt,
    6: _decode_status,
    7: _decode_request,
    8: _decode_piece,
    9: _decode_signed,
    10: _decode_enrolment,
    11: _decode_opening,
    12: _decode_opened,
    13: _decode_sealed_seed,
}

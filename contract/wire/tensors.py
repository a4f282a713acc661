"""The tensors of messages: typed arrays in CBOR (RFC 8746), and what of them a field may be.

Tensors travel little-endian, in one of these forms:

- f64, f32, f16 (RFC 8746 tags 86, 85, 84);
- int8, with one float32 scale for each row (value = scale · int8);
- int32, with float64 units (`contract/wire/scaled_integers.py`);
- int64 (tag 79), for the sums of a gateway;
- int16 (tag 77), for the rows of a factor (`contract/sums/factor.py`);
- integers, as the narrowest unsigned array that holds them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import WireError
from protofleet.contract.names import named
from protofleet.contract.sums.triangle import triangle_width
from protofleet.contract.wire.encodings import ENCODINGS, Encoding
from protofleet.contract.wire.fields import Kind
from protofleet.contract.wire.scaled_integers import row_values, triangle_values

if TYPE_CHECKING:
    from cbor2 import CBORTag

__all__ = [
    "CLASS_NUMBERS",
    "COUNTS",
    "FACTOR",
    "RISING_CLASSES",
    "ROWS",
    "TRIANGLE",
    "WORDS",
    "Encoding",
    "typed_array",
]

_MULTI_DIMENSIONAL: Final = 40
_NAMES = {
    64: "u1",
    69: "<u2",
    70: "<u4",
    71: "<u8",
    72: "i1",
    77: "<i2",
    78: "<i4",
    79: "<i8",
    84: "<f2",
    85: "<f4",
    86: "<f8",
}
_DTYPES: dict[int, np.dtype[Any]] = {tag: np.dtype(name) for tag, name in _NAMES.items()}
_TAGS = {dtype: tag for tag, dtype in _DTYPES.items()}


# ── arrays to CBOR ──────────────────────────────────────────────────────────────────────────────────────────────────


def _integers(values: NDArray[Any], encoding: str = "") -> CBORTag:
    top = int(values.max()) if values.size else 0
    return _typed(values.astype("u1" if top < 1 << 8 else "<u2" if top < 1 << 16 else "<u4"))


def _rows(rows: NDArray[np.floating], encoding: Encoding) -> Any:
    scales: list[Any] = []
    if rows.dtype.kind == "i":
        values = _typed(rows.astype("<i8"))
    else:
        *scales, values = map(_typed, named(ENCODINGS, encoding, "encoding").rows(rows))
    tensor = _tag()(_MULTI_DIMENSIONAL, [list(rows.shape), values])
    return [*scales, tensor] if scales else tensor


def _vector(values: NDArray[np.floating], encoding: Encoding) -> Any:
    if values.dtype.kind == "i":
        return _typed(values.astype("<i8"))
    *scales, numbers = map(_typed, named(ENCODINGS, encoding, "encoding").triangle(values))
    return [*scales, numbers] if scales else numbers


@functools.cache
def _tag() -> type[CBORTag]:
    """The class of CBOR's tags. Whoever only knows messages, as a command's help, does not load the library."""
    from cbor2 import CBORTag

    return CBORTag


def _typed(array: NDArray[Any]) -> CBORTag:
    return _tag()(_TAGS[array.dtype], np.ascontiguousarray(array).tobytes())


# ── CBOR to arrays ──────────────────────────────────────────────────────────────────────────────────────────────────


def typed_array(tag: CBORTag, immutable: bool = False) -> NDArray[Any]:
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


def _dequantised(pair: Any, label: str) -> NDArray[np.floating]:
    if len(pair) != 2 or not all(isinstance(part, np.ndarray) for part in pair):
        raise WireError(label, expected="[scales, int8 or int32 values]", got="another array")
    scales, values = pair
    is_wide = values.dtype == np.dtype("<i4")
    rows = values.shape[0] if values.ndim == 2 else _units(values) if is_wide else 1
    if not (is_wide or values.dtype == np.int8) or scales.dtype.kind != "f" or scales.shape != (rows,):
        raise WireError(label, expected="a scale for each int8 row", got=f"{scales.shape} for {values.shape}")
    if not np.isfinite(scales).all() or (scales < 0).any():
        raise WireError(label, expected="finite scales of 0 or more", got="another")
    wide = scales.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # the message that is built of it refuses what is not finite
        if is_wide:
            return row_values(wide, values) if values.ndim == 2 else triangle_values(wide, values)
        return np.asarray(values * (wide[:, None] if values.ndim == 2 else wide[0]), dtype=np.float32)


def _units(triangle: NDArray[np.integer]) -> int:
    """How many units a triangle of int32 has: D, or none where it is no triangle."""
    width = triangle_width(triangle.size)
    return width if width * (width + 1) // 2 == triangle.size else -1


# ── what a field may be ─────────────────────────────────────────────────────────────────────────────────────────────


def _unsigned(what: str, most_bytes: int, made: Callable[[NDArray[Any]], Any]) -> Kind:
    """Unsigned integers (K,), of so many bytes at most, which travel as the narrowest that hold them.

    Args:
        made: the value in Python, of the array that came.
    """

    def read(array: NDArray[Any], label: str) -> Any:
        if array.ndim != 1 or array.dtype.kind != "u" or array.dtype.itemsize > most_bytes:
            raise WireError(label, expected=what, got=_form(array))
        return made(array)

    return Kind((np.ndarray,), what, read=read, write=_integers, read_again=lambda array, _: made(array))


def _numbers(dimensions: int, write: Callable[[Any, Any], Any]) -> Kind:
    """Floats in so many dimensions, in the encoding that is asked for; or int64, as the sums of a gateway."""

    def again(value: Any, label: str) -> NDArray[Any]:
        return value if isinstance(value, np.ndarray) else _dequantised(value, label)

    def read(value: Any, label: str) -> NDArray[Any]:
        array = again(value, label)
        if array.ndim != dimensions or not (array.dtype.kind == "f" or array.dtype == np.dtype("<i8")):
            raise WireError(label, expected=f"floats in {dimensions} dimensions", got=_form(array))
        return array

    return Kind((np.ndarray, list, tuple), "an array of numbers", read=read, write=write, read_again=again)


def _read_words(array: NDArray[Any], label: str) -> NDArray[Any]:
    if not _are_words(array):
        raise WireError(label, expected="64-bit words", got=_form(array))
    return array


def _read_factor(array: NDArray[Any], label: str) -> NDArray[Any]:
    if array.ndim != 2 or array.dtype != np.dtype("<i2"):
        raise WireError(label, expected="int16 in two dimensions", got=_form(array))
    return array


def _are_words(array: NDArray[Any] | None) -> bool:
    return array is not None and array.ndim == 1 and array.dtype == np.dtype("<u8")


def _form(array: NDArray[Any]) -> str:
    return f"{array.dtype} {array.shape}"


_CLASSES = "an array of uint8 or uint16 class numbers"
CLASS_NUMBERS: Final = _unsigned(_CLASSES, 2, lambda array: array.astype(np.uint16))
COUNTS: Final = _unsigned("an unsigned array", 4, lambda array: array.astype(np.uint64))
ROWS: Final = _numbers(2, _rows)
TRIANGLE: Final = _numbers(1, _vector)
FACTOR: Final = Kind(
    (np.ndarray,),
    "an array of int16",
    read=_read_factor,
    write=lambda rows, _: _tag()(_MULTI_DIMENSIONAL, [list(rows.shape), _typed(rows.astype("<i2"))]),
    read_again=lambda array, _: array,
)
WORDS: Final = Kind(
    (np.ndarray,),
    "64-bit words",
    _are_words,
    "64-bit words",
    _form,
    _read_words,
    lambda array, _: _typed(array),
    read_again=lambda array, _: array,
)
RISING_CLASSES: Final = _unsigned(_CLASSES, 2, lambda array: tuple(array.tolist()))._replace(  # a tuple in Python
    fits=lambda numbers: all(map(operator.lt, (-1, *numbers), (*numbers, 1 << 16))),
    expected="rising class numbers",
    got=lambda numbers: "others",
    write=lambda numbers, _: _integers(np.array(numbers)),
)

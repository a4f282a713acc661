"""Where the arrays of a message lie in its bytes, so that the next one like it is read without reading its heads.

What a CBOR item is, and how long, is in its head (RFC 8949 section 3); the content of a byte string is none of that. So
bytes that are the same but for the content of typed arrays are the same map with other numbers, which lie at the same
places. The devices of a round send such messages: of one that was decoded a `Layout` is made, and for another one
comparing some hundred bytes takes the place of decoding.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from contract.errors import WireError

__all__ = ["MAX_ITEMS", "Layout", "Span", "arrays_in"]

MAX_ITEMS: Final = 4_096  # keys, values, entries, tags: a message needs some hundred, however large its tensors are
Span = tuple[int, int]


class _Array:
    """Where one is, of which type and shape."""

    __slots__ = ("_dtype", "_shape", "_span")

    def __init__(self, span: Span, like: NDArray[Any]) -> None:
        self._span, self._dtype, self._shape = slice(*span), like.dtype, like.shape

    def of(self, payload: bytes) -> NDArray[Any]:
        return np.ndarray(self._shape, self._dtype, payload[self._span])


class Layout:
    """That of a message which was decoded.

    Args:
        payload: its bytes.
        spans: as `arrays_in` gives them.
        fields: the map that was decoded, as it came: in it are arrays, lists of arrays, and what has none.
    """

    __slots__ = ("_around", "_arrays", "_fixed", "_lists", "_others")

    def __init__(self, payload: bytes, spans: Sequence[Span], fields: Mapping[int, Any]) -> None:
        edges = [0, *itertools.chain.from_iterable(spans), len(payload)]
        self._around = [slice(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
        self._fixed = [bytes(payload[where]) for where in self._around]
        following = iter(spans)
        self._arrays: list[tuple[int, _Array]] = []
        self._lists: list[tuple[int, list[_Array]]] = []
        self._others: dict[int, Any] = {}
        for key, value in fields.items():
            if isinstance(value, np.ndarray):
                self._arrays.append((key, _Array(next(following), value)))
            elif isinstance(value, list | tuple):
                self._lists.append((key, [_Array(next(following), each) for each in value]))
            else:
                self._others[key] = value

    def fits(self, payload: bytes) -> bool:
        """Whether bytes, as many as that message had, are the same but for what is in arrays."""
        return [payload[where] for where in self._around] == self._fixed

    def fields(self, payload: bytes) -> dict[int, Any]:
        """The map in bytes that it fits."""
        found = self._others.copy()
        for key, array in self._arrays:
            found[key] = array.of(payload)
        for key, arrays in self._lists:
            found[key] = [array.of(payload) for array in arrays]
        return found


def arrays_in(payload: bytes) -> list[Span]:
    """Where the contents of tagged byte strings begin and end, in their order, read without decoding anything.

    What is cut off, or has no definite length, is left to the decoder, which refuses it.

    Raises:
        WireError: more than `MAX_ITEMS`, before anything is built: an empty map is one byte here and 72 in Python.
    """
    found, is_tagged = [], False
    at, end, left, seen = 0, len(payload), 1, 0  # left: items that are announced and still to come
    while left and at < end:
        head = payload[at]
        kind, argument = head >> 5, head & 0x1F
        at, left, seen = at + 1, left - 1, seen + 1
        if argument >= 24:
            if argument > 27:
                break
            size = 1 << (argument - 24)
            argument = int.from_bytes(payload[at : at + size], "big")
            at += size
        if kind == 2 or kind == 3:
            if is_tagged and kind == 2:
                found.append((at, at + argument))
            at += argument
        elif 3 < kind < 7:
            left += argument if kind == 4 else 2 * argument if kind == 5 else 1
            if seen + left > MAX_ITEMS and end > MAX_ITEMS:  # an item has a byte at least: else it is cut off
                raise WireError("message", expected=f"at most {MAX_ITEMS:,} keys, values and entries", got="more")
        is_tagged = kind == 6
    return found

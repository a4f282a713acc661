"""The layout of a decoded message: where its arrays lie in the bytes, so the next similar message needs no decoding.

The head of a CBOR item says what the item is and how long it is (RFC 8949 section 3). The content of a byte string says
neither. So two messages that have the same bytes, except for the content of typed arrays, are the same map with other
numbers, and the numbers lie at the same positions.

The devices of a round send such messages. The first one is decoded, and a `Layout` is made of it. For the next one,
comparing some hundred bytes replaces the decoding.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import WireError

__all__ = ["MAX_ITEMS", "Layout", "Span", "arrays_in"]

MAX_ITEMS: Final = 4_096  # keys, values, entries, tags: a message needs some hundred, however large its tensors are
Span = tuple[int, int]


class _Array:
    """One array of a message: its position, its type and its shape."""

    __slots__ = ("_dtype", "_shape", "_span")

    def __init__(self, span: Span, like: NDArray[Any]) -> None:
        self._span, self._dtype, self._shape = slice(*span), like.dtype, like.shape

    def read(self, payload: bytes) -> NDArray[Any]:
        return np.ndarray(self._shape, self._dtype, payload[self._span])


class Layout:
    """The layout of a message that was decoded.

    Args:
        payload: the bytes of the message.
        spans: the positions of its arrays, as `arrays_in` gives them.
        fields: the decoded map. Its values are arrays, lists of arrays, or values without arrays.
    """

    __slots__ = ("_around", "_arrays", "_fixed", "_lists")

    def __init__(self, payload: bytes, spans: Sequence[Span], fields: Mapping[int, Any]) -> None:
        edges = [0, *itertools.chain.from_iterable(spans), len(payload)]
        self._around = [slice(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
        self._fixed = [bytes(payload[span]) for span in self._around]
        following = iter(spans)
        self._arrays: list[tuple[int, _Array]] = []
        self._lists: list[tuple[int, list[_Array]]] = []
        for key, value in fields.items():
            if isinstance(value, np.ndarray):
                self._arrays.append((key, _Array(next(following), value)))
            elif isinstance(value, list | tuple):
                self._lists.append((key, [_Array(next(following), array) for array in value]))

    def fits(self, payload: bytes) -> bool:
        """Whether these bytes equal those of the decoded message, except within arrays. The length must be the same."""
        return [payload[span] for span in self._around] == self._fixed

    def arrays(self, payload: bytes) -> dict[int, Any]:
        """The arrays of the map in these bytes, and the lists of arrays, by key. The layout must fit."""
        found: dict[int, Any] = {key: array.read(payload) for key, array in self._arrays}
        for key, arrays in self._lists:
            found[key] = [array.read(payload) for array in arrays]
        return found


def arrays_in(payload: bytes) -> list[Span]:
    """Start and end of the content of each tagged byte string, in order. Nothing is decoded.

    An item that is cut off, or has no definite length, is left to the decoder, which refuses it.

    Raises:
        WireError: there are more than `MAX_ITEMS` items. Nothing has been built yet then: an empty map is one byte
            here, and 72 bytes in Python.
    """
    spans, is_tagged = [], False
    position, end, items, pending = 0, len(payload), 0, 1  # pending: announced items that are still to come
    while pending and position < end:
        head = payload[position]
        kind, argument = head >> 5, head & 0x1F
        position, pending, items = position + 1, pending - 1, items + 1
        if argument >= 24:
            if argument > 27:
                break
            size = 1 << (argument - 24)
            argument = int.from_bytes(payload[position : position + size], "big")
            position += size
        if kind == 2 or kind == 3:
            if is_tagged and kind == 2:
                spans.append((position, position + argument))
            position += argument
        elif 3 < kind < 7:
            pending += argument if kind == 4 else 2 * argument if kind == 5 else 1
            if items + pending > MAX_ITEMS and end > MAX_ITEMS:  # an item has a byte at least: else it is cut off
                raise WireError("message", expected=f"at most {MAX_ITEMS:,} keys, values and entries", got="more")
        is_tagged = kind == 6
    return spans

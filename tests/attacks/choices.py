"""Bytes read as choices: what a fuzzer finds in bytes becomes events, sizes and names, the same each time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

__all__ = ["Choices"]

T = TypeVar("T")


class Choices:
    """Reads from the front; past the end everything is zero, so that any bytes are a whole run. False at the end."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def take(self, count: int) -> bytes:
        """So many bytes, or what is left."""
        found = self._data[self._at : self._at + count]
        self._at += count
        return found

    def number(self, size: int = 1) -> int:
        """An unsigned number of `size` bytes, little-endian."""
        return int.from_bytes(self.take(size), "little")

    def below(self, bound: int) -> int:
        """0 to `bound` - 1; small bounds cost one byte."""
        return self.number(1 if bound <= 256 else 2 if bound <= 1 << 16 else 4) % bound

    def one_of(self, known: Sequence[T]) -> T:
        """One of those, of which there are some."""
        return known[self.below(len(known))]

    def chance(self) -> bool:
        return bool(self.number() & 1)

    def block(self) -> bytes:
        """Bytes behind their length in two bytes."""
        return self.take(self.number(2))

    def text(self) -> str:
        """Characters behind their length in one byte, whatever the bytes are."""
        return self.take(self.number()).decode("utf-8", "replace")

    def rest(self) -> bytes:
        return self.take(len(self._data))

"""Sizes chosen by design: Halton's sequence fills the space of sizes evenly, however many points are taken of it."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["Point", "halton"]

T = TypeVar("T")
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)
_GOLDEN = 0.6180339887498949
_SKIPPED = 20  # the first points of large bases lie on a line


def halton(index: int, base: int) -> float:
    """The `index`-th number of the sequence of van der Corput in a base: in [0, 1)."""
    result, step = 0.0, 1.0
    while index:
        step /= base
        result += step * (index % base)
        index //= base
    return result


class Point:
    """The `index`-th point of the design of one kind of graph: each call takes its next coordinate.

    The points of another kind are the same, turned by the golden ratio in each coordinate.
    """

    def __init__(self, kind: int, index: int) -> None:
        turns = [kind * _GOLDEN * (place + 1) for place in range(len(_PRIMES))]
        self._coordinates = iter(
            [(halton(index + _SKIPPED, prime) + turn) % 1.0 for prime, turn in zip(_PRIMES, turns, strict=True)]
        )

    def size(self, low: int, high: int, multiple: int = 1) -> int:
        """A size between these, even in its logarithm, as a multiple."""
        exact = low * (high / low) ** next(self._coordinates)
        return max(low, round(exact / multiple) * multiple)

    def of(self, *choices: T) -> T:
        """One of these."""
        return choices[int(next(self._coordinates) * len(choices))]

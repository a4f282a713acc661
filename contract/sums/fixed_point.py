"""Exact sums: whole numbers of 2⁻⁴⁰. They can be added and subtracted in any order, and nothing is left behind.

A floating-point sum depends on the order of its summands, and a summand cannot be taken out again without a trace. But
where the sums of devices stand for years, any of them may be replaced or withdrawn (docs/decisions/116). So each number
x is held as the integer

    n = round(x · 2⁴⁰), half to even,    in two words: n = hi · 2³² + lo,  hi int64,  lo in 0 … 2³² − 1.

Guarantees:

- n is a function of x alone, and equal on every machine, because float64 is scaled exactly by a power of two.
- Integers add and subtract exactly as long as they fit. `LARGEST` bounds one summand so that 2³⁰ of them fit.
- Rounding changes each number of each device by at most 2⁻⁴¹ ≈ 4.5e-13, once. Replacing does not add up errors.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from protofleet.contract.errors import StatisticError

__all__ = ["FRACTION_BITS", "LARGEST", "LARGEST_INTEGER", "FixedPoint"]

FRACTION_BITS = 40
LARGEST = 2.0**24
"""The largest magnitude of one summand: a sum of unit features over so many samples reaches it."""

LARGEST_INTEGER = 1 << 62
"""The largest magnitude of a number that travels as one 64-bit integer: sums up to 2²²."""

_WORD_BITS = 32
_WORD = 2.0**_WORD_BITS
_LOW = (1 << _WORD_BITS) - 1


@dataclass(frozen=True, eq=False)
class FixedPoint:
    """A vector of exact numbers; `add` and `subtract` give new ones.

    Attributes:
        high: (N,) int64.
        low: (N,) int64, each in 0 … 2³² − 1.
    """

    high: NDArray[np.int64]
    low: NDArray[np.int64]

    @classmethod
    def zero(cls, size: int) -> FixedPoint:
        """As many zeros."""
        return cls(np.zeros(size, np.int64), np.zeros(size, np.int64))

    @classmethod
    def of(cls, values: ArrayLike) -> FixedPoint:
        """The nearest exact numbers of float64 values (N,).

        Raises:
            StatisticError: on another shape, a number that is not finite, or one beyond `LARGEST`.
        """
        numbers = np.asarray(values, dtype=np.float64)
        if numbers.ndim != 1:
            raise StatisticError("exact sums", expected="numbers in one dimension", got=numbers.shape)
        largest = float(np.abs(numbers).max(initial=0.0))
        if not largest <= LARGEST:  # NaN is not
            raise StatisticError("exact sums", expected=f"finite numbers up to {LARGEST:g}", got=f"{largest:g}")
        scaled = np.rint(np.ldexp(numbers, FRACTION_BITS))  # below 2⁶⁴, a whole number, exact
        high = np.floor(scaled / _WORD)
        return cls(high.astype(np.int64), (scaled - high * _WORD).astype(np.int64))

    @classmethod
    def of_integers(cls, values: NDArray[np.int64]) -> FixedPoint:
        """From integers (N,), in units of 2⁻⁴⁰."""
        wide = np.asarray(values, dtype=np.int64)
        return cls(wide >> _WORD_BITS, wide & _LOW)

    def words(self) -> NDArray[np.int64]:
        """(N,) the numbers in units of 2⁻⁴⁰, one 64-bit integer each.

        Raises:
            StatisticError: one is beyond `LARGEST_INTEGER`.
        """
        if self.beyond().any():
            limit = f"numbers up to {LARGEST_INTEGER * 2.0**-FRACTION_BITS:,.0f}"
            raise StatisticError("exact sums in 64 bits", expected=limit, got="larger ones")
        return (self.high << _WORD_BITS) + self.low

    def beyond(self) -> NDArray[np.bool_]:
        """(N,) which numbers are beyond `LARGEST_INTEGER`, so that they do not travel as one 64-bit integer."""
        bound = LARGEST_INTEGER >> _WORD_BITS
        return (self.high < -bound) | (self.high >= bound)

    def __len__(self) -> int:
        return len(self.high)

    def add(self, other: FixedPoint) -> FixedPoint:
        """Both together, number by number."""
        return self._carried(self.high + other.high, self.low + other.low)

    def subtract(self, other: FixedPoint) -> FixedPoint:
        """This without the other, number by number."""
        return self._carried(self.high - other.high, self.low - other.low)

    def equal(self, other: FixedPoint) -> bool:
        """Whether every number is the same integer."""
        return np.array_equal(self.high, other.high) and np.array_equal(self.low, other.low)

    def to_float(self) -> NDArray[np.float64]:
        """(N,) the nearest float64 of each number below 2⁴⁵, and within one rounding more of larger ones."""
        return np.ldexp(self.high.astype(np.float64), _WORD_BITS - FRACTION_BITS) + np.ldexp(
            self.low.astype(np.float64), -FRACTION_BITS
        )

    def integers(self) -> list[int]:
        """The numbers in units of 2⁻⁴⁰, as Python's integers."""
        return [(high << _WORD_BITS) + low for high, low in zip(self.high.tolist(), self.low.tolist(), strict=True)]

    def digest(self) -> str:
        """SHA-256 of the words, little-endian, in hex: equal where the integers are."""
        digest = hashlib.sha256()
        for words in (self.high, self.low):
            digest.update(np.ascontiguousarray(words, "<i8").data)
        return digest.hexdigest()

    @staticmethod
    def _carried(high: NDArray[np.int64], low: NDArray[np.int64]) -> FixedPoint:
        return FixedPoint(high + (low >> _WORD_BITS), low & _LOW)

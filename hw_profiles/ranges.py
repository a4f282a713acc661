"""A figure with its bounds, and sums of such figures."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ONE", "ZERO", "Range"]


@dataclass(frozen=True)
class Range:
    """A figure with its lower and upper bound. Bounds of parts are added: a model errs alike in all of them."""

    value: float = 0.0
    low: float = 0.0
    high: float = 0.0

    def plus(self, other: Range, times: float = 1.0) -> Range:
        """The sum with `times` of another."""
        return Range(self.value + times * other.value, self.low + times * other.low, self.high + times * other.high)

    def scaled(self, factor: float) -> Range:
        """Each figure times `factor`, which is not negative."""
        return Range(self.value * factor, self.low * factor, self.high * factor)

    def times(self, other: Range) -> Range:
        """The product of two figures that are not negative."""
        return Range(self.value * other.value, self.low * other.low, self.high * other.high)

    def over(self, other: Range) -> Range:
        """The quotient by a figure above zero."""
        return Range(self.value / other.value, self.low / other.high, self.high / other.low)


ZERO = Range()
ONE = Range(1.0, 1.0, 1.0)

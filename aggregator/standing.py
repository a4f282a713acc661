"""Sums that stand: what is held of each device, their exact total, and when a new head is due. No files, no clock.

There are no rounds. Each device sends the statistic of all that it now holds, numbered with a generation of its own
that rises; the newest takes the place of the one before, and a withdrawal takes it out (docs/decisions/116). What
may come in is decided in `aggregator/ingest.py`; here:

    replace   the total loses what was held of the device, and gains what came; either may be nothing
    due       something changed, and the last head is `every_s` old: a head at once where nothing came for a while, and
              never later than `every_s` after a change

The total is of integers (`contract/fixed_point.py`), so at any moment it is that of all present devices, whatever the
order in which they came, how often, and what was replaced or taken out in between. It is a cache: the store holds what
devices sent, and `replace` with nothing before makes it anew.

Time is an argument, in seconds of any steady clock.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from contract.fixed_point import FixedPoint
from contract.statistics import Rows, Statistic

__all__ = ["ExactSum", "Standing"]


@dataclass(frozen=True, eq=False)
class ExactSum:
    """A statistic's sums as exact numbers.

    Attributes:
        numbers: its fields, in order, one after another.
        counts: (C,) int64.
    """

    numbers: FixedPoint
    counts: NDArray[np.int64]

    @classmethod
    def zero(cls, kind: type[Statistic], classes: int, width: int) -> Self:
        """Of no data."""
        return cls.of(kind.zero(classes, width))

    @classmethod
    def of(cls, statistic: Statistic) -> Self:
        """Of a statistic.

        Raises:
            StatisticError: a number is beyond `contract.fixed_point.LARGEST`.
        """
        flat = [array.ravel() for array in statistic.arrays()]
        return cls(FixedPoint.of(np.concatenate(flat) if flat else np.zeros(0)), statistic.counts)

    def add(self, other: Self) -> Self:
        """Of both data sets together."""
        return type(self)(self.numbers.add(other.numbers), self.counts + other.counts)

    def subtract(self, other: Self) -> Self:
        """Of the data without the other's, which are part of it."""
        return type(self)(self.numbers.subtract(other.numbers), self.counts - other.counts)

    def equal(self, other: Self) -> bool:
        """Whether all are the same integers."""
        return self.numbers.equal(other.numbers) and np.array_equal(self.counts, other.counts)

    def digest(self) -> str:
        """SHA-256 in hex; equal where the integers are."""
        return hashlib.sha256(self.numbers.digest().encode() + self.counts.astype("<i8").tobytes()).hexdigest()

    def statistic(self, kind: type[Statistic], width: int) -> Statistic:
        """The statistic in float64, for rows of features of this width."""
        flat, at, arrays = self.numbers.to_float(), 0, []
        for each in kind.FIELDS:
            shape: tuple[int, ...] = (width * (width + 1) // 2,)
            if isinstance(each, Rows):
                shape = (len(self.counts), each.columns(len(self.counts) // kind.GROUPS, width))
            size = math.prod(shape)
            arrays.append(flat[at : at + size].reshape(shape))
            at += size
        return kind.build(arrays, self.counts)


@dataclass
class Standing:
    """What stands.

    Attributes:
        total: of all that stands.
        every_s: how long a head stays at least, before the next is made.
        generations: by device, of what is held, or was when it was taken out: nothing older comes in again.
        present: the devices that are in the total.
        paused: whether no head is made for now.
    """

    total: ExactSum
    every_s: float
    generations: dict[str, int] = field(default_factory=dict)
    present: set[str] = field(default_factory=set)
    paused: bool = False
    _changed_at: float | None = None
    _solved_at: float = -math.inf

    def held(self, device: str) -> int:
        """The generation that is held of a device, or was; 0 where nothing ever came."""
        return self.generations.get(device, 0)

    def replace(
        self, device: str, generation: int, former: ExactSum | None, newer: ExactSum | None, now: float
    ) -> None:
        """What is held of a device changes.

        Args:
            generation: of what came.
            former: what is held of it; None where nothing is.
            newer: what takes its place; None where it is taken out.
        """
        total = self.total if former is None else self.total.subtract(former)
        self.total = total if newer is None else total.add(newer)
        self.generations[device] = max(generation, self.held(device))
        (self.present.discard if newer is None else self.present.add)(device)
        if former is not None or newer is not None:
            self.changed(now)

    def changed(self, now: float) -> None:
        """What the last head was made of is not what stands."""
        if self._changed_at is None:
            self._changed_at = now

    def solved(self, now: float) -> None:
        """A head was made of the total."""
        self._changed_at, self._solved_at = None, now

    def due(self, now: float) -> bool:
        """Whether a head is to be made now."""
        wait_s = self.due_in_s(now)
        return wait_s is not None and wait_s <= 0.0

    def due_in_s(self, now: float) -> float | None:
        """Seconds until a head is to be made; None when nothing changed, or it is paused."""
        if self._changed_at is None or self.paused:
            return None
        return max(0.0, max(self._changed_at, self._solved_at + self.every_s) - now)

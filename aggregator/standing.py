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
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from contract.fixed_point import FixedPoint
from contract.messages import ClassRows, Contribution
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

    @classmethod
    def sent_in(cls, message: Contribution, kind: type[Statistic], classes: int, width: int) -> Self:
        """Of what a contribution carries: a gateway's as they are, a device's to the nearest.

        Raises:
            WireError: it is of another statistic, or of another fleet.
            StatisticError: a number is beyond `contract.fixed_point.LARGEST`.
        """
        if not message.devices or message.says_nothing:
            return cls.of(message.statistic(kind, classes, width))
        return cls(message.exact(kind, classes, width), message.statistic(kind, classes, width).counts)

    def for_others(self, kind: type[Statistic], width: int, devices: int, said: Contribution) -> Contribution:
        """These sums as a gateway sends them for its devices; without any it says that there are none.

        Args:
            width: of the rows.
            devices: whose sums these are.
            said: a contribution that says nothing, in whose place it is.

        Raises:
            StatisticError: a number is beyond `contract.fixed_point.LARGEST_INTEGER`.
        """
        present = self.counts > 0
        if not devices or not present.any():
            return said
        words: NDArray[Any] = self.numbers.words()
        rows, triangle = [], None
        for each, (start, shape) in zip(kind.FIELDS, self._places(kind, width), strict=True):
            part = words[start : start + math.prod(shape)].reshape(shape)
            if isinstance(each, Rows):
                rows.append(part[present])
            else:
                triangle = part
        numbers = (np.flatnonzero(present) // kind.GROUPS).astype(np.uint16)
        return replace(
            said,
            body=ClassRows(numbers, rows[0]),
            counts=self.counts[present].astype(np.uint64),
            triangle=triangle,
            further=tuple(rows[1:]),
            devices=devices,
        )

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
        flat = self.numbers.to_float()
        parts = ((flat[at : at + math.prod(shape)], shape) for at, shape in self._places(kind, width))
        return kind.build([part.reshape(shape) for part, shape in parts], self.counts)

    def _places(self, kind: type[Statistic], width: int) -> list[tuple[int, tuple[int, ...]]]:
        """Where the numbers of each field begin, and its shape."""
        at, found = 0, []
        for each in kind.FIELDS:
            shape: tuple[int, ...] = (width * (width + 1) // 2,)
            if isinstance(each, Rows):
                shape = (len(self.counts), each.columns(len(self.counts) // kind.GROUPS, width))
            found.append((at, shape))
            at += math.prod(shape)
        return found


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

"""Standing sums: the generation held of each device, their exact total, when a new head is due. No files, no clock.

There are no rounds. Each device sends the statistic of all data that it now holds, numbered with its own rising
generation. The newest replaces the one before, and a withdrawal takes it out (docs/decisions/116).
`aggregator/ingest/ingest.py` decides what may come in. This module has two parts:

    replace   the total loses the device's former sums and gains the newer ones; either may be nothing
    due       something changed, and the last head is `every_s` old: a head at once after a quiet time, and never later
              than `every_s` after a change

The total is of integers (`contract/sums/fixed_point.py`). So at any moment it is the total of all present devices,
whatever the order in which sums came, how often they came, and what was replaced or taken out in between. The total is
a cache: the store holds what devices sent, and `replace` with no former sums makes the total again.

Time is an argument, in seconds of any steady clock.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.sums.fixed_point import FixedPoint
from protofleet.contract.sums.statistics import Rows, Statistic
from protofleet.contract.wire.messages import ClassRows, Contribution

__all__ = ["ExactSum", "Standing"]


@dataclass(frozen=True, eq=False)
class ExactSum:
    """A statistic's sums as exact numbers.

    Attributes:
        numbers: the statistic's fields, in order, one after another.
        counts: (C,) int64.
    """

    numbers: FixedPoint
    counts: NDArray[np.int64]

    @classmethod
    def zero(cls, kind: type[Statistic], classes: int, width: int) -> Self:
        """The sum of no data."""
        return cls.of(kind.zero(classes, width))

    @classmethod
    def of(cls, statistic: Statistic) -> Self:
        """The exact sum of a statistic.

        Raises:
            StatisticError: a number is beyond `protofleet.contract.sums.fixed_point.LARGEST`.
        """
        flat = [array.ravel() for array in statistic.arrays()]
        return cls(FixedPoint.of(np.concatenate(flat) if flat else np.zeros(0)), statistic.counts)

    @classmethod
    def sent_in(cls, message: Contribution, kind: type[Statistic], classes: int, width: int) -> Self:
        """The exact sum in a contribution: a gateway's numbers as they are, a device's numbers rounded to the nearest.

        Raises:
            WireError: it is of another statistic, or of another fleet.
            StatisticError: a number is beyond `protofleet.contract.sums.fixed_point.LARGEST`.
        """
        if not message.devices or message.says_nothing:
            return cls.of(message.statistic(kind, classes, width))
        return cls(message.exact(kind, classes, width), message.statistic(kind, classes, width).counts)

    def for_others(self, kind: type[Statistic], width: int, devices: int, message: Contribution) -> Contribution:
        """These sums as a gateway sends them for its devices.

        Without devices or without samples the message says that there are none.

        Args:
            width: of the rows.
            devices: how many devices the sums are of.
            message: a contribution that says nothing; the result takes its place.

        Raises:
            StatisticError: a number is beyond `protofleet.contract.sums.fixed_point.LARGEST_INTEGER`.
        """
        present = self.counts > 0
        if not devices or not present.any():
            return message
        words: NDArray[Any] = self.numbers.words()
        rows, triangle = [], None
        for part_field, (start, shape) in zip(kind.FIELDS, self._places(kind, width), strict=True):
            part = words[start : start + math.prod(shape)].reshape(shape)
            if isinstance(part_field, Rows):
                rows.append(part[present])
            else:
                triangle = part
        numbers = (np.flatnonzero(present) // kind.GROUPS).astype(np.uint16)
        return replace(
            message,
            body=ClassRows(numbers, rows[0]),
            counts=self.counts[present].astype(np.uint64),
            triangle=triangle,
            further=tuple(rows[1:]),
            devices=devices,
        )

    def add(self, other: Self) -> Self:
        """The sum of both data sets together."""
        return type(self)(self.numbers.add(other.numbers), self.counts + other.counts)

    def subtract(self, other: Self) -> Self:
        """The sum of this data without the other's, which is part of it."""
        return type(self)(self.numbers.subtract(other.numbers), self.counts - other.counts)

    def equal(self, other: Self) -> bool:
        """Whether all integers are the same."""
        return self.numbers.equal(other.numbers) and np.array_equal(self.counts, other.counts)

    def digest(self) -> str:
        """SHA-256 in hex; equal when the integers are equal."""
        return hashlib.sha256(self.numbers.digest().encode() + self.counts.astype("<i8").tobytes()).hexdigest()

    def statistic(self, kind: type[Statistic], width: int) -> Statistic:
        """The statistic in float64, for rows of features of this width."""
        flat = self.numbers.to_float()
        parts = ((flat[start : start + math.prod(shape)], shape) for start, shape in self._places(kind, width))
        return kind.build([part.reshape(shape) for part, shape in parts], self.counts)

    def _places(self, kind: type[Statistic], width: int) -> list[tuple[int, tuple[int, ...]]]:
        """Where the numbers of each field begin, and its shape."""
        start, places = 0, []
        for part_field in kind.FIELDS:
            shape: tuple[int, ...] = (width * (width + 1) // 2,)
            if isinstance(part_field, Rows):
                shape = (len(self.counts), part_field.columns(len(self.counts) // kind.GROUPS, width))
            places.append((start, shape))
            start += math.prod(shape)
        return places


@dataclass
class Standing:
    """The standing sums.

    Attributes:
        total: of all present devices.
        every_s: how long a head stays at least, before the next is made.
        generations: by device, the generation that is held, or was held when it was taken out. Nothing older comes in
            again.
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
        """The newest generation that is or was held of a device; 0 when nothing ever came."""
        return self.generations.get(device, 0)

    def replace(
        self, device: str, generation: int, former: ExactSum | None, newer: ExactSum | None, now: float
    ) -> None:
        """Replace the sums that are held of a device.

        Args:
            generation: of the newer sums.
            former: the sums that are held; None for none.
            newer: the sums that take their place; None when they are taken out.
        """
        total = self.total if former is None else self.total.subtract(former)
        self.total = total if newer is None else total.add(newer)
        self.generations[device] = max(generation, self.held(device))
        (self.present.discard if newer is None else self.present.add)(device)
        if former is not None or newer is not None:
            self.changed(now)

    def changed(self, now: float) -> None:
        """Note that the standing sums are no longer those of the last head."""
        if self._changed_at is None:
            self._changed_at = now

    def solved(self, now: float) -> None:
        """Note that a head was made of the total."""
        self._changed_at, self._solved_at = None, now

    def due(self, now: float) -> bool:
        """Whether a head is to be made now."""
        wait_s = self.due_in_s(now)
        return wait_s is not None and wait_s <= 0.0

    def due_in_s(self, now: float) -> float | None:
        """Seconds until a head is to be made; None when nothing changed, or while paused."""
        if self._changed_at is None or self.paused:
            return None
        return max(0.0, max(self._changed_at, self._solved_at + self.every_s) - now)

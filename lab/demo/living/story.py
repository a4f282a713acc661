"""The plan of the month: the devices, when they sleep, when their photos come, and the happenings.

- Six devices share nine of the ten classes. Each class is on two devices.
- Two devices are on mains, and their processes keep running. Four run on batteries, and have a process only on the days
  on which they wake.
- Photos come into their folders day by day.
- On `GROWN` the fleet gets the tenth class. No device has a photo of it before. Then two devices find photos of it, and
  a third is taught two by hand.
- One device is forgotten on the operator's order, and one withdraws by itself.
- The aggregator and a device are killed in the middle of their work.

This module starts no process and reads no clock: the same seed gives the same month.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from protofleet.lab.demo.story import Images

__all__ = ["DAYS", "DEVICES", "FORGOTTEN", "GROWN", "HAPPENINGS", "Device", "Happening", "Month", "labels_of", "plan"]

DAYS = 30
GROWN = 16  # the day from which the fleet knows one class more
FIRST = 15  # photos of each class that a device comes with
FORGOTTEN = 21
_TAUGHT = 2


@dataclass(frozen=True)
class Device:
    """One device of the month.

    Attributes:
        holds: the classes that it sees, but for the new one.
        joins, leaves: its first day, and the day on which it leaves; one after the last for one that stays.
        every: days between two wakes; 1 for a device on mains, whose process stays.
        asleep: days on which it does not wake although it would.
        finds_new: whether photos of the new class come to it.
        taught: photos of the new class that its owner teaches it by hand.
    """

    name: str
    holds: tuple[int, ...]
    joins: int
    every: int = 1
    leaves: int = DAYS + 1
    asleep: range = range(0)
    finds_new: bool = False
    taught: int = 0

    @property
    def stays_awake(self) -> bool:
        """Whether it is on mains."""
        return self.every == 1

    def is_there(self, day: int) -> bool:
        """Whether it is one of the fleet on this day."""
        return self.joins <= day < self.leaves

    def wakes(self, day: int) -> bool:
        """Whether it is awake on this day; all are on the last."""
        if not self.is_there(day):
            return False
        return day == DAYS or (day not in self.asleep and (day - self.joins) % self.every == 0)


DEVICES = (
    Device("harbour", (0, 1, 8), joins=1, finds_new=True),
    Device("market", (1, 5, 7), joins=1, every=3, leaves=FORGOTTEN),
    Device("school", (2, 6, 7), joins=4, every=3, asleep=range(14, 26)),
    Device("mill", (3, 4, 5), joins=6, every=2, taught=_TAUGHT),
    Device("station", (2, 4, 6), joins=8, every=3, leaves=25),
    Device("park", (0, 3, 8), joins=11, finds_new=True),
)


@dataclass(frozen=True)
class Happening:
    """What happens to the fleet on a day.

    Attributes:
        what: joins, device killed, aggregator killed, class added, taught, forgotten, comes back, withdraws.
        device: whom it concerns; empty for the fleet.
        words: what a person is told.
        marked: whether it stands in the chart.
    """

    day: int
    what: str
    device: str
    words: str
    marked: bool = True


HAPPENINGS = (
    Happening(1, "joins", "harbour", "harbour and market begin: five of nine classes are on some device"),
    Happening(4, "joins", "school", "school joins, with two classes that nobody had: seven"),
    Happening(6, "joins", "mill", "mill joins, with two more: all nine"),
    Happening(8, "joins", "station", "station joins", marked=False),
    Happening(10, "device killed", "mill", "mill is killed (kill -9) when its sums are made, and started again"),
    Happening(11, "joins", "park", "park joins", marked=False),
    Happening(13, "aggregator killed", "", "the aggregator is killed (kill -9) while devices send, and started again"),
    Happening(GROWN, "class added", "", "a class more: {new}; devices change when they wake"),
    Happening(18, "taught", "mill", "the owner of mill teaches it two photos of {new} by hand"),
    Happening(FORGOTTEN, "forgotten", "market", "market is forgotten, on the operator's order"),
    Happening(23, "comes back", "market", "market comes back with all its photos, and is refused", marked=False),
    Happening(25, "withdraws", "station", "station withdraws what it had sent, and leaves"),
    Happening(28, "wakes", "school", "school wakes after 15 days, and changes to the long list"),
)


@dataclass(frozen=True)
class Arrival:
    """A photo that comes to a device: its row among the dealt images, and the day."""

    day: int
    row: int


@dataclass(frozen=True, eq=False)
class Month:
    """Which photo comes where and when.

    Attributes:
        arrivals: by device, into its folder.
        taught: by device, rows that its owner teaches it on the day of `HAPPENINGS`.
    """

    arrivals: dict[str, list[Arrival]]
    taught: dict[str, list[int]] = field(default_factory=dict)

    def come(self, device: str, day: int) -> list[int]:
        """Rows of the photos that come to a device on a day."""
        return [arrival.row for arrival in self.arrivals[device] if arrival.day == day]

    def there(self, device: Device, day: int) -> list[int]:
        """Rows of all that a device has at the end of a day, what it was taught included."""
        rows = [arrival.row for arrival in self.arrivals[device.name] if arrival.day <= day]
        return rows + (self.taught.get(device.name, []) if day >= _day_of("taught", device.name) else [])


def labels_of(images: Images) -> tuple[str, ...]:
    """The classes' names as folders can have them: without what follows a slash."""
    return tuple(label.partition("/")[0] for label in images.labels)


def plan(images: Images, seed: int) -> Month:
    """Deal the photos over devices and days: each class evenly over those that see it, the last class being the new
    one. A device comes with `FIRST` of each class; the others come evenly over the days that follow, every other."""
    rng, new = np.random.default_rng(seed), images.classes - 1
    arrivals: dict[str, list[Arrival]] = {device.name: [] for device in DEVICES}
    for number in range(new):
        holders = [device for device in DEVICES if number in device.holds]
        rows = rng.permutation(np.flatnonzero(images.dealt.y == number))
        for device, part in zip(holders, np.array_split(rows, len(holders)), strict=True):
            arrivals[device.name] += _spread(part, device.joins)
    rows = rng.permutation(np.flatnonzero(images.dealt.y == new))
    taught = {}
    for device in (other for other in DEVICES if other.taught):
        taught[device.name], rows = [int(row) for row in rows[: device.taught]], rows[device.taught :]
    finders = [device for device in DEVICES if device.finds_new]
    for device, part in zip(finders, np.array_split(rows, len(finders)), strict=True):
        arrivals[device.name] += _spread(part, GROWN)
    return Month(arrivals, taught)


def _spread(rows: NDArray[np.int64], first: int) -> list[Arrival]:
    """Rows in the order in which they come: some on the first day, the others on every other day until the last but
    one."""
    days = range(first + 2, DAYS, 2)
    begin, later = rows[:FIRST], rows[FIRST:]
    parts = zip(days, np.array_split(later, len(days)), strict=True)
    return [Arrival(first, int(row)) for row in begin] + [Arrival(day, int(row)) for day, part in parts for row in part]


def _day_of(what: str, device: str) -> int:
    return next(
        (happening.day for happening in HAPPENINGS if (happening.what, happening.device) == (what, device)), DAYS + 1
    )

"""Runs the fleet through the month: each day's photos, wakes and happenings, with real processes.

A day, in order:

1. Happenings to the whole fleet: a class is added, a device is forgotten, another withdraws.
2. Photos come into the folders of the present devices, awake or not.
3. Devices that wake are started. Devices on mains are told to look. Each sends its changes. Kills happen now.
4. The day ends when the newest head holds all contributions, and all devices that are awake have that head on their
   disks. A day takes no longer than that.
5. Every device is tested on the test images, also those that sleep. Then the devices on batteries go to sleep.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.lab.demo.living.figures import Asked, Day, Figures
from protofleet.lab.demo.living.fleet import LivingFleet
from protofleet.lab.demo.living.proofs import stands_of, stretches
from protofleet.lab.demo.living.story import DAYS, DEVICES, HAPPENINGS, Device, Happening, Month, labels_of
from protofleet.lab.demo.story import Images
from protofleet.lab.reporting.progress import Part

__all__ = ["Gone", "Life"]

_SENDS = "bytes to send"


@dataclass(frozen=True)
class Gone:
    """Traces of a forgotten device.

    Attributes:
        samples: number of samples in its standing sums.
        message_bytes: size of their message.
        before, after: number of the message's `stretches` that were in the store's files, before and after.
    """

    device: str
    samples: int
    message_bytes: int
    before: int
    after: int
    stretches: int


@dataclass(frozen=True)
class Given:
    """A bundle and its file."""

    path: Path
    bundle: Bundle


@dataclass
class Life:
    """The run of the month.

    Args:
        short: file of the bundle that the fleet begins with.
        out: the demo's directory.
        part: the line of the display.

    Attributes:
        bundle: the bundle that devices get when they wake.
        has: the bundle of each device that has started.
        days: the figures of each past day.
        starts: number of starts of each device's client.
        gone: traces of the forgotten device.
    """

    fleet: LivingFleet
    images: Images
    month: Month
    figures: Figures
    short: Path
    out: Path
    part: Part
    days: list[Day] = field(default_factory=list)
    starts: dict[str, int] = field(default_factory=dict)
    has: dict[str, Bundle] = field(default_factory=dict)
    gone: Gone | None = None

    def __post_init__(self) -> None:
        self.labels = labels_of(self.images)
        self.bundle = Given(self.short, read_bundle(self.short))

    def live(self) -> None:
        """Run all days. Then every client and the aggregator end.

        Raises:
            LinkError: a process ended early, or something took too long.
        """
        self.fleet.start_aggregator(self.bundle.path)
        for number in range(1, DAYS + 1):
            self._day(number)
            self.part.at(number, f"day {number}, {self.days[-1].fleet.right:.1%} right")
        self.fleet.sleep(*self._awake())
        self.fleet.end_aggregator()

    def _day(self, number: int) -> None:
        happenings = [happening for happening in HAPPENINGS if happening.day == number]
        for happening in happenings:
            self.part.tell(f"day {number:>2}  {happening.words.format(new=self.labels[-1])}")
            self._before(happening)
        present = [device for device in DEVICES if device.is_there(number)]
        for device in present:
            self._photos_come(device, number)
        heard = {name: self.fleet.spoken(name) for name in self._awake()}
        for device in (other for other in present if other.wakes(number)):
            self._wake(device, number)
        for happening in happenings:
            self._meanwhile(happening, heard)
        awake = self._awake()
        self.fleet.await_sums(
            {device.name: len(self.month.there(device, number)) for device in present if device.name in awake}
        )
        self.days.append(self._asked(number, present))
        self.fleet.sleep(*(device.name for device in present if device.name in awake and not device.stays_awake))

    def _before(self, happening: Happening) -> None:
        """The happenings before the day's photos come."""
        if happening.what == "class added":
            self._add_class()
        elif happening.what == "taught":
            self._teach(happening.device)
        elif happening.what == "forgotten":
            self._forget(happening.device)
        elif happening.what == "comes back":
            self._come_back(happening.device)
        elif happening.what == "withdraws":
            self.fleet.withdraw(happening.device, self.bundle.path)

    def _meanwhile(self, happening: Happening, heard: dict[str, int]) -> None:
        """The happenings after the day's devices wake: a kill as soon as sums are made, before or after they are taken.

        After its restart the aggregator first makes a head of everything that it had committed.
        """
        if happening.what == "aggregator killed":
            name, since = next(iter(heard.items()))
            self.fleet.wait(lambda: self.fleet.says(name, _SENDS, since), lambda: f"sums of {name}")
            self.fleet.end_aggregator(signal.SIGKILL)
            self.fleet.start_aggregator(self.bundle.path)
            self.fleet.wait(lambda: self.fleet.says("aggregator", "global version"), lambda: "a head after the restart")
        elif happening.what == "device killed":
            name = happening.device
            self.fleet.wait(lambda: self.fleet.says(name, _SENDS), lambda: f"sums of {name}")
            self.fleet.sleep(name, how=signal.SIGKILL)
            self._start(name)

    def _add_class(self) -> None:
        """Add a class: the aggregator first, then the devices on mains. The others get it when they wake."""
        longer = self.out / "fleet-10.bundle"
        self.fleet.extend(self.bundle.path, self.labels[-1], longer)
        self.fleet.end_aggregator()
        self.bundle = Given(longer, read_bundle(longer))
        self.fleet.start_aggregator(longer)
        self.fleet.sleep(*self._awake())

    def _teach(self, device: str) -> None:
        for row in self.month.taught[device]:
            photo = self.fleet.write_photo(self.out / "devices" / device / "by-hand", self.images.dealt.x[row], row)
            self.fleet.teach(device, photo, self.labels[int(self.images.dealt.y[row])])

    def _forget(self, device: str) -> None:
        message, samples = stands_of(self.fleet.store, device), self.fleet.history(device)[-1]["samples"]
        before, asked = stretches(self.fleet.store, message)
        self.fleet.forget(device)
        after, _ = stretches(self.fleet.store, message)
        self.gone = Gone(device, samples, len(message), before, after, asked)

    def _come_back(self, device: str) -> None:
        self._start(device)
        self.fleet.wait(
            lambda: self.fleet.says(device, "refused by the aggregator"), lambda: f"the refusal of {device}"
        )
        self.fleet.sleep(device)

    def _photos_come(self, device: Device, number: int) -> None:
        data = self.images.dealt
        for row in self.month.come(device.name, number):
            folder = self.fleet.photos(device.name) / self.labels[int(data.y[row])]
            self.fleet.write_photo(folder, data.x[row], row)

    def _wake(self, device: Device, number: int) -> None:
        if device.name not in self._awake():
            self._start(device.name)
        elif self.month.come(device.name, number):
            self.fleet.look(device.name)

    def _start(self, device: str) -> None:
        self.starts[device] = self.starts.get(device, 0) + 1
        self.has[device] = self.bundle.bundle
        self.fleet.wake(device, self.bundle.path)

    def _awake(self) -> list[str]:
        return [device.name for device in DEVICES if self.fleet.awake(device.name)]

    def _asked(self, number: int, present: list[Device]) -> Day:
        """The figures of the day that has ended."""
        answers: dict[str, Asked] = {}
        for device in present:
            known = self.fleet.knows(device.name)
            figures = None if known is None else self.figures.of_device(known, self.has[device.name].manifest)
            if figures is not None:
                answers[device.name] = figures
        rows = {device.name: self.month.there(device, number) for device in present}
        return Day(
            number=number,
            devices=answers,
            pooled=self.figures.of_photos(row for own in rows.values() for row in own),
            alone={name: self.figures.of_photos(own) for name, own in rows.items()},
            photos={name: len(own) for name, own in rows.items()},
            awake=tuple(self._awake()),
            version=self.fleet.told()["global_version"],
        )

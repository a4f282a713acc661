"""The fleet on its way through the month: each day's photos, wakes and happenings, with real processes.

A day, in order:

1. what happens to the fleet as a whole: a class is added, a device is forgotten, another withdraws;
2. photos come into the folders of the devices that are there, awake or not;
3. devices that wake are started, those on mains are told to look; each sends what has changed; kills come now;
4. the day is over when what they sent is in the newest head, and that head on the disks of all that are awake: a day
   takes as long as that takes, and no longer;
5. every device is asked about the test images, also those that sleep; then those on batteries go to sleep.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path

from contract.bundle import Bundle, read_bundle
from lab.demo.living.figures import Asked, Day, Figures
from lab.demo.living.fleet import LivingFleet
from lab.demo.living.proofs import stands_of, stretches
from lab.demo.living.story import DAYS, DEVICES, HAPPENINGS, Device, Happening, Month, labels_of
from lab.demo.story import Images
from lab.reporting.progress import Part

__all__ = ["Gone", "Life"]

_SENDS = "bytes to send"


@dataclass(frozen=True)
class Gone:
    """What was seen of a device that was forgotten.

    Attributes:
        samples: of its sums that stood.
        message_bytes: of the message that they came in.
        before, after: how many of `stretches` pieces of that message were in the store's files.
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
    """The month as it is lived.

    Args:
        short: the bundle's file that the fleet begins with.
        out: the demo's directory.
        part: of the display.

    Attributes:
        bundle: what devices get when they wake.
        has: what each device has, once it has started.
        days: the figures of each day that is over.
        starts: how often each device's client was started.
        gone: of the device that was forgotten.
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
        """All days; then every client and the aggregator end.

        Raises:
            LinkError: a process ended early, or something did not happen in time.
        """
        self.fleet.start_aggregator(self.bundle.path)
        for number in range(1, DAYS + 1):
            self._day(number)
            self.part.at(number, f"day {number}, {self.days[-1].fleet.right:.1%} right")
        self.fleet.sleep(*self._awake())
        self.fleet.end_aggregator()

    def _day(self, number: int) -> None:
        happenings = [each for each in HAPPENINGS if each.day == number]
        for each in happenings:
            self.part.tell(f"day {number:>2}  {each.words.format(new=self.labels[-1])}")
            self._before(each)
        there = [device for device in DEVICES if device.is_there(number)]
        for device in there:
            self._photos_come(device, number)
        heard = {name: self.fleet.spoken(name) for name in self._awake()}
        for device in (each for each in there if each.wakes(number)):
            self._wake(device, number)
        for each in happenings:
            self._meanwhile(each, heard)
        awake = self._awake()
        self.fleet.settle(
            {device.name: len(self.month.there(device, number)) for device in there if device.name in awake}
        )
        self.days.append(self._asked(number, there))
        self.fleet.sleep(*(device.name for device in there if device.name in awake and not device.stays_awake))

    def _before(self, happening: Happening) -> None:
        """What happens before the day's photos come."""
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
        """What happens once the day's devices wake: a kill as soon as sums are made, before or after they are taken.

        After its restart the aggregator makes a head of all that it had committed before anything else is believed.
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
        """The aggregator first, then the devices: those on mains now, the others when they wake."""
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

    def _asked(self, number: int, there: list[Device]) -> Day:
        """The figures of a day that is over."""
        answers: dict[str, Asked] = {}
        for device in there:
            known = self.fleet.knows(device.name)
            found = None if known is None else self.figures.of_device(known, self.has[device.name].manifest)
            if found is not None:
                answers[device.name] = found
        rows = {device.name: self.month.there(device, number) for device in there}
        return Day(
            number=number,
            devices=answers,
            pooled=self.figures.of_photos(row for found in rows.values() for row in found),
            alone={name: self.figures.of_photos(found) for name, found in rows.items()},
            photos={name: len(found) for name, found in rows.items()},
            awake=tuple(self._awake()),
            version=self.fleet.told()["global_version"],
        )

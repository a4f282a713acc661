"""What is said of the calibration of answers: a device's report in its status, and what the fleet makes of all reports.

1. The announcement carries an `AnnouncedCalibration`, at first an empty one. It asks devices for reports.
2. A device answers with a `CalibrationReport` in its status: how much the right classes of its held-out photos
   surprise, at each temperature and strength.
3. The aggregator pools the tables, and announces the best temperature and strength.
4. Devices count their held-out photos in bins at that calibration, and report again. The announcement then carries the
   sum of these bins, too.

`protofleet.contract.calibration` says what is in the tables and bins. See docs/wire.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from protofleet.contract.calibration import TABLE_BYTES, Bins, Calibration, SurpriseTable
from protofleet.contract.errors import WireError
from protofleet.contract.wire.fields import Key, Limits, Part, Positive, Run

__all__ = ["AnnouncedCalibration", "CalibrationReport"]

Way = Annotated[str, Limits(0, 32)]
Strength = Annotated[float, Limits(0, 1)]
Temperature = Annotated[float, Limits(0, 1e6, above=True)]

_require = WireError.unless


@dataclass(frozen=True)
class AnnouncedCalibration(Part, grows=True):
    """The calibration that a fleet's devices answer by; its presence asks them for reports.

    Attributes:
        way: of answering, by name; empty while nothing is known.
        temperature, strength: see `protofleet.contract.calibration.Calibration`.
        photos, devices: how many held-out photos of how many devices it rests on.
        counts: `Bins.to_bytes` of held-out photos at this calibration; empty while there are none.
    """

    way: Annotated[Way, Key(0)] = ""
    temperature: Annotated[Temperature, Key(1)] = 1.0
    strength: Annotated[Strength, Key(2)] = 0.0
    photos: Annotated[int, Key(3)] = 0
    devices: Annotated[int, Key(4)] = 0
    counts: Annotated[bytes, Limits(Bins.BYTES, Bins.BYTES), Key(5, optional=True)] = b""

    def check_together(self) -> None:
        _require(not self.counts or self.bins is not None, "calibration bins", "counts of the same photos", "others")

    @property
    def calibration(self) -> Calibration:
        return Calibration(self.temperature, self.strength)

    @property
    def bins(self) -> Bins | None:
        return Bins.of_bytes(self.counts)


@dataclass(frozen=True)
class CalibrationReport(Part):
    """What one device's held-out photos say of the calibration.

    Attributes:
        run: of the global state that it answers with.
        version: of that state.
        way: of answering, by name.
        photos: how many.
        surprise: `SurpriseTable.to_bytes`.
        temperature, strength: of the announced calibration at which `counts` were counted.
        counts: `Bins.to_bytes`; empty before one was announced.
    """

    run: Annotated[Run, Key(0)]
    version: Annotated[int, Key(1)]
    way: Annotated[str, Limits(1, 32), Key(2)]
    photos: Annotated[Positive, Key(3)]
    surprise: Annotated[bytes, Limits(TABLE_BYTES, TABLE_BYTES), Key(4)]
    temperature: Annotated[Temperature, Key(5)] = 1.0
    strength: Annotated[Strength, Key(6)] = 0.0
    counts: Annotated[bytes, Limits(Bins.BYTES, Bins.BYTES), Key(7, optional=True)] = b""

    def check_together(self) -> None:
        table = SurpriseTable.of_bytes(self.surprise, self.photos)
        _require(table is not None, "calibration table", "a mean surprise up to 20 nats", "more")
        if self.counts:
            bins = self.bins
            same = bins is not None and bins.photos == self.photos
            _require(same, "calibration bins", f"counts of {self.photos} photos", "others")

    @property
    def table(self) -> SurpriseTable:
        table = SurpriseTable.of_bytes(self.surprise, self.photos)
        assert table is not None
        return table

    @property
    def calibration(self) -> Calibration:
        return Calibration(self.temperature, self.strength)

    @property
    def bins(self) -> Bins | None:
        return Bins.of_bytes(self.counts)

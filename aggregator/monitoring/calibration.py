"""The calibration of a fleet's answers: devices' reports, kept in the store, and what is announced of them.

`contract/wire/calibration_messages.py` says what devices report. The newest report of each device stays in the store.
They are pooled when one has come, at most every `PACE_S` seconds, and `PACE_OF_DEVICE_S` more for each device:

1. The way of answering is the one that most devices report. Reports of other ways do not count.
2. The tables are pooled, and the best temperature and strength are chosen (`contract/calibration.py`). What is
   announced stays unless another choice saves more than `CLEAR` nats a photo.
3. The bins of those reports that were counted at this choice are added up.

It is announced anew where the choice has changed, or the bins rest on `MORE` times as many photos as before, or fewer.
A sender that may speak as a device may report anything here. It counts for as many photos as three
usual devices at most, whatever it claims.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import cbor2

from protofleet.aggregator.database import Connection, Database, upsert
from protofleet.aggregator.rounds.round_machine import MAX_DEVICES
from protofleet.contract.calibration import chosen, most_of, pooled
from protofleet.contract.errors import WireError
from protofleet.contract.wire.calibration_messages import AnnouncedCalibration, CalibrationReport
from protofleet.contract.wire.fields import MAX_UINT, read_map, write_map

__all__ = [
    "CLEAR",
    "MORE",
    "MOST_PHOTOS",
    "PACE_OF_DEVICE_S",
    "PACE_S",
    "CalibrationTable",
    "calibration_facts",
    "fleet_calibration",
    "stored_calibration",
]

CLEAR = 0.005  # nats a photo: less is no reason to announce anew
MORE = 1.25
PACE_S, PACE_OF_DEVICE_S = 0.5, 0.0003  # pooling takes about a tenth of the latter
MOST_PHOTOS = 4_000_000  # in announced bins: thousandths of more may not fit their four bytes

Reports = Mapping[str, CalibrationReport]


class CalibrationTable:
    """This table of an open store.

    Args:
        run: gives the store's run, which may begin anew.

    Attributes:
        announced: what devices are told.
    """

    def __init__(self, file: Database, run: Callable[[], bytes]) -> None:
        self._db, self._disk, self._transaction, self._run = file.connection, file.guard, file.transaction, run
        with self._disk():
            self._reports = _reports(self._db)
        self._heard: dict[str, CalibrationReport] = {}
        self._pooled_at = float("-inf")
        self._is_due = False
        self.announced = fleet_calibration(self._reports, None)

    def hear(self, device: str, report: CalibrationReport | None, *, max_samples: int) -> None:
        """Take the report in a status; it is stored with the next `commit_heard`.

        A status without a report changes nothing: a last will has none. Reports of another run, of more photos than a
        device may have, and of names beyond the largest possible fleet are ignored.
        """
        if report is None or report.run != self._run() or report.photos > max_samples:
            return
        if report != self._reports.get(device) and (
            device in self._reports or len(self._reports) + len(self._heard) < MAX_DEVICES
        ):
            self._heard[device] = report

    def commit_heard(self, at: float) -> None:
        """Make the heard reports durable.

        Args:
            at: seconds since the epoch.

        Raises:
            StoreError: the disk refuses.
        """
        heard, self._heard = self._heard, {}
        if not heard:
            return
        rows = [(device, at, cbor2.dumps(write_map(report, "f32"))) for device, report in heard.items()]
        with self._transaction() as db:
            db.executemany(upsert("calibration", "device", "told_at", "report"), rows)
        self._reports |= heard
        self._is_due = True

    def renew(self, now: float) -> bool:
        """Pool the reports again if it is time; whether something else is announced from now on.

        Args:
            now: seconds of a steady clock.
        """
        if not self._is_due or now - self._pooled_at < PACE_S + PACE_OF_DEVICE_S * len(self._reports):
            return False
        self._pooled_at, self._is_due = now, False
        newer = fleet_calibration(self._reports, self.announced)
        if not _is_news(self.announced, newer):
            return False
        self.announced = newer
        return True

    def forget(self, device: str) -> None:
        """Its row was removed."""
        self._heard.pop(device, None)
        self._is_due |= self._reports.pop(device, None) is not None


def fleet_calibration(reports: Reports, before: AnnouncedCalibration | None) -> AnnouncedCalibration:
    """What all reports together say.

    Args:
        before: what was announced, which stays in force unless something else is clearly better.
    """
    devices = Counter(report.way for report in reports.values())
    if not devices:
        return AnnouncedCalibration()
    way = max(sorted(devices), key=devices.__getitem__)
    told = [report for report in reports.values() if report.way == way]
    held = before.calibration if before is not None and before.way == way else None
    best = chosen(pooled([report.table for report in told]), held, CLEAR)
    if best is None:
        return AnnouncedCalibration()
    most = most_of([report.photos for report in told])
    counted = [bins.at_most(most) for report in told if report.calibration == best and (bins := report.bins)]
    total = sum(counted[1:], counted[0]).at_most(MOST_PHOTOS).to_bytes() if counted else b""
    photos = min(sum(min(report.photos, most) for report in told), MAX_UINT)
    return AnnouncedCalibration(way, best.temperature, best.strength, photos, len(told), total)


def calibration_facts(announced: AnnouncedCalibration) -> dict[str, Any] | None:
    """The same for JSON; None while nothing is known.

    `error` is the expected calibration error; `bins` are ten, by the probability of the answer: how many photos, how
    many right answers, and how many there would be by these probabilities. Both are None before photos were counted.
    """
    if not announced.way:
        return None
    bins = announced.bins
    counts = () if bins is None else zip(bins.answered, bins.right, bins.expected, strict=True)
    return {
        "way": announced.way,
        "temperature": announced.temperature,
        "strength": announced.strength,
        "photos": announced.photos,
        "devices": announced.devices,
        "error": None if bins is None else bins.error,
        "bins": [{"photos": n, "right": right, "expected": expected / 1_000} for n, right, expected in counts] or None,
    }


def stored_calibration(db: Connection) -> AnnouncedCalibration:
    """What the reports in a store say, for a reader that is not its aggregator."""
    return fleet_calibration(_reports(db), None)


def _is_news(before: AnnouncedCalibration, after: AnnouncedCalibration) -> bool:
    if (before.way, before.calibration) != (after.way, after.calibration):
        return True
    known, now = (0 if bins is None else bins.photos for bins in (before.bins, after.bins))
    return now >= MORE * max(known, 1) or now < known


def _reports(db: Connection) -> dict[str, CalibrationReport]:
    """By device; a row that cannot be read counts as none."""
    found = {}
    for device, report in db.execute("SELECT device, report FROM calibration").fetchall():
        try:
            fields = cbor2.loads(bytes(report))
            if isinstance(fields, dict):
                found[str(device)] = read_map(CalibrationReport, fields)
        except (WireError, cbor2.CBORError, ValueError):
            continue
    return found

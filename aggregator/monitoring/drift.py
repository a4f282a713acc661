"""When a device departs from itself: its newest reports compared with its earlier ones.

Devices report four numbers (`contract/drift.py`). The newest `KEPT` reports of each device stay in the store. A device
is suspected when both of its last two reports lie above what its reports before them allow, in the same figure:

    limit = median + 4 · max(1.4826 · median absolute deviation, floor)

The floor is 5 % of the median for `distance` and `moved`. For `unlike`, a share of n photos, it is the binomial
deviation at n. Bursts of alike photos make a few reports large in `unlike` and `moved`: there the deviation is at least
what the largest tenth of the older reports speaks for, (90 % quantile − median) / 1.2816. The test needs `BEFORE`
earlier reports.

One bad report among many moves neither median nor deviation, two in a row are no accident, and only values above the
usual count. A lasting change becomes usual: after some thirty reports nothing is suspected any more.

A sender that may speak as a device may report anything here. It can make that device suspected, or hide its drift, and
nothing more.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from protofleet.aggregator.database import Connection, Database
from protofleet.aggregator.monitoring.events import DriftSuspected
from protofleet.aggregator.rounds.round_machine import MAX_DEVICES
from protofleet.contract.drift import Drift, read_drift

__all__ = ["BEFORE", "KEPT", "Departure", "DriftTable", "Suspects", "departure", "drift_of"]

BEFORE, KEPT = 8, 64
_DEVIATIONS, _NORMAL = 4.0, 1.4826
_RECENT = 24
_SHARE, _AT_SHARE = 0.9, 1.2816  # a normal variable is so many deviations above its median in one case of ten
_FLOOR = 0.05  # of the median distance
_Deviation = Callable[[Drift, float], float]


@dataclass(frozen=True)
class Departure:
    """The figure in which a device departs from itself: its value now, its usual value, and the limit."""

    figure: str
    now: float
    usual: float
    limit: float


def departure(reports: Sequence[Drift]) -> Departure | None:
    """Whether the last two of a device's reports, oldest first, are unlike those before."""
    for figure, (least, is_bursty) in _FIGURES.items():
        told = [report for report in reports if getattr(report, figure) is not None]
        if len(told) < BEFORE + 2 or told[-1] is not reports[-1]:
            continue
        before, last = told[:-2], told[-2:]
        past = [getattr(report, figure) for report in before]
        usual = statistics.median(past)
        spread = _NORMAL * statistics.median(abs(value - usual) for value in past)
        spread = max(spread, _tail(past, usual)) if is_bursty else spread
        limits = [usual + _DEVIATIONS * max(spread, least(report, usual)) for report in last]
        if all(getattr(report, figure) > limit for report, limit in zip(last, limits, strict=True)):
            return Departure(figure, getattr(last[-1], figure), usual, limits[-1])
    return None


def _tail(past: Sequence[float], usual: float) -> float:
    """The deviation that the largest tenth of the reports speaks for: bursts of alike photos make few, large values.

    The newest `_RECENT` reports do not count, if there are enough others: they may be those of a change that lasts.
    """
    older = past[: max(BEFORE, len(past) - _RECENT)]
    quantile = sorted(older)[min(math.ceil(_SHARE * len(older)), len(older) - 1)]
    return (quantile - usual) / _AT_SHARE


def _of_a_mean(report: Drift, usual: float) -> float:
    return _FLOOR * usual


def _of_a_share(report: Drift, usual: float) -> float:
    share = min(max(usual, 1.0 / report.samples), 1.0)
    return float((share * (1.0 - share) / report.samples) ** 0.5)


_FIGURES: Mapping[str, tuple[_Deviation, bool]] = {
    "distance": (_of_a_mean, False),
    "unlike": (_of_a_share, True),
    "moved": (_of_a_mean, True),
}
"""By figure the floor of its deviation, and whether bursts of alike photos make it large."""


class Suspects(dict[str, Departure]):
    """The suspected names, and why.

    Args:
        histories: names, and the reports of each, oldest first.
    """

    def __init__(self, histories: Iterable[tuple[str, Sequence[Drift]]] = ()) -> None:
        judged = ((name, departure(reports)) for name, reports in histories)
        super().__init__({name: departed for name, departed in judged if departed is not None})

    def judge(self, name: str, reports: Sequence[Drift]) -> Departure | None:
        """Judge one name again; returns why it is suspected, if it was not before."""
        was, departed = name in self, departure(reports)
        if departed is None:
            self.pop(name, None)
            return None
        self[name] = departed
        return None if was else departed

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {name: asdict(departed) for name, departed in sorted(self.items())}


class DriftTable:
    """This table of an open store.

    Attributes:
        suspected: why, by device.
    """

    def __init__(self, file: Database) -> None:
        self._db, self._disk, self._transaction = file.connection, file.guard, file.transaction
        self._heard: dict[str, Drift] = {}
        with self._disk():
            self._devices = {device for (device,) in self._db.execute("SELECT DISTINCT device FROM drift")}
            self.suspected = Suspects(_reports(self._db))

    def hear(self, device: str, metrics: Mapping[str, float], *, max_samples: int) -> None:
        """Take the drift report in a status; it is stored with the next `commit_heard`.

        Names beyond the largest possible fleet are ignored.
        """
        report = read_drift(metrics, max_samples=max_samples)
        if report is not None and (device in self._devices or len(self._devices) < MAX_DEVICES):
            self._devices.add(device)
            self._heard[device] = report

    def commit_heard(self, at: float) -> list[DriftSuspected]:
        """Make the heard reports durable; returns the newly suspected devices.

        A status that is heard again is no new report.

        Args:
            at: seconds since the epoch.

        Raises:
            StoreError: the disk refuses.
        """
        heard, self._heard = self._heard, {}
        newer = {device: report for device, report in heard.items() if self._reports_of(device)[-1:] != [report]}
        if not newer:
            return []
        with self._transaction() as db:
            for device, report in newer.items():
                cursor = db.execute("SELECT 1 + coalesce(max(number), 0) FROM drift WHERE device = ?", (device,))
                (number,) = cursor.fetchone()
                row = (device, number, at, report.samples, report.unlike, report.distance, report.moved)
                db.execute("INSERT INTO drift VALUES (?, ?, ?, ?, ?, ?, ?)", row)
                db.execute("DELETE FROM drift WHERE device = ? AND number <= ?", (device, number - KEPT))
        judged = ((device, self.suspected.judge(device, self._reports_of(device))) for device in newer)
        return [
            DriftSuspected(device, departed.figure, departed.now, departed.usual)
            for device, departed in judged
            if departed is not None
        ]

    def forget(self, device: str) -> None:
        """Its rows were removed."""
        self._heard.pop(device, None)
        self.suspected.pop(device, None)
        self._devices.discard(device)

    def _reports_of(self, device: str) -> list[Drift]:
        with self._disk():
            rows = self._db.execute(
                "SELECT samples, unlike, distance, moved FROM drift WHERE device = ? ORDER BY number", (device,)
            ).fetchall()
        return [Drift(*row) for row in rows]


def drift_of(db: Connection) -> dict[str, dict[str, Any]]:
    """The last report of each device of a store, how many are kept, and why it is suspected, by name, for JSON."""
    by_device = {}
    for device, reports in _reports(db):
        departed = departure(reports)
        by_device[device] = {
            "reports": len(reports), **asdict(reports[-1]), "suspected": None if departed is None else asdict(departed)
        }  # fmt: skip
    return by_device


def _reports(db: Connection) -> Iterator[tuple[str, list[Drift]]]:
    """Devices and what they said, oldest first."""
    rows = db.execute("SELECT device, samples, unlike, distance, moved FROM drift ORDER BY device, number").fetchall()
    for device, rows_of_device in groupby(rows, key=lambda row: str(row[0])):
        yield device, [Drift(*row[1:]) for row in rows_of_device]

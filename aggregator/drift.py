"""When a device departs from itself: what it said of its newest photos beside what it used to say.

Devices report three numbers (`contract/drift.py`). The newest `KEPT` of each device stay in the store. A device is
suspected when both of its last two reports lie above what its reports before them allow, in the same figure:

    limit = median + 4 · max(1.4826 · median absolute deviation, floor)

with a floor of 5 % of the median for `distance`, and for `unlike`, a share of n photos, the binomial deviation at n. It
needs `BEFORE` earlier reports. One bad report among many moves neither median nor deviation, two in a row are no
accident, and only farther than usual counts. What lasts becomes usual: after some thirty reports nothing is suspected
any more.

Whoever may speak as a device may say anything here: it suspects that device, or hides what is true of it, and no more.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from aggregator.database import Connection, Database
from aggregator.events import DriftSuspected
from aggregator.rounds import MAX_DEVICES
from contract.drift import Drift, read_drift

__all__ = ["BEFORE", "KEPT", "Departure", "DriftTable", "Suspects", "departure", "drift_of"]

BEFORE, KEPT = 8, 64
_DEVIATIONS, _NORMAL = 4.0, 1.4826
_FLOOR = 0.05  # of the median distance
_Deviation = Callable[[Drift, float], float]


@dataclass(frozen=True)
class Departure:
    """In which figure a device departs from itself: what it says now, what it usually said, and how far it may."""

    figure: str
    now: float
    usual: float
    limit: float


def departure(told: Sequence[Drift]) -> Departure | None:
    """Whether the last two of a device's reports, oldest first, are unlike those before."""
    if len(told) < BEFORE + 2:
        return None
    before, last = told[:-2], told[-2:]
    for figure, least in _FIGURES.items():
        past = [getattr(each, figure) for each in before]
        usual = statistics.median(past)
        spread = _NORMAL * statistics.median(abs(value - usual) for value in past)
        limits = [usual + _DEVIATIONS * max(spread, least(each, usual)) for each in last]
        if all(getattr(each, figure) > limit for each, limit in zip(last, limits, strict=True)):
            return Departure(figure, getattr(last[-1], figure), usual, limits[-1])
    return None


def _of_a_mean(told: Drift, usual: float) -> float:
    return _FLOOR * usual


def _of_a_share(told: Drift, usual: float) -> float:
    share = min(max(usual, 1.0 / told.samples), 1.0)
    return float((share * (1.0 - share) / told.samples) ** 0.5)


_FIGURES: Mapping[str, _Deviation] = {"distance": _of_a_mean, "unlike": _of_a_share}


class Suspects(dict[str, Departure]):
    """Who is suspected, and why, by name.

    Args:
        histories: names, and what is known of each, oldest first.
    """

    def __init__(self, histories: Iterable[tuple[str, Sequence[Drift]]] = ()) -> None:
        found = ((name, departure(told)) for name, told in histories)
        super().__init__({name: why for name, why in found if why is not None})

    def judge(self, name: str, told: Sequence[Drift]) -> Departure | None:
        """Judge one anew; why it is suspected, where it was not before."""
        was, why = name in self, departure(told)
        if why is None:
            self.pop(name, None)
            return None
        self[name] = why
        return None if was else why

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {name: asdict(why) for name, why in sorted(self.items())}


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
        """What a status says; kept with the next `settle`. A flood of names beyond all fleets is not heard."""
        found = read_drift(metrics, max_samples=max_samples)
        if found is not None and (device in self._devices or len(self._devices) < MAX_DEVICES):
            self._devices.add(device)
            self._heard[device] = found

    def settle(self, at: float) -> list[DriftSuspected]:
        """Make durable what was heard; who is suspected from now on. A status that is heard again is no report.

        Args:
            at: seconds since the epoch.

        Raises:
            StoreError: when the disk refuses.
        """
        heard, self._heard = self._heard, {}
        newer = {device: told for device, told in heard.items() if self._told(device)[-1:] != [told]}
        if not newer:
            return []
        with self._transaction() as db:
            for device, told in newer.items():
                found = db.execute("SELECT 1 + coalesce(max(number), 0) FROM drift WHERE device = ?", (device,))
                (number,) = found.fetchone()
                row = (device, number, at, told.samples, told.unlike, told.distance)
                db.execute("INSERT INTO drift VALUES (?, ?, ?, ?, ?, ?)", row)
                db.execute("DELETE FROM drift WHERE device = ? AND number <= ?", (device, number - KEPT))
        judged = ((device, self.suspected.judge(device, self._told(device))) for device in newer)
        return [DriftSuspected(device, why.figure, why.now, why.usual) for device, why in judged if why is not None]

    def forget(self, device: str) -> None:
        """Its rows were removed."""
        self._heard.pop(device, None)
        self.suspected.pop(device, None)
        self._devices.discard(device)

    def _told(self, device: str) -> list[Drift]:
        with self._disk():
            rows = self._db.execute(
                "SELECT samples, unlike, distance FROM drift WHERE device = ? ORDER BY number", (device,)
            ).fetchall()
        return [Drift(*row) for row in rows]


def drift_of(db: Connection) -> dict[str, dict[str, Any]]:
    """What each device of a store said last, how many reports are kept, and why it is suspected, by name, for JSON."""
    found = {}
    for device, told in _reports(db):
        why = departure(told)
        found[device] = {
            "reports": len(told), **asdict(told[-1]), "suspected": None if why is None else asdict(why)
        }  # fmt: skip
    return found


def _reports(db: Connection) -> Iterator[tuple[str, list[Drift]]]:
    """Devices and what they said, oldest first."""
    rows = db.execute("SELECT device, samples, unlike, distance FROM drift ORDER BY device, number").fetchall()
    for device, told in groupby(rows, key=lambda row: str(row[0])):
        yield device, [Drift(*row[1:]) for row in told]

"""When a class departs from itself, where sums stand: what came of it beside what the same device had of it before.

A device that sends its sums anew shows the mean of what came since: (S' − S) / (n' − n), of unit features. Its squared
distance to the mean of what was there, S / n, is compared with what chance allows for so many samples,

    distance = ‖came − had‖² / ((1 − ‖had‖²) · (1 / n + 1 / (n' − n))),

where 1 − ‖had‖² is the spread of unit features about their mean: about 1 where nothing has changed. At least `LEAST`
samples must have been there, and as many have come. Nothing is told for it that is not in the sums; where a device's
photos also went, chance allows more than this says, which its own past then shows.

The newest `KEPT` distances of each class stay in the store, over all devices, and the last two are judged as a device's
reports are (`aggregator/drift.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from aggregator.database import Connection, Database
from aggregator.drift import KEPT, Suspects
from aggregator.events import ClassDriftSuspected
from contract.drift import LEAST, Drift
from contract.statistics import Statistic

__all__ = ["ClassDriftTable", "Moved", "class_drift_of", "moved"]

_FARTHEST = 1e6
_LEAST_SPREAD = 1e-6  # of unit features: below it they are all one, or rounded


@dataclass(frozen=True)
class Moved:
    """How far the `samples` of class `number` that came lie from what was there; see this file's beginning."""

    number: int
    samples: int
    distance: float


def moved(former: Statistic, newer: Statistic) -> list[Moved]:
    """What a device's newer sums say of its classes, beside those they take the place of; empty where these are of no
    unit features."""
    fields = [field for field in former.row_fields() if field.holds == "unit-features"]
    if not fields or former.GROUPS != 1:
        return []
    had, has = former.rows(fields[0]), newer.rows(fields[0])
    count, came = former.counts, newer.counts - former.counts
    found = []
    for number in np.flatnonzero((count >= LEAST) & (came >= LEAST)):
        mean = had[number] / count[number]
        spread = 1.0 - float(mean @ mean)
        away = (has[number] - had[number]) / came[number] - mean
        if spread > _LEAST_SPREAD:
            allowed = spread * (1.0 / count[number] + 1.0 / came[number])
            distance = min(float(away @ away) / float(allowed), _FARTHEST)
            found.append(Moved(int(number), int(came[number]), distance))
    return found


class ClassDriftTable:
    """This table of an open store.

    Attributes:
        suspected: why, by class.
    """

    def __init__(self, file: Database) -> None:
        self._db, self._disk, self._transaction = file.connection, file.guard, file.transaction
        self._heard: list[tuple[str, str, Moved]] = []
        self.look()

    def look(self) -> None:
        """Judge all classes anew, after rows were removed; what was heard and is not kept yet is dropped."""
        self._heard.clear()
        with self._disk():
            self.suspected = Suspects(_histories(self._db))

    def hear(self, device: str, said: Sequence[Moved], labels: Sequence[str]) -> None:
        """What a device's sums say; kept with the next `settle`."""
        self._heard += [(labels[each.number], device, each) for each in said]

    def settle(self, at: float) -> list[ClassDriftSuspected]:
        """Make durable what was heard; which classes are suspected from now on.

        Args:
            at: seconds since the epoch.

        Raises:
            StoreError: when the disk refuses.
        """
        heard, self._heard = self._heard, []
        if not heard:
            return []
        with self._transaction() as db:
            for name, device, each in heard:
                found = db.execute("SELECT 1 + coalesce(max(number), 0) FROM class_drift WHERE class = ?", (name,))
                (number,) = found.fetchone()
                row = (name, number, device, at, each.samples, each.distance)
                db.execute("INSERT INTO class_drift VALUES (?, ?, ?, ?, ?, ?)", row)
                db.execute("DELETE FROM class_drift WHERE class = ? AND number <= ?", (name, number - KEPT))
        named = dict.fromkeys(name for name, _, _ in heard)
        judged = ((name, self.suspected.judge(name, self._history(name))) for name in named)
        return [ClassDriftSuspected(name, why.now, why.usual) for name, why in judged if why is not None]

    def _history(self, name: str) -> list[Drift]:
        with self._disk():
            (history,) = (of for _, of in _histories(self._db, "WHERE class = ?", (name,)))
        return history


def class_drift_of(db: Connection) -> dict[str, dict[str, Any]]:
    """The classes of a store that are suspected, and why, by name, for JSON."""
    return Suspects(_histories(db)).facts()


def _histories(db: Connection, where: str = "", values: Sequence[object] = ()) -> list[tuple[str, list[Drift]]]:
    """Classes and how far what came of them lay, oldest first."""
    told = f"SELECT class, samples, distance FROM class_drift {where} ORDER BY class, number"
    rows = db.execute(told, values).fetchall()
    return [
        (name, [Drift(samples, 0.0, distance) for _, samples, distance in of])
        for name, of in groupby(rows, key=lambda row: str(row[0]))
    ]

"""When a class departs from itself, where sums stand: a device's new samples of it compared with its earlier ones.

A device that sends its sums again shows the mean of the added samples: (S' − S) / (n' − n), of unit features. Its
squared distance to the mean of the earlier samples, S / n, is compared with what chance allows for so many samples,

    distance = ‖came − had‖² / ((1 − ‖had‖²) · (1 / n + 1 / (n' − n))),

where 1 − ‖had‖² is the spread of unit features about their mean: about 1 where nothing has changed. At least `LEAST`
samples must have been there, and at least `LEAST` must have come. Devices send nothing for this beyond their sums. If a
device also removed photos, chance allows more than this formula says; the device's own past then shows that.

The newest `KEPT` distances of each class stay in the store, over all devices. The last two are judged as a device's
reports are (`aggregator/monitoring/drift.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from protofleet.aggregator.database import Connection, Database
from protofleet.aggregator.monitoring.drift import KEPT, Suspects
from protofleet.aggregator.monitoring.events import ClassDriftSuspected
from protofleet.contract.drift import LEAST, Drift
from protofleet.contract.sums.statistics import Statistic

__all__ = ["ClassDriftTable", "Moved", "class_drift_of", "moved"]

_FARTHEST = 1e6
_LEAST_SPREAD = 1e-6  # of unit features: below it they are all one, or rounded


@dataclass(frozen=True)
class Moved:
    """How far the `samples` added samples of class `number` lie from the earlier ones; see this file's beginning."""

    number: int
    samples: int
    distance: float


def moved(former: Statistic, newer: Statistic) -> list[Moved]:
    """How far each class moved from a device's former sums to its newer ones; empty for sums of no unit features."""
    fields = [field for field in former.row_fields() if field.holds == "unit-features"]
    if not fields or former.GROUPS != 1:
        return []
    had, has = former.rows(fields[0]), newer.rows(fields[0])
    count, added = former.counts, newer.counts - former.counts
    moves = []
    for number in np.flatnonzero((count >= LEAST) & (added >= LEAST)):
        mean = had[number] / count[number]
        spread = 1.0 - float(mean @ mean)
        shift = (has[number] - had[number]) / added[number] - mean
        if spread > _LEAST_SPREAD:
            allowed = spread * (1.0 / count[number] + 1.0 / added[number])
            distance = min(float(shift @ shift) / float(allowed), _FARTHEST)
            moves.append(Moved(int(number), int(added[number]), distance))
    return moves


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
        """Judge all classes again, after rows were removed. What was heard and is not stored yet is dropped."""
        self._heard.clear()
        with self._disk():
            self.suspected = Suspects(_histories(self._db))

    def hear(self, device: str, moves: Sequence[Moved], labels: Sequence[str]) -> None:
        """Take the moves in a device's sums; they are stored with the next `commit_heard`."""
        self._heard += [(labels[move.number], device, move) for move in moves]

    def commit_heard(self, at: float) -> list[ClassDriftSuspected]:
        """Make the heard moves durable; returns the newly suspected classes.

        Args:
            at: seconds since the epoch.

        Raises:
            StoreError: the disk refuses.
        """
        heard, self._heard = self._heard, []
        if not heard:
            return []
        with self._transaction() as db:
            for name, device, move in heard:
                cursor = db.execute("SELECT 1 + coalesce(max(number), 0) FROM class_drift WHERE class = ?", (name,))
                (number,) = cursor.fetchone()
                row = (name, number, device, at, move.samples, move.distance)
                db.execute("INSERT INTO class_drift VALUES (?, ?, ?, ?, ?, ?)", row)
                db.execute("DELETE FROM class_drift WHERE class = ? AND number <= ?", (name, number - KEPT))
        named = dict.fromkeys(name for name, _, _ in heard)
        judged = ((name, self.suspected.judge(name, self._history(name))) for name in named)
        return [
            ClassDriftSuspected(name, departed.now, departed.usual) for name, departed in judged if departed is not None
        ]

    def _history(self, name: str) -> list[Drift]:
        with self._disk():
            (history,) = (reports for _, reports in _histories(self._db, "WHERE class = ?", (name,)))
        return history


def class_drift_of(db: Connection) -> dict[str, dict[str, Any]]:
    """The classes of a store that are suspected, and why, by name, for JSON."""
    return Suspects(_histories(db)).facts()


def _histories(db: Connection, where: str = "", values: Sequence[object] = ()) -> list[tuple[str, list[Drift]]]:
    """Classes and how far what came of them lay, oldest first."""
    statement = f"SELECT class, samples, distance FROM class_drift {where} ORDER BY class, number"
    rows = db.execute(statement, values).fetchall()
    return [
        (name, [Drift(samples, 0.0, distance) for _, samples, distance in class_rows])
        for name, class_rows in groupby(rows, key=lambda row: str(row[0]))
    ]

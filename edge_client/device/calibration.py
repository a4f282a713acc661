"""How true a device's probabilities are on its held-out photos: what it reports, and what it makes for itself.

1. After an evaluation, `HeldOut` has the scores of the held-out photos by the way that the device answers by.
2. `HeldOut.report` makes the report that goes into the status, where the announcement asks for one
   (`contract/wire/calibration_messages.py`).
3. `Known` is what the device's answers follow from: the fleet's calibration, or its own where the fleet has none; and
   how often the device has each class. The journal keeps it, so that `protofleet predict` answers alike.

Held-out photos have trained nothing. The same photos measure accuracy; a temperature does not change which class is
answered, and one number for how much the class shares count is chosen by all devices together.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.calibration import (
    LEAST_PHOTOS,
    Bins,
    Calibration,
    SurpriseTable,
    chosen,
    log_shares,
    surprise_table,
)
from protofleet.contract.heads.answers import Answer
from protofleet.contract.wire.calibration_messages import AnnouncedCalibration, CalibrationReport

__all__ = ["CUT", "KEPT", "Gathered", "HeldOut", "Known", "first_counts"]

KEPT = 0.95  # share of known photos that stay known
CUT = 30.0  # photos: so many of a device's own labels count at most, before the photos that it answers about
_KEPT_NUMBERS = 1 << 20  # scores of held-out photos that stay in memory, 4 bytes each


def first_counts(counts: NDArray[np.integer]) -> NDArray[np.float64]:
    """Class counts (C,) of a device's own labels, cut to `CUT` photos together: what it is taken to see at first."""
    wide = np.asarray(counts, dtype=np.float64)
    return wide * min(1.0, CUT / max(wide.sum(), 1.0))


@dataclass(frozen=True, eq=False)
class HeldOut:
    """The held-out photos of a device, as its way of answering sees them.

    Attributes:
        way: of answering, by name.
        scores: (N, C) float32, in units of the way's own scale.
        labels: (N,) the right classes.
        counts: (C,) of the device's own training photos.
        run, version: of the global state that it answers with; zeros and 0 for none.
    """

    way: str
    scores: NDArray[np.float32]
    labels: NDArray[np.int64]
    counts: NDArray[np.int64]
    run: bytes = bytes(4)
    version: int = 0

    @property
    def log_shares(self) -> NDArray[np.float64]:
        """log π (C,) of the device."""
        return log_shares(first_counts(self.counts))

    @cached_property
    def _table(self) -> SurpriseTable:
        return surprise_table(self.scores.astype(np.float64), self.labels, self.log_shares)

    def report(self, announced: AnnouncedCalibration) -> CalibrationReport | None:
        """What is told of these photos, with bins where the announced calibration is of this way; None for no photos,
        or without a global state."""
        if not len(self.labels) or not self.version:
            return None
        report = CalibrationReport(self.run, self.version, self.way, len(self.labels), self._table.to_bytes())
        if announced.way != self.way:
            return report
        best = announced.calibration
        counts = self._bins(best).to_bytes()
        return replace(report, temperature=best.temperature, strength=best.strength, counts=counts)

    def known(self) -> Known:
        """What this device alone makes of them: no calibration where there are fewer than `LEAST_PHOTOS`."""
        best = None
        if len(self.labels) >= LEAST_PHOTOS:
            best = chosen(self._table)
        counts, limit = tuple(map(int, self.counts)), self._limit()
        if best is None:
            return Known(counts)
        own = AnnouncedCalibration(
            self.way, best.temperature, best.strength, len(self.labels), 1, self._bins(best).to_bytes()
        )
        return Known(counts, own=own, limit=limit)

    def _limit(self) -> float | None:
        """The novelty above which a photo is unknown, so that `KEPT` of known ones stay known: minus the largest score.

        None for fewer photos than `LEAST_PHOTOS`.
        """
        if len(self.labels) < LEAST_PHOTOS:
            return None
        novelty = np.sort(-self.scores.max(axis=1).astype(np.float64))
        place = min(int(np.ceil(KEPT * (len(novelty) + 1))), len(novelty)) - 1
        return float(novelty[place])

    def _bins(self, calibration: Calibration) -> Bins:
        return Bins.of(calibration.log_probabilities(self.scores.astype(np.float64), self.log_shares), self.labels)


class Gathered:
    """Gathers the scores of held-out photos while they are tested.

    Args:
        way, answer: how the device answers.
        photos, classes: N and C.
    """

    def __init__(self, way: str, answer: Answer, photos: int, classes: int) -> None:
        self.way, self._answer, self._scale = way, answer, answer.scale
        self._kept = min(photos, max(_KEPT_NUMBERS // max(classes, 1), 1))
        self._scores: list[NDArray[np.float32]] = []
        self._rows: list[NDArray[np.int64]] = []
        self._chosen = np.linspace(0, photos - 1, self._kept).astype(np.int64)  # evenly over all of them

    def add(self, rows: slice, features: NDArray[np.float32]) -> None:
        """A block of photos: which rows they are, and their features (n, D)."""
        some = self._chosen[(self._chosen >= rows.start) & (self._chosen < rows.stop)]
        if len(some):
            scores = self._answer.scores(features[some - rows.start]) / self._scale
            self._scores.append(scores.astype(np.float32))
            self._rows.append(some)

    def held_out(
        self, labels: NDArray[np.int64], counts: NDArray[np.int64], run: bytes, version: int
    ) -> HeldOut | None:
        """All that was gathered; None for nothing.

        Args:
            labels: (N,) of all photos.
            counts: (C,) of the training photos.
        """
        if not self._rows:
            return None
        rows = np.concatenate(self._rows)
        return HeldOut(self.way, np.concatenate(self._scores), labels[rows], counts, run, version)


@dataclass(frozen=True)
class Known:
    """What probabilities follow from.

    Attributes:
        counts: (C,) of the device's own training photos; empty where they are not known.
        fleet: what the fleet announced last.
        own: of this device's held-out photos alone; empty where they are too few.
        limit: by these photos, the novelty above which a photo is unknown (`LargestScoreNovelty`), for the way of
            `own`; None where they are too few.
    """

    counts: tuple[int, ...] = ()
    fleet: AnnouncedCalibration = field(default_factory=AnnouncedCalibration)
    own: AnnouncedCalibration = field(default_factory=AnnouncedCalibration)
    limit: float | None = None

    def limit_of(self, way: str) -> float | None:
        """The limit, if it is of this way of answering."""
        return self.limit if self.own.way == way else None

    def of_way(self, way: str) -> tuple[AnnouncedCalibration, str] | None:
        """The calibration of a way of answering, and whose it is, in words: the fleet's first. None for none."""
        for announced, whose in ((self.fleet, "the fleet's"), (self.own, "this device's")):
            if announced.way == way:
                return announced, whose
        return None

    def written(self) -> str:
        """As the journal keeps it."""
        facts = {"counts": self.counts, "fleet": _facts(self.fleet), "own": _facts(self.own), "limit": self.limit}
        return json.dumps(facts)

    @classmethod
    def read(cls, written: str) -> Known:
        """What `written` gave.

        Raises:
            ValueError, TypeError, KeyError, WireError: something else.
        """
        facts = json.loads(written)
        counts = tuple(map(int, facts["counts"]))
        if any(count < 0 for count in counts):
            raise ValueError(f"counts of classes: {min(counts)}")
        limit = facts["limit"]
        if limit is not None and not np.isfinite(limit):
            raise ValueError(f"a limit of novelty: {limit}")
        return cls(counts, _announced(facts["fleet"]), _announced(facts["own"]), limit)


def _facts(announced: AnnouncedCalibration) -> dict[str, object]:
    return {
        "way": announced.way,
        "temperature": announced.temperature,
        "strength": announced.strength,
        "photos": announced.photos,
        "devices": announced.devices,
        "counts": announced.counts.hex(),
    }


def _announced(facts: dict[str, object]) -> AnnouncedCalibration:
    return AnnouncedCalibration(**{**facts, "counts": bytes.fromhex(str(facts["counts"]))})  # type: ignore[arg-type]

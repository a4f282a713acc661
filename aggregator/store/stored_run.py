"""A store for a reader that is not its aggregator: the newest global state, and the kept contributions.

Nothing is written or locked, so the aggregator may be running.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from protofleet.aggregator.database import AnyPlace, Connection, place_of, read_only
from protofleet.aggregator.monitoring.calibration import stored_calibration
from protofleet.aggregator.screening.outliers import Screening
from protofleet.aggregator.store.durable_store import KIND, as_written, contributions, newest_state, screening_name
from protofleet.contract.identity.signatures import inside
from protofleet.contract.wire.calibration_messages import AnnouncedCalibration
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Contribution

__all__ = ["StoredRun", "read_state", "stored_run"]


@dataclass(frozen=True, eq=False)
class StoredRun:
    """The content of a store.

    Attributes:
        bundle: the identity of the run's bundles, 32 bytes.
    """

    bundle: bytes
    _run: bytes
    _db: Connection
    _path: str

    def state(self) -> GlobalState:
        """The newest global state; version 0 and empty before the first round."""
        with as_written(self._path):
            return newest_state(self._db, self._run)

    def calibration(self) -> AnnouncedCalibration:
        """How scores become probabilities, as the reports of devices say; empty before there are any."""
        with as_written(self._path):
            return stored_calibration(self._db)

    def closed_rounds(self) -> list[tuple[int, str, bool]]:
        """Number and method of each closed round, in order, and whether its contributions are kept."""
        rows = self._db.execute(
            "SELECT number, method, EXISTS (SELECT 1 FROM payload p WHERE p.round = number)"
            " OR EXISTS (SELECT 1 FROM blinded_sum b WHERE b.round = number) FROM round"
            " WHERE closed = 1 ORDER BY number"
        )
        return [(int(number), str(method), bool(kept)) for number, method, kept in rows.fetchall()]

    def contributions(self, round: int, method: str) -> Iterator[tuple[str, Contribution]]:
        """Devices and their contributions to a round, ordered by device, one at a time."""
        with as_written(self._path):
            for device, payload in self._payloads(round, method):
                message = inside(payload)
                assert isinstance(message, Contribution)
                yield device, message

    def _payloads(self, round: int, method: str) -> Iterator[tuple[str, bytes]]:
        """Of a blinded round its sum, as if it were one device's."""
        cursor = self._db.execute("SELECT payload FROM blinded_sum WHERE round = ? AND method = ?", (round, method))
        summed = cursor.fetchone()
        return contributions(self._db, round, method) if summed is None else iter([("sum", bytes(summed[0]))])

    def screening(self, method: str) -> Screening:
        """How devices were screened in the last closed round of a method."""
        row = self._db.execute("SELECT value FROM meta WHERE name = ?", (screening_name(method),)).fetchone()
        with as_written(self._path):
            return Screening(suspects="ignore") if row is None else Screening.read(row[0])


@contextmanager
def stored_run(path: AnyPlace) -> Iterator[StoredRun]:
    """Open a store to read.

    Raises:
        StoreError: there is no such file, or it cannot be read.
        UsageError: it is no store, or of another version.
    """
    with read_only(path, KIND) as db:
        meta = dict(db.execute("SELECT name, value FROM meta").fetchall())
        with as_written(path):
            bundle, run = (memoryview(meta[name]).tobytes() for name in ("bundle", "run"))
        yield StoredRun(bundle, run, db, str(place_of(path)))


def read_state(path: AnyPlace) -> tuple[bytes, GlobalState]:
    """The identity of a store's bundles, 32 bytes, and its newest global state.

    Raises:
        StoreError, UsageError: as `stored_run`.
    """
    with stored_run(path) as run:
        return run.bundle, run.state()

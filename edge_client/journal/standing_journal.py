"""What a device must not forget where sums stand: its generation, and the samples of the sums that it sent last.

A generation ends in one transaction, like a round: its mark, its contribution and its samples are written together or
not at all. The newer generation takes the place of older ones, so older contributions that wait for a receipt end with
it. Of contributions that have their receipt, the newest `GENERATIONS_KEPT` lines stay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from protofleet.contract.files.sqlite import Database, typed

__all__ = ["StandingMarks"]

GENERATIONS_KEPT = 64
_Key = tuple[bytes, int, str]


class StandingMarks:
    """This part of an open journal.

    Args:
        guard: turns what cannot be read into a `StoreError`.
    """

    def __init__(self, file: Database, guard: Callable[[], AbstractContextManager[None]]) -> None:
        self._db, self._guard, self._transaction = file.connection, guard, file.transaction

    def newest(self, run: bytes) -> tuple[int, bool]:
        """The generation that was sent last, 0 for none, and whether its sums are known to count.

        The loop asks for it on every turn, so the samples are not read.
        """
        with self._guard():
            row = self._db.execute(
                "SELECT generation, samples IS NOT NULL FROM standing WHERE run = ?", (run,)
            ).fetchone()
            return (0, False) if row is None else (typed(row, int, int)[0], bool(row[1]))

    def samples(self, run: bytes) -> bytes | None:
        """The samples of the sums that were sent last.

        None where there are no such sums, or they are not known to count.
        """
        with self._guard():
            row = self._db.execute("SELECT samples FROM standing WHERE run = ?", (run,)).fetchone()
            return None if row is None or row[0] is None else bytes(typed(row, bytes)[0])

    def pending(self, run: bytes) -> list[_Key]:
        """What was sent in this run and has no receipt yet."""
        with self._guard():
            rows = self._db.execute(
                "SELECT run, round, method FROM contributions WHERE run = ? AND outcome IS NULL", (run,)
            )
            return [(run, number, method) for run, number, method in (typed(row, bytes, int, str) for row in rows)]

    def withdraws(self, run: bytes) -> bool:
        """Whether a withdrawal is on its way, and has no receipt yet."""
        with self._guard():
            row = self._db.execute(
                "SELECT 1 FROM contributions c JOIN rounds r USING (run, round, method)"
                " WHERE c.run = ? AND c.outcome IS NULL AND r.metrics LIKE '%\"withdrawn\"%'",
                (run,),
            ).fetchone()
        return row is not None

    def may_stand(self) -> bool:
        """Whether sums that were sent in any run may count, or a withdrawal of them is on its way."""
        with self._guard():
            (exists,) = self._db.execute(
                "SELECT EXISTS (SELECT 1 FROM standing WHERE samples IS NOT NULL)"
                " OR EXISTS (SELECT 1 FROM contributions WHERE outcome IS NULL)"
            ).fetchone()
        return bool(exists)

    def commit(
        self, key: _Key, *, samples: bytes | None, payload: bytes, limit_bytes: int, metrics: Mapping[str, Any]
    ) -> None:
        """Generation `key[1]` is made. It takes the place of what is on its way.

        Args:
            samples: of its sums (`standing.joined`); None for a withdrawal.

        Raises:
            StoreError: nothing was written.
        """
        run, generation, _ = key
        with self._transaction() as db:
            db.execute(
                "UPDATE contributions SET outcome = 'late', reason = 'a newer one took its place', uplink_bytes = 0,"
                " payload = NULL WHERE run = ? AND outcome IS NULL",
                (run,),
            )
            db.execute("UPDATE rounds SET reported = 1 WHERE run = ?", (run,))
            for table in ("contributions", "rounds"):
                db.execute(f"DELETE FROM {table} WHERE run = ? AND round <= ?", (run, generation - GENERATIONS_KEPT))
            db.execute("INSERT INTO rounds VALUES (?, ?, ?, ?, ?)", (*key, json.dumps(metrics), samples is None))
            db.execute(
                "INSERT INTO contributions (run, round, method, payload, payload_bytes, limit_bytes)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (*key, payload, len(payload), limit_bytes),
            )
            db.execute("INSERT OR REPLACE INTO standing VALUES (?, ?, ?)", (run, generation, samples))

    def keep_samples(self, run: bytes, samples: bytes) -> None:
        """The aggregator has taken samples out of the sums that were sent last, and these are left."""
        with self._transaction() as db:
            db.execute("UPDATE standing SET samples = ? WHERE run = ?", (samples, run))

    def unsent(self, run: bytes, generation: int) -> None:
        """What was sent last does not count, and what comes next is numbered above `generation`."""
        with self._transaction() as db:
            db.execute(
                "UPDATE standing SET samples = NULL, generation = max(generation, ?) WHERE run = ?", (generation, run)
            )

"""The standing sums in a store of several processes: each commits beside the others, and the leader learns of it.

A device's newest contribution replaces the one before, whichever process takes it, and only if it is still newer at the
commit. In the same transaction the server keeps the replaced contribution, once for each device, until the leader has
learned of the change. So the leader's total can lose exactly what it had, whatever came in between, and from whichever
process (`aggregator/workers/shared_standing.py`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from protofleet.aggregator.database import Connection
from protofleet.aggregator.database.postgres_members import Leader, Member, StaleError
from protofleet.aggregator.store.meta_table import put_meta
from protofleet.aggregator.store.records import StandingMark, Tally
from protofleet.aggregator.store.schema import COUNT
from protofleet.aggregator.store.standing_tables import (
    CLASSES_TAKEN,
    StandingTables,
    Stands,
    Taken,
    read_taken,
    with_taken,
    withdrew,
)
from protofleet.contract.files.sqlite import typed

__all__ = ["Replaced", "SharedStandingTables"]

_KEEP_FORMER = (
    "INSERT INTO protofleet_replaced (device, payload) VALUES (?, (SELECT payload FROM standing WHERE device = ?))"
    " ON CONFLICT (device) DO NOTHING"
)
_PUT_NEWER = (
    "INSERT INTO standing (device, generation, received_bytes, received_at, payload) VALUES (?, ?, ?, ?, ?)"
    " ON CONFLICT (device) DO UPDATE SET generation = excluded.generation, received_bytes = excluded.received_bytes,"
    " received_at = excluded.received_at, payload = excluded.payload WHERE standing.generation < excluded.generation"
)


@dataclass(frozen=True)
class Replaced:
    """What has changed of a device since the leader last learned of it.

    Attributes:
        former, payload: what stood then, and what stands now; None for nothing.
        generation: the one that is held now.
    """

    device: str
    former: bytes | None
    generation: int
    payload: bytes | None


class SharedStandingTables(StandingTables):
    """These tables of one process among several."""

    def __init__(self, members: Leader | Member) -> None:
        super().__init__(members)
        self._members = members

    def held(self, devices: Collection[str]) -> dict[str, int]:
        """The generations that are held of these devices; without devices of which nothing ever came."""
        with self._disk():
            rows = self._db.execute(
                "SELECT device, generation FROM standing WHERE device = ANY(?)", (list(devices),)
            ).fetchall()
            return dict(typed(row, str, int) for row in rows)

    def held_whole(self, devices: Collection[str]) -> dict[str, StandingMark]:
        """The generations with the digests of what stands; the server reads the payloads and makes the digests."""
        with self._disk():
            rows = self._db.execute(
                "SELECT device, generation, coalesce(substr(sha256(payload), 1, 8), ''::bytea) FROM standing"
                " WHERE device = ANY(?)",
                (list(devices),),
            ).fetchall()
            return {str(device): StandingMark(int(generation), bytes(digest)) for device, generation, digest in rows}

    def put(self, newer: Sequence[Stands], tally: Tally, at: float, taken: Taken, based_on: int) -> None:
        """As `commit`, beside other processes.

        Args:
            taken: what is to be added to `classes_taken`.
            based_on: the value of `changes` when this was decided.

        Raises:
            StaleError: the decisions depend on something that has changed since; nothing was written.
            StoreError: the server refuses; nothing was written.
        """
        ordered = sorted(newer, key=lambda stands: stands.device)  # so that two never wait for each other
        with self._members.beside_others(based_on) as db:
            db.executemany(_KEEP_FORMER, [(s.device, s.device) for s in ordered])
            rows = [(s.device, s.generation, s.received_bytes, at, s.payload) for s in ordered]
            if rows and db.executemany(_PUT_NEWER, rows).rowcount != len(rows):
                raise StaleError  # of one of them another process has committed as new a generation meanwhile
            _add_taken(db, taken)
            db.executemany(COUNT, sorted((round, outcome, count) for (round, outcome), count in tally.items()))
            withdrawn = [stands.device for stands in ordered if stands.payload is None]
            for device in withdrawn:
                withdrew(db, device, at)
            if withdrawn:  # whom the others refuse from now on
                self._file.changed()

    def replaced(self, most: int) -> list[Replaced]:
        """What has changed since the last call, of at most `most` devices; for the leader."""
        with self._disk():
            (any_,) = self._db.execute("SELECT EXISTS (SELECT 1 FROM protofleet_replaced)").fetchone()
        if not any_:
            return []
        with self._transaction() as db:
            rows = db.execute(
                "DELETE FROM protofleet_replaced r USING standing s WHERE s.device = r.device AND r.device IN"
                " (SELECT device FROM protofleet_replaced ORDER BY device LIMIT ?)"
                " RETURNING r.device, r.payload, s.generation, s.payload",
                (most,),
            ).fetchall()
        return [Replaced(str(device), former, int(generation), now) for device, former, generation, now in rows]

    def nothing_replaced(self) -> None:
        """Drop all recorded changes: the caller has read everything that stands, alone."""
        with self._transaction() as db:
            db.execute("DELETE FROM protofleet_replaced")


def _add_taken(db: Connection, more: Taken) -> None:
    """Add to `classes_taken`, to which other processes may add as well."""
    if not more:
        return
    row = db.execute("SELECT value FROM meta WHERE name = ? FOR UPDATE", (CLASSES_TAKEN,)).fetchone()
    taken = {} if row is None else read_taken(bytes(row[0]).decode())
    for name, generations in more.items():
        taken = with_taken(taken, name, generations)
    put_meta(db, CLASSES_TAKEN, json.dumps(taken))

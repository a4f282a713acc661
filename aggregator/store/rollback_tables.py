"""The global states that the newest rounds began with, in the store (`aggregator/closing/rollback.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from protofleet.aggregator.database import Connection, Database
from protofleet.aggregator.store.order_table import Order, order_done
from protofleet.contract.wire.codec import decode
from protofleet.contract.wire.global_state import GlobalCollector, GlobalState
from protofleet.contract.wire.messages import GlobalPart

__all__ = ["KEPT", "RollbackTables", "keep_former"]

KEPT = 5  # rounds


class RollbackTables:
    """These tables of an open store."""

    def __init__(self, file: Database) -> None:
        self._file = file
        self._db, self._disk, self._transaction = file.connection, file.reading, file.transaction

    def kept(self) -> list[int]:
        """The rounds whose state before is kept, rising."""
        with self._disk():
            rows = self._db.execute("SELECT DISTINCT round FROM former ORDER BY round").fetchall()
            return [int(round) for (round,) in rows]

    def before(self, round: int, run: bytes) -> GlobalState:
        """The state that a round began with, of those that are kept."""
        with self._disk():
            rows = self._db.execute("SELECT payload FROM former WHERE round = ? ORDER BY part", (round,)).fetchall()
            collector, state = GlobalCollector(), GlobalState(run, 0, 0)
            for (payload,) in rows:
                part = decode(payload) if payload else None
                whole = collector.add(part) if isinstance(part, GlobalPart) else None
                state = state if whole is None else replace(whole, run=run)
        return state

    def take_back(
        self,
        order: Order,
        rounds: Sequence[int],
        parts: Sequence[tuple[int, int, bytes]],
        at: float,
        before: int,
        after: int,
        outcome: str,
    ) -> None:
        """Make a former state the newest, remove what was contributed to the rounds since, and record that the order is
        done: all of it, or nothing.

        Args:
            parts: version, number and bytes of each part of the state, of a new version.
            before, after: versions.
        """
        with self._transaction() as db:
            db.executemany("INSERT INTO global VALUES (?, ?, ?)", parts)
            db.execute("DELETE FROM global WHERE version < ?", (after,))
            for round in rounds:
                for table in ("payload", "contribution", "blinded_sum", "former", "accuracy", "refusal"):
                    db.execute(f"DELETE FROM {table} WHERE round = ?", (round,))
                db.execute("UPDATE round SET kept_bytes = 0 WHERE number = ?", (round,))
                db.execute("INSERT INTO taken_back VALUES (?)", (round,))
            order_done(db, order, at, outcome, before, after)
            self._file.changed()


def keep_former(db: Connection, round: int) -> None:
    """Part of the transaction that closes a round, before its result is written: the state that it began with."""
    db.execute("DELETE FROM former WHERE round >= ?", (round,))  # which nothing but damage leaves there
    db.execute(
        "INSERT INTO former SELECT ?, part, payload FROM global WHERE version = (SELECT max(version) FROM global)",
        (round,),
    )
    db.execute(
        "INSERT INTO former VALUES (?, 0, ?) ON CONFLICT (round, part) DO NOTHING", (round, b"")
    )  # before the first there is none
    db.execute(
        "DELETE FROM former WHERE round NOT IN (SELECT DISTINCT round FROM former ORDER BY round DESC LIMIT ?)", (KEPT,)
    )

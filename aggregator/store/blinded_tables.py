"""Blinded rounds in the store: the received seeds, the set that the helper was asked for, and the sum that it opened.

A set is durable before the helper is asked for it. While it stands, nothing else of its round is asked for: the helper
may have opened it although no answer came, and opens none of its shares a second time.

The transaction that closes the round deletes the set, and with it the shares and seeds, which are of no use any more.
The sum stays until the next round of its method has one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from protofleet.aggregator.database import Connection, Database
from protofleet.aggregator.merging.forgotten_classes import held_by
from protofleet.aggregator.rounds.round_machine import Rounds
from protofleet.contract.errors import UsageError
from protofleet.contract.files.sqlite import typed

__all__ = ["AskedSet", "BlindedTables"]


@dataclass(frozen=True)
class AskedSet:
    """A set whose sum the helper is asked for.

    Attributes:
        digest: as `protofleet.contract.wire.helper_messages.set_digest` of its seeds.
        devices: in order.
        since: seconds since the epoch.
    """

    round: int
    method: str
    digest: bytes
    devices: tuple[str, ...]
    since: float


class BlindedTables:
    """These tables of an open store."""

    def __init__(self, file: Database) -> None:
        self._file = file
        self._db, self._disk, self._transaction = file.connection, file.reading, file.transaction

    def keep_seeds(self, seeds: Iterable[tuple[int, str, bytes]]) -> None:
        """Part of the transaction that commits contributions: round, device and signed seed of each."""
        self._db.executemany("INSERT INTO blinded_seed VALUES (?, ?, ?)", seeds)

    def seeds(self, round: int, devices: Collection[str]) -> dict[str, bytes]:
        """The signed seeds of these devices, as far as their contributions are held."""
        with self._disk():
            rows = self._db.execute(
                "SELECT s.device, s.seed FROM blinded_seed s JOIN contribution c ON c.round = s.round"
                " AND c.device = s.device WHERE s.round = ? ORDER BY s.device",
                (round,),
            ).fetchall()
            by_device = dict(typed(row, str, bytes) for row in rows)
        return {device: by_device[device] for device in sorted(by_device.keys() & set(devices))}

    def holds_shares(self, round: int) -> bool:
        """Whether a held contribution to a round is a share."""
        with self._disk():
            return self._db.execute("SELECT 1 FROM blinded_seed WHERE round = ?", (round,)).fetchone() is not None

    def holds_numbers(self, round: int) -> bool:
        """Whether a held contribution to a round is neither a share nor of a device that abstains."""
        with self._disk():
            rows = self._db.execute(
                "SELECT p.bytes FROM contribution c JOIN payload p ON p.id = c.payload WHERE c.round = ? AND NOT EXISTS"
                " (SELECT 1 FROM blinded_seed s WHERE s.round = c.round AND s.device = c.device)",
                (round,),
            )
            return any(not held_by(bytes(payload)).says_nothing for (payload,) in rows)

    def asked(self) -> AskedSet | None:
        """The set that the helper was asked for and has not answered."""
        with self._disk():
            row = self._db.execute("SELECT round, method, digest, devices, since FROM blinded_set").fetchone()
            if row is None:
                return None
            round, method, digest, devices, since = typed(row, int, str, bytes, str, float)
            named = json.loads(devices)
            return AskedSet(round, method, digest, typed(tuple(named), *[str] * len(named)), since)

    def ask(self, pending: AskedSet) -> None:
        """From now on the helper is asked for this set, and for no other."""
        with self._transaction() as db:
            db.execute("DELETE FROM blinded_set")
            db.execute(
                "INSERT INTO blinded_set VALUES (?, ?, ?, ?, ?)",
                (pending.round, pending.method, pending.digest, json.dumps(pending.devices), pending.since),
            )
            self._file.changed()

    def dropped(self) -> None:
        """Delete the set that the helper has not opened, and no longer ask for it."""
        with self._transaction() as db:
            db.execute("DELETE FROM blinded_set")
            self._file.changed()

    def closed(self, db: Connection, round: int, method: str, devices: int, payload: bytes | None) -> None:
        """Part of the transaction that closes a round: only its sum remains, if there is one.

        Args:
            payload: the sum as an encoded contribution.
        """
        db.execute("DELETE FROM blinded_set")
        db.execute("DELETE FROM blinded_seed WHERE round <= ?", (round,))
        db.execute("DELETE FROM payload WHERE round = ?", (round,))
        if payload is not None:
            db.execute("DELETE FROM blinded_sum WHERE method = ?", (method,))
            db.execute("INSERT INTO blinded_sum VALUES (?, ?, ?, ?)", (round, method, devices, payload))

    @staticmethod
    def replaced(db: Connection, method: str) -> None:
        """Part of the transaction that closes an open round: its contributions replace an earlier kept sum."""
        db.execute("DELETE FROM blinded_sum WHERE method = ?", (method,))

    def sums(self) -> dict[str, int]:
        """For each method, the round whose opened sum is kept."""
        with self._disk():
            return {str(m): int(r) for m, r in self._db.execute("SELECT method, round FROM blinded_sum").fetchall()}


def check_open_round(tables: BlindedTables, rounds: Rounds, *, blinded: bool) -> None:
    """Check that the open round holds contributions of the kind that it is resumed with.

    Raises:
        UsageError: it holds shares, and no helper is named now; or the other way round.
    """
    if rounds.phase != "open":
        return
    if blinded and tables.holds_numbers(rounds.number):
        expected, got, hint = "a blinded round", "an open one", "leaving out --helper until it is closed"
    elif not blinded and tables.holds_shares(rounds.number):
        expected, got, hint = "an open round", "a blinded one", "--helper"
    else:
        return
    raise UsageError(f"round {rounds.number} of this store", expected=expected, got=got, hint=hint)

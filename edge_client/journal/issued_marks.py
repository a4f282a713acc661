"""The newest numbers of signed messages, in the journal: of announcements by each trusted key, and of our own birth.

Beside the number of an announcement the journal keeps the signed proof of it. If the aggregator has lost its store, the
device can show it which number was given, and by which key.
"""

from __future__ import annotations

from collections.abc import Iterable

from protofleet.contract.files.sqlite import Database
from protofleet.contract.wire.envelopes import Mark
from protofleet.contract.wire.messages import MAX_HEARD

__all__ = ["IssuedMarks"]


class IssuedMarks:
    """These marks of an open journal."""

    def __init__(self, file: Database) -> None:
        self._db, self._guard, self._transaction = file.connection, file.guard, file.transaction

    def newest(self, key_id: bytes) -> int:
        """The highest number of an announcement of this key; 0 before the first."""
        value = self._value(_name(key_id))
        return 0 if value is None else int(value)

    def heard(self, key_ids: Iterable[bytes]) -> tuple[Mark, ...]:
        """The highest numbers of these keys, with the signed proofs.

        Keys without a proof are left out. There are at most as many as a status can tell.
        """
        marks = []
        for key_id in key_ids:
            proof, number = self._value(_proof_name(key_id)), self.newest(key_id)
            if proof is not None and number:
                marks.append(Mark(key_id, number, bytes(proof)))
        return tuple(marks[:MAX_HEARD])

    def saw(self, key_id: bytes, issued: int, proof: bytes = b"") -> None:
        """An announcement with this number came.

        Args:
            proof: the key's signed proof of the number; empty where there is none.

        Raises:
            StoreError: the disk refused.
        """
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_name(key_id), issued))
            if proof:
                db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_proof_name(key_id), proof))
            else:
                db.execute("DELETE FROM meta WHERE name = ?", (_proof_name(key_id),))

    def next(self, key_id: bytes, wall: float) -> int:
        """A number above every earlier one of this key, durable: milliseconds since the epoch, or the last and one.

        Args:
            wall: seconds since the epoch, as far as this device knows.

        Raises:
            StoreError: the disk refused.
        """
        number = max(int(wall * 1000), self.newest(key_id) + 1)
        self.saw(key_id, number)
        return number

    def _value(self, name: str) -> bytes | int | None:
        with self._guard():
            row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if row is None else row[0]


def _name(key_id: bytes) -> str:
    return f"issued {key_id.hex()}"


def _proof_name(key_id: bytes) -> str:
    return f"proof {key_id.hex()}"

"""In the journal: how new the newest announcement was that each trusted key has signed."""

from __future__ import annotations

from contract.sqlite import Database

__all__ = ["IssuedMarks"]


class IssuedMarks:
    """These marks of an open journal."""

    def __init__(self, file: Database) -> None:
        self._db, self._guard, self._transaction = file.connection, file.guard, file.transaction

    def newest(self, key_id: bytes) -> int:
        """The highest number of an announcement of this key; 0 before the first."""
        with self._guard():
            row = self._db.execute("SELECT value FROM meta WHERE name = ?", (_name(key_id),)).fetchone()
        return 0 if row is None else int(row[0])

    def saw(self, key_id: bytes, issued: int) -> None:
        """An announcement with this number came.

        Raises:
            StoreError: the disk refused.
        """
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_name(key_id), issued))


def _name(key_id: bytes) -> str:
    return f"issued {key_id.hex()}"

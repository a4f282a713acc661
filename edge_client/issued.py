"""In the journal: how new the newest announcement was that each trusted key has signed, and our own newest birth."""

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


def _name(key_id: bytes) -> str:
    return f"issued {key_id.hex()}"

"""The store's settings and marks by name, each a text."""

from __future__ import annotations

from protofleet.aggregator.database import Connection, Database, upsert

__all__ = ["MetaTable", "put_meta"]


class MetaTable:
    """The settings of an open store."""

    def __init__(self, file: Database) -> None:
        self._db, self._disk, self._transaction = file.connection, file.reading, file.transaction

    def get(self, name: str) -> str | None:
        """A setting that is kept; None where it was never set."""
        with self._disk():
            row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
            return None if row is None else row[0] if isinstance(row[0], str) else memoryview(row[0]).tobytes().decode()

    def put(self, name: str, value: str) -> None:
        with self._transaction() as db:
            put_meta(db, name, value)


def put_meta(db: Connection, name: str, value: str) -> None:
    """Keep a setting, within a transaction."""
    db.execute(upsert("meta", "name", "value"), (name, value.encode()))

"""A store that is one SQLite file: what `contract/sqlite.py` opens, and what a store needs beyond that."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from contract.sqlite import Database

__all__ = ["SqliteDatabase"]


class SqliteDatabase(Database):
    """An open file; see `aggregator.database.sql.Database` and `contract.sqlite.Database`."""

    epoch = 0
    of_devices: Sequence[str] = ()

    def changed(self) -> None:
        """There are no others."""

    def fresh_ids(self, table: str, count: int) -> Sequence[int]:
        (last,) = self.connection.execute(f"SELECT coalesce(max(id), 0) FROM {table}").fetchone()
        return range(last + 1, last + 1 + count)

    def erase(self, tables: Collection[str]) -> bool:
        """What was removed is zeros in the file already (`secure_delete`); the log may hold it still."""
        with self.reading():
            execute = self.connection.execute
            execute("PRAGMA busy_timeout = 0")  # a backup may read for minutes: we look again, and go on
            busy, *_ = execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            execute("PRAGMA busy_timeout = 5000")
        return not busy

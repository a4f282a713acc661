"""A store that is one SQLite file: `contract/files/sqlite.py` opens it, and this module adds what a store needs."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from protofleet.contract.files.sqlite import Database

__all__ = ["SqliteDatabase"]


class SqliteDatabase(Database):
    """An open file; see `protofleet.aggregator.database.sql.Database` and
    `protofleet.contract.files.sqlite.Database`."""

    epoch = 0
    of_devices: Sequence[str] = ()

    def changed(self) -> None:
        """There are no others."""

    def fresh_ids(self, table: str, count: int) -> Sequence[int]:
        (last,) = self.connection.execute(f"SELECT coalesce(max(id), 0) FROM {table}").fetchone()
        return range(last + 1, last + 1 + count)

    def size_bytes(self) -> int:
        """The file without its log, which is given back with each checkpoint."""
        with self.reading():
            sizes = (self.connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
            return math.prod(map(int, sizes))

    def erase(self, tables: Collection[str]) -> bool:
        """What was removed is zeros in the file already (`secure_delete`); the log may hold it still."""
        with self.reading():
            execute = self.connection.execute
            execute("PRAGMA busy_timeout = 0")  # a backup may read for minutes: we look again, and go on
            busy, *_ = execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            execute("PRAGMA busy_timeout = 5000")
        return not busy

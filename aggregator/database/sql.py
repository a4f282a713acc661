"""What the store's tables are written in: the part of SQL that SQLite and PostgreSQL both read, and an open database.

A statement

- has `?` for each value;
- names no row number of SQLite's;
- compares yes-or-no numbers with 1;
- names the column in which an upsert finds its row.

What the engines write differently is in functions of this file and methods of `Database`. Whole numbers are Python's
`int`, text is `str`, bytes are `bytes`. A sum of a column may be a `Decimal`, and is made an `int` where it is read.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

__all__ = ["Connection", "Database", "Rows", "Streams", "stream_rows", "upsert"]


class Rows(Protocol):
    """What a statement gives."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """A connection that runs statements."""

    def execute(self, statement: str, values: Sequence[Any] = ..., /) -> Rows: ...
    def executemany(self, statement: str, rows: Iterable[Sequence[Any]], /) -> Rows: ...


@runtime_checkable
class Streams(Protocol):
    """A connection whose `execute` has all rows in memory before the first is read."""

    def stream_rows(self, statement: str, values: Sequence[Any] = ...) -> Iterator[Any]: ...


class Database(Protocol):
    """An open store.

    Attributes:
        path: where it is, as it is shown.
        epoch: how many processes have had it before and now, where that is counted.
        of_devices: tables that hold what devices sent, beside those that every store has; with a column `device`.
    """

    path: str
    epoch: int
    of_devices: Sequence[str]

    @property
    def connection(self) -> Connection: ...
    def close(self) -> None: ...
    def guard(self) -> AbstractContextManager[None]: ...
    def reading(self) -> AbstractContextManager[None]: ...
    def transaction(self) -> AbstractContextManager[Connection]: ...

    def changed(self) -> None:
        """Within a transaction: other processes that work on the store are to read anew what they know of it."""

    def fresh_ids(self, table: str, count: int) -> Sequence[int]:
        """Numbers for the column `id` of so many new rows, rising; within a transaction."""

    def size_bytes(self) -> int:
        """What it takes on its disk."""

    def erase(self, tables: Collection[str]) -> bool:
        """Leave nothing readable of what was removed from these tables; False while somebody is in the way."""


def stream_rows(db: Connection, statement: str, values: Sequence[Any] = ()) -> Iterator[Any]:
    """The rows of a statement, one at a time, however many there are."""
    return db.stream_rows(statement, values) if isinstance(db, Streams) else iter(db.execute(statement, values))


@functools.cache
def upsert(table: str, key: str, *others: str) -> str:
    """The statement that puts a row in its place, whether there is one with its key or not.

    Args:
        key: the column that finds it, or several with commas.
        others: the further columns; with none a row that is there stays.
    """
    columns = [*(name.strip() for name in key.split(",")), *others]
    newer = ", ".join(f"{name} = excluded.{name}" for name in others)
    then = f"UPDATE SET {newer}" if newer else "NOTHING"
    places = ", ".join("?" for _ in columns)
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({places}) ON CONFLICT ({key}) DO {then}"

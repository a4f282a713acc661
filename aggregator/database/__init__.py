"""Where a store is: one SQLite file, or one schema of a PostgreSQL server; the tables are written once, for both.

`--store` names the place (`place.py`). What a table's code may use is in `sql.py`: a small part of SQL that means the
same on both, and what has to be said differently, as functions. `sqlite.py` and `postgres.py` are the two engines, and
the functions here choose one of them by the place:

    open_database   the one that an aggregator has, alone, with its tables brought to the present version
    read_only       one consistent look, beside whoever has it
    beside          one transaction, beside whoever has it
    bring_up        an older store to the present version, unless an aggregator runs on it
    is_taken        whether one does
    watch           whether to look again
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from aggregator.database import postgres
from aggregator.database.place import PLACE, AnyPlace, Place, PostgresPlace, place_of
from aggregator.database.sql import Connection, Database, each, upsert
from aggregator.database.sqlite import SqliteDatabase
from contract import sqlite
from contract.sqlite import Kind

__all__ = [
    "PLACE",
    "AnyPlace",
    "Connection",
    "Database",
    "Place",
    "PostgresPlace",
    "as_written",
    "beside",
    "bring_up",
    "each",
    "is_taken",
    "open_database",
    "place_of",
    "read_only",
    "upsert",
    "watch",
]


def open_database(place: AnyPlace, kind: Kind, *, wait_s: float = 0.0) -> Database:
    """Open a store as its only aggregator; it is made when there is none.

    Args:
        wait_s: how long to wait for another process that has it.

    Raises:
        StoreError: another process has it, the disk or the server refuses, or no server answers.
        UsageError: there is something else, or a version that this program does not know.
    """
    where = place_of(place)
    if isinstance(where, PostgresPlace):
        return postgres.PostgresDatabase(where, kind, wait_s=wait_s)
    return SqliteDatabase(where, kind, wait_s=wait_s)


@contextlib.contextmanager
def read_only(place: AnyPlace, kind: Kind, *, older: bool = False) -> Iterator[Connection]:
    """One consistent look at a store, which an aggregator may be writing.

    Args:
        older: whether one of an older version will do.

    Raises:
        StoreError: there is none, or it cannot be read.
        UsageError: it is something else, or of another version than this program writes.
    """
    where = place_of(place)
    if isinstance(where, PostgresPlace):
        with postgres.read_only(where, kind, older=older) as db:
            yield db
    else:
        with sqlite.read_only(where, kind, older=older) as file:
            yield file


@contextlib.contextmanager
def beside(place: AnyPlace, kind: Kind) -> Iterator[Connection]:
    """One transaction in a store that an aggregator may have: durable when the block ends, or nothing of it.

    Raises:
        StoreError: there is no such store, or the disk or the server refuses.
        UsageError: it is something else, or of another version than this program writes.
    """
    where = place_of(place)
    if isinstance(where, PostgresPlace):
        with postgres.beside(where, kind) as db:
            yield db
    else:
        with sqlite.beside(where, kind) as file:
            yield file


def bring_up(place: AnyPlace, kind: Kind) -> bool:
    """Bring an older store to the present version, unless an aggregator runs on it; whether one does.

    Raises:
        StoreError: there is no such store, or the disk or the server refuses.
        UsageError: it is something else, or of a version that this program does not know.
    """
    where = place_of(place)
    return (postgres if isinstance(where, PostgresPlace) else sqlite).bring_up(where, kind)


def is_taken(place: AnyPlace, kind: Kind) -> bool:
    """Whether an aggregator runs on a store at this moment."""
    where = place_of(place)
    return postgres.is_taken(where, kind) if isinstance(where, PostgresPlace) else sqlite.is_taken(where)


def watch(place: AnyPlace) -> sqlite.Watch | postgres.Watch:
    """Whether the global state of a store may be newer than at the last look, whoever writes it."""
    where = place_of(place)
    return postgres.Watch(where) if isinstance(where, PostgresPlace) else sqlite.Watch(where)


@contextlib.contextmanager
def as_written(place: AnyPlace, kind: Kind) -> Iterator[None]:
    """Values that no program of ours has written into a store become a `StoreError`."""
    with sqlite.as_written(str(place_of(place)), kind):
        yield

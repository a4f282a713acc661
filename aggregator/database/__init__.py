"""A store's place: one SQLite file, or one schema of a PostgreSQL server. The tables are written once, for both.

`--store` names the place. `sql.py` says what a table's code may use: a part of SQL that means the same
on both engines, and functions for what the engines write differently. `engines/` has
a module for each engine, over `sqlite.py` and `postgres.py`. The functions here choose one by the place:

    open_database   opens the store for its only aggregator, with its tables brought to the present version
    read_only       one consistent look, beside another process
    beside          one transaction, beside another process
    bring_up        brings an older store to the present version, unless an aggregator runs on it
    is_taken        whether an aggregator runs on it
    watch           whether anything may have been written

PostgreSQL's side has `postgres_place.py` for its URL, `postgres_connection.py`, `postgres_errors.py` for what a server
says when it refuses, and `postgres_members.py` for several processes. `copy_rows.py` copies a store from one engine
into the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from protofleet.aggregator.database.engines import PLACE, AnyPlace, Place, Watch, engine_of, place_of
from protofleet.aggregator.database.postgres_place import PostgresPlace
from protofleet.aggregator.database.sql import Connection, Database, stream_rows, upsert
from protofleet.contract.files import sqlite
from protofleet.contract.files.sqlite import Kind

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
    "engine_of",
    "is_taken",
    "open_database",
    "place_of",
    "read_only",
    "stream_rows",
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
    resolved = place_of(place)
    return engine_of(resolved).open(resolved, kind, wait_s=wait_s)


@contextlib.contextmanager
def read_only(place: AnyPlace, kind: Kind, *, older: bool = False) -> Iterator[Connection]:
    """One consistent look at a store that an aggregator may be writing.

    Args:
        older: whether a store of an older version is accepted.

    Raises:
        StoreError: there is none, or it cannot be read.
        UsageError: it is something else, or of another version than this program writes.
    """
    resolved = place_of(place)
    with engine_of(resolved).read_only(resolved, kind, older=older) as db:
        yield db


@contextlib.contextmanager
def beside(place: AnyPlace, kind: Kind) -> Iterator[Connection]:
    """One transaction in a store that an aggregator may have: durable when the block ends, or not written at all.

    Raises:
        StoreError: there is no such store, or the disk or the server refuses.
        UsageError: it is something else, or of another version than this program writes.
    """
    resolved = place_of(place)
    with engine_of(resolved).beside(resolved, kind) as db:
        yield db


def bring_up(place: AnyPlace, kind: Kind) -> bool:
    """Bring an older store to the present version, unless an aggregator runs on it; returns whether one does.

    Raises:
        StoreError: there is no such store, or the disk or the server refuses.
        UsageError: it is something else, or of a version that this program does not know.
    """
    resolved = place_of(place)
    return engine_of(resolved).bring_up(resolved, kind)


def is_taken(place: AnyPlace, kind: Kind) -> bool:
    """Whether an aggregator runs on a store at this moment."""
    resolved = place_of(place)
    return engine_of(resolved).is_taken(resolved, kind)


def watch(place: AnyPlace) -> Watch:
    """A check whether anything may have been written to a store since the last look, by whichever process."""
    resolved = place_of(place)
    return engine_of(resolved).watch(resolved)


@contextlib.contextmanager
def as_written(place: AnyPlace, kind: Kind) -> Iterator[None]:
    """Values that no program of ours has written into a store become a `StoreError`."""
    with sqlite.as_written(str(place_of(place)), kind):
        yield

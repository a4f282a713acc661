"""Copies a store's rows from one engine to the other: a backup is one SQLite file wherever the store is.

Both engines have the same tables with the same columns, made by the same steps, so a row is copied as it is. This is
also how a store moves from a file to a server, and back: `fleet backup`, then `fleet restore` with the other `--store`.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import replace

from protofleet.aggregator.database.postgres_connection import PostgresConnection, version_in
from protofleet.contract.files.sqlite import FIRST_VERSION, Kind, lay_out

__all__ = ["into_file", "into_schema"]


def into_file(db: PostgresConnection, copy: sqlite3.Connection, kind: Kind) -> None:
    """All rows of a schema into an empty file, which is then of the schema's version.

    Args:
        db: in a transaction that sees one moment.
        copy: of the file; in no transaction.

    Raises:
        sqlite3.DatabaseError: the disk refuses.
    """
    version = version_in(db, kind) or kind.version
    for name, value in kind.pragmas.items():
        copy.execute(f"PRAGMA {name} = {value}")
    copy.execute("BEGIN")
    lay_out(copy, replace(kind, steps=kind.steps[: version - FIRST_VERSION + 1]))
    for table, columns in _tables(copy):
        places = ", ".join("?" for _ in columns.split(", "))
        with contextlib.closing(db.stream_rows(f"SELECT {columns} FROM {table}")) as rows:
            copy.executemany(f"INSERT INTO {table} ({columns}) VALUES ({places})", rows)
    copy.execute("COMMIT")


def into_schema(copy: sqlite3.Connection, db: PostgresConnection) -> None:
    """All rows of a file of the present version in place of those of a schema, within its transaction."""
    tables = list(_tables(copy))
    db.execute(f"TRUNCATE {', '.join(table for table, _ in tables)}")
    for table, columns in tables:
        places = ", ".join("?" for _ in columns.split(", "))
        db.executemany(
            f"INSERT INTO {table} ({columns}) VALUES ({places})", copy.execute(f"SELECT {columns} FROM {table}")
        )
        if columns.startswith("id, "):  # the next one is above all that are there
            db.execute(
                f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), 1 + coalesce(max(id), 0), false) FROM {table}"
            )


def _tables(copy: sqlite3.Connection) -> Iterator[tuple[str, str]]:
    """The tables of a file, and the columns of each with commas."""
    rows = copy.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%' ORDER BY name")
    for (table,) in rows.fetchall():
        columns = [name for (name,) in copy.execute("SELECT name FROM pragma_table_info(?) ORDER BY cid", (table,))]
        yield table, ", ".join(columns)

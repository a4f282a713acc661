"""A SQLite file that somebody has changed: any bytes of it, or any values in its tables."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from tests.attacks.choices import Choices

__all__ = ["write_damaged"]


def write_damaged(path: Path, good: bytes, choices: Choices) -> None:
    """Write `good` to `path`, changed as the choices say."""
    if choices.below(4) == 0:
        path.write_bytes(_other_bytes(good, choices))
        return
    path.write_bytes(good)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA synchronous = OFF")
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
        for _ in range(1 + choices.below(4)):
            with contextlib.suppress(sqlite3.Error, OverflowError):  # what SQLite or a table's own rules refuse
                _change(db, choices.one_of(tables), choices)


def _other_bytes(good: bytes, choices: Choices) -> bytes:
    data = bytearray(good)
    for _ in range(choices.below(8)):
        at, put = choices.number(3) % len(data), choices.take(1 + choices.below(8))
        data[at : at + len(put)] = put
    return bytes(data[: choices.number(3) % len(data)] if choices.below(8) == 1 else data)


def _change(db: sqlite3.Connection, table: str, choices: Choices) -> None:
    columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
    if not columns:  # dropped before
        return
    what, column = choices.below(16), choices.one_of(columns)
    if what == 0:
        db.execute(f"DELETE FROM {table}")
    elif what == 1:
        db.execute(f"DROP TABLE {table}")
    elif what == 2:
        db.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
    elif what == 3:
        db.execute(f"PRAGMA user_version = {choices.below(6)}")
    elif what < 8:
        values = [_value(db, table, each, choices) for each in columns]
        db.execute(f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * len(columns))})", values)
    else:
        value = _value(db, table, column, choices)
        (count,) = db.execute(f"SELECT count(*) FROM {table}").fetchone()
        row = choices.below(max(count, 1))
        where = f"{columns[0]} IN (SELECT {columns[0]} FROM {table} LIMIT 1 OFFSET {row})"
        db.execute(f"UPDATE {table} SET {column} = ? WHERE {where}", (value,))


def _value(db: sqlite3.Connection, table: str, column: str, choices: Choices) -> object:
    """One of another kind, or one that stands there with some bytes changed."""
    what = choices.below(12)
    plain = (None, 0, 1, -1, 2**31, 2**63 - 1, 0.5, float("inf"), choices.text if what == 8 else "", b"")
    if what < len(plain):
        found = plain[what]
        return found() if callable(found) else found
    if what == 10:
        return choices.block()
    row = db.execute(f"SELECT {column} FROM {table} LIMIT 1 OFFSET ?", (choices.below(4),)).fetchone()
    if row is None or not isinstance(row[0], str | bytes):
        return choices.number(4)
    before = row[0] if isinstance(row[0], bytes) else row[0].encode()
    at, cut, put = choices.below(len(before) + 1), choices.below(8), choices.take(choices.below(16))
    changed = before[:at] + put + before[at + cut :]
    return changed if isinstance(row[0], bytes) else changed.decode("utf-8", "replace")

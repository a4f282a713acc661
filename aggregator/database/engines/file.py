"""The engine of a store in one SQLite file: the default, of a path."""

from __future__ import annotations

import re
from pathlib import Path

from protofleet.aggregator.database.engines.engine import Engine
from protofleet.aggregator.database.sqlite import SqliteDatabase
from protofleet.contract.files import sqlite

__all__ = ["ENGINE"]

_NO_FILE = re.compile(  # another scheme, libpq's other form, a URL without its scheme
    r"(?is)\s*(?:\w[\w+.:-]+://|//|postgres\w*:|postgres.*@|.*pass\w*\s*=|(?![./~]).*:.*@)"
)


def _path(text: str) -> Path | None:
    return None if _NO_FILE.match(text) else Path(text)  # what looks like a URL may hold a password


ENGINE = Engine(
    place=Path,
    read=_path,
    expected="a file",
    open=SqliteDatabase,
    read_only=sqlite.read_only,
    beside=sqlite.beside,
    bring_up=sqlite.bring_up,
    is_taken=lambda place, kind: sqlite.is_taken(place),
    watch=sqlite.Watch,
)

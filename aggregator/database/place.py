"""What `--store` names: a file's path, or a PostgreSQL server's URL, whose password is never shown.

`str` of a place is what is printed of it: in errors, records and reports a URL stands without its password, wherever
that is in it. libpq reads the URL itself, so all of its words hold: `?sslmode=verify-full&sslrootcert=…`,
`?options=-csearch_path%3Dpets` for a schema of its own, `?service=…`; and PGPASSWORD and ~/.pgpass hold what need not
stand on a command line.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["PLACE", "AnyPlace", "Place", "PostgresPlace", "place_of"]

PLACE = "FILE|URL"  # what a command's help calls it
_URL = re.compile(r"postgres(?:ql)?://")
_SIGNED_IN = re.compile(r"^(postgres(?:ql)?://[^:@/?]*):.*@")  # to the last @: a password may hold anything
_GIVEN = re.compile(r"(?i)((?:^|[?&])(?:ssl)?password=)[^&]*")


@dataclass(frozen=True)
class PostgresPlace:
    """A schema of a PostgreSQL server: the one that comes first in the connection's search path.

    Attributes:
        url: as libpq takes it.
    """

    url: str = field(repr=False)

    def __str__(self) -> str:
        shown = _SIGNED_IN.sub(r"\1@", self.url)
        return _GIVEN.sub(r"\1…", shown)


Place = Path | PostgresPlace
AnyPlace = str | os.PathLike[str] | PostgresPlace


def place_of(given: AnyPlace) -> Place:
    """The place that a command or a program names."""
    if isinstance(given, PostgresPlace):
        return given
    text = os.fspath(given)
    return PostgresPlace(text) if _URL.match(text) else Path(text)

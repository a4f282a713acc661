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
from urllib.parse import unquote

from contract.errors import UsageError

__all__ = ["PLACE", "AnyPlace", "Place", "PostgresPlace", "place_of"]

PLACE = "FILE|URL"  # what a command's help calls it
_URL = re.compile(r"postgres(?:ql)?://")
_SIGNED_IN = re.compile(r"(?s)^(postgres(?:ql)?://[^:]*):.*@")  # to the last @: user and password may hold anything
_WORD = re.compile(r"([?&])([^=&?]*)=[^&]*")
_SECRETS = {"password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"}
_NO_FILE = re.compile(
    r"(?is)\s*(?:(\w[\w+.-]+)://|postgres\w*:|.*\bpassword\s*=)"
)  # another scheme, libpq's other form


@dataclass(frozen=True)
class PostgresPlace:
    """A schema of a PostgreSQL server: the one that comes first in the connection's search path.

    Attributes:
        url: as libpq takes it.
    """

    url: str = field(repr=False)

    def __str__(self) -> str:
        return _WORD.sub(_without_secret, _SIGNED_IN.sub(r"\1@", self.url))


Place = Path | PostgresPlace
AnyPlace = str | os.PathLike[str] | PostgresPlace


def place_of(given: AnyPlace) -> Place:
    """The place that a command or a program names.

    Raises:
        UsageError: text that is no file's name, but looks like a server's that libpq does not take as a URL.
    """
    if isinstance(given, PostgresPlace):
        return given
    text = os.fspath(given)
    if _URL.match(text):
        return PostgresPlace(text)
    if other := _NO_FILE.match(text):
        got = f"a URL with {other[1]}://" if other[1] else "another way to name a server"  # which may hold a password
        raise UsageError("--store", expected="a file, or postgresql://USER@HOST[:PORT]/DATABASE", got=got)
    return Path(text)


def _without_secret(word: re.Match[str]) -> str:
    secret = unquote(word[2]).lower() in _SECRETS
    return f"{word[1]}{word[2]}=…" if secret else word[0]

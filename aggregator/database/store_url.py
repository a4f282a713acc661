"""The value of `--store`: a file's path, or a PostgreSQL server's URL, whose password is never shown.

`str` of a place is its printed form. In errors, records and reports a URL is printed without its password, wherever the
password is in it. Of the URL's parameters only the values of `_TOLD` are printed.

libpq reads the URL itself, so all of libpq's words are valid: `?sslmode=verify-full&sslrootcert=…`,
`?options=-csearch_path%3Dpets` for a schema of its own, `?service=…`. PGPASSWORD and ~/.pgpass hold what need not be on
a command line.

Before libpq gets it, a URL must match one pattern: one @, and before it no / nor ?. Otherwise libpq reads a piece of
the password as a host, a port or a parameter, and names it when it cannot connect.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from protofleet.contract.errors import UsageError
from protofleet.contract.printable import undisclosed

__all__ = ["PLACE", "AnyPlace", "Place", "PostgresPlace", "place_of"]

PLACE = "FILE|URL"  # what a command's help calls it
_URL = re.compile(r"postgres(?:ql)?://")
_HOST = r"(?:[\w.%-]*|\[[0-9A-Fa-f:.]+(?:%\w+)?\])(?::[0-9]*)?"  # a socket's directory with / as %2F
_WHOLE = re.compile(
    rf"postgres(?:ql)?://(?:[^@:/?\s]*(?::[^@/?\s]*)?@)?{_HOST}(?:,{_HOST})*"
    r"(?:/[^@/?\s]*)?(?:\?[^@=&?\s]+=[^@&?\s]*(?:&[^@=&?\s]+=[^@&?\s]*)*)?"
)
_SIGNED_IN = re.compile(r"^(postgres(?:ql)?://[^@:/?]*):[^@]*@")
_WORD = re.compile(r"([?&])([^=&?]*)=[^&]*")
_TOLD = {
    *("application_name", "channel_binding", "client_encoding", "connect_timeout", "dbname", "gssencmode", "host"),
    *("hostaddr", "keepalives", "keepalives_count", "keepalives_idle", "keepalives_interval", "krbsrvname"),
    *("load_balance_hosts", "options", "passfile", "port", "require_auth", "requirepeer", "service", "sslcert"),
    *("sslcrl", "sslkey", "sslmode", "sslnegotiation", "sslrootcert", "target_session_attrs", "tcp_user_timeout"),
    "user",
}
_NO_FILE = re.compile(  # another scheme, libpq's other form, a URL without its scheme
    r"(?is)\s*(?:\w[\w+.:-]+://|//|postgres\w*:|postgres.*@|.*pass\w*\s*=|(?![./~]).*:.*@)"
)
_EXPECTED = "a file, or postgresql://USER@HOST[:PORT]/DATABASE, other characters as %XX"


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
        UsageError: a URL of a server that can be read in more than one way, or text that looks like one and is none.
    """
    if isinstance(given, PostgresPlace):
        return given
    text = os.fspath(given)
    if _WHOLE.fullmatch(text):
        return PostgresPlace(text)
    if _URL.match(text) or _NO_FILE.match(text):  # which may hold a password
        raise UsageError("--store", expected=_EXPECTED, got=undisclosed(text))
    return Path(text)


def _without_secret(match: re.Match[str]) -> str:
    return match[0] if unquote(match[2]) in _TOLD else f"{match[1]}{match[2]}=…"

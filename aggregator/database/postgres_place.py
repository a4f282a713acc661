"""A PostgreSQL server's URL as the value of `--store`; its password is never shown.

`str` of a place is its printed form. In errors, records and reports a URL is printed without its password, wherever the
password is in it. Of the URL's parameters only the values of `_TOLD` are printed.

libpq reads the URL itself, so all of libpq's words are valid: `?sslmode=verify-full&sslrootcert=…`,
`?options=-csearch_path%3Dpets` for a schema of its own, `?service=…`. PGPASSWORD and ~/.pgpass hold what need not be on
a command line.

Before libpq gets it, a URL must match one pattern: one @, and before it no / nor ?. Otherwise libpq reads a piece of
the password as a host, a port or a parameter, and names it when it cannot connect.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import unquote

__all__ = ["EXPECTED", "PostgresPlace", "postgres_place"]

EXPECTED = "postgresql://USER@HOST[:PORT]/DATABASE, other characters as %XX"
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


@dataclass(frozen=True)
class PostgresPlace:
    """A schema of a PostgreSQL server: the one that comes first in the connection's search path.

    Attributes:
        url: as libpq takes it.
    """

    url: str = field(repr=False)

    def __str__(self) -> str:
        return _WORD.sub(_without_secret, _SIGNED_IN.sub(r"\1@", self.url))


def postgres_place(text: str) -> PostgresPlace | None:
    """The place that such a URL names; None for other text, or for a URL that can be read in more than one way."""
    return PostgresPlace(text) if _WHOLE.fullmatch(text) else None


def _without_secret(match: re.Match[str]) -> str:
    return match[0] if unquote(match[2]) in _TOLD else f"{match[1]}{match[2]}=…"

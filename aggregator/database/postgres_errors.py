"""A PostgreSQL server's refusals as one of our lines: what is wrong, and what helps."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from protofleet.contract.errors import ProtofleetError, StoreAwayError, StoreError, StoreLostError, UsageError

if TYPE_CHECKING:
    import psycopg

    from protofleet.aggregator.database.postgres_place import PostgresPlace
    from protofleet.contract.files.sqlite import Kind

__all__ = ["as_error", "is_lost", "refused", "unreachable"]

_GONE = ("08", "57P01", "57P02", "57P03", "57P05", "25P03", "25P04")  # the connection, a shutdown, a start, limits
_FULL = ("53", "54", "58")  # disk, memory, connections; limits of the program; the system's own errors
_READ_ONLY, _CANCELLED, _NO_RIGHT = "25006", "57014", "42501"
_LOGIN = re.compile(r"authentication|password|\brole\b")
_SAFE = "what was confirmed is safe"


def unreachable(
    error: psycopg.Error, what: str, kind: Kind, place: PostgresPlace, *, is_away: bool = False
) -> ProtofleetError:
    """No connection was made.

    Args:
        is_away: whether the server lets nobody in, and not only us not.
    """
    import psycopg

    message = _message_of(error)
    if isinstance(error, psycopg.ProgrammingError) or "invalid integer value" in message:
        # libpq cannot read the URL, or reads another port than was meant, and may cite a part of a password
        expected = "postgresql://USER@HOST[:PORT]/DATABASE, other characters as %XX"
        return UsageError(f"{kind.option} {place}", expected=expected, got="another text")
    if "too many clients" in message or "remaining connection slots" in message:
        return StoreLostError(what, expected="a free connection", got=message, hint="a larger max_connections")
    hint = "its user, or ~/.pgpass" if _LOGIN.search(message) else f"starting it, or another {kind.option}"
    error_type = StoreAwayError if is_away else StoreLostError
    return error_type(what, expected="a PostgreSQL server that lets us in", got=message, hint=hint)


def is_lost(error: psycopg.Error) -> bool:
    """Whether the connection is of no use any more."""
    return (error.sqlstate or "").startswith(_GONE)


def as_error(error: psycopg.Error, path: str, kind: Kind, *, lost: bool) -> StoreError:
    """What a statement came to."""
    what, code = f"{kind.name} {path}", error.sqlstate or ""
    if lost:
        got = f"its connection lost: {_message_of(error)}"
        return StoreAwayError(what, expected="a server that goes on", got=got, hint=f"again once it runs; {_SAFE}")
    if code == _CANCELLED:  # by whoever looks after the server; nothing of the transaction is there
        return StoreLostError(
            what, expected="a server that lets us finish", got=_message_of(error), hint=f"again; {_SAFE}"
        )
    if code == _NO_RIGHT:
        hint = "the role that owns it, or GRANT USAGE, CREATE ON SCHEMA … TO …"
        return StoreError(what, expected="a role with a right to it", got=_message_of(error), hint=hint)
    if code == _READ_ONLY:
        return refused(what, "a server that takes writes", False)
    if code.startswith(_FULL):
        hint = f"room for it, or another {kind.option}; {_SAFE}"
        return StoreError(what, expected="a server with room", got=_message_of(error), hint=hint)
    return StoreError(
        what,
        expected=f"a {kind.name} as it was written",
        got=_message_of(error),
        hint=f"another {kind.option}; {_SAFE}",
    )


def refused(what: str, expected: str, recovers: bool) -> StoreError:
    """A server, or a role, that takes no writes."""
    got = "one in recovery, a standby" if recovers else "one that is read only"
    return StoreError(what, expected=expected, got=got, hint="the primary's address, or target_session_attrs=primary")


def _message_of(error: psycopg.Error) -> str:
    """The server's own words, without the statement and its values."""
    first = error.diag.message_primary if error.diag is not None else None
    return first or str(error) or type(error).__name__

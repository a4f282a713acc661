"""A connection to a PostgreSQL server: statements in its words, one transaction, and the meaning of errors."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from protofleet.aggregator.database.postgres_errors import as_error, is_lost, refused, unreachable
from protofleet.aggregator.database.postgres_place import PostgresPlace
from protofleet.aggregator.database.sql import Rows
from protofleet.contract.errors import StoreError, UsageError
from protofleet.contract.extras import install_command
from protofleet.contract.files.sqlite import Kind

if TYPE_CHECKING:
    import psycopg

__all__ = ["PostgresConnection", "check_server", "connect", "guarded", "own_lock", "transaction", "version_in"]

OLDEST = 15  # the oldest that the tests run, Debian's in bookworm
_STREAM_ROWS = 64
# A server that is gone is found out within a minute, also in the middle of a statement.
_SETTINGS = {
    "application_name": "protofleet",
    "connect_timeout": 10,
    "keepalives_idle": 20,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 40_000,
}
_ITS_PATIENCE = (  # and the server finds out as soon that we are gone, and gives what we had locked to another
    b"SET tcp_keepalives_idle = 20; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 4;"
    b" SET tcp_user_timeout = 40000; SET idle_in_transaction_session_timeout = 120000;"
    # a role's or a database's limits are for people: we wait for each other, and are idle between rounds
    b" SET statement_timeout = 0; SET lock_timeout = 0; SET idle_session_timeout = 0"
)
_LIMITED = 170_000  # the first version that can limit a transaction, too


class PostgresConnection:
    """See `protofleet.aggregator.database.sql.Connection` and `Streams`."""

    def __init__(self, link: psycopg.Connection[Any]) -> None:
        self.link = link
        self._streams = itertools.count()
        self.schema: int | None = None  # its number, once it was asked for

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> Rows:
        return self.link.execute(_in_its_words(statement), values, binary=True)

    def executemany(self, statement: str, rows: Iterable[Sequence[Any]], /) -> Rows:
        cursor = self.link.cursor()
        cursor.executemany(_in_its_words(statement), rows)
        return cursor

    def stream_rows(self, statement: str, values: Sequence[Any] = ()) -> Generator[Any, None, None]:
        """The rows of a statement, of which the server keeps those that are not fetched yet."""
        import psycopg

        within = self.link.info.transaction_status != 0  # IDLE: then it must outlive its own transaction
        name = f"stream_{next(self._streams)}"
        cursor = self.link.cursor(name, binary=True, withhold=not within)
        try:
            cursor.itersize = _STREAM_ROWS
            cursor.execute(_in_its_words(statement), values)
            for row in cursor:  # noqa: UP028  `yield from` would close the cursor by itself, outside of what follows
                yield row
        finally:
            with contextlib.suppress(psycopg.Error):  # a server that has gone keeps nothing any more
                cursor.close()


def connect(place: PostgresPlace, kind: Kind) -> PostgresConnection:
    try:
        import psycopg
    except ImportError as error:
        got = "none" if isinstance(error, ModuleNotFoundError) else error  # psycopg without its C library says why
        raise UsageError(
            f"{kind.option} {place}", expected="psycopg 3", got=got, hint=install_command("scale")
        ) from None
    options = {"autocommit": True, "client_encoding": "UTF8", **_settings(place.url)}
    what = f"{kind.name} {place}"
    try:
        return PostgresConnection(psycopg.connect(place.url, **options))
    except psycopg.Error as error:
        if is_away := _is_away(error, place):
            raise unreachable(error, what, kind, place, is_away=is_away) from None
    try:  # a server that takes others has refused us, unless it has come up between the two questions
        return PostgresConnection(psycopg.connect(place.url, **options))
    except psycopg.Error as error:
        raise unreachable(error, what, kind, place) from None


def _is_away(error: psycopg.Error, place: PostgresPlace) -> bool:
    """Whether the server that has not let us in lets nobody in.

    libpq does not tell the SQLSTATE of a refusal at the door. `PQping` knows it: it says REJECT where a server starts,
    stops or recovers (57P03), NO_RESPONSE where none speaks to us, and OK for any other refusal.
    """
    import psycopg
    from psycopg import conninfo, pq

    if isinstance(error, psycopg.ProgrammingError):  # libpq cannot read the URL
        return False
    if isinstance(error, psycopg.errors.ConnectionTimeout):
        return True
    try:
        answer = pq.PGconn.ping(conninfo.make_conninfo(place.url, **_settings(place.url)).encode())
    except psycopg.ProgrammingError:
        return False
    return answer in (pq.Ping.REJECT, pq.Ping.NO_RESPONSE)


def _settings(url: str) -> dict[str, Any]:
    """Ours, but for those that a URL has itself."""
    return {name: value for name, value in _SETTINGS.items() if not re.search(rf"[?&]{name}=", url)}


@contextlib.contextmanager
def guarded(path: str, kind: Kind, db: PostgresConnection) -> Iterator[None]:
    import psycopg

    try:
        yield
    except psycopg.Error as error:
        lost = db.link.closed or is_lost(error)
        if isinstance(error, psycopg.IntegrityError | psycopg.ProgrammingError) and error.sqlstate is None and not lost:
            raise  # a mistake of ours
        if isinstance(error, psycopg.IntegrityError):
            raise
        raise as_error(error, path, kind, lost=lost) from None


@contextlib.contextmanager
def transaction(db: PostgresConnection, kind: Kind, *, beside_others: bool = False) -> Iterator[None]:
    """One that nobody else writes beside; `beside_others`, one of any number that only those keep out.

    It sees what was written before it had the lock, whatever isolation the server's owner has made the default.
    """
    own, schema = own_lock(db, kind)
    mode = "_shared" if beside_others else ""
    begin = "BEGIN ISOLATION LEVEL READ COMMITTED"
    db.link.execute(f"{begin}; SELECT pg_advisory_xact_lock{mode}({own + 1}, {schema})".encode())
    try:
        yield
        db.link.execute("COMMIT")
    except BaseException:
        if not db.link.closed:
            with contextlib.suppress(Exception):  # the server has gone, or has rolled back by itself
                db.link.execute("ROLLBACK")
        raise


def own_lock(db: PostgresConnection, kind: Kind) -> tuple[int, int]:
    """The two numbers of the lock of the schema's owner; the first and one is that of the present writer."""
    if db.schema is None:
        cursor = db.execute("SELECT oid::bigint - 2147483648 FROM pg_namespace WHERE nspname = current_schema()")
        db.schema = int(cursor.fetchone()[0])
    return kind.application_id, db.schema


def check_server(db: PostgresConnection, path: str, kind: Kind, *, writes: bool) -> None:
    """That it is one that this program can use.

    Raises:
        StoreError: it takes no writes, or not those of the owner of tables that are there.
        UsageError: it is too old, its text is not UTF-8, or the schema of the search path is not there.
    """
    what, version = f"{kind.option} {path}", db.link.info.server_version
    if version < 10_000 * OLDEST:
        raise UsageError(what, expected=f"PostgreSQL {OLDEST} or newer", got=f"{version // 10_000}.{version % 10_000}")
    row = db.execute(
        "SELECT current_setting('server_encoding'), current_schema(), pg_is_in_recovery(),"
        " current_setting('transaction_read_only'), current_setting('synchronous_commit')"
    ).fetchone()
    encoding, schema, recovers, reads_only, commits = row
    if encoding != "UTF8":
        raise UsageError(what, expected="a database in UTF-8", got=encoding, hint="CREATE DATABASE … ENCODING 'UTF8'")
    if schema is None:
        got, hint = "a search path without one", "CREATE SCHEMA, or another search_path"
        raise UsageError(what, expected="a schema that is there", got=got, hint=hint)
    if writes and (recovers or reads_only == "on"):
        raise refused(f"{kind.name} {path}", "a server that takes writes", recovers)
    if writes and not _owns(db):
        got, hint = "another, which could not write them anew", "the role that made them, or GRANT of that one"
        raise StoreError(f"{kind.name} {path}", expected="the role that owns its tables", got=got, hint=hint)
    if commits == "off":
        db.link.execute("SET synchronous_commit = on")
    db.link.execute(_ITS_PATIENCE)
    if version >= _LIMITED:
        db.link.execute("SET transaction_timeout = 0")


def _owns(db: PostgresConnection) -> bool:
    """Whether this role may change and vacuum the tables: PostgreSQL only warns on another role's tables."""
    row = db.execute(
        "SELECT pg_has_role(c.relowner, 'USAGE') FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = current_schema() AND c.relname = 'protofleet'"
    ).fetchone()
    return row is None or bool(row[0])


def version_in(db: PostgresConnection, kind: Kind) -> int | None:
    """The version of the store in this schema; None where there is none."""
    (exists,) = db.execute("SELECT to_regclass(quote_ident(current_schema()) || '.protofleet') IS NOT NULL").fetchone()
    row = db.execute("SELECT version FROM protofleet WHERE kind = ?", (kind.name,)).fetchone() if exists else None
    return None if row is None else int(row[0])


@functools.lru_cache(maxsize=512)
def _in_its_words(statement: str) -> bytes:
    """A statement of `sql.py` as psycopg takes it."""
    return statement.replace("%", "%%").replace("?", "%s").encode()

"""Several processes on one schema of a PostgreSQL server: one leads, the others commit beside it.

The leader has the session lock and an epoch. Each of its transactions is written only if its epoch still holds
(`postgres.py`).

A member has neither. It has read the store at some value of the number `changes`. Its commit is written only if the
number is still the same, in the same transaction. The leader's transactions run alone, so nothing changes in between.
So a late member decides again, and never writes outdated decisions.

The leader records in the same row by which settings it takes contributions, from its first transaction on. Every
transaction of a member finds the member's own settings there; otherwise it writes nothing and the member ends. So a
member that was stopped while a leader with other settings began decides nothing by its own settings
(docs/decisions/227).

A dead leader has lost its lock with its connection. A stopped leader has not: the operating system still answers for
its connection. So a leader records every `BEAT_S` that it is alive, by the server's clock. After `SILENT_S` without
that, the process that notices ends the leader's connection, and the lock is free. In the middle of a transaction the
leader has `BUSY_S`. It has as long again to read the store before its first record.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from protofleet.aggregator.database.postgres import PostgresDatabase, lock_holder
from protofleet.aggregator.database.postgres_connection import (
    PostgresConnection,
    check_server,
    connect,
    transaction,
    version_in,
)
from protofleet.aggregator.database.postgres_place import PostgresPlace
from protofleet.contract.errors import StoreLostError, UsageError
from protofleet.contract.files.sqlite import Kind

__all__ = ["BEAT_S", "Leader", "Member", "StaleError"]

BEAT_S, SILENT_S, BUSY_S = 2.0, 10.0, 60.0
_NOT_FOR_LONG = b"SET idle_in_transaction_session_timeout = 15000"  # one that is stopped keeps the leader waiting


class StaleError(Exception):
    """The decisions depend on something that has changed since. Nothing was written."""


class _Beside(PostgresDatabase):
    """What leader and members have in common."""

    def changes(self) -> int:
        """Goes up with everything that a decision may depend on."""
        with self.guard():
            cursor = self.connection.execute("SELECT changes FROM protofleet WHERE kind = ?", (self._kind.name,))
            return int(cursor.fetchone()[0])

    def check_settings(self) -> bool:
        """Check that this process's settings are in force.

        False when no settings are in force, because a single aggregator had the store last.

        Raises:
            UsageError: another process's settings are in force.
        """
        row = self.connection.execute("SELECT settings FROM protofleet WHERE kind = ?", (self._kind.name,)).fetchone()
        if row is None or row[0] is None:
            return False
        if row[0] != self.settings:
            hint = "the same for all"
            raise UsageError("--worker", expected="the options of the process that leads", got="others", hint=hint)
        return True

    @contextlib.contextmanager
    def beside_others(self, based_on: int | None) -> Iterator[PostgresConnection]:
        """A transaction beside those of other processes, but never beside a leader's.

        Args:
            based_on: the value of `changes` when the decisions were made; None for decisions that depend on nothing.

        Raises:
            StaleError: the value is another now, or two such transactions wait for each other; nothing was written.
            UsageError: other settings are in force; nothing was written.
            LedError, StoreError: as `transaction`.
        """
        import psycopg

        with self.guard():
            try:
                with transaction(self.connection, self._kind, beside_others=True):
                    self._check_leads()
                    if based_on is not None and self.changes() != based_on:
                        raise StaleError
                    yield self.connection
            except (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure):
                raise StaleError from None


class Leader(_Beside):
    """The process that leads.

    Args:
        settings: in force while it leads.
        anew: whether its settings may differ from those in force until now; false for a process that continues.

    Raises:
        StoreError: as of a `PostgresDatabase`.
        UsageError: as of a `PostgresDatabase`; or other settings are in force, and not `anew`.
    """

    def __init__(self, place: PostgresPlace, kind: Kind, settings: str = "", *, anew: bool = True) -> None:
        self.settings, self._anew = settings, anew
        super().__init__(place, kind, prepares_s=BUSY_S)

    def _lead(self, prepares_s: float | None) -> int:
        if not self._anew:
            self.check_settings()
        return super()._lead(prepares_s)


class Member(_Beside):
    """A process that works beside a leader.

    Args:
        settings: the settings that it decides by.

    Raises:
        StoreLostError: there is no store yet, or no server.
        StoreError: the server refuses.
        UsageError: it is of another version than this program writes, or other settings are in force.
    """

    def __init__(self, place: PostgresPlace, kind: Kind, settings: str = "") -> None:
        self.path, self._kind, self._within, self.epoch = str(place), kind, False, 0
        self.settings = settings
        with contextlib.ExitStack() as undo:
            self.connection = connect(place, kind)
            undo.callback(self.close)
            with self.guard():
                check_server(self.connection, self.path, kind, writes=True)
                self.connection.link.execute(_NOT_FOR_LONG)
                self.check_version()
            undo.pop_all()

    def _check_leads(self) -> None:
        """Check, within each transaction of a member, that its settings are in force."""
        if not self.check_settings():
            raise self._alone_one()

    def check_version(self) -> None:
        """Check that no leader of another release has brought the store to its version or put other settings in force.

        Raises:
            StoreError, UsageError: as the class.
        """
        with self.guard():
            version = version_in(self.connection, self._kind)
        if version is None:
            got, hint = "a schema without one", "again once one of them leads"
            raise StoreLostError(f"store {self.path}", expected="a store", got=got, hint=hint)
        if version != self._kind.version:
            raise UsageError(
                f"--worker with {self._kind.option} {self.path}",
                expected=f"a store of version {self._kind.version}",
                got=f"version {version}, of the release that leads",
                hint="the same release of Protofleet for all of them",
            )
        with self.guard():
            self.check_settings()

    def check_company(self) -> None:
        """Check that the leader shares the store: an aggregator that has it for itself takes all contributions alone.

        Raises:
            StoreLostError: it does not.
        """
        with self.guard():
            row = self.connection.execute(
                "SELECT beat = 'infinity' FROM protofleet WHERE kind = ?", (self._kind.name,)
            ).fetchone()
        if row is not None and row[0] and lock_holder(self.connection, self._kind) is not None:
            raise self._alone_one()

    def _alone_one(self) -> StoreLostError:
        got = "an aggregator without --worker, which has the store for itself"
        return StoreLostError(f"store {self.path}", expected="others with --worker", got=got, hint="ending that one")

    def may_lead(self) -> bool:
        """Whether no process leads. A leader that was silent for too long no longer leads after two calls."""
        with self.guard():
            holder = lock_holder(self.connection, self._kind)
            if holder is None:
                return True
            self.connection.execute(
                "SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity a, protofleet p"
                " WHERE a.pid = ? AND p.kind = ? AND p.beat < clock_timestamp() - make_interval(secs => ?)"
                " AND (a.state = 'idle' OR a.state LIKE 'idle in%'"
                " AND a.state_change < clock_timestamp() - make_interval(secs => ?))",
                (holder, self._kind.name, SILENT_S, BUSY_S),
            )
        return False

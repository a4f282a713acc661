"""Several processes on one schema of a PostgreSQL server: one leads, the others commit beside it.

The leader has the session lock and an epoch; each of its transactions is conditional on that (`postgres.py`). A member
has neither. What it knows of the store it has read when the number `changes` was some value, and whatever it commits is
conditional on that number being the same still, in the same transaction; the leader's transactions are alone, so
nothing changes in between. So a member that is late decides again, and writes nothing that is of yesterday.

A leader that is dead has lost its lock with its connection. One that is stopped has not: the operating system answers
for it. It says every `BEAT_S` that it is alive, by the server's clock; after `SILENT_S` without that its connection is
ended by whoever notices, and its lock is free. In the middle of a transaction it has `BUSY_S`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from aggregator.database.place import PostgresPlace
from aggregator.database.postgres import ALONE, PostgresDatabase, lock_holder
from aggregator.database.postgres_connection import PostgresConnection, check_server, connect, transaction, version_in
from contract.errors import StoreLostError, UsageError
from contract.sqlite import Kind

__all__ = ["BEAT_S", "Leader", "Member", "StaleError"]

BEAT_S, SILENT_S, BUSY_S = 2.0, 10.0, 60.0
_NOT_FOR_LONG = b"SET idle_in_transaction_session_timeout = 15000"  # one that is stopped keeps the leader waiting


class StaleError(Exception):
    """What was decided was decided on what is no longer so. Nothing was written."""


class _Beside(PostgresDatabase):
    """What leader and members do alike."""

    def changes(self) -> int:
        """Goes up with everything that a decision may depend on."""
        with self.guard():
            found = self.connection.execute("SELECT changes FROM protofleet WHERE kind = ?", (self._kind.name,))
            return int(found.fetchone()[0])

    @contextlib.contextmanager
    def beside_others(self, based_on: int | None) -> Iterator[PostgresConnection]:
        """A transaction beside those of other processes, but never beside a leader's.

        Args:
            based_on: what `changes` was when the decisions were made; None where they depend on nothing.

        Raises:
            StaleError: it is another now, or two such transactions wait for each other; nothing was written.
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
    """The one that leads."""

    def __init__(self, place: PostgresPlace, kind: Kind) -> None:
        super().__init__(place, kind, beats=True)


class Member(_Beside):
    """One that works beside a leader.

    Raises:
        StoreLostError: there is no store yet, or no server.
        StoreError: the server refuses.
        UsageError: it is of another version than this program writes, or who has it works alone.
    """

    def __init__(self, place: PostgresPlace, kind: Kind) -> None:
        self.path, self._kind, self._within, self.epoch = str(place), kind, False, 0
        with contextlib.ExitStack() as undo:
            self.connection = connect(place, kind)
            undo.callback(self.close)
            with self.guard():
                check_server(self.connection, self.path, kind, writes=True)
                self.connection.link.execute(_NOT_FOR_LONG)
                self.check_version()
            undo.pop_all()

    def check_version(self) -> None:
        """That a leader of another release has not brought the store to its version, and that it leads others.

        Raises:
            StoreError, UsageError: as the class.
        """
        with self.guard():
            version = version_in(self.connection, self._kind)
            alone = lock_holder(self.connection, self._kind, ALONE) is not None
        if alone:  # which knows nothing of what others commit
            raise UsageError(
                f"--worker with {self._kind.option} {self.path}",
                expected="a leader that is a worker itself",
                got="an aggregator that has the store alone",
                hint="starting that one with --worker, too",
            )
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

    def may_lead(self) -> bool:
        """Whether nobody leads; a leader that was silent for too long leads no more when this was called twice."""
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

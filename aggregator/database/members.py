"""Several processes on one schema of a PostgreSQL server: one leads, the others commit beside it.

The leader has the session lock and an epoch; each of its transactions is conditional on that (`postgres.py`). A member
has neither. What it knows of the store it has read when the number `changes` was some value, and whatever it commits is
conditional on that number being the same still, in the same transaction; the leader's transactions are alone, so
nothing changes in between. So a member that is late decides again, and writes nothing that is of yesterday.

Who leads says in the same row by which settings it takes contributions, from the transaction on with which it begins.
Every transaction of a member finds its own settings there, or writes nothing and ends it: one that was stopped while
another with other settings began to lead decides nothing by its own (docs/decisions/227).

A leader that is dead has lost its lock with its connection. One that is stopped has not: the operating system answers
for it. It says every `BEAT_S` that it is alive, by the server's clock; after `SILENT_S` without that its connection is
ended by whoever notices, and its lock is free. In the middle of a transaction it has `BUSY_S`, and as long again to
read what there is, before it says so for the first time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from aggregator.database.place import PostgresPlace
from aggregator.database.postgres import PostgresDatabase, lock_holder
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

    def check_settings(self) -> bool:
        """That this process's settings are in force; False where nobody's are, since an aggregator alone had it last.

        Raises:
            UsageError: another's are.
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
            based_on: what `changes` was when the decisions were made; None where they depend on nothing.

        Raises:
            StaleError: it is another now, or two such transactions wait for each other; nothing was written.
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
    """The one that leads.

    Args:
        settings: what is in force while it leads.
        anew: whether other settings than were in force until now may be; not for one that goes on.

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
    """One that works beside a leader.

    Args:
        settings: by which it decides.

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
        """What a member decides by is what is in force: within each of its transactions."""
        if not self.check_settings():
            raise self._alone_one()

    def check_version(self) -> None:
        """That a leader of another release has not brought the store to its version, nor other settings into force.

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
        """That who leads knows of others: an aggregator that has the store for itself takes all contributions alone.

        Raises:
            StoreLostError: it does not.
        """
        with self.guard():
            found = self.connection.execute(
                "SELECT beat = 'infinity' FROM protofleet WHERE kind = ?", (self._kind.name,)
            ).fetchone()
        if found is not None and found[0] and lock_holder(self.connection, self._kind) is not None:
            raise self._alone_one()

    def _alone_one(self) -> StoreLostError:
        got = "an aggregator without --worker, which has the store for itself"
        return StoreLostError(f"store {self.path}", expected="others with --worker", got=got, hint="ending that one")

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

"""A store's backups: `back_up` while the aggregator runs, `restore` while none does.

A backup is one file, 0600, that holds the store as it was at one moment:

1. SQLite's backup interface copies it under one read transaction, so that no writer waits and no writer is waited for.
2. The copy is checked.
3. It is put in its place whole. From then on the backup exists. If the store has no room left for a line about it, the
   command says so, and nothing else happens.

A restored store knows less than its devices do:

- So it is another run to them (`draw_run`), which continues from the content of the store: nothing that was sent to the
  run before can come in again.
- It may hold what was forgotten since. Of the store that it replaces, all orders about devices that the backup does not
  know are given again, in their order, and a device that is refused there is refused at once. If that store is gone or
  cannot be read, the orders are unknown: the command says so, and the operator gives them again.
- A roll-out that was under way is halted, for an operator to look at.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from protofleet.aggregator.database import AnyPlace, Connection, beside, engine_of, place_of, read_only, upsert
from protofleet.aggregator.database.engines import Place
from protofleet.aggregator.store.order_table import Order, as_run, orders
from protofleet.aggregator.store.schema import KIND, MADE_AT, draw_run
from protofleet.contract.errors import ProtofleetError, StoreError, UsageError
from protofleet.contract.files.atomic_files import lock, whole_file
from protofleet.contract.files.sqlite import Database, Kind, is_taken

__all__ = ["WRITTEN_TO", "BackedUp", "Restored", "back_up", "restore"]

_PAGES = 1024  # between two moments at which Ctrl-C is heard
_READERS_S = 5.0  # whoever looks at the store is done by then
WRITTEN_TO = "written to "  # begins the outcome of a backup, before its path
_GIVEN_AGAIN = ("forget", "withdraw", "remove", "admit", "forget class", "admit class", "invite", "enrol", "revoke")
_UNREADABLE = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_IOERR_READ", "SQLITE_IOERR_SHORT_READ")


@dataclass(frozen=True)
class BackedUp:
    """A backup that is complete.

    Attributes:
        path, file_bytes: where, and how large.
        unrecorded: why the store's record does not know of it; empty where it does.
    """

    path: str
    file_bytes: int
    unrecorded: str = ""


@dataclass(frozen=True)
class Restored:
    """A store that was made of a backup.

    Attributes:
        run: that it now is, in hex.
        made_at: when the backup was made, seconds since the epoch; None for a copy that does not say it.
        again: the orders of the store before that are to be done again; None where they could not be read.
        replaced: whether there was a store before.
    """

    run: str
    made_at: float | None
    again: int | None
    replaced: bool


def back_up(store: AnyPlace, out: str | os.PathLike[str], who: str) -> BackedUp:
    """Write a store as it is now to a file, which replaces an earlier backup there.

    Args:
        who: the person who makes it, for the record in the store.

    Raises:
        StoreError: the store cannot be read, or the disk refuses; then `out` is unchanged.
        UsageError: `store` is none, or a backup, or `out` is something else than an earlier backup.
    """
    title, shown = f"backup {os.fspath(out)}", str(place_of(store))
    with read_only(store, KIND, older=True) as source:
        if _is_backup(source):
            got, hint = "a backup, which is a file like any other", "copying it"
            raise UsageError(f"--store {shown}", expected="a store", got=got, hint=hint)
        _check_out(Path(out))
        made_at = time.time()
        with _disk_errors(title), whole_file(out) as file, _alone(file.name):
            os.fchmod(file.fileno(), 0o600)
            _copy(source, file.name, title, f"store {shown}", engine_of(place_of(store)).into_file)
            with _plain(file.name) as copy:
                copy.execute(upsert("meta", "name", "value"), (MADE_AT, b"%r" % made_at))
    unrecorded = ""
    try:
        with beside(store, KIND) as db:
            _record(db, "backup", who, made_at, f"{WRITTEN_TO}{os.path.abspath(out)}")
    except ProtofleetError as error:  # a full disk is when backups are made
        unrecorded = str(error)
    return BackedUp(os.fspath(out), os.path.getsize(out), unrecorded)


def restore(backup: str | os.PathLike[str], store: AnyPlace, who: str, *, force: bool) -> Restored:
    """Make a store from a backup, as another run.

    Args:
        who: the person who does it, for the record in the store.
        force: replace a store that is there.

    Raises:
        StoreError: the backup cannot be read or is damaged, an aggregator runs on the store, or the disk refuses; then
            `store` is unchanged.
        UsageError: the backup is none, there is a store and `force` was not given, or it is of another fleet.
    """
    place, title = place_of(store), f"store {place_of(store)}"
    if engine_of(place).replacing is not None:
        return _restore_there(backup, place, who, force=force)
    path = os.path.realpath(str(place))
    if os.path.realpath(backup) == path:
        raise UsageError(f"--store {place}", expected="another file than the backup", got="the same")
    with _reserved(path, force) as former, _disk_errors(title):
        before = _before(path) if former is not None else _Before(orders=[])
        with whole_file(path) as file, _alone(file.name):
            os.fchmod(file.fileno(), 0o600)
            if former is not None:  # whoever runs on it must be able to
                with contextlib.suppress(PermissionError):
                    os.fchown(file.fileno(), former.st_uid, former.st_gid)
            with _readable(backup) as source:
                _check_fleet(source, before.fleet, title)
                _copy(source, file.name, title, f"backup {os.fspath(backup)}")
            fcntl.flock(file.fileno(), fcntl.LOCK_UN)  # opened as a store it is locked anew; its place is ours
            renewed = _renewed(file.name, before.orders, who, os.path.abspath(backup))
            for companion in ("-wal", "-shm"):  # of the store before, which SQLite would read as this one's
                Path(path + companion).unlink(missing_ok=True)
    return Restored(renewed[0], renewed[1], renewed[2], former is not None)


def _restore_there(backup: str | os.PathLike[str], place: Place, who: str, *, force: bool) -> Restored:
    """The same where the store is on a server: in one transaction, its tables too; nothing is there before all is."""
    title, engine = f"store {place}", engine_of(place)
    assert engine.replacing is not None
    assert engine.into_schema is not None
    with _disk_errors(title), _present(backup) as source, engine.replacing(place, KIND) as db:
        fleet = _fleet_of(db)
        if fleet is not None and not force:
            got, hint = "one that is there", "--force to replace it, or another --store"
            raise UsageError(f"--store {place}", expected="a new store", got=got, hint=hint)
        _check_fleet(source, fleet, title)
        orders_before = [_key(o) for o in orders(db) if o.what in _GIVEN_AGAIN]
        engine.into_schema(source, db)
        run, made_at, again = _renew(db, orders_before, who, os.path.abspath(backup))
    return Restored(run, made_at, again, fleet is not None)


@contextlib.contextmanager
def _present(backup: str | os.PathLike[str]) -> Iterator[sqlite3.Connection]:
    """A backup as one of the present version, to read."""
    with _readable(backup) as source, tempfile.TemporaryDirectory() as folder:
        if source.execute("PRAGMA user_version").fetchone()[0] == KIND.version:
            yield source
            return
        path = os.path.join(folder, "store")
        _copy(source, path, f"copy of {os.fspath(backup)}", f"backup {os.fspath(backup)}")
        Database(path, KIND).close()
        with _readable(path) as brought_up:
            yield brought_up


@dataclass(frozen=True)
class _Before:
    """What the store before knew: the orders to be done again, and whose it was; None where it cannot be read."""

    orders: list[tuple[object, ...]] | None = None
    fleet: bytes | None = None


@contextlib.contextmanager
def _reserved(path: str, force: bool) -> Iterator[os.stat_result | None]:
    """Lock the place of a store for this process; yields the file status of the store there, None for no store."""
    new = not os.path.exists(path)
    try:
        descriptor = lock(path)
    except BlockingIOError:
        raise StoreError(
            f"store {path}", expected="one that no aggregator runs on", got="one that does", hint="stopping that one"
        ) from None
    except OSError as error:
        raise StoreError(f"store {path}", expected="a file that can be written", got=error.strerror) from None
    try:
        header = os.pread(descriptor, 100, 0)
        if header and int.from_bytes(header[68:72], "big") != KIND.application_id:
            raise UsageError(f"--store {path}", expected="a store, or a new one", got="another file")
        if header and not force:
            got, hint = "one that is there", "--force to replace it, or another --store"
            raise UsageError(f"--store {path}", expected="a new store", got=got, hint=hint)
        yield os.fstat(descriptor) if header else None
    except BaseException:
        if new and not os.fstat(descriptor).st_size and os.path.samestat(os.stat(path), os.fstat(descriptor)):
            os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def _check_out(out: Path) -> None:
    """That there is nothing, or a backup that nobody uses."""
    if not os.path.lexists(out):
        return
    title, hint = f"backup {out}", "another file"
    if is_taken(out):
        raise UsageError(title, expected="a file of its own", got="a store that is in use", hint=hint)
    try:
        with read_only(out, KIND, older=True) as db:
            is_backup = _is_backup(db)
    except ProtofleetError:
        is_backup = False
    if not is_backup:
        raise UsageError(title, expected="a new file, or an earlier backup", got="something else", hint=hint)


def _is_backup(db: Connection) -> bool:
    return db.execute("SELECT 1 FROM meta WHERE name = ?", (MADE_AT,)).fetchone() is not None


def _check_fleet(backup: Connection, fleet: bytes | None, what: str) -> None:
    """That a backup does not take the place of another fleet's store."""
    of_backup = _fleet_of(backup)
    if None not in (of_backup, fleet) and of_backup != fleet:
        names = [repr(value.decode(errors="replace"))[:80] for value in (of_backup, fleet) if value is not None]
        raise UsageError(what, expected=f"one of the backup's fleet, {names[0]}", got=names[1], hint="another --store")


def _fleet_of(db: Connection) -> bytes | None:
    row = db.execute("SELECT value FROM meta WHERE name = 'fleet'").fetchone()
    return None if row is None or not isinstance(row[0], bytes) else row[0]


def _copy(
    source: Connection,
    path: str,
    title: str,
    source_title: str,
    into_file: Callable[[Connection, sqlite3.Connection, Kind], None] | None = None,
) -> None:
    """Copy all of a database as it is now into an empty file, and check the copy.

    The copy has no log file beside it, whatever the source has.

    Args:
        into_file: of the source's engine; None where the source is a SQLite file.

    Raises:
        StoreError: the disk refuses the copy, and the message names `title`; or the source cannot be read, and the
            message names `source_title`.
    """
    try:
        with _plain(path) as copy:
            if into_file is not None:
                into_file(source, copy, KIND)
            else:
                assert isinstance(source, sqlite3.Connection)
                source.execute("SELECT count(*) FROM sqlite_master").fetchone()  # from here on all steps see the same
                source.backup(copy, pages=_PAGES, progress=lambda *_: None)
            copy.execute("PRAGMA journal_mode = DELETE")
            (verdict,) = copy.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorname.startswith(_UNREADABLE):
            raise StoreError(source_title, expected="a store that can be read", got=error, hint="another one") from None
        raise StoreError(title, expected="a disk that takes it", got=error, hint="freeing space") from None
    if verdict != "ok":
        raise StoreError(source_title, expected="a store that is whole", got=f"damaged: {verdict}", hint="another one")


@contextlib.contextmanager
def _alone(path: str) -> Iterator[None]:
    """A new file, with nothing beside it that SQLite would take for its log: not before, and not when it fails."""
    try:
        _without_companions(path)
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            _without_companions(path)
        raise


def _without_companions(path: str) -> None:
    for companion in ("-journal", "-wal", "-shm"):
        Path(path + companion).unlink(missing_ok=True)


@contextlib.contextmanager
def _plain(path: str) -> Iterator[sqlite3.Connection]:
    db = sqlite3.connect(path, isolation_level=None)
    try:
        db.execute("PRAGMA secure_delete = 1")
        yield db
    finally:
        db.close()


@contextlib.contextmanager
def _readable(backup: str | os.PathLike[str]) -> Iterator[sqlite3.Connection]:
    """A backup, or a store of an older version, to read."""
    title = f"backup {os.fspath(backup)}"
    if not os.path.isfile(backup):
        raise StoreError(title, expected="a backup of a store", got="no such file")
    with contextlib.closing(sqlite3.connect(Path(backup).absolute().as_uri() + "?mode=ro", uri=True)) as db:
        try:
            application, version = (db.execute(f"PRAGMA {n}").fetchone()[0] for n in ("application_id", "user_version"))
            if application != KIND.application_id or version > KIND.version:
                got = f"version {version}" if application == KIND.application_id else "another file"
                raise UsageError(title, expected=f"a store of at most version {KIND.version}", got=got)
            yield db
        except sqlite3.DatabaseError as error:
            raise StoreError(title, expected="a backup that can be read", got=error, hint="another one") from None


def _before(path: str) -> _Before:
    """What was asked of the store before, and done or not; it is whole without its log then, which goes.

    Raises:
        StoreError: somebody reads in it.
    """
    try:
        with _plain(path) as db:  # its lock is ours
            db.execute(f"PRAGMA busy_timeout = {round(1000 * _READERS_S)}")
            busy, *_ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            fleet = _fleet_of(db)
            orders_before: list[tuple[object, ...]] = [_key(o) for o in orders(db) if o.what in _GIVEN_AGAIN]
    except sqlite3.DatabaseError as error:
        none_yet = "no such table: fleet_order" in str(error)  # of a version that knew none
        return _Before(orders=[] if none_yet else None, fleet=fleet if none_yet else None)
    if busy:
        got, hint = "one that a process reads in, a backup perhaps", "when that is done"
        raise StoreError(f"store {path}", expected="one that nobody uses", got=got, hint=hint)
    return _Before(orders_before, fleet)


def _key(order: Order) -> tuple[object, ...]:
    """An order, as it is told from others and given again."""
    return order.what, order.device, order.who, order.given_at, order.detail


def _renewed(
    path: str, before: list[tuple[object, ...]] | None, who: str, backup: str
) -> tuple[str, float | None, int | None]:
    """Make another run of a copy, in which what was asked since is to be done again: run, when it was made, orders."""
    file = Database(path, KIND)  # brings an older one to the present version
    try:
        with file.transaction() as db:
            return _renew(db, before, who, backup)
    finally:
        file.close()


def _renew(
    db: Connection, before: list[tuple[object, ...]] | None, who: str, backup: str
) -> tuple[str, float | None, int | None]:
    """Part of the transaction that makes another run of what was copied."""
    recorded = {_key(order) for order in orders(db)}
    again = [order for order in before or () if order not in recorded]
    statement = "INSERT INTO fleet_order (what, device, who, given_at, detail) VALUES (?, ?, ?, ?, ?)"
    db.executemany(statement, again)
    row = db.execute("DELETE FROM meta WHERE name = ? RETURNING value", (MADE_AT,)).fetchone()
    db.execute(
        "UPDATE rollout SET state = 'halted', reason = 'the store was restored from a backup'"
        " WHERE state IN ('running', 'complete')"
    )
    db.execute("UPDATE rollout SET state = 'ended' WHERE state IN ('coming', 'given')")
    run = draw_run(db)
    _record(db, "restore", who, time.time(), f"of {backup}, {as_run(run)}")
    return run.hex(), None if row is None else _seconds(row[0]), None if before is None else len(again)


def _seconds(value: object) -> float | None:
    """When a backup was made; None where somebody has written something else there."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def _record(db: Connection, what: str, who: str, at: float, outcome: str) -> None:
    """Record a backup or a restore among the orders."""
    db.execute(
        "INSERT INTO fleet_order (what, device, who, given_at, done_at, outcome, version_before, version_after)"
        " SELECT ?, '', ?, ?, ?, ?, v, v FROM (SELECT coalesce(max(version), 0) AS v FROM global) AS newest",
        (what, who, at, time.time(), outcome),
    )


@contextlib.contextmanager
def _disk_errors(title: str) -> Iterator[None]:
    """Turn errors of the disk into a `StoreError` of one line."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise StoreError(title, expected="a whole copy on a disk that takes it", got=error) from None
    except OSError as error:
        raise StoreError(
            title, expected="a file that can be written", got=error.strerror, hint="another place"
        ) from None

"""A store's backups: `back_up` while the aggregator runs, `restore` where none does.

A backup is one file, 0600, that holds the store as it was at one moment: copied by SQLite's backup interface under one
read transaction, so that whoever writes meanwhile is neither waited for nor waits, checked, and put in its place whole.

A restored store knows less than its devices do. So it is another run to them (`draw_run`), which goes on from what it
holds: nothing that was sent to the run before can come in again. And it may hold what was forgotten since: of the store
that it takes the place of, all orders about devices that the backup does not know are given again, in their order, and
whoever is refused there is refused at once. Where that store is gone or cannot be read, nobody knows them: the command
says so, and the operator gives them again.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aggregator.standing_store import orders
from aggregator.store_schema import KIND, draw_run
from contract.errors import ProtofleetError, StoreError, UsageError
from contract.files import lock, whole_file
from contract.sqlite import Database, beside, is_taken, read_only

__all__ = ["WRITTEN_TO", "BackedUp", "Restored", "back_up", "restore"]

MADE_AT = "backup made"  # in `meta` of a backup, seconds since the epoch
_PAGES = 1024  # between two moments at which Ctrl-C is heard
WRITTEN_TO = "written to "  # begins the outcome of a backup, before its path
_GIVEN_AGAIN = ("forget", "withdraw", "remove", "admit", "forget class", "admit class")


@dataclass(frozen=True)
class BackedUp:
    """A backup that is complete: where, and how large."""

    path: str
    file_bytes: int


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


def back_up(store: str | os.PathLike[str], out: str | os.PathLike[str], who: str) -> BackedUp:
    """Write a store as it is now to a file, which takes the place of an earlier backup there.

    Args:
        who: makes it, for the record in the store.

    Raises:
        StoreError: the store cannot be read, or the disk refuses; then nothing is at `out` but what was.
        UsageError: `store` is none, or `out` is something else than an earlier backup.
    """
    with read_only(store, KIND) as source:
        _check_out(Path(out))
        made_at = time.time()
        with _told(f"backup {os.fspath(out)}"), whole_file(out) as file:
            os.fchmod(file.fileno(), 0o600)
            _copy(source, file.name)
            with _plain(file.name) as copy:
                copy.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (MADE_AT, b"%r" % made_at))
    with beside(store, KIND) as db:
        _record(db, "backup", who, made_at, f"{WRITTEN_TO}{os.path.abspath(out)}")
    return BackedUp(os.fspath(out), os.path.getsize(out))


def restore(backup: str | os.PathLike[str], store: str | os.PathLike[str], who: str, *, force: bool) -> Restored:
    """Make a store of a backup, as another run.

    Args:
        who: does it, for the record in the store.
        force: take the place of a store that is there.

    Raises:
        StoreError: the backup cannot be read or is damaged, an aggregator runs on the store, or the disk refuses; then
            what was at `store` is there as it was.
        UsageError: the backup is none, or there is a store and `force` was not given.
    """
    path = os.path.realpath(store)
    if os.path.realpath(backup) == path:
        raise UsageError(f"--store {os.fspath(store)}", expected="another file than the backup", got="the same")
    with _taken(path, force) as there, _told(f"store {path}"):
        before = _orders_of(path) if there else []
        with whole_file(path) as file:
            os.fchmod(file.fileno(), 0o600)
            with _readable(backup) as source:
                _copy(source, file.name)
            found = _renewed(file.name, before, who, os.path.abspath(backup))
            for companion in ("-wal", "-shm"):  # of the store before, which SQLite would read as this one's
                Path(path + companion).unlink(missing_ok=True)
    return Restored(found[0], found[1], found[2], there)


@contextlib.contextmanager
def _taken(path: str, force: bool) -> Iterator[bool]:
    """The place of a store, for us alone; whether there is one."""
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
        yield bool(os.fstat(descriptor).st_size)
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
    what, hint = f"backup {out}", "another file"
    if is_taken(out):
        raise UsageError(what, expected="a file of its own", got="a store that is in use", hint=hint)
    try:
        with read_only(out, KIND) as db:
            known = db.execute("SELECT 1 FROM meta WHERE name = ?", (MADE_AT,)).fetchone() is not None
    except ProtofleetError:
        known = False
    if not known:
        raise UsageError(what, expected="a new file, or an earlier backup", got="something else", hint=hint)


def _copy(source: sqlite3.Connection, path: str) -> None:
    """All of a database as it is now, checked, in an empty file; without a log beside it, whatever the source has."""
    source.execute("SELECT count(*) FROM sqlite_master").fetchone()  # from here on all steps see the same
    with _plain(path) as copy:
        source.backup(copy, pages=_PAGES, progress=lambda *_: None)
        copy.execute("PRAGMA journal_mode = DELETE")
        (word,) = copy.execute("PRAGMA quick_check(1)").fetchone()
    if word != "ok":
        raise sqlite3.DatabaseError(f"damaged: {word}")


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
    what = f"backup {os.fspath(backup)}"
    if not os.path.isfile(backup):
        raise StoreError(what, expected="a backup of a store", got="no such file")
    with contextlib.closing(sqlite3.connect(Path(backup).absolute().as_uri() + "?mode=ro", uri=True)) as db:
        try:
            application, version = (db.execute(f"PRAGMA {n}").fetchone()[0] for n in ("application_id", "user_version"))
            if application != KIND.application_id or version > KIND.version:
                got = f"version {version}" if application == KIND.application_id else "another file"
                raise UsageError(what, expected=f"a store of at most version {KIND.version}", got=got)
            yield db
        except sqlite3.DatabaseError as error:
            raise StoreError(what, expected="a backup that can be read", got=error, hint="another one") from None


def _orders_of(path: str) -> list[tuple[object, ...]] | None:
    """What was asked of the store before, and done or not; None where it cannot be read."""
    try:
        with _plain(path) as db:  # its lock is ours
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # it is whole without its log, which goes
            asked = [o for o in orders(db) if o.what in _GIVEN_AGAIN]
    except sqlite3.DatabaseError:
        return None
    return [(o.what, o.device, o.who, o.given_at) for o in asked]


def _renewed(
    path: str, before: list[tuple[object, ...]] | None, who: str, backup: str
) -> tuple[str, float | None, int | None]:
    """Make another run of a copy, in which what was asked since is to be done again: run, when it was made, orders."""
    file = Database(path, KIND)  # brings an older one to the present version
    try:
        with file.transaction() as db:
            known = {(o.what, o.device, o.who, o.given_at) for o in orders(db)}
            again = [order for order in before or () if order not in known]
            db.executemany("INSERT INTO fleet_order (what, device, who, given_at) VALUES (?, ?, ?, ?)", again)
            row = db.execute("DELETE FROM meta WHERE name = ? RETURNING value", (MADE_AT,)).fetchone()
            run = draw_run(db).hex()
            _record(db, "restore", who, time.time(), f"of {backup}, as run {run}")
    finally:
        file.close()
    return run, None if row is None else float(row[0]), None if before is None else len(again)


def _record(db: sqlite3.Connection, what: str, who: str, at: float, outcome: str) -> None:
    """What was done to the store, among what was asked of it."""
    db.execute(
        "INSERT INTO fleet_order (what, device, who, given_at, done_at, outcome, version_before, version_after)"
        " SELECT ?, '', ?, ?, ?, ?, v, v FROM (SELECT coalesce(max(version), 0) AS v FROM global)",
        (what, who, at, time.time(), outcome),
    )


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """What the disk refuses is one line."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise StoreError(what, expected="a whole copy on a disk that takes it", got=error) from None
    except OSError as error:
        raise StoreError(
            what, expected="a file that can be written", got=error.strerror, hint="another place"
        ) from None

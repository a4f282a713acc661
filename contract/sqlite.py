"""One way to open, lock, migrate and write a SQLite file: the aggregator's store and the device's journal.

What opening does, in this order:

1. Take the file for this process. It is made, if need be, for its owner alone (0600; SQLite gives its companions
   `-wal` and `-shm` the same), and locked by inode, so that a link to it is no way past the lock.
2. Look at its first 100 bytes, without SQLite: a file that is not ours, or of another version, is refused untouched.
3. Open it; `synchronous=FULL` and a write-ahead log, so that what a transaction has committed survives a power cut.
4. Bring it to the present version: `steps` are scripts, the first makes the file of version `FIRST_VERSION` and each
   further one takes it to the next version; those that are missing run in one transaction.

`read_only` opens a file beside the process that has it, and changes nothing; `Watch` tells whether it is worth while.
`beside` adds to it in one transaction, where the process that has it looks for what others left there; `bring_up`
makes it fit for that.

`application_id` says whose a file is and never changes; `user_version` counts up. A transaction ends with a look at
the disk: a file that was deleted or replaced meanwhile took what was written with it, and that is an error.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from contract.errors import InUseError, StoreError, UsageError
from contract.files import lock

__all__ = [
    "FIRST_VERSION", "Database", "Kind", "Watch", "as_written", "beside", "bring_up", "is_taken", "lay_out",
    "read_only", "typed",
]  # fmt: skip

FIRST_VERSION = 2  # of Protofleet 0.2; version 0.1 was given to nobody
_HEADER = b"SQLite format 3\x00"
_POLL_S = 0.02
_BROKEN = (sqlite3.DatabaseError, UnicodeDecodeError)  # the latter: sqlite3 cannot tell what SQLite says of a file
_MOMENT_S = 0.3  # in which whoever only looks is done


@dataclass(frozen=True)
class Kind:
    """What a file is for.

    Attributes:
        name: `store` or `journal`.
        option: what names it on the command line.
        application_id: 4 letters as a number.
        steps: SQL scripts; see this file's beginning. None of them is ever changed once released.
        pragmas: SQLite's settings of a connection, or, like the page size, of a new file.
        statements: how many statements are kept prepared; each keeps a copy of what it was last given, blobs too.
        writer: who writes it, in words.
    """

    name: str
    option: str
    application_id: int
    steps: tuple[str, ...]
    pragmas: Mapping[str, int] = field(default_factory=dict)
    statements: int = 128
    writer: str = "a device"

    @property
    def version(self) -> int:
        """The version that this program writes."""
        return FIRST_VERSION + len(self.steps) - 1


@contextlib.contextmanager
def read_only(path: str | os.PathLike[str], kind: Kind, *, older: bool = False) -> Iterator[sqlite3.Connection]:
    """One consistent look at a file, which another process may be writing.

    Args:
        older: whether a file of an older version will do.

    Raises:
        StoreError: there is none, or it cannot be read.
        UsageError: it is another kind of file, or of another version than this program writes.
    """
    what = f"{kind.name} {os.fspath(path)}"
    if not os.path.isfile(path):
        raise StoreError(what, expected=f"a {kind.name}", got="no such file", hint=f"another {kind.option}")
    db = _reader(path)
    try:
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        least = FIRST_VERSION if older else kind.version
        if application != kind.application_id or not least <= version <= kind.version:
            raise _of_another_version(what, kind, application, version)
        db.execute("BEGIN")
        yield db
    except _BROKEN as error:
        raise StoreError(what, expected=f"a {kind.name} that can be read", got=error) from None
    finally:
        db.close()


def typed(row: tuple[Any, ...], *kinds: type) -> tuple[Any, ...]:
    """A row whose values are of these kinds: SQLite keeps any value in any column, whatever the table says.

    Raises:
        TypeError: one is of another.
    """
    for value, kind in zip(row, kinds, strict=True):
        if type(value) is not kind:
            raise TypeError(f"{type(value).__name__} where {kind.__name__} belongs")
    return row


@contextlib.contextmanager
def as_written(path: str | os.PathLike[str], kind: Kind) -> Iterator[None]:
    """Values that no program of ours has written become a `StoreError`."""
    try:
        yield
    except (KeyError, TypeError, ValueError, ArithmeticError, AssertionError) as error:  # one of these is `WireError`
        raise StoreError(
            f"{kind.name} {os.fspath(path)}", expected=f"what {kind.writer} writes",
            got=f"{type(error).__name__}: {error}", hint=f"another {kind.option}",
        ) from None  # fmt: skip


def _of_another_version(what: str, kind: Kind, application: int, version: int) -> UsageError:
    got = "another file" if application != kind.application_id else f"version {version}"
    hint = None
    if application == kind.application_id:
        older = version < kind.version
        hint = "starting what runs on it, which brings it to that version" if older else "a newer Protofleet"
    return UsageError(what, expected=f"a {kind.name} of version {kind.version}", got=got, hint=hint)


def _reader(path: str | os.PathLike[str]) -> sqlite3.Connection:
    real = os.path.realpath(path)
    # A log that nobody can share, on a disk that is not written to, is read without one.
    alone = not os.access(os.path.dirname(real), os.W_OK) and not os.path.exists(f"{real}-wal")
    options = "mode=ro" + ("&immutable=1" if alone else "")
    return sqlite3.connect(f"file:{quote(real)}?{options}", uri=True, isolation_level=None, check_same_thread=False)


class Watch:
    """Whether anything was committed to a file since the last look, whoever writes it; a look takes microseconds.

    It asks SQLite's own counter, which no commit leaves as it was. A file that is not there yet, or not any more, has
    nothing new; one that takes another's place has, and so has one that cannot be read: reading it will say why.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._files: tuple[object, ...] = ()
        self._seen = -1

    def changed(self) -> bool:
        """Look; the first look at a file that is there finds it changed."""
        try:
            os.stat(self._path)
            if self._db is None or self._files != self._stats():
                self.close()
                self._db = _reader(self._path)
            (seen,) = self._db.execute("PRAGMA data_version").fetchone()
            if self._seen < 0:
                self._files = self._stats()  # which opening it may have made
        except OSError:
            return False
        except sqlite3.DatabaseError:
            return True
        before, self._seen = self._seen, int(seen)
        return before != self._seen

    def close(self) -> None:
        """Let go of the file."""
        if self._db is not None:
            self._db.close()
        self._db, self._seen = None, -1

    def _stats(self) -> tuple[object, ...]:
        """What the system says of the file and its log. Where these have changed, the connection is made anew: when
        this process closes the file elsewhere, SQLite's locks on it are gone, and another process may take from under
        an open connection what it hears of commits by."""
        return tuple(_stat(f"{os.fspath(self._path)}{suffix}") for suffix in ("", "-wal"))


def _stat(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def is_taken(path: str | os.PathLike[str]) -> bool:
    """Whether another process runs on this file at this moment."""
    if not os.path.isfile(path):
        return False  # and none is made
    try:
        os.close(lock(os.path.realpath(path)))
    except BlockingIOError:
        return True
    except OSError:
        return False  # whoever opens it next says why
    return False


def bring_up(path: str | os.PathLike[str], kind: Kind) -> bool:
    """Bring an older file to the present version, unless a process runs on it; whether one does.

    Raises:
        StoreError: there is no such file, or the disk refuses.
        UsageError: it is another kind of file, or of a version that this program does not know.
    """
    if not os.path.isfile(path):
        what = f"{kind.name} {os.fspath(path)}"
        raise StoreError(what, expected=f"a {kind.name}", got="no such file", hint=f"another {kind.option}")
    try:
        Database(path, kind, wait_s=_MOMENT_S).close()
    except InUseError:
        return True
    return False


@contextlib.contextmanager
def beside(path: str | os.PathLike[str], kind: Kind) -> Iterator[sqlite3.Connection]:
    """One transaction in a file that another process may have: durable when the block ends, or nothing of it.

    Raises:
        StoreError: there is no such file, or the disk refuses.
        UsageError: it is another kind of file, or of another version than this program writes.
    """
    with read_only(path, kind):
        pass  # it is what it should be
    what = f"{kind.name} {os.fspath(path)}"
    db = sqlite3.connect(f"file:{quote(os.path.realpath(path))}?mode=rw", uri=True, isolation_level=None, timeout=30.0)
    try:
        for name, value in kind.pragmas.items():
            db.execute(f"PRAGMA {name} = {value}")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("BEGIN IMMEDIATE")
        yield db
        db.execute("COMMIT")
    except _BROKEN as error:
        if _is_strange(error):
            raise StoreError(what, expected=f"a {kind.name} as it was written", got=error) from None
        raise StoreError(
            what, expected="a disk that takes it", got=error, hint="freeing space; nothing was kept"
        ) from None
    finally:
        db.close()


def lay_out(db: sqlite3.Connection, kind: Kind, version: int | None = None) -> None:
    """Within a transaction, the steps that bring a file from a version, or an empty one, to `kind`'s."""
    for step in kind.steps[0 if version is None else version - FIRST_VERSION + 1 :]:
        for statement in step.split(";"):
            db.execute(statement)
    db.execute(f"PRAGMA application_id = {kind.application_id}")
    db.execute(f"PRAGMA user_version = {kind.version}")


def _is_strange(error: Exception) -> bool:
    """Whether the file is at fault, its tables or its bytes, and not the disk."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    return code in (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class Database:
    """An open file.

    Args:
        path: made when it does not exist.
        wait_s: how long to wait for another process that has it.

    Raises:
        StoreError: when another process has it, or the disk refuses.
        UsageError: when it is another kind of file, or of a version that this program does not know.
    """

    def __init__(self, path: str | os.PathLike[str], kind: Kind, *, wait_s: float = 0.0) -> None:
        self.path, self._kind, self._logged = os.path.realpath(path), kind, False
        self._lock = self._take(time.monotonic() + wait_s)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._lock)
            self._check_header()
            with self.guard():
                self.connection = sqlite3.connect(
                    self.path, isolation_level=None, check_same_thread=False, cached_statements=kind.statements
                )
                undo.callback(self.connection.close)
                self._prepare()
            undo.pop_all()

    def close(self) -> None:
        """Give the file and the lock back. Nothing is pending: every transaction was durable when it ended."""
        self.connection.close()  # before the lock: closing any descriptor of the file drops SQLite's own locks
        os.close(self._lock)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """What the disk refuses becomes a `StoreError`."""
        try:
            yield
        except _BROKEN as error:
            if isinstance(error, sqlite3.IntegrityError | sqlite3.ProgrammingError):
                raise
            raise self._refused(error) from None

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """As `guard`; and values that no program of ours has written become a `StoreError`, too."""
        with self.guard(), as_written(self.path, self._kind):
            yield

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All of the block is on the disk when it ends, or none of it.

        Raises:
            StoreError: when the disk refuses, or the file is no longer there.
        """
        with self.guard():
            self._check_there()
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                yield self.connection
                self.connection.execute("COMMIT")
            except BaseException:
                if self.connection.in_transaction:  # SQLite has rolled back by itself when the disk is full
                    self.connection.execute("ROLLBACK")
                raise
            self._check_there(after=True)

    def _take(self, until_s: float) -> int:
        what = f"{self._kind.name} {self.path}"
        try:
            while True:
                try:
                    return lock(self.path)
                except BlockingIOError:
                    if time.monotonic() >= until_s:
                        raise
                time.sleep(_POLL_S)
        except BlockingIOError:
            raise InUseError(
                what,
                expected="to be its only user",
                got="another process that runs on it",
                hint=f"stopping that one, or another {self._kind.option}",
            ) from None
        except OSError as error:
            raise StoreError(
                what,
                expected="a file that can be written",
                got=error.strerror,
                hint=f"another {self._kind.option}",
            ) from None

    def _check_header(self) -> None:
        """Refuse a file that is not ours before SQLite touches it."""
        header = os.pread(self._lock, 100, 0)
        if not header or os.path.exists(self.path + "-journal"):  # new, or cut off while it was made: SQLite sees to it
            return
        application = int.from_bytes(header[68:72], "big")
        if len(header) < 100 or not header.startswith(_HEADER) or application != self._kind.application_id:
            raise self._wrong("another file, or one of Protofleet 0.1")
        self._check_version(int.from_bytes(header[60:64], "big"))

    def _check_version(self, version: int) -> None:
        if version > self._kind.version:
            raise self._wrong(f"version {version}, of a newer Protofleet")
        if version < FIRST_VERSION:
            raise self._wrong("one of Protofleet 0.1")

    def _prepare(self) -> None:
        execute = self.connection.execute
        for name, value in self._kind.pragmas.items():
            execute(f"PRAGMA {name} = {value}")
        execute("PRAGMA synchronous = FULL")
        (pages,) = execute("SELECT count(*) FROM sqlite_master").fetchone()
        (application,) = execute("PRAGMA application_id").fetchone()
        (version,) = execute("PRAGMA user_version").fetchone()
        if pages and application != self._kind.application_id:
            raise self._wrong("another file, or one of Protofleet 0.1")
        if pages:
            self._check_version(version)  # the header's may be older: the log is read only now
        if not pages or version < self._kind.version:
            with self.transaction():
                lay_out(self.connection, self._kind, version if pages else None)
        execute("PRAGMA journal_mode = WAL")  # only now, so that a new file's header is in the file and not in the log
        self._logged = True

    def _check_there(self, *, after: bool = False) -> None:
        try:
            there = os.path.samestat(os.stat(self.path), os.fstat(self._lock))
        except OSError:
            there = False
        if after and self._logged:
            there = there and os.path.exists(self.path + "-wal")
        if not there:
            raise StoreError(
                f"{self._kind.name} {self.path}",
                expected="the file that was opened",
                got="a name without it: it was deleted or replaced",
                hint=f"starting again; nothing since was kept, or another {self._kind.option}",
            )

    def _refused(self, error: Exception) -> StoreError:
        if _is_strange(error):
            what, expected = f"{self._kind.name} {self.path}", f"a {self._kind.name} as it was written"
            return StoreError(what, expected=expected, got=error, hint=f"another {self._kind.option}")
        return StoreError(
            f"{self._kind.name} {self.path}",
            expected="a disk that takes it",
            got=error,
            hint=f"freeing space, or another {self._kind.option}; what was confirmed is safe",
        )

    def _wrong(self, got: str) -> UsageError:
        first, last = FIRST_VERSION, self._kind.version
        versions = f"version {last}" if first == last else f"versions {first} to {last}"
        named = self._kind.name if " " in self._kind.option else self._kind.option
        return UsageError(
            f"{named} {self.path}",
            expected=f"a {self._kind.name} of {versions}",
            got=got,
            hint=f"another {self._kind.option}, which is then made",
        )

"""The one way to open, lock, migrate and write a SQLite file: the aggregator's store and the device's journal.

`Database` opens a file in this order:

1. It takes the file for this process. A new file is made for its owner alone (0600); SQLite gives its companions `-wal`
   and `-shm` the same mode. The lock is on the inode, so a link to the file does not avoid the lock.
2. It reads the first 100 bytes, without SQLite. A file of another program or of another version is refused untouched.
3. It opens the file with `synchronous=FULL` and a write-ahead log. So a committed transaction survives a power cut.
4. It brings the file to the present version. `steps` are scripts: the first one makes a file of version
   `FIRST_VERSION`, and each further one takes the file to the next version. The missing ones run in one transaction.

Beside the process that has a file:

- `read_only` opens the file and changes nothing; `Watch` tells whether there is anything new to read.
- `beside` adds to the file in one transaction; the process that has it looks there for what others left.
- `bring_up` brings the file to the present version, so that `beside` can be used.

`discard` removes a file that cannot be read, unless a process has it.

Closing any descriptor of a file drops the locks that SQLite holds on it for this process: another process then believes
that it is the last one, and removes the log under a connection that is open here. So a descriptor that was locked is
kept until the last connection of this process to its file is closed (`_let_go`), and taken again until then.

`application_id` names the kind of a file and never changes; `user_version` counts up. A transaction ends with a look at
the disk: if the file was deleted or replaced meanwhile, what was written is lost, and that is an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from protofleet.contract.errors import InUseError, StoreError, UsageError
from protofleet.contract.files.atomic_files import open_to_lock, take_lock

__all__ = [
    "FIRST_VERSION", "Database", "Kind", "Watch", "as_written", "beside", "bring_up", "cut_log", "discard", "is_made",
    "is_taken", "lay_out", "read_only", "typed",
]  # fmt: skip

FIRST_VERSION = 2  # of Protofleet 0.2; version 0.1 was given to nobody
_HEADER = b"SQLite format 3\x00"
_POLL_S = 0.02
_BROKEN = (sqlite3.DatabaseError, UnicodeDecodeError)  # the latter: sqlite3 cannot tell what SQLite says of a file
_MOMENT_S = 0.3  # in which whoever only looks is done


@dataclass(frozen=True)
class Kind:
    """One kind of file.

    Attributes:
        name: `store` or `journal`.
        option: the command-line option that names such a file.
        application_id: 4 letters as a number.
        steps: SQL scripts; see the module's docstring. A released script never changes.
        pragmas: SQLite's settings of a connection, or, like the page size, of a new file.
        statements: how many statements stay prepared. Each keeps a copy of its last arguments, blobs too.
        writer: who writes such a file, in words.
        remedy: what to do where such a file cannot be read; empty for another one.
    """

    name: str
    option: str
    application_id: int
    steps: tuple[str, ...]
    pragmas: Mapping[str, int] = field(default_factory=dict)
    statements: int = 128
    writer: str = "a device"
    remedy: str = ""

    @property
    def instead(self) -> str:
        """What to do where such a file cannot be read."""
        return self.remedy or f"another {self.option}"

    @property
    def version(self) -> int:
        """The version that this program writes."""
        return FIRST_VERSION + len(self.steps) - 1


# ── descriptors ─────────────────────────────────────────────────────────────────────────────────────────────────────

_Inode = tuple[int, int]  # device and number
_mutex = threading.Lock()
_connections: dict[_Inode, int] = {}  # how many this process has of a file
_kept: dict[_Inode, list[int]] = {}  # descriptors without a lock, of files that have connections


class _Connection(sqlite3.Connection):
    """One that is counted while it is open."""

    inode: _Inode | None = None

    def close(self) -> None:
        super().close()
        with _mutex:
            inode, self.inode = self.inode, None
            if inode is None:
                return
            _connections[inode] -= 1
            if not _connections[inode]:
                del _connections[inode]
                for descriptor in _kept.pop(inode, ()):
                    os.close(descriptor)


def _connect(real: str, name: str, **options: Any) -> sqlite3.Connection:
    """A connection to the file `real`, which SQLite knows by `name`."""
    with _mutex:
        db = sqlite3.connect(name, isolation_level=None, factory=_Connection, **options)
        with contextlib.suppress(OSError):
            db.inode = _inode(os.stat(real))
            _connections[db.inode] = _connections.get(db.inode, 0) + 1
    return db


def _inode(status: os.stat_result) -> _Inode:
    return status.st_dev, status.st_ino


def _lock(real: str) -> int:
    """A descriptor of the file, locked until `_let_go`. A missing file is made, for its owner alone.

    Raises:
        BlockingIOError: another process has it, or another `Database` here.
        OSError: it cannot be opened for writing, or is no regular file.
    """
    descriptor = None
    with _mutex, contextlib.suppress(OSError):
        kept = _kept.get(_inode(os.stat(real)))
        descriptor = kept.pop() if kept else None
    if descriptor is None:
        descriptor = open_to_lock(real)
    try:
        take_lock(descriptor)
    except BaseException:
        _let_go(descriptor)
        raise
    return descriptor


def _let_go(descriptor: int) -> None:
    """Give up the lock; the descriptor is closed with the last connection of this process to the file."""
    with _mutex:
        inode = _inode(os.fstat(descriptor))
        if inode not in _connections:
            os.close(descriptor)
            return
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        _kept.setdefault(inode, []).append(descriptor)


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def read_only(path: str | os.PathLike[str], kind: Kind, *, older: bool = False) -> Iterator[sqlite3.Connection]:
    """One consistent view of a file that another process may be writing.

    Args:
        older: whether a file of an older version is accepted.

    Raises:
        StoreError: there is no such file, or it cannot be read.
        UsageError: it is another kind of file, or of another version than this program writes.
    """
    subject = f"{kind.name} {os.fspath(path)}"
    if not os.path.isfile(path):
        raise StoreError(subject, expected=f"a {kind.name}", got="no such file", hint=f"another {kind.option}")
    try:
        db = _reader(path)
    except _BROKEN as error:  # nobody lets us read it, or the folder that it is in
        raise StoreError(
            subject, expected=f"a {kind.name} that can be read", got=error, hint="the user that it is of"
        ) from None
    try:
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        least = FIRST_VERSION if older else kind.version
        if application != kind.application_id or not least <= version <= kind.version:
            raise _of_another_version(subject, kind, application, version)
        db.execute("BEGIN")
        yield db
    except _BROKEN as error:
        hint = kind.remedy if _is_strange(error) else ""  # not where it is in use, or the disk is at fault
        raise StoreError(subject, expected=f"a {kind.name} that can be read", got=error, hint=hint) from None
    finally:
        db.close()


def typed(row: tuple[Any, ...], *kinds: type) -> tuple[Any, ...]:
    """Return a row after checking the types of its values: SQLite keeps any value in any column.

    Raises:
        TypeError: a value has another type.
    """
    for value, kind in zip(row, kinds, strict=True):
        if type(value) is not kind:
            raise TypeError(f"{type(value).__name__} where {kind.__name__} belongs")
    return row


@contextlib.contextmanager
def as_written(path: str | os.PathLike[str], kind: Kind) -> Iterator[None]:
    """Turn errors about values that Protofleet has not written into a `StoreError`."""
    try:
        yield
    except (KeyError, TypeError, ValueError, ArithmeticError, AssertionError) as error:  # one of these is `WireError`
        raise StoreError(
            f"{kind.name} {os.fspath(path)}", expected=f"what {kind.writer} writes",
            got=f"{type(error).__name__}: {error}", hint=kind.instead,
        ) from None  # fmt: skip


def _of_another_version(subject: str, kind: Kind, application: int, version: int) -> UsageError:
    got = "another file" if application != kind.application_id else f"version {version}"
    hint = kind.remedy or None
    if application == kind.application_id:
        older = version < kind.version
        hint = "starting what runs on it, which brings it to that version" if older else "a newer Protofleet"
    return UsageError(subject, expected=f"a {kind.name} of version {kind.version}", got=got, hint=hint)


def _reader(path: str | os.PathLike[str]) -> sqlite3.Connection:
    real = os.path.realpath(path)
    # A log that nobody can share, on a disk that is not written to, is read without one.
    alone = not os.access(os.path.dirname(real), os.W_OK) and not os.path.exists(f"{real}-wal")
    options = "mode=ro" + ("&immutable=1" if alone else "")
    return _connect(real, f"file:{quote(real)}?{options}", uri=True, check_same_thread=False)


class Watch:
    """Tells whether any process has committed to a file since the last look. A look takes microseconds.

    It reads SQLite's own counter, which every commit changes. A missing file has nothing new. A file that has replaced
    another one has changed. So has a file that cannot be read: reading it will say why.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._files: tuple[object, ...] = ()
        self._last_version = -1

    def changed(self) -> bool:
        """Look; the first look at a file that is there finds it changed."""
        try:
            os.stat(self._path)
            if self._db is None or self._files != self._stats():
                self.close()
                self._db = _reader(self._path)
            (version,) = self._db.execute("PRAGMA data_version").fetchone()
            if self._last_version < 0:
                self._files = self._stats()  # which opening it may have made
        except OSError:
            return False
        except sqlite3.DatabaseError:
            return True
        before, self._last_version = self._last_version, int(version)
        return before != self._last_version

    def close(self) -> None:
        """Let go of the file."""
        if self._db is not None:
            self._db.close()
        self._db, self._last_version = None, -1

    def _stats(self) -> tuple[object, ...]:
        """The system's status of the file and of its log. Where these have changed, the connection is made anew.

        The reason: when this process closes the file elsewhere, SQLite's locks on it are gone. Another process may then
        remove the files through which an open connection hears of commits.
        """
        return tuple(_stat(f"{os.fspath(self._path)}{suffix}") for suffix in ("", "-wal"))


def _stat(path: str) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def is_made(path: str | os.PathLike[str]) -> bool:
    """Whether there is a file to read: one that its process is just making is none yet."""
    if not os.path.isfile(path):
        return False
    try:
        with contextlib.closing(_reader(path)) as db:
            return any(db.execute("PRAGMA application_id").fetchone())
    except _BROKEN:
        return True  # reading it will say why not


def is_taken(path: str | os.PathLike[str]) -> bool:
    """Whether another process runs on this file at this moment."""
    if not os.path.isfile(path):
        return False  # and none is made
    try:
        _let_go(_lock(os.path.realpath(path)))
    except BlockingIOError:
        return True
    except PermissionError:
        return _is_locked(path)
    except OSError:
        return False  # whoever opens it next says why
    return False


def _is_locked(path: str | os.PathLike[str]) -> bool:
    """The same, for who may read the file and not write it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        take_lock(descriptor)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        _let_go(descriptor)
    return False


def bring_up(path: str | os.PathLike[str], kind: Kind) -> bool:
    """Bring an older file to the present version, unless a process runs on it. True if one does.

    Raises:
        StoreError: there is no such file, or the disk refuses.
        UsageError: it is another kind of file, or of a version that this program does not know.
    """
    if not os.path.isfile(path):
        subject = f"{kind.name} {os.fspath(path)}"
        raise StoreError(subject, expected=f"a {kind.name}", got="no such file", hint=f"another {kind.option}")
    try:
        Database(path, kind, wait_s=_MOMENT_S).close()
    except InUseError:
        return True
    return False


@contextlib.contextmanager
def beside(path: str | os.PathLike[str], kind: Kind) -> Iterator[sqlite3.Connection]:
    """One transaction in a file that another process may have. At the end of the block it is durable; on an error,
    nothing of it is.

    Raises:
        StoreError: there is no such file, or the disk refuses.
        UsageError: it is another kind of file, or of another version than this program writes.
    """
    with read_only(path, kind):
        pass  # it is what it should be
    subject = f"{kind.name} {os.fspath(path)}"
    real = os.path.realpath(path)
    db = _connect(real, f"file:{quote(real)}?mode=rw", uri=True, timeout=30.0)
    try:
        for name, value in kind.pragmas.items():
            db.execute(f"PRAGMA {name} = {value}")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("BEGIN IMMEDIATE")
        yield db
        db.execute("COMMIT")
    except _BROKEN as error:
        if _is_strange(error):
            raise StoreError(subject, expected=f"a {kind.name} as it was written", got=error) from None
        raise StoreError(
            subject, expected="a disk that takes it", got=error, hint="freeing space; nothing was kept"
        ) from None
    finally:
        db.close()


def cut_log(path: str | os.PathLike[str], kind: Kind, *, wait_s: float = 30.0) -> None:
    """Bring what was committed into the file, and cut its log off: what was erased before is then in neither.

    Raises:
        StoreError: another process reads the file for all this time, or the disk refuses.
    """
    got: object = "another process that reads it"
    real = os.path.realpath(path)
    with contextlib.closing(_connect(real, f"file:{quote(real)}?mode=rw", uri=True, timeout=wait_s)) as db:
        try:
            busy, *_ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except _BROKEN as error:
            busy, got = 1, error
    if busy:
        subject, hint = f"{kind.name} {os.fspath(path)}", "the same again"
        raise StoreError(subject, expected="a log that can be cut off", got=got, hint=hint)


def discard(path: str | os.PathLike[str], kind: Kind) -> None:
    """Remove a file and its logs, whatever they hold, unless a process runs on the file. Blocks are not overwritten.

    The file goes last: where a kill cuts this off, there is still something to discard. Behind a link it is the file
    that goes, and the link stays.

    Raises:
        InUseError: a process runs on it.
        StoreError: the disk refuses.
    """
    real, descriptor = os.path.realpath(path), None
    with contextlib.suppress(OSError):
        os.chmod(real, 0o600)
    try:
        descriptor = _lock(real)
    except BlockingIOError:
        raise _in_use(real, kind) from None
    except OSError:
        pass  # nobody here may open it, so nobody here has it
    try:
        for suffix in ("-journal", "-wal", "-shm", ""):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{real}{suffix}")
    except OSError as error:
        raise StoreError(f"{kind.name} {real}", expected="a file that can be removed", got=error.strerror) from None
    finally:
        if descriptor is not None:
            _let_go(descriptor)


def _in_use(path: str, kind: Kind) -> InUseError:
    return InUseError(
        f"{kind.name} {path}", expected="to be its only user", got="another process that runs on it",
        hint=f"stopping that one, or another {kind.option}",
    )  # fmt: skip


def lay_out(db: sqlite3.Connection, kind: Kind, version: int | None = None) -> None:
    """Run the steps that bring a file of this version, or an empty one, to the version of `kind`.

    To be called within a transaction.
    """
    for step in kind.steps[0 if version is None else version - FIRST_VERSION + 1 :]:
        for statement in step.split(";"):
            db.execute(statement)
    db.execute(f"PRAGMA application_id = {kind.application_id}")
    db.execute(f"PRAGMA user_version = {kind.version}")


def _is_strange(error: Exception) -> bool:
    """Whether the error is in the file, in its tables or its bytes, and not in the disk."""
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
        self._mutex = threading.RLock()
        self._lock = self._take(time.monotonic() + wait_s)
        with contextlib.ExitStack() as undo:
            undo.callback(_let_go, self._lock)
            self._check_header()
            with self.guard():
                self.connection = _connect(
                    self.path, self.path, check_same_thread=False, cached_statements=kind.statements
                )
                undo.callback(self.connection.close)
                self._prepare()
            undo.pop_all()

    def close(self) -> None:
        """Close the file and release the lock. Nothing is pending: every transaction was durable when it ended."""
        self.connection.close()
        _let_go(self._lock)

    def rest(self) -> None:
        """Let go of the pages that were read and written; they are read again when they are needed."""
        with self.guard():
            self.connection.execute("PRAGMA shrink_memory")

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Turn errors of SQLite into a `StoreError`, while no other thread uses the connection."""
        try:
            with self._mutex:
                yield
        except _BROKEN as error:
            if isinstance(error, sqlite3.IntegrityError | sqlite3.ProgrammingError):
                raise
            raise self._refused(error) from None

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """As `guard` and `as_written` together."""
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
        try:
            while True:
                try:
                    return _lock(self.path)
                except BlockingIOError:
                    if time.monotonic() >= until_s:
                        raise
                time.sleep(_POLL_S)
        except BlockingIOError:
            raise _in_use(self.path, self._kind) from None
        except OSError as error:
            raise StoreError(
                f"{self._kind.name} {self.path}",
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
            raise self._wrong("another file, or one of Protofleet 0.1", self._kind.remedy)
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
            raise self._wrong("another file, or one of Protofleet 0.1", self._kind.remedy)
        if pages:
            self._check_version(version)  # the header's may be older: the log is read only now
        if not pages or version < self._kind.version:
            with self.transaction():
                lay_out(self.connection, self._kind, version if pages else None)
        execute("PRAGMA journal_mode = WAL")  # only now, so that a new file's header is in the file and not in the log
        self._logged = True

    def _check_there(self, *, after: bool = False) -> None:
        try:
            is_there = os.path.samestat(os.stat(self.path), os.fstat(self._lock))
        except OSError:
            is_there = False
        if after and self._logged:
            is_there = is_there and os.path.exists(self.path + "-wal")
        if not is_there:
            raise StoreError(
                f"{self._kind.name} {self.path}",
                expected="the file that was opened",
                got="a name without it: it was deleted or replaced",
                hint=f"starting again; nothing since was kept, or another {self._kind.option}",
            )

    def _refused(self, error: Exception) -> StoreError:
        if _is_strange(error):
            subject, expected = f"{self._kind.name} {self.path}", f"a {self._kind.name} as it was written"
            return StoreError(subject, expected=expected, got=error, hint=self._kind.instead)
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
            return StoreError(
                f"{self._kind.name} {self.path}",
                expected="nobody else who writes it",
                got=error,
                hint="ending the other program that has it open; what was confirmed is safe",
            )
        return StoreError(
            f"{self._kind.name} {self.path}",
            expected="a disk that takes it",
            got=error,
            hint=f"freeing space, or another {self._kind.option}; what was confirmed is safe",
        )

    def _wrong(self, got: str, hint: str = "") -> UsageError:
        first, last = FIRST_VERSION, self._kind.version
        versions = f"version {last}" if first == last else f"versions {first} to {last}"
        named = self._kind.name if " " in self._kind.option else self._kind.option
        return UsageError(
            f"{named} {self.path}",
            expected=f"a {self._kind.name} of {versions}",
            got=got,
            hint=hint or f"another {self._kind.option}, which is then made",
        )

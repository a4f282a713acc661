"""The durable store: everything the aggregator must not forget, in one SQLite file.

What is in it: the run's id, drawn when the file is made; which bundle and fleet the run is of; each round with its
method, seed and counters; each contribution's bytes as they were received, keyed by (round, method, device); each
version of the global state. A store holds one run, so (run, round, method, device) is the key on the wire.

The order that keeps promises: `commit` makes a whole batch of contributions durable in one transaction (WAL,
synchronous=FULL: the data is on the disk when it returns); only then do receipts and MQTT acknowledgements go out. The
key is unique, so the same contribution a second time is a duplicate, never a second count. Closing a round writes its
result and the new global state in one transaction too: after kill -9 a round is either open with all it was promised,
or closed with its result.

A lock file beside the store keeps a second aggregator out. `Store` is the protocol that the server is written to.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from contract.errors import StoreError, UsageError
from contract.messages import GlobalPart
from contract.state import GlobalCollector, GlobalState
from contract.wire import decode, encode

__all__ = ["Accepted", "RoundRecord", "SqliteStore", "Store", "Tally"]

OUTCOMES = ("duplicate", "late", "rejected", "malformed")
_SCHEMA = 1
_APPLICATION_ID = 0x50464147  # "PFAG"
PAGE_BYTES = 16_384  # of a new store; see docs/decisions/030, and benchmarks/ingest.py --page-bytes
_PART_BYTES = 1 << 26

_TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE round (
    number INTEGER PRIMARY KEY, method TEXT NOT NULL, seed INTEGER NOT NULL, opened_at REAL NOT NULL,
    closed INTEGER NOT NULL DEFAULT 0, seconds REAL, classes_merged INTEGER
);
CREATE TABLE contribution (
    round INTEGER NOT NULL, method TEXT NOT NULL, device TEXT NOT NULL, received_bytes INTEGER NOT NULL,
    payload BLOB NOT NULL, UNIQUE (round, method, device)
);
CREATE TABLE refusal (round INTEGER NOT NULL, device TEXT NOT NULL, PRIMARY KEY (round, device));
CREATE TABLE tally (round INTEGER NOT NULL, outcome TEXT NOT NULL, messages INTEGER NOT NULL,
    PRIMARY KEY (round, outcome));
CREATE TABLE global (version INTEGER NOT NULL, part INTEGER NOT NULL, payload BLOB NOT NULL,
    PRIMARY KEY (version, part));
"""


@dataclass(frozen=True)
class Accepted:
    """A contribution that was found good. `payload` is what it was encoded as, `received_bytes` what arrived for it."""

    round: int
    method: str
    device: str
    payload: bytes
    received_bytes: int


Tally = Mapping[tuple[int, str], int]  # (round, outcome) → messages; round 0 where none can be named


@dataclass(frozen=True)
class RoundRecord:
    """What the store knows of one round.

    Attributes:
        opened_at: seconds since the epoch.
        seconds: how long it was open, None while it is.
        classes_merged: how many classes its result holds, None while it is open.
        uplink_bytes: payload bytes received for each committed contribution, by device.
        tally: messages by outcome.
    """

    number: int
    method: str
    seed: int
    opened_at: float
    closed: bool
    seconds: float | None
    classes_merged: int | None
    uplink_bytes: Mapping[str, int] = field(default_factory=dict)
    tally: Mapping[str, int] = field(default_factory=dict)


class Store(Protocol):
    """What the server needs of a store."""

    @property
    def run(self) -> bytes: ...
    def holds(self, round: int, method: str, device: str) -> bool: ...
    def open_round(self, number: int, method: str, seed: int, opened_at: float) -> None: ...
    def commit(self, accepted: Sequence[Accepted], tally: Tally, refusals: Sequence[tuple[int, str]] = ()) -> None: ...
    def contributions(self, round: int, method: str) -> Iterator[bytes]: ...
    def close_round(self, number: int, closed_at: float, classes_merged: int, state: GlobalState) -> None: ...
    def state(self) -> GlobalState: ...
    def rounds(self) -> list[RoundRecord]: ...
    def record(self, round: int) -> RoundRecord: ...
    def refusals(self, round: int) -> list[str]: ...
    def unassigned(self) -> dict[str, int]: ...


class SqliteStore:
    """The store in a SQLite file; a context manager.

    Args:
        path: made when it does not exist.
        bundle: sha256 (32 bytes) of the bundle that the run is of.
        fleet: the fleet's id.

    Raises:
        StoreError: when another aggregator has it, or the disk refuses.
        UsageError: when the file is a store of another bundle or fleet, or no store.
    """

    def __init__(self, path: str | os.PathLike[str], bundle: bytes, fleet: str) -> None:
        self._path = Path(path)
        self._lock = self._take_lock()
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._lock)
            with self._disk():
                self._db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
                undo.callback(self._db.close)
                self._prepare(bundle, fleet)
            undo.pop_all()
        self._run = bytes(self._meta("run") or b"")

    def __enter__(self) -> SqliteStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the file and the lock back. Nothing is pending: every write was durable when it returned."""
        self._db.close()
        os.close(self._lock)

    @property
    def run(self) -> bytes:
        """4 bytes, drawn when the store was made."""
        return self._run

    def begin_new_run(self) -> None:
        """Draw another id: for devices it is a run that they have not seen, which goes on from what is held here.

        A store that came from a backup knows less than its devices, who would wait for what they have had already.
        """
        with self._transaction():
            self._db.execute("UPDATE meta SET value = ? WHERE name = 'run'", (os.urandom(4),))
        self._run = bytes(self._meta("run") or b"")

    def holds(self, round: int, method: str, device: str) -> bool:
        """Whether this contribution was committed."""
        with self._disk():
            found = self._db.execute(
                "SELECT 1 FROM contribution WHERE round = ? AND method = ? AND device = ?", (round, method, device)
            )
            return found.fetchone() is not None

    def open_round(self, number: int, method: str, seed: int, opened_at: float) -> None:
        """Record that a round is open."""
        with self._transaction():
            self._db.execute(
                "INSERT INTO round (number, method, seed, opened_at) VALUES (?, ?, ?, ?)",
                (number, method, seed, opened_at),
            )

    def commit(self, accepted: Sequence[Accepted], tally: Tally, refusals: Sequence[tuple[int, str]] = ()) -> None:
        """Make a batch durable: contributions, counters and refused devices together, or none of it.

        Raises:
            StoreError: when the disk refuses; then nothing of the batch was written.
        """
        rows = [(a.round, a.method, a.device, a.received_bytes, a.payload) for a in accepted]
        counts = [(round, outcome, messages) for (round, outcome), messages in tally.items()]
        with self._transaction():
            self._db.executemany("INSERT INTO contribution VALUES (?, ?, ?, ?, ?)", rows)
            self._db.executemany(
                "INSERT INTO tally VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET messages = messages + excluded.messages",
                counts,
            )
            self._db.executemany("INSERT OR IGNORE INTO refusal VALUES (?, ?)", refusals)

    def contributions(self, round: int, method: str) -> Iterator[bytes]:
        """The encoded contributions of a round, ordered by device, one at a time."""
        with self._disk():
            for (payload,) in self._db.execute(
                "SELECT payload FROM contribution WHERE round = ? AND method = ? ORDER BY device", (round, method)
            ):
                yield payload

    def close_round(self, number: int, closed_at: float, classes_merged: int, state: GlobalState) -> None:
        """Record a round's result and the global state that came out of it."""
        parts = [(state.version, p.part, encode(p, "f64")) for p in state.parts(_PART_BYTES)]
        with self._transaction():
            self._db.execute(
                "UPDATE round SET closed = 1, seconds = max(0, ? - opened_at), classes_merged = ? WHERE number = ?",
                (closed_at, classes_merged, number),
            )
            # a round that changed nothing has the state, and the version, of the round before
            self._db.executemany("INSERT OR REPLACE INTO global VALUES (?, ?, ?)", parts)

    def state(self) -> GlobalState:
        """The newest global state; version 0 and empty before the first round."""
        collector, state = GlobalCollector(), None
        with self._disk():
            for (payload,) in self._db.execute(
                "SELECT payload FROM global WHERE version = (SELECT max(version) FROM global)"
            ):
                part = decode(payload)
                assert isinstance(part, GlobalPart)
                state = collector.add(part)
        return GlobalState(self._run, 0, 0) if state is None else replace(state, run=self._run)

    def rounds(self) -> list[RoundRecord]:
        """Every round that was opened, in order."""
        with self._disk():
            numbers = self._db.execute("SELECT number FROM round ORDER BY number").fetchall()
        return [self.record(number) for (number,) in numbers]

    def record(self, round: int) -> RoundRecord:
        """One round that was opened."""
        with self._disk():
            method, seed, opened_at, closed, seconds, merged = self._db.execute(
                "SELECT method, seed, opened_at, closed, seconds, classes_merged FROM round WHERE number = ?", (round,)
            ).fetchone()
            uplink = self._db.execute(
                "SELECT device, received_bytes FROM contribution WHERE round = ? AND method = ? ORDER BY device",
                (round, method),
            ).fetchall()
            tally = self._db.execute("SELECT outcome, messages FROM tally WHERE round = ?", (round,)).fetchall()
        return RoundRecord(round, method, seed, opened_at, bool(closed), seconds, merged, dict(uplink), dict(tally))

    def refusals(self, round: int) -> list[str]:
        """The devices whose contribution to `round` was rejected."""
        with self._disk():
            rows = self._db.execute("SELECT device FROM refusal WHERE round = ? ORDER BY device", (round,)).fetchall()
        return [device for (device,) in rows]

    def unassigned(self) -> dict[str, int]:
        """Messages by outcome that belong to no round of this run."""
        with self._disk():
            return dict(self._db.execute("SELECT outcome, messages FROM tally WHERE round = 0").fetchall())

    def _take_lock(self) -> int:
        lock_path = self._path.with_name(self._path.name + ".lock")
        try:
            lock = os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StoreError(f"store {self._path}", expected="a writable directory", got=error.strerror) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise StoreError(
                f"store {self._path}",
                expected="to be its only user",
                got="another aggregator that runs on it",
                hint="another --store, or stopping the other one",
            ) from None
        return lock

    def _prepare(self, bundle: bytes, fleet: str) -> None:
        self._db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("PRAGMA journal_size_limit = 67108864")
        (tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        (application,) = self._db.execute("PRAGMA application_id").fetchone()
        if tables == 0:
            with self._transaction():
                for statement in _TABLES.split(";"):
                    self._db.execute(statement)
                meta = {
                    "schema": str(_SCHEMA).encode(),
                    "run": os.urandom(4),
                    "bundle": bundle,
                    "fleet": fleet.encode(),
                }
                self._db.executemany("INSERT INTO meta VALUES (?, ?)", list(meta.items()))
                self._db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        elif application != _APPLICATION_ID or self._meta("schema") != str(_SCHEMA).encode():
            raise UsageError(
                f"--store {self._path}", expected=f"a store of schema {_SCHEMA}", got="another file", hint="a new file"
            )
        self._check_meta("bundle", bundle, lambda value: f"sha256 {value.hex()[:12]}…")
        self._check_meta("fleet", fleet.encode(), lambda value: f"fleet {value.decode()}")

    def _check_meta(self, name: str, given: bytes, show: Callable[[bytes], str]) -> None:
        known = self._meta(name) or b""
        if known != given:
            raise UsageError(
                f"--store {self._path} is of another {name}",
                expected=show(known),
                got=show(given),
                hint=f"the {name} it was made for, or another --store",
            )

    def _meta(self, name: str) -> bytes | None:
        row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return bytes(row[0]) if row else None

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.IntegrityError | sqlite3.ProgrammingError):
                raise
            raise StoreError(
                f"store {self._path}",
                expected="a disk that takes it",
                got=error,
                hint="freeing space, or another --store; what was acknowledged is safe",
            ) from None

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._disk():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

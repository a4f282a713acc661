"""What has left a device: one row for each release, on the disk before the first byte of it is sent.

A release is a contribution (of a round, or standing sums), or a new set of the figures in a status that are computed
from samples. A row says:

- what was released, when, and for which round;
- what it cost: the squared inverse of its noise multiplier, for data sets that differ in one sample more or fewer
  (`add_remove`), and for data sets that differ in one replaced sample (`replace`). It is NULL where no ε holds.

Squared inverses of Gaussian releases add up, for any releases, also if one follows from those before. `accountant.py`
computes ε from their sum. The same bytes, sent again, are the same row.

The file belongs to the device, not to one fleet. It is `STATE/ledger.sqlite`, or where the policy says. With a path
outside, a state directory that is restored from an older copy does not take the ledger back with it. What a journal
holds and the ledger does not (`record_missing`) was released without the ledger: no ε covers it, and for the rate it
counts as released now. The terms of the owner's policy at the last start are here, too. No row is ever removed: a row
takes a hundred bytes.
"""

from __future__ import annotations

import hashlib
import math
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from protofleet.contract.files.atomic_files import own_directory
from protofleet.contract.files.sqlite import Database, Kind, as_written, read_only, typed
from protofleet.edge_client.privacy.elapsed_time import Moment, passed_s

__all__ = ["BESIDE", "FILE", "KIND", "Cost", "Entry", "Ledger", "Spent", "Terms", "What", "digest_of", "read_ledger"]

FILE = "ledger.sqlite"  # of a state directory, where the policy names no other
KIND = Kind(
    "ledger",
    "ledger in the policy, or --state",
    application_id=0x5046444C,  # "PFDL"
    steps=(
        "CREATE TABLE release ("
        "id INTEGER PRIMARY KEY, at REAL NOT NULL, counted_s REAL NOT NULL, what TEXT NOT NULL, fleet TEXT NOT NULL,"
        " run BLOB NOT NULL, round INTEGER NOT NULL, method TEXT NOT NULL,"
        " statistic TEXT NOT NULL, encoding TEXT NOT NULL, min_samples INTEGER NOT NULL,"
        " payload_bytes INTEGER NOT NULL, digest BLOB NOT NULL UNIQUE, add_remove REAL, replace REAL);"
        "CREATE INDEX release_of ON release (fleet, run, round, method);"
        "CREATE TABLE clock (id INTEGER PRIMARY KEY CHECK (id = 1), counted_s REAL NOT NULL, boot TEXT NOT NULL,"
        " uptime_s REAL NOT NULL, wall_s REAL NOT NULL);"
        "CREATE TABLE terms (id INTEGER PRIMARY KEY CHECK (id = 1), epsilon REAL, delta REAL,"
        " neighbours TEXT NOT NULL)",
        "CREATE TABLE policy (id INTEGER PRIMARY KEY CHECK (id = 1), terms TEXT NOT NULL)",
    ),
    pragmas={"cache_size": -256},
)

What = Literal["round", "blinded", "standing", "sat-out", "figures", "unknown", "shown", "answer"]
BESIDE: tuple[What, ...] = ("shown", "answer")  # that went to nobody of the fleet
_Key = tuple[bytes, int, str]
_COUNTED: tuple[What, ...] = ("round", "blinded", "standing", "unknown")  # that a rate is of
_KINDS = (str, str, bytes, int, str, str, str, int, int, bytes)  # of an entry before its costs
_COLUMNS = (
    "what, fleet, run, round, method, statistic, encoding, min_samples, payload_bytes, digest, add_remove, replace"
)


@dataclass(frozen=True)
class Cost:
    """Of one release: the squared inverse of its noise multiplier for each relation; None where no ε holds.

    A release that says nothing of the samples costs 0.
    """

    add_remove: float | None = None
    replace: float | None = None


@dataclass(frozen=True)
class Entry:
    """One release.

    Attributes:
        what: `shown` are photos that the device's own page showed to a browser within an hour; they went to nobody of
            the fleet, so no ε is stated of them; `answer` says the same of answers that were published for Home
            Assistant on one day;
            `blinded` is a share of a round's sums, and the sealed seed of the other one;
            `sat-out` says nothing of the samples; `unknown` is one that only the journal knows of.
        fleet, run, round, method: what it was for; empty and 0 for figures.
        statistic: of the contribution; of figures, which they are.
        encoding: as announced; min_samples: as it was held to.
        digest: SHA-256 of what was sent; of a blinded release, of the sums that were shared, since each share of them
            is another one.
        at: seconds since the epoch, as the wall clock had it; 0 before it is in the ledger.
    """

    what: What
    fleet: str
    run: bytes
    round: int
    method: str
    statistic: str
    encoding: str
    min_samples: int
    payload_bytes: int
    digest: bytes
    cost: Cost
    at: float = 0.0


@dataclass(frozen=True)
class Terms:
    """What the ε was stated on at the last start: its budget and δ (None for none), and for which neighbours."""

    epsilon: float | None = None
    delta: float | None = None
    neighbours: str = "add-remove"


@dataclass(frozen=True)
class Spent:
    """What all releases so far come to: their number, the sums of their costs, and how many have no ε."""

    releases: int
    add_remove: float
    replace: float
    bare_add_remove: int
    bare_replace: int

    @property
    def is_by_class(self) -> bool:
        """Whether an ε for one replaced sample holds only for a sample of the same class.

        Then the number of samples of each class went out without noise. So no ε holds for one sample more or fewer.
        """
        return self.bare_add_remove > self.bare_replace

    def of(self, neighbours: str) -> tuple[float, int]:
        """The sum of costs for a relation, and how many releases are not in it because no ε holds for them."""
        if neighbours == "replace":
            return self.replace, self.bare_replace
        return self.add_remove, self.bare_add_remove


def digest_of(*parts: bytes) -> bytes:
    """SHA-256 of these, one after the other."""
    return hashlib.sha256(b"".join(parts)).digest()


class Ledger:
    """The open ledger of the one process that runs on it. Use as a context manager, or call `close`.

    Args:
        path: made when it is not there.

    Raises:
        StoreError: the disk refuses, or another process has it.
        UsageError: it is another kind of file, or of a version that this program does not know.
    """

    def __init__(self, path: Path) -> None:
        own_directory(path.parent, "another --state, or ledger in the policy")
        self._file = Database(path, KIND)
        self._db = self._file.connection

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the file. What was recorded is safe whether this is called or not."""
        self._file.close()

    def record(self, entry: Entry, now: Moment) -> bool:
        """Make a release durable. It may be sent on return.

        Returns:
            False where the same bytes are in the ledger already.

        Raises:
            StoreError: the disk refused; then nothing may be sent.
        """
        with self._file.reading(), self._file.transaction() as db:
            return _insert(db, entry, now.wall_s, self._mark(db, now))

    def record_more(self, entry: Entry, now: Moment) -> None:
        """As `record`; where a row of this digest is there, it gets this statistic, and keeps its time.

        Raises:
            StoreError: as `record`.
        """
        with self._file.reading(), self._file.transaction() as db:
            if not _insert(db, entry, now.wall_s, self._mark(db, now)):
                db.execute("UPDATE release SET statistic = ? WHERE digest = ?", (entry.statistic, entry.digest))

    def put_terms(self, terms: Terms) -> None:
        """Remember the terms of this start, for programs that read the ledger.

        Raises:
            StoreError: the disk refused.
        """
        with self._file.reading():
            known = _terms(self._db)
        if known != terms:
            row = (terms.epsilon, terms.delta, terms.neighbours)
            with self._file.transaction() as db:
                db.execute("INSERT OR REPLACE INTO terms VALUES (1, ?, ?, ?)", row)

    def policy(self) -> str | None:
        """The terms of the owner's policy at the last start, as `put_policy` had them; None where none are known."""
        with self._file.reading():
            row = self._db.execute("SELECT terms FROM policy").fetchone()
            return None if row is None else str(typed(row, str)[0])

    def put_policy(self, terms: str) -> None:
        """Remember the terms of the owner's policy.

        Raises:
            StoreError: the disk refused.
        """
        if self.policy() != terms:
            with self._file.transaction() as db:
                db.execute("INSERT OR REPLACE INTO policy VALUES (1, ?)", (terms,))

    def noised(self) -> dict[str, bool]:
        """The methods of which something was released, and whether noise was added: whether any has a cost above 0.

        A release that only a journal knew has no cost here.
        """
        with self._file.reading():
            rows = self._db.execute(
                "SELECT method, max(coalesce(add_remove, 0) > 0 OR coalesce(replace, 0) > 0) FROM release"
                " WHERE what != 'sat-out' AND method != '' GROUP BY method"
            ).fetchall()
            return {name: bool(noised) for name, noised in (typed(row, str, int) for row in rows)}

    def record_missing(self, fleet: str, keys: Iterable[_Key], now: Moment) -> int:
        """Record what a journal holds and the ledger does not, as releases of this moment without an ε.

        Args:
            keys: one without a method is that of figures.

        Returns:
            how many contributions were recorded.

        Raises:
            StoreError: the disk refused.
        """
        count = 0
        with self._file.reading(), self._file.transaction() as db:
            for run, number, method in keys:
                query = "SELECT 1 FROM release WHERE fleet = ? AND run = ? AND round = ? AND method = ?"
                if db.execute(query, (fleet, run, number, method)).fetchone() is None:
                    digest = digest_of(b"unknown", fleet.encode(), run, number.to_bytes(8, "big"), method.encode())
                    what: What = "unknown" if method else "figures"
                    entry = Entry(what, fleet, run, number, method, "", "", 1, 0, digest, Cost())
                    count += _insert(db, entry, now.wall_s, self._mark(db, now)) and what == "unknown"
        return count

    def newest(self, fleet: str, run: bytes, round: int, method: str) -> Entry | None:
        """The newest release for this round of a fleet; None where there is none."""
        with self._file.reading():
            row = self._db.execute(
                f"SELECT {_COLUMNS}, at FROM release WHERE fleet = ? AND run = ? AND round = ? AND method = ?"
                " ORDER BY id DESC LIMIT 1",
                (fleet, run, round, method),
            ).fetchone()
            return None if row is None else _entry(row)

    def has_release(self, fleet: str, run: bytes, round: int, method: str) -> bool:
        """Whether anything of the samples was released for this round of a fleet, or was about to be."""
        with self._file.guard():
            cursor = self._db.execute(
                "SELECT 1 FROM release WHERE fleet = ? AND run = ? AND round = ? AND method = ? AND what != 'sat-out'",
                (fleet, run, round, method),
            )
            return cursor.fetchone() is not None

    def spent(self) -> Spent:
        """What all releases so far come to."""
        with self._file.reading():
            return _spent(self._db)

    def free_in_s(self, most: int, window_s: float, now: Moment) -> float:
        """Seconds until another contribution may be made where a window holds so many; 0 where it may be now."""
        with self._file.reading():
            counted_s, _ = self._counted(now)
            names = ", ".join("?" for _ in _COUNTED)
            row = self._db.execute(
                f"SELECT counted_s FROM release WHERE what IN ({names}) ORDER BY counted_s DESC LIMIT 1 OFFSET ?",
                (*_COUNTED, most - 1),
            ).fetchone()
            return 0.0 if row is None else max(0.0, _finite(row[0]) + window_s - counted_s)

    def _mark(self, db: sqlite3.Connection, now: Moment) -> float:
        """Remember what the clocks say at a release; seconds that have passed since the ledger was made."""
        counted_s, latest_s = self._counted(now)
        mark = (counted_s, now.boot, now.uptime_s, max(now.wall_s, latest_s))
        db.execute("INSERT OR REPLACE INTO clock VALUES (1, ?, ?, ?, ?)", mark)
        return counted_s

    def _counted(self, now: Moment) -> tuple[float, float]:
        """Seconds that have passed since the ledger was made, and the latest wall clock that was seen."""
        row = self._db.execute("SELECT counted_s, boot, uptime_s, wall_s FROM clock").fetchone()
        if row is None:
            return 0.0, now.wall_s
        (boot,), (counted_s, uptime_s, latest_s) = typed(row[1:2], str), map(_finite, (row[0], *row[2:]))
        return counted_s + passed_s(Moment(boot, uptime_s, latest_s), now), latest_s


def read_ledger(path: Path) -> tuple[list[Entry], Spent, Terms]:
    """All releases, oldest first, what they come to, and on which terms; nothing is changed, and the device may be
    running.

    Raises:
        StoreError: there is no such file, or it cannot be read.
        UsageError: it is another kind of file.
    """
    with read_only(path, KIND, older=True) as db, as_written(path, KIND):
        rows = db.execute(f"SELECT {_COLUMNS}, at FROM release ORDER BY id").fetchall()
        return [_entry(row) for row in rows], _spent(db), _terms(db)


def _insert(db: sqlite3.Connection, entry: Entry, at: float, counted_s: float) -> bool:
    e = entry
    row = (e.what, e.fleet, e.run, e.round, e.method, e.statistic, e.encoding, e.min_samples, e.payload_bytes, e.digest)
    done = db.execute(
        f"INSERT OR IGNORE INTO release (at, counted_s, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (at, counted_s, *row, e.cost.add_remove, e.cost.replace),
    )
    return done.rowcount == 1


def _terms(db: sqlite3.Connection) -> Terms:
    row = db.execute("SELECT epsilon, delta, neighbours FROM terms").fetchone()
    if row is None:
        return Terms()
    epsilon, delta = (None if value is None else _finite(value) for value in row[:2])
    return Terms(epsilon, delta, *typed(row[2:], str))


def _entry(row: tuple[Any, ...]) -> Entry:
    fields, costs, at = typed(row[:10], *_KINDS), row[10:12], row[12]
    return Entry(*fields, Cost(*(None if cost is None else _finite(cost) for cost in costs)), _finite(at))  # type: ignore[call-arg]


def _finite(value: object) -> float:
    """A number of a column of such.

    Raises:
        TypeError, ValueError: it is none, or below zero.
    """
    (number,) = typed((value,), float)
    if not 0.0 <= number < math.inf:
        raise ValueError(f"{number} where a finite number belongs")
    return float(number)


def _spent(db: sqlite3.Connection) -> Spent:
    """What the costs come to.

    Raises:
        ValueError: one is none that was ever written: SQLite counts words as 0, and the sum would be too small.
    """
    (wrong,) = db.execute(
        "SELECT count(*) FROM release WHERE typeof(add_remove) NOT IN ('real', 'null') OR add_remove < 0"
        " OR typeof(replace) NOT IN ('real', 'null') OR replace < 0"
    ).fetchone()
    if wrong:
        raise ValueError(f"{wrong} costs that are none")
    row = db.execute(
        "SELECT count(*), total(add_remove), total(replace), count(*) - count(add_remove), count(*) - count(replace)"
        f" FROM release WHERE what NOT IN ({', '.join('?' * len(BESIDE))})",
        BESIDE,
    ).fetchone()
    return Spent(*row)

"""The helper's own memory, in one SQLite file: which shares were opened, in which sets, and which sums were answered.

`open` is the only way to open a set. One transaction writes the set, its shares, the blocks that follow from it, and
the sum. It is durable when `open` returns, and only then may the sum be told. For the same set again, the helper gives
the very same sum.

Each share is opened once, and no set is opened that would show sums of fewer than k devices
(`contract/privacy/openable_sets.py`), whatever else is asked for.

The sums of the newest sets are kept, so that a lost answer can be given again. Everything else stays for ever.

The file belongs to one fleet and one key: another key has other shares. The witness beside the key (`witness.py`) says
whether the file holds everything that was opened.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protofleet.aggregator.helper.witness import Witness
from protofleet.contract.errors import StoreError, UsageError, WireError
from protofleet.contract.files.sqlite import Database, Kind, typed
from protofleet.contract.privacy.openable_sets import breach, refined

__all__ = ["KEPT_SUMS", "KIND", "Ledger", "Share"]

KEPT_SUMS = 16

_VERSION_2 = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE opened (
    id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, run BLOB NOT NULL, round INTEGER NOT NULL,
    method TEXT NOT NULL, devices INTEGER NOT NULL, least INTEGER NOT NULL, opened_at REAL NOT NULL, sum BLOB
);
CREATE TABLE share (
    run BLOB NOT NULL, round INTEGER NOT NULL, method TEXT NOT NULL, device TEXT NOT NULL, digest BLOB NOT NULL UNIQUE,
    opened INTEGER NOT NULL, PRIMARY KEY (run, round, method, device)
) WITHOUT ROWID;
CREATE TABLE block (device TEXT PRIMARY KEY, block INTEGER NOT NULL) WITHOUT ROWID
"""
KIND = Kind(
    "ledger",
    "--store",
    application_id=0x5046484C,  # "PFHL"
    steps=(_VERSION_2,),
    pragmas={"secure_delete": 1},
    writer="a helper",
)

Words = NDArray[np.uint64]


@dataclass(frozen=True)
class Share:
    """The identity of a device's share.

    Attributes:
        digest: SHA-256 of its words, 32 bytes.
    """

    run: bytes
    round: int
    method: str
    device: str
    digest: bytes


class Ledger:
    """An open ledger; a context manager.

    Args:
        path: made when it is not there.
        fleet: whose shares are opened.
        key: the helper's X25519 public key, 32 bytes.
        witness: beside its private one.

    Raises:
        StoreError: another helper has it, or the disk refuses.
        UsageError: it is of another fleet or key, no ledger, or less than was opened with this key.
    """

    def __init__(self, path: str | os.PathLike[str], *, fleet: str, key: bytes, witness: Witness) -> None:
        self._file, self._witness = Database(path, KIND), witness
        self._db, self._disk, self._transaction = self._file.connection, self._file.reading, self._file.transaction
        try:
            self._id = self._claim({"fleet": fleet.encode(), "key": key})
            self._witness.write(self._id, self._opened())  # of one that was killed before it could
            with self._disk():
                rows = [typed(row, str, int) for row in self._db.execute("SELECT device, block FROM block")]
        except BaseException:
            self._file.close()
            raise
        self._blocks = dict(rows)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Every opening was durable when it returned."""
        self._file.close()

    @property
    def blocks(self) -> Mapping[str, int]:
        """The block of each device that is in an opened set."""
        return self._blocks

    def is_open(self, digest: bytes) -> bool:
        """Whether this exact set was opened."""
        with self._disk():
            return self._db.execute("SELECT 1 FROM opened WHERE digest = ?", (digest,)).fetchone() is not None

    def sum(self, digest: bytes) -> Words | None:
        """The sum that was answered for a set; None when it is no longer kept, or the set was not opened."""
        with self._disk():
            row = self._db.execute("SELECT sum FROM opened WHERE digest = ?", (digest,)).fetchone()
            return None if row is None or row[0] is None else np.frombuffer(bytes(typed(row, bytes)[0]), "<u8")

    def why_used(self, share: Share) -> str:
        """Why a share may not be opened; empty where it may."""
        key = (share.run, share.round, share.method, share.device)
        with self._disk():
            row = self._db.execute(
                "SELECT digest FROM share WHERE (run = ? AND round = ? AND method = ? AND device = ?) OR digest = ?",
                (*key, share.digest),
            ).fetchone()
            (digest,) = (b"",) if row is None else typed(row, bytes)
        if row is None:
            return ""
        if digest == share.digest:
            return "this share was opened before, in another set"
        return f"another share of it was opened for round {share.round} of this run"

    def open(self, digest: bytes, shares: list[Share], total: Words, *, least: int, at: float) -> None:
        """Open a set: durable on return.

        Args:
            digest: of the set.
            shares: of one run, round and method, one for each device.
            total: (W,) the sum that is answered.
            least: k.
            at: seconds since the epoch, for the record.

        Raises:
            StoreError: the disk refuses, or the file was changed by another program; nothing was opened.
            UsageError: another ledger opens with the key meanwhile; nothing was opened.
            WireError: the set may not be opened, whatever the sender; nothing was opened.
        """
        self._witness.check(self._id, self._opened(), self._title)
        devices = [share.device for share in shares]
        wrong = breach(self._blocks, devices, least)
        used = next((reason for share in shares if (reason := self.why_used(share))), "")
        doubled = len({share.digest for share in shares}) < len(shares) or len(set(devices)) < len(devices)
        if wrong or used or doubled or len({(s.run, s.round, s.method) for s in shares}) != 1:
            reason = used or next(iter(wrong.values()), "") or "shares of one round, each once"
            raise WireError("a set", expected="one that may be opened", got=reason)
        blocks = refined(self._blocks, devices)
        try:
            self._record(digest, shares, total, blocks, least=least, at=at)
        except sqlite3.IntegrityError as error:  # an index that says otherwise than the rows, which were asked above
            raise StoreError(self._title, expected="a ledger as written", got=error, hint="another --store") from None
        self._blocks = blocks
        self._witness.write(self._id, self._opened())

    def _record(
        self, digest: bytes, shares: list[Share], total: Words, blocks: Mapping[str, int], *, least: int, at: float
    ) -> None:
        first = shares[0]
        with self._transaction() as db:
            row = (digest, first.run, first.round, first.method, len(shares), least, at, total.astype("<u8").tobytes())
            cursor = db.execute(
                "INSERT INTO opened (digest, run, round, method, devices, least, opened_at, sum)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                row,
            )
            number = cursor.lastrowid or 0
            rows = [(s.run, s.round, s.method, s.device, s.digest, number) for s in shares]
            db.executemany("INSERT INTO share VALUES (?, ?, ?, ?, ?, ?)", rows)
            db.executemany("INSERT OR REPLACE INTO block VALUES (?, ?)", list(blocks.items()))
            db.execute("UPDATE opened SET sum = NULL WHERE id <= ? AND sum IS NOT NULL", (number - KEPT_SUMS,))

    @property
    def _title(self) -> str:
        return f"--store {self._file.path}"

    def _opened(self) -> int:
        """How many sets were ever opened."""
        with self._disk():
            return int(self._db.execute("SELECT count(*) FROM opened").fetchone()[0])

    def _claim(self, owner: Mapping[str, bytes]) -> bytes:
        """Its id, 16 bytes; drawn where the file is new."""
        with self._disk():
            rows = self._db.execute("SELECT name, value FROM meta").fetchall()
            claimed = dict(typed(row, str, bytes) for row in rows)
        what = self._title
        if not claimed:
            self._witness.check(b"", 0, what)
            drawn = os.urandom(16)
            with self._transaction() as db:
                db.executemany("INSERT INTO meta VALUES (?, ?)", [*owner.items(), ("id", drawn)])
            return drawn
        if any(claimed.get(name) != owner[name] for name in owner):
            name = next(name for name in owner if claimed.get(name) != owner[name])
            raise UsageError(
                what, expected=f"the ledger of this {name}", got="another's",
                hint=f"the --{name} it was made with, or another --store",
            )  # fmt: skip
        ledger_id = claimed.get("id", b"")
        self._witness.check(ledger_id, self._opened(), what)
        return ledger_id

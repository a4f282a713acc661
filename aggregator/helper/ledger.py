"""The helper's own memory, in one SQLite file: which shares were opened, in which sets, and what was answered.

`open` is the one way in which anything is opened: in one transaction the set, its shares, the blocks that follow from
it, and the sum. It is durable when it returns, and only then may the sum be told; asked for the same set again, the
helper tells the very same. Whatever is asked for otherwise, each share is opened once, and no set that is finer than
sums of k devices (`contract/batches.py`). The sums of the newest sets are kept, so that an answer which was lost can be
given again; the rest stays for ever.

The file is of one fleet and of one key: another key's shares are others. What lies beside the key (`witness.py`) says
whether it is the whole of what was opened.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aggregator.helper.witness import Witness
from contract.batches import breach, refined
from contract.errors import StoreError, UsageError, WireError
from contract.sqlite import Database, Kind, typed

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
    """What a device's share is known by.

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
        """Give the file back; every opening was durable when it returned."""
        self._file.close()

    @property
    def blocks(self) -> Mapping[str, int]:
        """The block of each device that is in a set that was opened."""
        return self._blocks

    def is_open(self, digest: bytes) -> bool:
        """Whether this very set was opened."""
        with self._disk():
            return self._db.execute("SELECT 1 FROM opened WHERE digest = ?", (digest,)).fetchone() is not None

    def sum(self, digest: bytes) -> Words | None:
        """What was told of a set; None where that is kept no longer, or it was not opened."""
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
            (found,) = (b"",) if row is None else typed(row, bytes)
        if row is None:
            return ""
        if found == share.digest:
            return "this share was opened before, in another set"
        return f"another share of it was opened for round {share.round} of this run"

    def open(self, digest: bytes, shares: list[Share], total: Words, *, least: int, at: float) -> None:
        """Open a set: durable on return.

        Args:
            digest: of the set.
            shares: of one run, round and method, one for each device.
            total: (W,) what is told of them.
            least: k.
            at: seconds since the epoch, for the record.

        Raises:
            StoreError: the disk refuses, or somebody has changed the file; nothing was opened.
            UsageError: another ledger opens with the key meanwhile; nothing was opened.
            WireError: it may not be opened, whoever asks; nothing was opened.
        """
        self._witness.check(self._id, self._opened(), self._what)
        devices = [share.device for share in shares]
        wrong = breach(self._blocks, devices, least)
        used = next((why for share in shares if (why := self.why_used(share))), "")
        doubled = len({share.digest for share in shares}) < len(shares) or len(set(devices)) < len(devices)
        if wrong or used or doubled or len({(s.run, s.round, s.method) for s in shares}) != 1:
            why = used or next(iter(wrong.values()), "") or "shares of one round, each once"
            raise WireError("a set", expected="one that may be opened", got=why)
        blocks = refined(self._blocks, devices)
        try:
            self._record(digest, shares, total, blocks, least=least, at=at)
        except sqlite3.IntegrityError as error:  # an index that says otherwise than the rows, which were asked above
            raise StoreError(self._what, expected="a ledger as written", got=error, hint="another --store") from None
        self._blocks = blocks
        self._witness.write(self._id, self._opened())

    def _record(
        self, digest: bytes, shares: list[Share], total: Words, blocks: Mapping[str, int], *, least: int, at: float
    ) -> None:
        first = shares[0]
        with self._transaction() as db:
            row = (digest, first.run, first.round, first.method, len(shares), least, at, total.astype("<u8").tobytes())
            found = db.execute(
                "INSERT INTO opened (digest, run, round, method, devices, least, opened_at, sum)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                row,
            )
            number = found.lastrowid or 0
            rows = [(s.run, s.round, s.method, s.device, s.digest, number) for s in shares]
            db.executemany("INSERT INTO share VALUES (?, ?, ?, ?, ?, ?)", rows)
            db.executemany("INSERT OR REPLACE INTO block VALUES (?, ?)", list(blocks.items()))
            db.execute("UPDATE opened SET sum = NULL WHERE id <= ? AND sum IS NOT NULL", (number - KEPT_SUMS,))

    @property
    def _what(self) -> str:
        return f"--store {self._file.path}"

    def _opened(self) -> int:
        """How many sets ever."""
        with self._disk():
            return int(self._db.execute("SELECT count(*) FROM opened").fetchone()[0])

    def _claim(self, owner: Mapping[str, bytes]) -> bytes:
        """Its id, 16 bytes; drawn where the file is new."""
        with self._disk():
            rows = self._db.execute("SELECT name, value FROM meta").fetchall()
            found = dict(typed(row, str, bytes) for row in rows)
        what = self._what
        if not found:
            self._witness.check(b"", 0, what)
            drawn = os.urandom(16)
            with self._transaction() as db:
                db.executemany("INSERT INTO meta VALUES (?, ?)", [*owner.items(), ("id", drawn)])
            return drawn
        if any(found.get(name) != owner[name] for name in owner):
            name = next(name for name in owner if found.get(name) != owner[name])
            raise UsageError(
                what, expected=f"the ledger of this {name}", got="another's",
                hint=f"the --{name} it was made with, or another --store",
            )  # fmt: skip
        held = found.get("id", b"")
        self._witness.check(held, self._opened(), what)
        return held

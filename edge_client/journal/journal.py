"""What the device must not forget, in one SQLite file: weights, rounds done, contributions and what became of them.

A round ends in one transaction. The new weights, the mark that the round is done, and the encoded contribution are
written together or not at all. So after a power cut at any moment, one of these holds:

- Nothing of the round happened. It is repeated from the old weights, with the same result.
- All of the round happened. The very same bytes are sent again.

A contribution stays pending until a receipt ends it: committed, duplicate, late or rejected (docs/wire.md).

The journal also keeps what the device answers with, also without a broker: its own class means under these weights, the
newest whole global state, and the path of its bundle. `read_kept` reads them while a client runs.

Payloads that were sent are kept, newest first, up to `KEEP_BYTES`. So a person can inspect what left the device
(`protofleet inspect`), and a test can sum it again. `retention.py` says what else is forgotten with the years.

The state directory belongs to one process, one device of one fleet, and one bundle. It has mode 0700, the journal 0600,
because the journal holds the device's secret. `contract/files/sqlite.py` opens the file: a transaction that returned
survives a power cut.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from protofleet.contract.errors import StoreError, WireError
from protofleet.contract.files.atomic_files import own_directory
from protofleet.contract.files.sqlite import Database, Kind, read_only, typed
from protofleet.contract.privacy.secret_noise import key_of
from protofleet.contract.sums.statistics import ClassMeans
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.global_state import GlobalCollector, GlobalState
from protofleet.contract.wire.messages import MAX_ROUND, GlobalPart, Receipt
from protofleet.edge_client.device.calibration import Known
from protofleet.edge_client.device.left_out import LeftOut, packed_state, unpacked_state
from protofleet.edge_client.journal.issued_marks import IssuedMarks
from protofleet.edge_client.journal.retention import drop_old_rounds, dropped
from protofleet.edge_client.journal.standing_journal import StandingMarks
from protofleet.edge_client.training.local_samples import OwnMeans

__all__ = [
    "FIGURES",
    "FILE",
    "FINAL",
    "KEEP_BYTES",
    "Journal",
    "Kept",
    "Key",
    "Pending",
    "Report",
    "read_contributed",
    "read_kept",
    "read_terms",
]

FILE = "journal.sqlite"  # of a state directory
FINAL = ("committed", "duplicate", "late", "rejected")
KEEP_BYTES = 16 << 20
_INSTANCES_KEPT = 64
_PART_BYTES = 1 << 26
_VERSION_2 = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value);
CREATE TABLE instances (boot INTEGER PRIMARY KEY, instance BLOB NOT NULL);
CREATE TABLE weights (id INTEGER PRIMARY KEY CHECK (id = 1), safetensors BLOB NOT NULL);
CREATE TABLE means (id INTEGER PRIMARY KEY CHECK (id = 1), safetensors BLOB NOT NULL);
CREATE TABLE global (part INTEGER PRIMARY KEY, payload BLOB NOT NULL);
CREATE TABLE rounds (
    run BLOB NOT NULL, round INTEGER NOT NULL, method TEXT NOT NULL, metrics TEXT NOT NULL, reported INTEGER NOT NULL,
    PRIMARY KEY (run, round, method));
CREATE TABLE contributions (
    serial INTEGER PRIMARY KEY, run BLOB NOT NULL, round INTEGER NOT NULL, method TEXT NOT NULL,
    payload BLOB, payload_bytes INTEGER NOT NULL, limit_bytes INTEGER NOT NULL,
    outcome TEXT, reason TEXT, uplink_bytes INTEGER,
    UNIQUE (run, round, method))
"""
_VERSION_3 = """
CREATE TABLE standing (run BLOB PRIMARY KEY, generation INTEGER NOT NULL, samples BLOB) WITHOUT ROWID
"""
KIND = Kind(
    "journal",
    "--state",
    application_id=0x5046444A,  # "PFDJ"
    steps=(_VERSION_2, _VERSION_3),
    pragmas={"cache_size": -1024},  # 1 MiB: the page cache is memory that training needs
    statements=0,  # one that is kept has a copy of the last payload: of FFC's sums at D = 2,048, 17 MB
)

Key = tuple[bytes, int, str]
"""(run, round, method): what a contribution is for; the device is the directory's."""

FIGURES: Key = (b"", 0, "")  # in the place of what a contribution is for, of figures in a status


@dataclass(frozen=True)
class Pending:
    """A contribution that has no receipt yet.

    Attributes:
        payload: the encoded message.
        limit_bytes: the largest message that the aggregator said it takes.
    """

    key: Key
    payload: bytes
    limit_bytes: int


@dataclass(frozen=True)
class Report:
    """A round that is done and not yet written to the history, with what was measured in it."""

    key: Key
    metrics: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Kept:
    """What a device answers with.

    Attributes:
        bundle: sha256 of its bundle, 32 bytes.
        bundle_path: where the bundle was when the device last started; None for a device that never started.
        weights: as `Journal.weights`.
        means: of its own classes under these weights; None where they were not needed.
        state: the newest global state; None before there is any.
        rounds: how many it has done.
        left_out: whether the fleet left its last round out, and what became of that.
        own: the own or the joint head, where the device answers by one of them (`device/left_out.py`); else None.
        calibration: what probabilities follow from.
    """

    bundle: bytes
    bundle_path: Path | None
    weights: dict[str, NDArray[np.float32]]
    means: OwnMeans | None
    state: GlobalState | None
    rounds: int
    left_out: LeftOut | None = None
    own: GlobalState | None = None
    calibration: Known = field(default_factory=Known)


class Journal:
    """The open state directory. Use as a context manager, or call `close`.

    Args:
        directory: made when it is not there.
        fleet, device: whose state this is.
        bundle: sha256 of the bundle, 32 bytes.
        extends: sha256 of bundles whose state this one may take over: the bundles that it extends, and bundles that a
            roll-out had put in its place (`rollout_decisions.py`).
        bundle_path: where the bundle lies, for programs that ask this directory for answers; None keeps the known path.

    Raises:
        StoreError: the directory cannot be used: read-only, full, in use by another process, or of another
            device or bundle.
    """

    def __init__(
        self,
        directory: Path,
        *,
        fleet: str,
        device: str,
        bundle: bytes,
        extends: Collection[bytes] = (),
        bundle_path: Path | None = None,
    ) -> None:
        self.directory = directory
        self._path = directory / FILE
        own_directory(directory, "another --state")
        self._file = Database(self._path, KIND)
        self._db, self._transaction = self._file.connection, self._file.transaction
        self.standing, self.issued = StandingMarks(self._file, self._guard), IssuedMarks(self._file)
        try:
            self._claim({"fleet": fleet, "device": device, "bundle": bundle.hex()}, extends, bundle_path)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the directory. What was committed is safe whether this is called or not."""
        self._file.close()

    def rest(self) -> None:
        """Let go of the memory that reading and writing took, up to 1 MiB, until they are needed again."""
        self._file.rest()

    # ── this process ────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, instance: bytes) -> int:
        """Count this start of the device and remember its instance; returns the boot number, 1 for the first."""
        with _as_written(self._path), self._transaction() as db:
            boot = int(db.execute("SELECT coalesce(max(boot), 0) + 1 FROM instances").fetchone()[0])
            if not 0 < boot <= MAX_ROUND:
                raise ValueError(f"boot number {boot}")
            db.execute("INSERT INTO instances VALUES (?, ?)", (boot, instance))
            db.execute("DELETE FROM instances WHERE boot <= ?", (boot - _INSTANCES_KEPT,))
        return boot

    def is_own_instance(self, instance: bytes) -> bool:
        """Whether `instance` was a process of this state directory."""
        return self._row("SELECT 1 FROM instances WHERE instance = ?", instance) is not None

    # ── rounds ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """The weights after the last round that was done; empty before the first."""
        with self._guard():
            return _tensors(self._db, "weights")

    def commit_round(
        self,
        key: Key,
        *,
        weights: Mapping[str, NDArray[np.float32]],
        means: OwnMeans | None = None,
        payload: bytes | None,
        limit_bytes: int,
        metrics: Mapping[str, Any],
    ) -> None:
        """Round `key` is done: write all of it at once.

        That is its weights, the device's own class means under them, its contribution (None when it sends nothing) and
        its metrics.

        Raises:
            StoreError: nothing was written; or the round was done before, which is never overwritten.
        """
        if self.is_done(key):
            raise StoreError(f"round {key[1]} of {key[2]}", expected="a round that is not done", got="one that is")
        with self._transaction() as db:
            if weights:
                blob = save({name: np.ascontiguousarray(value) for name, value in weights.items()})
                db.execute("INSERT OR REPLACE INTO weights VALUES (1, ?)", (blob,))
            if means is not None:
                db.execute("INSERT OR REPLACE INTO means VALUES (1, ?)", (_packed_means(means),))
            db.execute("INSERT INTO rounds VALUES (?, ?, ?, ?, 0)", (*key, json.dumps(metrics)))
            if payload is not None:
                db.execute(
                    "INSERT INTO contributions (run, round, method, payload, payload_bytes, limit_bytes)"
                    " VALUES (?, ?, ?, ?, ?, ?)",
                    (*key, payload, len(payload), limit_bytes),
                )
            drop_old_rounds(db)

    def is_done(self, key: Key) -> bool:
        """Whether this round was committed."""
        return self._row("SELECT 1 FROM rounds WHERE run = ? AND round = ? AND method = ?", *key) is not None

    def secret(self) -> bytes:
        """32 random bytes of this state directory alone; the same on every start."""
        with _as_written(self._path), self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO meta VALUES ('secret', ?)", (os.urandom(32),))
            (secret,) = typed(db.execute("SELECT value FROM meta WHERE name = 'secret'").fetchone(), bytes)
            if len(secret) != 32:
                raise ValueError(f"a secret of {len(secret)} bytes")
            return bytes(secret)

    def policy(self) -> str | None:
        """The terms of the owner's policy at the last start, as `put_policy` had them; None where none are known."""
        with self._guard():
            return _terms(self._db)

    def put_policy(self, terms: str) -> None:
        """Remember the terms of the owner's policy, in case the ledger is lost.

        Raises:
            StoreError: the disk refused.
        """
        if self.policy() != terms:
            with self._transaction() as db:
                db.execute("INSERT OR REPLACE INTO meta VALUES ('policy', ?)", (terms,))

    def draw_key(self) -> bytes:
        """32 bytes that follow from `secret`, for `edge_client/data/draws.py` alone; the same on every start."""
        return key_of(self.secret(), b"which photos are held out")

    def took_part(self, run: bytes) -> bool:
        """Whether any round of this run was committed."""
        return self._row("SELECT 1 FROM rounds WHERE run = ?", run) is not None

    def unreported(self) -> list[Report]:
        """Rounds that the history does not have yet, oldest first."""
        with self._guard():
            rows = self._db.execute("SELECT run, round, method, metrics FROM rounds WHERE NOT reported ORDER BY rowid")
            reports = (typed(row, bytes, int, str, str) for row in rows)
            return [
                Report((run, number, method), dict(json.loads(metrics))) for run, number, method, metrics in reports
            ]

    def mark_reported(self, key: Key) -> None:
        """The history has this round."""
        with self._transaction() as db:
            db.execute("UPDATE rounds SET reported = 1 WHERE run = ? AND round = ? AND method = ?", key)

    # ── what came back ──────────────────────────────────────────────────────────────────────────────────────────────

    def keep_global(self, state: GlobalState) -> None:
        """This is the newest global state; it takes the place of the one before it.

        Raises:
            StoreError: it could not be written; the one before it is still there.
        """
        parts = [(part.part, encode(part, "f32")) for part in state.parts(_PART_BYTES)]  # as it came
        with self._transaction() as db:
            db.execute("DELETE FROM global")
            db.executemany("INSERT INTO global VALUES (?, ?)", parts)

    def kept_global(self) -> GlobalState | None:
        """The newest global state that was kept."""
        with self._guard():
            return _kept_global(self._db)

    def left_out(self) -> LeftOut | None:
        """The last round that the fleet judged, if the fleet left it out; None where it counted."""
        with self._guard():
            return _left_out(self._db)[0]

    def joint_head(self) -> GlobalState | None:
        """The joint head that the device was given, for the round that was left out; None for none."""
        with self._guard():
            row = self._db.execute("SELECT value FROM meta WHERE name = 'joint-head'").fetchone()
            return None if row is None else unpacked_state(row[0])

    def keep_left_out(
        self, left_out: LeftOut | None, own: GlobalState | None = None, joint: GlobalState | None = None
    ) -> None:
        """The fleet left a round out, or counts this device again (None).

        Args:
            own: the head that the device answers by from now on, if it is not the fleet's; None for the head of before.
            joint: the joint head that the device was given for this round, whichever head it answers by.

        Raises:
            StoreError: it could not be written; what was there stands.
        """
        put = "INSERT OR REPLACE INTO meta VALUES (?, ?)"
        with self._transaction() as db:
            if left_out is None:
                db.execute("DELETE FROM meta WHERE name = 'left-out'")
            else:
                db.execute(put, ("left-out", left_out.written()))
            if left_out is None or joint is None:
                db.execute("DELETE FROM meta WHERE name = 'joint-head'")
            else:
                db.execute(put, ("joint-head", packed_state(joint)))
            if left_out is None or not left_out.leaves_fleet:
                db.execute("DELETE FROM meta WHERE name = 'own-head'")
            elif own is not None:
                db.execute(put, ("own-head", packed_state(own)))

    # ── contributions ───────────────────────────────────────────────────────────────────────────────────────────────

    def calibration(self) -> Known:
        """What probabilities follow from, as it was kept last."""
        with self._guard():
            return _calibration(self._db)

    def keep_calibration(self, known: Known) -> None:
        """What probabilities follow from. It is durable on return.

        Raises:
            StoreError: the disk refused.
        """
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES ('calibration', ?)", (known.written(),))

    def pending(self) -> list[Pending]:
        """Contributions without a final receipt, oldest first."""
        with self._guard():
            rows = self._db.execute(
                "SELECT run, round, method, payload, limit_bytes FROM contributions"
                " WHERE outcome IS NULL ORDER BY serial"
            )
            contributions = [typed(row, bytes, int, str, bytes, int) for row in rows]
            return [
                Pending((run, number, method), payload, limit) for run, number, method, payload, limit in contributions
            ]

    def record_receipt(self, receipt: Receipt, uplink_bytes: int) -> bool:
        """Record a final receipt.

        Returns:
            False when the contribution is unknown or has a final receipt already: the first receipt counts.

        Args:
            uplink_bytes: payload bytes that were published for it, repetitions included.

        Raises:
            StoreError: it could not be written; the contribution stays pending.
        """
        key = (receipt.run, receipt.round, receipt.method)
        with self._transaction() as db:
            changed = db.execute(
                "UPDATE contributions SET outcome = ?, reason = ?, uplink_bytes = ?"
                " WHERE run = ? AND round = ? AND method = ? AND outcome IS NULL",
                (receipt.status, receipt.reason, uplink_bytes, *key),
            ).rowcount
            self._drop_old_payloads(db)
        self.rest()  # which has read all that is kept
        return changed == 1

    def outcome(self, key: Key) -> tuple[str, int] | None:
        """How the contribution ended and the payload bytes that took; None while it waits, or when there is none."""
        row = self._row(
            "SELECT outcome, uplink_bytes FROM contributions"
            " WHERE run = ? AND round = ? AND method = ? AND outcome IS NOT NULL",
            *key,
        )
        if row is None:
            return None
        with self._guard():
            outcome, uplink_bytes = typed(row, str, int)
            return outcome, uplink_bytes

    def newest_held(self, run: bytes, up_to: int) -> int:
        """The newest round of a run, up to that one, of which the aggregator has a contribution; 0 for none."""
        row = self._row(
            "SELECT coalesce(max(round), 0) FROM contributions"
            " WHERE run = ? AND round <= ? AND outcome IN ('committed', 'duplicate')",
            run,
            up_to,
        )
        return 0 if row is None else int(row[0])

    def outcomes(self) -> dict[str, int]:
        """How many contributions ended each way, and how many were made in all (`sent`) or still wait (`pending`)."""
        with self._guard():
            rows = self._db.execute("SELECT coalesce(outcome, 'pending'), count(*) FROM contributions GROUP BY 1")
            counts = dict.fromkeys(("sent", *FINAL, "pending"), 0) | {name: int(number) for name, number in rows}
            for name, number in dropped(self._db)[1].items():
                counts[name] += number
        counts["sent"] = sum(counts.values())
        return counts

    def contributed(self) -> set[Key]:
        """The keys of contributions that may tell something of the samples.

        These are all contributions that are remembered, without withdrawals. `FIGURES` is among them where a status has
        told figures of the samples.
        """
        with self._guard():
            return _contributed(self._db)

    def note_figures(self) -> None:
        """A status is about to tell figures that are computed from samples.

        It is remembered here in case the ledger is lost.

        Raises:
            StoreError: the disk refused.
        """
        if self._row("SELECT 1 FROM meta WHERE name = 'figures'") is None:
            with self._transaction() as db:
                db.execute("INSERT OR IGNORE INTO meta VALUES ('figures', 1)")

    def give_up(self, key: Key, reason: str) -> None:
        """A contribution that waits for a receipt is not sent any more. If it is sums that stand, they do not count.

        Raises:
            StoreError: it could not be written; it still waits.
        """
        run, number, method = key
        with self._transaction() as db:
            db.execute(
                "UPDATE contributions SET outcome = 'rejected', reason = ?, uplink_bytes = 0, payload = NULL"
                " WHERE run = ? AND round = ? AND method = ? AND outcome IS NULL",
                (reason, run, number, method),
            )
            db.execute("UPDATE standing SET samples = NULL WHERE run = ? AND generation = ?", (run, number))

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _claim(self, owner: Mapping[str, str], extends: Collection[bytes], bundle_path: Path | None) -> None:
        """Mark the directory as this device's, or find out that it is another's. Its bundle, a longer one too, and
        where that lies, are known together or not at all."""
        with self._guard():
            meta = dict(self._db.execute("SELECT name, value FROM meta").fetchall())
        grows = meta.get("bundle") in {sha256.hex() for sha256 in extends}
        for name, value in owner.items() if meta else ():
            if meta.get(name) != value and not (grows and name == "bundle"):
                short = 12 if name == "bundle" else 64
                raise StoreError(
                    f"{self.directory} holds the state of another {name}",
                    expected=f"{name} {value[:short]}",
                    got=str(meta.get(name))[:short],
                    hint="another --state" if name != "bundle" else "--bundle with that one, or another --state",
                )
        entries = {**owner, **({} if bundle_path is None else {"bundle-path": os.fspath(bundle_path)})}
        if any(meta.get(name) != value for name, value in entries.items()):
            with self._transaction() as db:
                db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", list(entries.items()))

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """What the disk refuses, and what no device wrote, becomes a `StoreError`."""
        with self._file.guard(), _as_written(self._path):
            yield

    def _drop_old_payloads(self, db: sqlite3.Connection) -> None:
        db.execute(
            "UPDATE contributions SET payload = NULL WHERE outcome IS NOT NULL AND payload IS NOT NULL AND serial IN ("
            "SELECT serial FROM (SELECT serial, sum(payload_bytes) OVER (ORDER BY serial DESC) AS newer_bytes"
            " FROM contributions WHERE payload IS NOT NULL AND outcome IS NOT NULL) WHERE newer_bytes > ?)",
            (KEEP_BYTES,),
        )

    def _row(self, query: str, *values: object) -> tuple[Any, ...] | None:
        with self._guard():
            row: tuple[Any, ...] | None = self._db.execute(query, values).fetchone()
            return row


def read_kept(directory: Path) -> Kept:
    """What the device of this state directory answers with; nothing is changed, and its client may be running.

    Raises:
        StoreError: there is no such directory, or its journal cannot be read.
        UsageError: it is of another version.
    """
    path = directory / FILE
    with read_only(path, KIND) as db, _as_written(path):
        meta = dict(db.execute("SELECT name, value FROM meta WHERE name IN ('bundle', 'bundle-path')").fetchall())
        means, (left_out, own) = _tensors(db, "means"), _left_out(db)
        return Kept(
            bundle=bytes.fromhex(meta["bundle"]),
            bundle_path=Path(meta["bundle-path"]) if "bundle-path" in meta else None,
            weights=_tensors(db, "weights"),
            means=_unpacked_means(means) if means else None,
            state=_kept_global(db),
            rounds=_rounds_done(db),
            left_out=left_out,
            own=own,
            calibration=_calibration(db),
        )


def read_contributed(directory: Path) -> tuple[str, set[Key]]:
    """The fleet that the journal of a directory is of, and its `Journal.contributed`; nothing is changed.

    Raises:
        StoreError, UsageError: as `read_kept`; a journal of an older version will do.
    """
    path = directory / FILE
    with read_only(path, KIND, older=True) as db, _as_written(path):
        (fleet,) = typed(db.execute("SELECT value FROM meta WHERE name = 'fleet'").fetchone(), str)
        return fleet, _contributed(db)


def read_terms(directory: Path) -> str | None:
    """`Journal.policy` of the journal of a directory; nothing is changed.

    Raises:
        StoreError, UsageError: as `read_contributed`.
    """
    path = directory / FILE
    with read_only(path, KIND, older=True) as db, _as_written(path):
        return _terms(db)


def _terms(db: sqlite3.Connection) -> str | None:
    row = db.execute("SELECT value FROM meta WHERE name = 'policy'").fetchone()
    return None if row is None else str(typed(row, str)[0])


def _contributed(db: sqlite3.Connection) -> set[Key]:
    rows = db.execute(
        "SELECT run, round, method FROM contributions JOIN rounds USING (run, round, method)"
        " WHERE metrics NOT LIKE '%\"withdrawn\"%'"
    )
    keys = {(bytes(run), number, method) for run, number, method in rows}
    figures = db.execute("SELECT 1 FROM meta WHERE name = 'figures'").fetchone()
    return keys | ({FIGURES} if figures is not None else set())


@contextlib.contextmanager
def _as_written(path: Path) -> Iterator[None]:
    """What no device wrote, in a file that is a journal all the same, becomes a `StoreError`."""
    try:
        yield
    except (ArithmeticError, KeyError, RecursionError, TypeError, ValueError, SafetensorError) as error:
        raise StoreError(f"journal {path}", expected="what a device wrote", got=error, hint="another --state") from None


def _tensors(db: sqlite3.Connection, table: str) -> dict[str, NDArray[Any]]:
    row = db.execute(f"SELECT safetensors FROM {table}").fetchone()
    return {} if row is None else load(row[0])


def _left_out(db: sqlite3.Connection) -> tuple[LeftOut | None, GlobalState | None]:
    kept = dict(db.execute("SELECT name, value FROM meta WHERE name IN ('left-out', 'own-head')").fetchall())
    left_out = LeftOut.read(kept["left-out"]) if "left-out" in kept else None
    return left_out, unpacked_state(kept["own-head"]) if "own-head" in kept else None


def _calibration(db: sqlite3.Connection) -> Known:
    row = db.execute("SELECT value FROM meta WHERE name = 'calibration'").fetchone()
    return Known() if row is None else Known.read(row[0])


def _rounds_done(db: sqlite3.Connection, method: str | None = None) -> int:
    (kept,) = db.execute("SELECT count(*) FROM rounds WHERE method = ? OR ? IS NULL", (method, method)).fetchone()
    return int(kept) + sum(n for name, n in dropped(db)[0].items() if method in (None, name))


def _packed_means(means: OwnMeans) -> bytes:
    tensors = {"sums": means.classes.sums, "counts": means.classes.counts, "spread": means.spread}
    tensors |= {} if means.head is None else {"head": means.head}
    return save({name: np.ascontiguousarray(value) for name, value in tensors.items()})


def _unpacked_means(tensors: Mapping[str, NDArray[Any]]) -> OwnMeans:
    return OwnMeans(ClassMeans(tensors["sums"], tensors["counts"]), tensors["spread"], tensors.get("head"))


def _kept_global(db: sqlite3.Connection) -> GlobalState | None:
    collector, state = GlobalCollector(), None
    for (payload,) in db.execute("SELECT payload FROM global ORDER BY part"):
        part = decode(payload)
        if not isinstance(part, GlobalPart):
            raise WireError("global state", expected="its parts", got=type(part).__name__)
        state = collector.add(part)
    return state

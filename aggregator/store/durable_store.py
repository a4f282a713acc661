"""The durable store: everything the aggregator must not forget, in one SQLite file.

The store holds:

- the run's id, drawn when the file is made, and the bundle and the fleet of the run;
- each round with its method, seed and counters;
- the key (round, method, device) of each contribution, and its bytes as received while they may still be needed;
- the accuracy that devices reported after a round;
- the global state;
- for each method, the largest share under which its last round was merged, so that the result can be made again.

A store holds one run, so (run, round, method, device) is the key on the wire.

Two transactions keep the promises:

1. `commit` makes a whole batch of contributions durable (`contract/files/sqlite.py`: the data is on the disk when it
   returns). Only then do receipts and MQTT acknowledgements go out. The key is unique, so the same contribution a
   second time is a duplicate, never a second count.
2. Closing a round writes its result and the new global state. After kill -9 a round is either open with all promised
   contributions, or closed with its result.

The store keeps (docs/decisions/085, 131, 160):

- for ever: keys, counters and one line for each round;
- for the newest `KEEP_ROUNDS`: accuracy reports, and findings against devices;
- the newest global state, and the states that the newest few rounds began with
  (`aggregator/store/rollback_tables.py`);
- the payloads of the open round and of the last closed round of each method, so that FFC's sums stay until the next
  calibration replaces them;
- the payloads of older rounds, newest first, up to `KEEP_BYTES`.

The transaction that closes a round drops what is no longer needed.

`Store` is the protocol that the server uses. A program that only reads a store uses `aggregator/store/stored_run.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Protocol, Self

from protofleet.aggregator.database import AnyPlace, Connection, Database, open_database, read_only, stream_rows, upsert
from protofleet.aggregator.database import as_written as written_in
from protofleet.aggregator.monitoring.accuracy import AccuracyReport
from protofleet.aggregator.monitoring.calibration import CalibrationTable
from protofleet.aggregator.monitoring.class_drift import ClassDriftTable
from protofleet.aggregator.monitoring.device_table import DeviceTable
from protofleet.aggregator.monitoring.drift import DriftTable
from protofleet.aggregator.monitoring.policy_refusals import PolicyWords
from protofleet.aggregator.screening.outliers import Finding, Screening
from protofleet.aggregator.store.blinded_tables import BlindedTables
from protofleet.aggregator.store.enrolment_tables import EnrolmentTables
from protofleet.aggregator.store.finding_tables import findings_of, put_findings, verdicts
from protofleet.aggregator.store.meta_table import MetaTable
from protofleet.aggregator.store.order_table import OrderTable
from protofleet.aggregator.store.records import Accepted, Key, RoundRecord, Tally
from protofleet.aggregator.store.refused_devices import RefusedDevices
from protofleet.aggregator.store.rollback_tables import RollbackTables, keep_former
from protofleet.aggregator.store.rollout_tables import RolloutTables
from protofleet.aggregator.store.schema import COUNT, KIND, MADE_AT, PUT_GLOBAL, draw_run
from protofleet.aggregator.store.standing_tables import StandingTables
from protofleet.contract.accuracy import COUNTS, SHARES, Accuracy
from protofleet.contract.errors import UsageError
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.global_state import GlobalCollector, GlobalState
from protofleet.contract.wire.messages import MAX_ROUND, GlobalPart, Receipt

__all__ = [
    "KIND",
    "DurableStore",
    "Store",
    "as_written",
    "contributions",
    "devices_of",
    "global_parts",
    "newest_state",
    "screening_name",
]

OUTCOMES = ("duplicate", "late", "rejected", "malformed")
KEEP_BYTES = 256 << 20
_FIGURES = ("samples", *SHARES, *COUNTS)  # columns of the table `accuracy`
KEEP_ROUNDS = 1_000  # of which accuracy is kept, and which a summary lists
_PART_BYTES = 1 << 26
_CLOSING = "round that is being closed"  # in `meta`
_LOOKERS_S = 1.0  # a command that only brings an order has the store for milliseconds


_NONE = Screening(suspects="ignore")


class Store(Protocol):
    """What the server needs of a store."""

    standing: StandingTables
    orders: OrderTable
    meta: MetaTable
    refused_devices: RefusedDevices
    drift: DriftTable
    class_drift: ClassDriftTable
    calibration: CalibrationTable
    devices: DeviceTable
    rollouts: RolloutTables
    rollback: RollbackTables
    policies: PolicyWords
    blinded: BlindedTables
    enrolment: EnrolmentTables
    fleet: str
    shared: bool

    @property
    def epoch(self) -> int: ...
    def alone(self) -> AbstractContextManager[None]: ...
    @property
    def run(self) -> bytes: ...
    def holds(self, round: int, method: str, device: str) -> bool: ...
    def open_round(self, number: int, method: str, seed: int, opened_at: float) -> None: ...
    def commit(
        self, accepted: Sequence[Accepted], tally: Tally, refusals: Sequence[tuple[int, str]] = ()
    ) -> Collection[Key]: ...
    def awaits_accuracy(self, round: int, device: str) -> bool: ...
    def taken(self, round: int, method: str) -> tuple[list[str], list[str]]: ...
    def taken_count(self, round: int, method: str) -> tuple[int, int]: ...
    def keep_accuracy(self, reports: Sequence[AccuracyReport]) -> None: ...
    def accuracy(self, round: int) -> dict[str, Accuracy]: ...
    def accuracy_since(self, last: int) -> tuple[int, set[int]]: ...
    def contributions(self, round: int, method: str) -> Iterator[bytes]: ...
    def snapshot(self) -> AbstractContextManager[Connection]: ...
    def begin_close(self, number: int) -> None: ...
    def closing(self) -> int: ...
    def close_round(
        self,
        number: int,
        closed_at: float,
        classes_merged: int,
        state: GlobalState,
        screening: Screening = _NONE,
        findings: Sequence[Finding] = (),
        *,
        also: Callable[[Connection], None] = ...,
    ) -> None: ...
    def state(self) -> GlobalState: ...
    def last_round(self) -> int: ...
    def totals(self, up_to: int) -> tuple[int, int]: ...
    def rounds(self, *, after: int = 0) -> list[RoundRecord]: ...
    def record(self, round: int) -> RoundRecord: ...
    def findings(self, *, after: int = 0) -> dict[int, list[dict[str, str]]]: ...
    def verdicts(self) -> dict[str, Receipt]: ...
    def refusals(self, round: int) -> list[str]: ...
    def tallies(self) -> dict[tuple[int, str], int]: ...


class DurableStore:
    """The store in a file or on a server; a context manager.

    Args:
        path: a file or a server's URL (`aggregator/database`); made when it does not exist.
        bundle: sha256 (32 bytes) of the run's bundle.
        fleet: the fleet's id.
        extends: sha256 of bundles that this one extends. A store of one of these becomes a store of this bundle.
        keep_bytes: how many payload bytes of closed rounds are kept, beside the last round of each method.

    Raises:
        StoreError: another aggregator has the store, or the disk refuses.
        UsageError: the file is a store of another bundle or fleet, or no store.
    """

    shared = False  # whether other processes commit to it, too; see `aggregator/workers/shared_store.py`

    def __init__(
        self,
        path: AnyPlace,
        bundle: bytes,
        fleet: str,
        *,
        extends: Collection[bytes] = (),
        keep_bytes: int = KEEP_BYTES,
    ) -> None:
        self._keep_bytes, self._place = keep_bytes, path
        self._file = self._open(path)
        self.standing, self.orders = StandingTables(self._file), OrderTable(self._file)
        self.meta, self.refused_devices = MetaTable(self._file), RefusedDevices(self._file)
        self.rollouts, self.blinded = RolloutTables(self._file), BlindedTables(self._file)
        self.enrolment, self.fleet = EnrolmentTables(self._file), fleet
        self.rollback = RollbackTables(self._file)
        self._db, self._disk, self._transaction = self._file.connection, self._file.reading, self._file.transaction
        try:
            with as_written(self._file.path):
                self._claim({"bundle": bundle, "fleet": fleet.encode()}, extends)
                self.drift, self.class_drift = DriftTable(self._file), ClassDriftTable(self._file)
                self.policies = PolicyWords(self._file)
                self.calibration = CalibrationTable(self._file, lambda: self.run)
                self.devices = DeviceTable(self._file, leads=self._claims)
        except BaseException:
            self._file.close()
            raise

    def _open(self, path: AnyPlace) -> Database:
        return open_database(path, KIND, wait_s=_LOOKERS_S)

    @property
    def epoch(self) -> int:
        """How many processes have had this store until now, this one included; 0 for a file."""
        return self._file.epoch

    def size_bytes(self) -> int:
        """What the store takes on its disk."""
        return self._file.size_bytes()

    def alone(self) -> AbstractContextManager[None]:
        """In the block, no other process changes what is read and written. A file has no other process."""
        return nullcontext()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and release the lock. Nothing is pending: every write was durable when it returned."""
        self._file.close()

    @property
    def run(self) -> bytes:
        """4 bytes, drawn when the store was made."""
        return self._run

    def begin_new_run(self) -> None:
        """Draw another run id. Devices see a new run, which continues from the content of this store.

        A store that came from a backup knows less than its devices. In the old run they would wait for what they
        already have.
        """
        with self._transaction() as db:
            run = draw_run(db)
            self._file.changed()
        self._run = run

    def holds(self, round: int, method: str, device: str) -> bool:
        """Whether this contribution was committed."""
        with self._disk():
            cursor = self._db.execute(
                "SELECT 1 FROM contribution WHERE round = ? AND method = ? AND device = ?", (round, method, device)
            )
            return cursor.fetchone() is not None

    def open_round(self, number: int, method: str, seed: int, opened_at: float) -> None:
        """Record that a round is open."""
        with self._transaction():
            self._db.execute(
                "INSERT INTO round (number, method, seed, opened_at) VALUES (?, ?, ?, ?)",
                (number, method, seed, opened_at),
            )
            self._file.changed()

    def commit(
        self, accepted: Sequence[Accepted], tally: Tally, refusals: Sequence[tuple[int, str]] = ()
    ) -> Collection[Key]:
        """Make a batch durable in one transaction: contributions, counters and refused devices.

        Returns:
            The keys that another process had already made durable; empty without another process.

        Raises:
            StoreError: the disk refuses; then nothing of the batch was written.
        """
        counts = [(round, outcome, messages) for (round, outcome), messages in tally.items()]
        with as_written(self._file.path), self._transaction():  # nothing follows the largest number there is
            numbered = list(zip(self._file.fresh_ids("payload", len(accepted)), accepted, strict=True))
            self._db.executemany("INSERT INTO payload VALUES (?, ?, ?)", [(n, a.round, a.payload) for n, a in numbered])
            self._db.executemany(
                "INSERT INTO contribution VALUES (?, ?, ?, ?, ?)",
                [(a.round, a.method, a.device, a.received_bytes, n) for n, a in numbered],
            )
            self.blinded.keep_seeds(
                (a.round, a.device, a.message.seed) for a in accepted if a.message and a.message.seed
            )
            self._db.executemany(
                COUNT,
                counts,
            )
            self._db.executemany(upsert("refusal", "round, device"), refusals)
        return ()

    def taken(self, round: int, method: str) -> tuple[list[str], list[str]]:
        """The devices whose contribution to a round is committed, and the devices whose contribution was rejected."""
        with self._disk():
            rows = self._db.execute(
                "SELECT device FROM contribution WHERE round = ? AND method = ?", (round, method)
            ).fetchall()
        with as_written(self._file.path):
            return _names(rows), self.refusals(round)

    def taken_count(self, round: int, method: str) -> tuple[int, int]:
        """How many contributions to a round are committed, and how many devices were rejected."""
        with self._disk():
            row = self._db.execute(
                "SELECT (SELECT count(*) FROM contribution WHERE round = ? AND method = ?),"
                " (SELECT count(*) FROM refusal WHERE round = ?)",
                (round, method, round),
            ).fetchone()
        return int(row[0]), int(row[1])

    def awaits_accuracy(self, round: int, device: str) -> bool:
        """Whether `device` contributed to the closed `round` and has not yet reported its accuracy after it."""
        with self._disk():
            cursor = self._db.execute(
                "SELECT 1 FROM round r JOIN contribution c ON c.round = r.number AND c.method = r.method"
                " WHERE r.number = ? AND r.closed = 1 AND c.device = ?"
                " AND NOT EXISTS (SELECT 1 FROM accuracy a WHERE a.round = r.number AND a.device = c.device)",
                (round, device),
            )
            return cursor.fetchone() is not None

    def keep_accuracy(self, reports: Sequence[AccuracyReport]) -> None:
        """Make accuracy reports durable. The first report of a device on a round stays."""
        rows = [(t.round, t.device, *(getattr(t.accuracy, name) for name in _FIGURES)) for t in reports]
        places = ", ".join("?" * (2 + len(_FIGURES)))
        with self._transaction():
            self._db.executemany(
                f"INSERT INTO accuracy (round, device, {', '.join(_FIGURES)})"
                f" VALUES ({places}) ON CONFLICT (round, device) DO NOTHING",
                rows,
            )

    def accuracy(self, round: int) -> dict[str, Accuracy]:
        """The accuracy that devices reported after `round`, by device."""
        with self._disk():
            rows = self._db.execute(
                f"SELECT device, {', '.join(_FIGURES)} FROM accuracy WHERE round = ? ORDER BY device",
                (round,),
            ).fetchall()
        return {device: Accuracy(**dict(zip(_FIGURES, figures, strict=True))) for device, *figures in rows}

    def accuracy_since(self, last: int) -> tuple[int, set[int]]:
        """The number to pass in the next call, and the rounds with new reports since the number was `last`."""
        with self._disk():
            (newest,) = self._db.execute("SELECT coalesce(max(id), 0) FROM accuracy").fetchone()
            rows = self._db.execute("SELECT DISTINCT round FROM accuracy WHERE id > ?", (last,)).fetchall()
        return newest, {round for (round,) in rows}

    def contributions(self, round: int, method: str) -> Iterator[bytes]:
        """The encoded contributions of a round, ordered by device, one at a time; none after they were dropped."""
        with self._disk():
            for _, payload in contributions(self._db, round, method):
                yield payload

    def snapshot(self) -> AbstractContextManager[Connection]:
        """The whole store as it is at one moment, on its own connection, for any thread."""
        return read_only(self._place, KIND)

    def begin_close(self, number: int) -> None:
        """Record that a round is being closed and takes no more contributions."""
        with self._transaction() as db:
            db.execute(upsert("meta", "name", "value"), (_CLOSING, str(number).encode()))
            self._file.changed()

    def closing(self) -> int:
        """The number of the round whose close began last, even if it is closed by now; 0 for none."""
        with as_written(self._file.path):
            return int(self.meta.get(_CLOSING) or 0)

    def close_round(
        self,
        number: int,
        closed_at: float,
        classes_merged: int,
        state: GlobalState,
        screening: Screening = _NONE,
        findings: Sequence[Finding] = (),
        *,
        also: Callable[[Connection], None] = lambda db: None,
    ) -> None:
        """Record a round's result and the new global state, and drop what is no longer needed.

        Args:
            screening: how devices were screened, so that the result can be made again.
            findings: the findings against devices.
            also: called in the same transaction.
        """
        parts = global_parts(state)
        with as_written(self._file.path), self._transaction():
            self._db.execute(
                "UPDATE round SET closed = 1, classes_merged = ?,"
                " seconds = CASE WHEN ? > opened_at THEN ? - opened_at ELSE 0 END WHERE number = ?",
                (classes_merged, closed_at, closed_at, number),
            )
            keep_former(self._db, number)
            # a round that changed nothing has the state, and the version, of the round before
            self._db.executemany(PUT_GLOBAL, parts)
            (method,) = self._db.execute("SELECT method FROM round WHERE number = ?", (number,)).fetchone()
            self._db.execute(upsert("meta", "name", "value"), (screening_name(method), screening.written()))
            put_findings(self._db, number, findings, KEEP_ROUNDS)
            self._drop_old(number)
            self._db.execute("DELETE FROM meta WHERE name = ?", (_CLOSING,))
            also(self._db)
            self._file.changed()

    def state(self) -> GlobalState:
        """The newest global state; version 0 and empty before the first round."""
        with self._disk(), as_written(self._file.path):
            return newest_state(self._db, self._run)

    def last_round(self) -> int:
        """The number of the newest round that was opened; 0 for none."""
        with self._disk():
            return int(self._db.execute("SELECT coalesce(max(number), 0) FROM round").fetchone()[0])

    def totals(self, up_to: int) -> tuple[int, int]:
        """The number of contributions to the rounds up to number `up_to`, and their payload bytes."""
        with self._disk():
            count, received = self._db.execute(
                "SELECT count(*), coalesce(sum(received_bytes), 0) FROM contribution WHERE round <= ?", (up_to,)
            ).fetchone()
            return int(count), int(received)

    def rounds(self, *, after: int = 0) -> list[RoundRecord]:
        """Every opened round with a number above `after`, in order."""
        return self._records("> ?", after)

    def record(self, round: int) -> RoundRecord:
        """One round that was opened."""
        with as_written(self._file.path):
            (record,) = self._records("= ?", round)
        return record

    def _records(self, condition: str, number: int) -> list[RoundRecord]:
        """The rounds with such numbers, in order: a few questions to a server, however many they are."""
        with self._disk():
            opened = self._db.execute(
                "SELECT number, method, seed, opened_at, closed, seconds, classes_merged FROM round"
                f" WHERE number {condition} ORDER BY number",
                (number,),
            ).fetchall()
            uplink = self._db.execute(
                "SELECT c.round, c.device, c.received_bytes FROM contribution c"
                " JOIN round r ON r.number = c.round AND r.method = c.method"
                f" WHERE c.round {condition} ORDER BY c.round, c.device",
                (number,),
            ).fetchall()
            tally = self._db.execute(
                f"SELECT round, outcome, messages FROM tally WHERE round {condition}", (number,)
            ).fetchall()
            back = self._db.execute(f"SELECT round FROM taken_back WHERE round {condition}", (number,)).fetchall()
        with as_written(self._file.path):
            if any(not 0 < row[0] <= MAX_ROUND for row in opened):
                raise ValueError(f"rounds {opened[0][0]} to {opened[-1][0]}")
            committed, counted, back_rounds = _by_round(uplink), _by_round(tally), {round for (round,) in back}
            return [
                RoundRecord(
                    number=round,
                    method=str(method),
                    seed=int(seed),
                    opened_at=float(at),
                    closed=bool(closed),
                    seconds=None if took_s is None else float(took_s),
                    classes_merged=merged,
                    uplink_bytes=committed.get(round, {}),
                    tally=counted.get(round, {}),
                    taken_back=round in back_rounds,
                )
                for round, method, seed, at, closed, took_s, merged in opened
            ]

    def findings(self, *, after: int = 0) -> dict[int, list[dict[str, str]]]:
        """The findings against devices when rounds with a number above `after` closed, by round, for JSON."""
        with self._disk():
            return findings_of(self._db, after=after)

    def verdicts(self) -> dict[str, Receipt]:
        """The receipts for devices that were left out of a round, by name; see `aggregator/store/finding_tables.py`."""
        with self._disk(), as_written(self._file.path):
            return verdicts(self._db, self._run)

    def refusals(self, round: int) -> list[str]:
        """The devices whose contribution to `round` was rejected."""
        with self._disk():
            rows = self._db.execute("SELECT device FROM refusal WHERE round = ? ORDER BY device", (round,)).fetchall()
        with as_written(self._file.path):
            return _names(rows)

    def tallies(self) -> dict[tuple[int, str], int]:
        """Messages by round and outcome; round 0 for messages of no round."""
        with self._disk():
            rows = self._db.execute("SELECT round, outcome, messages FROM tally").fetchall()
            return {(int(round), str(outcome)): int(messages) for round, outcome, messages in rows}

    def _drop_old(self, closed: int) -> None:
        """Part of the transaction that closes a round."""
        self._db.execute(
            "UPDATE round SET kept_bytes ="
            " (SELECT coalesce(sum(received_bytes), 0) FROM contribution WHERE round = number) WHERE number = ?",
            (closed,),
        )
        stored = self._db.execute(
            "SELECT number, method, kept_bytes FROM round WHERE closed = 1 AND kept_bytes > 0 ORDER BY number DESC"
        ).fetchall()
        total, methods = 0, set[str]()
        for number, method, kept_bytes in stored:
            total += kept_bytes
            if method in methods and total > self._keep_bytes:
                self._db.execute("DELETE FROM payload WHERE round = ?", (number,))
                self._db.execute("UPDATE round SET kept_bytes = 0 WHERE number = ?", (number,))
            methods.add(method)
        self._db.execute("DELETE FROM global WHERE version < (SELECT max(version) FROM global)")
        self._db.execute("DELETE FROM refusal WHERE round < ?", (closed,))
        self._db.execute("DELETE FROM accuracy WHERE round <= ?", (closed - KEEP_ROUNDS,))

    _claims = True  # whether it may say whose the store is

    def _check_claims(self) -> None:
        """That a store of nobody may be made this run's."""

    def _claim(self, owner: Mapping[str, bytes], extends: Collection[bytes]) -> None:
        """Mark a new file as this run's, or find out that it is another's."""
        with self._disk():
            claimed = dict(self._db.execute("SELECT name, value FROM meta").fetchall())
        if not claimed:
            self._check_claims()
            claimed = {"run": os.urandom(4), **owner}
            with self._transaction():
                self._db.executemany("INSERT INTO meta VALUES (?, ?)", list(claimed.items()))
        is_backup = MADE_AT in claimed
        with as_written(self._file.path):
            claimed = {name: memoryview(value).tobytes() for name, value in claimed.items() if name in ("run", *owner)}
        self._run = claimed["run"]
        shown: dict[str, Callable[[bytes], str]] = {
            "bundle": lambda value: f"sha256 {value.hex()[:12]}…",
            "fleet": lambda value: f"fleet {value.decode()}",
        }
        grows = memoryview(claimed["bundle"]).tobytes() in extends
        for name, expected in owner.items():
            if claimed[name] != expected and not (grows and name == "bundle"):
                raise UsageError(
                    f"--store {self._file.path} is of another {name}",
                    expected=shown[name](claimed[name]),
                    got=shown[name](expected),
                    hint=f"the {name} it was made for, or another --store",
                )
        if grows and self._claims:
            with self._transaction():
                self._db.execute("UPDATE meta SET value = ? WHERE name = 'bundle'", (owner["bundle"],))
                self._file.changed()
        if is_backup and self._claims:  # which somebody copied here: it is one no longer
            with self._transaction():
                self._db.execute("DELETE FROM meta WHERE name = ?", (MADE_AT,))


def _by_round(rows: Iterable[tuple[int, str, int]]) -> dict[int, dict[str, int]]:
    """Numbers by round and name."""
    numbers: dict[int, dict[str, int]] = {}
    for round, name, number in rows:
        numbers.setdefault(round, {})[_name(name)] = int(number)
    return numbers


def _names(rows: Iterable[tuple[object]]) -> list[str]:
    return [_name(name) for (name,) in rows]


def _name(written: object) -> str:
    """A name as it was written; ValueError for bytes, which `str` would turn into the name of another device."""
    if not isinstance(written, str):
        raise ValueError(f"{written!r} in place of a name")
    return written


@contextmanager
def as_written(path: AnyPlace) -> Iterator[None]:
    """Turn the errors of reading rows that no aggregator wrote into a `StoreError`."""
    with written_in(path, KIND):
        yield


def contributions(db: Connection, round: int, method: str) -> Iterator[tuple[str, bytes]]:
    """Devices and their encoded contributions to a round, ordered by device, one at a time; none once dropped."""
    for row in stream_rows(  # noqa: UP028  whoever stops reading may have closed `db`, and `yield from` would close its cursor
        db,
        "SELECT c.device, p.bytes FROM contribution c JOIN payload p ON p.id = c.payload AND p.round = c.round"
        " WHERE c.round = ? AND c.method = ? ORDER BY c.device",
        (round, method),
    ):
        yield row


def devices_of(db: Connection, round: int, method: str) -> list[str]:
    """The devices that contributed to a round, in the order of `contributions`; ValueError for what is no name."""
    rows = db.execute("SELECT device FROM contribution WHERE round = ? AND method = ? ORDER BY device", (round, method))
    return _names(rows.fetchall())


def global_parts(state: GlobalState) -> list[tuple[int, int, bytes]]:
    """A global state in the store's form: version, number and bytes of each part."""
    return [(state.version, part.part, encode(part, "f64")) for part in state.parts(_PART_BYTES)]


def screening_name(method: str) -> str:
    """The name in `meta` of the screening of a method's last closed round."""
    return f"max_share {method}"


def newest_state(db: Connection, run: bytes) -> GlobalState:
    """The newest global state in a store; version 0 and empty before the first round."""
    collector, state = GlobalCollector(), None
    for (payload,) in db.execute("SELECT payload FROM global WHERE version = (SELECT max(version) FROM global)"):
        part = decode(payload)
        assert isinstance(part, GlobalPart)
        state = collector.add(part)
    return GlobalState(run, 0, 0) if state is None else replace(state, run=run)

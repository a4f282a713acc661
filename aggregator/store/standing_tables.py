"""The standing sums in the store: the newest contribution of each device, and which classes are forgotten.

Each device has one row. A newer contribution replaces the one before, in the transaction that commits it, and SQLite
overwrites the freed bytes with zeros (`secure_delete`). A device that was withdrawn or forgotten keeps its name and its
generation, so that nothing older comes in again. It keeps no number of its data.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from protofleet.aggregator.database import Connection, Database, stream_rows, upsert
from protofleet.aggregator.store.meta_table import MetaTable, put_meta
from protofleet.aggregator.store.order_table import Order, order_done
from protofleet.aggregator.store.records import Tally
from protofleet.aggregator.store.refused_devices import refuse_device
from protofleet.aggregator.store.schema import COUNT, PUT_GLOBAL
from protofleet.contract.files.sqlite import typed

__all__ = [
    "CLASSES_TAKEN",
    "WITHDREW",
    "Record",
    "StandingTables",
    "Stands",
    "Taken",
    "classes_forgotten",
    "fleet_records",
    "read_taken",
    "with_taken",
    "withdrew",
]

_CLASSES = "classes forgotten"  # in `meta`: their names, as a JSON array
CLASSES_TAKEN = "classes taken"
WITHDREW = "it withdrew what it had sent"
_BESIDE = (
    "accuracy",
    "refusal",
    "drift",
    "calibration",
    "policy_word",
    "class_drift",
    "rollout_device",
    "finding",
    "device",
    "device_count",
    "device_event",
)  # what is held of a device beside what it contributed
_HOLD = ("standing", "contribution", "payload", "former", "global", "device_letter", *_BESIDE)  # what is taken out


Taken = dict[str, dict[str, int]]
"""By name of a class, by device: of which generation its rows were taken out. See `StandingTables.classes_taken`."""


@dataclass(frozen=True)
class Stands:
    """The new row of a device.

    Attributes:
        payload: None when the device withdraws.
    """

    device: str
    generation: int
    payload: bytes | None
    received_bytes: int


@dataclass(frozen=True)
class Record:
    """What a store knows of one device.

    Attributes:
        generation: of its standing sums; 0 for none.
        present: whether it is in the standing sums.
        received_bytes, received_at: the size of these sums, and when they came, in seconds since the epoch.
        rounds: how many rounds it contributed to.
        refused: why it is refused; empty when it is not.
    """

    device: str
    generation: int = 0
    present: bool = False
    received_bytes: int = 0
    received_at: float | None = None
    rounds: int = 0
    refused: str = ""


class StandingTables:
    """These tables of an open store."""

    def __init__(self, file: Database) -> None:
        self.path, self._file = file.path, file
        self._db, self._disk, self._transaction = file.connection, file.reading, file.transaction
        self._meta = MetaTable(file)
        self._to_erase = False
        self.taken_out = 0  # how often a device or a class was, since this was opened

    def generations(self) -> dict[str, int]:
        """The generation of each device, also of those that were taken out."""
        with self._disk():
            rows = self._db.execute("SELECT device, generation FROM standing").fetchall()
            return dict(typed(row, str, int) for row in rows)

    def payloads(self) -> Iterator[tuple[str, bytes]]:
        """The standing contributions, ordered by device, one at a time."""
        with self._disk():
            yield from stream_rows(
                self._db, "SELECT device, payload FROM standing WHERE payload IS NOT NULL ORDER BY device"
            )

    def records(self) -> Mapping[str, Record]:
        """What is known of each device, by name."""
        with self._disk():
            return fleet_records(self._db)

    def payload(self, device: str) -> bytes | None:
        """The standing contribution of a device."""
        with self._disk():
            row = self._db.execute("SELECT payload FROM standing WHERE device = ?", (device,)).fetchone()
            return None if row is None or row[0] is None else bytes(typed(row, bytes)[0])

    def commit(self, newer: Sequence[Stands], tally: Tally, at: float, taken: Taken | None = None) -> None:
        """Make a batch durable in one transaction: the newer contributions and the counters.

        A device that withdraws is refused from now on. The rest of the withdrawal is an order like any other.

        Args:
            at: seconds since the epoch.
            taken: the new `classes_taken`, if it has changed.
        """
        with self._transaction() as db:
            if taken is not None:
                put_meta(db, CLASSES_TAKEN, json.dumps(taken))
            db.executemany(
                upsert("standing", "device", "generation", "received_bytes", "received_at", "payload"),
                [(s.device, s.generation, s.received_bytes, at, s.payload) for s in newer],
            )
            for device in (s.device for s in newer if s.payload is None):
                withdrew(db, device, at)
            db.executemany(
                COUNT,
                [(round, outcome, messages) for (round, outcome), messages in tally.items()],
            )

    def left_out(self, devices: Iterable[str]) -> None:
        """Note that nothing of these devices stands any more. They may send again."""
        with self._transaction() as db:
            db.executemany(
                "UPDATE standing SET payload = NULL, received_bytes = 0 WHERE device = ?",
                [(device,) for device in devices],
            )

    def solved(self, parts: Sequence[tuple[int, int, bytes]], digest: str) -> None:
        """Record a global state that was made of the standing sums; older versions are deleted.

        Args:
            parts: version, number and bytes of each part.
            digest: of the sums it was made of.
        """
        with self._transaction() as db:
            self._put_global(db, parts)
            put_meta(db, "standing solved", digest)

    def _put_global(self, db: Connection, parts: Sequence[tuple[int, int, bytes]]) -> None:
        db.executemany(PUT_GLOBAL, parts)
        db.execute("DELETE FROM global WHERE version < (SELECT max(version) FROM global)")

    def take_out(
        self,
        order: Order,
        parts: Sequence[tuple[int, int, bytes]],
        digest: str | None,
        *,
        at: float,
        before: int,
        after: int,
        reason: str,
        outcome: str,
    ) -> None:
        """Remove all data of an order's device, and refuse it.

        The same transaction records the global state without the device, and that the order is done.

        Args:
            digest: of what the state was made of, where sums stand.
            reason: why the device is refused from now on.
            outcome: for the record.
        """
        device = order.device
        with self._transaction() as db:
            db.execute("UPDATE standing SET payload = NULL, received_bytes = 0 WHERE device = ?", (device,))
            db.execute(
                "DELETE FROM payload WHERE id IN (SELECT p.id FROM contribution c"
                " JOIN payload p ON p.id = c.payload AND p.round = c.round WHERE c.device = ?)",
                (device,),
            )
            for table in ("contribution", *_BESIDE, *self._file.of_devices):
                db.execute(f"DELETE FROM {table} WHERE device = ?", (device,))
            db.execute("DELETE FROM former")  # which it may be in
            refuse_device(db, device, at, reason)
            self._put_global(db, parts)
            if digest is not None:
                put_meta(db, "standing solved", digest)
            order_done(db, order, at, outcome, before, after)
            self._file.changed()
        self._to_erase = True
        self.taken_out += 1

    def classes_forgotten(self) -> tuple[str, ...]:
        """The names of the forgotten classes, in the order in which they were forgotten."""
        return forgotten_in(self._meta.get(_CLASSES))

    def classes_taken(self) -> Taken:
        """For each class, the devices whose rows of it were taken out, and the generation of those rows.

        The empty name has those of classes that were admitted again.
        """
        return read_taken(self._meta.get(CLASSES_TAKEN) or "{}")

    def round_payloads(self) -> Iterator[tuple[int, tuple[int, str, str], bytes]]:
        """The kept contributions to rounds, one at a time: number in this store; round, method and device; payload."""
        with self._disk():
            for number, *key, payload in stream_rows(
                self._db,
                "SELECT p.id, c.round, c.method, c.device, p.bytes FROM payload p"
                " JOIN contribution c ON c.round = p.round AND c.payload = p.id ORDER BY p.id",
            ):
                yield number, (key[0], key[1], key[2]), payload

    def round_payload(self, number: int) -> bytes:
        """The kept contribution with this number."""
        with self._disk():
            return bytes(self._db.execute("SELECT bytes FROM payload WHERE id = ?", (number,)).fetchone()[0])

    def class_done(
        self,
        order: Order,
        forgotten: Sequence[str],
        taken: Taken,
        changed: Iterable[tuple[str | int, bytes | None]] = (),
        parts: Sequence[tuple[int, int, bytes]] = (),
        digest: str | None = None,
        *,
        at: float,
        before: int,
        after: int,
        outcome: str,
    ) -> None:
        """Record which classes are forgotten now.

        The same transaction records what that changes, and that the order is done.

        Args:
            taken: as `classes_taken`.
            changed: the remaining payload of each changed contribution, None for nothing: by device where sums stand,
                or by number where there are rounds. Drawn one at a time.
            parts, digest: of the global state of what remains, as in `take_out`.
        """
        with self._transaction() as db:
            for place, payload in changed:
                _keep(db, place, payload)
            db.execute("DELETE FROM class_drift WHERE class = ?", (order.detail,))
            if order.what == "forget class":
                for table in ("former", *self._file.of_devices):  # which it may be in
                    db.execute(f"DELETE FROM {table}")
            put_meta(db, _CLASSES, json.dumps(list(forgotten)))
            put_meta(db, CLASSES_TAKEN, json.dumps(taken))
            self._put_global(db, parts)
            if digest is not None:
                put_meta(db, "standing solved", digest)
            order_done(db, order, at, outcome, before, after)
            self._file.changed()
        self._to_erase = True
        self.taken_out += 1

    def erase(self) -> bool:
        """Leave nothing readable of what was taken out. False while a reader prevents that."""
        if not self._to_erase:
            return True
        self._to_erase = not self._file.erase((*_HOLD, *self._file.of_devices))
        return not self._to_erase


def withdrew(db: Connection, device: str, at: float) -> None:
    """Part of the transaction in which a device takes out what stands of it."""
    refuse_device(db, device, at, WITHDREW)
    db.execute(
        "INSERT INTO fleet_order (what, device, who, given_at) VALUES ('withdraw', ?, 'the device', ?)", (device, at)
    )


def read_taken(value: str) -> Taken:
    """`classes_taken` from its text in `meta`."""
    by_class = json.loads(value)
    return {
        name: {device: int(generation) for device, generation in generations.items()}
        for name, generations in by_class.items()
    }


def with_taken(taken: Taken, name: str, more: Mapping[str, int]) -> Taken:
    """`taken` with further generations of a class."""
    return {**taken, name: {**taken.get(name, {}), **more}}


def forgotten_in(value: str | None) -> tuple[str, ...]:
    """The names of classes from their text in `meta`."""
    names = [] if value is None else json.loads(value)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("names of classes")
    return tuple(names)


def classes_forgotten(db: Connection) -> tuple[str, ...]:
    """`StandingTables.classes_forgotten` of a store that is read beside its aggregator.

    Text that no aggregator wrote gives no class.
    """
    row = db.execute("SELECT value FROM meta WHERE name = ?", (_CLASSES,)).fetchone()
    try:
        return () if row is None else forgotten_in(row[0] if isinstance(row[0], str) else bytes(row[0]).decode())
    except (ValueError, TypeError):
        return ()


def fleet_records(db: Connection) -> Mapping[str, Record]:
    """What a store knows of each device, by name.

    Every device of which the store holds anything is in it, so that each can be forgotten.

    Raises:
        TypeError, ValueError: the rows hold something that no aggregator wrote.
    """
    refused = dict(db.execute("SELECT device, reason FROM refused").fetchall())
    rounds = dict(db.execute("SELECT device, count(*) FROM contribution GROUP BY device").fetchall())
    stands = {
        device: Record(device, int(generation), bool(present), int(received_bytes), float(received_at))
        for device, generation, present, received_bytes, received_at in db.execute(
            "SELECT device, generation, payload IS NOT NULL, received_bytes, received_at FROM standing"
        )
    }
    beside = {name for table in _BESIDE for (name,) in db.execute(f"SELECT DISTINCT device FROM {table}")} - {""}
    enrolled = {name for (name,) in db.execute("SELECT device FROM device_key")}
    names = {*refused, *rounds, *stands, *beside, *enrolled}
    if not all(isinstance(name, str) for name in names):
        raise TypeError("a device whose name is no text")
    return {
        device: replace(
            stands.get(device, Record(device)), rounds=rounds.get(device, 0), refused=refused.get(device, "")
        )
        for device in sorted(names)
    }


def _keep(db: Connection, place: str | int, payload: bytes | None) -> None:
    if isinstance(place, str):
        size = 0 if payload is None else len(payload)
        db.execute("UPDATE standing SET payload = ?, received_bytes = ? WHERE device = ?", (payload, size, place))
    elif payload is not None:
        db.execute("UPDATE payload SET bytes = ? WHERE id = ?", (payload, place))
    else:
        db.execute(
            "DELETE FROM contribution WHERE payload = ? AND round = (SELECT round FROM payload WHERE id = ?)",
            (place, place),
        )
        db.execute("DELETE FROM payload WHERE id = ?", (place,))

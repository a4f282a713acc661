"""What stands, in the store: of each device the newest contribution, who is refused, and what operators asked for.

One row for each device; a newer contribution takes the place of the one before in the transaction that commits it, and
SQLite overwrites what it gives up with zeros (`secure_delete`). A device that was withdrawn or forgotten keeps its name
and its generation, so that nothing older comes in again, and no number of its data.

Orders are how an operator's command reaches the aggregator that has the store (`aggregator/orders.py`); they stay as
the record of who asked for what, when, and between which versions of the global state it took effect.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from aggregator.database import Connection, Database, each, upsert
from aggregator.store_schema import COUNT, PUT_GLOBAL
from contract.sqlite import typed

if TYPE_CHECKING:
    from aggregator.store import Tally

__all__ = [
    "CLASSES_TAKEN",
    "WITHDREW",
    "Order",
    "Record",
    "StandingTables",
    "Stands",
    "Taken",
    "classes_forgotten",
    "fleet_records",
    "order_done",
    "orders",
    "put_meta",
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
    "policy_word",
    "class_drift",
    "rollout_device",
    "finding",
)  # what is held of a device beside what it contributed
_HOLD = ("standing", "contribution", "payload", "former", "global", *_BESIDE)  # what is taken out


Taken = dict[str, dict[str, int]]
"""By name of a class, by device: of which generation its rows were taken out. See `StandingTables.classes_taken`."""


@dataclass(frozen=True)
class Stands:
    """What takes the place of what is held of a device.

    Attributes:
        payload: None where it is withdrawn.
    """

    device: str
    generation: int
    payload: bytes | None
    received_bytes: int


@dataclass(frozen=True)
class Order:
    """What somebody asked for; `done_at` and what follows are None until it has taken effect.

    Attributes:
        device: that it is about, or empty.
        detail: the class that it is about; of a roll-out's order, which bundle or stage; of an enrolment, which key.
    """

    id: int
    what: str
    device: str
    who: str
    given_at: float
    done_at: float | None = None
    outcome: str | None = None
    version_before: int | None = None
    version_after: int | None = None
    detail: str = ""

    @property
    def shown(self) -> str:
        """The detail, where a person can do something with it."""
        return "" if self.what in ("invite", "enrol") else self.detail


@dataclass(frozen=True)
class Record:
    """What a store knows of one device.

    Attributes:
        generation: of its standing sums, 0 for none.
        present: whether it is in the standing sums.
        received_bytes, received_at: of these, and when they came, seconds since the epoch.
        rounds: the rounds that it contributed to.
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
        self._to_erase = False
        self.taken_out = 0  # how often a device or a class was, since this was opened

    def meta(self, name: str) -> str | None:
        """A setting that is kept; None where it was never set."""
        with self._disk():
            row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
            return None if row is None else row[0] if isinstance(row[0], str) else memoryview(row[0]).tobytes().decode()

    def set_meta(self, name: str, value: str) -> None:
        with self._transaction() as db:
            put_meta(db, name, value)

    def generations(self) -> dict[str, int]:
        """By device, also of those that were taken out."""
        with self._disk():
            rows = self._db.execute("SELECT device, generation FROM standing").fetchall()
            return dict(typed(row, str, int) for row in rows)

    def payloads(self) -> Iterator[tuple[str, bytes]]:
        """What stands, ordered by device, one at a time."""
        with self._disk():
            yield from each(self._db, "SELECT device, payload FROM standing WHERE payload IS NOT NULL ORDER BY device")

    def records(self) -> Mapping[str, Record]:
        """What is known of each device, by name."""
        with self._disk():
            return fleet_records(self._db)

    def payload(self, device: str) -> bytes | None:
        """What stands of a device."""
        with self._disk():
            row = self._db.execute("SELECT payload FROM standing WHERE device = ?", (device,)).fetchone()
            return None if row is None or row[0] is None else bytes(typed(row, bytes)[0])

    def commit(self, newer: Sequence[Stands], tally: Tally, at: float, taken: Taken | None = None) -> None:
        """Make a batch durable: what takes the place of what, and counters; or none of it. A device that is withdrawn
        is refused from now on, and that the rest is to be done is an order like any other.

        Args:
            at: seconds since the epoch.
            taken: as `classes_taken`, where that has changed.
        """
        with self._transaction() as db:
            if taken is not None:
                put_meta(db, CLASSES_TAKEN, json.dumps(taken))
            db.executemany(
                upsert("standing", "device", "generation", "received_bytes", "received_at", "payload"),
                [(s.device, s.generation, s.received_bytes, at, s.payload) for s in newer],
            )
            for gone in (s.device for s in newer if s.payload is None):
                withdrew(db, gone, at)
            db.executemany(
                COUNT,
                [(round, outcome, messages) for (round, outcome), messages in tally.items()],
            )

    def left_out(self, devices: Iterable[str]) -> None:
        """Of these devices nothing stands any more; they may send again."""
        with self._transaction() as db:
            db.executemany(
                "UPDATE standing SET payload = NULL, received_bytes = 0 WHERE device = ?",
                [(device,) for device in devices],
            )

    def solved(self, parts: Sequence[tuple[int, int, bytes]], digest: str) -> None:
        """A global state was made of what stands; older versions go.

        Args:
            parts: version, number and bytes of each part.
            digest: of what it was made of.
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
        """Remove all that is held of an order's device, and refuse it, together with the global state of what remains
        and the record that it is done: all of it, or nothing.

        Args:
            digest: of what that was made of, where sums stand.
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
            _refuse(db, device, at, reason)
            self._put_global(db, parts)
            if digest is not None:
                put_meta(db, "standing solved", digest)
            order_done(db, order, at, outcome, before, after)
            self._file.changed()
        self._to_erase = True
        self.taken_out += 1

    def classes_forgotten(self) -> tuple[str, ...]:
        """The names of the classes of which nothing is taken, in the order in which they were forgotten."""
        return forgotten_in(self.meta(_CLASSES))

    def classes_taken(self) -> Taken:
        """By name of a class: the devices whose rows of it were taken out, and of which generation they were. Under the
        empty name those of classes that were admitted again."""
        return read_taken(self.meta(CLASSES_TAKEN) or "{}")

    def round_payloads(self) -> Iterator[tuple[int, tuple[int, str, str], bytes]]:
        """What is kept of rounds, one at a time: its number here; round, method and device; and what was sent."""
        with self._disk():
            for number, *key, payload in each(
                self._db,
                "SELECT p.id, c.round, c.method, c.device, p.bytes FROM payload p"
                " JOIN contribution c ON c.round = p.round AND c.payload = p.id ORDER BY p.id",
            ):
                yield number, (key[0], key[1], key[2]), payload

    def round_payload(self, number: int) -> bytes:
        """What is kept of a round under this number."""
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
        """Record which classes are forgotten now, together with what that changes, and that the order is done: all of
        it, or nothing.

        Args:
            taken: as `classes_taken`.
            changed: what stays of what is held: of a device where sums stand, or under a number where there are rounds;
                None for nothing. Drawn one at a time.
            parts, digest: of the global state of what remains, as in `take_out`.
        """
        with self._transaction() as db:
            for where, left in changed:
                _keep(db, where, left)
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
        """Leave nothing readable of what was taken out; False while a reader is in the way."""
        if not self._to_erase:
            return True
        self._to_erase = not self._file.erase((*_HOLD, *self._file.of_devices))
        return not self._to_erase

    # ── who is refused ──────────────────────────────────────────────────────────────────────────────────────────────

    def refused(self) -> dict[str, str]:
        """Why, by device."""
        with self._disk():
            return dict(self._db.execute("SELECT device, reason FROM refused").fetchall())

    def refuse(self, device: str, at: float, reason: str) -> None:
        with self._transaction() as db:
            _refuse(db, device, at, reason)
            self._file.changed()

    def admit(self, device: str) -> bool:
        """Whether it was refused until now."""
        with self._transaction() as db:
            self._file.changed()
            return db.execute("DELETE FROM refused WHERE device = ?", (device,)).rowcount == 1

    # ── orders ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, what: str, who: str, at: float, detail: str) -> None:
        """Record an order that is of no device, as `aggregator/orders.py` does from another process."""
        with self._transaction() as db:
            db.execute(
                "INSERT INTO fleet_order (what, device, who, given_at, detail) VALUES (?, '', ?, ?, ?)",
                (what, who, at, detail),
            )

    def next_order(self, what: str | None = None) -> Order | None:
        """The oldest of what was asked for and has not taken effect; None when nothing is.

        Args:
            what: only such; any when None.
        """
        only, values = ("", ()) if what is None else (" AND what = ?", (what,))
        with self._disk():
            return next(iter(orders(self._db, f"WHERE done_at IS NULL{only}", values, limit=1)), None)

    def done(self, order: Order, at: float, outcome: str, before: int, after: int) -> None:
        """An order has taken effect, or cannot; `outcome` says which, and the versions of the global state."""
        with self._transaction() as db:
            order_done(db, order, at, outcome, before, after)


def withdrew(db: Connection, device: str, at: float) -> None:
    """Part of the transaction in which a device takes out what stands of it."""
    _refuse(db, device, at, WITHDREW)
    db.execute(
        "INSERT INTO fleet_order (what, device, who, given_at) VALUES ('withdraw', ?, 'the device', ?)", (device, at)
    )


def read_taken(value: str) -> Taken:
    """Whose rows of classes were taken out, as `meta` holds it."""
    found = json.loads(value)
    return {name: {device: int(generation) for device, generation in of.items()} for name, of in found.items()}


def with_taken(taken: Taken, name: str, more: Mapping[str, int]) -> Taken:
    """Whose rows of a class were taken out, and of which generation, with further ones."""
    return {**taken, name: {**taken.get(name, {}), **more}}


def forgotten_in(value: str | None) -> tuple[str, ...]:
    """Names of classes, as `meta` holds them."""
    names = [] if value is None else json.loads(value)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("names of classes")
    return tuple(names)


def classes_forgotten(db: Connection) -> tuple[str, ...]:
    """The same of a store that is read beside its aggregator; nothing of what no aggregator wrote."""
    row = db.execute("SELECT value FROM meta WHERE name = ?", (_CLASSES,)).fetchone()
    try:
        return () if row is None else forgotten_in(row[0] if isinstance(row[0], str) else bytes(row[0]).decode())
    except (ValueError, TypeError):
        return ()


def orders(db: Connection, where: str = "", values: Sequence[object] = (), limit: int | None = None) -> list[Order]:
    """The orders of a store, oldest first, `limit` at most."""
    rows = db.execute(
        "SELECT id, what, device, who, given_at, detail, done_at, outcome, version_before, version_after"
        f" FROM fleet_order {where} ORDER BY id{'' if limit is None else f' LIMIT {limit}'}",
        values,
    )
    return [_order(*row) for row in rows.fetchall()]


def _order(
    id: int,
    what: object,
    device: object,
    who: object,
    at: object,
    detail: object,
    done: object,
    outcome: str | None,
    before: int | None,
    after: int | None,
) -> Order:
    """A row, whatever somebody has written into it by hand."""
    what, device, who, detail = (each if isinstance(each, str) else repr(each) for each in (what, device, who, detail))
    given_at, done_at = (float(each) if isinstance(each, int | float) else 0.0 for each in (at, done))
    return Order(id, what, device, who, given_at, None if done is None else done_at, outcome, before, after, detail)


def fleet_records(db: Connection) -> Mapping[str, Record]:
    """What a store knows of each device, by name: of each that it holds anything of, so that each can be forgotten.

    Raises:
        TypeError, ValueError: somebody has written something else there.
    """
    refused = dict(db.execute("SELECT device, reason FROM refused").fetchall())
    rounds = dict(db.execute("SELECT device, count(*) FROM contribution GROUP BY device").fetchall())
    stands = {
        device: Record(device, int(generation), bool(present), int(received_bytes), float(received_at))
        for device, generation, present, received_bytes, received_at in db.execute(
            "SELECT device, generation, payload IS NOT NULL, received_bytes, received_at FROM standing"
        )
    }
    beside = {name for table in _BESIDE for (name,) in db.execute(f"SELECT DISTINCT device FROM {table}")}
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


def order_done(db: Connection, order: Order, at: float, outcome: str, before: int, after: int) -> None:
    """Part of the transaction in which an order takes effect."""
    db.execute(
        "UPDATE fleet_order SET done_at = ?, outcome = ?, version_before = ?, version_after = ? WHERE id = ?",
        (at, outcome, before, after, order.id),
    )


def _keep(db: Connection, where: str | int, left: bytes | None) -> None:
    if isinstance(where, str):
        size = 0 if left is None else len(left)
        db.execute("UPDATE standing SET payload = ?, received_bytes = ? WHERE device = ?", (left, size, where))
    elif left is not None:
        db.execute("UPDATE payload SET bytes = ? WHERE id = ?", (left, where))
    else:
        db.execute(
            "DELETE FROM contribution WHERE payload = ? AND round = (SELECT round FROM payload WHERE id = ?)",
            (where, where),
        )
        db.execute("DELETE FROM payload WHERE id = ?", (where,))


def put_meta(db: Connection, name: str, value: str) -> None:
    """Keep a setting, within a transaction."""
    db.execute(upsert("meta", "name", "value"), (name, value.encode()))


def _refuse(db: Connection, device: str, at: float, reason: str) -> None:
    db.execute(upsert("refused", "device", "since", "reason"), (device, at, reason))

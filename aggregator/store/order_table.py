"""The operators' orders in the store: how an operator's command reaches the aggregator that has the store.

`operator_orders.py` writes an order from another process. The order stays as a record: who asked for what, when, and
between which versions of the global state it took effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protofleet.aggregator.database import Connection, Database

__all__ = ["Order", "OrderTable", "as_run", "order_done", "orders"]


@dataclass(frozen=True)
class Order:
    """An order; `done_at` and the fields after it are None until it has taken effect.

    Attributes:
        device: the device that it is about, or empty.
        detail: the class that it is about; for a roll-out, the bundle or the stage; for an enrolment, the key.
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
        """The detail, if a person can use it."""
        return "" if self.what in ("invite", "enrol") else self.detail


class OrderTable:
    """The orders of an open store."""

    def __init__(self, file: Database) -> None:
        self._db, self._disk, self._transaction = file.connection, file.reading, file.transaction

    def ask(self, what: str, who: str, at: float, detail: str) -> None:
        """Record an order of no device, as `aggregator/store/operator_orders.py` does from another process."""
        with self._transaction() as db:
            db.execute(
                "INSERT INTO fleet_order (what, device, who, given_at, detail) VALUES (?, '', ?, ?, ?)",
                (what, who, at, detail),
            )

    def next_order(self, what: str | None = None) -> Order | None:
        """The oldest order that has not taken effect; None for none.

        Args:
            what: only orders of this kind; any kind when None.
        """
        only, values = ("", ()) if what is None else (" AND what = ?", (what,))
        with self._disk():
            return next(iter(orders(self._db, f"WHERE done_at IS NULL{only}", values, limit=1)), None)

    def is_restored_as(self, run: bytes) -> bool:
        """Whether `fleet restore` made this run (4 bytes) of the store: the newest of its restorations says so."""
        with self._disk():
            newest = self._db.execute(
                "SELECT outcome FROM fleet_order WHERE what = 'restore' ORDER BY id DESC LIMIT 1"
            ).fetchone()
        return newest is not None and str(newest[0]).endswith(as_run(run))

    def done(self, order: Order, at: float, outcome: str, before: int, after: int) -> None:
        """Record that an order has taken effect, or cannot: its outcome, and the versions of the global state."""
        with self._transaction() as db:
            order_done(db, order, at, outcome, before, after)


def as_run(run: bytes) -> str:
    """How the outcome of a `restore` ends, where it made this run (4 bytes): by these words it is found again."""
    return f"as run {run.hex()}"


def orders(db: Connection, condition: str = "", values: Sequence[object] = (), limit: int | None = None) -> list[Order]:
    """The orders of a store, oldest first, `limit` at most."""
    rows = db.execute(
        "SELECT id, what, device, who, given_at, detail, done_at, outcome, version_before, version_after"
        f" FROM fleet_order {condition} ORDER BY id{'' if limit is None else f' LIMIT {limit}'}",
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


def order_done(db: Connection, order: Order, at: float, outcome: str, before: int, after: int) -> None:
    """Part of the transaction in which an order takes effect."""
    db.execute(
        "UPDATE fleet_order SET done_at = ?, outcome = ?, version_before = ?, version_after = ? WHERE id = ?",
        (at, outcome, before, after, order.id),
    )

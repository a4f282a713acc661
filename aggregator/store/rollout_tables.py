"""The roll-out in the store: the present one, the bytes of its bundle, and the devices' reports.

    coming ──its bundle is whole, and the order given──▶ given ──taken up──▶ running, halted, complete ──▶ ended

A bundle comes in as rows of `PIECE_BYTES`, a few in each transaction. So the aggregator of the store never waits long
for the disk. A transfer that is interrupted has begun no roll-out, and the next one takes its place. Once an aggregator
has taken the order up, the row belongs to the state machine (`aggregator/rollout/rollout_stages.py`). When a roll-out
ends, its reports are deleted at once, and its bundle a few rows at a time (`sweep`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import astuple
from typing import get_args

from protofleet.aggregator.database import AnyPlace, Connection, Database, beside, place_of, upsert
from protofleet.aggregator.rollout.rollout_stages import Plan, Rollout, State
from protofleet.aggregator.store.order_table import Order, orders
from protofleet.aggregator.store.schema import KIND
from protofleet.contract.errors import UsageError
from protofleet.contract.wire.rollout_messages import RolloutReport

__all__ = ["PIECE_BYTES", "RolloutTables", "give_rollout", "plan_in", "rollout_in", "said_in"]

PIECE_BYTES = 65_536
_ROWS_AT_ONCE = 16  # 1 MiB: nobody waits for the disk longer than that takes


class RolloutTables:
    """These tables of an open store."""

    def __init__(self, file: Database) -> None:
        self._file = file
        self._db, self._disk, self._transaction = file.connection, file.reading, file.transaction
        self._to_sweep = True

    def load(self) -> Rollout | None:
        """The roll-out that was taken up and has not ended, with its reports; None for none."""
        with self._disk():
            return rollout_in(self._db)

    def given(self, order: Order) -> Rollout | None:
        """The roll-out that an order begins, without reports; None for none, or when its bundle is not whole."""
        with self._disk():
            rollout = _read_rollout(self._db, "WHERE given_by = ? AND state IN ('given', 'running')", (order.id,))
            if rollout is None:
                return None
            (stored_bytes,) = self._db.execute(
                "SELECT coalesce(sum(length(bytes)), 0) FROM rollout_piece WHERE sha256 = ?", (rollout.plan.sha256,)
            ).fetchone()
        return rollout if stored_bytes == rollout.plan.size_bytes else None

    def begin(self, order: Order, rollout: Rollout, at: float) -> None:
        """Put the given roll-out in the place of the one before."""
        with self._transaction() as db:
            db.execute("DELETE FROM rollout WHERE id < (SELECT id FROM rollout WHERE given_by = ?)", (order.id,))
            db.execute("DELETE FROM rollout_device")
            db.execute("UPDATE rollout SET state = 'running' WHERE given_by = ?", (order.id,))
            _put(db, rollout)
            _say(db, rollout.told, at)
            self._file.changed()
        self._to_sweep = True

    def refuse(self, order: Order) -> None:
        """Delete the given roll-out and its bundle: it cannot begin."""
        with self._transaction() as db:
            db.execute("UPDATE rollout SET state = 'ended' WHERE given_by = ? AND state = 'given'", (order.id,))
        self._to_sweep = True

    def keep(self, rollout: Rollout, devices: Iterable[str], at: float) -> None:
        """Make durable how far the roll-out is, and the reports of these devices.

        Args:
            at: seconds since the epoch.
        """
        with self._transaction() as db:
            self._file.changed()
            _put(db, rollout)
            _say(db, {device: rollout.told[device] for device in devices if device in rollout.told}, at)

    def end(self) -> None:
        """End the roll-out."""
        with self._transaction() as db:
            db.execute(f"UPDATE rollout SET state = 'ended' WHERE {_LIVE}", get_args(State))
            db.execute("DELETE FROM rollout_device")
            self._file.changed()
        self._to_sweep = True

    def forget(self, device: str) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM rollout_device WHERE device = ?", (device,))

    def sweep(self) -> None:
        """Delete a few rows of bundles that are no longer rolled out."""
        if not self._to_sweep:
            return
        with self._transaction() as db:
            cursor = db.execute(
                "DELETE FROM rollout_piece WHERE (sha256, number) IN (SELECT sha256, number FROM rollout_piece"
                " WHERE sha256 NOT IN (SELECT sha256 FROM rollout WHERE state != 'ended') LIMIT ?)",
                (_ROWS_AT_ONCE,),
            )
            self._to_sweep = cursor.rowcount == _ROWS_AT_ONCE

    def read(self, sha256: bytes, offset: int, length: int) -> bytes:
        """`length` bytes of a bundle from `offset` on, fewer at its end."""
        first, last = offset // PIECE_BYTES, (offset + length - 1) // PIECE_BYTES
        with self._disk():
            rows = self._db.execute(
                "SELECT bytes FROM rollout_piece WHERE sha256 = ? AND number BETWEEN ? AND ? ORDER BY number",
                (sha256, first, last),
            ).fetchall()
            whole = b"".join(row[0] for row in rows)
        begin = offset - first * PIECE_BYTES
        return whole[begin : begin + length]


_LIVE = f"state IN ({', '.join('?' for _ in get_args(State))})"


def rollout_in(db: Connection) -> Rollout | None:
    """The roll-out of a store that was taken up and has not ended; None for none."""
    rollout = plan_in(db)
    if rollout is not None:
        rows = db.execute("SELECT device, told FROM rollout_device ORDER BY told_at, device")
        rollout.told = {device: RolloutReport.read(report) if report else None for device, report in rows}
    return rollout


def plan_in(db: Connection) -> Rollout | None:
    """As `rollout_in`, without the devices' reports."""
    return _read_rollout(db, f"WHERE {_LIVE}", get_args(State))


def said_in(db: Connection) -> Mapping[str, str]:
    """Each device's report on the roll-out, as it was sent; empty for none yet."""
    rows = db.execute("SELECT device, told FROM rollout_device").fetchall()
    return {device: report if isinstance(report, str) else repr(report) for device, report in rows}


def give_rollout(store: AnyPlace, blob: bytes, plan: Plan, stages: tuple[float, ...], who: str) -> Order:
    """Put a bundle into a store, and the order to roll it out.

    Args:
        blob: the bundle's file.
        stages: fractions, rising; at least one.
        who: the person who asks, for the record.

    Raises:
        StoreError: the disk refuses; then no roll-out was given.
        UsageError: another one was given meanwhile; this one was not.
    """
    with beside(store, KIND) as db:
        db.execute("UPDATE rollout SET state = 'ended' WHERE state IN ('coming', 'given')")  # their ids stay theirs
        id = _insert(db, Rollout(plan, stages[0], stages[1:], time.time()))
    rows = [
        (plan.sha256, n, blob[start : start + PIECE_BYTES]) for n, start in enumerate(range(0, len(blob), PIECE_BYTES))
    ]
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        with beside(store, KIND) as db:
            db.executemany(upsert("rollout_piece", "sha256, number", "bytes"), rows[start : start + _ROWS_AT_ONCE])
    detail = f"version {plan.version}, sha256 {plan.sha256.hex()[:12]}…{f', to fleet {plan.fleet}' * bool(plan.fleet)}"
    with beside(store, KIND) as db:
        order_row = db.execute(
            "INSERT INTO fleet_order (what, device, who, given_at, detail) VALUES ('rollout', '', ?, ?, ?)"
            " RETURNING id",
            (who, time.time(), detail),
        ).fetchone()
        cursor = db.execute(
            "UPDATE rollout SET state = 'given', given_by = ? WHERE id = ? AND state = 'coming'", (order_row[0], id)
        )
        if not cursor.rowcount:
            raise UsageError(
                f"--store {place_of(store)}", expected="one roll-out given at a time", got="another one meanwhile"
            )
        (order,) = orders(db, "WHERE id = ?", order_row)
    return order


def _read_rollout(db: Connection, condition: str, values: tuple[object, ...]) -> Rollout | None:
    row = db.execute(
        "SELECT sha256, version, size_bytes, fleet, soak_s, healthy, fraction, stages, since, state, reason, forgiven"
        f" FROM rollout {condition} ORDER BY id DESC LIMIT 1",
        values,
    ).fetchone()
    if row is None:
        return None
    *plan, fraction, stages, since, state, reason, forgiven = row
    known_state: State = next((name for name in get_args(State) if name == state), "running")
    return Rollout(Plan(*plan), fraction, tuple(json.loads(stages)), since, known_state, reason, forgiven)


def _insert(db: Connection, rollout: Rollout) -> int:
    plan = rollout.plan
    cursor = db.execute(
        "INSERT INTO rollout (sha256, version, size_bytes, fleet, soak_s, healthy, fraction, stages, since, state,"
        " reason, forgiven) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 'coming', '', 0) RETURNING id",
        (*astuple(plan), rollout.fraction, json.dumps(rollout.stages), rollout.since),
    )
    return int(cursor.fetchone()[0])


def _put(db: Connection, rollout: Rollout) -> None:
    """Write where the roll-out stands that was taken up."""
    stands = (rollout.fraction, json.dumps(rollout.stages), rollout.since, rollout.state, rollout.reason)
    db.execute(
        "UPDATE rollout SET fraction = ?, stages = ?, since = ?, state = ?, reason = ?, forgiven = ?"
        f" WHERE id = (SELECT max(id) FROM rollout WHERE {_LIVE})",
        (*stands, rollout.forgiven, *get_args(State)),
    )


def _say(db: Connection, reports: Mapping[str, RolloutReport | None], at: float) -> None:
    db.executemany(
        upsert("rollout_device", "device", "told", "told_at"),
        [(device, "" if report is None else report.text, at) for device, report in reports.items()],
    )

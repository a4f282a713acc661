"""The roll-out in the store: the one there is, the bytes of its bundle, and what devices said of it.

    coming ──its bundle is whole, and the order given──▶ given ──taken up──▶ running, halted, complete ──▶ ended

A bundle comes in as rows of `PIECE_BYTES`, a few in each transaction, so that the aggregator that has the store never
waits long for the disk. Whatever is interrupted on the way has begun no roll-out, and the next one takes its place.
Once an aggregator has taken the order up, the row is the machine's (`aggregator/rollout.py`). When a roll-out ends,
what was said of it goes at once, and its bundle a few rows at a time (`sweep`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import astuple
from typing import get_args

from aggregator.database import AnyPlace, Connection, Database, beside, place_of, upsert
from aggregator.rollout import Plan, Rollout, State
from aggregator.standing_store import Order, orders
from aggregator.store_schema import KIND
from contract.errors import UsageError
from contract.offers import Told

__all__ = ["PIECE_BYTES", "RolloutTables", "give_rollout", "rollout_in", "said_in"]

PIECE_BYTES = 65_536
_ROWS_AT_ONCE = 16  # 1 MiB: nobody waits for the disk longer than that takes


class RolloutTables:
    """These tables of an open store."""

    def __init__(self, file: Database) -> None:
        self._file = file
        self._db, self._disk, self._transaction = file.connection, file.reading, file.transaction
        self._to_sweep = True

    def load(self) -> Rollout | None:
        """The roll-out that was taken up and has not ended, with what was said of it; None where there is none."""
        with self._disk():
            return rollout_in(self._db)

    def given(self, order: Order) -> Rollout | None:
        """The roll-out that an order begins, of which nobody said anything; None where there is none, or its bundle is
        not whole."""
        with self._disk():
            made = _made(self._db, "WHERE given_by = ? AND state IN ('given', 'running')", (order.id,))
            if made is None:
                return None
            (there,) = self._db.execute(
                "SELECT coalesce(sum(length(bytes)), 0) FROM rollout_piece WHERE sha256 = ?", (made.plan.sha256,)
            ).fetchone()
        return made if there == made.plan.size_bytes else None

    def begin(self, order: Order, rollout: Rollout, at: float) -> None:
        """What was given takes the place of whatever was rolled out before."""
        with self._transaction() as db:
            db.execute("DELETE FROM rollout WHERE id < (SELECT id FROM rollout WHERE given_by = ?)", (order.id,))
            db.execute("DELETE FROM rollout_device")
            db.execute("UPDATE rollout SET state = 'running' WHERE given_by = ?", (order.id,))
            _put(db, rollout)
            _say(db, rollout.told, at)
            self._file.changed()
        self._to_sweep = True

    def refuse(self, order: Order) -> None:
        """What was given cannot be: its bundle goes."""
        with self._transaction() as db:
            db.execute("UPDATE rollout SET state = 'ended' WHERE given_by = ? AND state = 'given'", (order.id,))
        self._to_sweep = True

    def keep(self, rollout: Rollout, said: Iterable[str], at: float) -> None:
        """Make durable where it stands, and what these devices said.

        Args:
            at: seconds since the epoch.
        """
        with self._transaction() as db:
            self._file.changed()
            _put(db, rollout)
            _say(db, {device: rollout.told[device] for device in said if device in rollout.told}, at)

    def end(self) -> None:
        """Nothing is rolled out any more."""
        with self._transaction() as db:
            db.execute(f"UPDATE rollout SET state = 'ended' WHERE {_LIVE}", get_args(State))
            db.execute("DELETE FROM rollout_device")
            self._file.changed()
        self._to_sweep = True

    def forget(self, device: str) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM rollout_device WHERE device = ?", (device,))

    def sweep(self) -> None:
        """Take out a little of what is left of bundles that are rolled out no longer."""
        if not self._to_sweep:
            return
        with self._transaction() as db:
            gone = db.execute(
                "DELETE FROM rollout_piece WHERE (sha256, number) IN (SELECT sha256, number FROM rollout_piece"
                " WHERE sha256 NOT IN (SELECT sha256 FROM rollout WHERE state != 'ended') LIMIT ?)",
                (_ROWS_AT_ONCE,),
            )
            self._to_sweep = gone.rowcount == _ROWS_AT_ONCE

    def read(self, sha256: bytes, offset: int, length: int) -> bytes:
        """So many bytes of a bundle from there on, fewer at its end."""
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
    """The roll-out of a store that was taken up and has not ended; None where there is none."""
    made = _made(db, f"WHERE {_LIVE}", get_args(State))
    if made is not None:
        said = db.execute("SELECT device, told FROM rollout_device ORDER BY told_at, device")
        made.told = {device: Told.read(told) if told else None for device, told in said}
    return made


def said_in(db: Connection) -> Mapping[str, str]:
    """What each device said of the roll-out, as it said it; empty for nothing yet."""
    rows = db.execute("SELECT device, told FROM rollout_device").fetchall()
    return {device: told if isinstance(told, str) else repr(told) for device, told in rows}


def give_rollout(store: AnyPlace, blob: bytes, plan: Plan, stages: tuple[float, ...], who: str) -> Order:
    """Put a bundle into a store, and the order to roll it out.

    Args:
        blob: the bundle's file.
        stages: fractions, rising; one at least.
        who: asks for it, for the record.

    Raises:
        StoreError: the disk refuses; then no roll-out was given.
        UsageError: another one was given meanwhile; this one was not.
    """
    with beside(store, KIND) as db:
        db.execute("UPDATE rollout SET state = 'ended' WHERE state IN ('coming', 'given')")  # their ids stay theirs
        id = _insert(db, Rollout(plan, stages[0], stages[1:], time.time()))
    rows = [(plan.sha256, n, blob[at : at + PIECE_BYTES]) for n, at in enumerate(range(0, len(blob), PIECE_BYTES))]
    for at in range(0, len(rows), _ROWS_AT_ONCE):
        with beside(store, KIND) as db:
            db.executemany(upsert("rollout_piece", "sha256, number", "bytes"), rows[at : at + _ROWS_AT_ONCE])
    detail = f"version {plan.version}, sha256 {plan.sha256.hex()[:12]}…{f', to fleet {plan.fleet}' * bool(plan.fleet)}"
    with beside(store, KIND) as db:
        made = db.execute(
            "INSERT INTO fleet_order (what, device, who, given_at, detail) VALUES ('rollout', '', ?, ?, ?)"
            " RETURNING id",
            (who, time.time(), detail),
        ).fetchone()
        came = db.execute(
            "UPDATE rollout SET state = 'given', given_by = ? WHERE id = ? AND state = 'coming'", (made[0], id)
        )
        if not came.rowcount:
            raise UsageError(
                f"--store {place_of(store)}", expected="one roll-out given at a time", got="another one meanwhile"
            )
        (order,) = orders(db, "WHERE id = ?", made)
    return order


def _made(db: Connection, where: str, values: tuple[object, ...]) -> Rollout | None:
    row = db.execute(
        "SELECT sha256, version, size_bytes, fleet, soak_s, healthy, fraction, stages, since, state, reason, forgiven"
        f" FROM rollout {where} ORDER BY id DESC LIMIT 1",
        values,
    ).fetchone()
    if row is None:
        return None
    *plan, fraction, stages, since, state, reason, forgiven = row
    known: State = next((each for each in get_args(State) if each == state), "running")
    return Rollout(Plan(*plan), fraction, tuple(json.loads(stages)), since, known, reason, forgiven)


def _insert(db: Connection, rollout: Rollout) -> int:
    plan = rollout.plan
    made = db.execute(
        "INSERT INTO rollout (sha256, version, size_bytes, fleet, soak_s, healthy, fraction, stages, since, state,"
        " reason, forgiven) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 'coming', '', 0) RETURNING id",
        (*astuple(plan), rollout.fraction, json.dumps(rollout.stages), rollout.since),
    )
    return int(made.fetchone()[0])


def _put(db: Connection, rollout: Rollout) -> None:
    """Write where the roll-out stands that was taken up."""
    stands = (rollout.fraction, json.dumps(rollout.stages), rollout.since, rollout.state, rollout.reason)
    db.execute(
        "UPDATE rollout SET fraction = ?, stages = ?, since = ?, state = ?, reason = ?, forgiven = ?"
        f" WHERE id = (SELECT max(id) FROM rollout WHERE {_LIVE})",
        (*stands, rollout.forgiven, *get_args(State)),
    )


def _say(db: Connection, told: Mapping[str, Told | None], at: float) -> None:
    db.executemany(
        upsert("rollout_device", "device", "told", "told_at"),
        [(device, "" if each is None else each.text, at) for device, each in told.items()],
    )

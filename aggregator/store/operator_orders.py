"""Operators' orders to the aggregator of a store: a command writes them into the store, the aggregator takes them up.

    forget DEVICE    all data of the device is removed, the global state is made again without it, and the device is
                     refused
    remove DEVICE    the device is refused from now on; its data stays
    admit DEVICE     the device is no longer refused
    invite DEVICE    a one-time token enrols the device with its key; enrol DEVICE: with the given key
    revoke DEVICE    nothing more that the device's key has signed is taken
    forget class     the data of a class is removed, and no device's samples of it are summed any more
    admit class      samples of the class are summed again
    rollback         devices get the state from before the last rounds, or from before a device's first round
    pause, resume    nothing new is made of what devices send, until resume
    rollout          a bundle is offered to devices in stages; rollout-stage, rollout-halt, rollout-resume, rollout-end
                     say how it continues (`aggregator/rollout/rollout_stages.py`)
    open-round       a round is due now, where rounds come by schedule or by news
    close-round      the open round ends with what it has

An order is durable when `give` returns. A running aggregator takes it up within about a second. Otherwise the next
aggregator that is started on the store takes it up. `withdraw` is an order that a device gives itself, in a
contribution.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from protofleet.aggregator.database import AnyPlace, beside, bring_up, read_only
from protofleet.aggregator.store.meta_table import MetaTable
from protofleet.aggregator.store.order_table import Order, orders
from protofleet.aggregator.store.refused_devices import RefusedDevices
from protofleet.aggregator.store.schema import KIND
from protofleet.contract.errors import UsageError
from protofleet.contract.wire.messages import ADMITS
from protofleet.contract.wire.topics import check_device

__all__ = [
    "FORGOTTEN",
    "LOOK_S",
    "OF_A_CLASS",
    "OF_A_DEVICE",
    "REMOVED",
    "Obeyed",
    "await_done",
    "carry_out",
    "give",
    "record",
    "refusal",
    "unfit",
]

OF_A_DEVICE = ("forget", "remove", "admit", "invite", "enrol", "revoke")
OF_A_CLASS = ("forget class", "admit class")
FORGOTTEN = "it was forgotten"
REMOVED = "it was removed"
LOOK_S = 0.5  # between an aggregator's two looks for orders
_ASK_S = 0.1


@dataclass(frozen=True)
class Obeyed:
    """An order has taken effect, or cannot. The caller publishes the state as it is now."""

    order: Order
    outcome: str
    version: int


def carry_out(order: Order, devices: RefusedDevices, meta: MetaTable, refused: dict[str, str], at: float) -> str | None:
    """Carry out an order that is the same with and without rounds; returns its outcome, None for another order.

    Args:
        refused: the reason for each refused device; changed together with the store.
        at: seconds since the epoch.
    """
    if order.what == "admit":
        refused.pop(order.device, None)
        return "done" if devices.admit(order.device) else "done: it was not refused"
    if order.what == "remove":
        devices.refuse(order.device, at, REMOVED)
        refused[order.device] = REMOVED
        return "done"
    if order.what in ("pause", "resume"):
        meta.put("paused", "yes" if order.what == "pause" else "no")
        return "done"
    return None


def unfit(order: Order) -> str:
    """Why an order cannot be carried out, as its outcome; empty when it can.

    `give` writes no such order. But a program that can write the store may write anything.
    """
    if order.what not in (*OF_A_DEVICE, "withdraw"):
        return ""
    try:
        check_device(order.device, "DEVICE")
    except UsageError as error:
        return f"refused: {error}"
    return ""


def refusal(device: str, refused: Mapping[str, str]) -> str:
    """Why nothing of a device is taken, and what helps; empty for a device that is not refused."""
    reason = refused.get(device, "")
    return f"{reason}; fleet admit {device} {ADMITS}" if reason else ""


def give(path: AnyPlace, what: str, device: str, who: str, *, detail: str = "") -> tuple[Order, bool]:
    """Record an order; returns the recorded order, and whether a running aggregator will take it up.

    Args:
        device: for the orders in `OF_A_DEVICE`; else empty.
        who: the person who asks, for the record.
        detail: the class's name, for the orders in `OF_A_CLASS`; the bundle or the stage, for orders of a roll-out.

    Raises:
        StoreError: there is no such store, or the disk refuses; then nothing was recorded.
        UsageError: the path is no store, or a store of a newer version, or the device id is invalid.
    """
    if what in OF_A_DEVICE:
        check_device(device, "DEVICE")  # before anything is opened
    running = bring_up(path, KIND)
    return record(path, what, device, who, detail=detail), running


def record(path: AnyPlace, what: str, device: str, who: str, *, detail: str = "") -> Order:
    """As `give`, of a store that is of the present version: also within the process that has it.

    Raises:
        StoreError, UsageError: as `give`.
    """
    if what in OF_A_DEVICE:
        check_device(device, "DEVICE")
    with beside(path, KIND) as db:
        cursor = db.execute(
            "INSERT INTO fleet_order (what, device, who, given_at, detail) VALUES (?, ?, ?, ?, ?) RETURNING id",
            (what, device, _text(who), time.time(), _text(detail)),
        )
        (order,) = orders(db, "WHERE id = ?", cursor.fetchone())
    return order


def _text(text: str) -> str:
    """What a database takes as text: a user's name, or a word of a command line, may hold bytes that are none."""
    return text.encode(errors="backslashreplace").decode()


def await_done(path: AnyPlace, order: Order, timeout_s: float) -> Order:
    """The order after it has taken effect, or as it stands after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while True:
        with read_only(path, KIND) as db:
            (newest,) = orders(db, "WHERE id = ?", (order.id,))
        if newest.done_at is not None or time.monotonic() >= deadline:
            return newest
        time.sleep(_ASK_S)

"""What an operator asks of the aggregator that has a store: written into the store, taken up by whoever runs on it.

    forget DEVICE    all that is held of it goes, what comes back is made again of what remains, and it is refused
    remove DEVICE    it is refused from now on; what it gave stays
    admit DEVICE     it is refused no longer
    invite DEVICE    a one-time token enrols it with its key; enrol DEVICE: with this key
    revoke DEVICE    nothing more that its key has signed is taken
    forget class     what is held of a class goes, and no device's samples of it are summed any more
    admit class      they are again
    rollback        devices get what they had before the last rounds, or before a device's first
    pause, resume    nothing new is made of what devices send, until it goes on
    rollout          a bundle is offered to devices in stages; rollout-stage, rollout-halt, rollout-resume, rollout-end
                     say how it goes on (`aggregator/rollout.py`)
    open-round       a round is due now, where rounds come by schedule or by news
    close-round      the open round ends with what it has

An order is durable when `give` returns. An aggregator that runs takes it up within about a second, otherwise the next
one that is started on the store does. `withdraw` is an order that a device gives by itself, in a contribution.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from aggregator.database import AnyPlace, beside, bring_up, read_only
from aggregator.standing_store import Order, StandingTables, orders
from aggregator.store_schema import KIND
from contract.errors import UsageError
from contract.messages import ADMITS
from contract.topics import check_device

__all__ = [
    "FORGOTTEN",
    "LOOK_S",
    "OF_A_CLASS",
    "OF_A_DEVICE",
    "REMOVED",
    "Obeyed",
    "await_done",
    "give",
    "refusal",
    "settle",
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
    """An order has taken effect, or cannot; publish what there is now."""

    order: Order
    outcome: str
    version: int


def settle(order: Order, tables: StandingTables, refused: dict[str, str], at: float) -> str | None:
    """Do what an order asks for that is the same with and without rounds; what became of it, None for another order.

    Args:
        refused: why, by device; changed as the store is.
        at: seconds since the epoch.
    """
    if order.what == "admit":
        refused.pop(order.device, None)
        return "done" if tables.admit(order.device) else "done: it was not refused"
    if order.what == "remove":
        tables.refuse(order.device, at, REMOVED)
        refused[order.device] = REMOVED
        return "done"
    if order.what in ("pause", "resume"):
        tables.set_meta("paused", "yes" if order.what == "pause" else "no")
        return "done"
    return None


def unfit(order: Order) -> str:
    """Why nothing can be done with an order, as its outcome; empty where something can. `give` writes none of these,
    but who can write the store may write anything."""
    if order.what not in (*OF_A_DEVICE, "withdraw"):
        return ""
    try:
        check_device(order.device, "DEVICE")
    except UsageError as error:
        return f"refused: {error}"
    return ""


def refusal(device: str, refused: Mapping[str, str]) -> str:
    """Why nothing of a device is taken, and what helps; empty where it is."""
    why = refused.get(device, "")
    return f"{why}; fleet admit {device} {ADMITS}" if why else ""


def give(path: AnyPlace, what: str, device: str, who: str, *, detail: str = "") -> tuple[Order, bool]:
    """Record an order; what was recorded, and whether an aggregator runs that will take it up.

    Args:
        device: of the orders `OF_A_DEVICE`, else empty.
        who: asks for it, for the record.
        detail: the class's name, of those `OF_A_CLASS`; which bundle or stage, of a roll-out's.

    Raises:
        StoreError: there is no such store, or the disk refuses; then nothing was recorded.
        UsageError: it is no store, of a newer version, or the id is none.
    """
    if what in OF_A_DEVICE:
        check_device(device, "DEVICE")
    running = bring_up(path, KIND)
    with beside(path, KIND) as db:
        found = db.execute(
            "INSERT INTO fleet_order (what, device, who, given_at, detail) VALUES (?, ?, ?, ?, ?) RETURNING id",
            (what, device, _text(who), time.time(), _text(detail)),
        )
        (made,) = orders(db, "WHERE id = ?", found.fetchone())
    return made, running


def _text(given: str) -> str:
    """What a database takes as text: a user's name, or a word of a command line, may hold bytes that are none."""
    return given.encode(errors="backslashreplace").decode()


def await_done(path: AnyPlace, order: Order, timeout_s: float) -> Order:
    """The order as it stands once it has taken effect, or after so many seconds."""
    deadline = time.monotonic() + timeout_s
    while True:
        with read_only(path, KIND) as db:
            (found,) = orders(db, "WHERE id = ?", (order.id,))
        if found.done_at is not None or time.monotonic() >= deadline:
            return found
        time.sleep(_ASK_S)

"""Rollback: the global state from before the last rounds, published under a higher version.

Beside the newest global state the store keeps the states that the newest `KEPT` rounds began with. `fleet rollback`
does this:

1. One of these states is what devices get next. They take it up because its version is higher, as any other.
2. The contributions to the rounds that are taken back are removed, with their keys and counters, so that nothing is
   made of them again. The record says that the rounds were taken back.

Weights that devices trained with the poisoned state belong to the devices, and stay.

A forgotten device or class is in the earlier states as well. So forgetting removes these states; no rollback can go
past it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from protofleet.aggregator.closing.forgetting import none_of
from protofleet.aggregator.store.durable_store import Store, global_parts
from protofleet.aggregator.store.order_table import Order
from protofleet.aggregator.store.records import RoundRecord
from protofleet.contract.wire.global_state import GlobalState

__all__ = ["Back", "roll_back"]


@dataclass(frozen=True)
class Back:
    """What became of it.

    Attributes:
        state: what devices get now.
        rounds: that were taken back.
        outcome: for the record.
    """

    state: GlobalState
    rounds: tuple[int, ...]
    outcome: str


def roll_back(store: Store, order: Order, state: GlobalState, at: float) -> Back:
    """Do what an order asks for, and record it: all of it, or nothing where it is refused.

    Args:
        order: of a device, whose rounds are taken back and all after them, or of a number of rounds (`detail`).
        state: the newest one.
        at: seconds since the epoch.
    """
    closed = [record for record in store.rounds() if record.closed and not record.taken_back]
    rounds = _rounds_of(order, closed)
    if isinstance(rounds, str):
        return _refused(store, order, state, at, rounds)
    restorable = store.rollback.kept()
    if rounds[0] not in restorable:
        reach = (
            f"the states kept reach back to before round {min(restorable)}"
            if restorable
            else "no earlier state is kept"
        )
        return _refused(store, order, state, at, f"{reach}, asked was before round {rounds[0]}")
    before = store.rollback.before(rounds[0], store.run)
    emptied = {kind: none_of(rows) for kind, rows in state.rows.items()}  # what there was not is told to be gone
    round = before.round or state.round  # of no round is nothing that travels
    newer = replace(before, version=state.version + 1, round=round, rows=emptied | dict(before.rows))
    outcome = f"done: as before round {rounds[0]}, {len(rounds)} taken back"
    store.rollback.take_back(order, rounds, global_parts(newer), at, state.version, newer.version, outcome)
    store.standing.taken_out += 1
    return Back(newer, rounds, outcome)


def _rounds_of(order: Order, closed: Sequence[RoundRecord]) -> tuple[int, ...] | str:
    """The rounds to take back, rising; or why there are none."""
    numbers = [record.number for record in closed]
    if order.device:
        first = next((record.number for record in closed if order.device in record.uplink_bytes), None)
        if first is None:
            return f"{order.device} contributed to no closed round"
        return tuple(number for number in numbers if number >= first)
    if not order.detail.isascii() or not order.detail.isdigit() or int(order.detail) < 1:
        return f"a number of rounds, got {order.detail[:40]!r}"
    if int(order.detail) > len(numbers):
        return f"{order.detail} closed rounds, there are {len(numbers)}"
    return tuple(numbers[-int(order.detail) :])


def _refused(store: Store, order: Order, state: GlobalState, at: float, reason: str) -> Back:
    outcome = f"refused: {reason}"
    store.orders.done(order, at, outcome, state.version, state.version)
    return Back(state, (), outcome)

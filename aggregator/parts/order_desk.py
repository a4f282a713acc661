"""Operators' orders as a running coordinator finds them, and those that every kind carries out in the same way."""

from __future__ import annotations

from protofleet.aggregator.enrolment.gate import Gate
from protofleet.aggregator.merging.forgotten_classes import no_such_class
from protofleet.aggregator.parts.exclusions import Exclusions
from protofleet.aggregator.parts.rollout_coordinator import RolloutCoordinator
from protofleet.aggregator.store.durable_store import Store
from protofleet.aggregator.store.operator_orders import LOOK_S, OF_A_CLASS, carry_out, unfit
from protofleet.aggregator.store.order_table import Order

__all__ = ["OrderDesk"]


class OrderDesk:
    """Of one store.

    Args:
        now: seconds of a steady clock.

    Attributes:
        look_at: when the store is looked into next, seconds of that clock.
        paused: whether nothing new is made of what devices send.
    """

    def __init__(
        self,
        store: Store,
        labels: tuple[str, ...],
        exclusions: Exclusions,
        gate: Gate,
        rollouts: RolloutCoordinator,
        now: float,
    ) -> None:
        self._store, self._labels, self._exclusions = store, labels, exclusions
        self._gate, self._rollouts = gate, rollouts
        self.look_at = now
        self.paused = store.meta.get("paused") == "yes"

    def next(self, now: float) -> Order | None:
        """What an operator asked for and nobody has done yet, looked for now and then."""
        if now < self.look_at:
            return None
        order = self._store.orders.next_order()
        if order is None:
            self.look_at = now + LOOK_S
            self._store.standing.erase()
        return order

    def unfit(self, order: Order) -> str:
        """Why nothing can be done with an order, as its outcome; empty where something can."""
        if order.what in OF_A_CLASS and order.detail not in self._labels:
            return no_such_class(order.detail, self._labels)
        return unfit(order)

    def carry_out(self, order: Order, wall: float) -> str | None:
        """Do what an order asks for that is the same for every kind; its outcome, None for another order."""
        obeyed = self._gate.obey(order, wall) or self._rollouts.obey(order, wall)
        refused = self._exclusions.refused
        if obeyed is None:
            obeyed = carry_out(order, self._store.refused_devices, self._store.meta, refused, wall)
        if order.device in refused:
            self._rollouts.forget(order.device)
        self.paused = self._store.meta.get("paused") == "yes"
        return obeyed

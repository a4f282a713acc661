"""The events of a fleet where sums stand: heads made, orders done, how many devices are there."""

from __future__ import annotations

from collections.abc import Sequence

from protofleet.aggregator.coordinators.standing_coordinator import StandingCoordinator
from protofleet.aggregator.monitoring import events
from protofleet.aggregator.parts.steps import CoordinatorStep, Solved
from protofleet.aggregator.rollout.rollout_stages import Halted, Moved, Widened
from protofleet.aggregator.store.operator_orders import Obeyed

__all__ = ["StandingEvents", "moved", "obeyed"]


class StandingEvents:
    """Turns the coordinator's steps and state into events.

    Args:
        listener: takes each event.
    """

    def __init__(self, coordinator: StandingCoordinator, listener: events.Listener) -> None:
        self._core, self._listener = coordinator, listener
        self._counts: tuple[int, int] | None = None

    def resumed(self) -> None:
        """What stood in the store stands again."""
        self.waits(0.0)

    def committed(self) -> None:
        """Contributions have become durable; how many devices stand is told by `waits`."""

    def step(self, step: CoordinatorStep) -> None:
        """A step was done and is durable."""
        if isinstance(step, Solved):
            told, doubt = self._core.told, self._core.doubt
            self._listener(events.HeadMade(step.version, step.devices, step.samples, step.classes, told, doubt))
        elif isinstance(step, Obeyed):
            self._listener(obeyed(step))
        elif isinstance(step, Moved):
            self._listener(moved(step))

    def accuracy(self, *, last: bool = False) -> None:
        """Does nothing: there is no round after which devices report their accuracy."""

    def silent(self, devices: Sequence[str]) -> None:
        """Nobody is awaited."""

    def waits(self, now: float) -> None:
        """How many devices stand and are online, once for each change."""
        counts = (self._core.devices, self._core.rounds.online)
        if counts != self._counts:
            self._counts = counts
            self._listener(events.SumsStand(*counts))


def obeyed(step: Obeyed) -> events.OrderDone:
    """What became of an order."""
    order = step.order
    return events.OrderDone(order.what, order.device, order.who, step.outcome, step.version, order.shown)


def moved(step: Moved) -> events.Event:
    """How a roll-out goes on."""
    if isinstance(step, Widened):
        return events.RolloutWidened(step.version, step.fraction, step.devices)
    if isinstance(step, Halted):
        return events.RolloutHalted(step.version, step.fraction, step.reason)
    return events.RolloutCompleted(step.version, step.devices)

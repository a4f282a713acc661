"""What the server tells whoever follows it where sums stand: heads made, orders done, how many devices are there."""

from __future__ import annotations

from collections.abc import Sequence

from aggregator import events
from aggregator.orders import Obeyed
from aggregator.rollout import Halted, Moved, Widened
from aggregator.rounds import Step
from aggregator.standing_coordinator import Solved, StandingCoordinator

__all__ = ["StandingTeller", "moved", "obeyed"]


class StandingTeller:
    """Turns what the coordinator holds into events.

    Args:
        listener: takes each event.
    """

    def __init__(self, coordinator: StandingCoordinator, listener: events.Listener) -> None:
        self._core, self._listener = coordinator, listener
        self._seen: tuple[int, int] | None = None

    def resumed(self) -> None:
        """What stood in the store stands again."""
        self.waits(0.0)

    def committed(self) -> None:
        """Contributions have become durable; how many devices stand is told by `waits`."""

    def step(self, step: Step | Solved | Obeyed | Moved) -> None:
        """A step was done and is durable."""
        if isinstance(step, Solved):
            told, doubt = self._core.told, self._core.doubt
            self._listener(events.HeadMade(step.version, step.devices, step.samples, step.classes, told, doubt))
        elif isinstance(step, Obeyed):
            self._listener(obeyed(step))
        elif isinstance(step, Moved):
            self._listener(moved(step))

    def accuracy(self, *, last: bool = False) -> None:
        """Nothing: there is no round after which devices say how good they are."""

    def silent(self, devices: Sequence[str]) -> None:
        """Nobody is awaited."""

    def waits(self, now: float) -> None:
        """How many devices stand and are online, once for each change."""
        seen = (self._core.devices, self._core.rounds.online)
        if seen != self._seen:
            self._seen = seen
            self._listener(events.SumsStand(*seen))


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

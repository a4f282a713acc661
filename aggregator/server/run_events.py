"""The events of a run with rounds: each step, and what the server waits for, once for each change."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from protofleet.aggregator.coordinators.round_coordinator import RoundCoordinator
from protofleet.aggregator.monitoring import events
from protofleet.aggregator.parts.steps import CoordinatorStep
from protofleet.aggregator.rollout.rollout_stages import Moved
from protofleet.aggregator.rounds.round_machine import AwaitingSum, Closed, Extended, Opened
from protofleet.aggregator.server.standing_events import moved, obeyed
from protofleet.aggregator.store.operator_orders import Obeyed

__all__ = ["RunEvents"]

_NAMES = 5
_SLOW_S = 30.0  # nothing changed for so long: say who is awaited; then after twice as long each time


class RunEvents:
    """Turns the coordinator's steps and state into events.

    Args:
        listener: takes each event.
    """

    def __init__(self, coordinator: RoundCoordinator, listener: events.Listener) -> None:
        self._core, self._listener = coordinator, listener
        self._waiting: tuple[int, int, bool] | None = None
        self._nobody: tuple[int, int, int] | None = None
        self._state: tuple[int, int, int] | None = None
        self._remind_at, self._remind_s = 0.0, _SLOW_S
        self._untold = 0  # the closed round whose accuracy is to be told; 0 for none
        self._accuracy_seen = 0

    def resumed(self) -> None:
        """The round that the store holds open is open again."""
        rounds = self._core.rounds
        closed = rounds.number - (rounds.phase == "open")
        if closed and not self._all_told(closed):
            self._untold = closed
        if rounds.phase == "open":
            total, contributed = max(len(rounds.plan), rounds.number), len(rounds.contributions)
            self._opened(total, contributed)

    def _opened(self, total: int, contributed: int) -> None:
        rounds = self._core.rounds
        window_s = rounds.policy.window_s if rounds.policy.stays else 0.0
        awaited = rounds.awaited_count
        self._listener(events.RoundOpened(rounds.number, total, rounds.method, awaited, contributed, window_s))

    def committed(self) -> None:
        """Contributions have become durable."""
        rounds = self._core.rounds
        self._listener(events.ContributionsIn(rounds.number, len(rounds.contributions), rounds.awaited_count))

    def step(self, step: CoordinatorStep) -> None:
        """A step was done and is durable. The writer of the summary reports the end of the run."""
        rounds, policy = self._core.rounds, self._core.rounds.policy
        if isinstance(step, Obeyed):
            self._listener(obeyed(step))
        elif isinstance(step, Moved):
            self._listener(moved(step))
        elif isinstance(step, Opened):
            total = max(len(rounds.plan), step.round)
            self._opened(total, 0)
        elif isinstance(step, AwaitingSum):
            self._listener(events.SumAsked(step.round, step.devices))
        elif isinstance(step, Extended):
            contributed, needed = step.contributions, policy.min_clients
            self._listener(events.RoundExtended(step.round, contributed, needed, policy.limit_s, policy.stays))
        elif isinstance(step, Closed):
            self.accuracy(last=True)
            self._untold = step.round
            for finding in self._core.findings:
                self._listener(events.Screened(step.round, finding.device, finding.verdict, finding.reason))
            if self._core.doubt:
                self._listener(events.Warned(step.round, self._core.doubt))
            record = self._core.record(step.round)
            self._listener(
                events.RoundClosed(
                    step.round,
                    step.method,
                    len(record.uplink_bytes),
                    record.classes_merged or 0,
                    sum(record.uplink_bytes.values()),
                    record.seconds or 0.0,
                    self._core.state.version,
                    self._core.told,
                )
            )

    def accuracy(self, *, last: bool = False) -> None:
        """Report the accuracy after the round that closed last, once all its contributors have reported.

        Args:
            last: whether to report what is there now, since nothing more will come.
        """
        if not self._untold or (self._core.accuracy.batches == self._accuracy_seen and not last):
            return
        self._accuracy_seen = self._core.accuracy.batches
        if not (last or self._all_told(self._untold)):
            return
        number, self._untold = self._untold, 0
        accuracy = self._core.accuracy.after(number)
        if accuracy is None:
            return
        self._listener(
            events.AccuracyTold(
                number,
                len(accuracy.by_device),
                len(self._core.record(number).uplink_bytes),
                accuracy.samples,
                accuracy.mean,
                accuracy.pooled,
                accuracy.worst,
                accuracy.by_device[accuracy.worst].all_classes,
            )
        )

    def _all_told(self, number: int) -> bool:
        accuracy = self._core.accuracy.after(number)
        return accuracy is not None and accuracy.by_device.keys() >= self._core.record(number).uplink_bytes.keys()

    def silent(self, devices: Sequence[str]) -> None:
        """These are not awaited any more."""
        if devices:
            self._listener(events.Silent(self._core.rounds.number, len(devices), _some(devices)))

    def waits(self, now: float) -> None:
        """What is waited for, if that has changed, or has not for long."""
        rounds = self._core.rounds
        policy, stays = rounds.policy, rounds.policy.stays
        online, contributed, needed = rounds.online, len(rounds.contributions), policy.min_clients
        unsampled = rounds.unsampled and online >= policy.to_open
        # devices that sleep come and go: of a fleet that is served for long only the first look is told
        waiting = (rounds.number, 0 if stays else online, unsampled) if rounds.phase == "waiting" else None
        if waiting is not None and waiting != self._waiting:
            opens_in_s = rounds.opens_in_s(now)
            self._listener(events.Waiting(rounds.number + 1, online, policy.to_open, unsampled, opens_in_s))
        self._waiting = waiting
        nobody = (rounds.number, contributed, online) if rounds.nobody and now >= rounds.settled_at else None
        if nobody is not None and nobody != self._nobody:
            self._listener(events.Nobody(rounds.number, contributed, needed, online, rounds.refused_count))
        self._nobody = nobody
        self._remind(now)

    def _remind(self, now: float) -> None:
        rounds = self._core.rounds
        state = (rounds.number, len(rounds.contributions), rounds.awaited_count)
        if state != self._state or rounds.phase != "open" or not rounds.awaited_count or rounds.policy.stays:
            self._state, self._remind_s = state, _SLOW_S
            self._remind_at = now + _SLOW_S
        elif now >= self._remind_at:
            self._remind_s *= 2.0
            self._remind_at = now + self._remind_s
            number, contributed, awaited = state
            needed = rounds.policy.min_clients
            self._listener(events.StillAwaited(number, contributed, needed, awaited, _some(rounds.awaited)))


def _some(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(itertools.islice(sorted(names), _NAMES))

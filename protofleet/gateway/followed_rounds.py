"""When a site's rounds open and close. They follow the rounds above. A state machine without sockets or clock.

A round opens when it is open above and the global state that it starts from is here.

A round closes when the first of these happens:

- Every expected device has answered. A device is expected if it is sampled and was online since the previous round
  opened. A device that was online and silent through a whole round is not expected in the next, as in any fleet.
- The deadline above is near: a margin before it.
- The round is over above.

Without a deadline above, the site waits only for devices that are online. A site without devices closes its round
after `QUIET_S`, unless it must wait for more devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from protofleet.aggregator.rounds.round_machine import Closed, Finished, Opened, Policy, Rounds, Step
from protofleet.contract.wire.messages import Announcement

__all__ = ["MARGIN", "MARGIN_S", "QUIET_S", "FollowedRounds", "policy_of"]

QUIET_S = 10.0
MARGIN, MARGIN_S = 0.1, 60.0  # of a deadline: a tenth, a minute at most
# at least that, or half of the deadline: the announcement takes up to a second to arrive, and sending takes time
LEAST_MARGIN_S = 2.5


def policy_of(min_clients: int, fraction: float, deadline_s: float) -> Policy:
    """A site's policy for rounds that are announced above with this share of devices and this deadline."""
    margin_s = max(MARGIN * deadline_s, min(LEAST_MARGIN_S, deadline_s / 2))
    return Policy(min_clients, deadline_s - min(margin_s, MARGIN_S), fraction)


@dataclass
class FollowedRounds(Rounds):
    """The round machine of a site.

    Attributes:
        above: the newest announcement from above; None before there is one.
        ready: whether the global state that `above` names is here.
        poll_s: how long the owner may sleep before it looks for messages from above.
    """

    above: Announcement | None = None
    ready: bool = False
    poll_s: float = 1.0
    _opened_at: float = 0.0
    _present: set[str] = field(default_factory=set)  # devices seen since the open round, or else the last one, opened
    _expected: set[str] = field(default_factory=set)

    @property
    def stays(self) -> bool:
        """True: the site waits for the broker without limit."""
        return True

    @property
    def is_done(self) -> bool:
        """False: a site never ends by itself."""
        return False

    @property
    def nobody(self) -> bool:
        """False: a site without devices is no fault."""
        return False

    def expect(self, devices: Iterable[str]) -> None:
        """Record the devices of the last round."""
        (self._expected if self.phase == "open" else self._present).update(devices)

    def birth(self, device: str, instance: bytes, now: float) -> bool:
        self._present.add(device)
        return super().birth(device, instance, now)

    def contributed(self, device: str) -> None:
        self._present.add(device)
        super().contributed(device)

    def steer(self, what: str) -> str:
        if what == "open-round":
            return "refused: rounds open on a site as they do above"
        return super().steer(what)

    def advance(self, now: float) -> Step | None:
        """Do the next step that is due, and return it; None when nothing is due."""
        a = self.above
        if self.phase == "open":
            if not self._is_over(now):
                return None
            if self._is_overdue(now) and now >= self.settled_at:
                self._lose_the_silent(now)
            self.phase = "waiting"
            self._awaited.clear()
            return Closed(self.number, self.method)
        if a is None or self.phase == "finished" or not self.ready:
            return None
        if a.phase == "finished":
            self.phase = "finished"
            return Finished(self.number)
        if a.phase != "open" or a.round <= self.number:
            return None
        self._open(a.round, a.method, a.seed, set(), now)
        return Opened(self.number, self.method, self.seed)

    def due_in_s(self, now: float) -> float | None:
        """Seconds until `advance` may have something to do without anything happening on the site."""
        if self.phase != "open":
            return self.poll_s
        times = [self.settled_at, *(self._opened_at + wait_s for wait_s in (QUIET_S, self.policy.limit_s))]
        return min([self.poll_s, *(moment - now for moment in times if moment > now)])

    def _is_over(self, now: float) -> bool:
        a = self.above
        if self._closing or (a is not None and (a.phase != "open" or a.round != self.number)):
            return True
        if self._is_overdue(now):
            return True
        if now < self.settled_at or self._awaited:
            return False
        answered, needed = len(self.contributions) + len(self._refused), self.policy.min_clients
        quiet = needed == 1 and now >= self._opened_at + QUIET_S
        return (answered >= needed or quiet) and not (self.policy.limit_s and self._missing)

    def _is_overdue(self, now: float) -> bool:
        return self.policy.limit_s > 0 and now >= self._deadline

    @property
    def _missing(self) -> set[str]:
        """Expected devices that have not answered, online or not; without those that were silent for a whole round."""
        done = self.contributions | self._refused | self._silent
        return {device for device in self._expected - done if self.is_sampled(device)}

    def _open(self, number: int, method: str, seed: int, contributions: set[str], now: float) -> None:
        self._opened_at = now
        self._expected, self._present = self._present | set(self._online), set(contributions)
        super()._open(number, method, seed, contributions, now)

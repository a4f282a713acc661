"""When a site's rounds open and close: as those above do, and no later. A state machine without sockets or clock.

    opens     when the round is open above, and what it starts from is here
    closes    when all who are sampled and were here since the round before opened, or in it, have answered; a margin
              before the deadline above; or once the round is over there. Who is online and silent through a whole round
              is not waited for in the next, as in any fleet

Where there is no deadline above, only who is online is waited for. A site where nobody has been lately says so after
`QUIET_S`, unless it is to wait for more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from aggregator.rounds import Closed, Finished, Opened, Policy, Rounds, Step
from contract.messages import Announcement

__all__ = ["MARGIN", "MARGIN_S", "QUIET_S", "FollowedRounds", "policy_of"]

QUIET_S = 10.0
MARGIN, MARGIN_S = 0.1, 60.0  # of a deadline: a tenth, a minute at most
# and that at least, or half of it: a round is heard of within a second, and what goes up takes time
LEAST_MARGIN_S = 2.5


def policy_of(min_clients: int, fraction: float, deadline_s: float) -> Policy:
    """Of a site, for rounds that are announced with this share of devices and this deadline above."""
    margin_s = max(MARGIN * deadline_s, min(LEAST_MARGIN_S, deadline_s / 2))
    return Policy(min_clients, deadline_s - min(margin_s, MARGIN_S), fraction)


@dataclass
class FollowedRounds(Rounds):
    """The machine of a site.

    Attributes:
        above: the newest announcement from above; None before there is one.
        ready: whether the global state that it names is here.
        poll_s: how long its owner may sleep, since something may come from above.
    """

    above: Announcement | None = None
    ready: bool = False
    poll_s: float = 1.0
    _opened_at: float = 0.0
    _seen: set[str] = field(default_factory=set)  # here since the open round opened, or since the last did
    _expected: set[str] = field(default_factory=set)

    @property
    def stays(self) -> bool:
        """The broker is waited for as long as it takes."""
        return True

    @property
    def is_done(self) -> bool:
        """Never by itself."""
        return False

    @property
    def nobody(self) -> bool:
        """A site without a device has nothing to complain of."""
        return False

    def expect(self, devices: Iterable[str]) -> None:
        """These were in the last round."""
        (self._expected if self.phase == "open" else self._seen).update(devices)

    def birth(self, device: str, instance: bytes, now: float) -> bool:
        self._seen.add(device)
        return super().birth(device, instance, now)

    def contributed(self, device: str) -> None:
        self._seen.add(device)
        super().contributed(device)

    def steer(self, what: str) -> str:
        if what == "open-round":
            return "refused: rounds open on a site as they do above"
        return super().steer(what)

    def advance(self, now: float) -> Step | None:
        """The next thing that is due, done to the machine; None when nothing is."""
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
        return min([self.poll_s, *(at - now for at in times if at > now)])

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
        """Who is waited for although it is not online. Not who was online through a whole round, and silent."""
        done = self.contributions | self._refused | self._silent
        return {each for each in self._expected - done if self.is_sampled(each)}

    def _open(self, number: int, method: str, seed: int, contributions: set[str], now: float) -> None:
        self._opened_at = now
        self._expected, self._seen = self._seen | set(self._online), set(contributions)
        super()._open(number, method, seed, contributions, now)

"""One aggregator for a fleet: who may speak, and what to say about it. No sockets, no clock.

Two aggregators with different stores on one fleet would reject each other's contributions. So each says on the status
topic of the reserved id `aggregator` that it is there, as a device does on its own: a retained birth, a death as last
will, with an `instance` that begins with its run. In order:

1. connected: listen for what is retained, before anything is published or taken;
2. a birth of another run stands there: it may be alive, or a birth without its will. Publish a death in its name. One
   that is alive answers at once with its birth, and then the newcomer is the one that ends, with one line, unless it
   was told to take over. No answer: it is dead;
3. take the seat: publish a birth, whose `boot` is above that of the birth or death that stood there, and at least the
   time at which we started, in seconds since the epoch (a clock that is wrong does no harm).

Whoever holds the seat answers everything else that is said there with its own birth, and ends when it hears a birth of
a higher (boot, instance): the other has taken over, or took the seat while we were cut off. So two that hear each
other never both stay, whatever the order in which they started, and one of them always does.

Two with one certificate do not hear each other where the broker has one session for each: they throw each other out
(`contract/eviction.py`). Then, too, the newcomer ends, unless it is to take over: it is more patient then. Each
connection has a last will of its own, so a death that is heard once more is of nobody who has come back since: a broker
that died without keeping what was retained last shows the death of a process before us on every return.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Literal

from contract.errors import LinkError, StoreError
from contract.eviction import Eviction
from contract.messages import MAX_ROUND, Announcement, Status
from contract.topics import AGGREGATOR

__all__ = ["Seat", "check_age"]

LISTEN_S = 0.5
ANSWER_S = 8.0  # an aggregator may be in the middle of a merge
_ASSERT_EACH_S = 0.5
_RETURN_S = 3.0  # of one that was thrown out

_Phase = Literal["away", "listening", "asking", "seated"]


class Seat:
    """The right to speak for a fleet.

    Args:
        fleet: for the error.
        run: 4 bytes, of the store.
        started: seconds since the epoch, as far as this machine knows.
        take_over: end a living aggregator instead of ending oneself.
    """

    def __init__(self, fleet: str, run: bytes, *, started: int = 0, take_over: bool = False) -> None:
        self.instance = run + os.urandom(4)
        self._fleet, self._take_over = fleet, take_over
        self._boot = max(0, min(started, MAX_ROUND - 1))
        self._phase: _Phase = "away"
        self._was_seated = False
        self._eviction = Eviction(newcomer=4) if take_over else Eviction()
        self._until = 0.0
        self._other: Status | None = None  # who stands on the topic, when it is not us
        self._wills = 0
        self._death: Status | None = None  # of another, that was heard last
        self._answered = False
        self._speak_at: float | None = None  # when to say again that we are here
        self._spoke_at = float("-inf")

    @property
    def taken(self) -> bool:
        """Whether we may speak now."""
        return self._phase == "seated"

    @property
    def was_taken(self) -> bool:
        """Whether we have ever spoken."""
        return self._was_seated

    @property
    def birth(self) -> Status:
        """That we are here."""
        return Status(True, self.instance, self._boot, AGGREGATOR)

    @property
    def death(self) -> Status:
        """That we are not, as a clean end says it."""
        return Status(False, self.instance, self._boot)

    def will(self) -> Status:
        """The same as the last will of one more connection."""
        self._wills += 1
        return replace(self.death, issued=self._wills)

    def connected(self, now: float) -> None:
        """A connection is up: listen, also when we held the seat before."""
        self._phase, self._until = "listening", now + LISTEN_S
        self._eviction.connected(now)

    def disconnected(self) -> None:
        """The connection is gone, and with it the seat."""
        self._phase = "away"

    def heard(self, status: Status, now: float) -> None:
        """Something on the aggregator's status topic.

        Raises:
            LinkError: another aggregator has the seat now.
        """
        self._eviction.heard(strangers_death=self._is_new_death(status))
        if self._eviction.is_sure:
            raise self._ousted(status)
        if self._eviction.is_suspected and self._phase == "listening":
            self._until = max(self._until, now + _RETURN_S)  # for the other to come back, before anything is said
        if status.instance == self.instance:
            if self.taken and not status.online:
                self._speak_at = now  # somebody asks whether we are there, or our own will came late
            return
        if not self.taken:
            self._answered |= self._phase == "asking" and status.online
            self._other = status
        elif status.online and self._outranks(status):
            raise self._ousted(status)
        else:
            self.rival_spoke(now)

    def rival_spoke(self, now: float) -> None:
        """Another aggregator said something: say that we are here, now and then."""
        if self.taken and self._speak_at is None:
            self._speak_at = max(now, self._spoke_at + _ASSERT_EACH_S)

    def due(self, now: float) -> Status | None:
        """What to publish on the status topic now, retained: a death in another's name, or our birth; or nothing.

        Raises:
            LinkError: another aggregator is alive.
        """
        if self._phase == "seated" and self._speak_at is not None and now >= self._speak_at:
            return self._speak(now)
        if self._phase not in ("listening", "asking") or (now < self._until and not self._answered):
            return None
        other = self._other if self._other is not None and self._other.online else None
        if other is not None and (self._lost_to(other) or (self._answered and not self._take_over)):
            raise self._ousted(other)
        if other is not None and self._phase == "listening" and self._is_stranger(other):
            self._phase, self._until = "asking", now + ANSWER_S
            return Status(False, other.instance, other.boot)
        if not self._was_seated and self._other is not None:
            self._boot = min(max(self._boot, self._other.boot + 1), MAX_ROUND)
        self._phase, self._was_seated, self._answered, self._other = "seated", True, False, None
        return self._speak(now)

    def wait_s(self, now: float) -> float | None:
        """Seconds until `due` may have something; None when nothing is to come."""
        at = self._until if self._phase in ("listening", "asking") else self._speak_at if self.taken else None
        return None if at is None else max(0.0, at - now)

    def _speak(self, now: float) -> Status:
        self._speak_at, self._spoke_at = None, now
        return self.birth

    def _outranks(self, other: Status) -> bool:
        return (other.boot, other.instance) > (self._boot, self.instance)

    def _lost_to(self, other: Status) -> bool:
        """Whether it took the seat while we were cut off."""
        return self._was_seated and self._outranks(other)

    def _is_new_death(self, status: Status) -> bool:
        """Whether another process has died since we last heard of a death."""
        if status.online or status.instance == self.instance:
            return False
        before, self._death = self._death, status
        return status != before

    def _is_stranger(self, other: Status) -> bool:
        """Whether it may be alive: not an earlier process on our own store, which is locked, and not one below us."""
        return not self._was_seated and other.instance[:4] != self.instance[:4]

    def _ousted(self, other: Status) -> LinkError:
        return LinkError(
            f"another aggregator serves fleet {self._fleet}",
            expected=f"only run {self.instance[:4].hex()}",
            got=f"run {other.instance[:4].hex()}, of another store",
            hint="the --store of that run, another --fleet, or --take-over to end that one",
        )


def check_age(announcement: Announcement, round: int, version: int) -> None:
    """That a store is as new as what its run has announced before.

    Args:
        round, version: of the store, the newest ones.

    Raises:
        StoreError: it is an older copy.
    """
    if announcement.round > round or announcement.global_version > version:
        raise StoreError(
            f"the store is older than what run {announcement.run.hex()} has announced",
            expected=f"round {announcement.round} and global version {announcement.global_version}",
            got=f"round {round} and version {version}, as of a backup",
            hint="the newest copy of the store, or --new-run to go on from this one",
        )

"""One aggregator for a fleet: which process may speak, and what it publishes about that. No sockets, no clock.

Two aggregators with different stores on one fleet would reject each other's contributions. So each publishes its
presence on the status topic of the reserved id `aggregator`, as a device does on its own topic: a retained birth, and a
death as last will, with an `instance` that begins with its run.

1. Connect: listen for retained statuses before anything is published or taken.
2. If a birth of another run is retained, its process may be alive, or it may be a birth without its will. Publish a
   death in its name. A living aggregator answers at once with its birth. Then the newcomer ends, with one line, unless
   it was told to take over. Without an answer the other is dead.
3. Become the sole aggregator: publish a birth. Its `boot` is above that of the retained birth or death, and at least
   the time at which we started, in seconds since the epoch (a clock that is wrong does no harm).

The sole aggregator answers every other status on that topic with its own birth. It ends when it hears a birth of a
higher (boot, instance): the other has taken over, or became the sole aggregator while we were cut off. So of two that
hear each other never both stay, whatever the order in which they started, and one of them always does.

Two with one certificate do not hear each other where the broker has one session for each certificate: they throw each
other out (`contract/mqtt/eviction.py`). Then, too, the newcomer ends, unless it is to take over: it is more patient
then.

Each connection has a last will of its own. So a death that is heard again concerns no process that has come back
since: a broker that died without keeping the last retained status shows the death of an earlier process on every
return.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Literal

from protofleet.contract.errors import LinkError, StoreError
from protofleet.contract.mqtt.eviction import Eviction
from protofleet.contract.wire.messages import MAX_ROUND, Announcement, Status
from protofleet.contract.wire.topics import AGGREGATOR

__all__ = ["SoleAggregator", "check_age"]

LISTEN_S = 0.5
ANSWER_S = 8.0  # an aggregator may be in the middle of a merge
_ASSERT_EACH_S = 0.5
_RETURN_S = 3.0  # of one that was thrown out

_Phase = Literal["away", "listening", "asking", "sole"]


class SoleAggregator:
    """The right to speak for a fleet.

    Args:
        fleet: for the error.
        run: 4 bytes, of the store.
        started: seconds since the epoch, as far as this machine knows.
        take_over: end a living aggregator instead of ending this one.
    """

    def __init__(self, fleet: str, run: bytes, *, started: int = 0, take_over: bool = False) -> None:
        self.instance = run + os.urandom(4)
        self._fleet, self._take_over = fleet, take_over
        self._boot = max(0, min(started, MAX_ROUND - 1))
        self._phase: _Phase = "away"
        self._was_sole = False
        self._eviction = Eviction(newcomer=4) if take_over else Eviction()
        self._until = 0.0
        self._rival: Status | None = None  # who stands on the topic, when it is not us
        self._wills = 0
        self._death: Status | None = None  # of another, that was heard last
        self._answered = False
        self._speak_at: float | None = None  # when to say again that we are here
        self._spoke_at = float("-inf")

    @property
    def is_sole(self) -> bool:
        """Whether this aggregator may speak now."""
        return self._phase == "sole"

    @property
    def was_sole(self) -> bool:
        """Whether this aggregator was ever the sole one."""
        return self._was_sole

    @property
    def birth(self) -> Status:
        """The status of this aggregator while it is here."""
        return Status(True, self.instance, self._boot, AGGREGATOR)

    @property
    def death(self) -> Status:
        """The status that a clean end publishes."""
        return Status(False, self.instance, self._boot)

    def will(self) -> Status:
        """The last will of one more connection: the same as `death`, numbered."""
        self._wills += 1
        return replace(self.death, issued=self._wills)

    def connected(self, now: float) -> None:
        """A connection is up: listen, also when we were the sole aggregator before."""
        self._phase, self._until = "listening", now + LISTEN_S
        self._eviction.connected(now)

    def disconnected(self) -> None:
        """The connection is gone: we are no longer the sole aggregator."""
        self._phase = "away"

    def heard(self, status: Status, now: float) -> None:
        """Take a status from the aggregator's status topic.

        Raises:
            LinkError: another aggregator is the sole one now.
        """
        self._eviction.heard(strangers_death=self._is_new_death(status))
        if self._eviction.is_sure:
            raise self._ousted(status)
        if self._eviction.is_suspected and self._phase == "listening":
            self._until = max(self._until, now + _RETURN_S)  # for the other to come back, before anything is said
        if status.instance == self.instance:
            if self.is_sole and not status.online:
                self._speak_at = now  # somebody asks whether we are there, or our own will came late
            return
        if not self.is_sole:
            self._answered |= self._phase == "asking" and status.online
            self._rival = status
        elif status.online and self._outranks(status):
            raise self._ousted(status)
        else:
            self.rival_spoke(now)

    def rival_spoke(self, now: float) -> None:
        """Another aggregator published something: publish our birth again, now and then."""
        if self.is_sole and self._speak_at is None:
            self._speak_at = max(now, self._spoke_at + _ASSERT_EACH_S)

    def due(self, now: float) -> Status | None:
        """The status to publish now, retained: a death in another's name, or our birth; None for nothing.

        Raises:
            LinkError: another aggregator is alive.
        """
        if self._phase == "sole" and self._speak_at is not None and now >= self._speak_at:
            return self._speak(now)
        if self._phase not in ("listening", "asking") or (now < self._until and not self._answered):
            return None
        rival = self._rival if self._rival is not None and self._rival.online else None
        if rival is not None and (self._lost_to(rival) or (self._answered and not self._take_over)):
            raise self._ousted(rival)
        if rival is not None and self._phase == "listening" and self._is_stranger(rival):
            self._phase, self._until = "asking", now + ANSWER_S
            return Status(False, rival.instance, rival.boot)
        if not self._was_sole and self._rival is not None:
            self._boot = min(max(self._boot, self._rival.boot + 1), MAX_ROUND)
        self._phase, self._was_sole, self._answered, self._rival = "sole", True, False, None
        return self._speak(now)

    def wait_s(self, now: float) -> float | None:
        """Seconds until `due` may have something; None for never."""
        due_at = self._until if self._phase in ("listening", "asking") else self._speak_at if self.is_sole else None
        return None if due_at is None else max(0.0, due_at - now)

    def _speak(self, now: float) -> Status:
        self._speak_at, self._spoke_at = None, now
        return self.birth

    def _outranks(self, rival: Status) -> bool:
        return (rival.boot, rival.instance) > (self._boot, self.instance)

    def _lost_to(self, rival: Status) -> bool:
        """Whether the rival became the sole aggregator while we were cut off."""
        return self._was_sole and self._outranks(rival)

    def _is_new_death(self, status: Status) -> bool:
        """Whether another process has died since we last heard of a death."""
        if status.online or status.instance == self.instance:
            return False
        before, self._death = self._death, status
        return status != before

    def _is_stranger(self, rival: Status) -> bool:
        """Whether it may be alive: not an earlier process on our own store, which is locked, and not one below us."""
        return not self._was_sole and rival.instance[:4] != self.instance[:4]

    def _ousted(self, rival: Status) -> LinkError:
        return LinkError(
            f"another aggregator serves fleet {self._fleet}",
            expected=f"only run {self.instance[:4].hex()}",
            got=f"run {rival.instance[:4].hex()}, of another store",
            hint="the --store of that run, another --fleet, or --take-over to end that one",
        )


def check_age(announcement: Announcement, round: int, version: int) -> None:
    """Check that a store is as new as what its run has announced before.

    Args:
        round, version: the newest ones of the store.

    Raises:
        StoreError: the store is an older copy.
    """
    if announcement.round > round or announcement.global_version > version:
        raise StoreError(
            f"the store is older than what run {announcement.run.hex()} has announced",
            expected=f"round {announcement.round} and global version {announcement.global_version}",
            got=f"round {round} and version {version}, as of a backup",
            hint="the newest copy of the store, or --new-run to go on from this one",
        )

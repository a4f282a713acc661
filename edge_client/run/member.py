"""One member of a fleet: who a process is there, and its line to the aggregator. A device and a gateway both have one.

It has the link, the keys, the inbox, the outbox and the status. What a round needs, to train a device or to sum a site,
is not here: whoever has the member is told what comes (`Hearing`), and puts what is to go up into the outbox.

1. Connect. Subscribe to the fleet's round, its global state, this member's receipts and its own status. Publish a
   retained birth, with a death as last will.
2. Everything that arrives is taken in (`edge_client/messages/inbox.py`), and only then acknowledged.
3. Send a contribution again after a reconnection, or when no receipt comes, until a receipt comes.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from protofleet.contract.console.logs import Changes
from protofleet.contract.errors import StoreError
from protofleet.contract.mqtt.link import (
    Connected,
    Disconnected,
    Event,
    Failed,
    Link,
    Noticed,
    Received,
    client_id,
)
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.envelopes import ENVELOPE_BYTES
from protofleet.contract.wire.messages import Status
from protofleet.edge_client.hardware.conditions import Conditions
from protofleet.edge_client.identity.enrolment import Enrolling
from protofleet.edge_client.identity.trust import Trust
from protofleet.edge_client.journal.journal import Journal
from protofleet.edge_client.messages.inbox import Hearing, Inbox
from protofleet.edge_client.messages.membership import Membership
from protofleet.edge_client.messages.outbox import Outbox
from protofleet.edge_client.messages.presence import Presence
from protofleet.edge_client.messages.status_message import Health
from protofleet.edge_client.rounds.round_follower import Follower, largest_message_bytes
from protofleet.edge_client.rounds.waiting_notice import Absence

__all__ = ["Member"]

logger = logging.getLogger(__name__)


class Member:
    """One process of one member.

    Args:
        journal: its open state directory.
        measured: figures of `profile --measure` that go into every birth.
        is_private: tells whether nothing may be said that follows from samples.
        changes: logs a line of its owner's unless it is what was said last.

    Attributes:
        boot: how often it has started.
        up: the topic on which it sends.
    """

    def __init__(
        self,
        who: Membership,
        journal: Journal,
        changes: Changes,
        *,
        measured: Mapping[str, float] | None = None,
        is_private: Callable[[], bool] = lambda: False,
    ) -> None:
        fleet, name, signer, instance = who.fleet, who.name, who.identity.signer, os.urandom(8)
        self.who, self.journal, self.changes = who, journal, changes
        self.boot = journal.begin(instance)
        conditions = Conditions(who.address, journal.directory)
        self.health = Health(instance, self.boot, measured or {}, is_private=is_private, conditions=conditions)
        self.up, self._status = topics.up(fleet, name), topics.status(fleet, name)
        self.trust = Trust(who.trusted, who.identity, journal.issued, fleet=fleet, device_id=name)
        self.enrolling = Enrolling(fleet, name, signer, who.token)
        self.outbox = Outbox(random.Random(), seal=None if signer is None else self.sealed)
        self.follower = Follower(
            name,
            who.bundle,
            is_done=journal.is_done,
            took_part=journal.took_part,
            was_rejected=lambda key: (journal.outcome(key) or ("", 0))[0] == "rejected",
            stays=who.stays,
        )
        is_own, is_signed = journal.is_own_instance, signer is not None
        self.presence = Presence(name, instance, self.boot, is_own=is_own, is_signed=is_signed)
        self.absence = Absence()
        self.inbox = Inbox(
            who,
            journal,
            self.follower,
            self.outbox,
            self.presence,
            self.trust,
            self.enrolling,
            changes,
        )
        self._before_birth: Callable[[], None] = lambda: None
        self.link = Link(
            who.address,
            client_id(fleet, name),
            subscriptions=[topics.round_(fleet), topics.global_all(fleet), topics.down(fleet, name), self._status],
            will=(self._status, self._of_us(self.health.death())),
            largest_bytes=largest_message_bytes(who.bundle.manifest) + ENVELOPE_BYTES,
            echo_topic=self._status,
            keepalive_s=who.keepalive_s,
        )

    def hear(self, hearing: Hearing, before_birth: Callable[[], None] = lambda: None) -> None:
        """Who is told what comes in from now on.

        Args:
            before_birth: called before each birth is made.
        """
        self.inbox.hearing, self._before_birth = hearing, before_birth

    def close(self, *, polite: bool = True) -> None:
        """Disconnect, after a death where one may be said. The next process sends what was not confirmed."""
        if polite:
            self.link.publish(self._status, self._of_us(self.health.death(tells=True)), retain=True)
        self.link.close()

    def send(self, now_s: float) -> bool:
        """Send what is due; False while it is being enrolled, when nothing else may be sent."""
        enrolment = self.enrolling.due(now_s)
        if enrolment is not None:
            self.link.publish(self.up, enrolment)
        if self.enrolling.is_open:
            return False
        parts, self.health.apart = self.health.apart != self.follower.apart, self.follower.apart
        if parts or self.trust.has_to_tell or self.presence.birth_due(now_s):
            self.publish_birth()
        elif self.health.has_changed(now_s):
            self._tell_conditions()
        for payload in self.outbox.due(now_s, idle=self.link.idle):
            taken = self.link.publish(self.up, payload)
            logger.debug(f"{'sent' if taken else 'not sent'} {len(payload):,} bytes on {self.up}")
        return True

    def handle(self, event: Event) -> bool:
        """Take an event of the link in; returns whether something came that is the fleet's.

        Raises:
            LinkError: refused for good, or another process runs under this name.
            UsageError: the fleet runs another bundle, and the member does not stay.
            StoreError: the disk refused.
        """
        now_s, came = time.monotonic(), False
        if isinstance(event, Received):
            came = self.inbox.take(event)
            if not came and event.topic == self._status:
                self.presence.overwritten(now_s)
            self.link.acknowledge(event)
        elif isinstance(event, Connected):
            self.outbox.connected(event.limit_bytes)
            self.presence.connected(now_s)
            self.enrolling.connected()
            self.absence.over()
        elif isinstance(event, Disconnected):
            for part in (self.outbox, self.presence, self.enrolling):
                part.disconnected()
        elif isinstance(event, Noticed):
            logger.info(event.line)
        elif isinstance(event, Failed):
            raise event.error
        return came

    def publish_birth(self) -> None:
        """Say that this process is here, and what it says of itself."""
        if self.enrolling.is_open:
            return
        self._before_birth()
        rival = self.presence.rival(time.monotonic())
        status = replace(self.health.birth(), heard=self.trust.heard(), rival=rival)
        birth = self.who.identity.numbered(status, self.journal.issued, time.time())
        if self.link.publish(self._status, self._of_us(birth), retain=True):
            self.presence.born(birth.issued)

    def _tell_conditions(self) -> None:
        """Publish a birth; a disk that is too full for its number refuses it, and is no reason to end now."""
        try:
            self.publish_birth()
        except StoreError as error:
            self.changes.say(f"the fleet is not told that the disk is full: {error}")

    def sealed(self, payload: bytes) -> bytes:
        """What goes up, as it is published."""
        return self.who.identity.sealed(self.up, payload)

    def _of_us(self, status: Status) -> bytes:
        """What this member says of itself, as it is published."""
        return self.who.identity.sealed(self._status, encode(status))

"""What arrives at a device, message by message.

1. A message is decoded if it is trusted (`trust.py`).
2. It has to be of a kind that belongs to its topic.
3. It goes to the part of the device that it concerns.

A malformed message is counted and logged, and stops nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from protofleet.contract.console.logs import Changes, of_round
from protofleet.contract.errors import UsageError, WireError
from protofleet.contract.methods import METHODS, method
from protofleet.contract.mqtt.link import Received
from protofleet.contract.wire import topics
from protofleet.contract.wire.envelopes import ENROL
from protofleet.contract.wire.joint_heads import LEAST, kind_and_members
from protofleet.contract.wire.messages import Announcement, GlobalPart, Message, Piece, Receipt, Status
from protofleet.edge_client.identity.enrolment import Enrolling
from protofleet.edge_client.identity.trust import Trust
from protofleet.edge_client.journal.journal import FINAL, Journal
from protofleet.edge_client.messages.membership import Membership
from protofleet.edge_client.messages.outbox import Outbox
from protofleet.edge_client.messages.presence import Presence
from protofleet.edge_client.rounds.leader_epochs import Epochs
from protofleet.edge_client.rounds.round_follower import Follower

__all__ = ["Hearing", "Inbox"]


def _nothing(*told: object) -> None:
    return


@dataclass(frozen=True)
class Hearing:
    """Whom a member tells what comes.

    Attributes:
        announcement: each announcement, also one that is of other bundles.
        piece: each piece of a bundle.
        settled: each receipt that ends a contribution.
        news: each receipt that answers none: the aggregator says in it what it holds of this member.
        judged: each receipt that says whether a closed round counts.
        joint: each part of a joint head, and how many devices the head is of.
    """

    announcement: Callable[[Announcement], None] = _nothing
    piece: Callable[[Piece], None] = _nothing
    settled: Callable[[Receipt], None] = _nothing
    news: Callable[[Receipt], None] = _nothing
    judged: Callable[[Receipt], None] = _nothing
    joint: Callable[[GlobalPart, int], None] = _nothing


logger = logging.getLogger(__name__)


class Inbox:
    """The inbox of one member.

    Args:
        who: whose it is. One that stays logs a run of another bundle, instead of ending with an error.
        trust: says whether a message is believed.
        changes: logs a line unless it is what was said last.

    Attributes:
        hearing: who is told what comes.
        malformed: how many messages were skipped.
    """

    def __init__(
        self,
        who: Membership,
        journal: Journal,
        follower: Follower,
        outbox: Outbox,
        presence: Presence,
        trust: Trust,
        enrolling: Enrolling,
        changes: Changes,
    ) -> None:
        self._follower, self._outbox, self._journal, self._bundle = follower, outbox, journal, who.bundle
        self._stays, self.hearing = who.stays, Hearing()
        fleet, self._down = who.fleet, topics.down(who.fleet, who.name)
        self._changes = changes
        self._trust, self._enrolling = trust, enrolling
        self._status = topics.status(fleet, who.name)
        self.malformed, self._epochs = 0, Epochs()
        self._handlers: dict[type[Message], tuple[str, Callable[[Any], None]]] = {
            Announcement: (topics.round_(fleet), self._on_announcement),
            GlobalPart: (topics.global_all(fleet)[:-1], self._on_global_part),
            Receipt: (self._down, self._on_receipt),
            Piece: (self._down, lambda piece: self.hearing.piece(piece)),
            Status: (self._status, lambda status: presence.heard(status, time.monotonic())),
        }

    def take(self, received: Received) -> bool:
        """Take a message in. What follows from it is durable on return.

        Returns:
            False for a message that is not believed, and where our own status was cleared.

        Raises:
            LinkError: another process runs under this device's id.
            StoreError: the disk refused.
            UsageError: the fleet runs another bundle, and the client ends with its run.
        """
        if not received.payload:
            return received.topic != self._status  # a retained message that its publisher, or somebody, has cleared
        try:
            message = self._trust.opened(received)
            if message is None:
                return False
            topic, handler = self._handlers.get(type(message), ("", None))
            if isinstance(message, GlobalPart) and received.topic == self._down:
                topic, handler = self._down, self._on_joint_part
            if handler is None or not received.topic.startswith(topic):
                raise WireError(received.topic, expected="a message of this topic", got=type(message).__name__)
            logger.debug(f"{type(message).__name__.lower()}, {len(received.payload):,} bytes on {received.topic}")
            handler(message)
        except WireError as error:
            self.malformed += 1
            logger.warning(f"skipped a message on {received.topic}: {error}")
        return True

    def _on_announcement(self, announcement: Announcement) -> None:
        if not self._epochs.counts(announcement.run, announcement.epoch, time.monotonic()):
            logger.debug(f"announcement of epoch {announcement.epoch}, whose leader was followed by another")
            return
        self.hearing.announcement(announcement)
        try:
            self._follower.announced(announcement)
        except UsageError as error:
            if not self._stays:
                raise
            self._changes.say(str(error))
            return
        self._outbox.announced(announcement.run, announcement.limit_bytes, time.monotonic())
        if self._follower.stale:
            self._changes.say(f"run {announcement.run.hex()} was over before this device came, waiting for the next")
        elif announcement.phase == "finished":
            self._changes.say(f"run {announcement.run.hex()} is finished")

    def _on_joint_part(self, part: GlobalPart) -> None:
        known = kind_and_members(part.kind)
        if known is None:
            raise WireError("rows", expected=f"a joint head of {LEAST} devices or more", got=repr(part.kind))
        part = replace(part, kind=known[0])
        self._check_width(part)
        self.hearing.joint(part, known[1])

    def _on_global_part(self, part: GlobalPart) -> None:
        self._check_width(part)
        self._follower.part(part)

    def _check_width(self, part: GlobalPart) -> None:
        m = self._bundle.manifest
        for entry in (method(m.method), *METHODS.values()):
            if part.kind in entry.global_rows:
                kinds = entry.row_kinds(entry.resolved_in(m.hyper), m.classes, m.features)
                if part.body.rows.shape[1] != kinds[part.kind]:
                    raise WireError(part.kind, expected=f"width {kinds[part.kind]}", got=part.body.rows.shape[1])
                break  # rows of classes that only a longer list has are kept, and not looked at

    def _on_receipt(self, receipt: Receipt) -> None:
        key = (receipt.run, receipt.round, receipt.method)
        if receipt.method == ENROL:
            self._enrolling.heard(receipt)
            return
        if receipt.counts is not None:
            self.hearing.judged(receipt)
            return
        if receipt.status not in FINAL:
            self._outbox.need_chunks(receipt)
            return
        if not self._outbox.is_answered(receipt):
            if self._outbox.holds(key):
                answer = f"other bytes than ours were answered: {receipt.status} {receipt.reason}".rstrip()
                logger.warning(f"round {receipt.round} ({receipt.method}): {answer}", extra=of_round(key))
            elif not receipt.digest:
                self.hearing.news(receipt)
            return
        if self._journal.record_receipt(receipt, self._outbox.sent_bytes(key)):
            reason = f" ({receipt.reason})" if receipt.reason else ""
            logger.info(f"round {receipt.round} ({receipt.method}): {receipt.status}{reason}", extra=of_round(key))
        self._outbox.answered(key)
        self.hearing.settled(receipt)

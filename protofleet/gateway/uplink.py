"""A gateway's uplink. To the fleet above the gateway is a device, whose data are its devices' sums and not photos.

It is a member of that fleet as any device is (`edge_client/run/member.py`). A receipt means the same, too. In
each turn of the gateway's loop:

1. The uplink takes in messages from above: terms, global state, receipts. A receipt is in the journal before it is
   acknowledged. Only then do the site's devices get their receipts.
2. What the site has becomes a contribution, if one is due (`upward.py`). The journal holds it before it is sent.
3. The outbox sends. It sends again after a reconnection and when no receipt comes, until one comes.

Guarantee: killed at any moment, journal and store say what is on its way, what is above, and which devices wait for an
answer.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.console.logs import Changes, of_round
from protofleet.contract.identity.signing_keys import read_public_keys
from protofleet.contract.identity.tokens import read_token
from protofleet.contract.mqtt.link import Address, Connected, Disconnected, Event
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Announcement, Receipt
from protofleet.edge_client.identity.signing_identity import identity_of
from protofleet.edge_client.journal.journal import Journal, Pending
from protofleet.edge_client.messages.inbox import Hearing
from protofleet.edge_client.messages.membership import Membership
from protofleet.edge_client.run.member import Member
from protofleet.edge_client.settings import ClientSettings
from protofleet.edge_client.standing.generations import Generations
from protofleet.gateway.rounds_site import why_not
from protofleet.gateway.site_terms import ABOVE

__all__ = ["BUSY_S", "Uplink", "Upward"]

logger = logging.getLogger(__name__)

BUSY_S, _IDLE_S = 0.02, 1.0
REFUSED_WAIT_S = 300.0


class Upward(Protocol):
    """Gives the aggregator above what the site has, in rounds or in sums that stand."""

    def misfit(self, a: Announcement) -> str:
        """Why the site cannot give what is announced; empty where it can."""

    def heard(self, receipt: Receipt) -> None:
        """A receipt from above is in the journal."""

    def turn(self, a: Announcement | None, now: float) -> None:
        """Take over what came from above, and make a contribution if one is due."""


class Uplink:
    """The uplink of one gateway.

    Args:
        settings: as of a device: broker, fleet, id, state directory, certificates, keys.
        bundle: the fleet's bundle.

    Attributes:
        journal: what is on its way, and what became of it.

    Raises:
        UsageError, StoreError: a file holds no key, or the state directory belongs to another device.
    """

    def __init__(self, settings: ClientSettings, bundle: Bundle) -> None:
        who = Membership(
            Address.parse(settings.broker, ca_file=settings.ca, cert_file=settings.cert, key_file=settings.key),
            settings.fleet,
            settings.id,
            bundle,
            trusted=() if settings.trust is None else read_public_keys(settings.trust),
            identity=identity_of(settings),
            token=None if settings.token is None else read_token(settings.token),
            keepalive_s=settings.keepalive,
        )
        state, extends = Path(settings.state), tuple(bundle.manifest.extended)
        self.journal = Journal(state, fleet=who.fleet, device=who.name, bundle=bundle.sha256, extends=extends)
        self._member = Member(who, self.journal, Changes(logger))
        self._member.hear(Hearing(announcement=self._announced, settled=self._told, news=self._told))
        self._generations = Generations(self.journal.standing, REFUSED_WAIT_S)
        self._heard: Announcement | None = None  # the newest announcement
        self._upward: Upward | None = None
        self._is_up = False

    def open(self) -> None:
        """Start connecting. Contributions that an earlier process left are sent first."""
        member = self._member
        for pending in self.journal.pending():
            member.outbox.add(member.who.identity.signed_anew(member.up, pending))
        member.link.open()

    def close(self) -> None:
        """Publish the death message and disconnect. The next process sends what was not confirmed."""
        self._member.close()
        self.journal.close()

    @property
    def announcement(self) -> Announcement | None:
        """The announcement from above, if a gateway can take part; None otherwise."""
        a = self._member.follower.announcement
        if a is None or a.phase == "standing":
            return a
        return None if self._why_not(a) else a

    # ── a turn ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def turn(self, upward: Upward | None, wait_s: float = 0.0) -> None:
        """Do one turn: receive, make a contribution if one is due, send.

        Args:
            upward: gives what the site has; None while the site waits for its terms.
            wait_s: how long to wait for a message.

        Raises:
            LinkError: the broker refuses this gateway for good, or another process has its id.
            StoreError: a disk refuses.
        """
        self._upward = upward
        self._member.send(time.monotonic())
        event = self._member.link.receive(wait_s)
        while event is not None:
            self._handle(event)
            event = self._member.link.receive(0.0)
        a = self._member.follower.announcement
        wrong = "" if a is None else (upward.misfit(a) if upward is not None else "") or self._why_not(a)
        if wrong:
            self.say(f"{wrong}; nothing is sent", level=logging.WARNING)
        elif upward is not None:
            upward.turn(a, time.monotonic())
        self._member.send(time.monotonic())

    @property
    def newest_state(self) -> GlobalState | None:
        """The newest global state from above, if one is here."""
        return self._member.follower.newest_state

    @property
    def is_finished(self) -> bool:
        """Whether a run that this gateway took part in is finished."""
        return self._member.follower.finished

    @property
    def again_at_s(self) -> float:
        """No sums are sent before, in seconds of a steady clock: they were refused."""
        return self._generations.again_at_s

    def send(self, pending: Pending, line: str) -> None:
        """Send what the journal holds, and log a line on it."""
        self._member.outbox.add(pending)
        logger.info(line, extra=of_round(pending.key))

    @property
    def poll_s(self) -> float:
        """How long the loop may sleep. Messages from above do not wake it."""
        return BUSY_S if self._is_up and len(self._member.outbox) else _IDLE_S

    def _why_not(self, a: Announcement) -> str:
        return "" if a.phase in ("standing", "finished") else why_not(a, self._member.who.bundle.manifest.hyper)

    def _told(self, receipt: Receipt) -> None:
        now, before = time.monotonic(), self._generations.again_at_s
        self._generations.take_receipt(receipt, now)
        if self._upward is not None:
            self._upward.heard(receipt)
        if self._generations.again_at_s > max(now, before):
            wait = f"in {REFUSED_WAIT_S / 60:.0f} minutes, or when it announces anything but a new head"
            self.say(
                f"refused by {ABOVE}: {receipt.reason}; devices wait for their receipts, tried again {wait}",
                level=logging.WARNING,
            )

    def _announced(self, a: Announcement) -> None:
        """Try again after a refusal when an announcement comes, unless only the head is new.

        The announcement may mean that the cause of the refusal is gone. This holds also for an equal announcement,
        which an aggregator sends when it was restarted.
        """
        before, self._heard = self._heard, a
        if before is not None and before.global_version != a.global_version:
            before = replace(before, global_version=a.global_version, issued=a.issued, proof=a.proof)
            if before == a:
                return
        self._generations.again_at_s = float("-inf")

    # ── the link ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _handle(self, event: Event) -> None:
        member = self._member
        member.handle(event)
        if isinstance(event, Connected):
            self._is_up = True
            self.say(f"connected to {member.who.address}, where the sums go")
        elif isinstance(event, Disconnected):
            self._is_up = False
            line = member.absence.line(f"no connection to {member.who.address}", event.reason, time.monotonic())
            if line:
                self.say(line)

    def sealed(self, payload: bytes) -> bytes:
        """What goes up, as it is published."""
        return self._member.sealed(payload)

    def say(self, line: str, *, level: int = logging.INFO) -> None:
        """Log a line, unless it is the same as the last one."""
        self._member.changes.say(line, level=level)

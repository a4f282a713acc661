"""A gateway's uplink. To the fleet above the gateway is a device, whose data are its devices' sums and not photos.

Link, outbox, journal, presence and trust are those of any device (`edge_client/`). A receipt means the same, too. In
each turn of the gateway's loop:

1. The uplink takes in messages from above: terms, global state, receipts. A receipt is in the journal before it is
   acknowledged. Only then do the site's devices get their receipts.
2. The uplink makes a contribution. With standing sums: if the sums changed and no generation is on its way, they become
   the next generation. The journal holds it, with a mark of each device's generation in it, before anything is sent.
   With rounds: the sum of the newest closed round becomes the contribution to that round.
3. The outbox sends. It sends again after a reconnection and when no receipt comes, until one comes.

Guarantee: killed at any moment, journal and store say what is on its way, what is above, and which devices wait for an
answer.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.errors import StatisticError
from protofleet.contract.identity.signing_keys import read_public_keys
from protofleet.contract.identity.tokens import read_token
from protofleet.contract.mqtt.link import (
    Address,
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
from protofleet.contract.wire.messages import MAX_ROUND, Announcement, Receipt, Status
from protofleet.edge_client.identity.enrolment import Enrolling
from protofleet.edge_client.identity.signing_identity import identity_of
from protofleet.edge_client.identity.trust import Trust
from protofleet.edge_client.journal.journal import Journal, Pending
from protofleet.edge_client.messages.inbox import Inbox
from protofleet.edge_client.messages.outbox import Outbox
from protofleet.edge_client.messages.presence import Presence
from protofleet.edge_client.messages.status_message import Health
from protofleet.edge_client.rounds.round_follower import Follower, largest_message_bytes
from protofleet.edge_client.rounds.waiting_notice import Absence
from protofleet.edge_client.settings import ClientConfig
from protofleet.edge_client.standing.generations import Generations
from protofleet.gateway.coordinator import GatewayCoordinator
from protofleet.gateway.rounds import Fate, GatewayRounds, why_not
from protofleet.gateway.site_terms import ABOVE

__all__ = ["Uplink"]

_BUSY_S, _IDLE_S = 0.02, 1.0
REFUSED_WAIT_S = 300.0


class Uplink:
    """The uplink of one gateway.

    Args:
        settings: as of a device: broker, fleet, id, state directory, certificates, keys.
        bundle: the fleet's bundle.
        log: receives one line for a person.

    Raises:
        UsageError, StoreError: a file holds no key, or the state directory belongs to another device.
    """

    def __init__(self, settings: ClientConfig, bundle: Bundle, log: Callable[[str], None]) -> None:
        fleet, name = settings.fleet, settings.id
        self._log, self._last_line, self._bundle = log, "", bundle
        self._address = Address.parse(
            settings.broker, ca_file=settings.ca, cert_file=settings.cert, key_file=settings.key
        )
        keys = () if settings.trust is None else read_public_keys(settings.trust)
        self._identity = identity_of(settings)
        extends = bundle.manifest.extended
        self._journal = Journal(
            Path(settings.state), fleet=fleet, device=name, bundle=bundle.sha256, extends=tuple(extends)
        )
        instance = os.urandom(8)
        boot = self._journal.begin(instance)
        self._health = Health(instance, boot, {})
        self._up, self._status = topics.up(fleet, name), topics.status(fleet, name)
        signer, marks = self._identity.signer, self._journal.issued
        self._trust = Trust(keys, self._identity, marks, fleet=fleet, device_id=name, log=log)
        token = None if settings.token is None else read_token(settings.token)
        self._enrolling = Enrolling(fleet, name, signer, token, log)
        self._outbox = Outbox(random.Random(), seal=None if signer is None else self._sealed)
        self._generations = Generations(self._journal.standing, REFUSED_WAIT_S)
        self._heard: Announcement | None = None  # the newest announcement
        self._known: tuple[bytes, dict[str, int] | None] | None = (
            None  # a run, and the generations that are settled in it
        )
        self._looked: tuple[int, str] | None = None  # round and phase in which a contribution was last made
        self._reasons: dict[int, Fate] = {}  # by round: the last one that was refused or did not go up
        self._is_up = False
        self._follower = Follower(
            name, bundle, is_done=self._journal.is_done, took_part=self._journal.took_part, stays=True
        )
        is_own = self._journal.is_own_instance
        self._presence = Presence(name, instance, boot, is_own=is_own, is_signed=signer is not None)
        self._absence = Absence()
        self._inbox = Inbox(
            self._follower,
            self._outbox,
            self._journal,
            self._presence,
            bundle,
            trust=self._trust,
            enrolling=self._enrolling,
            fleet=fleet,
            device_id=name,
            stays=True,
            on_announcement=self._announced,
            on_piece=lambda piece: None,
            on_settled=self._told,
            on_news=self._told,
            log=log,
            say=self._say,
            detail=lambda line: None,
        )
        self._link = Link(
            self._address,
            client_id(fleet, name),
            subscriptions=[topics.round_(fleet), topics.global_all(fleet), topics.down(fleet, name), self._status],
            will=(self._status, self._of_us(self._health.death())),
            largest_bytes=largest_message_bytes(bundle.manifest) + ENVELOPE_BYTES,
            echo_topic=self._status,
            keepalive_s=settings.keepalive,
        )

    def open(self) -> None:
        """Start connecting. Contributions that an earlier process left are sent first."""
        for pending in self._journal.pending():
            self._outbox.add(self._identity.signed_anew(self._up, pending))
        self._link.open()

    def close(self) -> None:
        """Publish the death message and disconnect. The next process sends what was not confirmed."""
        self._link.publish(self._status, self._of_us(self._health.death()), retain=True)
        self._link.close()
        self._journal.close()

    @property
    def announcement(self) -> Announcement | None:
        """The announcement from above, if a gateway can take part; None otherwise."""
        a = self._follower.announcement
        if a is None or a.phase == "standing":
            return a
        return None if self._why_not(a) else a

    # ── a turn ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def turn(self, core: GatewayCoordinator | GatewayRounds | None, wait_s: float = 0.0) -> None:
        """Do one turn: receive, make a contribution if one is due, send.

        Args:
            core: the aggregator of the site; None while the site waits for its terms.
            wait_s: how long to wait for a message.

        Raises:
            LinkError: the broker refuses this gateway for good, or another process has its id.
            StoreError: a disk refuses.
        """
        self._send()
        event = self._link.receive(wait_s)
        while event is not None:
            self._handle(event)
            event = self._link.receive(0.0)
        a = self._follower.announcement
        wrong = "" if a is None else self._why_not(a) if core is None else self._misfit(core, a)
        if wrong:
            self._say(f"{wrong}; nothing is sent")
        elif isinstance(core, GatewayRounds):
            self._turn_rounds(core, a)
        elif core is not None and a is not None:
            self._turn_standing(core, a)
        self._send()

    def _turn_standing(self, core: GatewayCoordinator, a: Announcement) -> None:
        now = time.monotonic()
        core.hold_to(a, now)
        state = self._follower.newest_state
        if state is not None and state.version:
            core.hear(state)
        core.settled = self._settled(a.run)
        self._make(core, a, now)
        due_s = core.standing.due_in_s(now)
        core.wait_s = self._poll_s if due_s is None else min(self._poll_s, due_s + _BUSY_S)

    @property
    def _poll_s(self) -> float:
        """How long the loop may sleep. Messages from above do not wake it."""
        return _BUSY_S if self._is_up and len(self._outbox) else _IDLE_S

    def _why_not(self, a: Announcement) -> str:
        return "" if a.phase in ("standing", "finished") else why_not(a, self._bundle.manifest.hyper)

    def _misfit(self, core: GatewayCoordinator | GatewayRounds, a: Announcement) -> str:
        """Why this site cannot give what is announced; empty where it can."""
        stands = a.phase == "standing"
        if stands == isinstance(core, GatewayRounds):
            above, below = ("sums stand", "rounds") if stands else ("there are rounds", "sums that stand")
            return f"above {above}, and this store is of {below}: another --store and --state"
        if stands and a.method != core.method.name:
            return f"above sums of {a.method} stand, and here of {core.method.name}: try --method {a.method}"
        if isinstance(core, GatewayRounds) and core.run_above not in (None, a.run):
            return "above is another run than the one that this store is of: another --store"
        return self._why_not(a)

    def _settled(self, run: bytes) -> dict[str, int] | None:
        """The generation of each device in the sums that are committed above; None while that is not known."""
        if self._known is None or self._known[0] != run:
            marks = self._journal.standing
            generation, counts = marks.newest(run)
            kept = None if not counts or marks.pending(run) else marks.samples(run)
            devices = None if kept is None else dict(json.loads(kept)["devices"])
            self._known = (run, devices if generation else {})
        return self._known[1]

    def _make(self, core: GatewayCoordinator, a: Announcement, now: float) -> None:
        """Make the next generation, if the sums changed and no generation is on its way."""
        marks = self._journal.standing
        generation, counts = marks.newest(a.run)
        if marks.pending(a.run) or core.standing.paused or not (core.standing.due(now) or not counts):
            return
        mark = core.mark()
        if (counts and marks.samples(a.run) == mark) or (not generation and not core.standing.present):
            core.standing.solved(now)
            return
        if generation >= MAX_ROUND or now < self._generations.again_at_s:
            return
        try:
            contribution = core.contribution(a, generation + 1)
        except StatisticError as error:
            self._say(f"nothing more goes up: {error}, try a second gateway for some of the devices")
            core.standing.solved(now)
            return
        payload = self._sealed(encode(contribution))
        key = (a.run, generation + 1, a.method)
        metrics = {"standing": key[1], "devices": core.devices, "payload_bytes": len(payload)}
        marks.commit(key, samples=mark, payload=payload, limit_bytes=a.limit_bytes, metrics=metrics)
        self._known = None
        core.standing.solved(now)
        self._outbox.add(Pending(key, payload, a.limit_bytes))
        self._log(f"sums {key[1]} ({a.method}) of {core.devices:,} devices: {len(payload):,} bytes to send")

    # ── rounds ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _turn_rounds(self, core: GatewayRounds, a: Announcement | None) -> None:
        core.fate = lambda round, method: self._fate(core, round, method)
        if a is not None and (a.phase != "finished" or self._follower.finished):
            core.follow(a, self._follower.newest_state, time.monotonic())
            self._make_round(core, a)
        core.rounds.poll_s = self._poll_s

    def _make_round(self, core: GatewayRounds, a: Announcement) -> None:
        """Send the sum of the newest closed round, unless it was sent."""
        looked = (core.rounds.number, core.rounds.phase)
        if looked == self._looked:
            return
        self._looked, record = looked, core.closed
        if record is None or self._journal.is_done((a.run, record.number, record.method)):
            return
        key = (a.run, record.number, record.method)
        try:
            contribution = core.contribution(a, record)
        except StatisticError as error:
            self._reasons = {record.number: ("rejected", str(error))}
            self._say(f"round {record.number} does not go up: {error}, try a second gateway for some of the devices")
            return
        payload = self._sealed(encode(contribution))
        metrics = {"round": record.number, "devices": contribution.devices, "payload_bytes": len(payload)}
        self._journal.commit_round(key, weights={}, payload=payload, limit_bytes=a.limit_bytes, metrics=metrics)
        self._journal.mark_reported(key)
        self._outbox.add(Pending(key, payload, a.limit_bytes))
        self._log(f"round {key[1]} ({key[2]}) of {contribution.devices:,} devices: {len(payload):,} bytes to send")

    def _fate(self, core: GatewayRounds, round: int, method: str) -> Fate | None:
        """The outcome above of a round's contribution; None while it is open."""
        run = core.run_above
        if round in self._reasons:
            return self._reasons[round]
        if run is None:
            return None
        outcome = self._journal.outcome((run, round, method))
        if outcome is not None:
            fates: dict[str, Fate] = {"rejected": ("rejected", "refused"), "late": ("late", "")}
            return fates.get(outcome[0], ("committed", ""))
        newest = core.closed
        is_lost = newest is not None and round < newest.number and not self._journal.is_done((run, round, method))
        return ("late", "") if is_lost else None  # sent from an earlier state directory: its outcome is unknown

    def _told(self, receipt: Receipt) -> None:
        now, before = time.monotonic(), self._generations.again_at_s
        self._generations.take_receipt(receipt, now)
        self._known = None
        if receipt.status == "rejected" and not self._journal.standing.newest(receipt.run)[0]:
            self._reasons = {receipt.round: ("rejected", receipt.reason)}
            self._say(f"round {receipt.round} was refused by {ABOVE}: {receipt.reason}")
        if self._generations.again_at_s > max(now, before):
            wait = f"in {REFUSED_WAIT_S / 60:.0f} minutes, or when it announces anything but a new head"
            self._say(f"refused by {ABOVE}: {receipt.reason}; devices wait for their receipts, tried again {wait}")

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

    def _send(self) -> None:
        now = time.monotonic()
        enrolment = self._enrolling.due(now)
        if enrolment is not None:
            self._link.publish(self._up, enrolment)
        if self._enrolling.is_open:
            return
        parts, self._health.apart = self._health.apart != self._follower.apart, self._follower.apart
        if parts or self._trust.has_to_tell or self._presence.birth_due(now):
            status = replace(self._health.birth(), heard=self._trust.heard(), rival=self._presence.rival(now))
            birth = self._identity.numbered(status, self._journal.issued, time.time())
            if self._link.publish(self._status, self._of_us(birth), retain=True):
                self._presence.born(birth.issued)
        for payload in self._outbox.due(now, idle=self._link.idle):
            self._link.publish(self._up, payload)

    def _handle(self, event: Event) -> None:
        now = time.monotonic()
        if isinstance(event, Received):
            if not self._inbox.take(event) and event.topic == self._status:
                self._presence.overwritten(now)
            self._link.acknowledge(event)
        elif isinstance(event, Connected):
            self._is_up = True
            self._outbox.connected(event.limit_bytes)
            self._presence.connected(now)
            self._enrolling.connected()
            self._absence.over()
            self._say(f"connected to {self._address}, where the sums go")
        elif isinstance(event, Disconnected):
            self._is_up = False
            for part in (self._outbox, self._presence, self._enrolling):
                part.disconnected()
            line = self._absence.line(f"no connection to {self._address}", event.reason, now)
            if line:
                self._say(line)
        elif isinstance(event, Noticed):
            self._log(event.line)
        elif isinstance(event, Failed):
            raise event.error

    def _sealed(self, payload: bytes) -> bytes:
        return self._identity.sealed(self._up, payload)

    def _of_us(self, status: Status) -> bytes:
        return self._identity.sealed(self._status, encode(status))

    def _say(self, line: str) -> None:
        """Log a line, unless it is the same as the last one."""
        if line != self._last_line:
            self._log(line)
        self._last_line = line

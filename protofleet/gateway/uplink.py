"""A gateway's way up: it is a device of the fleet above, which holds its devices' sums where others hold photos.

Link, outbox, journal, presence and trust are those of any device (`edge_client/`), and so is what a receipt means. In
each turn of the gateway's loop:

1. What came from above is taken in: terms, global state, receipts. A receipt is in the journal before it is
   acknowledged, and only then do devices get theirs.
2. If the sums are not those that were sent last, and nothing is on its way, they are made the next generation: in the
   journal with a mark of which device's generation is in them, before anything of it is sent. Where there are rounds,
   what the newest closed one below gathered is made the contribution to that round.
3. The outbox sends, again after a reconnection and when no receipt comes, until one does.

Killed at any moment, journal and store say what is on its way, what is above, and who is to be answered.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from contract import topics
from contract.bundle import Bundle
from contract.envelopes import ENVELOPE_BYTES
from contract.errors import StatisticError
from contract.link import Address, Connected, Disconnected, Event, Failed, Link, Noticed, Received, client_id
from contract.messages import MAX_ROUND, Announcement, Receipt, Status
from contract.signing_keys import read_public_keys
from contract.tokens import read_token
from contract.wire import encode
from edge_client.config import ClientConfig
from edge_client.enrolling import Enrolling
from edge_client.generations import Generations
from edge_client.health import Health
from edge_client.identity import identity_of
from edge_client.inbox import Inbox
from edge_client.journal import Journal, Pending
from edge_client.outbox import Outbox
from edge_client.presence import Presence
from edge_client.rounds import Follower, largest_message_bytes
from edge_client.trusted import Trust
from edge_client.waiting_notice import Absence
from protofleet.gateway.coordinator import GatewayCoordinator
from protofleet.gateway.rounds import Fate, GatewayRounds, why_not
from protofleet.gateway.site import ABOVE

__all__ = ["Uplink"]

_BUSY_S, _IDLE_S = 0.02, 1.0
REFUSED_WAIT_S = 300.0


class Uplink:
    """Of one gateway.

    Args:
        settings: as a device's: broker, fleet, id, state directory, certificates, keys.
        bundle: the fleet's.
        log: takes one line for a person.

    Raises:
        UsageError, StoreError: a file holds no key, or the state directory is another's.
    """

    def __init__(self, settings: ClientConfig, bundle: Bundle, log: Callable[[str], None]) -> None:
        fleet, name = settings.fleet, settings.id
        self._log, self._said, self._bundle = log, "", bundle
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
        self._known: tuple[bytes, dict[str, int] | None] | None = None  # a run, and what is settled in it
        self._looked: tuple[int, str] | None = None  # at which round, in which phase, what goes up was made
        self._reasons: dict[int, Fate] = {}  # of the last round that was refused, or did not go up
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
        """Start connecting; what an earlier process left is sent first."""
        for pending in self._journal.pending():
            self._outbox.add(self._identity.signed_anew(self._up, pending))
        self._link.open()

    def close(self) -> None:
        """Say goodbye. What was not confirmed is sent by the next process."""
        self._link.publish(self._status, self._of_us(self._health.death()), retain=True)
        self._link.close()
        self._journal.close()

    @property
    def announcement(self) -> Announcement | None:
        """What is asked for above, and a gateway can give; None while nothing is."""
        a = self._follower.announcement
        if a is None or a.phase == "standing":
            return a
        return None if self._why_not(a) else a

    # ── a turn ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def turn(self, core: GatewayCoordinator | GatewayRounds | None, wait_s: float = 0.0) -> None:
        """Do what is to be done.

        Args:
            core: the aggregator of the site; None while it waits for its terms.
            wait_s: how long to wait for something to come.

        Raises:
            LinkError: the broker refuses us for good, or another process has this id.
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
        """How long the loop may sleep: it is not woken by what comes from above."""
        return _BUSY_S if self._is_up and len(self._outbox) else _IDLE_S

    def _why_not(self, a: Announcement) -> str:
        return "" if a.phase in ("standing", "finished") else why_not(a, self._bundle.manifest.hyper)

    def _misfit(self, core: GatewayCoordinator | GatewayRounds, a: Announcement) -> str:
        """Why what is announced cannot be had of this site; empty where it can."""
        stands = a.phase == "standing"
        if stands == isinstance(core, GatewayRounds):
            above, here = ("sums stand", "rounds") if stands else ("there are rounds", "sums that stand")
            return f"above {above}, and this store is of {here}: another --store and --state"
        if stands and a.method != core.method.name:
            return f"above sums of {a.method} stand, and here of {core.method.name}: try --method {a.method}"
        if isinstance(core, GatewayRounds) and core.run_above not in (None, a.run):
            return "above is another run than the one that this store is of: another --store"
        return self._why_not(a)

    def _settled(self, run: bytes) -> dict[str, int] | None:
        """The devices' generations in what is committed above."""
        if self._known is None or self._known[0] != run:
            marks = self._journal.standing
            generation, counts = marks.newest(run)
            kept = None if not counts or marks.pending(run) else marks.samples(run)
            found = None if kept is None else dict(json.loads(kept)["devices"])
            self._known = (run, found if generation else {})
        return self._known[1]

    def _make(self, core: GatewayCoordinator, a: Announcement, now: float) -> None:
        """The next generation, if there is something to say and nothing is on its way."""
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
            made = core.contribution(a, generation + 1)
        except StatisticError as error:
            self._say(f"nothing more goes up: {error}, try a second gateway for some of the devices")
            core.standing.solved(now)
            return
        payload = self._sealed(encode(made))
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
        """What the newest closed round gathered goes up, unless it has."""
        looked = (core.rounds.number, core.rounds.phase)
        if looked == self._looked:
            return
        self._looked, record = looked, core.closed
        if record is None or self._journal.is_done((a.run, record.number, record.method)):
            return
        key = (a.run, record.number, record.method)
        try:
            made = core.contribution(a, record)
        except StatisticError as error:
            self._reasons = {record.number: ("rejected", str(error))}
            self._say(f"round {record.number} does not go up: {error}, try a second gateway for some of the devices")
            return
        payload = self._sealed(encode(made))
        metrics = {"round": record.number, "devices": made.devices, "payload_bytes": len(payload)}
        self._journal.commit_round(key, weights={}, payload=payload, limit_bytes=a.limit_bytes, metrics=metrics)
        self._journal.mark_reported(key)
        self._outbox.add(Pending(key, payload, a.limit_bytes))
        self._log(f"round {key[1]} ({key[2]}) of {made.devices:,} devices: {len(payload):,} bytes to send")

    def _fate(self, core: GatewayRounds, round: int, method: str) -> Fate | None:
        """What became above of what a round below gathered; None while that is open."""
        run = core.run_above
        if round in self._reasons:
            return self._reasons[round]
        if run is None:
            return None
        found = self._journal.outcome((run, round, method))
        if found is not None:
            fates: dict[str, Fate] = {"rejected": ("rejected", "refused"), "late": ("late", "")}
            return fates.get(found[0], ("committed", ""))
        newest = core.closed
        is_lost = newest is not None and round < newest.number and not self._journal.is_done((run, round, method))
        return ("late", "") if is_lost else None  # of an earlier state directory: nobody can say that it counts

    def _told(self, receipt: Receipt) -> None:
        now, before = time.monotonic(), self._generations.again_at_s
        self._generations.told(receipt, now)
        self._known = None
        if receipt.status == "rejected" and not self._journal.standing.newest(receipt.run)[0]:
            self._reasons = {receipt.round: ("rejected", receipt.reason)}
            self._say(f"round {receipt.round} was refused by {ABOVE}: {receipt.reason}")
        if self._generations.again_at_s > max(now, before):
            wait = f"in {REFUSED_WAIT_S / 60:.0f} minutes, or when it announces anything but a new head"
            self._say(f"refused by {ABOVE}: {receipt.reason}; devices wait for their receipts, tried again {wait}")

    def _announced(self, a: Announcement) -> None:
        """After a refusal, whatever is announced but a new head may be that what was missing is there: also the same
        once more, by an aggregator that was started anew."""
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
            told = replace(self._health.birth(), heard=self._trust.heard(), rival=self._presence.rival(now))
            birth = self._identity.numbered(told, self._journal.issued, time.time())
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
            for each in (self._outbox, self._presence, self._enrolling):
                each.disconnected()
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
        """Log a line unless it is what was said last."""
        if line != self._said:
            self._log(line)
        self._said = line

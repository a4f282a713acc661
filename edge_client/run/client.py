"""The loop of a device: it joins the MQTT link, the journal, the outbox and the core. See docs/wire.md.

1. Connect. Subscribe to the fleet's round, its global state, this device's receipts and its own status. Publish a
   retained birth, with a death as last will. Contributions that an earlier process left are sent first.
2. Do a round when it is open, this device is sampled and the global state is here (`round_work.py`). The round is
   durable before anything of it is sent.
3. Send a contribution again after a reconnection, or when no receipt comes, until a receipt comes. A receipt is
   written to the journal before the MQTT message that carried it is acknowledged.
4. Write a new global state to the disk, so that answers need no broker. When the round's own state has come back, test
   the device with it, append a line to `history.jsonl`, and publish the accuracy in the status, unless it is to stay
   on this device.
5. When a bundle is offered, fetch it beside all this, try it, and end for it between two rounds (`rollout_work.py`).
6. When the run is finished, wait for the next one. Where the client is to end with its run, wait until nothing waits
   for a receipt, then publish a death and return.

While nothing happens, the loop sleeps. It looks for new photos every ten minutes, and when `look` asks for it (SIGUSR1,
`process.py`). It tells a service manager that it is alive. It logs what it waits for, once for each change.

Guarantees:

- Everything that arrives is taken in (`inbox.py`) before any work is begun, so the newest is worked on.
- A malformed message is acknowledged, so that it does not come again.
- Killed at any moment, the journal has all of a round or nothing of it.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.console.service_manager import ServiceManager
from protofleet.contract.errors import LinkError
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
from protofleet.contract.wire.messages import Announcement, Status
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.device.drift_watch import DriftWatch
from protofleet.edge_client.device.own_samples import OwnSamples
from protofleet.edge_client.hardware import process_metrics
from protofleet.edge_client.identity.enrolment import Enrolling
from protofleet.edge_client.identity.signing_identity import Identity
from protofleet.edge_client.identity.trust import Trust
from protofleet.edge_client.journal.journal import Journal
from protofleet.edge_client.messages.inbox import Inbox
from protofleet.edge_client.messages.outbox import Outbox
from protofleet.edge_client.messages.presence import Presence
from protofleet.edge_client.messages.status_message import Health
from protofleet.edge_client.privacy.blinded_shares import Blinding
from protofleet.edge_client.privacy.releases import Releases
from protofleet.edge_client.rollout.rollout_work import RolloutWork
from protofleet.edge_client.rounds.patience import Patience
from protofleet.edge_client.rounds.round_follower import Follower, Task, largest_message_bytes
from protofleet.edge_client.rounds.waiting_notice import Absence, Waits
from protofleet.edge_client.run.latest_state import KeptState
from protofleet.edge_client.run.round_work import RoundWork

__all__ = ["SUMMARY_SCHEMA", "Client"]

SUMMARY_SCHEMA = "protofleet.client/1"
_QUIET_S = 0.05  # no message for so long: what has arrived is all there is for now
_BUSY_S, _IDLE_S = 1.0, 60.0  # a turn of the loop at least so often
_LOOK_S = 600.0  # between two looks at the photos
_HANGS_S = 120.0  # a network thread that has not gone round for so long, not even in vain


class Client:
    """One device on one fleet.

    Args:
        device: its core, with the weights of the journal restored.
        journal: its open state directory.
        bundle: the fleet's bundle.
        address: where the broker is.
        fleet, device_id: as in the topics.
        trusted: public keys, 32 bytes each: nothing else is believed; none where signatures are not looked at.
        identity: the key that the device signs with.
        token: with which it is to be enrolled first.
        rollout: what it does about roll-outs, one of which may have brought the bundle.
        samples: its photos, which are looked after between rounds.
        until_finished: whether `run` ends with the run, instead of waiting for the next one.
        patience_s: how long to wait for the first connection, None for ever; and, with `until_finished`, after the end
            of a run for a receipt.
        keepalive_s: how long an idle connection says nothing.
        measured: figures of `profile --measure` that go into every birth.
        releases: what all that leaves passes: the policy of its owner, and the ledger.
        blinding: what it asks of blinded rounds; None for open rounds alone.
        photos: what the device tests with, in words.
        tells_accuracy: whether its accuracy goes into its status.
        drift: measures how unlike earlier photos new ones are, for its status; None where that is not told.
        log: takes one line for a person.
        stopping: ends `run`, once it is set and nothing is being done.
        detail: takes a line for each message, and the link's counts at the end.
        manager: of the service, if there is one.
    """

    def __init__(
        self,
        *,
        device: Device,
        journal: Journal,
        bundle: Bundle,
        address: Address,
        fleet: str,
        device_id: str,
        rollout: RolloutWork,
        releases: Releases,
        trusted: Collection[bytes] = (),
        identity: Identity | None = None,
        token: bytes | None = None,
        samples: OwnSamples | None = None,
        until_finished: bool = True,
        patience_s: float | None = 60.0,
        keepalive_s: int = 60,
        measured: Mapping[str, float] | None = None,
        blinding: Blinding | None = None,
        photos: str = "test photos",
        tells_accuracy: bool = False,
        drift: DriftWatch | None = None,
        log: Callable[[str], None] = lambda line: None,
        stopping: threading.Event | None = None,
        detail: Callable[[str], None] | None = None,
        manager: ServiceManager | None = None,
    ) -> None:
        self._device, self._journal, self._bundle, self._rollout = device, journal, bundle, rollout
        self._address, self._fleet, self._id = address, fleet, device_id
        self._patience = Patience(address, patience_s, until_finished=until_finished, now_s=time.monotonic())
        self._samples, self._until_finished = samples, until_finished
        self._manager = manager or ServiceManager({})
        self._log, self._detail = log, detail or (lambda line: None)
        self._stopping = stopping or threading.Event()
        self._releases, self._tells_accuracy, self._drift = releases, tells_accuracy, drift
        self._blinding = blinding or Blinding(bundle.manifest, fleet=fleet, device=device_id)
        instance = os.urandom(8)
        self._boot = journal.begin(instance)
        self._health = Health(instance, self._boot, measured or {}, is_private=lambda: releases.is_private)
        self._health.tell_bundle(rollout.versions())
        self._health.joint_head = releases.policy.joint_head
        self._up, self._status = topics.up(fleet, device_id), topics.status(fleet, device_id)
        self._identity = identity or Identity()
        self._trust = Trust(trusted, self._identity, journal.issued, fleet=fleet, device_id=device_id, log=log)
        self._enrolling = Enrolling(fleet, device_id, self._identity.signer, token, log)
        self._outbox = Outbox(random.Random(), seal=self._sealing)
        self._follower = Follower(
            device_id,
            bundle,
            is_done=journal.is_done,
            took_part=journal.took_part,
            was_rejected=lambda key: (journal.outcome(key) or ("", 0))[0] == "rejected",
            stays=not until_finished,
        )
        is_signed = self._identity.signer is not None
        self._presence = Presence(device_id, instance, self._boot, is_own=journal.is_own_instance, is_signed=is_signed)
        self._rounds = RoundWork(
            device,
            journal,
            self._outbox,
            self._follower,
            device_id=device_id,
            boot=self._boot,
            samples=samples,
            manager=self._manager,
            releases=releases,
            photos=photos,
            log=log,
            blinding=self._blinding,
            probation=rollout.probation,
            seal=self._sealed,
        )
        self._tells_new = releases.policy.allows_figure("new-photos") and not self._blinding.is_on
        self._note = ""
        self._waits, self._absence = Waits(), Absence()
        self._kept = KeptState(device, journal, self._follower, anew=rollout.probation.is_on)
        self._look_at_s = time.monotonic() + _LOOK_S
        self._count_new_photos()
        self._inbox = Inbox(
            self._follower,
            self._outbox,
            journal,
            self._presence,
            bundle,
            trust=self._trust,
            enrolling=self._enrolling,
            fleet=fleet,
            device_id=device_id,
            stays=not until_finished,
            on_announcement=rollout.announced,
            on_piece=lambda piece: rollout.take(piece, time.monotonic()),
            on_settled=self._rounds.on_final_receipt,
            on_news=self._rounds.take_receipt,
            on_judged=self._rounds.judged,
            on_joint=self._rounds.joint_part,
            log=log,
            say=self._say,
            detail=self._detail,
        )
        self._link = Link(
            address,
            client_id(fleet, device_id),
            subscriptions=[topics.round_(fleet), topics.global_all(fleet), topics.down(fleet, device_id), self._status],
            will=(self._status, self._sealed_status(self._health.death())),
            largest_bytes=largest_message_bytes(bundle.manifest) + ENVELOPE_BYTES,
            echo_topic=self._status,
            keepalive_s=keepalive_s,
        )

    def run(self) -> None:
        """Take part until `stopping` is set, the run is finished, or another bundle has to run (`rollout.is_over`).

        Raises:
            LinkError: no broker within the patience, refused for good, or another process under this id.
            UsageError: the fleet runs another bundle, and the client ends with the run.
            StoreError: the disk refused; what was committed is safe.
        """
        self._add_kept()
        self._link.open()
        polite = True
        try:
            self._loop()
        except LinkError:
            polite = False  # refused, or the id is another process's now: nothing more may be said under it
            raise
        finally:
            if polite:
                self._link.publish(self._status, self._sealed_status(self._health.death()), retain=True)
            self._link.close()
            self._rollout.close()
            self._detail(
                f"link closed: {self._patience.connections} connections, {self._inbox.malformed} messages skipped, "
                f"{self._trust.refused} refused, {self._link.dropped} dropped at QoS 0, "
                f"{len(self._outbox)} contributions without a receipt"
            )

    def wake(self) -> None:
        """Look at once whether to stop. May be called from any thread."""
        self._link.wake()

    def look(self) -> None:
        """Look at the photos now. May be called from any thread, and from a signal handler."""
        self._look_at_s = float("-inf")
        self._link.wake()

    def summary(self) -> dict[str, Any]:
        """What this device has done, as `--json` writes it."""
        return {
            "schema": SUMMARY_SCHEMA,
            "fleet": self._fleet,
            "device": self._id,
            "bundle": self._bundle.sha256.hex(),
            "boot": self._boot,
            "contributions": self._journal.outcomes(),
            "malformed": self._inbox.malformed,
            "refused": self._trust.refused,
            "connections": self._patience.connections,
            "step_ms": self._health.step_ms,
            "privacy": self._releases.facts(),
            **process_metrics.facts(),
        }

    # ── the loop ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _loop(self) -> None:
        waiting = False  # whether the last look found nothing to do
        while not self._rollout.is_over:
            if self._link.still_s < _HANGS_S:
                self._manager.alive()
            self._send()
            event = self._link.receive(self._wait_s() if waiting else _QUIET_S)
            if event is not None:
                self._handle(event)
            waiting = event is None and not self._work()  # work only once what has arrived is taken in
            if waiting:
                if self._over() or self._stopping.is_set():
                    return
                follower, unsent = self._follower, len(self._outbox)
                self._patience.check(time.monotonic(), finished=follower.finished, waiting=unsent, reason=self._note)
                if follower.announcement is None:
                    self._patience.check_trust(time.monotonic(), refused=self._trust.refused)
                self._rollout.rested(follower.announcement, settled=not unsent, plausible=self._kept.is_plausible)
                self._tell_what_is_waited_for()

    def _wait_s(self) -> float:
        now_s = time.monotonic()
        due = (self._outbox, self._presence, self._waits, self._rollout, self._enrolling)
        waits = [self._manager.wait_s, self._look_at_s - now_s, *(part.wait_s(now_s) for part in due)]
        waits.append(_BUSY_S if self._is_timed() else _IDLE_S)
        return max(min(wait for wait in waits if wait is not None), _QUIET_S)

    def _is_timed(self) -> bool:
        """Whether something is waited for that has a time limit, or that the outbox counts from: bytes on their way."""
        reports = self._follower.finished and self._rounds.unreported is not None
        return reports or not self._link.idle or self._patience.is_timed

    def _send(self) -> None:
        now_s = time.monotonic()
        enrolment = self._enrolling.due(now_s)
        if enrolment is not None:
            self._link.publish(self._up, enrolment)
        if self._enrolling.is_open:
            return
        refused = self._trust.to_report(now_s)
        if refused is not None:
            self._health.unsigned = refused
        if self._health.apart != self._follower.apart:
            self._health.apart = self._follower.apart
            self._publish_birth()
        if refused is not None or self._trust.has_to_tell or self._presence.birth_due(now_s):
            self._publish_birth()
        for payload in self._outbox.due(now_s, idle=self._link.idle):
            taken = self._link.publish(self._up, payload)
            self._detail(f"{'sent' if taken else 'not sent'} {len(payload):,} bytes on {self._up}")
        if self._link.idle:
            self._rollout.send(lambda payload: self._link.publish(self._up, self._sealed(payload)), now_s)
        if self._health.tell_bundle(self._rollout.versions()):
            self._publish_birth()

    def _work(self) -> bool:
        """Do one thing that is to be done; False when there is nothing."""
        if self._kept.keep() or self._rollout.work(is_settled=not len(self._outbox)):
            return True
        self._look_for_photos()
        standing = self._follower.standing
        if standing is not None and self._stand(standing):
            return True
        task = self._follower.task()
        has_last_state = self._kept.has_last_state(time.monotonic() - self._patience.progress_s)
        last = self._follower.finished and has_last_state and not len(self._outbox)
        report = self._rounds.unreported
        if report is not None and (task is not None or last or self._rounds.is_complete(report)):
            accuracy = self._rounds.report(report)
            if accuracy is not None and self._tells_accuracy and not self._releases.is_private:
                run, number, _ = report.key
                self._health.accuracy = accuracy.metrics(run, number)
                self._publish_birth()
            return True
        if task is not None:
            self._take_part(task)
            return True
        return self._rounds.compare()

    def _add_kept(self) -> None:
        """What earlier processes left to be sent, but for what the policy of this start does not allow."""
        contributed = self._journal.contributed()
        for pending in self._journal.pending():
            why = self._releases.may_send(pending.key) if pending.key in contributed else ""
            if not why and not self._blinding.permits(pending.payload):
                why = "it was open, and now there is --helper-key"
            if why:
                self._journal.give_up(pending.key, f"not sent: {why}")
                self._log(f"what was made for round {pending.key[1]} ({pending.key[2]}) is not sent: {why}")
            else:
                self._outbox.add(self._identity.signed_anew(self._up, pending))

    def _take_part(self, task: Task) -> None:
        step_ms, changed = self._rounds.take_part(task), self._count_new_photos() | self._tell_refusal()
        first = step_ms is not None and self._health.step_ms is None
        self._health.step_ms = step_ms if first else self._health.step_ms
        if first | changed | self._measure_drift():  # the aggregator's side reads it
            self._publish_birth()

    def _tell_refusal(self) -> bool:
        """Whether the operator is to be told anew what the policy refused."""
        before, self._health.refused = self._health.refused, self._rounds.refused
        return before != self._health.refused

    def _stand(self, a: Announcement) -> bool:
        sent = self._rounds.stand(a)
        if self._tell_refusal():
            self._publish_birth()
        if sent and self._count_new_photos() | self._measure_drift():
            self._publish_birth()
        return sent

    def _look_for_photos(self) -> None:
        """When it is time; how many are new is said where that has changed, and where it may be."""
        if time.monotonic() < self._look_at_s:
            return
        self._look_at_s = time.monotonic() + _LOOK_S
        if self._samples is not None:
            self._samples.look()
        if self._count_new_photos():
            self._publish_birth()

    def _measure_drift(self) -> bool:
        return not self._releases.is_private and self._health.measure(self._drift)

    def _count_new_photos(self) -> bool:
        before = self._health.samples_new
        if self._samples is not None and self._tells_new and not self._releases.is_private:
            self._health.samples_new = self._samples.new
        return self._health.samples_new != before

    def _over(self) -> bool:
        done = self._follower.finished and not len(self._outbox) and self._rounds.unreported is None
        return self._until_finished and done

    def _handle(self, event: Event) -> None:
        now_s = time.monotonic()
        if isinstance(event, Received):
            if self._inbox.take(event):
                self._patience.progress_s = now_s
            elif event.topic == self._status:
                self._presence.overwritten(now_s)
            self._link.acknowledge(event)
        elif isinstance(event, Connected):
            self._patience.progress_s = now_s
            self._patience.connections += 1
            self._outbox.connected(event.limit_bytes)
            self._detail(f"connection {self._patience.connections}, messages up to {event.limit_bytes:,} bytes")
            self._presence.connected(now_s)
            self._enrolling.connected()
            self._rollout.connected()
            self._absence.over()
            self._say(f"connected to {self._address}")
        elif isinstance(event, Disconnected):
            for part in (self._outbox, self._presence, self._rollout, self._enrolling):
                part.disconnected()
            if self._patience.connections or not self._until_finished:
                what = "connection lost" if self._patience.connections else f"no broker at {self._address} yet"
                line = self._absence.line(what, event.reason, now_s)
                if line:
                    self._log(line)
                    self._manager.status(line)
            self._detail(f"no connection ({event.reason}), again in {event.retry_s:.1f} s")
            self._note = event.reason
        elif isinstance(event, Noticed):
            self._log(event.line)
        elif isinstance(event, Failed):
            raise event.error

    def _publish_birth(self) -> None:
        if self._enrolling.is_open:
            return
        self._releases.figures(self._health.figures)
        status = replace(self._health.birth(), heard=self._trust.heard(), rival=self._presence.rival(time.monotonic()))
        birth = self._identity.numbered(status, self._journal.issued, time.time())
        if self._link.publish(self._status, self._sealed_status(birth), retain=True):
            self._presence.born(birth.issued)

    def _sealed(self, payload: bytes) -> bytes:
        """What goes up, as it is published."""
        return self._identity.sealed(self._up, payload)

    @property
    def _sealing(self) -> Callable[[bytes], bytes] | None:
        return None if self._identity.signer is None else self._sealed

    def _sealed_status(self, status: Status) -> bytes:
        """What this device says of itself, as it is published."""
        return self._identity.sealed(self._status, encode(status))

    def _tell_what_is_waited_for(self) -> None:
        waited_for = self._outbox.waits_for()
        if self._patience.connections and not self._outbox:
            waited_for = self._follower.waits_for() or self._rounds.waits_for()
        line = self._waits.line(waited_for, time.monotonic())
        if line:
            self._log(line)
            self._manager.status(line)

    def _say(self, line: str) -> None:
        """Log a line unless it is what was said last."""
        if line != self._note:
            self._log(line)
        self._note = line

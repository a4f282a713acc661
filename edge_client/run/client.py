"""The loop of a device: it joins the member of a fleet, the journal and the core. See docs/wire.md.

1. Connect, as any member does (`member.py`). Contributions that an earlier process left are sent first.
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

While nothing happens, the loop sleeps. It looks for new photos every ten minutes, when `look` asks for it (SIGUSR1,
`process.py`), and within ten seconds after `learn` or `unlearn`, of whatever process. It tells a service manager that
it is alive. It logs what it waits for, once for each change.

Guarantees:

- Everything that arrives is taken in (`inbox.py`) before any work is begun, so the newest is worked on.
- A malformed message is acknowledged, so that it does not come again.
- Killed at any moment, the journal has all of a round or nothing of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from protofleet.contract.console.logs import Changes, about, of_round
from protofleet.contract.console.service_manager import ServiceManager
from protofleet.contract.errors import LinkError
from protofleet.contract.mqtt.link import Connected, Disconnected, Event
from protofleet.contract.wire.messages import Announcement, Receipt
from protofleet.edge_client.device.drift_watch import DriftWatch
from protofleet.edge_client.hardware import process_metrics
from protofleet.edge_client.journal.journal import Journal
from protofleet.edge_client.messages.inbox import Hearing
from protofleet.edge_client.messages.membership import Membership
from protofleet.edge_client.rollout.rollout_work import RolloutWork
from protofleet.edge_client.rounds.patience import Patience
from protofleet.edge_client.rounds.round_follower import Task
from protofleet.edge_client.rounds.waiting_notice import Waits
from protofleet.edge_client.run.calibration_work import CalibrationWork
from protofleet.edge_client.run.latest_state import KeptState
from protofleet.edge_client.run.member import Member
from protofleet.edge_client.run.round_work import Line, Own, RoundWork

if TYPE_CHECKING:
    from protofleet.edge_client.run.photo_work import PhotoWork

__all__ = ["SUMMARY_SCHEMA", "Client", "Figures"]

logger = logging.getLogger(__name__)

SUMMARY_SCHEMA = "protofleet.client/1"
_QUIET_S = 0.05  # no message for so long: what has arrived is all there is for now
_BUSY_S, _IDLE_S = 1.0, 60.0  # a turn of the loop at least so often
_TAUGHT_S = 10.0  # the same, for a device that may be taught by another process
_LOOK_S = 600.0  # between two looks at the photos
_HANGS_S = 120.0  # a network thread that has not gone round for so long, not even in vain


@dataclass(frozen=True)
class Figures:
    """What goes into a device's status beside what every device says.

    Attributes:
        measured: figures of `profile --measure`, in every birth.
        tells_accuracy: whether its accuracy is told.
        drift: measures how unlike earlier photos new ones are; None where that is not told.
        tells_calibration: whether the fleet is told how true its probabilities are on held-out photos.
    """

    measured: Mapping[str, float] = field(default_factory=dict)
    tells_accuracy: bool = False
    drift: DriftWatch | None = None
    tells_calibration: bool = False


class Client:
    """One device on one fleet.

    Args:
        who: the device in its fleet. One that stays waits for the next run when one is finished; else `run` ends.
        journal: its open state directory.
        own: what it has, and what of it may leave.
        rollout: what it does about roll-outs, one of which may have brought the bundle.
        figures: what goes into its status.
        patience_s: how long to wait for the first connection, None for ever; and, where it does not stay, after the end
            of a run for a receipt.
        stopping: ends `run`, once it is set and nothing is being done.
        manager: of the service.
        photos: of its camera; None for a client without.
    """

    def __init__(
        self,
        who: Membership,
        journal: Journal,
        own: Own,
        *,
        rollout: RolloutWork,
        figures: Figures,
        patience_s: float | None,
        stopping: threading.Event,
        manager: ServiceManager,
        photos: PhotoWork | None = None,
    ) -> None:
        releases, until_finished = own.releases, not who.stays
        self._journal, self._own, self._rollout, self._figures = journal, own, rollout, figures
        self._patience = Patience(who.address, patience_s, until_finished=until_finished, now_s=time.monotonic())
        self._until_finished, self._manager, self._stopping = until_finished, manager, stopping
        self._releases, self._samples = releases, own.samples
        member = self._member = Member(
            who,
            journal,
            Changes(logger),
            measured=figures.measured,
            is_private=lambda: releases.is_private,
        )
        self._health, self._follower, self._outbox = member.health, member.follower, member.outbox
        self._health.tell_bundle(rollout.versions())
        self._health.joint_head = releases.policy.joint_head
        line = Line(journal, member.outbox, member.follower, who.name, member.boot, member.sealed)
        self._rounds = RoundWork(own, line, manager=manager, probation=rollout.probation)
        self._calibration = CalibrationWork(own.device, journal, tells=figures.tells_calibration)
        self._tells_new = releases.policy.allows_figure("new-photos") and not own.blinding.is_on
        self._waits, self._photos = Waits(), photos
        self._kept = KeptState(own.device, journal, member.follower, anew=rollout.probation.is_on)
        self._look_at_s = time.monotonic() + _LOOK_S
        self._count_new_photos()
        hearing = Hearing(
            announcement=rollout.announced,
            piece=lambda piece: rollout.take(piece, time.monotonic()),
            settled=self._settled,
            news=self._news,
            judged=self._rounds.judged,
            joint=self._rounds.joint_part,
        )
        member.hear(hearing, lambda: releases.figures(self._health.released))

    def run(self) -> None:
        """Take part until `stopping` is set, the run is finished, or another bundle has to run (`rollout.is_over`).

        Raises:
            LinkError: no broker within the patience, refused for good, or another process under this id.
            UsageError: the fleet runs another bundle, and the client ends with the run.
            StoreError: the disk refused; what was committed is safe.
        """
        self._add_kept()
        self._member.link.open()
        polite = True
        try:
            self._loop()
        except LinkError:
            polite = False  # refused, or the id is another process's now: nothing more may be said under it
            raise
        finally:
            self._member.close(polite=polite)
            self._rollout.close()
            member = self._member
            logger.debug(
                f"link closed: {self._patience.connections} connections, {member.inbox.malformed} messages skipped, "
                f"{member.trust.refused} refused, {member.link.dropped} dropped at QoS 0, "
                f"{len(self._outbox)} contributions without a receipt"
            )

    def wake(self) -> None:
        """Look at once whether to stop. May be called from any thread."""
        self._member.link.wake()

    def look(self) -> None:
        """Look at the photos now. May be called from any thread, and from a signal handler."""
        self._look_at_s = float("-inf")
        self._member.link.wake()

    def summary(self) -> dict[str, Any]:
        """What this device has done, as `--json` writes it."""
        return {
            "schema": SUMMARY_SCHEMA,
            "fleet": self._member.who.fleet,
            "device": self._member.who.name,
            "bundle": self._member.who.bundle.sha256.hex(),
            "boot": self._member.boot,
            "contributions": self._journal.outcomes(),
            "malformed": self._member.inbox.malformed,
            "refused": self._member.trust.refused,
            "connections": self._patience.connections,
            "step_ms": self._health.step_ms,
            "privacy": self._releases.facts(),
            **process_metrics.facts(),
        }

    # ── the loop ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _loop(self) -> None:
        waiting = False  # whether the last look found nothing to do
        while not self._rollout.is_over:
            if self._member.link.still_s < _HANGS_S:
                self._manager.alive()
            self._send()
            event = self._member.link.receive(self._wait_s() if waiting else _QUIET_S)
            if event is not None:
                self._handle(event)
            waiting = event is None and not self._work()  # work only once what has arrived is taken in
            if waiting:
                if self._over() or self._stopping.is_set():
                    return
                follower, unsent, note = self._follower, len(self._outbox), self._member.changes.last
                self._patience.check(time.monotonic(), finished=follower.finished, waiting=unsent, reason=note)
                if follower.announcement is None:
                    self._patience.check_trust(time.monotonic(), refused=self._member.trust.refused)
                self._rollout.rested(follower.announcement, settled=not unsent, plausible=self._kept.is_plausible)
                self._tell_what_is_waited_for()

    def _wait_s(self) -> float:
        now_s = time.monotonic()
        due = (self._outbox, self._member.presence, self._waits, self._rollout, self._member.enrolling)
        waits = [self._manager.wait_s, self._look_at_s - now_s, *(part.wait_s(now_s) for part in due)]
        waits.append(self._calibration.wait_s(self._follower.newest_state, now_s))
        idle_s = _IDLE_S if self._samples is None else _TAUGHT_S
        waits.append(_BUSY_S if self._is_timed() else idle_s)
        return max(min(wait for wait in waits if wait is not None), _QUIET_S)

    def _is_timed(self) -> bool:
        """Whether something is waited for that has a time limit, or that the outbox counts from: bytes on their way."""
        reports = self._follower.finished and self._rounds.unreported is not None
        settles = self._until_finished and not self._calibration.is_settled(time.monotonic())
        return reports or settles or not self._member.link.idle or self._patience.is_timed

    def _send(self) -> None:
        now_s, member = time.monotonic(), self._member
        refused = None if member.enrolling.is_open else member.trust.to_report(now_s)
        if refused is not None:
            self._health.unsigned = refused
            member.publish_birth()
        if not member.send(now_s):
            return
        if member.link.idle:
            self._rollout.send(lambda payload: member.link.publish(member.up, member.sealed(payload)), now_s)
        if self._health.tell_bundle(self._rollout.versions()):
            member.publish_birth()

    def _work(self) -> bool:
        """Do one thing that is to be done; False when there is nothing."""
        if self._kept.keep() or self._rollout.work(is_settled=not len(self._outbox)):
            return True
        self._look_for_photos()
        announced = self._follower.announcement
        is_private, photos = self._releases.is_private, self._photos
        if photos is not None and announced is not None and photos.turn(announced, is_private=is_private):
            self._health.proposed, self._health.unknown_share = photos.proposed, photos.unknown_share
            self._member.publish_birth()
        if self._calibrate():
            return True
        standing = self._follower.standing
        if standing is not None and self._stand(standing):
            return True
        task = self._follower.task()
        has_last_state = self._kept.has_last_state(time.monotonic() - self._patience.progress_s)
        last = self._follower.finished and has_last_state and not len(self._outbox)
        report = self._rounds.unreported
        if report is not None and (task is not None or last or self._rounds.is_complete(report)):
            with about(**of_round(report.key)):
                accuracy = self._rounds.report(report)
            if accuracy is not None and self._figures.tells_accuracy and not self._releases.is_private:
                run, number, _ = report.key
                self._health.accuracy = accuracy.metrics(run, number)
                self._member.publish_birth()
            return True
        if task is not None:
            self._take_part(task)
            return True
        return self._rounds.compare() or self._calibration.test(self._follower.newest_state, time.monotonic())

    def _settled(self, receipt: Receipt) -> None:
        self._rounds.on_final_receipt(receipt)
        if self._photos is not None:
            self._photos.settled(receipt)

    def _news(self, receipt: Receipt) -> None:
        self._rounds.take_receipt(receipt)
        if self._photos is not None:
            self._photos.heard(receipt)

    def _add_kept(self) -> None:
        """What earlier processes left to be sent, but for what the policy of this start does not allow."""
        contributed = self._journal.contributed()
        for pending in self._journal.pending():
            why = self._releases.may_send(pending.key) if pending.key in contributed else ""
            if not why and not self._own.blinding.permits(pending.payload):
                why = "it was open, and now there is --helper-key"
            if why:
                self._journal.give_up(pending.key, f"not sent: {why}")
                line = f"what was made for round {pending.key[1]} ({pending.key[2]}) is not sent: {why}"
                logger.warning(line, extra=of_round(pending.key))
            else:
                self._outbox.add(self._member.who.identity.signed_anew(self._member.up, pending))

    def _take_part(self, task: Task) -> None:
        naming = 0 if self._photos is None else self._photos.before()
        with about(**of_round(task.key)):
            step_ms = self._rounds.take_part(task)
        if self._photos is not None:
            self._photos.made(task.key, naming)
            self._photos.cost = self._releases.cost_line()
        changed = self._count_new_photos() | self._tell_refusal()
        first = step_ms is not None and self._health.step_ms is None
        self._health.step_ms = step_ms if first else self._health.step_ms
        if first | changed | self._measure_drift():  # the aggregator's side reads it
            self._member.publish_birth()

    def _tell_refusal(self) -> bool:
        """Whether the operator is to be told anew what the policy refused."""
        before, self._health.refused = self._health.refused, self._rounds.refused
        return before != self._health.refused

    def _stand(self, a: Announcement) -> bool:
        naming = 0 if self._photos is None else self._photos.before()
        sent = self._rounds.stand(a)
        if sent and self._photos is not None and self._rounds.newest is not None:
            self._photos.made(self._rounds.newest.key, naming)
            self._photos.cost = self._releases.cost_line()
        if self._tell_refusal():
            self._member.publish_birth()
        if sent and self._count_new_photos() | self._measure_drift():
            self._member.publish_birth()
        return sent

    def _look_for_photos(self) -> None:
        """When it is time, or the device was taught; how many are new is said where that has changed, and may be."""
        taught = self._samples is not None and self._samples.was_taught()
        if not taught and time.monotonic() < self._look_at_s:
            return
        self._look_at_s = time.monotonic() + _LOOK_S
        if self._samples is not None:
            self._samples.look()
        if self._photos is not None:
            self._photos.look()
        if self._count_new_photos():
            self._member.publish_birth()

    def _calibrate(self) -> bool:
        """Keep what probabilities follow from; whether the fleet is told something new of it."""
        announcement = self._follower.announcement
        announced = None if announcement is None else announcement.calibration
        if not self._calibration.turn(announced, time.monotonic(), is_private=self._releases.is_private):
            return False
        self._health.calibration = self._calibration.report
        self._member.publish_birth()
        return True

    def _measure_drift(self) -> bool:
        return not self._releases.is_private and self._health.measure(self._figures.drift)

    def _count_new_photos(self) -> bool:
        before = self._health.samples_new
        if self._samples is not None and self._tells_new and not self._releases.is_private:
            self._health.samples_new = self._samples.new
        return self._health.samples_new != before

    def _over(self) -> bool:
        done = self._follower.finished and not len(self._outbox) and self._rounds.unreported is None
        return self._until_finished and done and self._calibration.is_settled(time.monotonic())

    def _handle(self, event: Event) -> None:
        now_s = time.monotonic()
        if self._member.handle(event) or isinstance(event, Connected):
            self._patience.progress_s = now_s
        if isinstance(event, Connected):
            self._patience.connections += 1
            logger.debug(f"connection {self._patience.connections}, messages up to {event.limit_bytes:,} bytes")
            self._rollout.connected()
            self._member.changes.say(f"connected to {self._member.who.address}")
        elif isinstance(event, Disconnected):
            self._rollout.disconnected()
            if self._patience.connections or not self._until_finished:
                here = self._member.who.address
                what = "connection lost" if self._patience.connections else f"no broker at {here} yet"
                line = self._member.absence.line(what, event.reason, now_s)
                if line:
                    logger.info(line)
                    self._manager.status(line)
            logger.debug(f"no connection ({event.reason}), again in {event.retry_s:.1f} s")
            self._member.changes.last = event.reason

    def _tell_what_is_waited_for(self) -> None:
        waited_for = self._outbox.waits_for()
        if self._patience.connections and not self._outbox:
            waited_for = self._follower.waits_for() or self._rounds.waits_for()
        line = self._waits.line(waited_for, time.monotonic())
        if line:
            logger.info(line)
            self._manager.status(line)

"""The loop of a device: link, journal, outbox and core put together. See docs/wire.md.

What happens, in order:

1. Connect, listen to the fleet's round, its global state, this device's receipts and its own status; say that we are
   here (a retained birth, with a death as last will). Contributions that an earlier process left are sent first.
2. When a round is open, we are sampled and its global state is here: run the round (`device.Device`), then commit
   weights, contribution and the round's mark in one transaction, and only then send. A round whose training diverges
   is left out: the weights stay, and what is sent says only that we took part.
3. Send again after a reconnection, or when no receipt comes, until one does. Receipts are written to the journal
   before the MQTT message that carried them is acknowledged.
4. A new global state is put on the disk, so that answers need no broker. When the round's has come back, test the
   device with it, append a line to `history.jsonl`, and say in the status how many are named right, unless that is to
   stay here.
5. When the run is finished and nothing waits for a receipt: publish a death and return.

A person is told what is waited for, once for each change (`waits`).

Everything that arrives is taken in before anything is begun, so that what is worked on is the newest there is. A
malformed message is counted, logged and acknowledged, so that it does not come again; it stops nothing. At any moment
the process may be killed: the journal then holds either all of a round or nothing of it.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from contract import topics
from contract.bundle import Bundle
from contract.errors import DivergedError, LinkError, WireError
from contract.link import Address, Connected, Disconnected, Event, Failed, Link, Received
from contract.messages import Announcement, GlobalPart, Message, Receipt, Status
from contract.methods import METHODS, method
from contract.terminal import counted
from contract.wire import decode, encode
from edge_client import process_metrics
from edge_client.device import Device
from edge_client.evaluate import in_words
from edge_client.history import append_line, history_line
from edge_client.journal import FINAL, Journal, Pending, Report
from edge_client.outbox import Outbox, fitting
from edge_client.presence import Presence
from edge_client.privacy import Accountant
from edge_client.rounds import Follower, Task
from edge_client.waiting_notice import Waits

__all__ = ["SUMMARY_SCHEMA", "Client"]

SUMMARY_SCHEMA = "protofleet.client/1"
_QUIET_S = 0.05  # no message for so long: what has arrived is all there is for now
_IDLE_S = 1.0
_LAST_STATE_S = 5.0  # how long a finished run's last global state may take to arrive
_KEEPALIVE_S = 90  # an idle minute is then under 100 bytes, TCP and IP included


class Client:
    """One device on one fleet.

    Args:
        device: its core, with the weights of the journal restored.
        journal: its open state directory.
        bundle: the fleet's bundle.
        address: where the broker is.
        fleet, device_id: as in the topics.
        patience_s: how long to wait for the first connection, and, after the end of a run, for a receipt.
        measured: figures of `profile --measure` that go into every birth.
        accountant: of noise, where the bundle says that its method adds it.
        photos: what the device tests with, in words.
        tells_accuracy: whether its accuracy goes into its status.
        log: takes one line for a person.
        stopping: ends `run`, once it is set and nothing is being done.
        detail: takes a line for each message, and the link's counts at the end.
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
        patience_s: float = 60.0,
        measured: Mapping[str, float] | None = None,
        accountant: Accountant | None = None,
        photos: str = "test photos",
        tells_accuracy: bool = False,
        log: Callable[[str], None] = lambda line: None,
        stopping: threading.Event | None = None,
        detail: Callable[[str], None] | None = None,
    ) -> None:
        self._device, self._journal, self._bundle = device, journal, bundle
        self._address, self._fleet, self._id = address, fleet, device_id
        self._patience_s, self._log, self._detail = patience_s, log, detail or (lambda line: None)
        self._stopping = stopping or threading.Event()
        self._profiled, self._accountant = dict(measured or {}), accountant
        self._photos, self._tells_accuracy = photos, tells_accuracy
        self._instance = os.urandom(8)
        self._boot = journal.begin(self._instance)
        self._outbox = Outbox(random.Random())
        self._follower = Follower(
            device_id,
            bundle,
            is_done=journal.is_done,
            took_part=journal.took_part,
            was_rejected=lambda key: (journal.outcome(key) or ("", 0))[0] == "rejected",
        )
        self._presence = Presence(device_id, self._instance, is_own=journal.is_own_instance)
        self._unreported = journal.unreported()
        self._step_ms: float | None = None
        self._told: dict[str, float] = {}  # the newest round's accuracy, where the fleet is told
        self._malformed = 0
        self._connections = 0
        self._note = ""
        self._waits = Waits()
        self._looked_at: tuple[bytes, int] | None = None  # run and version of the newest global state
        kept = journal.kept_global()
        if kept is not None:
            self._follower.restore(kept)
            self._looked_at = (kept.run, kept.version)
        self._last_progress_s = time.monotonic()
        self._up = topics.up(fleet, device_id)
        self._status = topics.status(fleet, device_id)
        self._handlers: dict[type[Message], tuple[str, Callable[[Any], None]]] = {
            Announcement: (topics.round_(fleet), self._on_announcement),
            GlobalPart: (topics.global_all(fleet)[:-1], self._on_global_part),
            Receipt: (topics.down(fleet, device_id), self._on_receipt),
            Status: (self._status, lambda status: self._presence.heard(status, time.monotonic())),
        }
        self._link = Link(
            address,
            f"pf-{fleet}-{device_id}-{self._instance.hex()}",
            subscriptions=[
                topics.round_(fleet),
                topics.global_all(fleet),
                topics.down(fleet, device_id),
                self._status,
            ],
            will=(self._status, encode(self._state_of_health(online=False))),
            echo_topic=self._status,
        )

    def run(self) -> None:
        """Take part until the run is finished.

        Raises:
            LinkError: no broker within the patience, refused for good, or another process under this id.
            UsageError: the fleet runs another bundle.
            StoreError: the disk refused; what was committed is safe.
            PrivacyError: another round would exceed the budget, or release something without noise.
        """
        for pending in self._journal.pending():
            self._outbox.add(pending)
        self._link.open()
        polite = True
        try:
            self._loop()
        except LinkError:
            polite = False  # refused, or the id is another process's now: nothing more may be said under it
            raise
        finally:
            if polite:
                self._link.publish(self._status, encode(self._state_of_health(online=False)), retain=True)
            self._link.close()
            self._detail(
                f"link closed: {self._connections} connections, {self._malformed} messages skipped, "
                f"{self._link.dropped} dropped at QoS 0, {len(self._outbox)} contributions without a receipt"
            )

    def summary(self) -> dict[str, Any]:
        """What this device has done, as `--json` writes it."""
        return {
            "schema": SUMMARY_SCHEMA,
            "fleet": self._fleet,
            "device": self._id,
            "bundle": self._bundle.sha256.hex(),
            "boot": self._boot,
            "contributions": self._journal.outcomes(),
            "malformed": self._malformed,
            "connections": self._connections,
            "step_ms": self._step_ms,
            "privacy": None if self._accountant is None else self._accountant.facts(),
            **process_metrics.facts(),
        }

    # ── the loop ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _loop(self) -> None:
        waiting = False  # whether the last look found nothing to do
        while True:
            self._send()
            event = self._link.receive(self._wait_s() if waiting else _QUIET_S)
            if event is not None:
                self._handle(event)
            waiting = event is None and not self._work()  # work only once what has arrived is taken in
            if waiting:
                if self._over() or self._stopping.is_set():
                    return
                self._check_patience()
                self._tell_what_is_waited_for()

    def _wait_s(self) -> float:
        now_s = time.monotonic()
        waits = (self._outbox.wait_s(now_s), self._presence.wait_s(now_s), _IDLE_S)
        return max(min(wait for wait in waits if wait is not None), _QUIET_S)

    def _send(self) -> None:
        now_s = time.monotonic()
        if self._presence.birth_due(now_s):
            self._publish_birth()
        for payload in self._outbox.due(now_s, idle=self._link.idle):
            taken = self._link.publish(self._up, payload)
            self._detail(f"{'sent' if taken else 'not sent'} {len(payload):,} bytes on {self._up}")

    def _work(self) -> bool:
        """Do one thing that is to be done; False when there is nothing."""
        if self._keep_state():
            return True
        task = self._follower.task()
        last = self._follower.finished and self._last_state_is_here() and not len(self._outbox)
        report = next(iter(self._unreported), None)
        if report is not None and (task is not None or last or self._is_complete(report)):
            self._report(report)
            return True
        if task is not None:
            self._take_part(task)
            return True
        return False

    def _keep_state(self) -> bool:
        """Put a new global state on the disk, so that answers need no broker; False when there is none.

        One that cannot be true does not take the place of one that can.
        """
        state = self._follower.newest_state
        if state is None or (state.run, state.version) == self._looked_at:
            return False
        self._looked_at = (state.run, state.version)
        if not self._device.judge(state).refused:
            self._journal.keep_global(state)
        return True

    def _over(self) -> bool:
        return self._follower.finished and not len(self._outbox) and not self._unreported

    def _check_patience(self) -> None:
        if self._connections and not self._follower.finished:
            return
        if time.monotonic() - self._last_progress_s < self._patience_s:
            return
        if not self._connections:
            raise LinkError(
                f"no broker at {self._address} within {self._patience_s:g} s",
                expected="an MQTT 5 broker",
                got=self._note or "no answer",
                hint="protofleet broker",
            )
        raise LinkError(
            f"the run is over, contributions without a receipt: {len(self._outbox)}",
            expected=f"an answer within {self._patience_s:g} s",
            got="none; nothing is lost, they stay in the state directory",
            hint="starting this client again when the aggregator runs",
        )

    # ── what arrives ────────────────────────────────────────────────────────────────────────────────────────────────

    def _handle(self, event: Event) -> None:
        now_s = time.monotonic()
        if isinstance(event, Received):
            self._last_progress_s = now_s
            self._on_message(event)
            self._link.acknowledge(event)
        elif isinstance(event, Connected):
            self._last_progress_s = now_s
            self._connections += 1
            self._outbox.connected(event.limit_bytes)
            self._detail(f"connection {self._connections}, messages up to {event.limit_bytes:,} bytes")
            self._presence.connected(now_s)
            self._say(f"connected to {self._address}")
        elif isinstance(event, Disconnected):
            self._outbox.disconnected()
            self._presence.disconnected()
            if self._connections:
                self._say(f"connection lost ({event.reason}), trying again")
            self._detail(f"no connection ({event.reason}), again in {event.retry_s:.1f} s")
            self._note = event.reason
        elif isinstance(event, Failed):
            raise event.error

    def _on_message(self, received: Received) -> None:
        if not received.payload:
            return  # a retained message that its publisher has cleared
        try:
            message = decode(received.payload)
            topic, handler = self._handlers.get(type(message), ("", None))
            if handler is None or not received.topic.startswith(topic):
                raise WireError(received.topic, expected="a message of this topic", got=type(message).__name__)
            self._detail(f"{type(message).__name__.lower()}, {len(received.payload):,} bytes on {received.topic}")
            handler(message)
        except WireError as error:
            self._malformed += 1
            self._log(f"skipped a message on {received.topic}: {error}")

    def _on_announcement(self, announcement: Announcement) -> None:
        self._follower.announced(announcement)
        self._outbox.announced(announcement.run, announcement.limit_bytes, time.monotonic())
        if self._follower.stale:
            self._say(f"run {announcement.run.hex()} was over before this device came, waiting for the next")
        elif announcement.phase == "finished":
            self._say(f"run {announcement.run.hex()} is finished")

    def _on_global_part(self, part: GlobalPart) -> None:
        m = self._bundle.manifest
        for found in (method(m.method), *METHODS.values()):
            if part.kind in found.global_rows:
                kinds = found.row_kinds(found.settled_in(m.hyper), m.classes, m.features)
                part.body.dense(m.classes, kinds[part.kind])
                break  # it refuses another fleet's rows
        self._follower.part(part)

    def _on_receipt(self, receipt: Receipt) -> None:
        key = (receipt.run, receipt.round, receipt.method)
        if receipt.status not in FINAL:
            self._outbox.need_chunks(receipt)
            return
        if receipt.status == "rejected" and not self._outbox.is_refused(receipt):
            self._log(f"round {receipt.round} ({receipt.method}): other bytes than ours were refused: {receipt.reason}")
            return
        if self._journal.settle(receipt, self._outbox.sent_bytes(key)):
            reason = f" ({receipt.reason})" if receipt.reason else ""
            self._log(f"round {receipt.round} ({receipt.method}): {receipt.status}{reason}")
        self._outbox.settled(key)

    # ── what is done ────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_part(self, task: Task) -> None:
        a, key = task.announcement, task.key
        if self._accountant is not None:
            self._accountant.check(a.method)
        clock, began_s = process_metrics.StepClock(), time.monotonic()
        what = f"round {a.round} ({a.method})"
        try:
            result = self._device.run_round(a, task.state, on_step=lambda done, steps: clock.tick(time.perf_counter()))
        except DivergedError as error:
            self._log(f"{what}: {error}; weights as before the round, which is left out")
            result = self._device.sit_out(a)
        if result.refused:
            self._log(f"{what}: {result.refused}")
        if result.check is not None and result.check.is_worse:
            self._log(f"{what}: {result.check.in_words()}")
        seconds = time.monotonic() - began_s
        payload = fitting(result.contribution, a.encoding)
        metrics = {
            "device": self._id,
            "boot": self._boot,
            "loss": result.loss,
            "seconds": round(seconds, 3),
            "samples": result.samples,
            "steps": result.steps,
            "step_ms": clock.step_ms,
            "payload_bytes": len(payload),
            **({} if result.check is None else result.check.facts()),
        }
        if self._accountant is not None:
            metrics["squared_counts"] = self._accountant.squared_counts
        self._journal.commit_round(
            key,
            weights=self._device.state(),
            means=self._device.own_means(),
            payload=payload,
            limit_bytes=a.limit_bytes,
            metrics=metrics,
        )
        self._outbox.add(Pending(key, payload, a.limit_bytes))
        self._unreported.append(Report(key, metrics))
        process_metrics.release_memory()
        loss = "" if result.loss is None else f"loss {result.loss:.3f}, "
        cost = ""
        if self._accountant is not None:
            self._accountant.count(a.method)
            cost = f", {self._accountant.told()}"
        sent = f"{len(payload):,} bytes to send"
        self._log(f"{what}: {loss}{counted(result.samples, 'sample')}, {seconds:.1f} s, {sent}{cost}")
        self._measured(clock.step_ms)

    def _is_complete(self, report: Report) -> bool:
        """Whether the round's outcome and the global state that came out of it are here."""
        run, number, _ = report.key
        state = self._follower.state(run)
        settled = not report.metrics["payload_bytes"] or self._journal.outcome(report.key) is not None
        return settled and state is not None and state.round >= number

    def _report(self, report: Report) -> None:
        run, number, name = report.key
        state = self._follower.state(run)
        evaluation = self._device.evaluate(state)
        told = None if evaluation is None else self._device.accuracy(evaluation, name)
        process_metrics.release_memory()
        outcome = self._journal.outcome(report.key)
        line = history_line(
            report.key,
            report.metrics,
            outcome=None if outcome is None else outcome[0],
            uplink_bytes=self._outbox.sent_bytes(report.key) if outcome is None else outcome[1],
            global_version=0 if state is None else state.version,
            evaluation=evaluation,
            told=told,
            peak_rss_bytes=process_metrics.peak_rss_bytes(),
        )
        append_line(self._journal.directory / "history.jsonl", line)
        self._journal.mark_reported(report.key)
        self._unreported.remove(report)
        if told is not None:
            personal = None if evaluation is None else evaluation.all_classes.get("personal")
            self._log(f"round {number}: {in_words(told, self._photos, personal)}")
            if self._tells_accuracy and (state is None or state.round <= number):  # else it is of a later round
                self._told = told.metrics(run, number)
                self._publish_birth()

    def _last_state_is_here(self) -> bool:
        a = self._follower.announcement
        if a is None:
            return False
        state = self._follower.state(a.run)
        here = a.global_version == 0 or (state is not None and state.version >= a.global_version)
        return here or time.monotonic() - self._last_progress_s > _LAST_STATE_S

    def _measured(self, step_ms: float | None) -> None:
        """The first training step times of this process go into its status, which the aggregator's side reads."""
        if step_ms is not None and self._step_ms is None:
            self._step_ms = step_ms
            self._publish_birth()

    def _publish_birth(self) -> None:
        if self._link.publish(self._status, encode(self._state_of_health(online=True)), retain=True):
            self._presence.born()

    def _state_of_health(self, *, online: bool) -> Status:
        if not online:
            return Status(False, self._instance, self._boot)
        metrics: dict[str, float] = {**self._profiled, **self._told}
        metrics |= {
            "peak_rss_bytes": float(process_metrics.peak_rss_bytes()),
            "rss_bytes": float(process_metrics.rss_bytes()),
        }
        if self._step_ms is not None:
            metrics["train_step_ms"] = self._step_ms
        return Status(
            True, self._instance, self._boot, process_metrics.board_name(), process_metrics.versions(), metrics
        )

    def _tell_what_is_waited_for(self) -> None:
        waited_for = self._follower.waits_for() if self._connections and not self._outbox else self._outbox.waits_for()
        line = self._waits.line(waited_for, time.monotonic())
        if line:
            self._log(line)

    def _say(self, line: str) -> None:
        """Log a line unless it is what was said last."""
        if line != self._note:
            self._log(line)
        self._note = line

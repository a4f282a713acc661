"""A round of this device: run it, make it durable, hand it to the outbox, and report on it once its result is back.

Weights, contribution and the round's mark are committed in one transaction, and only then may anything be sent. A round
whose training diverges is left out: the weights stay, and what is sent says only that the device took part. The report,
a line of `history.jsonl` with the accuracy that the device then has, follows when the round's outcome and the global
state that came out of it are here, or when nothing more will come.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from contract.accuracy import Accuracy
from contract.errors import DivergedError
from edge_client import process_metrics
from edge_client.device import Device, RoundResult
from edge_client.evaluate import in_words
from edge_client.history import append_line, history_line
from edge_client.journal import Journal, Pending, Report
from edge_client.outbox import Outbox, fitting
from edge_client.privacy import Accountant
from edge_client.rounds import Follower, Task

__all__ = ["RoundWork"]


class RoundWork:
    """Does the rounds of one device.

    Args:
        boot: how often the device has started.
        accountant: of noise, where the bundle says that its method adds it.
        photos: what the device tests with, in words.
        log: takes one line for a person.
    """

    def __init__(
        self,
        device: Device,
        journal: Journal,
        outbox: Outbox,
        follower: Follower,
        *,
        device_id: str,
        boot: int,
        accountant: Accountant | None,
        photos: str,
        log: Callable[[str], None],
    ) -> None:
        self._device, self._journal, self._outbox, self._follower = device, journal, outbox, follower
        self._id, self._boot, self._accountant = device_id, boot, accountant
        self._photos, self._log = photos, log
        self._unreported = journal.unreported()

    @property
    def unreported(self) -> Report | None:
        """The oldest round that is done and that the history does not have yet."""
        return next(iter(self._unreported), None)

    def take_part(self, task: Task) -> float | None:
        """Do a round: it is durable, and in the outbox, on return.

        Returns:
            the median time of a training step in milliseconds; None where none was trained.

        Raises:
            PrivacyError: the round would exceed the budget, or release something without noise.
            StoreError: the disk refused; nothing of the round happened.
        """
        a, key = task.announcement, task.key
        if self._accountant is not None:
            self._accountant.check(a.method)
        clock, began_s = process_metrics.StepClock(), time.monotonic()
        what = f"round {a.round} ({a.method})"
        result = self._result(task, what, clock)
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
        self._log(f"{what}: {loss}{result.samples:,} samples, {seconds:.1f} s, {sent}{cost}")
        return clock.step_ms

    def _result(self, task: Task, what: str, clock: process_metrics.StepClock) -> RoundResult:
        a = task.announcement
        try:
            result = self._device.run_round(a, task.state, on_step=lambda done, steps: clock.tick(time.perf_counter()))
        except DivergedError as error:
            self._log(f"{what}: {error}; weights as before the round, which is left out")
            result = self._device.sit_out(a)
        if result.refused:
            self._log(f"{what}: {result.refused}")
        if result.check is not None and result.check.is_worse:
            self._log(f"{what}: {result.check.in_words()}")
        return result

    def is_complete(self, report: Report) -> bool:
        """Whether the round's outcome and the global state that came out of it are here."""
        run, number, _ = report.key
        state = self._follower.state(run)
        settled = not report.metrics["payload_bytes"] or self._journal.outcome(report.key) is not None
        return settled and state is not None and state.round >= number

    def report(self, report: Report) -> Accuracy | None:
        """Write a round's line of the history.

        Returns:
            the round's accuracy, where it is known.

        Raises:
            StoreError: the disk refused; the round is reported once it does not.
        """
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
        if told is None or (state is not None and state.round > number):  # then it is of a later round
            return None
        return told

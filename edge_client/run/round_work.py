"""A round of this device: run it, make it durable, hand it to the outbox, and report on it once its result is back.

The order of a round:

1. Take in photos that came or went since the last round. Before a round with noise, photos are held out as that noise
   asks for (`Releases.hold_out`).
2. Ask the owner's policy. A round that it refuses is answered without any row, before anything is read or computed.
3. Run the round. If training diverges, the round is left out: the weights stay, and what is sent says only that the
   device took part.
4. Write what was made of the samples into the ledger (`releases.py`).
5. Commit weights, contribution and the round's mark in one transaction. Only then may anything be sent.
6. Report, when the round's outcome and the global state that came out of it are here, or when nothing more will come.
   The report is a line of `history.jsonl` with the accuracy that the device then has.

While the present photos cannot be read, the device sits its rounds out. Where noise is added, it sends noise alone. So
nothing is made of photos that the owner has taken away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from protofleet.contract.accuracy import Accuracy
from protofleet.contract.console.logs import Changes, of_round, private
from protofleet.contract.console.service_manager import ServiceManager
from protofleet.contract.errors import DataError, DivergedError, PrivacyError, UsageError
from protofleet.contract.printable import counted, printable
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.global_state import GlobalCollector, GlobalState
from protofleet.contract.wire.messages import MAX_VERSION, Announcement, Encoding, GlobalPart, Receipt
from protofleet.edge_client.device.device import Device, RoundResult
from protofleet.edge_client.device.evaluation import Evaluation, Heads, in_words
from protofleet.edge_client.device.left_out import LeftOut
from protofleet.edge_client.device.own_samples import OwnSamples
from protofleet.edge_client.hardware import process_metrics
from protofleet.edge_client.journal.history import append_line, history_line
from protofleet.edge_client.journal.journal import Journal, Pending, Report
from protofleet.edge_client.messages.outbox import Outbox
from protofleet.edge_client.privacy.blinded_shares import Blinding
from protofleet.edge_client.privacy.policy import Refusal
from protofleet.edge_client.privacy.releases import Releases
from protofleet.edge_client.rollout.probation import ProbationWatch
from protofleet.edge_client.rounds.round_follower import Follower, Task
from protofleet.edge_client.standing.standing_sums import StandingSums, is_complete

__all__ = ["Line", "Own", "RoundWork"]

logger = logging.getLogger(__name__)

_DECODING_S = 3600.0  # for photos that have changed: nothing says meanwhile that the device gets on


@dataclass(frozen=True)
class Own:
    """What a device has, and what of it may leave.

    Attributes:
        device: its core, with the weights of the journal restored.
        releases: what all that leaves passes: the policy of its owner, and the ledger.
        blinding: what it asks of blinded rounds, and how it takes part in them.
        samples: its photos, which are looked after between rounds; without them it has what `device` was given.
        photos: what the device tests with, in words.
    """

    device: Device
    releases: Releases
    blinding: Blinding
    samples: OwnSamples | None = None
    photos: str = "test photos"


@dataclass(frozen=True)
class Line:
    """Where contributions go.

    Attributes:
        name, boot: of the device, and how often it has started.
        seal: signs what is sent, if the device signs.
    """

    journal: Journal
    outbox: Outbox
    follower: Follower
    name: str
    boot: int
    seal: Callable[[bytes], bytes] = lambda payload: payload


class RoundWork:
    """Does the rounds of one device.

    Args:
        manager: is told that the device gets on.
        probation: of a bundle that came in a roll-out, is told what comes of it.

    Attributes:
        refused: what the policy refused last, as the operator is told; empty for nothing, and once something was made.
    """

    def __init__(
        self,
        own: Own,
        line: Line,
        *,
        manager: ServiceManager,
        probation: ProbationWatch | None = None,
    ) -> None:
        self._device, self._journal, self._outbox, self._follower = own.device, line.journal, line.outbox, line.follower
        self._id, self._boot, self._seal, self._releases = line.name, line.boot, line.seal, own.releases
        self._samples, self._manager, self._blinding = own.samples, manager, own.blinding
        self._photos, self._probation = own.photos, probation
        device, journal = own.device, line.journal
        self._unreported = journal.unreported()
        self._standing = StandingSums(device, journal, line.name, own.releases, line.seal)
        self.refused = ""
        self._left_out = journal.left_out()
        device.left_out = "" if self._left_out is None else self._left_out.method
        self._joint_parts = GlobalCollector()
        self._take_up_joint()
        self._logged_left_out: LeftOut | None = None  # as it was said last
        self._compared: tuple[bytes, int] | None = None  # run and version of the state that the own head was tried on
        self._changes, self._exposed = Changes(logger), ""  # where sums stand; and what is shown of photos

    @property
    def unreported(self) -> Report | None:
        """The oldest round that is done and that the history does not have yet."""
        return next(iter(self._unreported), None)

    @property
    def newest(self) -> Report | None:
        """The newest of these."""
        return self._unreported[-1] if self._unreported else None

    def take_part(self, task: Task) -> float | None:
        """Do a round: it is durable, and in the outbox, on return.

        Returns:
            the median time of a training step in milliseconds; None where none was trained.

        Raises:
            StoreError: the disk refused; nothing of the round happened.
        """
        a, key = self._releases.narrowed(task.announcement), task.key
        what = f"round {a.round} ({a.method})"
        clock, began_s = process_metrics.StepClock(), time.monotonic()
        refusal = self._refusal(a)
        if refusal is None and self._samples is not None:
            self._samples.rule = self._releases.hold_out(a)
        readable = refusal is None and self._take_in_photos(what, "the round is left out", Changes(logger))
        if readable:
            refusal = self._refusal(a)  # once more: a mechanism may cost more with the photos that came
        if refusal is not None:
            logger.warning(f"{what} is refused: {refusal.line}; nothing of the photos is sent")
            result = self._device.abstain(a)
        else:
            result = self._result(Task(a, task.state), what, clock) if readable else self._device.unread(a)
        payload, refusal, result = self._ledgered(a, result, refusal)
        self.refused = "" if refusal is None else f"{what}: {refusal.word}"[:MAX_VERSION]
        seconds = time.monotonic() - began_s
        payload = self._seal(payload)
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
        if readable and self._samples is not None:
            self._samples.sent()
        self._rest()
        loss = "" if result.loss is None else f"loss {result.loss:.3f}, "
        cost = self._releases.cost_line()
        sent = f"{len(payload):,} bytes to send{f', {cost}' if cost else ''}"
        if refusal is None:
            logger.info(f"{what}: {loss}{counted(result.samples, 'sample')}, {seconds:.1f} s, {sent}")
            self._tell_exposure(self._device.exposed(result.contribution, a))
        return clock.step_ms

    def _rest(self) -> None:
        """Give back what a round needed, or a test of it: this device waits longer than it works."""
        self._journal.rest()
        process_metrics.rest_memory()

    def _refusal(self, a: Announcement) -> Refusal | None:
        try:
            self._blinding.check(a)
        except PrivacyError as error:
            return Refusal("not blinded" if a.helper is None else "blinded", str(error))
        counts = self._device.samples.counts(self._device.classes)
        return self._releases.refusal(a, counts)

    def _ledgered(
        self, a: Announcement, result: RoundResult, refusal: Refusal | None
    ) -> tuple[bytes, Refusal | None, RoundResult]:
        """What goes out, in the ledger: the result, or what says nothing where that was refused or may not travel."""
        if refusal is None:
            travelling = self._travelling(a, result)
            if not isinstance(travelling, Refusal):
                plain, encoding, payload = travelling
                self._releases.made(a, encoding, plain, self._device.samples.counts(self._device.classes))
                return payload, None, result
            logger.warning(f"round {a.round} ({a.method}) is refused: {travelling.line}; nothing of the photos is sent")
            result = self._device.abstain(a)
            payload = encode(result.contribution, a.encoding)
            self._releases.withheld(a, payload, self._device.samples.counts(self._device.classes))
            return payload, travelling, result
        payload = encode(result.contribution, a.encoding)
        self._releases.abstained(a, payload)
        return payload, refusal, result

    def _travelling(self, a: Announcement, result: RoundResult) -> tuple[bytes, Encoding, bytes] | Refusal:
        """What is released, in which encoding, and how it travels, which in a blinded round is as a share of it; or why
        it may not."""
        encoded = self._releases.encoded(result.contribution, a)
        if encoded is None:
            return Refusal("encoding f32", f"its numbers do not fit {a.encoding}, the policy does not allow f32")
        plain, encoding = encoded
        if a.helper is None:
            return plain, encoding, plain
        warning = self._blinding.warning(a, result.samples)
        if warning:
            self._changes.say(warning)
        try:
            return plain, encoding, encode(self._blinding.blinded(result.contribution, a), encoding)
        except PrivacyError as error:
            return Refusal("too large to be blinded", str(error))

    def stand(self, a: Announcement) -> bool:
        """Where sums stand: send the sums of the present samples, if enough has changed.

        Returns:
            False when nothing is to be sent.

        Raises:
            StoreError: the disk refused; nothing is sent.
        """
        a = self._releases.narrowed(a)
        refusal = self._refusal(a)
        self.refused = "" if refusal is None else f"sums ({a.method}): {refusal.word}"[:MAX_VERSION]
        if refusal is not None:
            self._changes.say(f"nothing more of this device is summed: {refusal.line}")
            return False
        changed = self._samples is not None and self._samples.has_changed
        if changed and not self._take_in_photos("the sums", "what was sent stands", self._changes):
            return False
        generation = self._standing.make(a, self._boot, time.monotonic())
        if generation is None:
            return False
        for older in generation.older:
            self._outbox.answered(older)
        self._unreported = [report for report in self._unreported if report.key[0] != a.run] + [generation.report]
        self._outbox.add(Pending(generation.report.key, generation.payload, a.limit_bytes))
        if self._samples is not None:
            self._samples.sent()
        self._rest()
        logger.info(generation.line, extra=of_round(generation.report.key))
        self._tell_exposure(generation.exposed)
        return True

    def waits_for(self) -> str:
        """What is waited for where sums stand, for a person; empty where there are rounds."""
        return self._standing.waits_for()

    def take_receipt(self, receipt: Receipt) -> None:
        """Take a receipt that answers nothing we wait for.

        Where sums stand, it tells whether the sums that were sent count.
        """
        self._standing.take_receipt(receipt, time.monotonic())

    def on_final_receipt(self, receipt: Receipt) -> None:
        """A receipt that ends a contribution came."""
        self._standing.take_receipt(receipt, time.monotonic())
        if self._probation is not None:
            self._probation.on_final_receipt(receipt)

    def judged(self, receipt: Receipt) -> None:
        """The aggregator tells whether a closed round of this device counts. It is durable on return.

        Raises:
            StoreError: the disk refused.
        """
        known, key = self._left_out, (receipt.run, receipt.round, receipt.method)
        state = self._follower.state(receipt.run)
        newest = 0 if state is None else self._journal.newest_held(receipt.run, state.round)
        if known is not None and known.run == receipt.run.hex():
            newest = max(newest, known.round)
        if receipt.round < newest or not self._journal.is_done(key):
            return
        if receipt.counts:
            if known is None:
                return
            self._count_again(f"the fleet's aggregator counts round {receipt.round} of this device")
        else:
            left_out = LeftOut(receipt.run.hex(), receipt.round, receipt.method, printable(receipt.why))
            if known is not None and (known.run, known.round) == (left_out.run, left_out.round):
                return
            if known is not None:  # what it answers by stands until the heads are compared again
                left_out = replace(
                    known, run=left_out.run, round=left_out.round, method=left_out.method, why=left_out.why
                )
            self._left_out, self._device.joint = left_out, None
            self._journal.keep_left_out(left_out)
        self._device.left_out = "" if self._left_out is None else self._left_out.method
        self._compared = None

    def _count_again(self, why: str) -> None:
        self._left_out, self._device.left_out, self._device.joint = None, "", None
        self._journal.keep_left_out(None)
        logger.info(f"{why}: it answers by the fleet's head")

    def _take_up_joint(self) -> None:
        """The joint head that an earlier process was given; none of it stays where the owner allows it no more."""
        left_out = self._left_out
        if left_out is None:
            return
        if self._releases.policy.joint_head:
            self._device.joint = self._journal.joint_head()
        elif left_out.others:
            self._left_out = replace(left_out, **asdict(Heads(0, 0, 0)), others=0)
            self._journal.keep_left_out(self._left_out)

    def joint_part(self, part: GlobalPart, members: int) -> None:
        """Take a part of the joint head of this device and others that agree with it, for the round that left it out.

        The head is durable on return of the call with its last part.

        Raises:
            StoreError: the disk refused.
            WireError: parts contradict each other.
        """
        left_out = self._left_out
        if left_out is None or self._device.joint is not None or not self._releases.policy.joint_head:
            return
        if (part.run.hex(), part.round) != (left_out.run, left_out.round):
            return
        state = self._joint_parts.add(part)
        if state is None:
            return
        left_out = replace(left_out, others=members - 1)
        self._journal.keep_left_out(left_out, joint=state)
        self._left_out, self._device.joint, self._compared = left_out, state, None

    def compare(self) -> bool:
        """Compare the heads of a device that was left out, and answer by the best one.

        Its own head, and the joint head where there is one, are tried beside the fleet's newest head.

        Returns:
            False where there is nothing to try.

        Raises:
            StoreError: the disk refused.
        """
        state = self._follower.newest_state
        if self._left_out is None or state is None or not state.version or self._unreported:
            return False
        if (state.run, state.version) == self._compared:
            return False
        self._keep_better(self._device.evaluate(state), state)
        self._rest()
        return True

    def _keep_better(self, evaluation: Evaluation | None, state: GlobalState | None) -> None:
        """Of a device that was left out, which head it answers by from now on."""
        if self._left_out is None or state is None or not state.version:
            return
        heads = None if evaluation is None else self._device.beside_own(evaluation)
        joint = self._device.joint
        others = 0 if joint is None else self._left_out.others
        left_out = replace(self._left_out, **asdict(Heads(0, 0, 0) if heads is None else heads), others=others)
        own = joint if left_out.answers_together else self._device.own_state() if left_out.answers_alone else None
        self._journal.keep_left_out(left_out, own, joint)
        if left_out != self._logged_left_out:
            logger.info(left_out.in_words())
        self._left_out = self._logged_left_out = left_out
        self._compared = (state.run, state.version)

    def _tell_exposure(self, line: str) -> None:
        """Once for each change."""
        if line and line != self._exposed:
            logger.warning(f"what is sent shows single photos: {line}")
        self._exposed = line

    def _take_in_photos(self, what: str, otherwise: str, changes: Changes) -> bool:
        """See to it that the device has the photos that are there now; False when they cannot be read."""
        if self._samples is None:
            return True
        try:
            with self._manager.patient(_DECODING_S):
                samples = self._samples.newer()
        except (DataError, UsageError) as error:
            changes.say("%s: %s; %s", what, private(error), otherwise, level=logging.WARNING)
            return False
        if samples is not None:
            self._device.hold(samples.data, test=samples.test, held=samples.held)
            logger.info(f"the photos have changed: {len(samples.data):,} samples now")
        return True

    def _result(self, task: Task, what: str, clock: process_metrics.StepClock) -> RoundResult:
        a = task.announcement

        def on_step(done: int, steps: int) -> None:
            clock.tick(time.perf_counter())
            self._manager.alive()

        try:
            result = self._device.run_round(a, task.state, on_step=on_step)
        except DivergedError as error:
            logger.warning(f"{what}: {error}; weights as before the round, which is left out")
            if self._probation is not None and not self._releases.is_private:
                self._probation.fail(str(error))
            result = self._device.sit_out(a)
        if result.refused:
            logger.warning(f"{what}: {result.refused}")
        if result.check is not None and result.check.is_worse:
            logger.info(f"{what}: {result.check.in_words()}")
        return result

    def is_complete(self, report: Report) -> bool:
        """Whether the round's outcome and the global state that came out of it are here."""
        run, number, _ = report.key
        state = self._follower.state(run)
        if "standing" in report.metrics:
            return is_complete(report, self._journal.outcome(report.key), state)
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
        self._rest()  # what sending has left: a head that is solved here takes more than a round
        evaluation = self._device.evaluate(state)
        if self._left_out is not None and self._left_out.run != run.hex():  # another run, which says nothing of it
            self._count_again(f"run {run.hex()} counts round {number} of this device")
        self._keep_better(evaluation, state)
        accuracy = None if evaluation is None else self._device.accuracy(evaluation, name)
        self._rest()
        outcome = self._journal.outcome(report.key)
        line = history_line(
            report.key,
            report.metrics,
            outcome=None if outcome is None else outcome[0],
            uplink_bytes=self._outbox.sent_bytes(report.key) if outcome is None else outcome[1],
            global_version=0 if state is None else state.version,
            evaluation=evaluation,
            accuracy=accuracy,
            peak_rss_bytes=process_metrics.peak_rss_bytes(),
        )
        append_line(self._journal.directory / "history.jsonl", line)
        self._journal.mark_reported(report.key)
        self._unreported.remove(report)
        if self._probation is not None:
            measured = state is not None and state.version and not self._releases.is_private
            self._probation.reported(accuracy if measured else None)
        if accuracy is not None:
            tested = None if evaluation is None else evaluation.tested.get("personal")
            personal = None if tested is None else tested.among_own
            what = "sums" if "standing" in report.metrics else "round"
            logger.info(f"{what} {number}: {in_words(accuracy, self._photos, personal)}")
        if (
            accuracy is None or "standing" in report.metrics or (state is not None and state.round > number)
        ):  # then it is of a later round
            return None
        return accuracy

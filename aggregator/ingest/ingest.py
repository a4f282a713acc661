"""From bytes that anyone may have sent to a decision. No sockets, no files, no clock; no exception leaves `decide`.

Each message on an `up` topic goes through these steps, in this order:

1. Sender (`aggregator/enrolment/gate.py`): for an enrolled device, a message that is not the device's own → rejected.
   A signed message is read without its signature from here on, but kept with it.
2. Decode: not a message of this wire, or not one that goes up → rejected, with the key that can still be read of it
   (`tie`), or malformed when there is none.
3. Standing, which the key (run, round, method, device) alone decides: of another run, of a round or method that is not
   open, or from a device that was not sampled or is refused → rejected; already held → duplicate; of a round that is
   over → late. Where sums stand there are no rounds, and the device's own generation takes the round's place: older
   than the held one → late.
4. Chunks are put together. When the last chunk is here and others are missing, or when nothing came for a while, the
   device is told which are missing. It is asked less and less often, only while it is online, and only for the open
   round: chunks of other rounds are dropped. Chunks that do not hash to their digest are asked for once more, then
   rejected.
5. Content (`aggregator/ingest/validation.py`): the bundle, the kind of statistic, classes, width, counts, finite
   numbers, plausible sizes → rejected if wrong, else accepted.

Every message on a device's own topic gets an answer. An answer must not end another contribution than the one that it
is about. So each answer carries that contribution's digest, and a device ignores answers with any other digest. See
docs/decisions/081.

An accepted contribution is not yet committed: the store commits it, and only then may its receipt be sent. Within a
batch `decide` remembers what it has accepted, so a duplicate later in the same batch is recognised.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from protofleet.aggregator.enrolment.gate import Gate, Intrusion, inner_of
from protofleet.aggregator.ingest.broken_message import Tie, digest_of, tie
from protofleet.aggregator.ingest.validation import Terms, check_content
from protofleet.aggregator.merging.exact_sums import ExactSum
from protofleet.aggregator.merging.forgotten_classes import as_kept, left_of
from protofleet.aggregator.screening.outliers import Traits
from protofleet.aggregator.store.records import Accepted, StandingMark
from protofleet.contract.errors import StatisticError, WireError
from protofleet.contract.methods import method as method_of
from protofleet.contract.wire.chunks import Assembler
from protofleet.contract.wire.messages import Chunk, Contribution, Message, Receipt, ReceiptStatus
from protofleet.contract.wire.sampling import sampled

__all__ = ["Cause", "Decision", "Ingest", "Outcome", "View", "answer_to_status", "largest_contribution_bytes"]

Outcome = Literal["committed", "duplicate", "late", "rejected", "malformed", "need-chunks", "partial"]

Cause = Literal[
    "",
    "other-run",
    "refused-device",
    "not-open",
    "other-method",
    "not-sampled",
    "unreadable",
    "chunks",
    "content",
    "intruder",
]

MAX_IN_PROGRESS = 4_096
STALL_S = 5.0  # before the first question after missing chunks; doubled each time
MAX_QUESTIONS = 6  # in 5 minutes; then the device must speak first, as it does when it sends again
_CHUNK = b"\x00\x04"  # key 0 and the type, after the map's first byte
_MIN_CHUNK_BYTES = 512  # the smallest limit that can be announced leaves more than that for data


def _nobody(device: str) -> str:
    return ""


_ANYONE = Gate("fleet", None)


def _anyone(device: str, payload: bytes, limit_bytes: int) -> Message:
    return _ANYONE.opened(device, "", payload, limit_bytes=limit_bytes)


@dataclass(frozen=True)
class View:
    """What the round machine and the bundle say at this moment.

    Attributes:
        round, method, seed, fraction: of the open round, or of the last one.
        open: whether the round is open.
        classes, width: C, and the width of the open round's rows: D of the bundle, or D' where FFC projects.
        limit_bytes: the largest message taken.
        bundle, others: sha256 of the fleet's bundles.
        terms: what the round asks of its contributions.
        refusal: why nothing of a device is taken; empty for a device that is not refused.
        held: where sums stand, the mark of the sums held of a device; None in rounds.
        gateways: the devices that may send sums for other devices. All are sampled, since their devices are.
        exact: whether contributions to a round must fit exact sums although no gateway is named. This is so at a
            gateway itself.
        opened: gives the decoded message of a device, or raises `Intrusion` when it is not that device's.
    """

    run: bytes
    bundle: bytes
    classes: int
    width: int
    round: int
    method: str
    open: bool
    seed: int = 0
    fraction: float = 1.0
    limit_bytes: int = 65_536
    others: tuple[bytes, ...] = ()
    terms: Terms = field(default_factory=Terms)
    refusal: Callable[[str], str] = _nobody
    held: Callable[[str], StandingMark] | None = None
    gateways: Collection[str] = ()
    exact: bool = False
    opened: Callable[[str, bytes, int], Message] = _anyone

    @functools.cached_property
    def largest_bytes(self) -> int:
        """The largest message that is decoded.

        After a restart a device may have made its contribution for a larger limit than the present one. So a message of
        the largest size that the round's contribution can have is taken whole.
        """
        return max(self.limit_bytes, largest_contribution_bytes(self))


@dataclass(frozen=True)
class Decision:
    """What is to become of one message.

    Attributes:
        outcome: `committed` once the store has taken `accepted`; `partial` for a kept chunk, without receipt.
        round: which round it counts for; 0 when none can be named.
        receipt: the answer to the device, sent after the commit. None for a kept chunk, and before the first round.
        reason: why it was not taken, in words.
        cause: the same as one of few names, for counting; empty when it was not refused.
        traits: of the accepted contribution, for the comparison with the others when the round closes.
    """

    device: str
    outcome: Outcome
    round: int
    receipt: Receipt | None = None
    accepted: Accepted | None = None
    reason: str = ""
    cause: Cause = ""
    traits: Traits | None = None


@dataclass
class _InProgress:
    chunk: Chunk
    received_bytes: int
    touched_at: float
    questions: int = 0


@dataclass
class Ingest:
    """Decides on messages. Its only state: unfinished chunks, and the keys accepted since `forget_accepted`.

    Args:
        holds: whether the store has the contribution (round, method, device).
        assembler: bounds the memory for chunks.
        patient: whether another process may have the missing chunks, so that no device is asked at once.
    """

    holds: Callable[[int, str, str], bool]
    assembler: Assembler = field(default_factory=Assembler)
    patient: bool = False
    _accepted: set[tuple[int, str, str]] = field(default_factory=set)
    _newest: dict[str, StandingMark] = field(default_factory=dict)  # accepted in this batch, where sums stand
    _in_progress: OrderedDict[tuple[str, str], _InProgress] = field(default_factory=OrderedDict)
    _damaged: OrderedDict[tuple[str, str, bytes], None] = field(default_factory=OrderedDict)

    def decide(self, device: str, payload: bytes, view: View, now: float) -> Decision:
        """Decide what is to become of `payload`, which came from `device`.

        Args:
            now: seconds of a steady clock.
        """
        try:
            message = view.opened(device, payload, view.largest_bytes)
            if not isinstance(message, Contribution | Chunk):
                raise WireError("message", expected="a contribution", got=type(message).__name__.lower())
        except Intrusion as intrusion:
            return _to_intruder(device, payload, intrusion, view)
        except WireError as error:
            return self._answer(device, payload, str(error), view)
        digest = message.digest if isinstance(message, Chunk) else digest_of(payload)
        standing = self._standing(device, message, digest, view)
        if isinstance(message, Chunk):
            decision = standing or self._take_chunk(device, message, len(payload), view, now)
            return _named(decision, message.digest)
        decided = standing or self._take(device, message, payload, len(payload), view, digest)
        return _named(decided, digest)

    def chunk_of(self, device: str, payload: bytes, view: View) -> Chunk | None:
        """The chunk of a contribution that may still count, for the processes that assemble one together; else None."""
        if inner_of(payload)[1:3] != _CHUNK:
            return None
        try:
            message = view.opened(device, payload, view.largest_bytes)
        except WireError:  # of which one is an intrusion: `decide` says what
            return None
        if not isinstance(message, Chunk) or message.total_bytes > largest_contribution_bytes(view):
            return None
        return None if self._standing(device, message, message.digest, view) is not None else message

    def stalled(self, now: float, view: View, is_online: Callable[[str], bool]) -> list[Decision]:
        """Ask for the missing chunks of contributions of which nothing came for a while.

        Asks again after twice as long each time, `MAX_QUESTIONS` times at most, and only devices that are online.
        Forgets the chunks of other rounds than the open one.
        """
        self._forget_others(view)
        questions = []
        for (device, method), pending in list(self._in_progress.items()):
            wait_s = STALL_S * 2.0**pending.questions
            if pending.questions >= MAX_QUESTIONS or now - pending.touched_at < wait_s or not is_online(device):
                continue
            missing = self.assembler.missing(device, method)
            if missing is None:
                del self._in_progress[(device, method)]
                continue
            pending.touched_at, pending.questions = now, pending.questions + 1
            questions.append(
                _named(_decision(device, pending.chunk, "need-chunks", missing=missing), pending.chunk.digest)
            )
        return questions

    def forget_accepted(self) -> None:
        """The store has committed the accepted contributions, and `holds` knows them."""
        self._accepted.clear()
        self._newest.clear()

    def _answer(self, device: str, payload: bytes, reason: str, view: View) -> Decision:
        """For what cannot be decoded: a rejection of what it speaks of, or of whatever it was for the open round."""
        inner = inner_of(payload)
        named = tie(inner)
        if named is not None:
            named = named if inner is payload else replace(named, digest=digest_of(payload))
            standing = self._standing(device, named, named.digest, view)
            return _named(
                standing or _decision(device, named, "rejected", reason=reason, cause="unreadable"), named.digest
            )
        if view.round < 1:
            return Decision(device, "malformed", 0, reason=reason, cause="unreadable")
        guess = Tie(view.run, view.round, view.method, digest_of(payload))
        guessed = _named(_decision(device, guess, "rejected", reason=reason, round=0, cause="unreadable"), guess.digest)
        return replace(guessed, outcome="malformed")

    def _forget_others(self, view: View) -> None:
        """Drop chunks of rounds that are not open: they can only be late."""
        for (device, method), pending in list(self._in_progress.items()):
            is_current = method == view.method and (view.held is not None or pending.chunk.round == view.round)
            if not (view.open and is_current):
                del self._in_progress[(device, method)]
                self.assembler.forget(device, method)

    def _standing(self, device: str, message: Contribution | Chunk | Tie, digest: bytes, view: View) -> Decision | None:
        """The decision that the key alone calls for, or None when its content must decide."""
        if message.run != view.run:
            reason = f"of run {message.run.hex()}, this aggregator's is {view.run.hex()}"
            return _decision(device, message, "rejected", reason=reason, round=0, cause="other-run")
        refusal = view.refusal(device)
        if view.held is not None:
            mark = self._newest.get(device) or view.held(device)
            return self._by_generation(device, message, digest, view.method, mark, refusal)
        if refusal:
            return _decision(device, message, "rejected", reason=refusal, cause="refused-device")
        if message.round > view.round:
            reason = f"round {message.round} is not open, the last was {view.round}"
            return _decision(device, message, "rejected", reason=reason, round=0, cause="not-open")
        key = (message.round, message.method, device)
        if key in self._accepted or self.holds(*key):
            return _decision(device, message, "duplicate")
        if message.round < view.round or not view.open:
            return _decision(device, message, "late")
        if message.method != view.method:
            reason = f"round {view.round} runs {view.method}, not {message.method}"
            return _decision(device, message, "rejected", reason=reason, cause="other-method")
        if device not in view.gateways and not sampled(device, view.round, view.seed, view.fraction):
            reason = f"not sampled for round {view.round}"
            return _decision(device, message, "rejected", reason=reason, cause="not-sampled")
        return None

    def _by_generation(
        self,
        device: str,
        message: Contribution | Chunk | Tie,
        digest: bytes,
        method: str,
        mark: StandingMark,
        refusal: str,
    ) -> Decision | None:
        """Where sums stand: decide by a device's generation and the mark of what is held.

        A device may always withdraw its standing sums. Once nothing of it stands and it is refused, it is told that it
        is refused, whatever its number. The held number counts as a duplicate only with the same bytes: a device with
        an older copy of its state directory may use the number for other bytes, and must then number above it.
        """
        withdraws = isinstance(message, Contribution) and message.standing == "withdrawn"
        if method != message.method:
            reason = f"sums of {method} stand here, not of {message.method}"
            return _decision(device, message, "rejected", reason=reason, round=0, cause="other-method")
        if withdraws and not mark.digest and (refusal or message.round == mark.generation):
            return _decision(device, message, "duplicate", round=0)
        if refusal and not withdraws:
            return _decision(device, message, "rejected", reason=refusal, round=0, cause="refused-device")
        if message.round > mark.generation or (isinstance(message, Tie) and message.round == mark.generation):
            return None
        if message.round == mark.generation and digest == mark.digest:
            return _decision(device, message, "duplicate", round=0)
        return _decision(device, message, "late", round=0, held=mark.generation)

    def _take_chunk(self, device: str, chunk: Chunk, received_bytes: int, view: View, now: float) -> Decision:
        largest = min(largest_contribution_bytes(view), self.assembler.max_contribution_bytes)
        if chunk.total_bytes > largest:
            reason = f"{chunk.total_bytes} bytes, at most {largest} for {view.method}"
            return _decision(device, chunk, "rejected", reason=reason, cause="chunks")
        if chunk.count > 1 + chunk.total_bytes // _MIN_CHUNK_BYTES:
            reason = f"chunks of less than {_MIN_CHUNK_BYTES} bytes"
            return _decision(device, chunk, "rejected", reason=reason, cause="chunks")
        pending = self._progress(device, chunk, now)
        pending.received_bytes += received_bytes
        try:
            whole = self.assembler.add(device, chunk)
        except WireError as error:  # one of them is forged or damaged: all of them once more, and only once
            self._in_progress.pop((device, chunk.method), None)
            key = (device, chunk.method, chunk.digest)
            if key in self._damaged:
                return _decision(device, chunk, "rejected", reason=str(error), cause="chunks")
            self._damaged[key] = None
            if len(self._damaged) > MAX_IN_PROGRESS:
                self._damaged.popitem(last=False)
            everything = np.packbits(np.ones(chunk.count, np.uint8), bitorder="little").tobytes()
            return _decision(device, chunk, "need-chunks", missing=everything)
        if whole is None:  # what is missing takes time in proportion to all of it: not for each chunk
            asks = chunk.index == chunk.count - 1 and not self.patient
            missing = self.assembler.missing(device, chunk.method) if asks else None
            if missing is not None:
                return _decision(device, chunk, "need-chunks", missing=missing)
            return Decision(device, "partial", chunk.round)
        del self._in_progress[(device, chunk.method)]
        return self._take_whole(device, chunk, whole, pending.received_bytes, view)

    def _take_whole(self, device: str, chunk: Chunk, whole: bytes, received_bytes: int, view: View) -> Decision:
        try:
            message = view.opened(device, whole, len(whole))
        except Intrusion as intrusion:
            return _to_intruder(device, whole, intrusion, view)
        except WireError as error:
            return _decision(device, chunk, "rejected", reason=str(error), cause="unreadable")
        key = (chunk.run, chunk.round, chunk.method)
        if not isinstance(message, Contribution) or (message.run, message.round, message.method) != key:
            return _decision(device, chunk, "rejected", reason="chunks of something else than they say", cause="chunks")
        return self._take(device, message, whole, received_bytes, view, chunk.digest)

    def _progress(self, device: str, chunk: Chunk, now: float) -> _InProgress:
        key = (device, chunk.method)
        pending = self._in_progress.pop(key, None)
        if pending is None or pending.chunk.digest != chunk.digest or pending.chunk.round != chunk.round:
            pending = _InProgress(chunk, 0, now)
        while len(self._in_progress) >= MAX_IN_PROGRESS:
            oldest, _ = self._in_progress.popitem(last=False)
            self.assembler.forget(*oldest)
        pending.touched_at, pending.questions = now, 0
        self._in_progress[key] = pending
        return pending

    def _take(
        self, device: str, message: Contribution, payload: bytes, received_bytes: int, view: View, digest: bytes
    ) -> Decision:
        """Decide by the content; `digest` is of what came."""
        if message.devices and device not in view.gateways:
            reason = "sums for other devices come from gateways that the aggregator names: --gateway"
            return _decision(device, message, "rejected", reason=reason, cause="content", digest=digest)
        try:
            check_content(
                message, view.terms, bundles=(view.bundle, *view.others), classes=view.classes, width=view.width
            )
            if view.held is None and (view.exact or view.gateways):
                ExactSum.sent_in(message, method_of(message.method).statistic, view.classes, view.width)
        except (WireError, StatisticError) as error:
            return _decision(device, message, "rejected", reason=str(error), cause="content")
        self._accepted.add((message.round, message.method, device))
        reduced = left_of(message, view.terms.withheld)
        assert reduced is not None  # what cannot be without a class is refused with it
        without: tuple[int, ...] = ()
        if reduced is not message:
            without = tuple(number for number in view.terms.withheld if message.holds((number,)))
            message, payload = reduced, as_kept(reduced)
        if view.held is not None:
            withdraws = message.standing == "withdrawn"
            self._newest[device] = StandingMark(message.round, b"" if withdraws else digest_of(payload))
        accepted = Accepted(message.round, message.method, device, payload, received_bytes, message, without)
        traits = None if message.share is not None else Traits.of(message, view.terms.noise)
        return _decision(device, message, "committed", accepted=accepted, traits=traits, digest=digest)


def largest_contribution_bytes(view: View) -> int:
    """The largest size of a contribution to the open round, in the widest encoding."""
    numbers = method_of(view.method).statistic.numbers(view.classes, view.width)
    return 8 * numbers + 16 * view.classes + 4096


# arguments: the fields of a decision
def _decision(
    device: str,
    message: Contribution | Chunk | Tie,
    outcome: ReceiptStatus,
    *,
    reason: str = "",
    cause: Cause = "",
    missing: bytes = b"",
    accepted: Accepted | None = None,
    traits: Traits | None = None,
    round: int | None = None,
    held: int = 0,
    digest: bytes = b"",
) -> Decision:
    receipt = Receipt(message.run, message.round, message.method, outcome, reason[:200], missing, digest, held)
    number = message.round if round is None else round
    return Decision(device, outcome, number, receipt, accepted, reason, cause, traits)


def _to_intruder(device: str, payload: bytes, intrusion: Intrusion, view: View) -> Decision:
    """A rejection of these very bytes, whatever they are; it counts in no round."""
    named_in = tie(intrusion.inner) or Tie(view.run, max(view.round, 1), view.method, b"")
    named = replace(named_in, digest=digest_of(payload))
    decided = _decision(device, named, "rejected", reason=str(intrusion), round=0, cause="intruder")
    return _named(decided, named.digest)


def answer_to_status(device: str, payload: bytes, error: WireError, view: View) -> Decision:
    """Reject a message on a device's status topic that is no status of the device; it counts in no round.

    Its digest is that of the word "status", a zero byte and the payload. So it is no contribution's digest, whatever
    was published there, and the answer ends no contribution.
    """
    is_intruder, reason = isinstance(error, Intrusion), f"its status: {error}"
    named = Tie(view.run, max(view.round, 1), view.method, digest_of(b"status\0" + payload))
    cause: Cause = "intruder" if is_intruder else "unreadable"
    decided = _decision(device, named, "rejected", reason=reason, round=0, cause=cause, digest=named.digest)
    return decided if is_intruder else replace(decided, outcome="malformed")


def _named(decision: Decision, digest: bytes) -> Decision:
    """An answer says which contribution it speaks of."""
    receipt = decision.receipt
    if receipt is None or receipt.digest == digest:
        return decision
    return replace(decision, receipt=replace(receipt, digest=digest))

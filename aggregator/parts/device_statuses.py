"""What devices say of themselves: births, deaths, reports. A status that is none, or another's, is noted and answered.

A device that says that its bundle fits nothing here takes no part, and its operator is told. Reports on photos, on
policies and on the roll-out go to the tables of their own.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable

from protofleet.aggregator.enrolment.gate import Gate, Intrusion
from protofleet.aggregator.ingest.ingest import Decision, View, answer_to_status
from protofleet.aggregator.ingest.refusal_rate import Pace
from protofleet.aggregator.parts.announcement_numbers import AnnouncementNumbers
from protofleet.aggregator.parts.exclusions import Exclusions
from protofleet.aggregator.parts.fleet_terms import FleetTerms
from protofleet.aggregator.parts.rollout_coordinator import RolloutCoordinator
from protofleet.aggregator.rounds.round_machine import MAX_DEVICES
from protofleet.aggregator.store.durable_store import Store
from protofleet.contract.bundle.class_names import check_proposed
from protofleet.contract.errors import UsageError, WireError
from protofleet.contract.identity.signatures import inside
from protofleet.contract.printable import printable
from protofleet.contract.wire import topics
from protofleet.contract.wire.envelopes import REFUSED, Mark
from protofleet.contract.wire.messages import Rival, Status
from protofleet.contract.wire.rollout_messages import APART, bundle_tag

__all__ = ["DeviceStatuses", "Uncounted"]

_ANSWERED = 4_096  # devices whose retained status was answered
_ANSWERS = 1_024  # that wait until this is the sole aggregator
_APART_EACH_S = 60.0  # between two lines of one device that takes no part, after its first few


class Uncounted:
    """Messages that are counted in the store with the next batch.

    Attributes:
        tally: by round and outcome.
        skipped: how many messages on other topics were none of ours, and got no answer.
    """

    def __init__(self) -> None:
        self.tally: Counter[tuple[int, str]] = Counter()
        self.skipped = 0

    def malformed(self, *, is_answered: bool = False) -> None:
        """Count a message on another topic that is none of ours.

        Args:
            is_answered: whether the listener also gets a decision about it.
        """
        self.tally[(0, "malformed")] += 1
        self.skipped += not is_answered


class DeviceStatuses:
    """The statuses of one fleet's devices.

    Args:
        uncounted: counts those that are no good.

    Attributes:
        apart: what devices run that fits nothing here.
    """

    def __init__(
        self,
        store: Store,
        terms: FleetTerms,
        exclusions: Exclusions,
        gate: Gate,
        rollouts: RolloutCoordinator,
        numbers: AnnouncementNumbers,
        uncounted: Uncounted,
    ) -> None:
        self._store, self._terms, self._exclusions, self._gate = store, terms, exclusions, gate
        self._rollouts, self._numbers, self._uncounted = rollouts, numbers, uncounted
        self._answers: list[Decision] = []
        self._broken: OrderedDict[str, bytes] = OrderedDict()  # device → the last status that was no good
        self.apart: dict[str, str] = {}
        self._apart_pace = Pace(_APART_EACH_S)

    def read(
        self, device: str, payload: bytes, view: Callable[[], View], *, is_ours: bool, is_news: bool
    ) -> Status | None:
        """What a device says of itself, its drift heard unless it is refused. What is no status, or not the device's,
        is counted and answered (`take_answers`).

        Args:
            view: what is gathered at this moment.
            is_ours: whether we have published it ourselves.
            is_news: whether it was published just now, and is not what a broker retained.
        """
        topic = topics.status(self._store.fleet, device)
        message = self._status_in(topic, device, payload, view, is_ours=is_ours, is_news=is_news)
        if message is None:
            return None
        self._numbers.note(message.heard)
        self._broken.pop(device, None)
        refuses = message.metrics.get(REFUSED, 0.0)
        if refuses >= 1:
            reason = "it gets messages that no key which it trusts has signed"
            self._gate.note(device, "refuses", reason, time.time(), messages=int(min(refuses, 1e15)))
        self._hear_apart(device, message)
        if message.rival is not None and is_news:
            self._gate.note(device, "second-process", _second(message.rival), time.time())
        is_refused = device in self._exclusions.refused
        self._store.devices.status(
            device, message, len(payload), time.time(), is_ours=is_ours, is_news=is_news, is_refused=is_refused
        )
        if not is_refused:
            self._store.drift.hear(device, message.metrics, max_samples=self._terms.settings.max_samples)
            most = self._terms.settings.max_samples
            self._store.calibration.hear(device, message.calibration, max_samples=most)
            self._store.policies.hear(device, message.versions)
            self._rollouts.hear(device, message.versions)
        return message

    def _hear_apart(self, device: str, message: Status) -> None:
        """Whether a device says that its bundle fits nothing that is announced: the operator is told of each change,
        and now and then of a device that says another thing with each birth."""
        if not message.versions:  # a last will
            return
        if APART not in message.versions:
            self.apart.pop(device, None)
            self._gate.forget(device, "apart")
            return
        runs = printable(f"{message.versions[APART]}, {message.versions.get('bundle', 'and does not say which')}")
        if runs == self.apart.get(device) or len(self.apart) >= MAX_DEVICES:
            return
        self.apart[device] = runs
        ours = bundle_tag(self._terms.manifest.version, self._terms.bundle)
        hint = f"copy a bundle of this aggregator's ({ours}) to it, or roll one out"
        reason = f"it runs {runs}: it takes no part and is not awaited; {hint}"
        self._gate.note(device, "apart", reason, time.time(), tells=self._apart_pace.allows(device, time.monotonic()))

    def take_answers(self) -> list[Decision]:
        """The answers to invalid statuses since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def _answer(self, device: str, payload: bytes, error: WireError, view: View, *, is_news: bool) -> bool:
        """Whether it is answered: a broker says again what it retained with each connection, and that is once."""
        decision = answer_to_status(device, payload, error, view)
        assert decision.receipt is not None
        answered = self._broken.pop(device, None)
        self._broken[device] = decision.receipt.digest
        if len(self._broken) > _ANSWERED:
            self._broken.popitem(last=False)
        is_due = (is_news or answered != decision.receipt.digest) and len(self._answers) < _ANSWERS
        if is_due:
            self._answers.append(decision)
        return is_due

    def _status_in(
        self,
        topic: str,
        device: str,
        payload: bytes,
        view: Callable[[], View] | None = None,
        *,
        is_ours: bool = False,
        is_news: bool = True,
    ) -> Status | None:
        """A device's status on a topic, None for no good one; with a view, that is answered."""
        try:
            message = self._gate.opened(
                device, topic, payload, limit_bytes=self._terms.settings.limit_bytes, is_ours=is_ours
            )
            if not isinstance(message, Status):
                raise WireError("message", expected="a status", got=type(message).__name__.lower())
            _check_proposed(message)
            self._gate.check_news(device, topic, message)
        except Intrusion as intrusion:
            if view is not None:
                self._numbers.note(_heard_in(payload))
            if is_news:
                self._gate.note(device, intrusion.cause, str(intrusion), time.time())
                if view is not None:
                    self._answer(device, payload, intrusion, view(), is_news=True)
            return None
        except WireError as error:
            answers = view is not None and self._answer(device, payload, error, view(), is_news=is_news)
            self._uncounted.malformed(is_answered=answers)
            return None
        return message

    def hear_elsewhere(self, device: str, topic: str, payload: bytes) -> None:
        """Take a device's status in the fleet that devices go over to."""
        message = None if device in self._exclusions.refused else self._status_in(topic, device, payload)
        if message is not None:
            self._rollouts.hear(device, message.versions, elsewhere=True)


def _heard_in(payload: bytes) -> tuple[Mark, ...]:
    """The numbers of announcements that a status tells, whoever says it: they are our own key's word, and a store that
    is lost, or an older copy, knows fewer devices."""
    try:
        message = inside(payload)
    except WireError:
        return ()
    return message.heard if isinstance(message, Status) else ()


def _check_proposed(message: Status) -> None:
    """Check the classes that a device proposes, as a device of ours did before it told of them.

    Raises:
        WireError: no class can be called that.
    """
    try:
        for name in message.proposed or ():
            check_proposed(name)
    except UsageError as error:
        raise WireError(error.message, expected=error.expected, got=error.got) from None


def _second(rival: Rival) -> str:
    """What a device says of another process under its id."""
    board = printable(rival.board[:60]) or "unknown"
    process = f"instance {rival.instance.hex()}, start {rival.boot}, board {board}"
    return f"another process runs under its id, and was sent away: {process}; stop it, or give it an --id and a --state"

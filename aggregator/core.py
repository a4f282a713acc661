"""What an aggregator is without its network, whatever it gathers: a store, a bundle, settings; who is refused, what
devices say of themselves, what operators ask for.

`aggregator/coordinator.py` gathers rounds, `aggregator/standing_coordinator.py` sums that stand.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from aggregator.class_drift import ClassDriftTable
from aggregator.closing import Closing
from aggregator.drift import DriftTable
from aggregator.enrolment import Gate, Intrusion, read_enrolment
from aggregator.events import ClassDriftSuspected, DriftSuspected, PolicyRefused
from aggregator.forgotten_classes import no_such_class
from aggregator.ingest import Decision, View, answer_to_status
from aggregator.joint_heads import JointHead
from aggregator.orders import LOOK_S, OF_A_CLASS, refusal, settle, unfit
from aggregator.refusal_rate import Pace
from aggregator.rollout_desk import RolloutDesk
from aggregator.rounds import MAX_DEVICES
from aggregator.settings import Settings, least_limit_of
from aggregator.standing_store import Order
from aggregator.store import Store, as_written
from aggregator.validation import ClassLists
from contract import topics
from contract.bundle import Manifest, extractor_of
from contract.envelopes import REFUSED, Mark
from contract.errors import WireError
from contract.messages import Encoding, Message, Receipt, Request, Rival, Status
from contract.methods import Method, Value
from contract.offers import APART, bundle_tag
from contract.signed import inside
from contract.state import GlobalState
from contract.terminal import printable

__all__ = ["Core"]

_LATEST_MS = 1 << 47  # since the epoch: the year 6429
_ANSWERED = 4_096  # devices whose retained status was answered
_ANSWERS = 1_024  # that wait for the seat
_APART_EACH_S = 60.0  # between two lines of one device that takes no part, after its first few


class Core(ABC):
    """One run of one fleet.

    Args:
        manifest, bundle: of the fleet's bundle, and its sha256 (32 bytes).
        shorter: how many classes bundles of the same extractor have that it extends, by sha256.
        now: seconds of a steady clock.

    Attributes:
        state: what devices are given.
        gate: says whose message it is.
        rollouts: the bundle that is being rolled out, if one is.
        closing: what takes long, beside the loop where there is one.
        skipped: messages on other topics that were none of ours, and that no answer tells of.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        bundle: bytes,
        settings: Settings,
        *,
        now: float,
        shorter: Mapping[bytes, int] | None,
    ) -> None:
        self._store, self._tables = store, store.standing
        self._manifest, self._bundle, self._settings = manifest, bundle, settings
        self._shorter = shorter or {}
        self.closing: Closing[Any] = Closing()
        self._lists = ClassLists.of(manifest, bundle, self._shorter)
        self._uncounted: Counter[tuple[int, str]] = Counter()
        self.skipped = 0
        self._status_answers: list[Decision] = []
        self._broken_statuses: OrderedDict[str, bytes] = OrderedDict()  # device → the last status that was no good
        self.state: GlobalState = store.state()
        self._refused = self._tables.refused()
        with as_written(self._tables.path):
            self._forgotten = self._tables.classes_forgotten()
            self._taken = self._tables.classes_taken()
            self.gate = Gate(store.fleet, store.enrolment, only=settings.enrolled)
            self.rollouts = RolloutDesk(store.rollouts, manifest, bundle, tuple(self._shorter))
        self._orders_at = now
        self._heard: list[Mark] = []
        self._apart: dict[str, str] = {}  # what devices run that fits nothing here
        self._apart_pace = Pace(_APART_EACH_S)

    @property
    @abstractmethod
    def method(self) -> Method:
        """Whose statistic is gathered now."""

    @abstractmethod
    def _view(self) -> View:
        """What is gathered at this moment."""

    @property
    def run(self) -> bytes:
        return self._store.run

    @property
    def drift(self) -> DriftTable:
        """What devices say of their newest photos."""
        return self._store.drift

    @property
    def class_drift(self) -> ClassDriftTable:
        """What sums that stand say of their classes."""
        return self._store.class_drift

    def look(self, devices: Collection[str]) -> None:
        """Before a batch of messages of these devices is decided on: what others may have taken of them meanwhile."""
        return

    def reload(self) -> None:
        """Another process may have enrolled somebody, or taken a device's withdrawal."""
        self.gate.reload()
        self._refused = self._tables.refused()

    def verdict(self, device: str) -> Receipt | None:
        """What a device has to know of the last closed round that it took part in; None where it counted as ever."""
        return None

    def joint_of(self, device: str) -> JointHead | None:
        """What a device that was left out is given of those that agree with it; None where there is nothing."""
        return None

    def departures(self, at: float) -> list[DriftSuspected | ClassDriftSuspected | PolicyRefused]:
        """Which devices and classes depart from themselves from now on, and what policies refuse; what was heard of
        them is durable then.

        Args:
            at: seconds since the epoch.

        Raises:
            StoreError: when the disk refuses.
        """
        return [*self.drift.settle(at), *self.class_drift.settle(at), *self._store.policies.settle(at)]

    @property
    def limit_bytes(self) -> int:
        """The largest message taken and sent."""
        return self._settings.limit_bytes

    @property
    def least_limit_bytes(self) -> int:
        """The smallest message limit that leaves room for a class row."""
        return least_limit_of(self._manifest)

    def malformed(self, *, is_answered: bool = False) -> None:
        """A message that is none of ours came on another topic; counted with the next batch.

        Args:
            is_answered: whether it is among what the listener is told was decided, too.
        """
        self._uncounted[(0, "malformed")] += 1
        self.skipped += not is_answered

    @property
    def _encoding(self) -> Encoding:
        """How tensors of the present method travel."""
        exact = self.method.encoding == "f64"
        return self._settings.sums_encoding if exact else self._settings.encoding

    @property
    def _extractor(self) -> bytes:
        """The extractor whose features the present method sums; empty where each device has its own."""
        return extractor_of(self._manifest, self._bundle, self.method)

    def _hyper(self, found: Method) -> dict[str, Value]:
        """The hyper-parameters of a method: the bundle's, and what is taken instead."""
        told = {name: value for name, value in self._settings.hyper.items() if name in found.hyper}
        return found.settled_in({**self._manifest.hyper, **told})

    def _width(self, found: Method) -> int:
        """The width of a method's rows: that of the features, or of what the method makes of them."""
        return found.row_width(self._hyper(found), self._manifest.features)

    def _opened(self, device: str, payload: bytes, limit_bytes: int) -> Message:
        """What came on a device's `up` topic, if it is the device's; who poses as it is noted."""
        try:
            return self.gate.opened(device, None, payload, limit_bytes=limit_bytes)
        except Intrusion as intrusion:
            self.gate.note(device, intrusion.cause, str(intrusion), time.time())
            raise

    def _refusal(self, device: str) -> str:
        """Why nothing of a device is taken; empty where it is."""
        return refusal(device, self._refused)

    @property
    def _withheld(self) -> tuple[int, ...]:
        """The numbers, rising, of the classes of which nothing is taken."""
        return tuple(number for number, name in enumerate(self._manifest.labels) if name in self._forgotten)

    def _unfit(self, order: Order) -> str:
        """Why nothing can be done with an order, as its outcome; empty where something can."""
        if order.what in OF_A_CLASS and order.detail not in self._manifest.labels:
            return no_such_class(order.detail, self._manifest.labels)
        return unfit(order)

    def _admit_class(self, order: Order, wall: float) -> str:
        """From now on samples of a class are summed again."""
        left = tuple(name for name in self._forgotten if name != order.detail)
        outcome = "done" if left != self._forgotten else "done: it was not forgotten"
        version = self.state.version
        taken = {name: of for name, of in self._taken.items() if name != order.detail}
        taken[""] = {**self._taken.get("", {}), **self._taken.get(order.detail, {})}
        self._tables.class_done(order, left, taken, at=wall, before=version, after=version, outcome=outcome)
        self._forgotten, self._taken = left, taken
        return outcome

    def issue(self, wall: float) -> int:
        """A number for an announcement that is signed: above every earlier one of this store, and durable: milliseconds
        since the epoch, or the last and one. A clock that is ahead of `_LATEST_MS` counts no further than that, so the
        numbers that a wire can carry are never used up.

        Args:
            wall: seconds since the epoch.

        Raises:
            StoreError: the disk refuses.
        """
        number = max(min(int(wall * 1000), _LATEST_MS), self.issued + 1)
        self._tables.set_meta("issued", str(number))
        return number

    @property
    def issued(self) -> int:
        """The highest number of an announcement that this store knows of; 0 before the first."""
        return int(self._tables.meta("issued") or 0)

    def issued_elsewhere(self, number: int) -> None:
        """Our key has given that number, which this store does not know of: the next one is above it.

        Raises:
            StoreError: the disk refuses.
        """
        self._tables.set_meta("issued", str(max(number, self.issued)))

    def note_numbers(self, heard: Iterable[Mark]) -> None:
        """Somebody has heard announcements with these numbers."""
        self._heard.extend(heard)

    def take_heard(self) -> list[Mark]:
        """Which numbers of announcements were heard of, since the last time."""
        heard, self._heard = self._heard, []
        return heard

    def enrol(self, device: str, payload: bytes, wall: float) -> Receipt | None:
        """What to answer to a device that asks to be enrolled, which is durable on return; None for another message.

        Args:
            wall: seconds since the epoch.

        Raises:
            StoreError: the disk refuses.
        """
        enrolment = read_enrolment(payload)
        if enrolment is None:
            return None
        receipt = self.gate.enrol(device, enrolment, payload, self.run, wall)
        if receipt.status == "rejected":
            self.gate.note(device, "token", receipt.reason, wall)
        return receipt

    def _read_status(self, device: str, payload: bytes, *, is_ours: bool, is_news: bool) -> Status | None:
        """What a device says of itself, its drift heard unless it is refused. What is no status, or not the device's,
        is counted and answered (`status_answers`).

        Args:
            is_ours: whether we have published it ourselves.
            is_news: whether it was published just now, and is not what a broker retained.
        """
        topic = topics.status(self._store.fleet, device)
        message = self._status_in(topic, device, payload, is_ours=is_ours, is_news=is_news, answers=True)
        if message is None:
            return None
        self.note_numbers(message.heard)
        self._broken_statuses.pop(device, None)
        refuses = message.metrics.get(REFUSED, 0.0)
        if refuses >= 1:
            reason = "it gets messages that no key which it trusts has signed"
            self.gate.note(device, "refuses", reason, time.time(), messages=int(min(refuses, 1e15)))
        self._hear_apart(device, message)
        if message.rival is not None and is_news:
            self.gate.note(device, "second-process", _second(message.rival), time.time())
        if device not in self._refused:
            self._store.drift.hear(device, message.metrics, max_samples=self._settings.max_samples)
            self._store.policies.hear(device, message.versions)
            self.rollouts.hear(device, message.versions)
        return message

    def _hear_apart(self, device: str, message: Status) -> None:
        """Whether a device says that its bundle fits nothing that is announced: the operator is told of each change,
        and now and then of a device that says another thing with each birth."""
        if not message.versions:  # a last will
            return
        if APART not in message.versions:
            self._apart.pop(device, None)
            self.gate.forget(device, "apart")
            return
        runs = printable(f"{message.versions[APART]}, {message.versions.get('bundle', 'and does not say which')}")
        if runs == self._apart.get(device) or len(self._apart) >= MAX_DEVICES:
            return
        self._apart[device] = runs
        ours = bundle_tag(self._manifest.version, self._bundle)
        hint = f"copy a bundle of this aggregator's ({ours}) to it, or roll one out"
        reason = f"it runs {runs}: it takes no part and is not awaited; {hint}"
        self.gate.note(device, "apart", reason, time.time(), tells=self._apart_pace.allows(device, time.monotonic()))

    def status_answers(self) -> list[Decision]:
        """What to answer to statuses that were no good, since this was asked last."""
        made, self._status_answers = self._status_answers, []
        return made

    def _answer_status(self, device: str, payload: bytes, error: WireError, *, is_news: bool) -> bool:
        """Whether it is answered: a broker says again what it retained with each connection, and that is once."""
        decision = answer_to_status(device, payload, error, self._view())
        assert decision.receipt is not None
        known = self._broken_statuses.pop(device, None)
        self._broken_statuses[device] = decision.receipt.digest
        if len(self._broken_statuses) > _ANSWERED:
            self._broken_statuses.popitem(last=False)
        answers = (is_news or known != decision.receipt.digest) and len(self._status_answers) < _ANSWERS
        if answers:
            self._status_answers.append(decision)
        return answers

    def _status_in(
        self,
        topic: str,
        device: str,
        payload: bytes,
        *,
        is_ours: bool = False,
        is_news: bool = True,
        answers: bool = False,
    ) -> Status | None:
        try:
            message = self.gate.opened(device, topic, payload, limit_bytes=self._settings.limit_bytes, is_ours=is_ours)
            if not isinstance(message, Status):
                raise WireError("message", expected="a status", got=type(message).__name__.lower())
            self.gate.check_news(device, topic, message)
        except Intrusion as intrusion:
            if answers:
                self.note_numbers(_heard_in(payload))
            if is_news:
                self.gate.note(device, intrusion.cause, str(intrusion), time.time())
                if answers:
                    self._answer_status(device, payload, intrusion, is_news=True)
            return None
        except WireError as error:
            self.malformed(is_answered=answers and self._answer_status(device, payload, error, is_news=is_news))
            return None
        return message

    def hear_elsewhere(self, device: str, topic: str, payload: bytes) -> None:
        """What a device says of itself in the fleet that devices go over to."""
        message = None if device in self._refused else self._status_in(topic, device, payload)
        if message is not None:
            self.rollouts.hear(device, message.versions, elsewhere=True)

    def gives(self, device: str, request: Request) -> bool:
        """Whether a device gets what it asks for of the bundle that is rolled out."""
        return device not in self._refused and self.rollouts.may_have(device, request)

    def _settle(self, order: Order, wall: float) -> str | None:
        """Do what an order asks for that is the same with and without rounds; what became of it, None for another."""
        told = self.gate.obey(order, wall) or self.rollouts.obey(order, wall)
        outcome = settle(order, self._tables, self._refused, wall) if told is None else told
        if order.device in self._refused:
            self.rollouts.forget(order.device)
        return outcome

    def _next_order(self, now: float) -> Order | None:
        """What an operator asked for and nobody has done yet, looked for now and then."""
        if now < self._orders_at:
            return None
        order = self._tables.next_order()
        if order is None:
            self._orders_at = now + LOOK_S
            self._tables.erase()
        return order


def _heard_in(payload: bytes) -> tuple[Mark, ...]:
    """The numbers of announcements that a status tells, whoever says it: they are our own key's word, and a store that
    is lost, or an older copy, knows fewer devices."""
    try:
        message = inside(payload)
    except WireError:
        return ()
    return message.heard if isinstance(message, Status) else ()


def _second(rival: Rival) -> str:
    """What a device says of another process under its id."""
    board = printable(rival.board[:60]) or "unknown"
    who = f"instance {rival.instance.hex()}, start {rival.boot}, board {board}"
    return f"another process runs under its id, and was sent away: {who}; stop it, or give it an --id and a --state"

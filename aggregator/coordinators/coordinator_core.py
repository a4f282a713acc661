"""The part of an aggregator, without its network, that is the same with and without rounds.

It has a store, a bundle and settings; it knows the refused devices, the devices' reports and the operators' orders.

`aggregator/coordinators/round_coordinator.py` adds rounds, `aggregator/coordinators/standing_coordinator.py` adds
standing sums.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from protofleet.aggregator.coordinators.background_work import Closing
from protofleet.aggregator.coordinators.joint_heads import JointHead
from protofleet.aggregator.coordinators.rollout_coordinator import RolloutCoordinator
from protofleet.aggregator.enrolment.gate import Gate, Intrusion, read_enrolment
from protofleet.aggregator.ingest.ingest import Decision, View, answer_to_status
from protofleet.aggregator.ingest.refusal_rate import Pace
from protofleet.aggregator.ingest.validation import ClassLists
from protofleet.aggregator.merging.forgotten_classes import no_such_class
from protofleet.aggregator.monitoring.class_drift import ClassDriftTable
from protofleet.aggregator.monitoring.drift import DriftTable
from protofleet.aggregator.monitoring.events import ClassDriftSuspected, DriftSuspected, PolicyRefused
from protofleet.aggregator.rounds.round_machine import MAX_DEVICES
from protofleet.aggregator.settings import Settings, least_limit_of
from protofleet.aggregator.store.durable_store import Store, as_written
from protofleet.aggregator.store.operator_orders import LOOK_S, OF_A_CLASS, carry_out, refusal, unfit
from protofleet.aggregator.store.order_table import Order
from protofleet.contract.bundle.bundle_file import Manifest, extractor_of
from protofleet.contract.errors import WireError
from protofleet.contract.identity.signatures import inside
from protofleet.contract.methods import Method, Value
from protofleet.contract.printable import printable
from protofleet.contract.wire import topics
from protofleet.contract.wire.envelopes import REFUSED, Mark
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Encoding, Message, Receipt, Request, Rival, Status
from protofleet.contract.wire.rollout_messages import APART, bundle_tag

__all__ = ["Core"]

_LATEST_MS = 1 << 47  # since the epoch: the year 6429
_ANSWERED = 4_096  # devices whose retained status was answered
_ANSWERS = 1_024  # that wait until this is the sole aggregator
_APART_EACH_S = 60.0  # between two lines of one device that takes no part, after its first few


class Core(ABC):
    """One run of one fleet.

    Args:
        manifest, bundle: of the fleet's bundle, and its sha256 (32 bytes).
        shorter: the bundles of the same extractor that it extends: sha256 and number of classes.
        now: seconds of a steady clock.

    Attributes:
        state: the global state that devices get.
        gate: says whose message it is.
        rollouts: the bundle that is being rolled out, if there is one.
        closing: long work, beside the loop where there is one.
        skipped: how many messages on other topics were none of ours, and got no answer.
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
        self._refused = self._store.refused_devices.reasons()
        with as_written(self._tables.path):
            self._forgotten = self._tables.classes_forgotten()
            self._taken = self._tables.classes_taken()
            self.gate = Gate(store.fleet, store.enrolment, only=settings.enrolled)
            self.rollouts = RolloutCoordinator(store.rollouts, manifest, bundle, tuple(self._shorter))
        self._orders_at = now
        self._heard: list[Mark] = []
        self._apart: dict[str, str] = {}  # what devices run that fits nothing here
        self._apart_pace = Pace(_APART_EACH_S)

    @property
    @abstractmethod
    def method(self) -> Method:
        """The method whose statistic is gathered now."""

    @abstractmethod
    def _view(self) -> View:
        """What is gathered at this moment."""

    @property
    def run(self) -> bytes:
        return self._store.run

    @property
    def drift(self) -> DriftTable:
        """The devices' reports on their newest photos."""
        return self._store.drift

    @property
    def class_drift(self) -> ClassDriftTable:
        """What standing sums say of their classes."""
        return self._store.class_drift

    def look(self, devices: Collection[str]) -> None:
        """Called before a batch of these devices' messages is decided on: read what other processes took of them."""
        return

    def reload(self) -> None:
        """Read again what another process may have changed: an enrolment, or a device's withdrawal."""
        self.gate.reload()
        self._refused = self._store.refused_devices.reasons()

    def verdict(self, device: str) -> Receipt | None:
        """The receipt about the last closed round that a device took part in; None when it counted as always."""
        return None

    def joint_of(self, device: str) -> JointHead | None:
        """The joint head for a left-out device, made of the devices that agree with it; None when there is none."""
        return None

    def departures(self, at: float) -> list[DriftSuspected | ClassDriftSuspected | PolicyRefused]:
        """The devices and classes that depart from themselves from now on, and what policies refuse.

        The heard reports are durable on return.

        Args:
            at: seconds since the epoch.

        Raises:
            StoreError: the disk refuses.
        """
        return [
            *self.drift.commit_heard(at),
            *self.class_drift.commit_heard(at),
            *self._store.policies.commit_heard(at),
        ]

    @property
    def limit_bytes(self) -> int:
        """The largest message taken and sent."""
        return self._settings.limit_bytes

    @property
    def least_limit_bytes(self) -> int:
        """The smallest message limit that leaves room for a class row."""
        return least_limit_of(self._manifest)

    def malformed(self, *, is_answered: bool = False) -> None:
        """Count a message on another topic that is none of ours, with the next batch.

        Args:
            is_answered: whether the listener also gets a decision about it.
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

    def _hyper(self, method: Method) -> dict[str, Value]:
        """The hyper-parameters of a method: the bundle's, and what is taken instead."""
        chosen = {name: value for name, value in self._settings.hyper.items() if name in method.hyper}
        return method.resolved_in({**self._manifest.hyper, **chosen})

    def _width(self, method: Method) -> int:
        """The width of a method's rows: that of the features, or of what the method makes of them."""
        return method.row_width(self._hyper(method), self._manifest.features)

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
        forgotten = tuple(name for name in self._forgotten if name != order.detail)
        outcome = "done" if forgotten != self._forgotten else "done: it was not forgotten"
        version = self.state.version
        taken = {name: by_device for name, by_device in self._taken.items() if name != order.detail}
        taken[""] = {**self._taken.get("", {}), **self._taken.get(order.detail, {})}
        self._tables.class_done(order, forgotten, taken, at=wall, before=version, after=version, outcome=outcome)
        self._forgotten, self._taken = forgotten, taken
        return outcome

    def issue(self, wall: float) -> int:
        """A number for a signed announcement: above every earlier one of this store, and durable.

        It is the milliseconds since the epoch, or the last number and one. A clock ahead of `_LATEST_MS` counts no
        further than that, so the numbers that a wire can carry are never used up.

        Args:
            wall: seconds since the epoch.

        Raises:
            StoreError: the disk refuses.
        """
        number = max(min(int(wall * 1000), _LATEST_MS), self.issued + 1)
        self._store.meta.put("issued", str(number))
        return number

    @property
    def issued(self) -> int:
        """The highest number of an announcement that this store knows; 0 before the first."""
        return int(self._store.meta.get("issued") or 0)

    def issued_elsewhere(self, number: int) -> None:
        """Our key has signed that number, which this store does not know. The next number is above it.

        Raises:
            StoreError: the disk refuses.
        """
        self._store.meta.put("issued", str(max(number, self.issued)))

    def note_numbers(self, heard: Iterable[Mark]) -> None:
        """Note that devices have heard announcements with these numbers."""
        self._heard.extend(heard)

    def take_heard(self) -> list[Mark]:
        """The numbers of announcements that devices have heard, since the last call."""
        heard, self._heard = self._heard, []
        return heard

    def enrol(self, device: str, payload: bytes, wall: float) -> Receipt | None:
        """The answer to a device that asks to be enrolled, durable on return; None for another message.

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
        """The answers to invalid statuses since the last call."""
        answers, self._status_answers = self._status_answers, []
        return answers

    def _answer_status(self, device: str, payload: bytes, error: WireError, *, is_news: bool) -> bool:
        """Whether it is answered: a broker says again what it retained with each connection, and that is once."""
        decision = answer_to_status(device, payload, error, self._view())
        assert decision.receipt is not None
        answered = self._broken_statuses.pop(device, None)
        self._broken_statuses[device] = decision.receipt.digest
        if len(self._broken_statuses) > _ANSWERED:
            self._broken_statuses.popitem(last=False)
        is_due = (is_news or answered != decision.receipt.digest) and len(self._status_answers) < _ANSWERS
        if is_due:
            self._status_answers.append(decision)
        return is_due

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
        """Take a device's status in the fleet that devices go over to."""
        message = None if device in self._refused else self._status_in(topic, device, payload)
        if message is not None:
            self.rollouts.hear(device, message.versions, elsewhere=True)

    def gives(self, device: str, request: Request) -> bool:
        """Whether a device gets the piece of the bundle that it asks for."""
        return device not in self._refused and self.rollouts.may_have(device, request)

    def _carry_out(self, order: Order, wall: float) -> str | None:
        """Do what an order asks for that is the same with and without rounds; what became of it, None for another."""
        obeyed = self.gate.obey(order, wall) or self.rollouts.obey(order, wall)
        outcome = (
            carry_out(order, self._store.refused_devices, self._store.meta, self._refused, wall)
            if obeyed is None
            else obeyed
        )
        if order.device in self._refused:
            self.rollouts.forget(order.device)
        return outcome

    def _next_order(self, now: float) -> Order | None:
        """What an operator asked for and nobody has done yet, looked for now and then."""
        if now < self._orders_at:
            return None
        order = self._store.orders.next_order()
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
    process = f"instance {rival.instance.hex()}, start {rival.boot}, board {board}"
    return f"another process runs under its id, and was sent away: {process}; stop it, or give it an --id and a --state"

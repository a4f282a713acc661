"""The server's loop: one thread that joins the MQTT link with the coordinator.

Each turn:

1. gather: events of the link, as many as are there, up to a batch;
2. births, deaths and connection changes take effect; contributions are decided on and committed in one transaction;
3. receipts go out; only then are the messages acknowledged, all of them and in the order they came;
4. what is due is done: a round opens, is extended, or closes with its merged result durable; then the global state is
   published, and after it the announcement that names its version. Both are retained. What is merged and solved is so
   in a thread (`closing.py`), while turns go on.

Nothing is published that is not durable, and nothing is acknowledged before its receipt was handed over. For a broker
that is away nothing is kept: on every connection we announce again, and once that has come back we publish what the
broker has lost of the global state; devices send again what they have no receipt for. So kill -9 of any part at any
instruction loses and doubles nothing. Only one aggregator speaks for a fleet (`seat`): until the seat is taken nothing
but status messages is looked at, nothing opens, and nothing is acknowledged.

A device that was silent through a whole deadline may be a birth whose will was never published. A death is published
in its name; one that is alive answers with a birth, and what is retained of the others is true again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection

from aggregator import events
from aggregator.blinded_coordinator import BlindedCoordinator
from aggregator.coordinator import Coordinator
from aggregator.ending import Ending
from aggregator.enrolment import Intrusion
from aggregator.handout import Handout
from aggregator.helper_line import HelperLine
from aggregator.ingest import Decision
from aggregator.orders import Obeyed
from aggregator.receipts import Receipts
from aggregator.retained import RetainedState
from aggregator.rounds import Closed, Finished
from aggregator.run_events import Teller
from aggregator.sharing import LEARN_S, Sharing
from aggregator.sole_aggregator import Seat, check_age
from aggregator.standing_coordinator import Solved, StandingCoordinator
from aggregator.standing_events import StandingTeller
from aggregator.voice import Voice
from contract import topics
from contract.certificates import Expiry
from contract.envelopes import ENVELOPE_BYTES
from contract.errors import LedError, LinkError, WireError
from contract.link import Address, Connected, Disconnected, Failed, Link, Noticed, Received, client_id
from contract.messages import Announcement, Message, Status
from contract.service_manager import ServiceManager
from contract.signed import Signer
from contract.wire import encode

__all__ = ["BATCH", "Server"]

BATCH = 256
RECEIVE_MAXIMUM = 1_024
TURN_S = 1.0
PATIENCE_S = 60.0
_ASKED_EACH_TURN = 100
_SHORT_S = 0.05  # a round that closes within that does so in the same turn
_HANGS_S = 120.0  # a network thread that has not gone round for so long, not even in vain


class Server:
    """Runs one coordinator over one link.

    Args:
        listener: is told what happens.
        on_round: called with whether the run is finished, after each round and at the end.
        patience_s: how long the broker may be absent at the start; None for 60 s, and for ever where there is no end of
            the plan.
        signer: signs what is published; None where nothing is signed.
        take_over: end another aggregator that serves this fleet, instead of refusing to start.
        is_new_run: whether the store goes on as a new run, as its operator has asked.
        stopping: ends `run` once it is set.
        manager: of the service, if there is one.
        each_turn: called after each turn of the loop.
        sharing: where other processes take contributions, too, this one's part in that.
    """

    def __init__(
        self,
        coordinator: Coordinator | StandingCoordinator,
        address: Address,
        fleet: str,
        *,
        listener: events.Listener,
        on_round: Callable[[bool], None],
        patience_s: float | None = None,
        signer: Signer | None = None,
        take_over: bool = False,
        is_new_run: bool = False,
        stopping: threading.Event | None = None,
        manager: ServiceManager | None = None,
        each_turn: Callable[[], None] = lambda: None,
        sharing: Sharing | None = None,
    ) -> None:
        self._sharing, self._is_new_run = sharing, is_new_run
        self._core, self._address, self._fleet = coordinator, address, fleet
        self._listener, self._on_round = listener, on_round
        stays = coordinator.rounds.stays or sharing is not None
        self._patience_s = None if patience_s is None and stays else patience_s or PATIENCE_S
        self._each_turn = each_turn
        self._stopping, self._manager = stopping or threading.Event(), manager or ServiceManager({})
        self._teller = (
            StandingTeller(coordinator, listener)
            if isinstance(coordinator, StandingCoordinator)
            else Teller(coordinator, listener)
        )
        self._seat = Seat(fleet, coordinator.run, started=int(time.time()), take_over=take_over)
        self._voice = Voice(fleet, signer, coordinator.issue)
        self._round_topic, self._seat_topic = topics.round_(fleet), topics.status(fleet, topics.AGGREGATOR)
        blinded = coordinator if isinstance(coordinator, BlindedCoordinator) else None
        self._link = Link(
            address,
            client_id(fleet, topics.AGGREGATOR),
            subscriptions=[
                topics.up(fleet) if sharing is None else topics.shared(fleet, topics.up(fleet)),
                *(topics.status(fleet), self._round_topic, topics.global_all(fleet)),
                *([] if blinded is None else [topics.helper_answer(fleet)]),
            ],
            will=self._will,
            receive_maximum=RECEIVE_MAXIMUM,
            largest_bytes=coordinator.largest_message_bytes + ENVELOPE_BYTES,
            echo_topic=self._round_topic,
        )
        coordinator.closing.patience_s, coordinator.closing.wake = _SHORT_S, self._link.wake
        self._receipts = Receipts(fleet, self._link, self._voice, listener)
        self._handout = Handout(coordinator, self._link, address, fleet, listener, self._voice)
        away = lambda round, devices: listener(events.HelperAwaited(round, devices))  # noqa: E731
        line = None if blinded is None else HelperLine(blinded, self._link, fleet, seal=self._voice.sealed, waits=away)
        self._helper = line
        self._limit_bytes = coordinator.limit_bytes
        self._retained = RetainedState(fleet, self._link, self._voice)
        self._connections = 0
        self._echoed_on = 0  # the connection on which our own announcement has come back
        self._held: list[Received] = []  # what came before the seat was taken
        self._joint_told: dict[str, int] = {}  # of which round's joint head a device's process was given
        self._born: set[str] = set()  # devices that are to know that a round left them out, or counts them again
        self._ask: deque[tuple[str, bytes]] = deque()
        self._asked: dict[str, bytes] = {}  # deaths that we published in a device's name
        self._was_finished = coordinator.is_finished
        self._ending: Ending | None = None

    def run(self) -> None:
        """Serve until the plan is done and the devices have gone, or the grace is over; where there is no end of the
        plan, until `stopping` is set.

        Raises:
            LinkError: when there is no broker, it refuses us, or another aggregator serves this fleet.
            StoreError: when the disk refuses.
        """
        self._link.open()
        try:
            if self._patience_s is not None:
                self._connected(self._link.wait_connected(self._patience_s))
            self._manager.ready()
            if self._sharing is not None:
                self._sharing.check_leads()
            self._teller.resumed()
            while not (self._over() or self._stopping.is_set()):
                self._turn()
                self._each_turn()
                if self._link.still_s < _HANGS_S:
                    self._manager.alive()
            self._teller.accuracy(last=True)
        finally:
            self._manager.stopping()
            if self._seat.taken:
                self._say(self._seat_topic, self._seat.death)
            self._handout.close()
            self._link.close()
            self._core.closing.abandon()
            self._listener(events.Ended(self._connections, self._link.dropped))

    def broker_certificate(self) -> Expiry | None:
        """Until when the certificate is good that the broker has shown; from any thread."""
        return self._link.broker_certificate

    # ── one turn ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _turn(self) -> None:
        received = self._gather()
        contributions = [message for message in received if self._is_contribution(message)]
        self._go_above()
        self._take_seat()
        if not self._seat.taken:
            self._held += [message for message in received if message.mid]  # no window bounds those at QoS 0
            return
        held = [message for message in self._held if _kind(message) in ("up", "global")]
        contributions = [message for message in held if self._is_contribution(message)] + contributions
        received, self._held = self._held + received, []
        now = time.monotonic()
        sent = [(topics.device_of(message.topic), message.payload) for message in contributions]
        sent = [each for each in sent if not (self._handout.take(*each) or self._enrol(*each, now))]
        began = time.perf_counter()
        decisions = self._take(sent, now)
        if sent:
            self._listener(events.BatchTaken(len(sent), time.perf_counter() - began))
        self._receipts.send(self._core.status_answers() + decisions, now)
        for message in received:
            self._link.acknowledge(message)
        if any(decision.outcome == "committed" for decision in decisions):
            self._teller.committed()
        self._teller.accuracy()
        self._advance()
        self._tell_verdicts(self._born)
        self._born.clear()
        self._handout.turn(self._limit_bytes)
        if self._helper is not None:
            self._helper.turn(time.monotonic(), self._limit_bytes)
        self._ask_the_silent()
        self._mend(now)
        self._teller.waits(time.monotonic())
        for suspected in self._core.departures(time.time()):
            self._listener(suspected)
        for intruder in self._core.gate.take_news(time.time()):
            self._listener(events.IntruderTold(intruder.device, intruder.cause, intruder.reason, intruder.messages))

    def _take(self, sent: list[tuple[str, bytes]], now: float) -> list[Decision]:
        if self._sharing is None:
            return self._core.take(sent, now) + self._core.stalled(now)
        decisions = self._sharing.take_as_leader(sent, now) + self._sharing.stalled(now)
        if self._sharing.learn(now):
            self._teller.committed()
        return decisions

    def _gather(self) -> list[Received]:
        now = time.monotonic()
        # without the seat nothing opens or closes
        waits_for_due = self._seat.taken and not self._core.closing.has_work  # the end of which wakes us
        due_s = self._core.rounds.due_in_s(now) if waits_for_due else None
        helper_s = self._helper.wait_s(now) if self._helper is not None and self._seat.taken else None
        learn_s = None if self._sharing is None else LEARN_S
        waits = (due_s, self._seat.wait_s(now), self._handout.wait_s, self._voice.wait_s(now), helper_s, learn_s)
        event = self._link.receive(min((TURN_S, *(wait + 0.001 for wait in waits if wait is not None))))
        received: list[Received] = []
        while event is not None:
            if isinstance(event, Received):
                received.append(event)
                if self._ending is not None:
                    self._ending.heard(time.monotonic())
                if len(received) >= BATCH:
                    break
            elif isinstance(event, Connected):
                self._connected(event)
            elif isinstance(event, Disconnected):
                self._held.clear()  # they come again, and could not be acknowledged any more
                self._seat.disconnected()
                self._listener(events.LinkDown(event.reason, event.retry_s))
            elif isinstance(event, Noticed):
                self._listener(events.Noticed(event.line))
            elif isinstance(event, Failed):
                raise event.error
            event = self._link.receive(0)
        return received

    def _is_contribution(self, message: Received) -> bool:
        """Whether it came on an `up` topic; messages on the other topics take effect here."""
        kind = _kind(message)
        if kind == "round":
            self._hear_announcement(message)
        elif kind == "helper":
            if self._helper is not None and not self._helper.hear(message.payload):
                self._core.malformed()
        elif kind == "global":
            state, now = self._core.state, time.monotonic()
            if self._seat.taken and not self._retained.hear(message, state, self._limit_bytes, now):
                self._core.malformed()
        elif message.payload:
            try:
                device = topics.device_of(message.topic)
            except WireError:  # an id that the broker allows and we do not
                self._core.malformed()
                return False
            if kind == "up":
                return self._seat.taken
            if device == topics.AGGREGATOR:
                self._hear_rival(message)
            else:
                self._hear_status(device, message)
        return False

    def _hear_status(self, device: str, message: Received) -> None:
        is_ours = self._asked.get(device) == message.payload or self._voice.is_ours(message.topic, message.payload)
        now, is_news = time.monotonic(), not message.retained
        if self._core.status(device, message.payload, now, is_ours=is_ours, is_news=is_news):
            self._joint_told.pop(device, None)  # another process, or one that was away
        if self._core.verdict(device) is not None:
            self._born.add(device)
        if self._ending is not None and self._core.rounds.is_online(device):
            self._ending.came(device)

    def _enrol(self, device: str, payload: bytes, now: float) -> bool:
        """Whether a message asks for a device to be enrolled; then it is answered, and durable."""
        receipt = self._core.enrol(device, payload, time.time())
        if receipt is None:
            return False
        self._receipts.answer(device, receipt, now, is_intruder=receipt.status == "rejected")
        return True

    def _say(self, topic: str, status: Status) -> bytes:
        said = self._voice.sealed(topic, encode(status))
        self._link.publish(topic, said, retain=True)
        return said

    def _ask_the_silent(self) -> None:
        lost = self._core.rounds.take_lost()
        self._teller.silent([device for device, _ in lost])
        self._ask.extend(lost)
        for _ in range(min(len(self._ask), _ASKED_EACH_TURN)):
            device, instance = self._ask.popleft()
            self._asked[device] = self._say(topics.status(self._fleet, device), Status(False, instance, 0))

    def _will(self) -> tuple[str, bytes]:
        """What the broker is to say when it loses us on one more connection; asked in the network thread."""
        return self._seat_topic, self._voice.sealed(self._seat_topic, encode(self._seat.will()))

    # ── the seat ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_seat(self) -> None:
        had = self._seat.taken
        said = self._seat.due(time.monotonic())
        if said is not None:
            self._say(self._seat_topic, said)
        if self._seat.taken and not had:
            self._announce()

    def _hear_rival(self, message: Received) -> None:
        status = self._said_here(message)
        if isinstance(status, Status):
            try:
                self._seat.heard(status, time.monotonic())
            except LinkError as error:
                if self._sharing is None or status.instance[:4] != self._core.run:
                    raise
                raise LedError(str(error)) from None  # of our own store: it leads now
        elif status is not None:
            self._core.malformed()

    def _said_here(self, message: Received) -> Message | None:
        """What was published on a topic of ours, if it counts; it is noted where somebody else poses as us."""
        try:
            return self._voice.heard(message.topic, message.payload)
        except Intrusion as intrusion:
            if not message.retained:
                self._core.gate.note(topics.AGGREGATOR, intrusion.cause, str(intrusion), time.time())
        except WireError:
            self._core.malformed()
        if not message.retained and self._seat.taken:
            self._voice.overwritten(time.monotonic())
        return None

    def _hear_announcement(self, message: Received) -> None:
        """Of another run, live: its aggregator runs, or ran just now. Of our own run, live: the broker hears us, and
        has told what it retains. Of our own run, but later: our store is old."""
        if not message.payload:  # whoever cleared it
            self._voice.overwritten(time.monotonic())
            return
        announcement = self._said_here(message)
        if not isinstance(announcement, Announcement):
            if announcement is not None:
                self._core.malformed()
            return
        if message.retained:  # ours, if we sign
            self._core.note_numbers(self._voice.marks(announcement))
        if announcement.run == self._core.run:
            later = announcement.epoch - self._core.announcement().epoch
            if self._sharing is not None and later > 0:
                self._sharing.check_leads()  # if another does; else anybody may have said it
            if later < 0 and self._seat.taken and not message.retained:  # one that was followed wakes late
                self._announce()
                self._publish_state()
            if message.retained and not self._seat.was_taken:
                check_age(announcement, self._core.rounds.number, self._core.state.version)
            elif not message.retained and self._echoed_on != message.connection:  # what is retained has come before it
                self._echoed_on = message.connection
                self._publish_state()
        elif self._seat.taken and not message.retained:
            self._seat.rival_spoke(time.monotonic())
            self._announce()

    # ── what is retained ────────────────────────────────────────────────────────────────────────────────────────────

    def _connected(self, event: Connected) -> None:
        self._connections += 1
        self._limit_bytes = min(event.limit_bytes, self._core.limit_bytes)
        least = self._core.least_limit_bytes + self._voice.room_bytes
        if self._limit_bytes < least:
            raise LinkError(
                f"broker {self._address} takes messages of {event.limit_bytes} bytes",
                expected=f"at least {least} for the bundle's class rows",
                got="less",
                hint="its maximum packet size",
            )
        self._listener(events.LinkUp(str(self._address), self._limit_bytes))
        self._seat.connected(time.monotonic())
        if self._helper is not None:
            self._helper.connected()

    def _announce(self) -> None:
        said = self._voice.announcement(self._core.announcement(self._limit_bytes), time.time())
        self._link.publish(self._round_topic, said, retain=True)

    def _go_above(self) -> None:
        """Number anew where devices have heard higher numbers of ours than our store knows of."""
        heard = self._core.take_heard()
        issued = self._core.issued if heard and self._voice.signs else 0
        lost = self._voice.lost(heard, issued)
        if not lost:
            return
        self._core.issued_elsewhere(lost)
        if issued or lost > time.time() * 1000:
            self._listener(events.NumbersLost(lost, issued, self._is_new_run))
        if self._seat.taken:
            self._announce()

    def _publish_state(self) -> None:
        """Publish what the broker is not known to retain of the global state."""
        self._retained.publish(self._core.state, self._limit_bytes, self._echoed_on)

    def _mend(self, now: float) -> None:
        """Publish again what somebody may have overwritten; of the global state what is not as it was."""
        if self._voice.mends(now):
            self._announce()
            self._publish_state()

    # ── steps ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _advance(self) -> None:
        until_s = time.monotonic() + TURN_S
        while (step := self._core.advance(time.monotonic(), time.time())) is not None:
            if isinstance(step, Closed) and isinstance(self._core, Coordinator):
                self._tell_verdicts(self._core.verdicts)  # before the state that the devices test themselves with
            if isinstance(step, Closed | Solved | Obeyed):
                self._publish_state()
            self._teller.step(step)
            self._announce()
            if isinstance(step, Closed | Solved | Obeyed):
                self._on_round(False)
            elif isinstance(step, Finished):
                self._on_round(True)
                self._finish()
            if isinstance(step, Obeyed) and time.monotonic() >= until_s:  # a thousand of them keep no device waiting
                return

    def _tell_verdicts(self, devices: Collection[str]) -> None:
        """Whom a closed round left out, and who counts again, are told so: then, and again at each birth."""
        for device in devices:
            receipt = self._core.verdict(device)
            if receipt is not None and self._core.rounds.is_online(device):
                self._receipts.answer(device, receipt, time.monotonic(), is_intruder=False)
                self._give_joint(device)

    def _give_joint(self, device: str) -> None:
        """The joint head of those that agree with a device, if there is one: once to each of its processes."""
        joint = self._core.joint_of(device)
        if joint is None or self._joint_told.get(device) == joint.state.round:
            return
        self._joint_told[device], topic = joint.state.round, topics.down(self._fleet, device)
        for part in joint.parts(self._limit_bytes - self._voice.room_bytes):
            self._link.publish(topic, self._voice.sealed(topic, encode(part, "f32")))

    def _finish(self) -> None:
        """The plan is done; whoever lacks a receipt is waited for."""
        rounds = self._core.rounds
        missing = [device for device in rounds.contributions if not rounds.is_online(device)]
        self._ending = Ending(missing, was_finished=self._was_finished, now=time.monotonic())
        if self._was_finished:
            self._listener(events.Answering(self._ending.least_s))

    def _over(self) -> bool:
        """Whether everybody has gone, or has had time enough."""
        return self._ending is not None and self._ending.is_over(self._core.rounds.online, time.monotonic())


def _kind(message: Received) -> str:
    return message.topic.split("/")[3]

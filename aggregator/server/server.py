"""The server's loop: one thread that joins the MQTT link with the coordinator.

Each turn:

1. Gather: the present events of the link, up to a batch.
2. Decide: births, deaths and connection changes take effect; contributions are decided on and committed in one
   transaction.
3. Answer: receipts go out. Only then are the messages acknowledged, all of them and in the order they came.
4. Advance: what is due is done: a round opens, is extended, or closes with its merged result durable. Then the global
   state is published, and after it the announcement that names its version. Both are retained. Merging and solving run
   in a thread (`background_work.py`), while turns go on.

Guarantees:

- Nothing is published that is not durable.
- No message is acknowledged before its receipt was handed over.
- Nothing is queued for a broker that is away. On every connection we announce again. Once that announcement has come
  back, we publish the parts of the global state that the broker has lost. Devices send again what has no receipt.
- So kill -9 of any part at any instruction loses and doubles nothing.

Only one aggregator speaks for a fleet (`sole_aggregator.py`). Until this one is the sole aggregator, it reads only
status messages, opens nothing, and acknowledges nothing.

A device that was silent through a whole deadline may have left a birth whose will was never published. A death is
published in its name. A living device answers with a birth; for the others the retained status is true again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from protofleet.aggregator.blinded.helper_line import HelperLine
from protofleet.aggregator.coordinators.coordinator import Coordinator
from protofleet.aggregator.enrolment.gate import Intrusion
from protofleet.aggregator.enrolment.signed_publisher import SignedPublisher
from protofleet.aggregator.ingest.ingest import Decision
from protofleet.aggregator.ingest.receipts import Receipts
from protofleet.aggregator.monitoring import events
from protofleet.aggregator.parts.bundle_handout import Handout
from protofleet.aggregator.parts.steps import Solved
from protofleet.aggregator.rounds.round_machine import Closed, Finished
from protofleet.aggregator.server.beginning import Beginning, Process
from protofleet.aggregator.server.ending import Ending
from protofleet.aggregator.server.kinds import KINDS
from protofleet.aggregator.server.retained import RetainedState
from protofleet.aggregator.server.sole_aggregator import SoleAggregator, check_age
from protofleet.aggregator.server.verdicts import Verdicts
from protofleet.aggregator.store.operator_orders import Obeyed
from protofleet.aggregator.workers.shared_rounds import LEARN_S, Sharing
from protofleet.contract.errors import LedError, LinkError, WireError
from protofleet.contract.identity.signatures import Signer
from protofleet.contract.mqtt.certificates import Expiry
from protofleet.contract.mqtt.link import Address, Connected, Disconnected, Failed, Link, Noticed, Received, client_id
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.envelopes import ENVELOPE_BYTES
from protofleet.contract.wire.messages import Announcement, Message, Status

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
        listener: receives the events.
        on_round: called after each round and at the end, with whether the run is finished.
        signer: signs what is published; None for no signatures.
        sharing: this process's part where other processes take contributions, too.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        address: Address,
        fleet: str,
        *,
        listener: events.Listener,
        on_round: Callable[[bool], None],
        signer: Signer | None = None,
        beginning: Beginning = Beginning(),
        process: Process | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        process = process or Process()
        self._sharing, self._is_new_run, patience_s = sharing, beginning.is_new_run, beginning.patience_s
        self._core, self._address, self._fleet = coordinator, address, fleet
        self._listener, self._on_round = listener, on_round
        stays = coordinator.rounds.stays or sharing is not None
        self._patience_s = None if patience_s is None and stays else patience_s or PATIENCE_S
        self._each_turn, self._stopping, self._manager = process.each_turn, process.stopping, process.manager
        self._parts, self._reporter = coordinator.parts, KINDS[coordinator.kind].events(coordinator, listener)
        self._sole_aggregator = SoleAggregator(
            fleet, self._parts.run, started=int(time.time()), take_over=beginning.take_over
        )
        self._publisher = SignedPublisher(fleet, signer, self._parts.numbers.issue)
        self._round_topic, self._own_status_topic = topics.round_(fleet), topics.status(fleet, topics.AGGREGATOR)
        sums = coordinator.helper
        self._link = Link(
            address,
            client_id(fleet, topics.AGGREGATOR),
            subscriptions=[
                topics.up(fleet) if sharing is None else topics.shared(fleet, topics.up(fleet)),
                *(topics.status(fleet), self._round_topic, topics.global_all(fleet)),
                *([] if sums is None else [topics.helper_answer(fleet)]),
            ],
            will=self._will,
            receive_maximum=RECEIVE_MAXIMUM,
            largest_bytes=coordinator.largest_message_bytes + ENVELOPE_BYTES,
            echo_topic=self._round_topic,
        )
        self._parts.closing.patience_s, self._parts.closing.wake = _SHORT_S, self._link.wake
        self._link.published = self._parts.store.devices.published
        self._receipts = Receipts(fleet, self._link, self._publisher, listener)
        self._handout = Handout(self._parts, self._link, address, fleet, listener, self._publisher)
        wait = lambda round, devices: listener(events.HelperAwaited(round, devices))  # noqa: E731
        seal = self._publisher.sealed
        self._helper = None if sums is None else HelperLine(sums, self._link, fleet, seal=seal, waits=wait)
        self._verdicts = Verdicts(coordinator, self._link, fleet, self._publisher, self._receipts)
        self._limit_bytes = self._parts.terms.limit_bytes
        self._retained = RetainedState(fleet, self._link, self._publisher)
        self._connections = 0
        self._echoed_on = 0  # the connection on which our own announcement has come back
        self._early: list[Received] = []  # what came before this was the sole aggregator
        self._ask: deque[tuple[str, bytes]] = deque()
        self._published_deaths: dict[str, bytes] = {}  # deaths that we published in a device's name
        self._was_finished = coordinator.is_finished
        self._ending: Ending | None = None

    def run(self) -> None:
        """Serve until the plan is done and the devices have left, or the grace period is over.

        Where the plan has no end, serve until `stopping` is set.

        Raises:
            LinkError: there is no broker, it refuses us, or another aggregator serves this fleet.
            StoreError: the disk refuses.
        """
        self._link.open()
        try:
            if self._patience_s is not None:
                self._connected(self._link.wait_connected(self._patience_s))
            self._manager.ready()
            if self._sharing is not None:
                self._sharing.check_leads()
            self._reporter.resumed()
            while not (self._over() or self._stopping.is_set()):
                self._turn()
                self._each_turn()
                if self._link.still_s < _HANGS_S:
                    self._manager.alive()
            self._reporter.accuracy(last=True)
        finally:
            self._manager.stopping()
            if self._sole_aggregator.is_sole:
                self._say(self._own_status_topic, self._sole_aggregator.death)
            self._handout.close()
            self._link.close()
            self._parts.closing.abandon()
            self._listener(events.Ended(self._connections, self._link.dropped))

    def broker_certificate(self) -> Expiry | None:
        """When the certificate that the broker has shown expires; from any thread."""
        return self._link.broker_certificate

    # ── one turn ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _turn(self) -> None:
        received = self._gather()
        if self._sharing is not None and any(_kind(message) != "up" for message in received):
            self._sharing.catch_up()  # what is taken from `up` topics is caught up for in `take_as_leader`
        contributions = [message for message in received if self._is_contribution(message)]
        self._go_above()
        self._become_sole()
        if not self._sole_aggregator.is_sole:
            self._early += [message for message in received if message.mid]  # no window bounds those at QoS 0
            return
        waiting = [message for message in self._early if _kind(message) in ("up", "global")]
        contributions = [message for message in waiting if self._is_contribution(message)] + contributions
        received, self._early = self._early + received, []
        now = time.monotonic()
        sent = [(topics.device_of(message.topic), message.payload) for message in contributions]
        sent = [each for each in sent if not (self._handout.take(*each) or self._enrol(*each, now))]
        began = time.perf_counter()
        decisions = self._take(sent, now)
        if sent:
            self._listener(events.BatchTaken(len(sent), time.perf_counter() - began))
        self._receipts.send(self._parts.statuses.take_answers() + decisions, now)
        for message in received:
            self._link.acknowledge(message)
        if any(decision.outcome == "committed" for decision in decisions):
            self._reporter.committed()
        self._reporter.accuracy()
        self._advance()
        self._verdicts.turn(self._limit_bytes)
        self._handout.turn(self._limit_bytes)
        if self._helper is not None:
            self._helper.turn(time.monotonic(), self._limit_bytes)
        self._ask_the_silent()
        self._mend(now)
        self._reporter.waits(time.monotonic())
        for suspected in self._parts.departures(time.time()):
            self._listener(suspected)
        if self._parts.store.calibration.renew(now):
            self._announce()
        devices, refused = self._parts.store.devices, self._parts.exclusions.refused
        devices.keep(now, time.time(), refused, shared=self._sharing is not None)
        for intruder in self._parts.gate.take_news(time.time()):
            self._listener(events.IntruderTold(intruder.device, intruder.cause, intruder.reason, intruder.messages))

    def _take(self, sent: list[tuple[str, bytes]], now: float) -> list[Decision]:
        if self._sharing is None:
            return self._core.take(sent, now) + self._core.stalled(now)
        decisions = self._sharing.take_as_leader(sent, now) + self._sharing.stalled(now)
        if self._sharing.learn(now):
            self._reporter.committed()
        return decisions

    def _gather(self) -> list[Received]:
        now = time.monotonic()
        # only the sole aggregator opens and closes
        waits_for_due = self._sole_aggregator.is_sole and not self._parts.closing.has_work  # the end of which wakes us
        due_s = self._core.rounds.due_in_s(now) if waits_for_due else None
        helper_s = self._helper.wait_s(now) if self._helper is not None and self._sole_aggregator.is_sole else None
        learn_s = None if self._sharing is None else LEARN_S
        waits = (
            due_s,
            self._sole_aggregator.wait_s(now),
            self._handout.wait_s,
            self._publisher.wait_s(now),
            helper_s,
            learn_s,
        )
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
                self._early.clear()  # they come again, and could not be acknowledged any more
                self._sole_aggregator.disconnected()
                self._parts.store.devices.disconnected()
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
                self._parts.uncounted.malformed()
        elif kind == "global":
            state, now = self._core.state, time.monotonic()
            if self._sole_aggregator.is_sole and not self._retained.hear(message, state, self._limit_bytes, now):
                self._parts.uncounted.malformed()
        elif message.payload:
            try:
                device = topics.device_of(message.topic)
            except WireError:  # an id that the broker allows and we do not
                self._parts.uncounted.malformed()
                return False
            if kind == "up":
                return self._sole_aggregator.is_sole
            if device == topics.AGGREGATOR:
                self._hear_rival(message)
            else:
                self._hear_status(device, message)
        return False

    def _hear_status(self, device: str, message: Received) -> None:
        is_ours = self._published_deaths.get(device) == message.payload or self._publisher.is_ours(
            message.topic, message.payload
        )
        now, is_news = time.monotonic(), not message.retained
        is_another = self._core.status(device, message.payload, now, is_ours=is_ours, is_news=is_news)
        self._verdicts.heard(device, is_another=is_another)
        if self._ending is not None and self._core.rounds.is_online(device):
            self._ending.note_online(device)

    def _enrol(self, device: str, payload: bytes, now: float) -> bool:
        """Whether a message asks for a device to be enrolled; then it is answered, and durable."""
        receipt = self._parts.enrol(device, payload, time.time())
        if receipt is None:
            return False
        self._receipts.answer(device, receipt, now, is_intruder=receipt.status == "rejected")
        return True

    def _say(self, topic: str, status: Status) -> bytes:
        payload = self._publisher.sealed(topic, encode(status))
        self._link.publish(topic, payload, retain=True)
        return payload

    def _ask_the_silent(self) -> None:
        lost = self._core.rounds.take_lost()
        self._reporter.silent([device for device, _ in lost])
        self._ask.extend(lost)
        for _ in range(min(len(self._ask), _ASKED_EACH_TURN)):
            device, instance = self._ask.popleft()
            self._published_deaths[device] = self._say(topics.status(self._fleet, device), Status(False, instance, 0))

    def _will(self) -> tuple[str, bytes]:
        """The last will of one more connection; called in the network thread."""
        return self._own_status_topic, self._publisher.sealed(
            self._own_status_topic, encode(self._sole_aggregator.will())
        )

    # ── the sole aggregator ─────────────────────────────────────────────────────────────────────────────────────────

    def _become_sole(self) -> None:
        had = self._sole_aggregator.is_sole
        status = self._sole_aggregator.due(time.monotonic())
        if status is not None:
            self._say(self._own_status_topic, status)
        if self._sole_aggregator.is_sole and not had:
            self._announce()

    def _hear_rival(self, message: Received) -> None:
        status = self._own_message(message)
        if isinstance(status, Status):
            try:
                self._sole_aggregator.heard(status, time.monotonic())
            except LinkError as error:
                if self._sharing is None or status.instance[:4] != self._parts.run:
                    raise
                raise LedError(str(error)) from None  # of our own store: it leads now
        elif status is not None:
            self._parts.uncounted.malformed()

    def _own_message(self, message: Received) -> Message | None:
        """The message on one of our topics, if it counts. A sender that poses as us is noted."""
        try:
            return self._publisher.heard(message.topic, message.payload)
        except Intrusion as intrusion:
            if not message.retained:
                self._parts.gate.note(topics.AGGREGATOR, intrusion.cause, str(intrusion), time.time())
        except WireError:
            self._parts.uncounted.malformed()
        if not message.retained and self._sole_aggregator.is_sole:
            self._publisher.overwritten(time.monotonic())
        return None

    def _hear_announcement(self, message: Received) -> None:
        """Take an announcement on our topic.

        Of another run, live: its aggregator runs, or ran just now. Of our own run, live: the broker hears us, and has
        sent what it retains. Of our own run, but later: our store is old.
        """
        if not message.payload:  # whoever cleared it
            self._publisher.overwritten(time.monotonic())
            return
        announcement = self._own_message(message)
        if not isinstance(announcement, Announcement):
            if announcement is not None:
                self._parts.uncounted.malformed()
            return
        if message.retained:  # ours, if we sign
            self._parts.numbers.note(self._publisher.marks(announcement))
        if announcement.run == self._parts.run:
            later = announcement.epoch - self._core.announcement().epoch
            if self._sharing is not None and later > 0:
                self._sharing.check_leads()  # if another does; else anybody may have said it
            if later < 0 and self._sole_aggregator.is_sole and not message.retained:  # one that was followed wakes late
                self._announce()
                self._publish_state()
            if message.retained and not self._sole_aggregator.was_sole:
                check_age(announcement, self._core.rounds.number, self._core.state.version)
            elif not message.retained and self._echoed_on != message.connection:  # what is retained has come before it
                self._echoed_on = message.connection
                self._publish_state()
        elif self._sole_aggregator.is_sole and not message.retained:
            self._sole_aggregator.rival_spoke(time.monotonic())
            self._announce()

    # ── what is retained ────────────────────────────────────────────────────────────────────────────────────────────

    def _connected(self, event: Connected) -> None:
        self._connections += 1
        self._limit_bytes = min(event.limit_bytes, self._parts.terms.limit_bytes)
        least = self._parts.terms.least_limit_bytes + self._publisher.room_bytes
        if self._limit_bytes < least:
            raise LinkError(
                f"broker {self._address} takes messages of {event.limit_bytes} bytes",
                expected=f"at least {least} for the bundle's class rows",
                got="less",
                hint="its maximum packet size",
            )
        self._listener(events.LinkUp(str(self._address), self._limit_bytes))
        self._sole_aggregator.connected(time.monotonic())
        self._parts.store.devices.connected(time.monotonic())
        if self._helper is not None:
            self._helper.connected()

    def _announce(self) -> None:
        payload = self._publisher.announcement(self._core.announcement(self._limit_bytes), time.time())
        self._link.publish(self._round_topic, payload, retain=True)

    def _go_above(self) -> None:
        """Number again if devices have heard higher numbers of ours than our store knows."""
        heard = self._parts.numbers.take_heard()
        issued = self._parts.numbers.issued if heard and self._publisher.signs else 0
        lost = self._publisher.lost(heard, issued)
        if not lost:
            return
        self._parts.numbers.issued_elsewhere(lost)
        if issued or lost > time.time() * 1000:
            self._listener(events.NumbersLost(lost, issued, self._is_new_run))
        if self._sole_aggregator.is_sole:
            self._announce()

    def _publish_state(self) -> None:
        """Publish what the broker is not known to retain of the global state."""
        self._retained.publish(self._core.state, self._limit_bytes, self._echoed_on)

    def _mend(self, now: float) -> None:
        """Publish again what may have been overwritten; of the global state only the parts that were changed."""
        if self._publisher.mends(now):
            self._announce()
            self._publish_state()

    # ── steps ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _advance(self) -> None:
        until_s = time.monotonic() + TURN_S
        while (step := self._core.advance(time.monotonic(), time.time())) is not None:
            if isinstance(step, Closed):
                self._verdicts.tell(
                    self._core.verdicts, self._limit_bytes
                )  # before the state that the devices test themselves with
            if isinstance(step, Closed | Solved | Obeyed):
                self._publish_state()
            self._reporter.step(step)
            self._announce()
            if isinstance(step, Closed | Solved | Obeyed):
                self._on_round(False)
            elif isinstance(step, Finished):
                self._on_round(True)
                self._finish()
            if isinstance(step, Obeyed) and time.monotonic() >= until_s:  # a thousand of them keep no device waiting
                return

    def _finish(self) -> None:
        """The plan is done; wait for devices that lack a receipt."""
        rounds = self._core.rounds
        missing = [device for device in rounds.contributions if not rounds.is_online(device)]
        self._ending = Ending(missing, was_finished=self._was_finished, now=time.monotonic())
        if self._was_finished:
            self._listener(events.Answering(self._ending.least_s))

    def _over(self) -> bool:
        """Whether all devices have left, or have had enough time."""
        return self._ending is not None and self._ending.is_over(self._core.rounds.online, time.monotonic())


def _kind(message: Received) -> str:
    return message.topic.split("/")[3]

"""The server's loop: one thread that joins the MQTT link with the coordinator.

Each turn:

1. gather: events of the link, as many as are there, up to a batch;
2. births, deaths and connection changes take effect; contributions are decided on and committed in one transaction;
3. receipts go out; only then are the messages acknowledged, all of them and in the order they came;
4. what is due is done: a round opens, is extended, or closes with its merged result durable; then the global state is
   published, and after it the announcement that names its version. Both are retained.

Nothing is published that is not durable, and nothing is acknowledged before its receipt was handed over. When the
broker is away, nothing is kept for it: on every connection the retained messages are published again, and devices send
again what they have no receipt for. So kill -9 at any instruction, of any part, loses and doubles nothing.

The client id holds the run's id: an aggregator of another run (another store) on the same fleet has a session of its
own, is seen by its announcements, and ends the older of the two with a clear line, instead of both taking the
connection from each other for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from aggregator import events
from aggregator.coordinator import Coordinator
from aggregator.ingest import Decision
from aggregator.rounds import Closed, Extended, Finished, Opened, Step
from contract import topics
from contract.errors import LinkError, WireError
from contract.link import Address, Connected, Disconnected, Failed, Link, Received
from contract.messages import Announcement
from contract.wire import decode, encode

__all__ = ["BATCH", "Server"]

BATCH = 256
RECEIVE_MAXIMUM = 1_024
TURN_S = 1.0
GRACE_S = 10.0  # after the last round: devices that are still here get receipts for what they send again
QUIET_S = 1.0


@dataclass
class _Ending:
    """When the run finished, and when the last message came since."""

    since: float
    heard_at: float


class Server:
    """Runs one coordinator over one link.

    Args:
        listener: is told what happens.
        on_round: called with whether the run is finished, after each round and at the end.
        patience_s: how long the broker may be absent at the start.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        address: Address,
        fleet: str,
        *,
        listener: events.Listener,
        on_round: Callable[[bool], None],
        patience_s: float = 60.0,
    ) -> None:
        self._core, self._address, self._fleet = coordinator, address, fleet
        self._listener, self._on_round, self._patience_s = listener, on_round, patience_s
        self._round_topic = topics.round_(fleet)
        self._link = Link(
            address,
            f"pf-{fleet}-aggregator-{coordinator.run.hex()}",
            subscriptions=[topics.up(fleet), topics.status(fleet), self._round_topic, topics.global_all(fleet)],
            receive_maximum=RECEIVE_MAXIMUM,
            fresh_start=True,
        )
        self._limit_bytes = coordinator.limit_bytes
        self._echoed_on = 0  # the connection on which our own announcement has come back
        self._waiting: tuple[int, int] | None = None
        self._ending: _Ending | None = None

    def run(self) -> None:
        """Serve until the plan is done and the devices have gone, or the grace is over.

        Raises:
            LinkError: when there is no broker, it refuses us, or another aggregator serves this fleet.
            StoreError: when the disk refuses.
        """
        self._link.open()
        try:
            self._connected(self._link.wait_connected(self._patience_s))
            self._tell_resumed()
            while not self._over():
                self._turn()
        finally:
            self._link.close()

    # ── one turn ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _turn(self) -> None:
        received = self._gather()
        batch = [message for message in received if self._is_contribution(message)]
        decisions = self._core.take([(topics.device_of(m.topic), m.payload) for m in batch], time.monotonic())
        decisions += self._core.stalled(time.monotonic())
        self._send_receipts(decisions)
        for message in received:
            self._link.acknowledge(message)
        if any(decision.outcome == "committed" for decision in decisions):
            rounds = self._core.rounds
            contributions, awaited = len(rounds.contributions), rounds.awaited_count
            self._listener(events.ContributionsIn(rounds.number, contributions, awaited))
        while (step := self._core.advance(time.monotonic(), time.time())) is not None:
            self._tell(step)
        self._tell_waiting()

    def _gather(self) -> list[Received]:
        due = self._core.rounds.due_in_s(time.monotonic())
        event = self._link.receive(TURN_S if due is None else min(TURN_S, due + 0.001))
        received: list[Received] = []
        while event is not None:
            if isinstance(event, Received):
                received.append(event)
                if self._ending is not None:
                    self._ending.heard_at = time.monotonic()
                if len(received) >= BATCH:
                    break
            elif isinstance(event, Connected):
                self._connected(event)
            elif isinstance(event, Disconnected):
                self._listener(events.LinkDown(event.reason, event.retry_s))
            elif isinstance(event, Failed):
                raise event.error
            event = self._link.receive(0)
        return received

    def _is_contribution(self, message: Received) -> bool:
        """Whether it came on an `up` topic; messages on the other topics take effect here."""
        kind = message.topic.split("/")[3]
        if kind == "round":
            self._check_rival(message)
        elif kind == "global":
            self._clear_stale_part(message)
        elif message.payload:
            try:
                device = topics.device_of(message.topic)
            except WireError:  # an id that the broker allows and we do not
                self._core.malformed()
                return False
            if kind == "up":
                return True
            self._core.status(device, message.payload)
        return False

    def _send_receipts(self, decisions: list[Decision]) -> None:
        sent = set()
        for decision in decisions:
            receipt = decision.receipt
            if decision.outcome in ("rejected", "malformed"):
                self._listener(events.Refused(decision.device, decision.reason))
            if receipt is None:
                continue
            key = (decision.device, receipt.run, receipt.round, receipt.method, receipt.status, receipt.missing)
            if key not in sent:  # many chunks of one contribution may call for the same receipt
                sent.add(key)
                self._link.publish(topics.down(self._fleet, decision.device), encode(receipt))

    # ── what is retained ────────────────────────────────────────────────────────────────────────────────────────────

    def _connected(self, event: Connected) -> None:
        self._limit_bytes = min(event.limit_bytes, self._core.limit_bytes)
        self._listener(events.LinkUp(str(self._address), self._limit_bytes))
        self._publish_state()
        self._announce()

    def _announce(self) -> None:
        self._link.publish(self._round_topic, encode(self._core.announcement()), retain=True)

    def _publish_state(self) -> None:
        for part in self._core.state.parts(self._limit_bytes):
            self._link.publish(topics.global_part(self._fleet, part.part), encode(part, "f32"), retain=True)

    def _clear_stale_part(self, message: Received) -> None:
        """A part beyond those of the state we publish, left by a larger state or another run, must not stay."""
        index = message.topic.rsplit("/", 1)[1]
        parts = len(self._core.state.parts(self._limit_bytes))
        if message.payload and not (index.isascii() and index.isdigit() and str(int(index)) == index):
            self._core.malformed()
        elif message.payload and int(index) >= parts:
            self._link.publish(message.topic, b"", retain=True)

    def _check_rival(self, message: Received) -> None:
        """Another run's announcement, live and after ours has come back, is of an aggregator that runs now."""
        if message.retained:
            return
        try:
            announcement = decode(message.payload)
        except WireError:
            self._core.malformed()
            return
        if not isinstance(announcement, Announcement):
            self._core.malformed()
        elif announcement.run == self._core.run:
            self._echoed_on = message.connection
        elif message.connection == self._echoed_on:
            raise LinkError(
                f"another aggregator serves fleet {self._fleet}",
                expected=f"only run {self._core.run.hex()}",
                got=f"an announcement of run {announcement.run.hex()}",
                hint="another --fleet, or one aggregator at a time",
            )

    # ── steps ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _tell(self, step: Step) -> None:
        rounds, policy = self._core.rounds, self._core.rounds.policy
        if isinstance(step, Opened):
            total = max(len(rounds.plan), step.round)
            self._listener(events.RoundOpened(step.round, total, step.method, rounds.awaited_count))
        elif isinstance(step, Extended):
            self._listener(events.RoundExtended(step.round, step.contributions, policy.min_clients, policy.deadline_s))
        elif isinstance(step, Closed):
            self._publish_state()
            for found in self._core.findings:
                self._listener(events.Screened(step.round, found.device, found.left_out, found.reason))
            if self._core.doubt:
                self._listener(events.Warned(step.round, self._core.doubt))
            record = self._core.record(step.round)
            self._listener(
                events.RoundClosed(
                    step.round,
                    step.method,
                    len(record.uplink_bytes),
                    record.classes_merged or 0,
                    sum(record.uplink_bytes.values()),
                    record.seconds or 0.0,
                    self._core.state.version,
                )
            )
        self._announce()
        if isinstance(step, Closed):
            self._on_round(False)
        elif isinstance(step, Finished):
            self._on_round(True)
            self._ending = _Ending(time.monotonic(), time.monotonic())

    def _tell_resumed(self) -> None:
        rounds = self._core.rounds
        if rounds.phase == "open":
            total, here = max(len(rounds.plan), rounds.number), len(rounds.contributions)
            self._listener(events.RoundOpened(rounds.number, total, rounds.method, rounds.awaited_count, here))

    def _tell_waiting(self) -> None:
        rounds = self._core.rounds
        if rounds.phase != "waiting":
            self._waiting = None
            return
        seen = (rounds.number, rounds.online)
        if seen != self._waiting:
            self._waiting = seen
            self._listener(events.Waiting(rounds.number + 1, rounds.online, rounds.policy.min_clients))

    def _over(self) -> bool:
        """Whether everybody has gone, or has had time enough."""
        if self._ending is None:
            return False
        now = time.monotonic()
        gone = self._core.rounds.online == 0 and now - self._ending.heard_at >= QUIET_S
        return gone or now - self._ending.since >= GRACE_S

"""A worker: takes its share of the devices' messages, decides, commits, answers. The leader opens and closes rounds.

1. It subscribes together with the other workers (`$share/…`), so a broker gives each message to one of them.
2. It knows the fleet from the store alone: the open round, the refused devices, the valid keys. When the store says
   that something of this has changed, the worker reads it again before it decides anything further.
3. Its decisions are committed only if nothing has changed meanwhile (`aggregator/database/postgres_members.py`).
4. Receipts go out after the commit. Only then are the messages acknowledged.

If a worker dies, the broker drops its session, and devices send again what has no receipt.

A worker checks now and then whether there is a leader. When there is none, its owner tries to lead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

from protofleet.aggregator.coordinators.coordinator import Coordinator
from protofleet.aggregator.database.postgres_members import StaleError
from protofleet.aggregator.enrolment.signed_publisher import SignedPublisher
from protofleet.aggregator.ingest.ingest import Decision
from protofleet.aggregator.ingest.receipts import Receipts
from protofleet.aggregator.monitoring import events
from protofleet.aggregator.parts.bundle_handout import Handout
from protofleet.aggregator.workers.shared_rounds import Sharing
from protofleet.aggregator.workers.shared_store import SharedStore
from protofleet.contract.console.service_manager import ServiceManager
from protofleet.contract.errors import StoreError, StoreLostError, WireError
from protofleet.contract.identity.signatures import Signer
from protofleet.contract.mqtt.certificates import Expiry
from protofleet.contract.mqtt.link import Address, Connected, Disconnected, Failed, Link, Noticed, Received, client_id
from protofleet.contract.wire import topics
from protofleet.contract.wire.envelopes import ENVELOPE_BYTES

__all__ = ["Worker"]

BATCH, RECEIVE_MAXIMUM, TURN_S = 256, 512, 1.0
_HANGS_S = 120.0


class Worker:
    """Works until no process leads.

    Args:
        make_core: reads the fleet's state from the store; called again when that has changed.
        listener: receives the events.
        signer: signs receipts, where the fleet's aggregator signs.
        stopping: ends `run` once it is set.

    Attributes:
        each_turn: called after each turn of the loop.
        within: entered while it works.
    """

    def __init__(
        self,
        store: SharedStore,
        make_core: Callable[[], Coordinator],
        address: Address,
        fleet: str,
        *,
        listener: events.Listener,
        signer: Signer | None,
        stopping: threading.Event,
        manager: ServiceManager,
    ) -> None:
        self._store, self._make_core, self._listener = store, make_core, listener
        self.each_turn: Callable[[], None] = lambda: None
        self.within: AbstractContextManager[None] = nullcontext()
        self._stopping, self._manager = stopping, manager
        self._read()
        self._address, self._fleet = address, fleet
        self._publisher = SignedPublisher(fleet, signer, self._core.parts.numbers.issue)  # it announces nothing
        self._link = Link(
            address,
            client_id(fleet, "worker"),
            subscriptions=[topics.shared(fleet, topics.up(fleet))],
            receive_maximum=RECEIVE_MAXIMUM,
            largest_bytes=self._core.largest_message_bytes + ENVELOPE_BYTES,
        )
        self._link.published = store.devices.published
        self._receipts = Receipts(fleet, self._link, self._publisher, listener)
        self._handout = Handout(self._core.parts, self._link, address, fleet, listener, self._publisher, follows=False)
        self._limit_bytes, self._look_at = self._core.parts.terms.limit_bytes, 0.0
        self._hears = False  # whether there is a broker

    def run(self) -> Literal["nobody leads", "stopped"]:
        """Serve until no process leads, or until `stopping`.

        Raises:
            LinkError: there is no broker, it refuses us, or it knows no shared subscriptions.
            StoreError: the server is gone, or refuses.
            UsageError: the leader is of another release.
        """
        self._link.open()
        try:
            self._manager.ready()
            with self.within:
                while not self._stopping.is_set():
                    if self._turn():
                        return "nobody leads"
                    self.each_turn()
                    if self._link.still_s < _HANGS_S:
                        self._manager.alive()
            return "stopped"
        finally:
            self._handout.close()
            self._link.close()

    @property
    def core(self) -> Coordinator:
        """The fleet's state, as last read from the store."""
        return self._core

    def broker_certificate(self) -> Expiry | None:
        """When the certificate that the broker has shown expires; from any thread."""
        return self._link.broker_certificate

    @property
    def is_finished(self) -> bool:
        """Whether all planned rounds are done."""
        return self._core.is_finished

    def _turn(self) -> bool:
        """One batch; whether nobody leads."""
        received = self._gather()
        now = time.monotonic()
        if self._store.changes() != self._store.based_on:
            self._read()
        sent = [each for each in map(self._from_device, received) if each is not None]
        sent = [each for each in sent if not (self._handout.take(*each) or self._enrol(*each, now))]
        began = time.perf_counter()
        decisions = self._take(sent, now)
        if sent:
            self._listener(events.BatchTaken(len(sent), time.perf_counter() - began))
        self._receipts.send(decisions, now)
        for message in received:
            self._link.acknowledge(message)
        self._handout.turn(self._limit_bytes)
        self._store.devices.keep(now, time.time())
        for intruder in self._core.parts.gate.take_news(time.time()):
            self._listener(events.IntruderTold(intruder.device, intruder.cause, intruder.reason, intruder.messages))
        if now < self._look_at or not self._hears:  # a leader that hears nobody either is no worse
            return False
        self._look_at = now + TURN_S
        return self._store.may_lead()

    def _take(self, sent: list[tuple[str, bytes]], now: float) -> list[Decision]:
        while True:
            try:
                return self._sharing.take(sent, now) + self._sharing.stalled(now)
            except StaleError:  # decided on what is no longer so: all of it again
                self._read()

    def _read(self) -> None:
        """Read the fleet's state: all of one moment."""
        while True:
            self._store.based_on = self._store.changes()
            self._store.check_version()
            core = self._made_of_one_moment()
            if core is not None:
                self._core = core
                break
        self._sharing = Sharing(self._core, self._store)
        if hasattr(self, "_handout"):
            self._handout.serve(self._core.parts)

    def _made_of_one_moment(self) -> Coordinator | None:
        """A core; None where the store changed meanwhile, so that parts of it may not fit each other."""
        try:
            core = self._make_core()
        except StoreLostError:
            raise
        except StoreError:
            if self._store.changes() == self._store.based_on:
                raise
            return None
        return core if self._store.changes() == self._store.based_on else None

    def _gather(self) -> list[Received]:
        event = self._link.receive(min(TURN_S, self._handout.wait_s or TURN_S))
        received: list[Received] = []
        while event is not None:
            if isinstance(event, Received):
                received.append(event)
                if len(received) >= BATCH:
                    break
            elif isinstance(event, Connected):
                self._limit_bytes, self._hears = min(event.limit_bytes, self._core.parts.terms.limit_bytes), True
                self._listener(events.LinkUp(str(self._address), self._limit_bytes))
            elif isinstance(event, Disconnected):
                received.clear()  # they could not be acknowledged any more, and are sent again
                self._hears = False
                self._listener(events.LinkDown(event.reason, event.retry_s))
            elif isinstance(event, Noticed):
                self._listener(events.Noticed(event.line))
            elif isinstance(event, Failed):
                raise event.error
            event = self._link.receive(0)
        return received

    def _from_device(self, message: Received) -> tuple[str, bytes] | None:
        """The device of a message, and its bytes; None for a message of none of our devices."""
        if not message.payload:
            return None
        try:
            return topics.device_of(message.topic), message.payload
        except WireError:
            self._core.parts.uncounted.malformed()
            return None

    def _enrol(self, device: str, payload: bytes, now: float) -> bool:
        receipt = self._core.parts.enrol(device, payload, time.time())
        if receipt is None:
            return False
        self._receipts.answer(device, receipt, now, is_intruder=receipt.status == "rejected")
        return True

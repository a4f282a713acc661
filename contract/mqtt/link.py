"""The MQTT 5 link that both ends use: a thread of its own, and an interface for the thread that owns it.

    owner:   link.publish(topic, payload) ──▶                 ──▶ network thread ──▶ broker
             link.acknowledge(event)      ──▶ the connection
             event = link.receive(1.0)    ◀──                 ◀── network thread ◀── broker

- `protofleet.contract.mqtt.connection` makes every decision: when to connect, what to send now, what to acknowledge,
  when to leave a broker that does nothing, when to give up. Both threads call it under one lock.
- `protofleet.contract.mqtt.transport` does the work on the socket. Only the network thread calls it.
- This module has the rest: the lock, the thread, and the owner's queue of events.

Guarantee: every failure in the network thread becomes an event, so a dead link never looks alive. A connection that is
lost or cannot be made, for whatever reason, gives `Disconnected` and is made again. A fault of Protofleet's own gives
`Failed`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from protofleet.contract.console.logs import Changes
from protofleet.contract.errors import LinkError, ProtofleetError
from protofleet.contract.mqtt.address import Address
from protofleet.contract.mqtt.certificates import CertificateWatch, Expiry
from protofleet.contract.mqtt.connection import PACKET_OVERHEAD_BYTES, Connection
from protofleet.contract.mqtt.link_actions import (
    Acknowledge,
    Action,
    Connected,
    Dial,
    Disconnected,
    Event,
    Failed,
    Hangup,
    Limits,
    Noticed,
    Received,
    Send,
    Subscribe,
    Tell,
)
from protofleet.contract.mqtt.transport import Transport
from protofleet.contract.wire.codec import CONTENT_TYPE

__all__ = [
    "Address",
    "Connected",
    "Disconnected",
    "Event",
    "Failed",
    "Link",
    "Noticed",
    "Received",
    "Will",
    "client_id",
]

logger = logging.getLogger(__name__)

_SOON_S = 5.0  # until a wait ends: what would be said now is said then

Will = tuple[str, bytes]
_LOOKS = 4  # of the network thread in one keepalive, which it sends between


def client_id(fleet: str, owner: str) -> str:
    """A client id for the link of one process.

    It names the fleet and the owner for people, and ends in 8 random bytes that only the broker is told. Anybody who
    knows a client's id can take over its session, unless the broker uses the certificate's name as the id
    (deploy/mosquitto.conf).
    """
    return f"pf-{fleet}-{owner}-{os.urandom(8).hex()}"


class Link:
    """A connection to the broker that is made again until `close`.

    Args:
        address: where the broker is.
        client_id: unique at the broker. A second client with that id takes over the session, and this link ends with
            `Failed`.
        subscriptions: topic filters, at QoS 1; there may be none. Retained messages come after every `Connected`.
        will: topic and payload that the broker publishes, retained, when this process vanishes; or a function that
            makes both. The network thread calls it for each connection, even while the owner does nothing.
        keepalive_s: an idle link sends two bytes in that time.
        receive_maximum: the number of unacknowledged messages that the broker may deliver.
        largest_bytes: the largest payload that the owner can use. The broker is told to drop larger ones, because one
            window full of them could take all memory. None for no bound.
        echo_topic: a topic that the owner publishes to and subscribes to. A broker that does not send back what was
            published there delivers nothing at all; the link leaves it and connects anew.
        content_type: of the messages that are published; by default that of a fleet's messages.

    Attributes:
        published: called with topic and payload bytes of each message that was handed to the network thread.
    """

    def __init__(
        self,
        address: Address,
        client_id: str,
        *,
        subscriptions: Sequence[str],
        will: Will | Callable[[], Will] | None = None,
        keepalive_s: int = 60,
        receive_maximum: int = 64,
        largest_bytes: int | None = None,
        echo_topic: str | None = None,
        content_type: str = CONTENT_TYPE,
    ) -> None:
        self._address, self._client_id = address, client_id
        self._will = will
        self._keepalive_s, self._receive_maximum = keepalive_s, receive_maximum
        self._content_type = content_type
        self._packet_bytes = None if largest_bytes is None else largest_bytes + PACKET_OVERHEAD_BYTES
        topics = tuple(subscriptions)
        limits = Limits(str(address), client_id, topics, echo_topic, receive_maximum, self._packet_bytes)
        rng = random.Random(os.urandom(8))
        self._core, self._certificates = Connection(limits, rng), CertificateWatch(address, rng)
        self._lock = threading.RLock()  # around every use of the core, and of what follows
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._turned_at = time.monotonic()
        self._wake_in, self._wake_out = socket.socketpair()
        self._woken = False
        self.published: Callable[[str, int], None] = lambda topic, payload_bytes: None
        self._transport: Transport | None = None
        self._thread = threading.Thread(target=self._run, name=f"mqtt-{client_id}", daemon=True)

    # ── the owner's side ────────────────────────────────────────────────────────────────────────────────────────────

    def open(self) -> Link:
        """Start connecting. `receive` returns the events of the connection."""
        self._thread.start()
        return self

    def receive(self, timeout_s: float) -> Event | None:
        """The next event, or None after `timeout_s`, or once `wake` is called."""
        try:
            event = self._events.get(timeout=timeout_s) if timeout_s > 0 else self._events.get_nowait()
        except queue.Empty:
            return None
        if isinstance(event, Received):
            with self._lock:
                self._core.taken(event)
        return event

    def wake(self) -> None:
        """Make `receive` return, from any thread."""
        self._events.put(None)

    @property
    def still_s(self) -> float:
        """Seconds since the network thread last completed a turn. If this is much more than the keepalive, it hangs."""
        return time.monotonic() - self._turned_at

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> int:
        """Hand a QoS 1 message to the network thread, and return the number of the connection.

        Without a connection, nothing is kept and the result is 0.

        Raises:
            LinkError: when the broker would not take a message of that size.
        """
        with self._lock:
            if not self._core.publish(topic, payload, retain, time.monotonic()):
                return 0
            self._wake()
            number = self._core.number
        self.published(topic, len(payload))
        return number

    def acknowledge(self, received: Received) -> None:
        """Tell the broker that `received` has been processed. No effect at QoS 0, or when its connection has ended.

        Every message must be acknowledged: one that is not holds back the acknowledgements of all later ones.
        """
        with self._lock:
            self._core.acknowledge(received)
            self._wake()

    @property
    def idle(self) -> bool:
        """Whether the broker has acknowledged every publication of this connection."""
        with self._lock:
            return self._core.idle

    @property
    def outstanding(self) -> int:
        """The number of publications of this connection that the broker has not acknowledged."""
        with self._lock:
            return self._core.outstanding

    @property
    def delivered(self) -> tuple[int, int]:
        """The newest connection's number, and how many of its publications, from the first, were acknowledged."""
        with self._lock:
            return self._core.number, self._core.delivered

    @property
    def dropped(self) -> int:
        """The number of messages at QoS 0 that were dropped for want of room. Protofleet sends no message at QoS 0."""
        return self._core.dropped

    @property
    def broker_certificate(self) -> Expiry | None:
        """The validity of the certificate that the broker has shown; None without TLS, or before it has shown one."""
        return self._certificates.broker

    def wait_connected(self, patience_s: float) -> Connected:
        """Wait for the first connection.

        Raises:
            LinkError: when there is none after `patience_s` seconds, or the broker refuses us for good.
        """
        deadline = time.monotonic() + patience_s
        reason, noticed, said = "no answer", list[Noticed](), Changes(logger)
        while (left_s := deadline - time.monotonic()) > 0:
            event = self.receive(min(left_s, 0.2))
            if isinstance(event, Connected):
                for notice in noticed:  # the owner's to hear, in its own time
                    self._events.put(notice)
                return event
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Disconnected):
                reason = event.reason
                if left_s > _SOON_S:
                    said.say("no broker at %s yet (%s), trying again for %g s", self._address, reason, patience_s)
            elif isinstance(event, Noticed):
                noticed.append(event)
        raise LinkError(
            f"no broker at {self._address} within {patience_s:g} s",
            expected="an MQTT 5 broker",
            got="; ".join([reason, *(notice.line for notice in noticed)]),
            hint=self._address.remedy(reason),
        )

    def close(self, timeout_s: float = 3.0) -> None:
        """Send what is still queued, say goodbye to the broker, and end the network thread."""
        with self._lock:
            self._core.close(time.monotonic(), timeout_s)
            self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout=timeout_s + 0.5)
        elif self._thread.ident is None:  # never opened
            self._release()

    def _wake(self) -> None:
        """Make the network thread look. Under the lock."""
        if not self._woken:
            self._woken = True
            with contextlib.suppress(OSError):  # its end may be closed already: then nobody is there to wake
                self._wake_in.send(b"\0")

    # ── the network thread ──────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:  # a fault of our own: the owner must hear of it, or it would wait for ever
            self._events.put(Failed(LinkError("the link broke", got=f"{type(error).__name__}: {error}")))
        finally:
            self._release()

    def _turn(self) -> bool:
        """Execute the next action that is due, or wait for one; False when the connection is over for good."""
        due_s: float | None = None
        self._turned_at = time.monotonic()
        with self._lock:
            action = self._core.advance(time.monotonic())
            if action is None:
                if self._core.phase == "over":
                    return False
                due_s = self._core.due_in_s(time.monotonic())
        try:
            if action is not None:
                self._perform(action)
            else:
                look_s = self._keepalive_s if self._transport is None else self._transport.keepalive_s
                self._wait(look_s / _LOOKS if due_s is None else min(look_s / _LOOKS, due_s))
        except Exception as error:  # paho raises any class at a malformed packet; the connection is what is lost
            message = isinstance(error, (OSError, ValueError, ProtofleetError)) and str(error)
            with self._lock:
                self._core.ended(message or f"{type(error).__name__}: {error}", time.monotonic())
        return True

    def _perform(self, action: Action) -> None:
        if isinstance(action, Tell):
            self._events.put(action.event)
        elif isinstance(action, Dial):
            self._certificates.dialling(time.monotonic())
            self._transport = Transport(
                self._core,
                self._lock,
                self._address,
                self._client_id,
                will=self._will() if callable(self._will) else self._will,
                keepalive_s=self._keepalive_s,
                receive_maximum=self._receive_maximum,
                packet_bytes=self._packet_bytes,
                content_type=self._content_type,
            )
            self._transport.dial()
        elif self._transport is None:
            return  # a connection that could not even be begun
        elif isinstance(action, Subscribe):
            self._transport.subscribe(action.topics)
        elif isinstance(action, Send):
            self._transport.send(action)
        elif isinstance(action, Acknowledge):
            self._transport.acknowledge(action.mid)
        elif isinstance(action, Hangup):
            transport, self._transport = self._transport, None
            transport.hang_up(polite=action.polite)

    def _wait(self, timeout_s: float) -> None:
        """Wait until the owner asks for something, the broker sends something, or the time has passed."""
        if self._transport is None:
            select.select([self._wake_out], [], [], timeout_s)
        else:
            self._transport.step(self._wake_out, timeout_s)
        self._look_at_certificates()
        with self._lock:
            if self._woken:
                self._woken = False
                self._wake_out.recv(64)

    def _look_at_certificates(self) -> None:
        now, peer = time.monotonic(), None if self._transport is None else self._transport.peer
        for line in self._certificates.look(now, time.time(), peer):
            self._events.put(Noticed(line))
        if self._certificates.renews(now):
            with self._lock:
                self._core.renew(now)

    def _release(self) -> None:
        """Close the descriptors of the wake-up socket."""
        with self._lock:
            self._wake_in.close()
            self._wake_out.close()

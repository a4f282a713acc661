"""The MQTT 5 link that both ends use: a thread of its own, and two ways of talking to it.

    owner:   link.publish(topic, payload) ──▶                 ──▶ network thread ──▶ broker
             link.acknowledge(event)      ──▶ the connection
             event = link.receive(1.0)    ◀──                 ◀── network thread ◀── broker

What is decided, `contract.connection` decides: when to connect, what to send now, what to acknowledge, when to leave a
broker that does nothing, when to give up. Both threads talk to it under one lock, and the network thread alone does
what it asks for, through `contract.transport`. Here is the rest: the lock, the thread, and the owner's queue.

Whatever goes wrong in the network thread becomes an event. A connection that cannot be made or is lost, for whatever
reason, is a `Disconnected` and is made again; a fault of our own is a `Failed`. A link never looks alive and is dead.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from contract.address import Address
from contract.certificates import CertificateWatch, Expiry
from contract.connection import PACKET_OVERHEAD_BYTES, Connection
from contract.errors import LinkError, ProtofleetError
from contract.link_actions import (
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
from contract.transport import Transport
from contract.wire import CONTENT_TYPE

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

Will = tuple[str, bytes]
_LOOKS = 4  # of the network thread in one keepalive, which it sends between


def client_id(fleet: str, who: str) -> str:
    """A client id for one process's link: it says to people whose it is, and ends in 8 random bytes that nobody but the
    broker is told. Who knows a client's id can take its session away, unless the broker puts the certificate's name in
    its place (deploy/mosquitto.conf)."""
    return f"pf-{fleet}-{who}-{os.urandom(8).hex()}"


class Link:
    """A connection to the broker that is made again until `close`.

    Args:
        address: where the broker is.
        client_id: unique at the broker; a second client of that id takes over and ends this link with `Failed`.
        subscriptions: topic filters, at QoS 1; there may be none. What is retained there comes after every `Connected`.
        will: topic and payload that the broker publishes, retained, when we vanish; or what makes them in the network
            thread, anew for each connection, however long the owner does not look.
        keepalive_s: an idle link sends two bytes in that time.
        receive_maximum: how many unacknowledged messages the broker may have delivered.
        largest_bytes: the largest payload that is of any use here: the broker is told to drop larger ones, since one
            window full of them could take all memory. No bound when None.
        echo_topic: a topic that is published to and listened to: a broker that does not send back what was published
            there delivers nothing at all, and is left for a new connection.
        content_type: of what is published; a fleet's messages unless it says otherwise.
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
        self._transport: Transport | None = None
        self._thread = threading.Thread(target=self._run, name=f"mqtt-{client_id}", daemon=True)

    # ── the owner's side ────────────────────────────────────────────────────────────────────────────────────────────

    def open(self) -> Link:
        """Start connecting. `receive` then tells how it goes."""
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
        """How long ago the network thread last went round; much more than its keepalive, and it hangs."""
        return time.monotonic() - self._turned_at

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> int:
        """Hand a QoS 1 message to the network thread; 0 when there is no connection, and then nothing is kept, else the
        connection's number.

        Raises:
            LinkError: when the broker would not take a message of that size.
        """
        with self._lock:
            if not self._core.publish(topic, payload, retain, time.monotonic()):
                return 0
            self._wake()
            return self._core.number

    def acknowledge(self, received: Received) -> None:
        """Tell the broker that `received` is dealt with. Of no effect at QoS 0, or when its connection is gone.

        Acknowledge every message: those behind one that is not are acknowledged only after it.
        """
        with self._lock:
            self._core.acknowledge(received)
            self._wake()

    @property
    def idle(self) -> bool:
        """Whether the broker has acknowledged everything that was handed over on this connection."""
        with self._lock:
            return self._core.idle

    @property
    def outstanding(self) -> int:
        """How many publications were handed over on this connection that the broker has not acknowledged."""
        with self._lock:
            return self._core.outstanding

    @property
    def delivered(self) -> tuple[int, int]:
        """The newest connection's number, and how many publications, the first ones, were acknowledged on it."""
        with self._lock:
            return self._core.number, self._core.delivered

    @property
    def dropped(self) -> int:
        """How many messages came at QoS 0 and found no room; nothing of ours travels so."""
        return self._core.dropped

    @property
    def broker_certificate(self) -> Expiry | None:
        """Until when the certificate is good that the broker has shown; None without TLS, and before it has."""
        return self._certificates.broker

    def wait_connected(self, patience_s: float) -> Connected:
        """Wait for the first connection.

        Raises:
            LinkError: when there is none after `patience_s` seconds, or the broker refuses us for good.
        """
        deadline = time.monotonic() + patience_s
        reason, noticed = "no answer", list[Noticed]()
        while (left := deadline - time.monotonic()) > 0:
            event = self.receive(min(left, 0.2))
            if isinstance(event, Connected):
                for each in noticed:  # the owner's to hear, in its own time
                    self._events.put(each)
                return event
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Disconnected):
                reason = event.reason
            elif isinstance(event, Noticed):
                noticed.append(event)
        raise LinkError(
            f"no broker at {self._address} within {patience_s:g} s",
            expected="an MQTT 5 broker",
            got="; ".join([reason, *(each.line for each in noticed)]),
            hint="protofleet pki list" if self._address.tls else "protofleet broker",
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
        """Do the next thing that is due, or wait for one; False when there will be none."""
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
            known = isinstance(error, (OSError, ValueError, ProtofleetError)) and str(error)
            with self._lock:
                self._core.ended(known or f"{type(error).__name__}: {error}", time.monotonic())
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
        """Until the owner wants something, the broker says something, or it is time."""
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
        """Give the descriptors back."""
        with self._lock:
            self._wake_in.close()
            self._wake_out.close()

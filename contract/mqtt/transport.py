"""One connection of paho-mqtt, driven by one thread with `select`. It moves bytes; packets go to
`protofleet.contract.mqtt.connection`.

Every connection gets a new paho client, because paho would otherwise do three things by itself:

- After a reconnect it resends what it holds in memory. A message that is too large for the broker is resent for ever.
- Such a message blocks all that is queued behind it.
- Its own thread dies in a callback while the connection looks alive.

At a malformed packet paho raises errors of any class. They pass through `step` and the other methods to the caller, who
takes the connection for lost.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
import time
from typing import Any

import paho.mqtt.client as mqtt
from paho.mqtt.matcher import MQTTMatcher
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from protofleet.contract.mqtt.address import Address
from protofleet.contract.mqtt.connection import Connection
from protofleet.contract.mqtt.link_actions import Send, Terms
from protofleet.contract.mqtt.tls_errors import tls_words
from protofleet.contract.wire.codec import CONTENT_TYPE, WIRE_VERSION
from protofleet.contract.wire.topics import unshared

__all__ = ["Transport"]

_CONNECT_S, _FAREWELL_S = 5.0, 1.0
_UNSPECIFIED, _NOT_AUTHORIZED, _KEEPALIVE = 128, 135, 141
_UNANSWERED = "a peer that hangs up without an answer, as some brokers do at a wrong user or password"


_NEW_LIST = "protofleet pki renew --crl"
_UNSURE = f", as a broker does that refuses this certificate, or whose revocation list has expired: {_NEW_LIST}"


class _Client(mqtt.Client):
    """Paho's client with two changes. Paho has no public interface for them; tests check that they work.

    - Paho would collect in memory whatever length a packet claims, up to 256 MB. Here there is a limit.
    - Paho drops the last TLS error, for example the broker's alert that refuses our certificate. Here it is kept.
    """

    largest_bytes: int | None = None
    tls_error: ssl.SSLError | None = None

    def _sock_recv(self, bufsize: int) -> bytes:
        """Refuse a packet that is too long. Paho asks for the rest of a packet with its whole length first."""
        if self.largest_bytes is not None and bufsize > self.largest_bytes:
            raise ValueError(f"a packet of {bufsize:,} bytes, at most {self.largest_bytes:,} were asked for")
        try:
            return super()._sock_recv(bufsize)
        except ssl.SSLError as error:
            self.tls_error = error
            raise

    def _sock_send(self, buf: bytes | bytearray) -> int:
        """Read the broker's alert where sending fails: with TLS 1.3 it refuses a certificate after the handshake."""
        try:
            return super()._sock_send(buf)
        except BlockingIOError:
            raise
        except OSError:
            with contextlib.suppress(OSError):
                self._sock_recv(1)
            raise


class Transport:
    """One paho client, for one connection.

    Args:
        core: is told what the broker says, under `lock`.
        will: topic and payload that the broker publishes, retained, when we vanish.
        receive_maximum: how many unacknowledged messages the broker may have delivered.
        packet_bytes: the largest packet that the broker may deliver. The broker is to drop larger ones; if it delivers
            one, the connection ends. None for MQTT's own bound.
        content_type: of the messages that are published. Messages of a fleet also carry their wire version.

    Attributes:
        keepalive_s: the longest time without any packet; the broker's value, once it has named one.

    Raises:
        UsageError: when a certificate file cannot be used.
    """

    def __init__(
        self,
        core: Connection,
        lock: threading.RLock,
        address: Address,
        client_id: str,
        *,
        will: tuple[str, bytes] | None,
        keepalive_s: int,
        receive_maximum: int,
        packet_bytes: int | None = None,
        content_type: str = CONTENT_TYPE,
    ) -> None:
        self._core, self._lock, self._address = core, lock, address
        self.keepalive_s, self._receive_maximum, self._packet_bytes = keepalive_s, receive_maximum, packet_bytes
        self._listens = MQTTMatcher()
        self._tickets: dict[int, int] = {}  # paho's packet id of what was sent → the ticket of `Send`
        self._properties = Properties(
            PacketTypes.PUBLISH
        )  # once: making them takes as long as all else about a message
        self._properties.ContentType = content_type
        if content_type == CONTENT_TYPE:
            self._properties.UserProperty = ("pf", str(WIRE_VERSION))
        client = self._client = _Client(
            mqtt.CallbackAPIVersion.VERSION2,
            client_id=client_id,
            protocol=mqtt.MQTTv5,
            reconnect_on_failure=False,
            manual_ack=True,
        )
        client.largest_bytes = packet_bytes
        client.connect_timeout = _CONNECT_S
        client.max_inflight_messages_set(0)  # no bound there: the core has one
        if address.user is not None:
            client.username_pw_set(address.user, address.password)
        if address.tls:
            client.tls_set_context(address.tls_context())
        if will is not None:
            client.will_set(*will, qos=1, retain=True)
        client.on_connect, client.on_subscribe, client.on_message = self._accepted, self._subscribed, self._received
        client.on_publish, client.on_disconnect = self._published, self._ended

    @property
    def peer(self) -> object:
        """The socket, once there is one."""
        return self._client.socket()

    # ── what the core wants ─────────────────────────────────────────────────────────────────────────────────────────

    def dial(self) -> None:
        """Connect and send CONNECT, for a session that ends with the connection. Blocks for seconds at most.

        Raises:
            OSError: nobody answers, or the broker's certificate is not trusted.
        """
        properties = Properties(PacketTypes.CONNECT)
        properties.ReceiveMaximum = self._receive_maximum
        if self._packet_bytes is not None:
            properties.MaximumPacketSize = self._packet_bytes
        address = self._address
        try:
            self._client.connect(address.host, address.port, self.keepalive_s, clean_start=True, properties=properties)
        except ssl.SSLError as error:
            raise ConnectionError(tls_words(error)) from None

    def subscribe(self, topics: tuple[str, ...]) -> None:
        """Subscribe at QoS 1."""
        for topic in topics:
            self._listens[unshared(topic)] = True
        self._client.subscribe([(topic, SubscribeOptions(qos=1)) for topic in topics])

    def send(self, what: Send) -> None:
        """Publish at QoS 1."""
        info = self._client.publish(what.topic, what.payload, qos=1, retain=what.retain, properties=self._properties)
        self._tickets[info.mid] = what.ticket

    def acknowledge(self, mid: int) -> None:
        """Send a PUBACK."""
        self._client.ack(mid, 1)

    def hang_up(self, *, polite: bool) -> None:
        """End the connection, with a DISCONNECT when `polite`. The core is told nothing of it."""
        client, sock = self._client, self._client.socket()
        client.on_connect = client.on_subscribe = client.on_message = client.on_publish = client.on_disconnect = None
        if sock is None:
            return
        with contextlib.suppress(OSError, ValueError):
            if polite:
                _part(client, sock.fileno(), time.monotonic() + _FAREWELL_S)
        sock.close()

    # ── bytes ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self, wake: socket.socket, timeout_s: float) -> None:
        """Wait until there is something to read or to write, or a byte in `wake`. Then read and write."""
        client = self._client
        sock = client.socket()
        if sock is None:
            self._tell_ended("the broker or the network is gone")
            return
        pending = isinstance(sock, ssl.SSLSocket) and sock.pending() > 0
        readable, writable, _ = select.select(
            [sock, wake], [sock] if client.want_write() else [], [], 0.0 if pending else timeout_s
        )
        status = client.loop_read() if sock in readable or pending else mqtt.MQTT_ERR_SUCCESS
        if status == mqtt.MQTT_ERR_SUCCESS and sock in writable:
            status = client.loop_write()
        if status == mqtt.MQTT_ERR_SUCCESS:
            status = client.loop_misc()
        if status != mqtt.MQTT_ERR_SUCCESS:
            self._tell_ended(mqtt.error_string(status))  # of no effect when a callback has told more

    # ── what the broker says ────────────────────────────────────────────────────────────────────────────────────────

    def _accepted(
        self, client: mqtt.Client, _: Any, flags: Any, reason: ReasonCode, properties: Properties | None
    ) -> None:
        with self._lock:
            if reason.is_failure:
                self._core.refused(reason.value, str(reason), time.monotonic())
            else:
                self.keepalive_s = getattr(properties, "ServerKeepAlive", 0) or self.keepalive_s  # 0: none
                self._core.accepted(_terms(properties), time.monotonic())

    def _subscribed(self, client: mqtt.Client, _: Any, mid: int, reasons: list[ReasonCode], properties: Any) -> None:
        with self._lock:
            refusals = [str(reason) if reason.is_failure else None for reason in reasons]
            self._core.subscribed(refusals, time.monotonic())

    def _received(self, client: mqtt.Client, _: Any, message: mqtt.MQTTMessage) -> None:
        topic, payload = message.topic, bytes(message.payload)
        if next(self._listens.iter_match(topic), None) is None:
            self._tell_ended(f"a message on {topic[:80]!r}, which nobody asked for")
            return
        with self._lock:
            self._core.received(
                topic, payload, qos=message.qos, retained=message.retain, mid=message.mid, now=time.monotonic()
            )

    def _published(self, client: mqtt.Client, _: Any, mid: int, reason: ReasonCode, properties: Any) -> None:
        refusal = str(reason) if reason.is_failure else None
        with self._lock:
            ticket = self._tickets.pop(mid, 0)
            self._core.published(ticket, refusal, reason.value == _NOT_AUTHORIZED, time.monotonic())

    def _ended(self, client: mqtt.Client, _: Any, flags: Any, reason: ReasonCode, properties: Any) -> None:
        from_broker = flags.is_disconnect_packet_from_server
        accepted = self._core.phase in ("subscribing", "up")
        why = _why(reason, from_broker, accepted)
        if self._client.tls_error is not None and not from_broker:
            why = tls_words(self._client.tls_error)
        elif self._address.cert_file is not None and not (from_broker or accepted):
            why += _UNSURE  # what it had to say is often lost with the connection
        self._tell_ended(why, code=reason.value if from_broker else None)

    def _tell_ended(self, reason: str, code: int | None = None) -> None:
        with self._lock:
            self._core.ended(reason, time.monotonic(), code=code)


def _part(client: mqtt.Client, descriptor: int, deadline: float) -> None:
    """Send a DISCONNECT, and wait until the broker closes the connection: then it has read the packet.

    Closing a socket that has unread bytes resets the connection. The broker would then never read the DISCONNECT, and
    would publish the last will. Paho closes its socket as soon as the packet is out, so this function works on a second
    descriptor of the socket.
    """
    with socket.socket(fileno=os.dup(descriptor)) as ours:
        client.disconnect()
        while client.want_write() and (left := deadline - time.monotonic()) > 0:
            select.select([], [ours], [], left)
            client.loop_write()
        ours.shutdown(socket.SHUT_WR)
        while (left := deadline - time.monotonic()) > 0:
            readable, _, _ = select.select([ours], [], [], left)
            if not readable or not ours.recv(65_536):
                return


def _terms(properties: Properties | None) -> Terms:
    """The terms in a CONNACK. Paho obeys its Server Keep Alive; without a session, a session expiry does not matter."""
    names = {"ReceiveMaximum": "receive_maximum", "MaximumQoS": "maximum_qos", "MaximumPacketSize": "packet_bytes"}
    numbers = {ours: getattr(properties, name) for name, ours in names.items() if hasattr(properties, name)}
    flags = {"RetainAvailable": "retains", "SharedSubscriptionAvailable": "shares"}
    return Terms(**numbers, **{ours: bool(getattr(properties, name, 1)) for name, ours in flags.items()})


def _why(reason: ReasonCode, from_broker: bool, accepted: bool) -> str:
    """Why a connection ended, for a person. Paho calls every end without a packet "Unspecified error"."""
    if from_broker:
        return f"the broker ended it: {reason}"
    if reason.value == _KEEPALIVE:
        return "the broker does not answer"
    if reason.value == _UNSPECIFIED:
        return "the broker or the network is gone" if accepted else _UNANSWERED
    return str(reason)

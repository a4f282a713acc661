"""The MQTT 5 link that both ends use: paho-mqtt with its measured traps fenced off.

One network thread owns the paho client; the owner of the link only exchanges values with it through two queues.

    owner:   link.publish(topic, payload) ──▶ outgoing ──▶ network thread ──▶ broker
             event = link.receive(1.0)    ◀── events   ◀── network thread ◀── broker
             link.acknowledge(event)      ──▶ outgoing

What follows from that, trap by trap (each has a test):

- Every connection gets a new paho client. paho resends what it holds in memory after a reconnect, for ever when the
  message is too large for the broker, and blocks what is queued behind it; here nothing survives a connection but what
  its owner still wants to send. Durability is the outbox's and the store's work, not the link's.
- paho is driven from one thread by select, never by callbacks that publish or lock: no deadlock, and an exception in
  that thread becomes a `Disconnected` event instead of a link that looks alive and is dead.
- The broker's session is kept (`clean_start` false with an expiry), and messages are acknowledged by hand, after their
  effect is durable. `Receive Maximum` bounds what is delivered but not yet acknowledged.
- A payload larger than the broker's Maximum Packet Size is refused here, before it is sent.
- Reconnecting waits longer each time, with jitter, and starts over only after a connection has held for a while.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

import paho.mqtt.client as mqtt
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from contract.errors import LinkError, UsageError
from contract.wire import CONTENT_TYPE, WIRE_VERSION

__all__ = ["Address", "Connected", "Disconnected", "Event", "Failed", "Link", "Received"]

_FATAL_CONNECT = {132, 133, 134, 135, 138, 140}  # protocol, client id, user, not authorised, banned, auth method
_UNSPECIFIED, _KEEPALIVE, _TAKEN_OVER = 128, 141, 142
_PACKET_OVERHEAD_BYTES = 256  # more than fixed header, topic and properties of a publish ever take
_SESSION_EXPIRY_S = 24 * 3600
_STEADY_S = 10.0
_INFLIGHT = 20  # paho ignores the broker's Receive Maximum; 20 is Mosquitto's default and the lowest in use


@dataclass(frozen=True)
class Address:
    """Where the broker is, from `mqtt://[user[:password]@]host[:port]` or `mqtts://…`.

    Attributes:
        ca_file, cert_file, key_file: PEM files for TLS; the system's authorities when ca_file is None.
    """

    host: str
    port: int
    tls: bool = False
    user: str | None = None
    password: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    @classmethod
    def parse(
        cls, url: str, *, ca_file: str | None = None, cert_file: str | None = None, key_file: str | None = None
    ) -> Address:
        """The address that `url` names.

        Raises:
            UsageError: when it is not such a URL, or a certificate file is missing.
        """
        expected = "mqtt://host[:port] or mqtts://host[:port]"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise UsageError("broker", expected=expected, got=url) from None
        if parts.scheme not in ("mqtt", "mqtts") or not parts.hostname or parts.path not in ("", "/"):
            raise UsageError("broker", expected=expected, got=url, hint="mqtt://127.0.0.1:1883")
        for name in (ca_file, cert_file, key_file):
            if name is not None and not os.path.isfile(name):
                raise UsageError("TLS", expected="a PEM file", got=f"no file {name}")
        tls = parts.scheme == "mqtts"
        user, password = (unquote(text) if text else None for text in (parts.username, parts.password))
        return cls(parts.hostname, port or (8883 if tls else 1883), tls, user, password, ca_file, cert_file, key_file)

    def __str__(self) -> str:
        return f"mqtt{'s' if self.tls else ''}://{self.host}:{self.port}"


@dataclass(frozen=True)
class Connected:
    """The broker accepted us and all subscriptions. `limit_bytes` is the largest payload it takes."""

    session_present: bool
    limit_bytes: int


@dataclass(frozen=True)
class Disconnected:
    """The connection ended or could not be made; the link tries again after `retry_s` seconds."""

    reason: str
    retry_s: float


@dataclass(frozen=True)
class Failed:
    """The link has given up: trying again cannot help."""

    error: LinkError


@dataclass(frozen=True)
class Received:
    """A message. Acknowledge it once its effect is durable; it comes again if you do not."""

    topic: str
    payload: bytes
    retained: bool
    mid: int
    connection: int


Event = Connected | Disconnected | Failed | Received


class Link:
    """One MQTT session that is kept up until `close`.

    Args:
        address: where the broker is.
        client_id: unique at the broker; a second session of that id takes over and ends this link with `Failed`.
        subscriptions: topic filters, at QoS 1.
        will: topic and payload that the broker publishes, retained, when we vanish.
        keepalive_s: an idle link sends two bytes in that time.
        receive_maximum: how many unacknowledged messages the broker may have delivered.
        fresh_start: begin with a clean session, and keep it over reconnections only. For a process that has just
            started and must learn what is retained: rumqttd says that of new subscriptions only, and a kept session
            has none. What was queued is lost, so only where peers send again until they have a receipt.
    """

    def __init__(
        self,
        address: Address,
        client_id: str,
        *,
        subscriptions: Sequence[str],
        will: tuple[str, bytes] | None = None,
        keepalive_s: int = 60,
        receive_maximum: int = 64,
        fresh_start: bool = False,
    ) -> None:
        self._address, self._client_id, self._subscriptions = address, client_id, list(subscriptions)
        self._will, self._keepalive_s, self._receive_maximum = will, keepalive_s, receive_maximum
        self._fresh_start = fresh_start
        self._events: queue.Queue[Event] = queue.Queue()
        self._outgoing: queue.Queue[Callable[[mqtt.Client], object]] = queue.Queue()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._stopping = threading.Event()
        self._connection = 0  # number of the connection that is up; 0 while none is
        self._serial = 0
        self._limit_bytes = 0
        self._unsent = 0  # QoS 1 publishes that the broker has not acknowledged yet
        self._thread = threading.Thread(target=self._run, name=f"mqtt-{client_id}", daemon=True)

    # ── the owner's side ────────────────────────────────────────────────────────────────────────────────────────────

    def open(self) -> Link:
        """Start connecting. `receive` then tells how it goes."""
        self._thread.start()
        return self

    def receive(self, timeout_s: float) -> Event | None:
        """The next event, or None after `timeout_s`."""
        try:
            return self._events.get(timeout=timeout_s) if timeout_s > 0 else self._events.get_nowait()
        except queue.Empty:
            return None

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> bool:
        """Hand a QoS 1 message to the network thread; False when there is no connection, and then nothing is kept.

        Raises:
            LinkError: when the broker would not take a message of that size.
        """
        connection = self._connection
        if not connection:
            return False
        if len(payload) > self._limit_bytes:
            raise LinkError(
                f"message to {topic}", expected=f"at most {self._limit_bytes} bytes", got=f"{len(payload)} bytes"
            )
        self._send(connection, lambda client: self._publish(client, topic, payload, retain))
        return True

    def acknowledge(self, received: Received) -> None:
        """Tell the broker that `received` is dealt with. Of no effect when its connection is gone.

        Acknowledge every message, in the order they came: rumqttd stalls or ends the connection otherwise.
        """
        self._send(received.connection, lambda client: client.ack(received.mid, 1))

    @property
    def idle(self) -> bool:
        """Whether the broker has acknowledged everything that was handed over on this connection."""
        return not self._unsent and self._outgoing.empty()

    def wait_connected(self, patience_s: float) -> Connected:
        """Wait for the first connection.

        Raises:
            LinkError: when there is none after `patience_s` seconds, or the broker refuses us for good.
        """
        deadline = time.monotonic() + patience_s
        reason = "no answer"
        while (left := deadline - time.monotonic()) > 0:
            event = self.receive(min(left, 0.2))
            if isinstance(event, Connected):
                return event
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Disconnected):
                reason = event.reason
        raise LinkError(
            f"no broker at {self._address} within {patience_s:g} s",
            expected="an MQTT 5 broker",
            got=reason,
            hint="protofleet broker",
        )

    def close(self, timeout_s: float = 3.0) -> None:
        """Send what is still queued, say goodbye to the broker, and end the network thread."""
        deadline = time.monotonic() + timeout_s
        while self._connection and (self._unsent or not self._outgoing.empty()) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._stopping.set()
        self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout=max(0.5, deadline - time.monotonic()))

    def _send(self, connection: int, action: Callable[[mqtt.Client], object]) -> None:
        self._outgoing.put(lambda client: action(client) if connection == self._connection else None)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups already
            self._wake_in.send(b"\0")

    # ── the network thread ──────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        attempt = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            client, end = self._new_client()
            try:
                reason = self._converse(client, end)
            except (OSError, ValueError, RuntimeError, mqtt.WebsocketConnectionError) as error:
                reason = str(error) or type(error).__name__
            except (
                Exception
            ) as error:  # paho on a malformed packet: any class; the connection is what is lost, not the link
                reason = f"{type(error).__name__}: {error}"
            self._connection, self._unsent = 0, 0
            if self._stopping.is_set() or end.failed:
                break
            attempt = 0 if time.monotonic() - began > _STEADY_S else attempt + 1
            retry_s = random.uniform(0.5, 1.0) * min(30.0, 0.25 * 2 ** min(attempt, 8))
            self._events.put(Disconnected(reason, retry_s))
            self._stopping.wait(retry_s)

    def _converse(self, client: mqtt.Client, end: _End) -> str:
        """One connection from CONNECT to its end; returns why it ended."""
        properties = Properties(PacketTypes.CONNECT)
        properties.SessionExpiryInterval = _SESSION_EXPIRY_S
        properties.ReceiveMaximum = self._receive_maximum
        client.connect(
            self._address.host,
            self._address.port,
            self._keepalive_s,
            clean_start=self._fresh_start,
            properties=properties,
        )
        while not self._stopping.is_set():
            status = self._step(client)
            if status != mqtt.MQTT_ERR_SUCCESS or end.reason:
                return end.reason or mqtt.error_string(status)
        if self._connection:
            client.disconnect()
            while client.want_write() and self._step(client) == mqtt.MQTT_ERR_SUCCESS:
                pass
        return "closed"

    def _step(self, client: mqtt.Client) -> int:
        sock = client.socket()
        if sock is None:
            return int(mqtt.MQTT_ERR_CONN_LOST)
        pending = isinstance(sock, ssl.SSLSocket) and sock.pending() > 0
        readable, writable, _ = select.select(
            [sock, self._wake_out], [sock] if client.want_write() else [], [], 0.0 if pending else 1.0
        )
        if self._wake_out in readable:
            self._drain(client)
        status = mqtt.MQTT_ERR_SUCCESS
        if sock in readable or pending:
            status = client.loop_read()
        if status == mqtt.MQTT_ERR_SUCCESS and sock in writable:
            status = client.loop_write()
        return int(client.loop_misc() if status == mqtt.MQTT_ERR_SUCCESS else status)

    def _drain(self, client: mqtt.Client) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_out.recv(65_536)
        for _ in range(self._outgoing.qsize()):
            self._outgoing.get_nowait()(client)

    def _publish(self, client: mqtt.Client, topic: str, payload: bytes, retain: bool) -> None:
        properties = Properties(PacketTypes.PUBLISH)
        properties.ContentType = CONTENT_TYPE
        properties.UserProperty = ("pf", str(WIRE_VERSION))
        self._unsent += 1
        client.publish(topic, payload, qos=1, retain=retain, properties=properties)

    def _new_client(self) -> tuple[mqtt.Client, _End]:
        client = mqtt.Client(
            mqtt.CallbackAPIVersion.VERSION2,
            client_id=self._client_id,
            protocol=mqtt.MQTTv5,
            reconnect_on_failure=False,
            manual_ack=True,
        )
        client.connect_timeout = 5.0
        client.max_inflight_messages_set(_INFLIGHT)
        if self._address.user is not None:
            client.username_pw_set(self._address.user, self._address.password)
        if self._address.tls:
            client.tls_set(self._address.ca_file, self._address.cert_file, self._address.key_file)
        if self._will is not None:
            client.will_set(*self._will, qos=1, retain=True)
        end = _End()
        self._serial += 1
        serial = self._serial

        def connected() -> None:
            self._connection = serial
            self._events.put(Connected(end.session_present, self._limit_bytes))
            for received in end.early:
                self._events.put(received)
            end.early.clear()

        def on_connect(
            client: mqtt.Client, _: Any, flags: Any, reason: ReasonCode, properties: Properties | None
        ) -> None:
            if reason.is_failure:
                end.reason = f"refused: {reason}"
                if reason.value in _FATAL_CONNECT:
                    self._fail(end, LinkError(f"broker {self._address} refused {self._client_id}", got=str(reason)))
                return
            maximum = getattr(properties, "MaximumPacketSize", 1 << 28) if properties is not None else 1 << 28
            self._limit_bytes = max(maximum - _PACKET_OVERHEAD_BYTES, 0)
            end.session_present = bool(flags.session_present)
            self._fresh_start = False
            # A kept session is subscribed already; when its window is full, rumqttd confirms nothing more until the
            # messages in it are acknowledged.
            if end.session_present:
                connected()
            client.subscribe([(topic, SubscribeOptions(qos=1)) for topic in self._subscriptions])

        def on_subscribe(client: mqtt.Client, _: Any, mid: int, reasons: list[ReasonCode], properties: Any) -> None:
            for topic, reason in zip(self._subscriptions, reasons, strict=True):
                if reason.is_failure:
                    self._fail(
                        end, LinkError(f"broker {self._address} refused {topic}", got=str(reason), hint="its ACL")
                    )
                    return
            if self._connection != serial:
                connected()

        def on_message(client: mqtt.Client, _: Any, message: mqtt.MQTTMessage) -> None:
            received = Received(message.topic, bytes(message.payload), message.retain, message.mid, serial)
            if self._connection == serial:
                self._events.put(received)
            else:
                end.early.append(received)

        def on_publish(client: mqtt.Client, _: Any, mid: int, reason: ReasonCode, properties: Any) -> None:
            self._unsent -= 1
            if reason.is_failure:
                end.reason = f"publish refused: {reason}"

        def on_disconnect(client: mqtt.Client, _: Any, flags: Any, reason: ReasonCode, properties: Any) -> None:
            end.reason = end.reason or _why(reason, flags.is_disconnect_packet_from_server, self._connection == serial)
            if reason.value == _TAKEN_OVER:
                self._fail(
                    end,
                    LinkError(f"another client took over the id {self._client_id}", hint="an id of its own for each"),
                )

        client.on_connect, client.on_subscribe, client.on_message = on_connect, on_subscribe, on_message
        client.on_publish, client.on_disconnect = on_publish, on_disconnect
        return client, end

    def _fail(self, end: _End, error: LinkError) -> None:
        end.reason, end.failed = end.reason or str(error), True
        self._events.put(Failed(error))


def _why(reason: ReasonCode, from_broker: bool, accepted: bool) -> str:
    """Why a connection ended, for a person; paho calls all that comes without a packet "Unspecified error"."""
    if from_broker:
        return f"the broker ended it: {reason}"
    if reason.value == _KEEPALIVE:
        return "the broker does not answer"
    if reason.value == _UNSPECIFIED:
        return "the broker or the network is gone" if accepted else "a peer that hangs up without an answer"
    return str(reason)


@dataclass
class _End:
    """How a connection ends, as its callbacks learn it."""

    reason: str = ""
    failed: bool = False
    session_present: bool = False
    early: list[Received] = field(default_factory=list)  # a kept session delivers before our subscriptions are answered

"""Brokers over real sockets that misbehave as they are told to: a script for each connection that is made to them."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable

from paho.mqtt.matcher import MQTTMatcher

__all__ = [
    "CONNACK",
    "HOSTILE",
    "FakeBroker",
    "Route",
    "accept",
    "packet",
    "packet_id",
    "publish",
    "read",
    "say",
    "subscribed",
]

CONNACK = bytes.fromhex("2003000000")


class FakeBroker:
    """A TCP server that plays one script per connection, the last for ever after."""

    def __init__(self, *scripts: Callable[[socket.socket], None]) -> None:
        self._scripts, self.connections = list(scripts), 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"mqtt://127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                script = self._scripts[min(self.connections, len(self._scripts) - 1)]
                self.connections += 1
                with connection, contextlib.suppress(OSError, EOFError):
                    connection.settimeout(10)
                    script(connection)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(timeout=2)


def packet(connection: socket.socket) -> tuple[int, bytes]:
    """The next MQTT packet: first byte and body."""
    first, length, shift = read(connection, 1)[0], 0, 0
    while True:
        byte = read(connection, 1)[0]
        length |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return first, read(connection, length)


def read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def accept(connection: socket.socket, connack: bytes = CONNACK) -> list[str]:
    """CONNECT and SUBSCRIBE, both answered well; the filters."""
    packet(connection)
    connection.sendall(connack)
    return subscribed(connection)


def subscribed(connection: socket.socket) -> list[str]:
    """SUBSCRIBE, answered well; the filters."""
    _, body = packet(connection)
    filters = filters_of(body)
    connection.sendall(bytes([0x90, 3 + len(filters)]) + body[:2] + b"\x00" + b"\x01" * len(filters))
    return filters


def filters_of(body: bytes) -> list[str]:
    """Of a SUBSCRIBE."""
    at, filters = 3, list[str]()
    while at < len(body):
        end = at + 2 + int.from_bytes(body[at : at + 2])
        filters.append(body[at + 2 : end].decode())
        at = end + 1  # a byte of options
    return filters


def say(*parts: bytes) -> Callable[[socket.socket], None]:
    """Accept, send those bytes, and wait for the other side to go."""

    def script(connection: socket.socket) -> None:
        accept(connection)
        for part in parts:
            connection.sendall(part)
        while connection.recv(4096):
            pass

    return script


def publish(topic: bytes, payload: bytes, mid: int = 1, first: int = 0x32) -> bytes:
    body = struct.pack(">H", len(topic)) + topic + struct.pack(">H", mid) + b"\x00" + payload
    return bytes([first]) + _length(len(body)) + body


def _length(count: int) -> bytes:
    coded = bytearray()
    while True:
        count, low = divmod(count, 128)
        coded.append(low | (128 if count else 0))
        if not count:
            return bytes(coded)


def packet_id(publish: bytes) -> bytes:
    """Of a PUBLISH packet's body: it stands behind the topic."""
    end = 2 + int.from_bytes(publish[:2])
    return publish[end : end + 2]


# ── what a hostile broker does to whoever comes, once it has let it in ──────────────────────────────────────────────


def _flood(connection: socket.socket) -> None:
    """A thousand retained messages at QoS 1 at once, whatever window it was told."""
    topic = _concrete(accept(connection)[0])
    connection.sendall(b"".join(publish(topic, bytes(100), mid, 0x33) for mid in range(1, 1_001)))
    time.sleep(0.1)


def _loris(connection: socket.socket) -> None:
    """A packet that comes a byte now and then, and never ends."""
    topic = _concrete(accept(connection)[0])
    for byte in publish(topic, bytes(100)):
        connection.sendall(bytes([byte]))
        time.sleep(0.05)


def _then(*parts: bytes) -> Callable[[socket.socket], None]:
    def script(connection: socket.socket) -> None:
        accept(connection)
        for part in parts:
            connection.sendall(part)
        time.sleep(0.1)

    return script


def _first(*parts: bytes) -> Callable[[socket.socket], None]:
    def script(connection: socket.socket) -> None:
        packet(connection)
        for part in parts:
            connection.sendall(part)
        time.sleep(0.1)

    return script


def _repeat(connection: socket.socket) -> None:
    """The same garbage ten times under one packet id, then under others, on a topic that is listened to."""
    topic = _concrete(accept(connection)[0])
    for mid in [7] * 10 + [8, 9, 7]:
        connection.sendall(publish(topic, b"\xa1\x00\x03", mid, 0x3A))
    time.sleep(0.2)


def _storm(connection: socket.socket) -> None:
    """One message, marked as a repetition, five hundred times under the same packet id."""
    topic = _concrete(accept(connection)[0])
    connection.sendall(publish(topic, b"\xa1\x00\x03", 7, 0x3A) * 500)
    time.sleep(0.1)


def _session(connection: socket.socket) -> None:
    """It says that it has our session, which we asked for none of, and goes on with what never was."""
    topic = _concrete(accept(connection, bytes.fromhex("2003010000"))[0])
    connection.sendall(b"\x62\x02\x00\x07" + publish(topic, b"\xa1\x00\x03", 9, 0x3A) + b"\x40\x02\x00\x07")
    time.sleep(0.1)


def _alias(connection: socket.socket) -> None:
    """Topic aliases, of which we allowed none: one is given, then used."""
    topic = _concrete(accept(connection)[0])
    given = struct.pack(">H", len(topic)) + topic + b"\x00\x01\x03\x23\x00\x01x"
    connection.sendall(b"\x32" + _length(len(given)) + given + b"\x32\x09\x00\x00\x00\x02\x03\x23\x00\x01x")
    time.sleep(0.1)


def _properties(connection: socket.socket) -> None:
    """A message of nothing but two thousand user properties."""
    topic = _concrete(accept(connection)[0])
    told = b"\x26\x00\x01a\x00\x01b" * 2_000
    body = struct.pack(">H", len(topic)) + topic + b"\x00\x01" + _length(len(told)) + told
    connection.sendall(b"\x32" + _length(len(body)) + body)
    time.sleep(0.1)


def _half_closed(connection: socket.socket) -> None:
    """It ends what it sends, and goes on reading."""
    accept(connection)
    connection.shutdown(socket.SHUT_WR)
    connection.settimeout(2.0)
    while connection.recv(4096):
        pass


def _grants_less(connection: socket.socket) -> None:
    """Subscriptions at QoS 0, and a thousand messages that nothing holds back."""
    packet(connection)
    connection.sendall(CONNACK)
    _, body = packet(connection)
    filters = filters_of(body)
    connection.sendall(bytes([0x90, 3 + len(filters)]) + body[:2] + b"\x00" + bytes(len(filters)))
    topic = _concrete(filters[0])
    loose = struct.pack(">H", len(topic)) + topic + b"\x00" + b"\xa1\x00\x03"
    connection.sendall((b"\x30" + _length(len(loose)) + loose) * 1_000)
    time.sleep(0.1)


def _concrete(topic: str) -> bytes:
    return topic.replace("+", "x").encode()


HOSTILE: dict[str, Callable[[socket.socket], None]] = {
    "a packet that says it has 256 MB": _then(b"\x32\xff\xff\xff\x7f" + bytes(5_000)),
    "a CONNACK that says it has 256 MB": _first(b"\x20\xff\xff\xff\x7f" + bytes(5_000)),
    "messages beyond any window": _flood,
    "a topic that nobody subscribed to": _then(publish(b"x", b"y")),
    "a topic of another fleet": _then(publish(b"pf/v2/other/up/d", b"y")),
    "a topic with a wildcard": _then(publish(b"pf/v2/fleet/up/#", b"y")),
    "no topic, but an alias": _then(b"\x32\x09\x00\x00\x00\x01\x03\x23\x00\x01x"),
    "a packet a byte at a time": _loris,
    "the same message again and again": _repeat,
    "a SUBACK before CONNACK": _first(b"\x90\x04\x00\x01\x00\x01", CONNACK),
    "a PUBLISH before CONNACK": _first(publish(b"x", b"y"), CONNACK),
    "acknowledgements of everything": _then(*(b"\x40\x02" + struct.pack(">H", mid) for mid in range(1, 300))),
    "packet id 0": _then(publish(b"x", b"y", 0), b"\x40\x02\x00\x00"),
    "half a packet": _then(publish(b"x", bytes(100))[:50]),
    "a reset": _then(),
    "disconnects without end": _then(b"\xe0\x02\x8b\x00" * 500),
    "a reason of 60 kB": _then(
        b"\xe0" + _length(60_000 + 8) + b"\x8b" + _length(60_003) + b"\x1f\xea\x60" + b"a" * 60_000
    ),
    "no window for us": _first(bytes.fromhex("2006000003") + b"\x21\x00\x00"),
    "pings that nobody sent": _then(b"\xd0\x00" * 1_000),
    "text that is none": _then(publish(b"\xff\xfe", b"y")),
    "a message for another device": _then(publish(b"pf/v2/fleet/down/other", b"y")),
    "too busy": _first(bytes.fromhex("2003008900")),
    "quota exceeded": _first(bytes.fromhex("2003009700")),
    "use another server": _then(b"\xe0\x02\x9c\x00"),
    "authentication that nobody began": _then(b"\xf0\x02\x18\x00"),
    "a storm of repetitions": _storm,
    "a session that we have not": _session,
    "aliases for topics": _alias,
    "two thousand properties": _properties,
    "half-closed": _half_closed,
    "subscriptions at less than we asked for": _grants_less,
}


class Route:
    """A good broker for one client: every publication is acknowledged and comes back to whoever listens to it.

    Args:
        heard: is given each topic and payload, and returns further messages for the client.
    """

    def __init__(self, heard: Callable[[str, bytes], list[tuple[str, bytes]]]) -> None:
        self._heard, self._mid = heard, 100

    def __call__(self, connection: socket.socket) -> None:
        listens = MQTTMatcher()
        for each in accept(connection):
            listens[each] = True
        while True:
            first, body = packet(connection)
            if first == 0xC0:
                connection.sendall(b"\xd0\x00")
            if first & 0xF0 != 0x30:
                continue
            topic, payload = _published(body)
            connection.sendall(b"\x40\x02" + packet_id(body))
            for to, what in [(topic, payload), *self._heard(topic, payload)]:
                if next(listens.iter_match(to), None):
                    self._mid += 1
                    connection.sendall(publish(to.encode(), what, self._mid))


def _published(body: bytes) -> tuple[str, bytes]:
    """Topic and payload of a PUBLISH at QoS 1, whose properties are shorter than 128 bytes."""
    end = 2 + int.from_bytes(body[:2])
    return body[2:end].decode(), body[end + 3 + body[end + 2] :]

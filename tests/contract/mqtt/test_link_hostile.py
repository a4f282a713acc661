"""The link against brokers that misbehave: whatever bytes come, its thread lives and tries again, ever later."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator

import pytest
from certificates import issue

from protofleet.contract.errors import UsageError
from protofleet.contract.mqtt import connection as connection_rules
from protofleet.contract.mqtt.connection import Connection
from protofleet.contract.mqtt.link import Address, Connected, Disconnected, Event, Failed, Link, Received
from protofleet.contract.mqtt.transport import Transport
from tests.attacks.hostile_broker import CONNACK, FakeBroker, accept, packet, packet_id, publish, say


@pytest.fixture
def fake() -> Iterator[Callable[..., FakeBroker]]:
    made: list[FakeBroker] = []

    def make(*scripts: Callable[[socket.socket], None]) -> FakeBroker:
        made.append(FakeBroker(*scripts))
        return made[-1]

    yield make
    for broker in made:
        broker.close()


@pytest.fixture
def link() -> Iterator[Callable[..., Link]]:
    opened: list[Link] = []

    def open_link(url: str, **options: object) -> Link:
        opened.append(Link(Address.parse(url), "device", subscriptions=["to/device"], **options).open())
        return opened[-1]

    yield open_link
    for one in opened:
        one.close(timeout_s=0.5)


def until(link: Link, kind: type[Event], timeout_s: float = 60.0) -> Event:
    deadline = time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0:
        event = link.receive(left)
        if isinstance(event, kind):
            return event
    raise AssertionError(f"no {kind.__name__} within {timeout_s} s")


good = say(publish(b"to/device", b"hello"))

MALFORMED = {
    "a topic that is not UTF-8": publish(b"to/\xff\xfe", b"x"),
    "a topic longer than the packet": b"\x32\x05\xff\xff\x00\x01\x00",
    "an empty publish": b"\x32\x00",
    "a length that never ends": b"\x32\xff\xff\xff\xff\xff\xff",
    "a packet type of zero": b"\x00\x00",
    "an acknowledgement of nothing": b"\x40\x02\x12\x34",
    "a subscription's answer that is cut": b"\x90\x01\x00",
    "a second CONNACK that is cut": b"\x20\x01\x00",
    "a CONNECT": b"\x10\x02\x00\x00",
    "properties that lie about their length": b"\x32\x08\x00\x01a\x00\x01\x7f\x01\x01",
    "an unknown property": b"\x32\x09\x00\x01a\x00\x01\x02\xfe\x01x",
    "a disconnect with an unknown reason": b"\xe0\x02\xfd\x00",
    "HTTP": b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4,
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_packet_ends_the_connection_at_most_and_the_next_one_works(fake, link, name):
    """paho raises out of its read for several of these: its own network thread would be dead and look alive."""

    def hang_up_after(connection: socket.socket) -> None:
        accept(connection)
        connection.sendall(MALFORMED[name])
        time.sleep(0.1)

    device = link(fake(hang_up_after, good).url)
    until(device, Connected)
    assert until(device, Disconnected).reason
    until(device, Connected)
    assert until(device, Received).payload == b"hello"


@pytest.mark.parametrize(
    "first",
    [b"", bytes(50), b"SSH-2.0-OpenSSH_9.2\r\n", b"\x20\x7f\x00", b"\x20\x02\x00\x00"],
    ids=["nothing", "zeros", "SSH", "cut CONNACK", "MQTT 3.1.1"],
)
def test_a_port_that_speaks_something_else_is_a_disconnection_not_a_death(fake, link, first):
    def other(connection: socket.socket) -> None:
        connection.sendall(first)

    device = link(fake(other, other, good).url)
    for _ in range(2):
        until(device, Disconnected)
    until(device, Connected)


def test_a_packet_that_claims_256_mb_is_not_waited_for(fake, link):
    """All of it was collected in memory first."""

    def lies(connection: socket.socket) -> None:
        accept(connection)
        connection.sendall(b"\x32\xff\xff\xff\x7f" + bytes(5_000))
        with contextlib.suppress(OSError):
            connection.recv(1)  # until we hang up

    device = link(fake(lies, good).url, largest_bytes=65_536)
    until(device, Connected)
    assert until(device, Disconnected).reason.startswith("a packet of 268,435,455 bytes, at most")


def test_a_broker_that_accepts_and_says_nothing_is_given_up_after_the_keepalive(fake, link):
    def silent(connection: socket.socket) -> None:
        while connection.recv(4096):
            pass

    device = link(fake(silent, good).url, keepalive_s=1)
    until(device, Disconnected)
    until(device, Connected)


def test_a_broker_that_falls_silent_later_is_noticed(fake, link):
    device = link(fake(say(), good).url, keepalive_s=1)
    until(device, Connected)
    until(device, Disconnected)
    until(device, Connected)


@pytest.mark.parametrize("reason", [132, 133, 134, 135, 138, 140])
def test_a_refusal_that_trying_again_cannot_cure_ends_the_link(fake, link, reason):
    def refuse(connection: socket.socket) -> None:
        packet(connection)
        connection.sendall(bytes([0x20, 3, 0, reason, 0]))
        time.sleep(0.2)

    broker = fake(refuse)
    device = link(broker.url)
    failed = until(device, Failed)
    assert "refused device" in str(failed.error)
    assert device.receive(0.8) is None
    assert broker.connections == 1


def test_a_refused_subscription_ends_the_link_with_a_hint(fake, link):
    """Mosquitto 2.0 grants any filter and then delivers nothing; brokers that do refuse answer like this."""

    def refuse_filter(connection: socket.socket) -> None:
        packet(connection)
        connection.sendall(CONNACK)
        _, body = packet(connection)
        connection.sendall(b"\x90\x04" + body[:2] + b"\x00\x87")
        time.sleep(0.2)

    failed = until(link(fake(refuse_filter).url), Failed)
    assert "refused to/device" in str(failed.error)
    assert "try its ACL" in str(failed.error)


@pytest.mark.parametrize("reason", [136, 137, 151, 159])
def test_a_refusal_that_passes_is_tried_again(fake, link, reason):
    def busy(connection: socket.socket) -> None:
        packet(connection)
        connection.sendall(bytes([0x20, 3, 0, reason, 0]))
        time.sleep(0.1)

    device = link(fake(busy, good).url)
    assert "refused" in until(device, Disconnected).reason
    until(device, Connected)


def unanswered(connection: socket.socket) -> None:
    packet(connection)


def silent(connection: socket.socket) -> None:
    accept(connection)
    time.sleep(5)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (accept, "the broker or the network is gone"),
        (unanswered, "a peer that hangs up without an answer, as some brokers do at a wrong user or password"),
        (say(b"\xe0\x02\x8b\x00"), "the broker ended it: Server shutting down"),
        (silent, "the broker does not answer"),
    ],
)
def test_the_reason_of_a_lost_connection_is_one_that_a_person_understands(fake, link, script, said):
    """paho's word for the first two is "Unspecified error"."""
    assert until(link(fake(script).url, keepalive_s=1), Disconnected).reason == said


def test_another_client_that_takes_the_id_over_ends_the_link(fake, link):
    broker = fake(say(b"\xe0\x02\x8e\x00"))
    device = link(broker.url)
    until(device, Connected)
    assert "another client took over the id device" in str(until(device, Failed).error)
    time.sleep(0.8)
    assert broker.connections == 1


def test_waits_grow_with_jitter_and_differ_between_devices(fake):
    def hang_up(connection: socket.socket) -> None:
        packet(connection)

    broker = fake(hang_up)
    links = [Link(Address.parse(broker.url), f"d{n}", subscriptions=["x"]).open() for n in range(3)]
    waits = [[until(link, Disconnected).retry_s for _ in range(4)] for link in links]
    for link in links:
        link.close(timeout_s=0.1)
    for attempt, bound in enumerate((0.5, 1.0, 2.0, 4.0)):
        at_this_attempt = [wait[attempt] for wait in waits]
        assert all(bound / 2 <= wait_s <= bound for wait_s in at_this_attempt)
        assert len(set(at_this_attempt)) == 3


def test_a_connection_that_is_accepted_and_lost_at_once_does_not_start_the_waits_over(fake, link):
    """paho's own back-off begins anew with every CONNACK: a broker that throws everyone out is then hammered."""

    def welcome_and_drop(connection: socket.socket) -> None:
        accept(connection)

    device = link(fake(welcome_and_drop).url)
    waits = [until(device, Disconnected).retry_s for _ in range(4)]
    assert waits[3] > 2 * waits[0]
    assert waits[3] >= 2.0


def test_every_connection_asks_for_a_clean_session_that_ends_with_it(fake, link):
    asked = []

    def note_and_drop(connection: socket.socket) -> None:
        _, body = packet(connection)
        asked.append((bool(body[7] & 2), b"\x11" in body[10:16]))  # clean start; a session expiry among the properties
        connection.sendall(CONNACK)
        packet(connection)

    device = link(fake(note_and_drop).url)
    for _ in range(3):
        until(device, Disconnected)
    assert asked[:3] == [(True, False)] * 3


def test_messages_that_come_before_the_subscription_is_confirmed_are_handed_over_after_connected(fake, link):
    def eager(connection: socket.socket) -> None:
        packet(connection)
        connection.sendall(CONNACK + publish(b"to/device", b"early"))
        _, body = packet(connection)
        time.sleep(0.2)
        connection.sendall(b"\x90\x04" + body[:2] + b"\x00\x01")
        assert packet(connection)[0] == 0x40  # PUBACK: the early message was acknowledged
        connection.sendall(publish(b"to/device", b"acknowledged", mid=2))
        while connection.recv(4096):
            pass

    device = link(fake(eager).url)
    assert isinstance(device.receive(5), Connected)
    early = device.receive(5)
    assert isinstance(early, Received)
    assert early.payload == b"early"
    device.acknowledge(early)
    assert until(device, Received).payload == b"acknowledged"


def test_messages_that_came_in_one_tls_record_are_all_heard_at_once(fake, tmp_path):
    """What TLS has decrypted already makes no socket readable: looking at that alone would take a second for each."""
    issue(tmp_path, "broker")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "broker.pem", tmp_path / "broker.key")

    def script(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secure:
            say(b"".join(publish(b"to/device", b"%d" % mid, mid) for mid in range(1, 41)))(secure)

    url = fake(script).url.replace("mqtt:", "mqtts:")
    link = Link(Address.parse(url, ca_file=str(tmp_path / "broker.pem")), "device", subscriptions=["to/device"]).open()
    try:
        link.wait_connected(60)
        assert [until(link, Received).payload for _ in range(40)] == [b"%d" % mid for mid in range(1, 41)]
    finally:
        link.close(timeout_s=0.5)


def test_a_broker_that_ends_tls_and_keeps_the_connection_is_left(fake, tmp_path):
    """Half of a connection is none: what is handed over would wait for the keepalive, twice over."""
    issue(tmp_path, "broker")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "broker.pem", tmp_path / "broker.key")

    def half(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secure:
            accept(secure)
            secure.settimeout(0.0)
            with contextlib.suppress(OSError):
                secure.unwrap()  # says goodbye, and waits for no answer
            secure.setblocking(True)
            while os.read(secure.fileno(), 4096):  # until the other side goes
                pass

    def whole(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secure:
            good(secure)

    url = fake(half, whole).url.replace("mqtt:", "mqtts:")
    link = Link(Address.parse(url, ca_file=str(tmp_path / "broker.pem")), "device", subscriptions=["to/device"]).open()
    try:
        until(link, Connected)
        until(link, Disconnected, 10.0)
        until(link, Connected)
        assert until(link, Received).payload == b"hello"
    finally:
        link.close(timeout_s=0.5)


def test_nothing_is_acknowledged_before_its_owner_says_so(fake, link):
    acknowledged: list[float] = []

    def watch(connection: socket.socket) -> None:
        accept(connection)
        connection.sendall(publish(b"to/device", b"x"))
        while True:
            if packet(connection)[0] == 0x40:
                acknowledged.append(time.monotonic())

    device = link(fake(watch).url)
    received = until(device, Received)
    time.sleep(0.4)
    assert not acknowledged
    device.acknowledge(received)
    deadline = time.monotonic() + 60
    while not acknowledged and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(acknowledged) == 1


# ── terms of the broker, and brokers that do nothing ────────────────────────────────────────────────────────────────


def test_no_more_is_sent_unacknowledged_than_the_broker_takes(fake, link):
    """Receive Maximum 10 in its CONNACK; we sent 20, and such a broker ends the connection for it."""
    got: list[int] = []

    def ten(connection: socket.socket) -> None:
        accept(connection, bytes.fromhex("2006000003") + b"\x21\x00\x0a")
        connection.settimeout(0.7)
        unanswered: list[bytes] = []
        with contextlib.suppress(TimeoutError):
            while True:
                unanswered.append(packet_id(packet(connection)[1]))
        got.append(len(unanswered))
        connection.settimeout(10)
        while len(got) < 30:
            connection.sendall(b"\x40\x02" + (unanswered.pop(0) if unanswered else packet_id(packet(connection)[1])))
            got.append(0)
        time.sleep(5)

    device = link(fake(ten).url)
    until(device, Connected)
    for _ in range(29):
        device.publish("t", b"x")
    deadline = time.monotonic() + 60
    while not device.idle and time.monotonic() < deadline:
        time.sleep(0.01)
    assert device.idle
    assert got[0] == 10


@pytest.mark.parametrize(
    ("connack", "said"),
    [
        ("2005000002" + "2400", "expected QoS 1, got QoS 0 only"),
        ("2005000002" + "2500", "expected retained messages, got none"),
        ("2008000005" + "2700000064", "expected packets of 1024 bytes, got at most 100"),
    ],
)
def test_a_broker_that_cannot_carry_us_is_one_line(fake, link, connack, said):
    def unfit(connection: socket.socket) -> None:
        packet(connection)
        connection.sendall(bytes.fromhex(connack))
        time.sleep(0.5)

    assert said in str(until(link(fake(unfit).url), Failed).error)


def test_the_keepalive_is_the_brokers_when_it_names_one(fake, link):
    pinged: list[float] = []

    def every_second(connection: socket.socket) -> None:
        accept(connection, bytes.fromhex("2006000003") + b"\x13\x00\x01")
        while True:
            if packet(connection)[0] == 0xC0:
                pinged.append(time.monotonic())
                connection.sendall(b"\xd0\x00")

    until(link(fake(every_second).url, keepalive_s=600), Connected)
    deadline = time.monotonic() + 60
    while len(pinged) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(pinged) >= 2


def test_a_broker_that_answers_everything_and_delivers_nothing_is_left(fake, link, monkeypatch):
    """Pings are answered, publications acknowledged; only what we listen to does not come."""
    monkeypatch.setattr(connection_rules, "ECHO_S", 0.5)

    def deaf(connection: socket.socket) -> None:
        accept(connection)
        while True:
            first, body = packet(connection)
            connection.sendall(b"\xd0\x00" if first == 0xC0 else b"\x40\x02" + packet_id(body))

    def echoing(connection: socket.socket) -> None:
        accept(connection)
        while True:
            first, body = packet(connection)
            if first & 0xF0 == 0x30:
                connection.sendall(b"\x40\x02" + packet_id(body) + publish(b"to/device", b"here"))

    device = link(fake(deaf, echoing).url, echo_topic="to/device")
    until(device, Connected)
    device.publish("to/device", b"here")
    assert until(device, Disconnected).reason.startswith("nothing came back on to/device")
    until(device, Connected)
    device.publish("to/device", b"here")
    device.acknowledge(until(device, Received))
    assert device.receive(1.5) is None


def test_a_broker_that_acknowledges_nothing_is_left(fake, link, monkeypatch):
    monkeypatch.setattr(connection_rules, "STALL_S", 0.5)
    device = link(fake(say(), good).url)
    until(device, Connected)
    device.publish("t", b"x")
    assert "acknowledged nothing" in until(device, Disconnected).reason
    until(device, Connected)


def test_a_slow_broker_gets_everything_in_order_and_the_connection_stays(fake, link):
    got: list[bytes] = []

    def slow(connection: socket.socket) -> None:
        accept(connection)
        while True:
            time.sleep(0.02)
            _, body = packet(connection)
            got.append(body[-1:])
            connection.sendall(b"\x40\x02" + packet_id(body))

    device = link(fake(slow).url)
    until(device, Connected)
    for n in range(100):
        device.publish("t", bytes([n]))
    deadline = time.monotonic() + 60
    while not device.idle and time.monotonic() < deadline:
        time.sleep(0.01)
    assert got == [bytes([n]) for n in range(100)]
    assert device.receive(0) is None


@pytest.mark.parametrize("first", [0x34, 0x32])
def test_a_message_that_no_broker_may_send_ends_the_connection(fake, link, first):
    """At QoS 2, which nobody asked for, and at QoS 1 with packet id 0, which no acknowledgement may name."""
    mid = 0 if first == 0x32 else 5
    qos2 = say(publish(b"to/device", b"x", mid, first), b"\x62\x02" + struct.pack(">H", mid))
    device = link(fake(qos2, good).url)
    assert "nobody asked for" in until(device, Disconnected).reason
    assert until(device, Received).payload == b"hello"


# ── faults of our own ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_connection_that_cannot_be_begun_is_tried_again(fake, link, monkeypatch):
    """A certificate file that is being written, for one: the network thread died of it without a word."""
    begin, failures = Transport.__init__, iter([UsageError("TLS CA ca.pem", expected="PEM"), ZeroDivisionError("why")])
    url = fake(good).url

    def failing(self: Transport, *given: object, **options: object) -> None:
        error = next(failures, None) if Address.parse(url) in given else None  # not of a link that a test before left
        if error is not None:
            raise error
        begin(self, *given, **options)

    monkeypatch.setattr(Transport, "__init__", failing)
    device = link(url)
    assert until(device, Disconnected).reason == "TLS CA ca.pem, expected PEM"
    assert until(device, Disconnected).reason == "ZeroDivisionError: why"
    until(device, Connected)


def test_a_fault_of_the_link_itself_is_told(fake, link, monkeypatch):
    monkeypatch.setattr(Connection, "due_in_s", lambda self, now: 1 / 0)
    assert "the link broke, got ZeroDivisionError" in str(until(link(fake(good).url), Failed).error)


def test_a_parting_link_stays_until_the_broker_has_read_its_disconnect(fake, link):
    """A reset on the way would have the broker publish the last will of a device that is well."""
    ended: list[str] = []

    def parting(connection: socket.socket) -> None:
        accept(connection)
        while connection.recv(4096)[:1] != b"\xe0":
            pass
        connection.sendall(publish(b"to/device", b"crosses the DISCONNECT"))
        time.sleep(0.1)
        with contextlib.suppress(OSError):
            ended.append("hung up" if connection.recv(4096) == b"" else "still talking")
        connection.close()

    device = link(fake(parting).url)
    until(device, Connected)
    device.close()
    deadline = time.monotonic() + 60.0
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended == ["hung up"]

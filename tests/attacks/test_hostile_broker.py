"""A hostile broker as a peer: device and aggregator speak MQTT to it over real sockets, and it does whatever it likes.

Neither dies, loses or doubles a contribution, or holds more than it asked for; each comes again, ever later, and does
its work once a broker behaves. What bytes can do to a link alone is in `contract/mqtt/test_link_hostile.py`.
"""

from __future__ import annotations

import random
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from aggregator_samples import BUNDLE

from protofleet.aggregator.ingest.broken_message import digest_of
from protofleet.contract.errors import WireError
from protofleet.contract.mqtt import connection as connection_rules
from protofleet.contract.mqtt.connection import Connection
from protofleet.contract.mqtt.link import Address, Connected, Disconnected, Link, Received
from protofleet.contract.mqtt.link_actions import Dial, Limits, Subscribe, Tell, Terms
from protofleet.contract.mqtt.transport import Transport
from protofleet.contract.wire import topics
from protofleet.contract.wire.chunks import Assembler
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.global_state import GlobalCollector
from protofleet.contract.wire.messages import Announcement, Chunk, ClassRows, Contribution, GlobalPart, Receipt, Status
from protofleet.edge_client.rounds.round_follower import largest_message_bytes
from tests.attacks.fleet_model import FLEET, MANIFEST, DeviceProcess, ServerProcess, statistic_of
from tests.attacks.hostile_broker import HOSTILE, FakeBroker, Route, accept, publish, say

RUN = b"run1"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeBroker]]:
    """Brokers by their scripts; between connections only moments pass."""
    monkeypatch.setattr(connection_rules, "RETRY_S", 0.02)
    made: list[FakeBroker] = []

    def make(*scripts: Callable[..., None]) -> FakeBroker:
        made.append(FakeBroker(*scripts))
        return made[-1]

    yield make
    for broker in made:
        broker.close()


def until(link: Link, kind: type, timeout_s: float = 60.0) -> object:
    deadline = time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0:
        event = link.receive(left)
        if isinstance(event, kind):
            return event
    raise AssertionError(f"no {kind.__name__} within {timeout_s} s")


# ── what a link holds for a broker ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a packet that says it has 256 MB", "a packet of 268,435,455 bytes, at most 5,256 were asked for"),
        ("a CONNACK that says it has 256 MB", "a packet of 268,435,455 bytes"),
        ("messages beyond any window", "which nobody asked for"),
        ("a topic that nobody subscribed to", "a message on 'x', which nobody asked for"),
        ("a topic of another fleet", "a message on 'pf/v2/other/up/d', which nobody asked for"),
        ("no topic, but an alias", "which nobody asked for"),
    ],
)
def test_what_nobody_asked_for_ends_the_connection_and_is_not_held(fake, name: str, said: str) -> None:
    """paho would collect 256 MB, the owner's queue any number of messages, and a topic of no fleet ended the server."""
    link = Link(
        Address.parse(fake(HOSTILE[name], say(publish(b"a", b"hello"))).url),
        "device",
        subscriptions=["a"],
        receive_maximum=8,
        largest_bytes=5_000,
    ).open()
    try:
        assert said in until(link, Disconnected).reason  # type: ignore[attr-defined]
        until(link, Connected)
        assert until(link, Received).payload == b"hello"  # type: ignore[attr-defined]
    finally:
        link.close(timeout_s=0.5)


def test_a_broker_without_keepalive_keeps_nobody_busy(fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Server Keep Alive 0 is allowed; our thread looked at its socket as fast as it could."""
    turns = []
    step = Transport.step
    monkeypatch.setattr(Transport, "step", lambda self, wake, timeout_s: (turns.append(1), step(self, wake, timeout_s)))

    def quiet(connection) -> None:
        accept(connection, bytes.fromhex("2006000003") + b"\x13\x00\x00")
        time.sleep(0.6)

    link = Link(Address.parse(fake(quiet).url), "device", subscriptions=["a"]).open()
    try:
        until(link, Connected)
        time.sleep(0.3)
        assert len(turns) < 50
    finally:
        link.close(timeout_s=0.5)


def core(limits: Limits) -> Connection:
    return Connection(limits, random.Random(0))


def obey(machine: Connection, now: float) -> list[object]:
    return list(iter(lambda: machine.advance(now), None))


def test_an_owner_that_takes_nothing_is_told_no_more_than_a_window_however_often_the_broker_ends() -> None:
    """Each connection brought it another window: a broker that ends them filled the memory of a device that trains."""
    machine, now = core(Limits("mqtt://b", "d", ("a",), receive_maximum=10)), 0.0
    told: list[Received] = []
    for _ in range(50):
        now += 400.0
        done = obey(machine, now)
        if not any(isinstance(action, Dial) for action in done):
            continue
        machine.accepted(Terms(), now)
        assert Subscribe(("a",)) in obey(machine, now)
        machine.subscribed([None], now)
        for mid in range(1, 9):
            machine.received("a", b"x", qos=1, retained=False, mid=mid, now=now)
        machine.ended("gone", now)
        events = [action.event for action in obey(machine, now) if isinstance(action, Tell)]
        told += [event for event in events if isinstance(event, Received)]
    assert len(told) == 16  # of two connections
    assert machine.due_in_s(now) == connection_rules.BACKLOG_S
    for event in told:
        machine.taken(event)
    assert any(isinstance(action, Dial) for action in obey(machine, now))


def test_a_window_is_counted_in_bytes_too_and_some_more_messages_are_borne_with() -> None:
    for length, borne in ((1, 40), (1000, 10)):
        machine = core(Limits("mqtt://b", "d", ("a",), receive_maximum=10, packet_bytes=1000))
        obey(machine, 0.0)
        machine.accepted(Terms(), 0.0)
        machine.subscribed([None], 0.0)
        for mid in range(1, borne + 1):
            machine.received("a", bytes(length), qos=1, retained=False, mid=mid, now=0.0)
        assert machine.phase == "up"
        machine.received("a", bytes(length), qos=1, retained=False, mid=borne + 1, now=0.0)
        assert machine.phase == "waiting"


def test_a_state_of_ever_more_parts_takes_no_more_than_its_capacity() -> None:

    collector, refused = GlobalCollector(1 << 20), 0
    tracemalloc.start()
    for part in range(4_000):
        rows = ClassRows(np.zeros(1, np.uint16), np.ones((1, 4)))
        try:
            collector.add(GlobalPart(RUN, 1, 1, part, 65_535, "head", rows))
        except WireError:
            refused += 1
    held_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert refused > 2_500
    assert held_bytes < 2 << 20


# ── a device, and an aggregator ─────────────────────────────────────────────────────────────────────────────────────

FEW = ("a topic that nobody subscribed to", "messages beyond any window", "the same message again and again")


class _Aggregator:
    """What a good broker tells a device: a round, and once, after the second contribution, the receipt."""

    def __init__(self, device: str) -> None:
        self.came: list[bytes] = []
        self._device, self._chunks = device, Assembler()

    def __call__(self, topic: str, payload: bytes) -> list[tuple[str, bytes]]:
        if topic == topics.status(FLEET, self._device):
            told = Announcement(RUN, 1, "open", "fedproto", BUNDLE, encoding="f64", limit_bytes=1024)
            return [(topics.round_(FLEET), encode(told))]
        message = decode(payload)
        whole = self._chunks.add(self._device, message) if isinstance(message, Chunk) else payload
        if topic != topics.up(FLEET, self._device) or whole is None:
            return []
        self.came.append(whole)
        return [
            (
                topics.down(FLEET, self._device),
                encode(Receipt(RUN, 1, "fedproto", "committed", digest=digest_of(whole))),
            )
        ]


def _device_among(names: tuple[str, ...], fake: Callable[..., FakeBroker], folder: Path) -> None:
    aggregator = _Aggregator("a")
    broker = fake(*(HOSTILE[name] for name in names), Route(aggregator))
    device = DeviceProcess("a", folder, None, time, b"instance", url=broker.url)
    largest_message_bytes(MANIFEST)
    device.link.open()
    try:
        deadline = time.monotonic() + 60 + 10 * len(names)
        while device.journal.outcome((RUN, 1, "fedproto")) is None:
            assert time.monotonic() < deadline, f"after {broker.connections} connections"
            device.step()
            time.sleep(0.01)
    finally:
        device.link.close(0.5)
        device.kill()
    assert broker.connections == len(names) + 1
    assert len(set(aggregator.came)) == 1
    (sent,) = {encode(decode(payload), "f64") for payload in aggregator.came}
    made = Contribution.of(statistic_of("a", (RUN, 1, "fedproto")), run=RUN, round=1, method="fedproto", bundle=BUNDLE)
    assert sent == encode(made, "f64")


def _aggregator_among(names: tuple[str, ...], fake: Callable[..., FakeBroker], folder: Path) -> None:
    receipts: list[str] = []

    def devices(topic: str, payload: bytes) -> list[tuple[str, bytes]]:
        """Two devices that are born with the seat, contribute twice when they hear of the round, and listen."""
        message = decode(payload)
        if topic == topics.status(FLEET, topics.AGGREGATOR):
            return [(topics.status(FLEET, name), encode(Status(True, bytes(8), 1))) for name in "ab"]
        if isinstance(message, Receipt):
            receipts.append(message.status)
        if not (isinstance(message, Announcement) and message.phase == "open" and message.round == 1):
            return []
        key = (message.run, 1, message.method)
        made = [
            (n, Contribution.of(statistic_of(n, key), run=key[0], round=1, method=key[2], bundle=BUNDLE))
            for n in "aabb"
        ]
        return [(topics.up(FLEET, name), encode(each, "f64")) for name, each in made]

    broker = fake(*(HOSTILE[name] for name in names), Route(devices))
    server = ServerProcess(folder / "store", None, time, url=broker.url)
    server.link.open()
    try:
        deadline = time.monotonic() + 60 + 10 * len(names)
        while not (server.core.state.version and len(receipts) >= 4):
            assert time.monotonic() < deadline, f"after {broker.connections} connections"
            server.step()
            assert server.over is None
        assert broker.connections == len(names) + 1
        record = server.store.record(1)
        assert (record.closed, sorted(record.uplink_bytes)) == (True, ["a", "b"])
        assert sorted(receipts)[:2] == ["committed", "committed"]
        assert set(receipts) <= {"committed", "duplicate"}
        assert receipts.count("committed") == 2
    finally:
        server.link.close(0.5)
        server.kill()


def test_a_device_among_hostile_brokers_sends_its_contribution_once(fake, tmp_path: Path) -> None:
    _device_among(FEW, fake, tmp_path)


def test_an_aggregator_among_hostile_brokers_counts_each_contribution_once(fake, tmp_path: Path) -> None:
    _aggregator_among(FEW, fake, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("among", [_device_among, _aggregator_among])
def test_whatever_a_broker_does(among: Callable[..., None], fake, tmp_path: Path) -> None:
    """All of it, twice, and one after another in both orders; threads and memory are given back."""
    threads = threading.active_count()
    among((*HOSTILE, *reversed(HOSTILE)), fake, tmp_path)
    assert threading.active_count() <= threads + 2

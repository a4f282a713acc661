"""The MQTT link against real brokers: each of paho's measured traps, and that none of them catches us."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import paho.mqtt.client
import paho.mqtt.publish
import pytest
from brokers import BROKERS, Mosquitto, Proxy, TestBroker, make_broker, require_mosquitto

from protofleet.contract.errors import LinkError
from protofleet.contract.mqtt.link import Address, Connected, Disconnected, Event, Failed, Link, Received

ROOT = Path(__file__).parents[3]


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TestBroker]:
    found = make_broker(request.param, tmp_path)
    found.start()
    yield found
    found.stop()


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[Callable[..., Mosquitto]]:
    require_mosquitto()
    started: list[Mosquitto] = []

    def start(extra: str = "") -> Mosquitto:
        stay = "user root\n" if os.geteuid() == 0 else ""  # another user could not read the files that `extra` names
        started.append(Mosquitto(tmp_path / "mosquitto", stay + extra))
        started[-1].start()
        return started[-1]

    yield start
    for one in started:
        one.stop()


@pytest.fixture
def links() -> Iterator[Callable[..., Link]]:
    """Opens links, and closes them at the end."""
    opened: list[Link] = []

    def open_link(url: str, name: str, *subscriptions: str, **options: object) -> Link:
        opened.append(Link(Address.parse(url), name, subscriptions=subscriptions or [f"to/{name}"], **options).open())
        return opened[-1]

    yield open_link
    for link in opened:
        link.close(timeout_s=1.0)


def until(link: Link, kind: type[Event], timeout_s: float = 60.0, *, acknowledge: bool = True) -> Event:
    """The next event of that kind; messages on the way are acknowledged and dropped."""
    deadline = time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0:
        event = link.receive(left)
        if isinstance(event, kind):
            return event
        if isinstance(event, Received) and acknowledge:
            link.acknowledge(event)
    raise AssertionError(f"no {kind.__name__} within {timeout_s} s")


def take(link: Link, count: int, timeout_s: float = 60.0) -> list[bytes]:
    """That many payloads, acknowledged."""
    got = []
    while len(got) < count:
        received = until(link, Received, timeout_s)
        link.acknowledge(received)
        got.append(received.payload)
    return got


def settle(link: Link) -> None:
    """Wait until the broker has acknowledged everything."""
    deadline = time.monotonic() + 60
    while not link.idle:
        assert time.monotonic() < deadline, "the broker acknowledges nothing"
        time.sleep(0.01)


# ── what it is for ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_messages_go_both_ways_without_a_deprecated_callback(broker, links):
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        one, two = links(broker.url, "one", "to/one"), links(broker.url, "two", "to/two")
        one.wait_connected(60)
        two.wait_connected(60)
    assert one.publish("to/two", b"there")
    assert take(two, 1) == [b"there"]
    assert two.publish("to/one", b"back")
    assert take(one, 1) == [b"back"]


def test_publishing_and_receiving_at_once_never_deadlocks(broker, links):
    """The echo publishes while its own receive window and its peer's are full."""
    one, two = links(broker.url, "one", "to/one"), links(broker.url, "two", "to/two")
    one.wait_connected(60)
    two.wait_connected(60)
    sent = [bytes([n % 256]) * 2000 for n in range(300)]
    for payload in sent:
        assert one.publish("to/two", payload)
    echoed: list[bytes] = []
    deadline = time.monotonic() + 60
    while len(echoed) < len(sent) and time.monotonic() < deadline:
        event = two.receive(0.001)
        if isinstance(event, Received):
            two.publish("to/one", event.payload)
            two.acknowledge(event)
        back = one.receive(0.001)
        if isinstance(back, Received):
            echoed.append(back.payload)
            one.acknowledge(back)
    assert echoed == sent


def test_closing_sends_what_was_handed_over_first(broker, links):
    listener, sender = links(broker.url, "listener", "to/all"), links(broker.url, "sender")
    listener.wait_connected(60)
    sender.wait_connected(60)
    for n in range(200):
        sender.publish("to/all", str(n).encode())
    sender.close()
    assert take(listener, 200) == [str(n).encode() for n in range(200)]


def test_a_retained_message_says_that_it_is(broker, links):
    one = links(broker.url, "one")
    one.wait_connected(60)
    one.publish("to/late", b"kept", retain=True)
    settle(one)
    late = links(broker.url, "late", "to/late")
    received = until(late, Received)
    assert (received.payload, received.retained) == (b"kept", True)


# ── no sessions ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_waits_at_the_broker_for_a_link_that_is_gone(broker, links):
    """A finished aggregator would leave a queue that grows for ever; receipts and retained messages make up for it."""
    sender = links(broker.url, "sender")
    sender.wait_connected(60)
    device = links(broker.url, "device", "to/device")
    device.wait_connected(60)
    sender.publish("to/device", b"unacknowledged")
    assert until(device, Received, acknowledge=False).payload == b"unacknowledged"
    device.close()
    sender.publish("to/device", b"while away")
    settle(sender)
    again = links(broker.url, "device", "to/device")
    again.wait_connected(60)
    assert again.receive(0.7) is None


def test_what_is_retained_is_told_on_every_connection(broker, links):
    """rumqttd tells it of new subscriptions only: a session that is taken up again would never hear of it."""
    sender = links(broker.url, "sender")
    sender.wait_connected(60)
    sender.publish("to/device", b"retained", retain=True)
    settle(sender)
    for _ in range(2):
        device = links(broker.url, "device", "to/device")
        assert take(device, 1) == [b"retained"]
        device.close()


def test_no_more_than_the_receive_maximum_is_delivered_unacknowledged(mosquitto, links):
    url = mosquitto().url
    sender, device = links(url, "sender"), links(url, "device", "to/device", receive_maximum=5)
    sender.wait_connected(60)
    device.wait_connected(60)
    for n in range(12):
        sender.publish("to/device", bytes([n]))
    held = [until(device, Received, acknowledge=False) for _ in range(5)]
    assert device.receive(0.7) is None
    for received in held:
        device.acknowledge(received)
    assert take(device, 7) == [bytes([n]) for n in range(5, 12)]


# ── broken connections ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_broker_that_is_killed_and_comes_back_is_found_again(broker, links):
    device = links(broker.url, "device", "to/device")
    device.wait_connected(60)
    broker.kill()
    assert until(device, Disconnected).retry_s > 0
    assert not device.publish("to/device", b"lost")  # nothing is kept in memory: that is the outbox's work
    broker.start()
    until(device, Connected)
    assert device.publish("to/device", b"after")
    assert take(device, 1) == [b"after"]


def test_publishing_before_any_connection_keeps_nothing(links):
    link = links("mqtt://127.0.0.1:1", "nobody")
    assert not link.publish("to/x", b"x")
    assert link.idle


def test_an_acknowledgement_for_a_connection_that_is_gone_is_of_no_effect(broker, links):
    device = links(broker.url, "device", "to/device")
    device.wait_connected(60)
    device.publish("to/device", b"x")
    received = until(device, Received, acknowledge=False)
    broker.kill()
    until(device, Disconnected)
    broker.start()
    until(device, Connected)
    device.acknowledge(received)
    device.publish("to/device", b"y")
    while take(device, 1) != [b"y"]:  # a broker that kept its session delivers the first one again before
        pass


def test_the_death_of_a_killed_process_is_published(broker, links):
    watcher = links(broker.url, "watcher", "status/device")
    watcher.wait_connected(60)
    code = (
        "import sys, time\n"
        "from protofleet.contract.mqtt.link import Address, Link\n"
        f"address, will = Address.parse({broker.url!r}), ('status/device', b'dead')\n"
        "link = Link(address, 'device', subscriptions=['x'], will=will).open()\n"
        "link.wait_connected(60); print('up', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "up\n"
        os.kill(process.pid, signal.SIGKILL)
        assert take(watcher, 1) == [b"dead"]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_clean_end_publishes_no_death(broker, links):
    watcher = links(broker.url, "watcher", "status/device")
    watcher.wait_connected(60)
    device = links(broker.url, "device", will=("status/device", b"dead"))
    device.wait_connected(60)
    device.close()
    assert watcher.receive(0.7) is None


def test_each_connection_has_a_will_of_its_own_also_while_its_owner_does_not_look(broker, links):
    watcher = links(broker.url, "watcher", "status/device")
    watcher.wait_connected(60)
    numbers, proxy = itertools.count(1), Proxy(broker.url, cut_after=[4, 4])
    try:
        links(proxy.url, "device", will=lambda: ("status/device", b"%d" % next(numbers)))
        assert take(watcher, 2) == [b"1", b"2"]
    finally:
        proxy.close()


@pytest.mark.parametrize("after", [1, 2, 3, 4, 5, 6])
def test_after_a_cut_at_any_point_what_is_retained_is_heard(broker, links, after):
    """The broker knew the subscription when the connection was cut, and rumqttd told a kept session no more."""
    sender = links(broker.url, "sender")
    sender.wait_connected(60)
    sender.publish("to/device", b"retained", retain=True)
    settle(sender)
    proxy = Proxy(broker.url, cut_after=[after])
    try:
        device = links(proxy.url, "device", "to/device", "status", will=("status", b"dead"))
        for _ in range(10):  # until enough has gone to and fro for the cut
            device.publish("elsewhere", b"x")
            if isinstance(device.receive(0.1), Disconnected):
                break
        until(device, Connected)
        assert proxy.connections == 2
        while take(device, 1) != [b"retained"]:
            pass
        device.publish("to/device", b"from it")
        while take(device, 1) != [b"from it"]:
            pass
    finally:
        proxy.close()


def test_what_was_published_into_a_dead_connection_is_heard_on_the_next(broker, links):
    """The broker has sent it, nobody got it, and the broker has not noticed the end yet when the link comes again."""
    sender = links(broker.url, "sender")
    sender.wait_connected(60)
    proxy = Proxy(broker.url)
    try:
        device = links(proxy.url, "device", "to/device")
        device.wait_connected(60)
        for n in range(3):
            proxy.swallows = True
            sender.publish("to/device", b"%d" % n, retain=True)
            settle(sender)
            time.sleep(0.1)
            proxy.cut()
            proxy.swallows = False
            until(device, Connected)
            while take(device, 1) != [b"%d" % n]:
                pass
    finally:
        proxy.close()


# ── what no window holds back ───────────────────────────────────────────────────────────────────────────────────────


def at_qos_0(url: str, messages: list[tuple[str, bytes, bool]]) -> None:
    """Publish (topic, payload, retain) at QoS 0, as our own link cannot."""
    made = [{"topic": topic, "payload": payload, "qos": 0, "retain": retain} for topic, payload, retain in messages]
    host, port = url.removeprefix("mqtt://").split(":")
    paho.mqtt.publish.multiple(made, hostname=host, port=int(port), client_id="loose", protocol=paho.mqtt.client.MQTTv5)


def test_a_message_at_qos_0_is_heard_and_not_acknowledged(broker, links):
    """A PUBACK of packet id 0 makes Mosquitto end the connection, again at every reconnection while it is retained."""
    at_qos_0(broker.url, [("to/device", b"loose", True)])
    device = links(broker.url, "device", "to/device")
    assert take(device, 1) == [b"loose"]
    device.publish("to/device", b"next")
    assert take(device, 1) == [b"next"]
    assert device.receive(0.5) is None  # no Disconnected, above all


def test_a_flood_at_qos_0_is_bounded_and_what_is_at_qos_1_passes(mosquitto, links):
    """No window of MQTT holds QoS 0 back: 3,000 messages of 60 KB took 172 MB before the owner looked."""
    url = mosquitto().url
    device, sender = links(url, "device", "to/device"), links(url, "sender")
    device.wait_connected(60)
    sender.wait_connected(60)
    at_qos_0(url, [("to/device", bytes(20_000), False)] * 500)
    sender.publish("to/device", b"honest")
    time.sleep(1.0)
    loose = 0
    while (received := until(device, Received)).payload != b"honest":
        device.acknowledge(received)
        loose += 1
    assert 0 < loose * 20_000 <= 1 << 20
    assert device.dropped == 500 - loose
    device.acknowledge(received)
    device.publish("to/device", b"works")
    assert take(device, 1) == [b"works"]
    at_qos_0(url, [("to/device", bytes(20_000), False)])  # what was taken has made room
    assert take(device, 1) == [bytes(20_000)]


# ── refusals ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_payload_above_the_brokers_limit_is_refused_here_and_blocks_nothing_behind_it(mosquitto, links):
    url = mosquitto("max_packet_size 3000\n").url
    device = links(url, "device", "to/device")
    connected = device.wait_connected(60)
    assert connected.limit_bytes < 3000
    with pytest.raises(
        LinkError, match=rf"message to to/device, expected at most {connected.limit_bytes} bytes, got 5000"
    ):
        device.publish("to/device", bytes(5000))
    assert device.publish("to/device", bytes(connected.limit_bytes))
    assert device.publish("to/device", b"next")
    assert take(device, 2) == [bytes(connected.limit_bytes), b"next"]


def test_a_payload_of_no_use_does_not_reach_us_and_blocks_nothing_behind_it(mosquitto, links):
    """More of them than Mosquitto keeps in flight: a window full of the largest would be gigabytes."""
    url = mosquitto().url
    device, other = links(url, "device", "t", largest_bytes=3000), links(url, "other")
    until(device, Connected)
    until(other, Connected)
    for _ in range(30):
        other.publish("t", bytes(5000))
    other.publish("t", bytes(3000))
    assert take(device, 1) == [bytes(3000)]


def test_a_wrong_password_ends_the_link_with_one_clear_line(mosquitto, links, tmp_path):
    passwords = tmp_path / "passwords"
    passwords.touch(mode=0o644)
    subprocess.run(["mosquitto_passwd", "-b", passwords, "device", "right"], check=True)
    passwords.chmod(0o644)
    url = mosquitto(f"password_file {passwords}\nallow_anonymous false\n").url
    host = url.removeprefix("mqtt://")
    links(f"mqtt://device:right@{host}", "device").wait_connected(60)
    for user in ("device:wrong@", ""):
        link = links(f"mqtt://{user}{host}", "other")
        failed = until(link, Failed)
        assert "refused other" in str(failed.error)
        assert "ot authori" in str(failed.error)
        assert "wrong" not in str(failed.error)
        with pytest.raises(LinkError, match="refused another"):
            links(f"mqtt://{user}{host}", "another").wait_connected(60)


ACL = "user device\ntopic readwrite to/device\ntopic write up/device\n"


def test_a_publication_that_the_acl_denies_is_told_and_the_link_goes_on(mosquitto, links, tmp_path):
    (tmp_path / "acl").write_text(ACL)
    (tmp_path / "acl").chmod(0o644)
    url = mosquitto(f"acl_file {tmp_path}/acl\n").url.replace("mqtt://", "mqtt://device@")
    link = links(url, "device", "to/device")
    link.wait_connected(60)
    link.publish("up/somebody-else", b"forged")
    assert "publish refused" in until(link, Disconnected).reason
    until(link, Connected)
    link.publish("to/device", b"mine")
    assert take(link, 1) == [b"mine"]


def test_what_the_acl_denies_three_times_ends_the_link_in_one_line(mosquitto, links, tmp_path):
    """A certificate or user that does not fit the id: every birth is denied, and trying again cannot help."""
    (tmp_path / "acl").write_text(ACL)
    (tmp_path / "acl").chmod(0o644)
    url = mosquitto(f"acl_file {tmp_path}/acl\n").url.replace("mqtt://", "mqtt://device@")
    link = links(url, "device", "to/device")
    for _ in range(3):
        until(link, Connected)
        link.publish("up/somebody-else", b"forged")
    error = str(until(link, Failed).error)
    assert "denies device what it needs, 3 times now, got publish refused on up/somebody-else: Not authorized" in error
    assert link.receive(1.0) is None


# ── what it holds ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_closing_gives_every_descriptor_back(broker):
    kept = []  # so that the garbage collector gives none back instead

    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def open_and_close(url: str) -> None:
        link = Link(Address.parse(url), "device", subscriptions=["to/device"]).open()
        if url == broker.url:
            link.wait_connected(60)
        link.close()
        kept.append(link)

    open_and_close(broker.url)
    before = descriptors()
    for _ in range(25):
        open_and_close(broker.url)
        open_and_close("mqtt://127.0.0.1:1")
        kept.append(Link(Address.parse(broker.url), "never opened", subscriptions=["a"]))
        kept[-1].close()
    assert descriptors() <= before


def test_no_broker_is_said_at_once_and_an_error_within_the_patience_that_says_what_to_do(links, caplog, monkeypatch):
    monkeypatch.setattr("protofleet.contract.mqtt.link._SOON_S", 0.0)
    caplog.set_level(logging.INFO, logger="protofleet")
    began = time.monotonic()
    with pytest.raises(
        LinkError, match=r"no broker at mqtt://127.0.0.1:1 within 1 s, expected an MQTT 5 broker, got .*refused"
    ):
        links("mqtt://127.0.0.1:1", "nobody").wait_connected(1.0)
    assert time.monotonic() - began < 20  # a busy machine is slow, but does not wait for ever
    (line,) = [record.getMessage() for record in caplog.records if record.name.endswith("mqtt.link")]
    assert line.startswith("no broker at mqtt://127.0.0.1:1 yet (")

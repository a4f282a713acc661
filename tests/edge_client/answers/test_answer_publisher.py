"""edge_client/answers/answer_publisher.py: each line arrives, in order, though the broker comes and goes; only so many
wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from brokers import BROKERS, Mosquitto, Proxy, TestBroker, free_port, make_broker, require_mosquitto

from protofleet.contract.errors import LinkError, UsageError
from protofleet.contract.mqtt.link import Address, Link, Received
from protofleet.edge_client.answers.answer_publisher import LinePublisher, Target

TOPIC = "kitchen/answers"


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TestBroker]:
    found = make_broker(request.param, tmp_path)
    found.start()
    yield found
    found.stop()


class Listener:
    """Hears a topic."""

    def __init__(self, url: str) -> None:
        self.lines: list[bytes] = []
        self._link = Link(Address.parse(url), "listener", subscriptions=[TOPIC, "pf/#"]).open()
        self._link.wait_connected(60)

    def hear(self, until: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not until():
            assert time.monotonic() < deadline, self.lines
            event = self._link.receive(0.1)
            if isinstance(event, Received):
                assert event.topic == TOPIC
                self.lines.append(event.payload)
                self._link.acknowledge(event)

    def close(self) -> None:
        self._link.close()


def lines(count: int, start: int = 0) -> list[bytes]:
    return [b'{"n": %d}' % number for number in range(start, start + count)]


def test_lines_arrive_in_order_and_closing_waits_for_the_last(broker: TestBroker, said: list[str]) -> None:
    listener = Listener(broker.url)
    publisher = LinePublisher(Target.parse(f"{broker.url}/{TOPIC}"))
    for line in lines(300):  # more than are on their way at once
        publisher.put(line)
    assert publisher.close(30) == 0
    listener.hear(lambda: len(listener.lines) == 300)
    assert listener.lines == lines(300)
    assert said == [f"publishing on {TOPIC} at {broker.url}"]
    assert publisher.dropped == 0
    listener.close()


def test_what_a_lost_connection_leaves_unanswered_goes_again(broker: TestBroker) -> None:
    """Cut again and again in the middle: nothing is missing, and what comes twice comes in the same order."""
    listener, proxy = Listener(broker.url), Proxy(broker.url)
    publisher = LinePublisher(Target.parse(f"{proxy.url}/{TOPIC}"))
    for start in range(0, 200, 50):
        for line in lines(50, start):
            publisher.put(line)
        listener.hear(lambda some=lines(10, start): some[-1] in listener.lines)  # type: ignore[misc]
        if start < 150:
            proxy.cut()
    assert publisher.close(30) == 0
    listener.hear(lambda: listener.lines[-1:] == lines(1, 199))
    assert proxy.connections == 4
    assert list(dict.fromkeys(listener.lines)) == lines(200)
    listener.close()
    proxy.close()


def test_what_has_no_answer_yet_is_counted_as_left(broker: TestBroker, said: list[str]) -> None:
    proxy = Proxy(broker.url)
    publisher = LinePublisher(Target.parse(f"{proxy.url}/{TOPIC}"))
    publisher.put(b"{}")
    while publisher._left() or not said:
        time.sleep(0.01)
    proxy.swallows = True
    publisher.put(b"{}")
    assert publisher.close(0.1) == 1
    proxy.close()


def test_without_a_broker_the_newest_wait_and_the_rest_are_counted(tmp_path: Path, said: list[str]) -> None:
    broker = make_broker("mosquitto", tmp_path)
    publisher = LinePublisher(Target.parse(f"{broker.url}/{TOPIC}"), most=100)
    for line in lines(130):
        publisher.put(line)
    assert publisher.dropped == 30
    assert said.count(f"100 answers wait for {TOPIC} at {broker.url}: the oldest are dropped") == 1
    broker.start()
    listener = Listener(broker.url)
    assert publisher.close(30) == 0
    listener.hear(lambda: len(listener.lines) == 100)
    assert listener.lines == lines(100, 30)
    assert any("answers wait" in line and "no connection" in line for line in said)
    listener.close()
    broker.stop()


def test_a_line_that_the_broker_does_not_take_is_dropped_and_told_and_the_next_goes(
    tmp_path: Path, said: list[str]
) -> None:
    require_mosquitto()
    broker = Mosquitto(tmp_path / "b", "max_packet_size 3000\n")
    broker.start()
    listener = Listener(broker.url)
    publisher = LinePublisher(Target.parse(f"{broker.url}/{TOPIC}"))
    for line in (b"1", b"2" * 4000, b"3"):
        publisher.put(line)
    assert publisher.close(30) == 0
    listener.hear(lambda: listener.lines == [b"1", b"3"])
    assert publisher.dropped == 1
    assert any(line.startswith(f"an answer is dropped: message to {TOPIC}, expected at most") for line in said)
    listener.close()
    broker.stop()


def test_what_is_left_is_told(tmp_path: Path) -> None:
    publisher = LinePublisher(Target.parse(f"mqtt://127.0.0.1:{free_port()}/{TOPIC}"))
    publisher.put(b"{}")
    began_s = time.monotonic()
    assert publisher.close(0.2) == 1
    assert time.monotonic() - began_s < 10


def test_whom_the_broker_refuses_for_good_is_told_at_the_next_line(tmp_path: Path, said: list[str]) -> None:
    require_mosquitto()
    broker = Mosquitto(tmp_path / "b", "allow_anonymous false\n")
    broker.start()
    publisher = LinePublisher(Target.parse(f"{broker.url}/{TOPIC}"))
    while not said:
        time.sleep(0.01)
    with pytest.raises(LinkError, match=r"refused pf-answers-.*Not authorized"):
        publisher.put(b"{}")
    assert publisher.close(30) == 0
    broker.stop()


def test_a_target_is_a_broker_and_a_topic() -> None:
    found = Target.parse("mqtt://me:secret@broker.example:1884/kitchen/What%3F%20is%20it")
    assert (found.topic, found.address.host, found.address.port) == ("kitchen/What? is it", "broker.example", 1884)
    assert (found.address.user, found.address.password) == ("me", "secret")
    assert "secret" not in str(found)


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("mqtt://h", r"--publish, expected mqtt\[s\]://BROKER/TOPIC"),
        ("mqtt://h/", r"--publish, expected mqtt\[s\]://BROKER/TOPIC"),
        (
            "http://h/t",
            r"--publish, expected mqtt\[s\]://BROKER/TOPIC, with .*, got 10 characters that begin with http://",
        ),
        ("h/t", "--publish, expected"),
        ("mqtt://h:x/t", "broker, expected mqtt://"),
        ("mqtt://[h/t", "broker, expected mqtt://"),
        ("mqtt://h/a/+/b", r"expected a topic without \+ and #"),
        ("mqtt://h/a%23", r"expected a topic without \+ and #"),
        ("mqtt://h/a#b", "with %3F, %23 and %40"),
        ("mqtt://h/a?b", "with %3F, %23 and %40"),
        ("mqtt://h/a@b", "with %3F, %23 and %40"),
        ("mqtt://h/%00", "expected a topic without"),
        ("mqtt://h/$SYS/a", r"not beginning with \$"),
        ("mqtt://h/" + "a" * 65_536, "expected a topic without"),
        ("mqtt://h/pf", "expected a topic that is no fleet's"),
        ("mqtt://h/pf/v2/fleet/up/d1", "expected a topic that is no fleet's, not below pf/"),
        ("mqtt://h/p%66/v2/fleet/round", "expected a topic that is no fleet's"),
    ],
)
def test_what_is_no_target_is_one_line(url: str, wanted: str) -> None:
    with pytest.raises(UsageError, match=wanted) as caught:
        Target.parse(url)
    assert "\n" not in str(caught.value)


def test_no_password_is_shown() -> None:
    for url in ("mqtt://me:secret@h", "mqtt://me:secret@h/a?b", "http://me:secret@h/a"):
        with pytest.raises(UsageError) as caught:
            Target.parse(url)
        assert "secret" not in str(caught.value), url

"""Aggregator and helper over a broker: what is asked, what is heard, and what of it is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from blinded_samples import FLEET, KEY, enrolled
from blinded_world import DEVICES, LEAST, World, pooled
from brokers import Embedded

from protofleet.aggregator.blinded.helper_line import HelperLine
from protofleet.aggregator.helper.opening import Helper
from protofleet.aggregator.helper.process import HelperServer
from protofleet.aggregator.rounds.round_machine import Closed
from protofleet.contract.identity.allowlist import read_allowlist
from protofleet.contract.identity.signatures import Keyring, Signer
from protofleet.contract.mqtt.link import Address, Link, Received
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import encode

OURS, THEIRS = Signer(bytes([3]) * 32), Signer(bytes([4]) * 32)


@pytest.fixture
def url() -> Iterator[str]:
    broker = Embedded()
    broker.start()
    yield broker.url
    broker.stop()


class Serving:
    """The helper's loop, in a thread of its own."""

    def __init__(self, url: str, world: World, listed: Path, said: list[str]) -> None:
        self.said = said
        decides = Helper(world.ledger, KEY, FLEET, lambda: read_allowlist(listed), LEAST)
        signer, address = Signer(KEY.sign), Address.parse(url)
        trusted, stopping = Keyring([OURS.public_key]), threading.Event()
        self.server = HelperServer(decides, signer, address, FLEET, trusted=trusted, stopping=stopping)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()

    def says(self, text: str) -> bool:
        return any(text in line for line in self.said)

    def stop(self) -> None:
        self.server.stop()
        self.thread.join(30)


def until(true: Callable[[], bool], link: Link, hear: Callable[[Received], None] = lambda message: None) -> None:
    """Hear what comes until something is so."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        event = link.receive(0.05)
        if isinstance(event, Received):
            hear(event)
            link.acknowledge(event)


def test_a_set_is_asked_for_and_answered_over_a_broker_whoever_else_speaks_there(
    url: str, tmp_path: Path, said: list[str]
) -> None:
    world, listed = World(tmp_path), tmp_path / "devices.toml"
    world.steps()
    world.send(*DEVICES)
    world.steps()
    listed.write_text("[devices]\nd0 = ")  # somebody is writing it
    serving = Serving(url, world, listed, said)
    link = Link(Address.parse(url), "test-aggregator", subscriptions=[topics.helper_answer(FLEET)]).open()
    link.wait_connected(60)
    line = HelperLine(world.core.helper, link, FLEET, seal=OURS.sign)
    heard = list[bool]()
    until(lambda: serving.says("connected"), link)
    (asked,) = world.core.helper.asks(1 << 16)
    for forged in (encode(asked), THEIRS.sign(topics.helper_ask(FLEET), encode(asked)), b"nonsense"):
        link.publish(topics.helper_ask(FLEET), forged)
    until(lambda: serving.says("expected the aggregator's signature") and serving.says("a trusted key"), link)
    line.turn(0.0, 1 << 16)
    until(lambda: serving.says("not answered: --devices"), link)
    assert not world.ledger.blocks
    keys = enrolled(*DEVICES)
    listed.write_text("\n".join(["[devices]", *(f'{device} = "{key.hex()}"' for device, key in keys.items())]))
    link.publish(topics.helper_answer(FLEET), THEIRS.sign(topics.helper_answer(FLEET), encode(asked)))
    assert line.wait_s(0.0) == pytest.approx(10.0)
    line.turn(10.0, 2_048)  # asked once more, in small messages
    made = list[object]()

    def hear(message: Received) -> None:
        heard.append(line.hear(message.payload))
        made.extend(world.steps())

    until(lambda: any(isinstance(step, Closed) for step in made), link, hear)
    assert False in heard  # what was not the helper's
    np.testing.assert_allclose(world.head(), pooled(world, *DEVICES), atol=1e-9, rtol=0)
    serving.stop()
    link.close()
    world.store.close()
    world.ledger.close()

"""Rounds end over real brokers, whoever is not there, says nothing, or says nonsense; and who waits says for whom."""

from __future__ import annotations

import dataclasses
import io
import time
from collections.abc import Iterator
from pathlib import Path

import cbor2
import numpy as np
import pytest
from aggregator_samples import BUNDLE, bundle_file, contribution, manifest, means
from aggregator_server_samples import FLEET, Listener, Running, wait
from brokers import BROKERS, TestBroker, make_broker
from log_lines import drawing
from talker import Talker

from protofleet.aggregator.coordinators.kinds import rounds_of
from protofleet.aggregator.monitoring import events
from protofleet.aggregator.rounds.round_machine import DEADLINE_S, Policy
from protofleet.aggregator.server import ending as ending_module
from protofleet.aggregator.server import run_events as events_module
from protofleet.aggregator.server.run_events import RunEvents
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Announcement, Contribution, Receipt, Status

ONE = Settings(rounds=1, calibrate=False, min_clients=1, deadline=2.0)


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TestBroker]:
    made = make_broker(request.param, tmp_path)
    made.start()
    yield made
    made.stop()


def _talker(url: str, name: str, **options: object) -> Talker:
    talker = Talker(url, FLEET, name, lambda announcement: means(3), **options)  # type: ignore[arg-type]
    talker.start()
    return talker


def _ghost(url: str, name: str = "ghost") -> None:
    """A birth whose will was never published: all that a broker that was killed leaves of a device that is gone."""
    with Listener(url, topics.status(FLEET, name), name="undertaker") as hand:
        hand.link.publish(topics.status(FLEET, name), encode(Status(True, b"instance", 1)), retain=True)
        hand.until(lambda message: isinstance(message, Status))


def test_the_default_deadline_is_finite() -> None:
    assert 60 <= Policy().deadline_s == DEADLINE_S <= 3600


def test_a_birth_without_its_will_costs_one_deadline_and_is_cleared(broker: TestBroker, tmp_path: Path) -> None:
    _ghost(broker.url)
    bundle = bundle_file(tmp_path / "f.bundle")
    settings = dataclasses.replace(ONE, rounds=3)
    with DurableStore(tmp_path / "s", bundle, FLEET) as store:
        server = Running(broker.url, store, bundle, settings)
        wait(lambda: server.core.rounds.online)
        talker = _talker(broker.url, "real")
        with Listener(broker.url, topics.status(FLEET, "ghost")) as bystander:
            gone = bystander.until(lambda m: isinstance(m, Status) and not m.online)
        server.join(30)
        assert server.error is None
        talker.join(10)
        assert gone.instance == b"instance"
        (silent,) = server.told(events.Silent)
        assert silent.names == ("ghost",)
        seconds = [record.seconds for record in store.rounds()]
        assert max(seconds[1:]) < 1.5 < seconds[0]  # only the first round waited for it


def test_a_living_device_that_was_silent_answers_and_counts_as_online(broker: TestBroker, tmp_path: Path) -> None:
    """What `protofleet.edge_client.messages.presence` does: a death in one's name is answered with a birth."""
    bundle = bundle_file(tmp_path / "f.bundle")
    with (
        DurableStore(tmp_path / "s", bundle, FLEET) as store,
        Listener(broker.url, topics.status(FLEET, "mute")) as mute,
    ):
        birth = encode(Status(True, b"instance", 1))
        mute.link.publish(topics.status(FLEET, "mute"), birth, retain=True)
        server = Running(broker.url, store, bundle, ONE)
        mute.until(lambda m: isinstance(m, Status) and not m.online)
        assert server.core.rounds.online == 0
        wait(lambda: server.told(events.Nobody))
        mute.link.publish(topics.status(FLEET, "mute"), birth, retain=True)
        wait(lambda: server.core.rounds.online == 1)
        assert server.core.rounds.awaited_count == 0  # here, but it has to say something first
        sent = Contribution.of(means(), run=store.run, round=1, method="fedproto", bundle=bundle)
        mute.link.publish(topics.up(FLEET, "mute"), encode(sent))
        wait(lambda: server.told(events.RoundClosed))


@pytest.mark.parametrize("mistake", ["NaN", "extra-type", "noise"])
def test_an_honest_mistake_is_answered_and_does_not_hold_the_round(
    broker: TestBroker, tmp_path: Path, mistake: str
) -> None:
    bundle = bundle_file(tmp_path / "f.bundle")
    settings = dataclasses.replace(ONE, min_clients=1, deadline=4.0)
    with DurableStore(tmp_path / "s", bundle, FLEET) as store, Listener(broker.url, topics.down(FLEET, "odd")) as odd:
        odd.link.publish(topics.status(FLEET, "odd"), encode(Status(True, b"instance", 1)), retain=True)
        server = Running(broker.url, store, bundle, settings)
        wait(lambda: server.told(events.RoundOpened))
        good = encode(Contribution.of(means(), run=store.run, round=1, method="fedproto", bundle=bundle))
        nan = cbor2.CBORTag(40, [[2, 4], cbor2.CBORTag(85, np.full(8, np.nan, "<f4").tobytes())])
        bad = {
            "NaN": cbor2.dumps(cbor2.loads(good) | {8: nan}),
            "extra-type": cbor2.dumps(cbor2.loads(good) | {7: [10, 11]}),
            "noise": b"noise",
        }
        odd.link.publish(topics.up(FLEET, "odd"), bad[mistake])
        receipt = odd.until(lambda m: isinstance(m, Receipt))
        assert (receipt.run, receipt.round, receipt.status) == (store.run, 1, "rejected")
        assert receipt.reason
        _talker(broker.url, "real")
        wait(lambda: server.told(events.RoundClosed))
        if mistake != "noise":  # that ties itself to nothing: the device is awaited until the deadline
            assert store.rounds()[0].seconds < 3.9


def test_a_refusal_of_noise_on_a_devices_topic_leaves_its_good_contribution_alone(
    broker: TestBroker, tmp_path: Path
) -> None:
    """Without ACLs anyone can publish there: the answer names the digest of the noise, and nothing else ends."""
    bundle = bundle_file(tmp_path / "f.bundle")
    with DurableStore(tmp_path / "s", bundle, FLEET) as store, Listener(broker.url, topics.down(FLEET, "d")) as down:
        server = Running(broker.url, store, bundle, ONE)
        down.link.publish(topics.status(FLEET, "d"), encode(Status(True, b"instance", 1)), retain=True)
        wait(lambda: server.told(events.RoundOpened))
        down.link.publish(topics.up(FLEET, "d"), b"noise of somebody else")
        down.until(lambda m: isinstance(m, Receipt) and m.status == "rejected")
        good = encode(Contribution.of(means(), run=store.run, round=1, method="fedproto", bundle=bundle))
        down.link.publish(topics.up(FLEET, "d"), good)
        down.until(lambda m: isinstance(m, Receipt) and m.status == "committed")
        assert store.holds(1, "fedproto", "d")


def test_a_slow_round_names_who_is_awaited(broker: TestBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "_SLOW_S", 1.0)
    bundle = bundle_file(tmp_path / "f.bundle")
    for i in range(8):
        _ghost(broker.url, f"d{i}")
    settings = dataclasses.replace(ONE, min_clients=8, deadline=60.0)
    with DurableStore(tmp_path / "s", bundle, FLEET) as store:
        server = Running(broker.url, store, bundle, settings)
        wait(lambda: server.told(events.StillAwaited))
        told = server.told(events.StillAwaited)[0]
        assert (told.committed, told.needed, told.awaited) == (0, 8, 8)
        assert told.names == tuple(f"d{i}" for i in range(5))
        time.sleep(2.2)
        assert len(server.told(events.StillAwaited)) <= 2  # once, then after twice as long


def test_the_announced_limit_is_the_brokers_where_that_is_lower(tmp_path: Path) -> None:
    from brokers import Mosquitto, require_mosquitto

    require_mosquitto()
    narrow = Mosquitto(tmp_path / "m", "max_packet_size 8192\n")
    narrow.start()
    bundle = bundle_file(tmp_path / "f.bundle")
    with DurableStore(tmp_path / "s", bundle, FLEET) as store:
        Running(narrow.url, store, bundle, ONE)
        with Listener(narrow.url, topics.round_(FLEET)) as bystander:
            heard = bystander.until(lambda m: isinstance(m, Announcement))
        assert 4096 < heard.limit_bytes < 8192
    narrow.stop()


def test_a_finished_store_answers_who_comes_late(
    broker: TestBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receipt was lost with the process that had it: the run is over, and the device must still learn it."""
    bundle = bundle_file(tmp_path / "f.bundle")
    with DurableStore(tmp_path / "s", bundle, FLEET) as store:
        first = Running(broker.url, store, bundle, ONE)
        _talker(broker.url, "d").join(20)
        first.join(20)
        assert first.error is None
        monkeypatch.setattr(ending_module, "LATECOMERS_S", 6.0)
        again = Running(broker.url, store, bundle, ONE)
        wait(lambda: again.told(events.Answering))
        time.sleep(3.0)  # nobody is here, and it stays all the same
        with Listener(broker.url, topics.down(FLEET, "d"), topics.round_(FLEET)) as late:
            heard = late.until(lambda m: isinstance(m, Announcement))
            assert (heard.run, heard.phase) == (store.run, "finished")
            sent = Contribution.of(means(3), run=store.run, round=1, method="fedproto", bundle=bundle)
            late.link.publish(topics.up(FLEET, "d"), encode(sent))
            assert late.until(lambda m: isinstance(m, Receipt)).status == "duplicate"
        again.join(20)
        assert again.error is None


def test_a_contributor_that_is_offline_when_the_run_ends_is_waited_for(
    broker: TestBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending_module, "GRACE_S", 5.0)
    bundle = bundle_file(tmp_path / "f.bundle")
    with DurableStore(tmp_path / "s", bundle, FLEET) as store, Listener(broker.url, topics.down(FLEET, "d")) as device:
        status = topics.status(FLEET, "d")
        device.link.publish(status, encode(Status(True, b"instance", 1)), retain=True)
        server = Running(broker.url, store, bundle, ONE)
        wait(lambda: server.told(events.RoundOpened))
        device.link.publish(status, encode(Status(False, b"instance", 1)), retain=True)
        sent = encode(Contribution.of(means(3), run=store.run, round=1, method="fedproto", bundle=bundle))
        device.link.publish(topics.up(FLEET, "d"), sent)
        device.until(lambda m: isinstance(m, Receipt))
        time.sleep(3.0)
        device.link.publish(topics.up(FLEET, "d"), sent)  # it lost the receipt, and is here again
        assert device.until(lambda m: isinstance(m, Receipt)).status == "duplicate"
        server.join(20)


def test_a_round_whose_only_device_was_refused_says_so(tmp_path: Path) -> None:
    """It waits for another device, for as long as it takes: then whoever runs the fleet must be told why."""
    told, settings = io.StringIO(), dataclasses.replace(ONE, max_samples=5)
    with DurableStore(tmp_path / "s", BUNDLE, "fleet") as store:
        core = rounds_of(store, manifest(), BUNDLE, settings, now=0.0)
        teller = RunEvents(core, drawing(told))
        core.status("a", encode(Status(True, b"instance", 1)), 0.0)
        while core.advance(1.0, 1.0) is not None:
            pass
        sent = contribution(means(3), run=core.parts.run)
        assert core.take([("a", encode(sent))], 2.0)[0].outcome == "rejected"
        teller.waits(2.0)
    assert "round 1 awaits nobody and has 0 of 1 contribution" in told.getvalue()
    assert "; 1 device is online with nothing more to send; 1 were refused in this round" in told.getvalue()

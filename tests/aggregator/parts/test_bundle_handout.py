"""A bundle handed out over a real broker: whole, after interruptions, to several at once, and to nobody else."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from aggregator_samples import means
from aggregator_server_samples import FLEET, WIDTH, Listener, Running, wait
from brokers import TestBroker, make_broker
from rollout_samples import Fetcher, new_bundle, old_bundle
from talker import Talker

from protofleet.aggregator.monitoring import events
from protofleet.aggregator.rollout.rollout_stages import Plan
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.operator_orders import give
from protofleet.aggregator.store.rollout_tables import give_rollout
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.errors import LinkError
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods.ncm import UnitMeans
from protofleet.contract.mqtt.link import Failed
from protofleet.contract.sums.statistics import Statistic
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Announcement, Contribution, Receipt, Status
from protofleet.contract.wire.rollout_messages import MAX_PIECES, Piece, Request, bundle_tag

OTHER = "1 00000000"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[TestBroker]:
    made = make_broker("embedded", tmp_path)
    made.start()
    yield made
    made.stop()


@dataclass
class World:
    """An aggregator of rounds that serves NCM, and a roll-out of its bundle."""

    url: str
    folder: Path
    fleet: str = ""
    min_clients: int = 9

    def __post_init__(self) -> None:
        old = read_bundle(old_bundle(self.folder / "old.bundle", pad=150_000))
        self.file = new_bundle(self.folder / "new.bundle", self.folder / "old.bundle")
        self.new, self.blob, self.path = read_bundle(self.file), self.file.read_bytes(), self.folder / "s"
        self.version = self.new.manifest.version + bool(self.fleet)
        with DurableStore(self.path, self.new.sha256, FLEET, extends=(old.sha256,)):
            pass
        self._shorter = {old.sha256: old.manifest.classes}

    def store(self) -> DurableStore:
        return DurableStore(self.path, self.new.sha256, FLEET)

    def serve(self, store: DurableStore, **settings: object) -> Running:
        chosen = Settings(method="ncm", rounds=1, calibrate=False, min_clients=self.min_clients, **settings)  # type: ignore[arg-type]
        made = {"made": self.new.manifest, "shorter": self._shorter}
        return Running(self.url, store, self.new.sha256, chosen, **made)  # type: ignore[arg-type]

    def roll_out(self, *stages: float, **changes: object) -> None:
        plan = Plan(self.new.sha256, self.version, len(self.blob), self.fleet, **{"soak_s": 0.0, **changes})  # type: ignore[arg-type]
        give_rollout(self.path, self.blob, plan, stages or (1.0,), "somebody")


@pytest.fixture
def world(broker: TestBroker, tmp_path: Path) -> World:
    return World(broker.url, tmp_path)


def test_devices_get_the_bundle_and_what_they_say_completes_the_roll_out(world: World) -> None:
    assert len(world.blob) > MAX_PIECES * 65_536  # several requests
    with world.store() as store, Fetcher(world.url, FLEET, "a") as a, Fetcher(world.url, FLEET, "b") as b:
        server = world.serve(store)
        for each in (a, b):
            each.say(OTHER)
        wait(lambda: len(server.core.parts.rollouts._reports) == 2)
        world.roll_out()
        for each in (a, b):
            offer = each.until_offered()
            assert (offer.sha256, offer.size_bytes) == (world.new.sha256, len(world.blob))
            each.fetch(len(world.blob))
            assert each.got == world.blob
            each.say(bundle_tag(world.version, world.new.sha256), f"{world.version} healthy")
        wait(lambda: server.told(events.RolloutCompleted))
        assert server.told(events.RolloutCompleted) == [events.RolloutCompleted(world.version, 2)]
        assert {(e.device, e.word) for e in server.told(events.RolloutTold)} == {("a", "healthy"), ("b", "healthy")}


def test_a_download_goes_on_after_device_broker_and_aggregator_were_away(world: World, broker: TestBroker) -> None:
    world.roll_out()
    part = len(world.blob) // 3
    with world.store() as store, Fetcher(world.url, FLEET, "a") as device:
        world.serve(store)
        device.until_offered()
        device.fetch(part)
    got = device.got
    broker.kill()
    broker.start()
    with world.store() as store, Fetcher(broker.url, FLEET, "a") as device:
        world.url = broker.url
        world.serve(store)
        device.got = got
        device.until_offered()
        device.fetch(2 * part)
        device.fetch(len(world.blob))
        assert device.got == world.blob


def test_a_request_is_answered_with_so_many_pieces_that_fit_a_message(world: World) -> None:
    world.roll_out()
    with world.store() as store, Fetcher(world.url, FLEET, "a") as device:
        world.serve(store, limit_bytes=2048)
        device.until_offered()
        device.ask(0)
        wait(lambda: isinstance(device.hear(), Piece))
        while device.hear(0.5) is not None:
            pass
        assert device.pieces == MAX_PIECES
        assert MAX_PIECES * 1900 < len(device.got) <= MAX_PIECES * 2048
        assert world.blob.startswith(device.got)
        for offset, wanted, expected in ((10, 5, 5), (len(world.blob) - 3, 100, 3)):
            device.ask(offset, wanted)
            piece = next(m for m in iter(device.hear, 0) if isinstance(m, Piece))
            assert (piece.offset, piece.data) == (offset, world.blob[offset : offset + expected])


def test_who_asks_for_what_is_not_theirs_gets_nothing_and_holds_nothing_up(world: World) -> None:
    """Floods, other bundles, runs and offsets, a device that is refused, one that is not in the stage: a round goes on
    beside them, and a device in the stage gets the bundle."""
    world.min_clients = 1
    world.roll_out(0.5, healthy=1.0, soak_s=1e6)
    with world.store() as store:
        store.refused_devices.refuse("removed", 1.0, "it was removed")
        server = world.serve(store)
        current = server.core.parts.rollouts
        wait(lambda: current.offer is not None)
        names = [f"d{n}" for n in range(40)]
        inside = next(n for n in names if current.current.is_in(n))
        outside = next(n for n in names if not current.current.is_in(n))
        with (
            Fetcher(world.url, FLEET, inside) as good,
            Fetcher(world.url, FLEET, outside) as other,
            Fetcher(world.url, FLEET, "removed") as removed,
        ):
            for each in (good, other, removed):
                each.until_offered()
            for _ in range(300):
                other.ask(0)
                removed.ask(0)
                good.ask(0, bundle=bytes(8))
                good.ask(0, run=b"none")
                good.ask(len(world.blob))
                good.ask(2**32 - 1)
            for payload in (os.urandom(40), b"", encode(Piece(b"run1", bytes(8), 0, b"x"))):
                good.publish(payload)
            talker = Talker(world.url, FLEET, "talker", lambda a: _ncm(a))
            talker.start()
            wait(lambda: talker.receipts.get((1, "ncm")) == ["committed"])
            good.fetch(len(world.blob))
            assert good.got == world.blob
            for each in (other, removed):
                while each.hear(0.2) is not None:
                    pass
            assert (other.pieces, removed.pieces) == (0, 0)
            talker.stop()
        assert server.error is None


def _ncm(announcement: Announcement) -> Statistic:
    return UnitMeans.of(unit_rows(np.random.default_rng(0).normal(size=(9, WIDTH))), np.arange(9) % 3, 4)


def test_one_that_asks_for_ever_delays_no_receipt(world: World) -> None:
    """Twelve devices fetch at once, and a contribution is answered meanwhile."""
    world.roll_out()
    fetchers = []
    with world.store() as store:
        server = world.serve(store)
        try:
            for number in range(12):
                fetchers.append(Fetcher(world.url, FLEET, f"f{number}"))
                fetchers[-1].until_offered()
            for _ in range(5):
                for each in fetchers:
                    each.ask(0)
            with Fetcher(world.url, FLEET, "asks") as device:
                late = Contribution.of(means(), run=b"gone", round=1, method="ncm", bundle=world.new.sha256)
                began = time.monotonic()
                device.publish(encode(late))
                wait(lambda: isinstance(device.hear(), Receipt))
                assert time.monotonic() - began < 10.0
        finally:
            for each in fetchers:
                each.link.close()
        assert server.error is None


def test_a_halt_takes_the_offer_away_and_resuming_brings_it_back(world: World) -> None:
    world.roll_out()
    with world.store() as store, Fetcher(world.url, FLEET, "a") as device:
        server = world.serve(store)
        device.until_offered()
        device.fetch(len(world.blob) // 2)
        give(world.path, "rollout-halt", "", "somebody")
        wait(lambda: device.hear() and device.announced.offer is None)
        before = device.pieces
        device.publish(encode(Request(server.core.parts.run, world.new.sha256[:8], 0, 100)))
        while device.hear(0.5) is not None:
            pass
        assert device.pieces == before
        give(world.path, "rollout-resume", "", "somebody")
        device.until_offered()
        device.fetch(len(world.blob))
        assert device.got == world.blob


def test_what_devices_say_in_the_fleet_that_they_go_over_to_is_heard(broker: TestBroker, tmp_path: Path) -> None:
    world = World(broker.url, tmp_path, fleet="pets2")
    world.roll_out()
    with world.store() as store, Fetcher(world.url, FLEET, "a") as device:
        server = world.serve(store)
        device.say(OTHER)
        assert device.until_offered().fleet == "pets2"
        wait(lambda: "a" in server.core.parts.rollouts.current.told)
        with Fetcher(world.url, "pets2", "a") as moved:
            moved.say(bundle_tag(world.version, world.new.sha256), f"{world.version} healthy")
            wait(lambda: server.told(events.RolloutCompleted))
        with Listener(world.url, topics.status("pets2")) as bystander:
            bystander.until(lambda message: isinstance(message, Status))
        give(world.path, "rollout-end", "", "somebody")
        wait(lambda: server.server._handout._elsewhere is None)
        assert server.error is None


def test_when_the_other_fleet_cannot_be_heard_it_is_told_once_and_ends_nothing(
    broker: TestBroker, tmp_path: Path
) -> None:
    world = World(broker.url, tmp_path, fleet="pets2")
    world.roll_out()
    with world.store() as store, Fetcher(world.url, FLEET, "a") as device:
        server = world.serve(store)
        wait(lambda: server.server._handout._elsewhere is not None)
        refused = LinkError("broker refused pf/v2/pets2/status/+", hint="its ACL")
        server.server._handout._elsewhere._events.put(Failed(refused))  # no broker here refuses a subscription
        wait(lambda: server.told(events.RolloutDeaf))
        device.until_offered()
        device.fetch(len(world.blob))
        assert server.told(events.RolloutDeaf) == [events.RolloutDeaf("pets2", str(refused))]
        assert server.error is None

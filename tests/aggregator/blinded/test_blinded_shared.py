"""Blinded rounds whose shares several processes take: one set, of all that is committed, whoever leads when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from aggregator_samples import BUNDLE
from blinded_samples import FLEET, enrolled, helper
from blinded_samples import ledger as open_ledger
from blinded_world import DEVICES, PLAIN, World, pooled
from postgres_server import need_postgres

from protofleet.aggregator.coordinators.kinds import rounds_of
from protofleet.aggregator.database.postgres_members import StaleError
from protofleet.aggregator.rounds.round_machine import AwaitingSum, Closed
from protofleet.aggregator.store.blinded_tables import AskedSet
from protofleet.aggregator.workers.shared_rounds import Sharing
from protofleet.aggregator.workers.shared_store import SharedStore
from protofleet.aggregator.workers.worker import Worker
from protofleet.contract.console.service_manager import ServiceManager
from protofleet.contract.mqtt.link import Address
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Status


class Shared(World):
    """The same on a server; `send` has another process take it, and the leader hears nothing of that."""

    def __init__(self, folder: Path, place: str) -> None:
        self.place = place
        super().__init__(folder)
        self.other = SharedStore(place, BUNDLE, FLEET, leads=False)
        self.read()

    def start(self, online: tuple[str, ...] = tuple(DEVICES)) -> None:
        self.store = SharedStore(self.place, BUNDLE, FLEET, leads=True)
        self.core = rounds_of(self.store, PLAIN, BUNDLE, self.settings, now=self.now)
        self.ledger = open_ledger(self.folder / "ledger")
        self.helper = helper(self.ledger, enrolled(*DEVICES), self.least)
        for device in online:
            self.core.status(device, encode(Status(True, b"instance", 1)), self.now)
        self.now += 10.0

    def read(self) -> None:
        self.other.based_on = self.other.changes()
        self.sharing = Sharing(rounds_of(self.other, PLAIN, BUNDLE, self.settings, now=0.0), self.other)

    def send(self, *devices: str) -> list[str]:
        while True:
            try:
                sent = [(device, self.message(device)) for device in devices]
                return [decision.outcome for decision in self.sharing.take(sent, self.now)]
            except StaleError:
                self.read()

    def close(self) -> None:
        self.store.close()
        self.other.close()
        self.ledger.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Shared]:
    made = Shared(tmp_path, need_postgres().new_place())
    yield made
    made.close()


def test_the_set_is_of_all_that_is_committed_also_of_what_the_leader_has_not_heard_of(world: Shared) -> None:
    world.steps()
    leads = Sharing(world.core, world.store)
    for device in DEVICES[:3]:
        leads.take_as_leader([(device, world.message(device))], world.now)
    assert world.send(DEVICES[3], DEVICES[0]) == ["committed", "duplicate"]
    world.core.status(DEVICES[3], encode(Status(False, b"instance", 1)), world.now)
    world.core.status(DEVICES[4], encode(Status(False, b"instance", 1)), world.now)
    assert world.steps() == [AwaitingSum(1, 4)]
    assert world.send(DEVICES[4]) == ["late"]  # the set stands
    world.answered(world.ask())
    assert any(isinstance(step, Closed) for step in world.steps())
    np.testing.assert_allclose(world.head(), pooled(world, *DEVICES[:4]), atol=1e-9, rtol=0)


def test_who_leads_next_asks_for_the_same_set(world: Shared) -> None:
    world.steps()
    assert world.send(*DEVICES) == ["committed"] * 5
    world.core.learn(0.0)
    assert world.steps() == [AwaitingSum(1, 5)]
    first = world.ask()
    world.kill()
    assert world.send(DEVICES[0]) == ["duplicate"]
    answer = world.ask()
    assert first is not None
    assert answer is not None
    assert answer.total.tolist() == first.total.tolist()  # type: ignore[union-attr]
    world.answered(answer)
    assert any(isinstance(step, Closed) for step in world.steps())
    np.testing.assert_allclose(world.head(), pooled(world, *DEVICES), atol=1e-9, rtol=0)
    assert world.send(DEVICES[1]) == ["committed"]  # to the next round, by a process that has read of it


def test_what_was_decided_before_the_set_stood_is_not_written(world: Shared) -> None:
    world.steps()
    world.send(*DEVICES[:3])
    world.core.learn(0.0)
    for device in DEVICES[3:]:
        world.core.status(device, encode(Status(False, b"instance", 1)), world.now)
    said = world.message(DEVICES[3])
    assert world.steps() == [AwaitingSum(1, 3)]
    with pytest.raises(StaleError):
        world.sharing.take([(DEVICES[3], said)], world.now)
    assert not world.store.holds(1, "ffc", DEVICES[3])


def test_a_worker_that_reads_while_one_round_follows_another_reads_again(
    world: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it read first is of a round that is over by now, and the set that it reads then is of the next one."""
    world.steps()
    world.send(*DEVICES)
    world.core.learn(0.0)
    assert world.steps() == [AwaitingSum(1, 5)]
    with SharedStore(world.place, BUNDLE, FLEET, leads=False) as store:
        asked, looks = store.blinded.asked, list[int]()

        def late() -> AskedSet | None:
            looks.append(1)
            if len(looks) == 1:
                world.answered(world.ask())
                world.steps()
                world.send(*DEVICES)
                world.core.learn(0.0)
                assert world.steps() == [AwaitingSum(2, 5)]
            return asked()

        monkeypatch.setattr(store.blinded, "asked", late)
        make = lambda: rounds_of(store, PLAIN, BUNDLE, world.settings, now=0.0)  # noqa: E731
        told = {"listener": lambda event: None, "signer": None, "stopping": threading.Event()}
        address = Address.parse("mqtt://127.0.0.1:1")
        worker = Worker(store, make, address, FLEET, **told, manager=ServiceManager({}))  # type: ignore[arg-type]
        assert (worker.core.rounds.number, worker.core.rounds.held, len(looks)) == (2, True, 2)

"""Two processes with one certificate where the broker has one session for each: one of them ends, the right one."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from aggregator_samples import bundle_file
from aggregator_server_samples import FLEET, Listener, Running, wait
from brokers import Mosquitto, require_mosquitto
from pki_samples import Authority, GuardedMosquitto

from protofleet.aggregator.monitoring import events
from protofleet.aggregator.server import sole_aggregator as seat_module
from protofleet.aggregator.server.sole_aggregator import SoleAggregator
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.errors import LinkError
from protofleet.contract.mqtt import eviction as eviction_module
from protofleet.contract.mqtt.eviction import SOON_S, Eviction
from protofleet.contract.wire import topics
from protofleet.contract.wire.messages import Status
from protofleet.edge_client.messages.presence import Presence


class OneSession:
    """A broker with one session for all members: who connects throws out the other, whose last will then stands. A
    member is told what stands, may publish, and comes back as a link does: each time later."""

    def __init__(self, seed: int) -> None:
        self._rng, self.now, self.ended = random.Random(seed), 0.0, set[str]()
        self.retained: Status | None = None
        self._members: dict[str, tuple[SoleAggregator | Presence, Callable[[], Status], Callable[[], Status]]] = {}
        self._wills: dict[str, Status] = {}  # of the connections that are up
        self._here: str | None = None
        self._back_at: dict[str, float] = {}
        self._tries: Counter[str] = Counter()

    def joins(
        self, name: str, member: SoleAggregator | Presence, birth: Callable[[], Status], will: Callable[[], Status]
    ) -> None:
        self._members[name], self._back_at[name] = (member, birth, will), self.now
        self._tries.clear()  # whoever is here has been for a while

    def until(self, end: float) -> None:
        while self.now < end:
            self.now += 0.05
            for name in [name for name, at in self._back_at.items() if self.now >= at and name not in self.ended]:
                del self._back_at[name]
                self._comes(name)
            if self._here is not None and self._here not in self.ended:
                self._acts(self._here)

    def _comes(self, name: str) -> None:
        out, self._here = self._here, name
        if out is not None and out not in self.ended:
            self.retained = self._wills[out]
            self._loses(out)
        self._wills[name] = self._members[name][2]()
        self._members[name][0].connected(self.now)
        if self.retained is not None:
            self._tell(name, self.retained)

    def _loses(self, name: str) -> None:
        self._members[name][0].disconnected()
        self._back_at[name] = self.now + self._rng.uniform(0.5, 1.0) * 0.25 * 2 ** self._tries[name]
        self._tries[name] += 1

    def dies(self, comes_back_with: Status) -> None:
        """kill -9 of the broker, which comes back without what was retained last."""
        self.retained, name, self._here = comes_back_with, self._here, None
        if name is not None:
            self._loses(name)

    def _acts(self, name: str) -> None:
        member, birth, _ = self._members[name]
        try:
            said = (
                member.due(self.now)
                if isinstance(member, SoleAggregator)
                else birth()
                if member.birth_due(self.now)
                else None
            )
        except LinkError:
            self.ended.add(name)
            return
        if said is not None:
            if isinstance(member, Presence):
                member.born()
            self.retained = said
            self._tell(name, said)

    def _tell(self, name: str, status: Status) -> None:
        try:
            self._members[name][0].heard(status, self.now)
        except LinkError:
            self.ended.add(name)


def _seats(seed: int, **newer: bool) -> tuple[OneSession, SoleAggregator, SoleAggregator]:
    broker, older = OneSession(seed), SoleAggregator(FLEET, b"run1", started=100)
    broker.joins("older", older, lambda: older.birth, older.will)
    broker.until(SOON_S + 5)
    assert older.is_sole
    late = SoleAggregator(FLEET, b"run2", started=200, **newer)
    broker.joins("newer", late, lambda: late.birth, late.will)
    broker.until(broker.now + 60)
    return broker, older, late


def test_the_newcomer_of_two_aggregators_with_one_certificate_ends_and_never_has_the_seat() -> None:
    for seed in range(20):
        broker, older, newer = _seats(seed)
        assert broker.ended == {"newer"}
        assert older.is_sole
        assert not newer.was_sole


def test_one_that_is_to_take_over_stays() -> None:
    for seed in range(20):
        broker, _, newer = _seats(seed, take_over=True)
        assert broker.ended == {"older"}
        assert newer.is_sole


@pytest.mark.parametrize("take_over", [False, True])
def test_an_old_death_that_a_broker_comes_back_with_again_and_again_ends_nobody(take_over: bool) -> None:
    """Of the process before, or of any other; who comes then is heard as ever."""
    for seed in range(20):
        for died in (Status(False, b"run1dead", 90, issued=3), Status(False, b"run0dead", 900)):
            broker, seat = OneSession(seed), SoleAggregator(FLEET, b"run1", started=100)
            broker.retained = (None, died, Status(False, b"run9dead", 5))[seed % 3]
            broker.joins("seat", seat, lambda seat=seat: seat.birth, seat.will)  # type: ignore[misc]
            for _ in range(4):
                broker.until(broker.now + 4)
                broker.dies(died)
            broker.until(broker.now + SOON_S + 5)
            assert (broker.ended, seat.is_sole, broker.retained) == (set(), True, seat.birth)
            late = SoleAggregator(FLEET, b"run2", started=200, take_over=take_over)
            broker.joins("newer", late, lambda late=late: late.birth, late.will)  # type: ignore[misc]
            broker.until(broker.now + 60)
            assert broker.ended == {"seat" if take_over else "newer"}


@pytest.mark.parametrize("is_clone", [False, True], ids=["another state", "a copy made while the older ran"])
def test_the_newcomer_of_two_processes_of_a_device_ends(is_clone: bool) -> None:
    """Neither ever hears the other's birth, which is what they know each other by on other brokers."""
    for seed in range(20):
        broker = OneSession(seed)
        for name, starts in (("older", 0.0), ("newer", SOON_S + 5)):
            broker.until(starts)
            instance = name.encode().ljust(8)
            process = Presence("kitchen", instance, is_own=lambda other: is_clone and other == b"older   ")
            born, dead = Status(True, instance, 1), Status(False, instance, 1)
            broker.joins(name, process, lambda born=born: born, lambda dead=dead: dead)  # type: ignore[misc]
        broker.until(broker.now + 60)
        assert broker.ended == {"newer"}
        assert broker.retained == Status(True, b"older   ", 1)


def test_a_death_that_is_our_own_or_comes_late_or_once_means_nothing() -> None:
    one = Eviction()
    for at, death in ((0, True), (1, True), (2, False), (3, True), (3 + 2 * SOON_S, True)):
        one.connected(at)
        one.heard(strangers_death=death)
        one.heard(strangers_death=True)  # not the first on that connection
        assert not one.is_sure, at


def test_over_mosquitto_with_the_shipped_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that was mistyped, with the fleet's own certificate: the newcomer ends, and no device hears of it."""
    authority = Authority(tmp_path / "pki", {}, (FLEET,))
    broker = GuardedMosquitto(authority)
    bundle = bundle_file(tmp_path / "f.bundle")
    with DurableStore(tmp_path / "a", bundle, FLEET) as one, DurableStore(tmp_path / "b", bundle, FLEET) as other:
        older = Running(authority.address("aggregator"), one, bundle)
        wait(lambda: older.server._sole_aggregator.is_sole, 60)
        older.server._sole_aggregator._eviction._was_there = True  # as after ten seconds
        will = older.server._link._will
        assert callable(will)  # also while it is busy each connection has another
        assert will() != will()
        for module, name, seconds in ((eviction_module, "SOON_S", 60.0), (seat_module, "LISTEN_S", 3.0)):
            monkeypatch.setattr(module, name, seconds)  # of a machine that is as slow as one that runs all tests
        monkeypatch.setattr(seat_module, "_RETURN_S", 60.0)
        newer = Running(authority.address("aggregator"), other, bundle)
        newer.join(90)
        assert "another aggregator serves fleet" in str(newer.error)
        monkeypatch.undo()
        assert older.error is None
        assert older.told(events.LinkDown)
        assert not newer.server._sole_aggregator.was_sole
    broker.close()


def test_a_mosquitto_that_dies_again_and_again_and_forgets_what_was_retained_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows an aggregator, on each of its returns, the death of the process before it."""
    require_mosquitto()
    monkeypatch.setattr(eviction_module, "SOON_S", 60.0)  # of a machine that is as slow as one that runs all tests
    monkeypatch.setattr(seat_module, "_RETURN_S", 0.1)
    settings = "autosave_interval 0\n" + ("user root\n" if os.geteuid() == 0 else "")  # to write into a test's folder
    broker, bundle = Mosquitto(tmp_path / "m", settings), bundle_file(tmp_path / "f.bundle")
    database = tmp_path / "m" / "mosquitto.db"
    broker.start()
    with DurableStore(tmp_path / "a", bundle, FLEET) as store:
        before = Running(broker.url, store, bundle)
        wait(lambda: before.server._sole_aggregator.is_sole)
    broker.stop()
    shutil.copy(database, tmp_path / "old.db")
    broker.start()
    with DurableStore(tmp_path / "a", bundle, FLEET) as store:
        after = Running(broker.url, store, bundle)
        for _ in range(3):
            wait(lambda: after.server._sole_aggregator.is_sole)
            broker.kill()
            wait(lambda: not after.server._sole_aggregator.is_sole)
            shutil.copy(tmp_path / "old.db", database)
            broker.start()
        wait(lambda: after.server._sole_aggregator.is_sole or after.ended)
        assert after.error is None
        with Listener(broker.url, topics.status(FLEET, topics.AGGREGATOR)) as bystander:
            bystander.until(lambda m: m == after.server._sole_aggregator.birth)
    broker.stop()

"""One aggregator for a fleet: the pure rule against whatever order of events, and two servers on a real broker."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from aggregator_samples import bundle_file
from aggregator_server_samples import FLEET, Listener, Running, wait
from brokers import BROKERS, TestBroker, make_broker
from hypothesis import given, settings
from hypothesis import strategies as st

from protofleet.aggregator.monitoring import events
from protofleet.aggregator.server import service as service_module
from protofleet.aggregator.server import sole_aggregator as seat_module
from protofleet.aggregator.server.beginning import Beginning
from protofleet.aggregator.server.service import Service
from protofleet.aggregator.server.sole_aggregator import ANSWER_S, LISTEN_S, SoleAggregator
from protofleet.aggregator.settings import AggregateSettings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.errors import LinkError
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Announcement, Status

SEAT = topics.status(FLEET, topics.AGGREGATOR)


def _seated(now: float = 0.0, run: bytes = b"run1", **options: object) -> SoleAggregator:
    seat = SoleAggregator(FLEET, run, **options)  # type: ignore[arg-type]
    seat.connected(now)
    assert seat.due(now + LISTEN_S) == seat.birth
    assert seat.is_sole
    return seat


def test_an_empty_topic_is_taken_after_listening() -> None:
    seat = SoleAggregator(FLEET, b"run1")
    assert seat.due(0.0) is None
    seat.connected(0.0)
    assert (seat.due(0.1), seat.is_sole) == (None, False)
    assert seat.due(LISTEN_S) == seat.birth


def test_a_newcomer_refuses_when_the_one_that_stands_there_answers() -> None:
    older, newer = _seated(started=100), SoleAggregator(FLEET, b"run2", started=200)
    newer.connected(0.0)
    newer.heard(older.birth, 0.1)
    asked = newer.due(LISTEN_S)
    assert asked == Status(False, older.instance, older.birth.boot)
    older.heard(asked, 0.6)
    answer = older.due(0.6)
    assert answer == older.birth
    newer.heard(asked, 0.7)  # its own question comes back to it, too
    newer.heard(answer, 0.8)
    with pytest.raises(LinkError, match=r"another aggregator serves fleet test, expected only run 72756e32, got run 7"):
        newer.due(0.8)
    assert older.is_sole


def test_a_newcomer_takes_the_seat_of_one_that_does_not_answer() -> None:
    seat = SoleAggregator(FLEET, b"run2")
    seat.connected(0.0)
    seat.heard(Status(True, b"run1dead", 7), 0.1)
    assert seat.due(LISTEN_S) is not None
    assert seat.due(LISTEN_S + ANSWER_S - 0.1) is None
    born = seat.due(LISTEN_S + ANSWER_S)
    assert born == seat.birth
    assert born.boot == 8


def test_take_over_ends_the_one_that_answers() -> None:
    older, newer = _seated(started=100), SoleAggregator(FLEET, b"run2", take_over=True)
    newer.connected(0.0)
    newer.heard(older.birth, 0.1)
    newer.due(LISTEN_S)
    newer.heard(older.birth, 1.0)
    born = newer.due(1.0)
    assert newer.is_sole
    with pytest.raises(LinkError, match="got run 72756e32, of another store"):
        older.heard(born, 1.1)


def test_a_restart_on_the_same_store_does_not_wait() -> None:
    seat = SoleAggregator(FLEET, b"run1")
    seat.connected(0.0)
    seat.heard(Status(True, b"run1" + b"dead", 7), 0.1)
    assert seat.due(LISTEN_S) == seat.birth
    assert seat.birth.boot == 8


def test_a_stranger_that_is_there_is_asked_however_often_our_connection_was_lost() -> None:
    """Its births are no deaths: only those say that the broker throws us out for it."""
    seat = SoleAggregator(FLEET, b"run2")
    for boot in range(5):
        seat.connected(float(boot))
        seat.heard(Status(True, b"run1dead", boot), boot + 0.1)
        assert seat.due(boot + LISTEN_S) == Status(False, b"run1dead", boot)
        seat.disconnected()


def test_one_that_was_cut_off_ends_when_another_took_the_seat_meanwhile() -> None:
    older, newer = _seated(started=100), SoleAggregator(FLEET, b"run2")
    older.disconnected()
    newer.connected(10.0)
    newer.heard(older.death, 10.1)  # its will
    assert newer.due(10.0 + LISTEN_S) == newer.birth
    older.connected(20.0)
    older.heard(newer.birth, 20.1)
    with pytest.raises(LinkError, match="another aggregator"):
        older.due(20.0 + LISTEN_S)


@given(
    starts=st.lists(st.tuples(st.floats(0, 3), st.integers(0, 3)), min_size=2, max_size=4),
    delays=st.lists(st.floats(0.0, 0.4), min_size=1, max_size=12),
    cut=st.lists(st.tuples(st.integers(0, 3), st.floats(4, 12), st.floats(0.1, 6)), max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_whoever_starts_when_exactly_one_stays(
    starts: list[tuple[float, int]], delays: list[float], cut: list[tuple[int, float, float]]
) -> None:
    """Any number of newcomers at any time, with any delay of messages and any cut: in the end one speaks, alone."""
    delay = itertools.cycle(delays)
    seats = [SoleAggregator(FLEET, bytes([65 + i]) * 4, started=clock) for i, (_, clock) in enumerate(starts)]
    alive, up, began = set(range(len(seats))), set[int](), [start for start, _ in starts]
    inbox: list[tuple[float, int, Status]] = []
    retained: Status | None = None
    now = 0.0

    def say(status: Status) -> None:
        nonlocal retained
        retained = status
        inbox.extend((now + next(delay), i, status) for i in alive & up)

    while now < 40.0:
        for i in sorted(alive):
            away = any(who == i and at <= now < at + lasts for who, at, lasts in cut)
            if away and i in up:
                up.discard(i)
                seats[i].disconnected()
                inbox = [entry for entry in inbox if entry[1] != i]
                say(seats[i].death)  # the broker publishes its will
            elif not away and i not in up and now >= began[i]:
                up.add(i)
                seats[i].connected(now)
                if retained is not None:
                    inbox.append((now + next(delay), i, retained))
        for entry in sorted((e for e in inbox if e[0] <= now), key=lambda e: e[0]):
            inbox.remove(entry)
            if entry[1] in alive & up:
                try:
                    seats[entry[1]].heard(entry[2], now)
                except LinkError:
                    alive.discard(entry[1])
        for i in sorted(alive & up):
            try:
                said = seats[i].due(now)
            except LinkError:
                alive.discard(i)
                continue
            if said is not None:
                say(said)
        now += 0.1
    assert len(alive) == 1
    assert seats[alive.pop()].is_sole


# ── over a real broker ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TestBroker]:
    made = make_broker(request.param, tmp_path)
    made.start()
    yield made
    made.stop()


def test_a_mistyped_store_ends_the_newcomer_and_not_the_fleets_aggregator(broker: TestBroker, tmp_path: Path) -> None:
    bundle = bundle_file(tmp_path / "f.bundle")
    with DurableStore(tmp_path / "a", bundle, FLEET) as one, DurableStore(tmp_path / "b", bundle, FLEET) as other:
        older = Running(broker.url, one, bundle)
        wait(lambda: older.server._sole_aggregator.is_sole)
        with Listener(broker.url, topics.round_(FLEET)) as bystander:
            newer = Running(broker.url, other, bundle)
            newer.join(20)
            assert f"another aggregator serves fleet {FLEET}" in str(newer.error)
            assert f"got run {one.run.hex()}" in str(newer.error)
            assert "--take-over" in str(newer.error)
            assert not older.ended
            bystander.until(lambda m: isinstance(m, Announcement))
            assert {m.run for _, m in bystander.heard} == {one.run}  # the newcomer never announced
        third = Running(broker.url, other, bundle, take_over=True)
        older.join(20)
        assert f"got run {other.run.hex()}" in str(older.error)
        wait(lambda: third.server._sole_aggregator.is_sole)
        assert third.error is None


def test_an_aggregator_that_died_without_its_will_does_not_keep_the_fleet(
    broker: TestBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seat_module, "ANSWER_S", 1.5)
    bundle = bundle_file(tmp_path / "f.bundle")
    with Listener(broker.url, SEAT) as ghost:
        ghost.link.publish(SEAT, encode(Status(True, b"old!dead", 3)), retain=True)
        ghost.until(lambda m: isinstance(m, Status))
    with DurableStore(tmp_path / "a", bundle, FLEET) as store:
        began = time.monotonic()
        server = Running(broker.url, store, bundle)
        wait(lambda: server.server._sole_aggregator.is_sole)
        assert time.monotonic() - began > 1.5
        wait(lambda: bool(server.told(events.Waiting)))


def test_a_store_from_a_backup_is_refused_and_goes_on_as_a_new_run(broker: TestBroker, tmp_path: Path) -> None:
    bundle = bundle_file(tmp_path / "f.bundle")
    with DurableStore(tmp_path / "a", bundle, FLEET) as store, Listener(broker.url, topics.round_(FLEET)) as bystander:
        later = Announcement(store.run, 5, "closed", "fedproto", bundle, global_version=5)
        bystander.link.publish(topics.round_(FLEET), encode(later), retain=True)
        bystander.until(lambda m: isinstance(m, Announcement))
        refused = Running(broker.url, store, bundle)
        refused.join(20)
        assert "the store is older than what run" in str(refused.error)
        assert "--new-run" in str(refused.error)
        before = store.run
        store.begin_new_run()
        assert store.run != before
        Running(broker.url, store, bundle)
        heard = bystander.until(lambda m: isinstance(m, Announcement) and m.run != before)
        assert heard.run == store.run


def test_a_new_run_is_one_for_the_server_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which then does not recommend what its operator has just done."""
    bundle_file(tmp_path / "f.bundle")
    told = list[object]()

    def made(*_: object, beginning: Beginning, **options: object) -> NoReturn:
        told.append(beginning.is_new_run)
        raise LinkError("no broker here")

    monkeypatch.setattr(service_module, "Server", made)
    for new_run in (False, True):
        named = {"bundle": (str(tmp_path / "f.bundle"),), "broker": "mqtt://127.0.0.1:1", "store": tmp_path / "s"}
        service = Service(AggregateSettings(**named, fleet=FLEET, new_run=new_run))  # type: ignore[arg-type]
        with pytest.raises(LinkError, match="no broker here"):
            service.run(lambda event: None, lambda content, finished: None)
    assert told == [False, True]

"""A round that closes beside the loop: all are answered meanwhile, and the result is that of what the store holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aggregator_samples import BUNDLE, bundle_file, contribution, extractor, gram, manifest, means
from aggregator_server_samples import FLEET, SETTINGS, Running, wait
from blinded_world import DEVICES as SHARING
from blinded_world import World
from brokers import TestBroker, make_broker
from postgres_server import Places, need_postgres
from talker import Talker

from protofleet.aggregator.blinded import blinded_rounds as blinded_module
from protofleet.aggregator.closing import round_results
from protofleet.aggregator.coordinators.kinds import rounds_of
from protofleet.aggregator.coordinators.round_coordinator import RoundCoordinator
from protofleet.aggregator.database import beside
from protofleet.aggregator.database.postgres_members import StaleError
from protofleet.aggregator.merging.merge_round import merge_round
from protofleet.aggregator.parts.background_work import Abandoned, Closing
from protofleet.aggregator.parts.steps import Solved
from protofleet.aggregator.rounds.round_machine import Closed, Opened
from protofleet.aggregator.server.service import Service
from protofleet.aggregator.settings import AggregateSettings, Settings
from protofleet.aggregator.standing import standing_heads
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.operator_orders import Obeyed, give
from protofleet.aggregator.store.records import Accepted
from protofleet.aggregator.store.schema import KIND
from protofleet.aggregator.workers import shared_rounds
from protofleet.aggregator.workers.shared_rounds import Sharing
from protofleet.aggregator.workers.shared_store import SharedStore
from protofleet.contract.errors import StatisticError
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Status
from tests.aggregator.merging.test_exact_sums import core_of, message

ONE_ROUND = Settings(rounds=1, calibrate=False, min_clients=3, deadline=60.0)
DEVICES = ("a", "b", "c")


class Held:
    """The long part of a close, which begins and then lasts until it is let go."""

    def __init__(self) -> None:
        self.began, self.goes = threading.Event(), threading.Event()
        self.times = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def held(*given: Any, **named: Any) -> Any:
            self.times += 1
            self.began.set()
            assert self.goes.wait(60)
            return function(*given, **named)

        return held


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held()
    monkeypatch.setattr(round_results, "merge_round", made.around(merge_round))
    monkeypatch.setattr(standing_heads, "next_global", made.around(standing_heads.next_global))
    monkeypatch.setattr(blinded_module, "next_global", made.around(blinded_module.next_global))
    yield made
    made.goes.set()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[TestBroker]:
    made = make_broker("embedded", tmp_path)
    made.start()
    yield made
    made.stop()


def core_with(store: DurableStore, *, patience_s: float | None = 0.0) -> RoundCoordinator:
    core = rounds_of(store, manifest(), BUNDLE, ONE_ROUND, now=0.0)
    core.parts.closing.patience_s = patience_s
    for device in (*DEVICES, "late"):
        core.status(device, encode(Status(True, b"instance", 1)), 0.0)
    return core


def sent(core: RoundCoordinator, device: str) -> tuple[str, bytes]:
    return device, encode(contribution(means(ord(device[0])), run=core.parts.run), "f64")


def open_round(core: RoundCoordinator, *devices: str) -> None:
    """The round with these contributions, and nobody else awaited."""
    assert isinstance(core.advance(0.0, 0.0), Opened)
    assert {d.outcome for d in core.take([sent(core, d) for d in devices], 1.0)} == {"committed"}
    core.status("late", encode(Status(False, b"instance", 1)), 1.0)


def ended(core: Any, now: float = 2.0) -> object:
    """The next step, once it is there."""
    steps: list[object] = []

    def is_there() -> bool:
        steps.extend(step for step in [core.advance(now, now)] if step is not None)
        return bool(steps)

    wait(is_there)
    return steps[0]


def result(state: GlobalState) -> tuple[int, dict[str, tuple[bytes, bytes]]]:
    """All of a global state but the run's id."""
    return state.version, {kind: (rows.classes.tobytes(), rows.rows.tobytes()) for kind, rows in state.rows.items()}


def at_once(places: Places, *devices: str) -> object:
    """What a round of these comes to without any thread."""
    with DurableStore(places("at-once"), BUNDLE, FLEET) as store:
        core = core_with(store, patience_s=None)
        open_round(core, *devices)
        assert core.advance(2.0, 2.0) == Closed(1, "fedproto")
        return result(store.state())


def test_what_comes_while_a_round_closes_is_answered_and_does_not_count(places: Places, held: Held) -> None:
    with DurableStore(places("s"), BUNDLE, FLEET) as store:
        core = core_with(store)
        open_round(core, *DEVICES)
        assert core.advance(2.0, 2.0) is None
        assert held.began.wait(60)
        assert core.announcement().phase == "closed"
        assert [d.outcome for d in core.take([sent(core, d) for d in ("a", "late")], 3.0)] == ["duplicate", "late"]
        assert core.status("late", encode(Status(True, b"anothers", 1)), 3.0)
        assert core.rounds.due_in_s(3.0) is None
        assert not core.rounds.awaited
        assert not core.rounds.nobody
        held.goes.set()
        assert ended(core) == Closed(1, "fedproto")
        assert list(store.record(1).uplink_bytes) == list(DEVICES)
        threaded = result(store.state())
    held.goes.set()
    assert threaded == at_once(places, *DEVICES)


def test_a_contribution_that_was_committed_all_the_same_is_merged(places: Places, held: Held) -> None:
    """By whoever does not know that the round is being closed: the work is done again."""
    with DurableStore(places("s"), BUNDLE, FLEET) as store:
        core = core_with(store)
        open_round(core, *DEVICES)
        assert core.advance(2.0, 2.0) is None
        assert held.began.wait(60)
        _, payload = sent(core, "late")
        store.commit([Accepted(1, "fedproto", "late", payload, len(payload))], {})
        held.goes.set()
        assert ended(core) == Closed(1, "fedproto")
        assert held.times == 2
        threaded = result(store.state())
    assert threaded == at_once(places, *DEVICES, "late")


def test_what_comes_late_while_a_window_closes_stands_in_in_the_next(places: Places, held: Held) -> None:
    settings = Settings(method="ffc", rounds=1, calibrate=False, every=100.0, window=20.0)
    with DurableStore(places("s"), BUNDLE, FLEET) as store:
        core = rounds_of(store, manifest(), BUNDLE, settings, now=0.0)
        core.parts.closing.patience_s = 0.0
        core.status("a", encode(Status(True, b"instance", 1)), 0.0)

        def says(device: str, number: int) -> str:
            key = {"run": core.parts.run, "round": number, "method": "ffc", "extractor": extractor("ffc")}
            made = encode(contribution(gram(ord(device)), **key), "f64")
            return core.take([(device, made)], 1.0)[0].outcome

        for number in (1, 2):
            assert isinstance(ended(core, 100.0 * number), Opened)
            assert says("a", number) == "committed"
            assert core.advance(100.0 * number + 20.0, 2.0) is None
            assert held.began.wait(60)
            assert says("c", number) == "late"
            held.goes.set()
            assert ended(core, 100.0 * number + 20.0) == Closed(number, "ffc")
            held.goes.clear()
        assert [list(store.record(number).uplink_bytes) for number in (1, 2)] == [["a"], ["a", "c"]]


def test_an_order_waits_until_the_round_is_recorded(places: Places, held: Held) -> None:
    place = places("s")
    with DurableStore(place, BUNDLE, FLEET) as store:
        core = core_with(store)
        open_round(core, *DEVICES)
        assert core.advance(2.0, 2.0) is None
        assert held.began.wait(60)
        give(place, "forget", "c", "me")
        give(place, "pause", "", "me")
        for now in (10.0, 20.0):
            assert core.advance(now, now) is None
        held.goes.set()
        steps = [ended(core, 30.0), core.advance(40.0, 40.0), core.advance(50.0, 50.0)]
        assert steps[0] == Closed(1, "fedproto")
        assert [step.order.what for step in steps[1:] if isinstance(step, Obeyed)] == ["forget", "pause"]
        remade = result(store.state())
    with DurableStore(places("without"), BUNDLE, FLEET) as store:
        core = core_with(store, patience_s=None)
        open_round(core, "a", "b", "c")
        core.advance(2.0, 2.0)
        give(places("without"), "forget", "c", "me")
        core.advance(10.0, 10.0)
        assert remade == result(store.state())


def test_who_dies_while_a_round_closes_closes_it_again(places: Places, held: Held) -> None:
    place = places("s")
    with DurableStore(place, BUNDLE, FLEET) as store:
        core = core_with(store)
        open_round(core, *DEVICES)
        assert core.advance(2.0, 2.0) is None
        assert held.began.wait(60)
        held.goes.set()
        core.parts.closing.abandon()  # and nothing of it was recorded
        assert not store.record(1).closed
    give(place, "forget", "c", "me")  # also what was ordered while nobody ran
    with DurableStore(place, BUNDLE, FLEET) as store:
        core = core_with(store)
        assert [d.outcome for d in core.take([sent(core, "late")], 3.0)] == ["late"]
        assert ended(core) == Closed(1, "fedproto")
        assert result(store.state()) == at_once(places, *DEVICES)
        assert isinstance(ended(core, 10.0), Obeyed)
        assert store.closing() == 0


def test_an_order_waits_for_a_head_that_is_being_made(places: Places, held: Held) -> None:
    """Sums stand meanwhile; what came is in the next head, and who is to be forgotten is so after this one."""
    place = places("s")
    with DurableStore(place, BUNDLE, "fleet") as store:
        core = core_of(store)
        core.parts.closing.patience_s = 0.0
        core.take([message(core, "a", 1, 1), message(core, "b", 1, 2)], 0.0)
        assert core.advance(0.0, 0.0) is None
        assert held.began.wait(60)
        assert [d.outcome for d in core.take([message(core, "c", 1, 3)], 1.0)] == ["committed"]
        give(place, "forget", "b", "me")
        assert core.advance(50.0, 50.0) is None
        held.goes.set()
        first = ended(core, 50.0)
        assert isinstance(first, Solved)
        assert first.devices == 2
        forgotten, state = ended(core, 51.0), core.state
        assert isinstance(forgotten, Obeyed)
        assert state.version == 2
    with DurableStore(places("other"), BUNDLE, "fleet") as store:
        core = core_of(store)
        core.take([message(core, "a", 1, 1), message(core, "c", 1, 3)], 0.0)
        assert isinstance(core.advance(0.0, 0.0), Solved)
        assert result(core.state)[1] == result(state)[1]


def test_a_head_is_made_of_what_stood_when_it_began(places: Places, held: Held) -> None:
    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        core = core_of(store)
        core.parts.closing.patience_s = 0.0
        core.take([message(core, "a", 1, 1)], 0.0)
        assert core.advance(0.0, 0.0) is None
        assert held.began.wait(60)
        core.take([message(core, "b", 1, 2)], 1.0)
        held.goes.set()
        assert isinstance(ended(core, 1.0), Solved)
        assert store.meta.get("standing solved") != core.sums.digest()
        assert core.advance(2.0, 2.0) is None
        assert core.rounds.due_in_s(2.0) > 0
        second = ended(core, 61.0)  # and the next one is due in time
        assert isinstance(second, Solved)
        assert second.devices == 2
        assert store.meta.get("standing solved") == core.sums.digest()


def test_a_blinded_sum_is_solved_beside_the_loop(tmp_path: Path, held: Held) -> None:
    heads = []
    for patience_s in (0.0, None):
        (tmp_path / str(patience_s)).mkdir()
        world = World(tmp_path / str(patience_s))
        world.core.parts.closing.patience_s = patience_s
        world.steps()
        world.send(*SHARING)
        world.steps()
        world.answered(world.ask())
        if patience_s is not None:
            assert world.steps() == []
            assert held.began.wait(60)
            assert world.core.helper.asked is None  # the helper has answered
            assert world.send(SHARING[0]) == ["duplicate"]
            held.goes.set()
        assert isinstance(ended(world.core, world.now), Closed)
        heads.append(world.head().tobytes())
        world.store.close()
        world.ledger.close()
    assert heads[0] == heads[1]


def test_the_work_says_what_went_wrong_and_ends_when_it_is_not_wanted() -> None:
    closing = Closing[str]()
    closing.patience_s, woken = 10.0, threading.Event()
    closing.wake = woken.set

    def fails() -> Callable[[], str]:
        raise StatisticError("a sum", expected="one", got="none")

    closing.begin(fails)
    with pytest.raises(StatisticError, match="a sum, expected one"):
        closing.step()
    assert woken.wait(10)

    def lasts() -> Callable[[], str]:
        while True:
            closing.go_on()
            time.sleep(0.01)

    closing.patience_s = 0.0
    closing.begin(lasts)
    assert closing.step() is None
    assert closing.has_work
    closing.abandon()
    assert not closing.has_work
    assert closing.step() is None
    with pytest.raises(Abandoned):
        closing.go_on()


# ── over a broker ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_devices_are_answered_and_the_watchdog_is_fed_while_a_round_closes(
    broker: TestBroker, tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, fed = bundle_file(tmp_path / "f.bundle"), []
    monkeypatch.setattr(
        "protofleet.contract.console.service_manager.ServiceManager.alive", lambda manager: fed.append(1)
    )
    make = lambda i: lambda a: gram(i) if a.method == "ffc" else means(i)  # noqa: E731
    talkers = [Talker(broker.url, FLEET, f"d{i}", make(i)) for i in range(3)]
    with DurableStore(tmp_path / "s", bundle, FLEET) as store:
        server = Running(broker.url, store, bundle, SETTINGS)
        for talker in talkers:
            talker.start()
        assert held.began.wait(60)
        wait(lambda: all(talker.receipts for talker in talkers))
        turns, online = len(fed), server.core.rounds.online
        latecomer = Talker(broker.url, FLEET, "d9", lambda a: None)
        payload = encode(contribution(means(9), run=store.run, bundle=bundle))
        latecomer.start()
        wait(lambda: server.core.rounds.online == online + 1)
        latecomer.link.publish(f"pf/v2/{FLEET}/up/d9", payload)
        talkers[0].link.publish(f"pf/v2/{FLEET}/up/d0", encode(_of(store, bundle, 0)))
        wait(lambda: latecomer.receipts == {(1, "fedproto"): ["late"]})
        wait(lambda: talkers[0].receipts == {(1, "fedproto"): ["committed", "duplicate"]})
        assert len(fed) > turns
        assert not store.record(1).closed
        latecomer.stop()
        wait(lambda: server.core.rounds.online == online)
        held.goes.set()
        server.join(30)
        assert server.error is None
    for talker in talkers:
        talker.stop()


def _of(store: DurableStore, bundle: bytes, index: int) -> Any:
    return contribution(means(index), run=store.run, bundle=bundle)


def test_what_goes_wrong_beside_the_loop_ends_the_server_in_one_line(
    broker: TestBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: Any, **named: Any) -> None:
        raise StatisticError("a sum", expected="one", got="none")

    monkeypatch.setattr(round_results, "merge_round", fails)
    bundle = bundle_file(tmp_path / "f.bundle")
    talker = Talker(broker.url, FLEET, "d0", lambda a: means(0))
    with DurableStore(tmp_path / "s", bundle, FLEET) as store:
        server = Running(broker.url, store, bundle, Settings(rounds=1, calibrate=False, min_clients=1))
        talker.start()
        server.join(30)
        talker.stop()
        assert str(server.error) == "a sum, expected one, got none"


def test_a_stop_in_the_middle_ends_at_once_and_the_next_one_closes_the_round(
    broker: TestBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = threading.Event()

    def lasts(found: Any, messages: Callable[[], Iterator[Any]], *given: Any, **named: Any) -> None:
        while True:  # it reads and reads
            began.set()
            for _ in messages():
                pass

    bundle, settings = bundle_file(tmp_path / "f.bundle"), Settings(rounds=1, calibrate=False)
    talker = Talker(broker.url, FLEET, "d0", lambda a: means(0))
    with monkeypatch.context() as patched:
        patched.setattr(round_results, "merge_round", lasts)
        with DurableStore(tmp_path / "s", bundle, FLEET) as store:
            server = Running(broker.url, store, bundle, settings)
            talker.start()
            assert began.wait(30)
        assert server.ended
        assert server.error is None
        assert not any(thread.name == "closing" for thread in threading.enumerate())
    with DurableStore(tmp_path / "s", bundle, FLEET) as store:
        assert not store.record(1).closed
        server = Running(broker.url, store, bundle, settings)
        server.join(30)
        assert server.error is None
        assert store.record(1).closed
    talker.stop()


# ── several processes ───────────────────────────────────────────────────────────────────────────────────────────────


def test_no_worker_commits_to_a_round_that_its_leader_closes(held: Held) -> None:
    place = need_postgres().new_place()
    with (
        SharedStore(place, BUNDLE, FLEET, leads=True) as leader,
        SharedStore(place, BUNDLE, FLEET, leads=False) as member,
    ):
        leading = core_with(leader)
        assert isinstance(leading.advance(0.0, 0.0), Opened)
        member.based_on = member.changes()
        working = core_with(member)
        beside_it = Sharing(working, member)
        assert [d.outcome for d in beside_it.take([sent(working, "a")], 1.0)] == ["committed"]
        leading.learn(0.0)
        mine = [sent(leading, device) for device in ("b", "c")]
        assert [d.outcome for d in Sharing(leading, leader).take_as_leader(mine, 1.0)] == ["committed"] * 2
        assert [d.outcome for d in beside_it.take([sent(working, "x")], 1.0)] == [
            "committed"
        ]  # the leader has not heard
        leading.status("late", encode(Status(False, b"instance", 1)), 1.0)
        assert leading.advance(2.0, 2.0) is None
        assert held.began.wait(60)
        leader.beat()  # which no transaction keeps waiting
        with pytest.raises(StaleError):
            beside_it.take([sent(working, "late")], 3.0)
        member.based_on = member.changes()
        again = Sharing(leading, leader).take_as_leader([sent(leading, device) for device in "ax"], 3.0)
        assert [d.outcome for d in again] == ["duplicate"] * 2
        anew = Sharing(core_with(member), member)
        answered = anew.take([sent(working, "late"), sent(working, "b")], 3.0)
        assert [d.outcome for d in answered] == ["late", "duplicate"]
        held.goes.set()
        assert ended(leading) == Closed(1, "fedproto")
        assert list(leader.record(1).uplink_bytes) == [*DEVICES, "x"]


def test_a_leader_that_closes_a_round_goes_on_beating(
    tmp_path: Path, broker: TestBroker, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, beats = need_postgres().new_place(), []
    monkeypatch.setattr(shared_rounds, "BEAT_S", 0.05)
    bundle_file(tmp_path / "f.bundle")
    named = {"bundle": (str(tmp_path / "f.bundle"),), "broker": broker.url, "store": place, "fleet": FLEET}
    service = Service(AggregateSettings(**named, rounds=1, calibrate=False, min_clients=1, worker=True))  # type: ignore[arg-type]
    running = threading.Thread(target=lambda: service.run(lambda event: None, lambda *_: None), daemon=True)
    running.start()
    talker = Talker(broker.url, FLEET, "d0", lambda a: means(0))
    talker.start()
    try:
        assert held.began.wait(60)

        def another() -> bool:
            with beside(place, KIND) as db:
                beats.append(db.execute("SELECT beat FROM protofleet").fetchone()[0])
            return len(set(beats)) >= 3

        wait(another)
    finally:
        held.goes.set()
        running.join(30)
        talker.stop()
    assert not running.is_alive()

"""Forgetting in a fleet of rounds: what comes back is what the others alone would have made; who is gone stays out."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from aggregator_samples import BUNDLE, contribution, extractor, gram, manifest, means
from pooled_head import usual_head
from postgres_server import ON_FILES, Places

from protofleet.aggregator.coordinators.kinds import rounds_of
from protofleet.aggregator.coordinators.round_coordinator import RoundCoordinator
from protofleet.aggregator.monitoring.accuracy import AccuracyReport
from protofleet.aggregator.rounds.round_machine import Closed, Finished, Opened, Step
from protofleet.aggregator.server.run_report import Summary
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.operator_orders import Obeyed, give
from protofleet.contract.accuracy import Accuracy
from protofleet.contract.methods import method
from protofleet.contract.sums.statistics import ClassMeans
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Status

RIDGE = method("ffc").hyper["ridge"].default
DEVICES = ("a", "b", "c")


@pytest.fixture
def store(places: Places) -> Iterator[DurableStore]:
    with DurableStore(places("s"), BUNDLE, "fleet") as made:
        yield made


def core_of(store: DurableStore, min_clients: int = 3, rounds: int = 1, **policy: float) -> RoundCoordinator:
    settings = Settings(rounds=rounds, min_clients=min_clients, **policy)
    core = rounds_of(store, manifest(), BUNDLE, settings, now=0.0)
    for device in DEVICES:
        core.status(device, encode(Status(True, b"instance", 1)), 0.0)
    return core


def steps(core: RoundCoordinator, now: float) -> list[Step | Obeyed]:
    found = []
    while (step := core.advance(now, 1000.0 + now)) is not None:
        found.append(step)
    return found


def send(core: RoundCoordinator, device: str, now: float) -> str:
    number, name = core.rounds.number, core.rounds.method
    seed = DEVICES.index(device) + 10 * number
    made = gram(seed) if name == "ffc" else means(seed)
    given = contribution(made, run=core.parts.run, round=number, method=name, extractor=extractor(name))
    (decision,) = core.take([(device, encode(given, "f64"))], now)
    return decision.outcome if decision.outcome != "rejected" else decision.reason


def test_what_comes_back_is_made_again_of_what_the_others_sent(store: DurableStore, places: Places) -> None:
    core = core_of(store)
    for now in (0.0, 1.0):
        steps(core, now)
        assert [send(core, device, now) for device in DEVICES] == ["committed"] * 3
    assert steps(core, 2.0) == [Closed(2, "ffc"), Finished(2)]
    summary = Summary(store, "fleet", BUNDLE)
    assert summary.content(finished=True, global_version=2)["totals"]["committed"] == 6
    give(places("s"), "forget", "a", "me")
    (done,) = steps(core, 3.0)
    assert (done.outcome, done.version) == ("done, but for what devices trained in rounds of fedproto", 3)
    expected = gram(21).merge(gram(22))
    np.testing.assert_allclose(core.state.head.rows, usual_head(expected, RIDGE), rtol=1e-12)
    np.testing.assert_allclose(core.state.prototypes.rows, means(11).merge(means(12)).means[:2], rtol=1e-12)
    assert summary.content(finished=True, global_version=3)["totals"]["committed"] == 4
    assert store.state().version == 3
    again = core_of(store)
    assert send(again, "a", 4.0) == "it was forgotten; fleet admit a lets it in again"
    assert "a" not in again.record(2).uplink_bytes
    assert store.standing.records()["a"].refused == "it was forgotten"


@ON_FILES
def test_nothing_of_it_is_left_in_the_store_but_who_it_is(store: DurableStore, tmp_path: Path) -> None:
    core = core_of(store, min_clients=1)
    sums = [contribution(means(seed), run=core.parts.run) for seed in (0, 1)]
    steps(core, 0.0)
    core.take([(device, encode(each, "f64")) for device, each in zip("ab", sums, strict=True)], 0.0)
    store.commit([], {}, [(1, "a")])
    store.keep_accuracy([AccuracyReport(1, "a", Accuracy(9, 0.5))])
    marks = [encode(each, "f64")[-100:] for each in sums]
    assert all(mark in b"".join(path.read_bytes() for path in tmp_path.iterdir()) for mark in marks)
    give(tmp_path / "s", "forget", "a", "me")
    steps(core, 1.0)
    steps(core, 2.0)
    assert [mark in b"".join(path.read_bytes() for path in tmp_path.iterdir()) for mark in marks] == [False, True]
    with closing(sqlite3.connect(tmp_path / "s")) as db:
        tables = {
            name
            for (name,) in db.execute(
                "SELECT m.name FROM sqlite_master m, pragma_table_info(m.name) c"
                " WHERE m.type = 'table' AND c.name = 'device'"
            )
        }
        held = {name for name in tables if db.execute(f"SELECT 1 FROM {name} WHERE device = 'a'").fetchone()}
    assert held == {"refused", "fleet_order"}
    assert {"contribution", "accuracy", "refusal", "drift", "standing"} < tables


def test_what_is_forgotten_takes_nothing_with_it_that_came_in_its_place(places: Places) -> None:
    """Of a round long ago the store keeps who took part, and no sums: their number may be another device's by now."""
    with DurableStore(places("s"), BUNDLE, "fleet", keep_bytes=0) as store:
        core = core_of(store, min_clients=1, rounds=3)
        for device in DEVICES:
            core.rounds.death(device, b"instance")

        def contribute(*devices: str) -> None:
            for device in devices:
                core.rounds.birth(device, b"instance", 0.0)
            assert [type(step) for step in steps(core, 0.0)] == [Opened]
            assert [send(core, device, 0.0) for device in devices] == ["committed"] * len(devices)
            for device in devices:
                core.rounds.death(device, b"instance")

        def forget(device: str, now: float) -> list[Step | Obeyed]:
            give(places("s"), "forget", device, "me")
            return steps(core, now)

        contribute("c", "a")
        assert steps(core, 0.0) == [Closed(1, "fedproto")]
        contribute("a")
        assert steps(core, 0.0) == [Closed(2, "fedproto")]  # the sums of the first round go
        forget("a", 1.0)
        contribute("b")
        assert Closed(3, "fedproto") in forget("c", 2.0)
        np.testing.assert_allclose(core.state.prototypes.rows, means(31).means[:2], rtol=1e-12)


def test_rows_of_rounds_before_go_with_the_device_that_may_have_made_them(store: DurableStore, places: Places) -> None:
    core, drawn = core_of(store, min_clients=1, rounds=3), np.random.default_rng(0).normal(size=(3, 3, 4))
    for device in DEVICES:
        core.rounds.death(device, b"instance")

    def contribute(device: str, sums: np.ndarray, counts: list[int]) -> None:
        core.rounds.birth(device, b"instance", 0.0)
        assert [type(step) for step in steps(core, 0.0)] == [Opened]
        given = contribution(ClassMeans.from_means(sums, counts), run=core.parts.run, round=core.rounds.number)
        assert core.take([(device, encode(given, "f64"))], 0.0)[0].outcome == "committed"
        core.rounds.death(device, b"instance")

    def forget(device: str, now: float) -> list[int]:
        give(places("s"), "forget", device, "me")
        assert isinstance(core.advance(now, now), Obeyed)
        return [core.state.version, *core.state.prototypes.classes]

    contribute("a", drawn[0], [5, 5, 0])
    assert steps(core, 0.0) == [Closed(1, "fedproto")]
    contribute("b", drawn[1], [5, 0, 0])
    assert steps(core, 0.0) == [Closed(2, "fedproto")]
    assert forget("stranger", 1.0) == [2, 0, 1]
    contribute("c", drawn[2], [5, 0, 5])  # of a round that is still open
    assert forget("a", 2.0) == [3, 0]
    np.testing.assert_array_equal(core.state.prototypes.rows, drawn[1, :1])


def test_in_an_open_round_it_is_awaited_no_more(store: DurableStore, places: Places) -> None:
    core = core_of(store, min_clients=2)
    assert steps(core, 0.0) == [Opened(1, "fedproto", 0)]
    assert [send(core, device, 0.0) for device in "ab"] == ["committed"] * 2
    give(places("s"), "forget", "a", "me")
    give(places("s"), "remove", "c", "me")
    found = steps(core, 1.0)
    assert [step.outcome for step in found if isinstance(step, Obeyed)] == [
        "done, but for what devices trained in rounds of fedproto",
        "done",
    ]
    assert core.rounds.contributions == {"b"}
    assert core.state.version == 0
    assert send(core, "c", 1.0) == "it was removed; fleet admit c lets it in again"
    give(places("s"), "admit", "a", "me")
    steps(core, 2.0)
    assert send(core, "a", 2.0) == "committed"
    assert Closed(1, "fedproto") in steps(core, 2.0)


def test_what_nobody_is_left_to_make_is_told_to_be_gone(store: DurableStore, places: Places) -> None:
    core = core_of(store, min_clients=1)
    steps(core, 0.0)
    send(core, "a", 0.0)
    core.rounds.death("b", b"instance")
    core.rounds.death("c", b"instance")
    assert Closed(1, "fedproto") in steps(core, 1.0)
    assert len(core.state.prototypes.classes) == 2
    give(places("s"), "forget", "a", "me")
    steps(core, 2.0)
    assert core.state.prototypes.rows.shape == (0, 4)
    assert core.state.version == 2


def test_no_round_opens_while_it_is_paused(store: DurableStore, places: Places) -> None:
    core = core_of(store)
    give(places("s"), "pause", "", "me")
    assert [type(step) for step in steps(core, 0.0)] == [Obeyed]
    core = core_of(store)
    assert steps(core, 1.0) == []
    give(places("s"), "resume", "", "me")
    assert [type(step) for step in steps(core, 2.0)] == [Obeyed, Opened]


def test_a_round_is_opened_and_closed_by_order(store: DurableStore, places: Places) -> None:
    def said(what: str, core: RoundCoordinator, now: float) -> list[object]:
        give(places("s"), what, "", "me")
        return [step.outcome if isinstance(step, Obeyed) else step for step in steps(core, now)]

    core = core_of(store, min_clients=2, window=60.0, every=600.0, open_clients=1)
    assert steps(core, 0.0) == [Opened(1, "fedproto", 0)]
    assert said("close-round", core, 1.0) == ["refused: no round is open that has a contribution"]
    assert said("open-round", core, 2.0) == ["refused: round 1 is open"]
    send(core, "a", 2.0)
    assert said("close-round", core, 3.0) == ["done", Closed(1, "fedproto")]
    assert said("open-round", core, 4.0) == ["done: it opens once 1 device is online", Opened(2, "ffc", 0)]


@pytest.mark.parametrize("what", ["forget", "remove"])
def test_news_of_a_device_that_is_refused_open_no_round(store: DurableStore, places: Places, what: str) -> None:
    core = core_of(store, min_clients=1, when_new=10, window=60.0)
    told = encode(Status(True, b"instance", 1, metrics={"samples_new": 50.0}))
    give(places("s"), "pause", "", "me")
    steps(core, 0.0)
    core.status("a", told, 0.0)
    for order in (what, "resume"):
        give(places("s"), order, "a" if order == what else "", "me")
    assert [type(step) for step in steps(core, 1.0)] == [Obeyed, Obeyed]
    core.status("a", told, 2.0)
    assert steps(core, 3.0) == []
    core.status("b", told, 4.0)
    assert [type(step) for step in steps(core, 5.0)] == [Opened]

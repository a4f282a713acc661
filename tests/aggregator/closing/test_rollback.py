"""Going back: devices get what they had before the last rounds, and nothing is made of these again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from aggregator_samples import BUNDLE, contribution, extractor, gram, manifest, means
from postgres_server import Places

from protofleet.aggregator.commands.solve_again import solve_again
from protofleet.aggregator.coordinators.kinds import rounds_of, standing_sums
from protofleet.aggregator.coordinators.round_coordinator import RoundCoordinator
from protofleet.aggregator.database import read_only
from protofleet.aggregator.rounds.round_machine import Step
from protofleet.aggregator.server.run_report import Summary
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.operator_orders import Obeyed, give
from protofleet.aggregator.store.rollback_tables import KEPT
from protofleet.aggregator.store.schema import KIND as STORE
from protofleet.contract.errors import UsageError
from protofleet.contract.methods.ncm import UnitMeans
from protofleet.contract.sums.statistics import ClassMeans, Statistic
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Status
from tests.aggregator.blinded.test_blinded_set import DEVICES as FIVE
from tests.aggregator.blinded.test_blinded_set import PLAIN, World

DEVICES = ("a", "b")


@pytest.fixture
def store(places: Places) -> Iterator[DurableStore]:
    with DurableStore(places("s"), BUNDLE, "fleet") as made:
        yield made


def core_of(
    store: DurableStore, rounds: int = 9, calibrate: bool = False, method: str | None = None
) -> RoundCoordinator:
    settings = Settings(method=method, rounds=rounds, calibrate=calibrate, min_clients=2, encoding="f64")
    core = rounds_of(store, manifest(), BUNDLE, settings, now=0.0)
    for device in DEVICES:
        core.status(device, encode(Status(True, b"instance", 1)), 0.0)
    return core


def steps(core: RoundCoordinator, now: float) -> list[Step | Obeyed]:
    found = []
    while (step := core.advance(now, 1000.0 + now)) is not None:
        found.append(step)
    return found


def sent(device: str, number: int, name: str) -> Statistic:
    seed = 10 * number + DEVICES.index(device)
    if name == "ffc":
        return gram(seed)
    made = means(seed)
    return made if name == "fedproto" else UnitMeans(made.sums / 10, made.counts)


def a_round(core: RoundCoordinator, now: float) -> int:
    """Its number, once it is closed."""
    steps(core, now)
    number, name = core.rounds.number, core.rounds.method
    for device in DEVICES:
        made = contribution(
            sent(device, number, name), run=core.parts.run, round=number, method=name, extractor=extractor(name)
        )
        (decision,) = core.take([(device, encode(made, "f64"))], now)
        assert decision.outcome == "committed"
    while core.rounds.phase == "open" and core.rounds.number == number:
        core.advance(now, 1000.0 + now)
    return number


def ordered(core: RoundCoordinator, path: Path, now: float, detail: str = "1", device: str = "") -> Obeyed:
    give(path, "rollback", device, "me", detail=detail)
    return next(step for step in steps(core, now) if isinstance(step, Obeyed))


def rows(core: RoundCoordinator) -> dict[str, np.ndarray]:
    return {kind: each.rows for kind, each in core.state.rows.items()}


def test_devices_get_what_they_had_before_the_last_rounds_under_a_higher_version(
    store: DurableStore, places: Places
) -> None:
    core, states = core_of(store), []
    for number in (1, 2, 3):
        assert a_round(core, float(number)) == number
        states.append(core.state)
    done = ordered(core, places("s"), 10.0)
    assert (done.outcome, done.version) == ("done: as before round 3, 1 taken back", 4)
    np.testing.assert_array_equal(core.state.prototypes.rows, states[1].prototypes.rows)
    again = core_of(store)  # it is durable
    assert (again.state.version, again.announcement().global_version) == (4, 4)
    np.testing.assert_array_equal(again.state.prototypes.rows, states[1].prototypes.rows)
    done = ordered(again, places("s"), 20.0)  # further back: from round 2, since 3 counts no more
    assert (done.outcome, done.version) == ("done: as before round 2, 1 taken back", 5)
    np.testing.assert_array_equal(again.state.prototypes.rows, states[0].prototypes.rows)


def test_several_rounds_at_once_or_all_since_a_devices_first(store: DurableStore, places: Places) -> None:
    core = core_of(store)
    a_round(core, 1.0)
    first = core.state
    a_round(core, 2.0)
    a_round(core, 3.0)
    done = ordered(core, places("s"), 4.0, "2")
    assert done.outcome == "done: as before round 2, 2 taken back"
    np.testing.assert_array_equal(core.state.prototypes.rows, first.prototypes.rows)
    done = ordered(core, places("s"), 5.0, "", "b")  # back to nothing, which devices are told
    assert done.outcome == "done: as before round 1, 1 taken back"
    assert [len(each.classes) for each in core.state.rows.values()] == [0]
    assert core.state.version == 5
    assert not store.rollback.kept()
    for number in (6.0, 7.0, 8.0):
        a_round(core, number)
    assert ordered(core, places("s"), 9.0, "", "a").outcome == "done: as before round 4, 3 taken back"
    assert not store.rollback.kept()


def test_what_a_later_round_brought_is_told_to_be_gone(store: DurableStore, places: Places) -> None:
    """FFC's round closes the run: taken back, the head goes, and the prototypes stay."""
    core = core_of(store, rounds=1, calibrate=True)
    a_round(core, 1.0)
    before = rows(core)
    assert a_round(core, 2.0) == 2
    assert set(rows(core)) == {"prototypes", "head"}
    ordered(core, places("s"), 3.0)
    np.testing.assert_array_equal(rows(core)["prototypes"], before["prototypes"])
    assert not len(core.state.head.classes)


def test_nothing_is_made_again_of_what_was_taken_back(store: DurableStore, places: Places) -> None:
    core = core_of(store)
    a_round(core, 1.0)
    a_round(core, 2.0)
    ordered(core, places("s"), 3.0)
    assert not list(store.contributions(2, "fedproto"))
    with read_only(places("s"), STORE) as db:
        held = "SELECT count(*) FROM payload WHERE round = ?", "SELECT kept_bytes FROM round WHERE number = ?"
        assert [db.execute(each, (2,)).fetchone() for each in held] == [(0,), (0,)]
        assert db.execute("SELECT DISTINCT version FROM global").fetchall() == [(3,)]  # what was poisoned is gone
    assert len(list(store.contributions(1, "fedproto"))) == 2
    give(places("s"), "forget", "a", "me")  # made anew of round 1, not of 2
    steps(core, 4.0)
    expected = ClassMeans.from_means(sent("b", 1, "fedproto").means, sent("b", 1, "fedproto").counts).means[:2]
    np.testing.assert_allclose(core.state.prototypes.rows, expected, rtol=1e-12)
    listed = Summary(store, "fleet", BUNDLE).content(finished=False, global_version=4)["rounds"]
    assert [(each["round"], each["taken_back"], each["committed"]) for each in listed] == [(1, False, 1), (2, True, 0)]


def test_the_summary_of_a_running_aggregator_says_what_was_taken_back(store: DurableStore, places: Places) -> None:
    core, summary = core_of(store), Summary(store, "fleet", BUNDLE)
    a_round(core, 1.0)
    assert summary.content(finished=False, global_version=1)["totals"]["committed"] == 2
    ordered(core, places("s"), 3.0)
    found = summary.content(finished=False, global_version=2)
    assert (found["totals"]["committed"], found["rounds"][0]["taken_back"]) == (0, True)


def test_the_next_round_begins_with_the_earlier_state(store: DurableStore, places: Places) -> None:
    core = core_of(store)
    a_round(core, 1.0)
    a_round(core, 2.0)
    ordered(core, places("s"), 3.0)
    number = a_round(core, 4.0)
    assert (number, core.state.version) == (3, 4)
    expected = sent("a", 3, "fedproto").merge(sent("b", 3, "fedproto")).means[:2]
    np.testing.assert_allclose(core.state.prototypes.rows, expected, rtol=1e-12)


@pytest.mark.parametrize("detail", ["2", "0", "-1", "many", "", "١"])
def test_what_cannot_be_taken_back_is_refused_and_changes_nothing(
    store: DurableStore, places: Places, detail: str
) -> None:
    core = core_of(store)
    a_round(core, 1.0)
    before = core.state
    done = ordered(core, places("s"), 2.0, detail)
    assert done.outcome.startswith("refused: ")
    assert core.state is before
    assert ordered(core, places("s"), 3.0, "", "stranger").outcome == (
        "refused: stranger contributed to no closed round"
    )


def test_a_few_states_are_kept_and_none_that_a_forgotten_device_or_class_is_in(
    store: DurableStore, places: Places
) -> None:
    core = core_of(store, method="ncm")
    for number in range(1, KEPT + 3):
        a_round(core, float(number))
    assert store.rollback.kept() == list(range(3, KEPT + 3))
    done = ordered(core, places("s"), 20.0, str(KEPT + 1))
    assert done.outcome == "refused: the states kept reach back to before round 3, asked was before round 2"
    give(places("s"), "forget class", "", "me", detail="class-1")
    steps(core, 21.0)
    assert not store.rollback.kept()
    a_round(core, 22.0)
    assert store.rollback.kept() == [KEPT + 3]
    give(places("s"), "forget", "a", "me")
    steps(core, 23.0)
    assert ordered(core, places("s"), 24.0).outcome.startswith("refused: no earlier state is kept")


def test_a_blinded_round_is_taken_back_with_its_sum(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.round(*FIVE)
    assert solve_again(tmp_path / "store", PLAIN, {"ridge": 1e-3}).round == 1
    give(tmp_path / "store", "rollback", "", "me", detail="1")
    world.now += 1.0
    assert any(isinstance(step, Obeyed) and step.outcome.startswith("done") for step in world.steps())
    assert not len(world.core.state.head.classes)
    with pytest.raises(UsageError, match="contributions were dropped"):
        solve_again(tmp_path / "store", PLAIN, {"ridge": 1e-3})
    world.store.close()
    world.ledger.close()


def test_going_back_while_a_round_is_open_leaves_it_open_and_it_can_be_taken_back_in_turn(
    store: DurableStore, places: Places
) -> None:
    core = core_of(store)
    a_round(core, 1.0)
    first = core.state
    a_round(core, 2.0)
    steps(core, 3.0)
    (decision,) = core.take(
        [("a", encode(contribution(sent("a", 3, "fedproto"), run=core.parts.run, round=3), "f64"))], 3.0
    )
    assert (decision.outcome, core.rounds.phase) == ("committed", "open")
    ordered(core, places("s"), 3.5)
    assert (core.rounds.phase, core.rounds.number, core.state.version) == ("open", 3, 3)
    np.testing.assert_array_equal(core.state.prototypes.rows, first.prototypes.rows)
    core.take([("b", encode(contribution(sent("b", 3, "fedproto"), run=core.parts.run, round=3), "f64"))], 4.0)
    while core.rounds.number == 3 and core.rounds.phase == "open":
        core.advance(4.0, 1004.0)
    assert core.state.version == 4
    done = ordered(core, places("s"), 5.0)
    assert done.outcome == "done: as before round 3, 1 taken back"
    np.testing.assert_array_equal(core.state.prototypes.rows, first.prototypes.rows)


def test_where_sums_stand_forgetting_does_it(store: DurableStore, places: Places) -> None:
    core = standing_sums(store, manifest(name="ncm"), BUNDLE, Settings(method="ncm", standing=True, every=1.0), now=0.0)
    give(places("s"), "rollback", "", "me", detail="1")
    done = core.advance(0.0, 0.0)
    assert isinstance(done, Obeyed)
    assert done.outcome == (
        "refused: rollback is for rounds, and sums stand here; "
        "forget DEVICE makes the head as if it had never been there"
    )

"""`forget --class`: sums, head and store are those of a fleet in which no device ever sent the class."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from aggregator_samples import BUNDLE, CLASSES, WIDTH, contribution, extractor, manifest
from postgres_server import ON_FILES, Places

from protofleet.aggregator.coordinators.kinds import rounds_of, standing_sums
from protofleet.aggregator.coordinators.round_coordinator import RoundCoordinator
from protofleet.aggregator.coordinators.standing_coordinator import StandingCoordinator
from protofleet.aggregator.ingest.ingest import Decision
from protofleet.aggregator.merging.exact_sums import ExactSum
from protofleet.aggregator.merging.forgotten_classes import with_class
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.backup import back_up, restore
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.operator_orders import Obeyed, give
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import method
from protofleet.contract.methods.fedcof import GroupMeans
from protofleet.contract.methods.ncm import UnitMeans
from protofleet.contract.sums.statistics import FeatureGram, Statistic
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import MAX_ROUND, Contribution, Status

NAME = manifest().labels[1]
GONE = 1
NOW = itertools.count(1e6, 1e3)
DEVICES = {"a": (1, True), "b": (2, True), "c": (3, False)}  # seed, and whether it has samples of the class


def summed(name: str, device: str, *, without: bool = False) -> Statistic:
    """What a device sends, or would if it had never had the class."""
    seed, has = DEVICES[device]
    rng = np.random.default_rng(seed)
    features, labels = unit_rows(rng.normal(size=(40, WIDTH))), rng.integers(0, CLASSES, 40)
    groups = rng.integers(0, GroupMeans.GROUPS, 40)
    kept = labels != GONE if without or not has else np.ones(40, bool)
    features, labels, groups = features[kept], labels[kept], groups[kept]
    if name == "fedcof":
        return GroupMeans.of(features, labels * GroupMeans.GROUPS + groups, CLASSES * GroupMeans.GROUPS)
    return (FeatureGram if name == "ffc" else UnitMeans).of(features, labels, CLASSES)


@pytest.fixture
def store(places: Places) -> Iterator[DurableStore]:
    with DurableStore(places("s"), BUNDLE, "fleet") as made:
        yield made


def obeyed(core: RoundCoordinator | StandingCoordinator, path: Path, what: str, name: str = NAME) -> str:
    """The outcome of an order; what else is due is done, too."""
    give(path, what, "", "me", detail=name)
    found, now = "", next(NOW)
    while (step := core.advance(now, now)) is not None:
        found = step.outcome if isinstance(step, Obeyed) else found
    return found


# ── where sums stand ────────────────────────────────────────────────────────────────────────────────────────────────


def standing(store: DurableStore, name: str, encoding: str = "f64") -> StandingCoordinator:
    settings = Settings(method=name, standing=True, every=0.0, encoding=encoding)
    return standing_sums(store, manifest(), BUNDLE, settings, now=0.0, wall=lambda: 1000.0)


def message(core: StandingCoordinator, device: str, generation: int = 1, **how: bool) -> bytes:
    key = {"run": core.parts.run, "round": generation, "method": core.method.name, "bundle": BUNDLE}
    given = Contribution.of(
        summed(core.method.name, device, **how), **key, extractor=extractor(core.method.name), standing="present"
    )
    return encode(given, core.parts.terms.encoding(core.method))


def sent(core: StandingCoordinator, device: str, generation: int = 1, **how: bool) -> str:
    (decision,) = core.take([(device, message(core, device, generation, **how))], 0.0)
    return decision.outcome


def expect(core: StandingCoordinator, *devices: str, without: bool = True) -> None:
    """Sums and head are those of these devices, who never had the class."""
    total = ExactSum.zero(core.method.statistic, CLASSES, WIDTH)
    for device in devices:
        found = decode(message(core, device, without=without))
        assert isinstance(found, Contribution)
        total = total.add(ExactSum.of(found.statistic(core.method.statistic, CLASSES, WIDTH)))
    assert core.standing.total.equal(total)
    made = core.method.next_rows({}, total.statistic(core.method.statistic, WIDTH), core.method.resolve({}))
    for kind, rows in made.items():
        np.testing.assert_array_equal(core.state.rows[kind].rows, rows.rows)
        np.testing.assert_array_equal(core.state.rows[kind].classes, rows.classes)


@ON_FILES
@pytest.mark.parametrize("encoding", ["f64", "f32", "f16", "int8"])
def test_class_means_lose_the_class_and_keep_every_other_number(
    store: DurableStore, tmp_path: Path, encoding: str
) -> None:
    core = standing(store, "ncm", encoding)
    assert {sent(core, device) for device in DEVICES} == {"committed"}
    while core.advance(0.0, 0.0):
        pass
    row = np.ascontiguousarray(decode(message(core, "a")).body.rows[GONE]).tobytes()
    assert obeyed(core, tmp_path / "s", "forget class") == "done: 2 devices had sent it"
    expect(core, *DEVICES)
    assert core.announcement().withheld == (GONE,)
    assert (core.state.version, list(core.state.rows["means"].classes)) == (2, [0, 2])
    core.advance(next(NOW), 0.0)
    if encoding != "int8":  # whose rows are bytes and a scale
        assert row not in b"".join(path.read_bytes() for path in tmp_path.iterdir())
    core = standing(store, "ncm", encoding)
    assert core.advance(0.0, 0.0) is None
    expect(core, *DEVICES)
    assert sent(core, "a", 2) == "committed"  # on its way, or of a client that heeds no announcement: without the rows
    expect(core, *DEVICES)
    assert obeyed(core, tmp_path / "s", "forget class") == "done: nobody had sent it"
    assert obeyed(core, tmp_path / "s", "admit class") == "done"
    assert obeyed(core, tmp_path / "s", "admit class") == "done: it was not forgotten"
    assert core.announcement().withheld == ()
    assert {sent(core, device, 3) for device in DEVICES} == {"committed"}
    while core.advance(next(NOW), 0.0):
        pass
    expect(core, *DEVICES, without=False)


@ON_FILES
def test_sums_over_all_classes_go_whole_and_come_again_without_it(store: DurableStore, tmp_path: Path) -> None:
    core = standing(store, "ffc")
    assert {sent(core, device) for device in DEVICES} == {"committed"}
    outcome = obeyed(core, tmp_path / "s", "forget class")
    assert outcome.startswith("done: 2 devices had sent it, and what was summed with other classes went whole, until")
    expect(core, "c")
    core.advance(next(NOW), 0.0)
    held = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert [message(core, device)[-64:] in held for device in DEVICES] == [False, False, True]
    core = standing(store, "ffc")
    expect(core, "c")
    assert [sent(core, "a", 2), sent(core, "a", 2, without=True), sent(core, "b", 2, without=True)] == [
        "rejected",
        "committed",
        "committed",
    ]
    while core.advance(0.0, 0.0):
        pass
    expect(core, "c", "a", "b")
    assert store.refused_devices.reasons() == {}


def missing(core: StandingCoordinator) -> list[Decision]:
    """Who is told to send again; not what every device hears at its birth, which is for older copies of its state."""
    return [each for each in core.stalled(0.0) if each.receipt.round < MAX_ROUND]


@pytest.mark.parametrize("name", ["ncm", "ffc"])
def test_a_device_that_was_away_all_the_while_is_told_to_send_again(
    store: DurableStore, places: Places, name: str
) -> None:
    """It never heard that the class was forgotten, and holds that all it has sent counts."""
    core, born = standing(store, name), encode(Status(True, b"instance", 1))
    assert {sent(core, device) for device in DEVICES} == {"committed"}
    core.status("b", born, 0.0)
    obeyed(core, places("s"), "forget class")
    core.stalled(0.0)
    core.status("a", encode(Status(True, b"instance", 1)), 0.0)
    told = [(each.device, each.receipt.status) for each in missing(core)]
    assert told == ([("a", "late")] if name == "ffc" else [])  # of ncm nothing is missing
    core.status("a", encode(Status(False, b"instance", 1)), 0.0)
    obeyed(core, places("s"), "admit class")
    assert [(each.device, each.receipt.status) for each in missing(core)] == [("b", "late")]
    core = standing(store, name)
    for device in DEVICES:
        core.status(device, born, 0.0)
    assert [(each.device, each.receipt.held) for each in missing(core)] == [("a", 1), ("b", 1)]
    assert sent(core, "a", 2) == "committed"
    core.status("a", encode(Status(True, b"instanc2", 1)), 0.0)
    assert missing(core) == []


@pytest.mark.parametrize("first", ["forgotten twice", "on its way", "both"])
def test_what_was_taken_of_a_device_that_is_away_is_remembered_until_it_is_told(
    store: DurableStore, places: Places, first: str
) -> None:
    """The class is forgotten once more before it is admitted, or its rows were on their way, and were left out."""
    core, path = standing(store, "ncm"), places("s")
    assert {sent(core, device) for device in DEVICES} == {"committed"}
    assert obeyed(core, path, "forget class") == "done: 2 devices had sent it"
    if first != "forgotten twice":
        assert [sent(core, "a", 2), sent(core, "b", 2, without=True)] == ["committed"] * 2
    if first != "on its way":
        core = standing(store, "ncm")
        assert obeyed(core, path, "forget class") == "done: nobody had sent it"
    core = standing(store, "ncm")
    assert obeyed(core, path, "admit class") == "done"
    for device in DEVICES:
        core.status(device, encode(Status(True, b"instance", 1)), 0.0)
    told = [("a", 1), ("b", 1)] if first == "forgotten twice" else [("a", 2)]
    assert [(each.device, each.receipt.held) for each in missing(core)] == told


def test_a_class_that_the_bundle_has_not_is_refused(store: DurableStore, places: Places) -> None:
    outcome = obeyed(standing(store, "ncm"), places("s"), "forget class", "hamstr")
    assert outcome.startswith("refused: the fleet's bundle has no class 'hamstr', try one of ")
    assert store.standing.classes_forgotten() == ()


def test_a_restored_backup_forgets_the_class_again(tmp_path: Path, places: Places) -> None:
    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        core = standing(store, "ncm")
        assert sent(core, "a") == "committed"
        back_up(places("s"), tmp_path / "b", "me")
        assert obeyed(core, places("s"), "forget class") == "done: 1 device had sent it"
    assert restore(tmp_path / "b", places("s"), "me", force=True).again == 1
    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        core = standing(store, "ncm")
        while core.advance(0.0, 0.0):
            pass
        expect(core, "a")
        assert core.announcement().withheld == (GONE,)


# ── in rounds ───────────────────────────────────────────────────────────────────────────────────────────────────────


def rounds(
    store: DurableStore, name: str, devices: Iterable[str] = DEVICES, least: int = 1, *, windows: bool = False
) -> RoundCoordinator:
    stays = {"every": 1.0, "window": 1.0, "max_clients": least} if windows else {}
    chosen = {
        "method": name,
        "rounds": 2,
        "calibrate": False,
        "min_clients": least,
        "max_share": 1.0,
    }
    settings = Settings(encoding="f64", **chosen, **stays)  # type: ignore[arg-type]
    core = rounds_of(store, manifest(), BUNDLE, settings, now=0.0)
    for device in devices:
        core.status(device, encode(Status(True, b"instance", 1)), 0.0)
    return core


def contribute(core: RoundCoordinator, device: str, **how: bool) -> str:
    name = core.rounds.method
    key = {"run": core.parts.run, "round": core.rounds.number, "method": name, "extractor": extractor(name)}
    (decision,) = core.take([(device, encode(contribution(summed(name, device, **how), **key), "f64"))], 0.0)
    return decision.outcome


@pytest.mark.parametrize("name", ["ncm", "fedcof", "ffc"])
def test_what_comes_back_of_a_round_is_what_a_fleet_without_the_class_would_have(tmp_path: Path, name: str) -> None:
    found = []
    for never in (False, True):
        path = tmp_path / str(never)
        with DurableStore(path, BUNDLE, "fleet") as store:
            devices = ["c"] if never and name == "ffc" else list(DEVICES)
            core = rounds(store, name, devices)
            core.advance(0.0, 0.0)
            assert {contribute(core, device, without=never) for device in devices} == {"committed"}
            while core.advance(1.0, 1.0):
                if core.rounds.number == 2:
                    break
            if not never:
                assert obeyed(core, path, "forget class").startswith("done: 2 devices had sent it")
                assert core.announcement().withheld == (GONE,)
                assert contribute(core, "a") == ("rejected" if name == "ffc" else "committed")  # of the second round
                assert all(GONE not in each.body.classes for n in (1, 2) for each in core.books.messages(n, name))
            found.append(core.state)
    assert found[0].version == found[1].version + 1
    for kind, rows in found[1].rows.items():
        np.testing.assert_array_equal(found[0].rows[kind].classes, rows.classes)
        np.testing.assert_array_equal(found[0].rows[kind].rows, rows.rows)


@pytest.mark.parametrize("name", ["ncm", "ffc"])
def test_an_open_round_goes_on_without_the_class(store: DurableStore, places: Places, name: str) -> None:
    core = rounds(store, name, least=3)
    core.advance(0.0, 0.0)
    assert [contribute(core, "a"), contribute(core, "c")] == ["committed"] * 2
    obeyed(core, places("s"), "forget class")
    assert contribute(core, "a", without=True) == "duplicate"  # ours sends nothing more in this round
    core = rounds(store, name, least=3)
    assert core.rounds.contributions == {"a", "c"}
    assert contribute(core, "b", without=True) == "committed"
    core.advance(next(NOW), 0.0)
    assert (core.state.version, core.rounds.phase) == (1, "waiting")
    (rows,) = core.state.rows.values()
    assert list(rows.classes) == [0, 2]
    left = [summed(name, device, without=True).counts.sum() for device in DEVICES]
    assert [each.samples for each in core.books.messages(1, name)] == ([0, *left[1:]] if name == "ffc" else left)


def test_what_networks_were_trained_with_cannot_be_forgotten(store: DurableStore, places: Places) -> None:
    core = rounds_of(store, manifest(), BUNDLE, Settings(rounds=1), now=0.0)
    outcome = obeyed(core, places("s"), "forget class")
    assert outcome.startswith("refused: in rounds of fedproto devices train on all their classes, and no network unle")
    assert core.announcement().withheld == ()


def test_what_earlier_rounds_trained_cannot_be_forgotten_by_another_plan(store: DurableStore, places: Places) -> None:
    store.open_round(1, "fedproto", 0, 1.0)
    core = rounds(store, "ncm")
    assert obeyed(core, places("s"), "forget class").startswith("refused: in rounds of fedproto devices train")


def test_a_statistic_with_several_tables_loses_the_class_in_each() -> None:
    sizes = {"run": b"run1", "round": 1, "method": "fedhkd", "bundle": BUNDLE}
    kind = method("fedhkd").statistic
    counts = np.array([2, 3, 4])
    whole = Contribution.of(kind.build([np.ones((3, 5)) * counts[:, None], np.ones((3, 3)) * 2], counts), **sizes)
    left = whole.without((GONE,))
    assert [len(rows) for rows in (left.body.rows, left.counts, *left.further)] == [2, 2, 2]
    assert not left.holds((GONE,))


def test_a_class_that_is_forgotten_again_is_named_once() -> None:
    assert with_class(("cat", "dog"), "cat") == ("dog", "cat")


def test_what_came_late_before_does_not_bring_the_class_back(store: DurableStore, places: Places) -> None:
    core = rounds(store, "ncm", ("a", "c"), least=2, windows=True)
    core.advance(next(NOW), 0.0)
    key = {"run": core.parts.run, "round": 1, "method": "ncm", "extractor": extractor("ncm")}
    late = encode(contribution(summed("ncm", "b"), **key), "f64")
    for number in (1, 2):
        assert [contribute(core, device, without=number == 2) for device in "ac"] == ["committed"] * 2
        for _ in range(3):
            core.advance(next(NOW), 0.0)
        if number == 1:
            (decision,) = core.take([("b", late)], 0.0)
            assert (core.rounds.number, decision.outcome) == (2, "late")
            obeyed(core, places("s"), "forget class")
    assert (core.state.round, list(core.state.rows["means"].classes)) == (2, [0, 2])


def test_whose_rows_were_taken_out_is_told_whatever_became_of_other_classes_since(
    store: DurableStore, places: Places
) -> None:
    first, _, other = manifest().labels[:3]
    core, path = standing(store, "ncm"), places("s")
    assert sent(core, "a") == "committed"
    for what, name in (("forget", NAME), ("forget", first), ("admit", NAME), ("admit", other)):
        obeyed(core, path, f"{what} class", name)
    core = standing(store, "ncm")
    core.status("a", encode(Status(True, b"instance", 1)), 0.0)
    assert [(each.device, each.receipt.status) for each in missing(core)] == [("a", "late")]

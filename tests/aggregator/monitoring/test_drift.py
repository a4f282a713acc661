"""When a device departs from itself: the rule's false alarms on synthetic fleets, and what an operator sees."""

from __future__ import annotations

import io
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from aggregator_samples import BUNDLE
from commands import one_error_line, run
from log_lines import drawing
from postgres_server import Places
from scraped import text_of

from protofleet.aggregator.metrics.metrics import Metrics
from protofleet.aggregator.monitoring import drift as drift_module
from protofleet.aggregator.monitoring.drift import BEFORE, KEPT, departure
from protofleet.aggregator.monitoring.events import DriftSuspected
from protofleet.aggregator.server.standing_report import StandingSummary
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.operator_orders import give
from protofleet.contract.drift import FARTHEST, Drift, read_drift
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Status
from tests.aggregator.merging.test_exact_sums import core_of, message, outcomes, steps

DEVICES, REPORTS = 40, 64
_Sizes = Callable[[np.random.Generator], int]
_Photos = Callable[[np.random.Generator, int], np.ndarray]
LAWS: dict[str, tuple[_Sizes, _Photos]] = {  # photos of each report, and their squared distances
    "few alike": (lambda rng: 20, lambda rng, n: rng.chisquare(50, n) / 50),
    "few of heavy tails": (lambda rng: 20, lambda rng, n: rng.lognormal(-0.5, 1.0, n)),
    "twenty to four hundred": (lambda rng: int(rng.integers(20, 400)), lambda rng, n: rng.exponential(1.0, n)),
}


def told(rng: np.random.Generator, law: str, times: float = 1.0) -> Drift:
    sizes, photos = LAWS[law]
    count = sizes(rng)
    far = np.minimum(times * photos(rng, count), FARTHEST)
    return Drift(count, float((far > 2.0).mean()), float(far.mean()))


@pytest.mark.parametrize("law", LAWS)
def test_false_alarms_are_rare(law: str) -> None:
    """At most one in 1,400 reports in the long run (benchmarks/heads/drift.py); of so few reports, one in 400."""
    rng, alarms = np.random.default_rng(1), 0
    for _ in range(DEVICES):
        history = [told(rng, law) for _ in range(REPORTS)]
        alarms += sum(departure(history[:last]) is not None for last in range(BEFORE + 2, REPORTS + 1))
    assert alarms <= DEVICES * (REPORTS - BEFORE - 1) / 400


@pytest.mark.parametrize("law", LAWS)
def test_photos_of_another_kind_are_found_at_the_second_report(law: str) -> None:
    rng, found = np.random.default_rng(3), 0
    for _ in range(DEVICES):
        history = [told(rng, law) for _ in range(30)]
        assert departure([*history, told(rng, law, 3.0)]) is None  # one is no drift
        found += departure([*history, *(told(rng, law, 3.0) for _ in range(2))]) is not None
    assert found >= 0.75 * DEVICES


def test_too_short_a_history_suspects_nobody_and_what_lasts_becomes_usual() -> None:
    usual, far = Drift(30, 0.0, 1.0), Drift(30, 0.6, 4.0)
    assert departure([usual] * (BEFORE - 1) + [far] * 2) is None
    assert departure([usual] * BEFORE + [far] * 2) is not None
    assert departure([usual] * 20 + [far] * 10) is not None
    assert departure([usual] * 20 + [far] * 30) is None
    assert departure([far] * 20 + [usual] * 2) is None  # nearer than usual
    assert departure([Drift(30, 0.0, 0.0)] * 20) is None  # photos that are all the same
    assert departure([usual] * 20 + [Drift(30, 1 / 30, 1.0)] * 2) is None  # a single one of thirty, and where none was
    mixed = [Drift(30, 0.0, distance) for distance in (1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 1.0)]
    assert departure([*mixed, *[Drift(30, 0.0, 3.0)] * 2]) is not None  # the last two are no part of what is usual


def test_class_means_that_moved_are_found_where_photos_are_as_near_as_usual() -> None:
    history = [Drift(30, 0.0, 1.0, moved) for moved in (1.0, 1.2, 0.9, 1.1, 1.0, 0.8, 1.1, 1.0, 0.9, 1.2)]
    assert departure([*history, Drift(30, 0.0, 1.0, 4.0)]) is None  # one is no drift
    found = departure([*history, *[Drift(30, 0.0, 1.0, 4.0)] * 2])
    assert found is not None
    assert (found.figure, found.now, found.usual) == ("moved", 4.0, 1.0)
    assert departure([*history, *[Drift(30, 0.0, 1.0)] * 2]) is None  # not told any more
    assert departure([*history, *[Drift(30, 0.0, 1.0, 4.0)] * 2, Drift(30, 0.0, 1.0)]) is None  # nor then
    older = [Drift(30, 0.0, 1.0)] * 20  # of a release that did not tell it
    assert departure([*older, *[Drift(30, 0.0, 1.0, 4.0)] * 2]) is None
    assert departure([*older, *history, *[Drift(30, 0.0, 1.0, 4.0)] * 2]) is not None


def test_a_device_of_bursts_is_not_suspected_for_a_burst() -> None:
    history = [Drift(30, 0.0, 1.0, value) for value in (2.0, 3.0, 2.0, 2.0, 9.0, 2.0, 3.0, 2.0) * 8]
    assert all(departure([*history[:last], *[Drift(30, 0.0, 1.0, 9.0)] * 2]) is None for last in range(8, 64))
    assert departure([*history[:40], *[Drift(30, 0.0, 1.0, 60.0)] * 2]) is not None


@pytest.mark.parametrize(
    "wrong",
    [
        {"moved": -0.1},
        {"moved": 1e4},
        {"moved": float("nan")},
        {"samples": 19.0},
        {"samples": 20.5},
        {"samples": 1e9},
        {"unlike": 1.1},
        {"unlike": -0.1},
        {"distance": 10.1},
    ],
)
def test_what_cannot_be_true_is_not_heard(wrong: dict[str, float]) -> None:
    metrics = Drift(20, 0.5, 1.0).metrics()
    assert read_drift(metrics, max_samples=1000) == Drift(20, 0.5, 1.0)
    assert read_drift(metrics | {f"drift_{name}": value for name, value in wrong.items()}, max_samples=1000) is None
    assert read_drift({name: metrics[name] for name in list(metrics)[:2]}, max_samples=1000) is None


@pytest.fixture
def store(places: Places) -> Iterator[DurableStore]:
    with DurableStore(places("s"), BUNDLE, "fleet") as made:
        yield made


def test_an_operator_is_told_sees_it_and_a_forgotten_device_leaves_nothing(
    store: DurableStore, tmp_path: Path, places: Places
) -> None:
    core, path = core_of(store), places("s")
    outcomes(core, message(core, "a", 1, 0), message(core, "b", 1, 1))
    metrics = Metrics("fleet", core, store.refused_devices)

    def says(device: str, drift: Drift, core: object = core) -> list[DriftSuspected]:
        core.status(device, encode(Status(True, b"instance", 1, metrics=drift.metrics())), 0.0)  # type: ignore[attr-defined]
        return list(store.drift.commit_heard(1.0))

    for report in range(BEFORE + 70):
        usual = Drift(20 + report, 0.05, 1.0)
        assert says("a", usual) == says("b", usual) == []
        assert says("a", usual) == []  # a retained status that is heard again is no report
    assert len(store.drift._reports_of("a")) == KEPT
    far = Drift(20, 0.06, 1.5)
    assert says("a", far) == []
    (event,) = says("a", Drift(21, 0.06, 1.5))
    assert event == DriftSuspected("a", "distance", 1.5, 1.0)
    assert says("a", Drift(22, 0.06, 1.5)) == []  # told once
    metrics.look()
    assert 'devices{state="drifting"} 1' in text_of(metrics)
    summary = StandingSummary(store, "fleet", BUNDLE).content(finished=False, global_version=0)
    assert summary["drifting"] == {"a": {"figure": "distance", "now": 1.5, "usual": 1.0, "limit": 1.2}}
    shown = run("fleet", "show", "a", "--store", path).stdout
    assert (
        "newest 22 photos: distance to earlier photos 1.50, share unlike earlier photos 0.06, 64 reports kept" in shown
    )
    assert "drift suspected: distance to earlier photos was usually 1.00" in shown
    listed = run("fleet", "list", "--store", path, "--json", tmp_path / "list.json").stdout
    assert "1.50, usually 1.00" in listed
    devices = {d["device"]: d["drift"] for d in json.loads((tmp_path / "list.json").read_text())["devices"]}
    assert devices["b"] == {
        "reports": KEPT,
        "samples": 97,
        "unlike": 0.05,
        "distance": 1.0,
        "moved": None,
        "suspected": None,
    }
    give(path, "forget", "a", "me")
    steps(core, 2.0)
    assert says("a", Drift(23, 0.06, 1.5)) == []  # refused
    assert (store.drift.suspected.facts(), store.drift._reports_of("a")) == ({}, [])
    assert says("b", far) == []
    assert [event.device for event in says("b", Drift(21, 0.06, 1.5))] == ["b"]


def test_who_is_suspected_is_known_after_a_restart(places: Places) -> None:
    for report in range(BEFORE + 2):
        with DurableStore(places("s"), BUNDLE, "fleet") as store:
            for _ in range(2):  # a status that is heard again is no report
                store.drift.hear("a", Drift(20 + report, 0.0, 1.0 + (report >= BEFORE)).metrics(), max_samples=1000)
                store.drift.commit_heard(1.0)
    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        assert set(store.drift.suspected.facts()) == {"a"}
        assert len(store.drift._reports_of("a")) == BEFORE + 2
        store.drift.hear("a", Drift(20, 0.0, 1.0).metrics(), max_samples=1000)
        assert (store.drift.commit_heard(1.0), store.drift.suspected.facts()) == ([], {})  # it is as it was


def test_a_flood_of_names_is_not_heard_and_nothing_is_written_of_who_was_forgotten(
    store: DurableStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drift_module, "MAX_DEVICES", 1)

    def kept_of(*devices: str) -> list[int]:
        for device in devices:
            store.drift.hear(device, Drift(20, 0.0, 1.0).metrics(), max_samples=1000)
        store.drift.commit_heard(1.0)
        return [len(store.drift._reports_of(device)) for device in devices]

    assert kept_of("a", "b") == [1, 0]
    store.drift.hear("a", Drift(21, 0.0, 1.0).metrics(), max_samples=1000)
    store.drift.forget("a")
    assert kept_of("b") == [1]
    assert len(store.drift._reports_of("a")) == 1  # its rows go with the order, and no further one comes


def test_the_line_that_a_person_reads() -> None:
    text = io.StringIO()
    drawing(text)(DriftSuspected("porch", "unlike", 0.4, 0.02))
    said = "drift: porch departs from itself: share unlike earlier photos 40%, usually 2%; protofleet fleet show porch"
    assert said in text.getvalue()


def test_whoever_only_told_of_drift_is_known_and_can_be_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with DurableStore(path, BUNDLE, "fleet") as store:
        core = core_of(store)
        said = Status(True, bytes(8), 1, metrics=Drift(20, 0.5, 2.0).metrics())
        core.status("ghost", encode(said), 0.0)
        store.drift.commit_heard(1.0)
        assert run("fleet", "show", "ghost", "--store", path).stdout.startswith("ghost: 0 rounds\nnewest 20 photos")
        assert run("forget", "ghost", "--store", path, "--wait", "0").returncode == 0
        steps(core, 1.0)
        assert "ghost" not in {device for (device,) in store.drift._db.execute("SELECT device FROM drift")}


@pytest.mark.parametrize(
    "row", ["'q', {n}, 1.0, 0, 0.5, 0.5", "'q', {n}, 1.0, 20, 'x', 0.5", "x'ff', {n}, 1.0, 20, 0.5, 0.5"]
)
def test_reports_that_no_aggregator_wrote_are_one_line(tmp_path: Path, row: str) -> None:
    path = tmp_path / "s"
    DurableStore(path, BUNDLE, "fleet").close()
    with closing(sqlite3.connect(path)) as db:
        for number in range(BEFORE + 2):
            db.execute(f"INSERT INTO drift VALUES ({row.format(n=number)}, NULL)")
        db.commit()
    for words in (("list",), ("show", "q"), ("log",)):
        assert "expected what an aggregator writes" in one_error_line(run("fleet", *words, "--store", path))

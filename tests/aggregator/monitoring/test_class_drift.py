"""When a class departs from itself, from sums that stand: what came of it beside what its devices had."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from aggregator_samples import BUNDLE, CLASSES, WIDTH, extractor, manifest
from commands import run
from postgres_server import ON_FILES, Places
from scraped import text_of

from protofleet.aggregator.coordinators.kinds import standing_sums
from protofleet.aggregator.coordinators.standing_coordinator import StandingCoordinator
from protofleet.aggregator.metrics.metrics import Metrics
from protofleet.aggregator.monitoring.class_drift import ClassDriftTable, Moved, moved
from protofleet.aggregator.monitoring.drift import BEFORE, KEPT
from protofleet.aggregator.monitoring.events import ClassDriftSuspected
from protofleet.aggregator.server.standing_report import StandingSummary
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.operator_orders import give
from protofleet.contract.drift import LEAST
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import method
from protofleet.contract.methods.fedproto import FedProto
from protofleet.contract.methods.ncm import UnitMeans
from protofleet.contract.sums.statistics import FeatureGram, Statistic
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Contribution

LABELS = manifest().labels
Features = np.ndarray


def photos(rng: np.random.Generator, number: int, away: float = 0.0, width: int = WIDTH) -> Features:
    """Unit features about a class's mean, which is so far away from where it was."""
    mean = np.zeros(width)
    mean[0], mean[1] = 1.0, away
    return unit_rows(mean + 0.3 * rng.normal(size=(number, width)))


def summed(kind: type[Statistic], features: Features, number: int = 0) -> Statistic:
    return kind.of(features, np.full(len(features), number), CLASSES)


@pytest.mark.parametrize("kind", [UnitMeans, FeatureGram])
def test_the_distance_is_about_one_where_nothing_changed_and_large_where_it_did(kind: type[Statistic]) -> None:
    rng = np.random.default_rng(0)
    found: dict[float, list[float]] = {0.0: [], 1.0: []}
    for away, distances in found.items():
        for _ in range(200):
            had, came = photos(rng, 60), photos(rng, 30, away)
            (said,) = moved(summed(kind, had), summed(kind, np.concatenate([had, came])))
            assert (said.number, said.samples) == (0, 30)
            distances.append(said.distance)
            plain = ((came.mean(0) - had.mean(0)) ** 2).sum() / ((1 - (had.mean(0) ** 2).sum()) * (1 / 60 + 1 / 30))
            assert said.distance == pytest.approx(plain)
    assert 0.8 < np.mean(found[0.0]) < 1.2
    assert min(found[1.0]) > 3 * np.mean(found[0.0])


def test_few_samples_are_compared_with_nothing() -> None:
    rng = np.random.default_rng(0)
    enough, few = photos(rng, LEAST), photos(rng, LEAST - 1)
    for had, came, expected in ((enough, enough, 1), (few, enough, 0), (enough, few, 0)):
        assert len(moved(summed(UnitMeans, had), summed(UnitMeans, np.concatenate([had, came])))) == expected
    same = np.repeat(enough[:1], LEAST, axis=0)  # of no spread
    assert moved(summed(UnitMeans, same), summed(UnitMeans, np.concatenate([same, same]))) == []
    trained = FedProto().statistic
    assert moved(summed(trained, enough), summed(trained, np.concatenate([enough, enough]))) == []


# ── a fleet ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def store(places: Places) -> Iterator[DurableStore]:
    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        yield store


def core_of(store: DurableStore) -> StandingCoordinator:
    settings = Settings(method="ncm", standing=True, every=0.0, encoding="f64")
    return standing_sums(store, manifest(), BUNDLE, settings, now=0.0, wall=lambda: 1000.0)


class Device:
    """Has photos of class 1, and gets more of them."""

    def __init__(self, core: StandingCoordinator, name: str, seed: int) -> None:
        self.core, self.name, self.rng = core, name, np.random.default_rng(seed)
        self.features, self.generation = photos(self.rng, 40), 0

    def sends(self, away: float = 0.0) -> list[object]:
        """Its sums with 30 photos more; what is suspected from now on."""
        self.features = np.concatenate([self.features, photos(self.rng, 30, away)])
        self.generation += 1
        key = {"run": self.core.parts.run, "round": self.generation, "method": "ncm", "bundle": BUNDLE}
        given = Contribution.of(
            summed(method("ncm").statistic, self.features, 1), **key, extractor=extractor("ncm"), standing="present"
        )
        (decision,) = self.core.take([(self.name, encode(given, "f64"))], 0.0)
        assert decision.outcome == "committed"
        return list(self.core.parts.departures(7.0))


def drifted(core: StandingCoordinator) -> ClassDriftSuspected:
    devices = [Device(core, name, seed) for seed, name in enumerate("abc")]
    for _ in range(BEFORE):
        assert [each.sends() for each in devices] == [[], [], []]
    assert devices[0].sends(2.0) == []  # one report is an accident
    (event,) = devices[1].sends(2.0)
    assert isinstance(event, ClassDriftSuspected)
    assert devices[2].sends(2.0) == []  # said once
    return event


def test_an_operator_is_told_once_and_sees_it(store: DurableStore, tmp_path: Path, places: Places) -> None:
    core = core_of(store)
    event = drifted(core)
    assert event.name == LABELS[1]
    assert event.now > 4 * event.usual
    assert list(core.parts.store.class_drift.suspected.facts()) == [LABELS[1]]
    summary = StandingSummary(store, "fleet", BUNDLE).content(finished=False, global_version=1)
    assert list(summary["classes_drifting"]) == [LABELS[1]]
    metrics = Metrics("fleet", core, store.refused_devices)
    metrics.look()
    assert "\nprotofleet_classes_drifting 1.0\n" in text_of(metrics)
    told = run("fleet", "list", "--store", places("s"), "--json", tmp_path / "j")
    assert f"drift suspected of class {LABELS[1]}: " in told.stdout
    assert list(json.loads((tmp_path / "j").read_text())["classes_drifting"]) == [LABELS[1]]


def test_it_is_known_after_a_restart_and_what_lasts_becomes_usual(tmp_path: Path) -> None:
    with DurableStore(tmp_path / "s", BUNDLE, "fleet") as store:
        drifted(core_of(store))
    with DurableStore(tmp_path / "s", BUNDLE, "fleet") as store:
        table = store.class_drift
        assert list(table.suspected) == [LABELS[1]]
        for _ in range(KEPT):
            table.hear("a", [Moved(1, 30, 40.0)], LABELS)
            table.commit_heard(8.0)
        assert table.suspected == {}
    with closing(sqlite3.connect(tmp_path / "s")) as db:
        assert db.execute("SELECT count(*) FROM class_drift").fetchone() == (KEPT,)


@ON_FILES
@pytest.mark.parametrize(
    ("what", "named", "left"),
    [
        ("forget", {"device": "b"}, {"a", "c"}),
        ("forget class", {"device": "", "detail": LABELS[1]}, set()),
    ],
)
def test_what_is_forgotten_leaves_nothing(
    store: DurableStore, tmp_path: Path, what: str, named: dict[str, str], left: set[str]
) -> None:
    core = core_of(store)
    drifted(core)
    core.parts.store.class_drift.hear("b", [Moved(1, 30, 2.0)], LABELS)  # and not kept yet
    give(tmp_path / "s", what, named["device"], "me", detail=named.get("detail", ""))
    while core.advance(1e3, 1e3):
        pass
    assert core.parts.departures(9.0) == []
    with closing(sqlite3.connect(tmp_path / "s")) as db:
        assert {name for (name,) in db.execute("SELECT device FROM class_drift")} == left
    assert core.parts.store.class_drift.suspected == ClassDriftTable(store._file).suspected


def test_false_alarms_are_rare(store: DurableStore) -> None:
    """Of one class, at most two in 400 reports; benchmarks/heads/class_drift.py has the long run."""
    rng, table, alarms = np.random.default_rng(1), store.class_drift, 0
    for _ in range(400):
        table.hear("a", [Moved(0, 30, float(rng.chisquare(WIDTH) / WIDTH))], LABELS)
        alarms += len(table.commit_heard(1.0))
    assert alarms <= 2

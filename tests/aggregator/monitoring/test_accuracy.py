"""What the aggregator makes of what devices say of their accuracy: whom it hears, what it keeps, sums up and tells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from aggregator_samples import BUNDLE, contribution, manifest, means
from hypothesis import example, given
from hypothesis import strategies as st
from postgres_server import Places

from protofleet.aggregator.coordinators.kinds import rounds_of
from protofleet.aggregator.coordinators.round_coordinator import SETTLE_S
from protofleet.aggregator.monitoring import events
from protofleet.aggregator.monitoring.accuracy import AccuracyReport, fleet_accuracy
from protofleet.aggregator.server.run_events import RunEvents
from protofleet.aggregator.server.run_report import Summary
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.accuracy import Accuracy
from protofleet.contract.files.json_output import write_json
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Status
from tests.aggregator.metrics.test_console import _lines

DEVICES = ("a", "b")
SETTINGS = Settings(rounds=2, calibrate=False, min_clients=2, max_samples=1000)
SAID = {
    "a": Accuracy(10, 0.5, 0.75, 0.25, among_own=1.0, own_samples=8, classes=10, own=2),
    "b": Accuracy(30, 0.25, 0.25, 0.75, 0.5, among_own=0.5, alone_among_own=0.5, own_samples=30, classes=10, own=3),
}


class Run:
    """A coordinator with its teller, in one process's life; what was told is in `told`."""

    def __init__(self, store: DurableStore, now: float = 0.0) -> None:
        self.core = rounds_of(store, manifest(), BUNDLE, SETTINGS, now=now)
        self.told: list[events.AccuracyTold] = []
        self.teller = RunEvents(
            self.core, lambda e: self.told.append(e) if isinstance(e, events.AccuracyTold) else None
        )
        for device in DEVICES:
            self.core.status(device, encode(Status(True, b"instance", 1)), now)
        self.teller.resumed()
        self.advance(now)

    def advance(self, now: float) -> None:
        while (step := self.core.advance(now, now)) is not None:
            self.teller.step(step)

    def contribute(self, now: float, devices: tuple[str, ...] = DEVICES) -> None:
        number = self.core.rounds.number
        made = {d: contribution(means(ord(d)), run=self.core.parts.run, round=number) for d in devices}
        self.core.take([(device, encode(message, "f64")) for device, message in made.items()], now)
        self.advance(now)

    def say(self, device: str, round: int, found: Accuracy, run: bytes | None = None) -> None:
        metrics = found.metrics(self.core.parts.run if run is None else run, round)
        self.core.status(device, encode(Status(True, b"instance", 1, metrics=metrics)), 1.0)
        self.core.take([], 1.0)
        self.teller.accuracy()


def _store(places: Places) -> DurableStore:
    return DurableStore(places("s"), BUNDLE, "fleet")


def test_a_round_is_told_once_all_of_it_have_said_how_good_they_are(places: Places) -> None:
    with _store(places) as store:
        run = Run(store)
        run.contribute(1.0)
        run.say("a", 1, SAID["a"])
        assert run.told == []
        run.say("b", 1, SAID["b"])
        (told,) = run.told
        assert (told.round, told.devices, told.contributors, told.samples) == (1, 2, 2, 40)
        means = {"all_classes": 0.375, "own_classes": 0.5, "shipped": 0.5, "alone": 0.5, "among_own": 0.75}
        further = {"alone_among_own": 0.5, "shipped_among_own": (2.5 / 8 + 0.75) / 2, "classes": 10.0, "own": 2.5}
        assert told.mean == pytest.approx(means | further)
        pooled = {"all_classes": 0.3125, "shipped": 0.625, "alone": 0.5, "own_classes": 13.5 / 38, "among_own": 23 / 38}
        assert told.pooled == pytest.approx(pooled | {"alone_among_own": 0.5, "shipped_among_own": 25 / 38})
        assert (told.worst, told.worst_share) == ("b", 0.25)
        assert _lines(told) == [
            "  round 1: 2 devices, each can name 10 classes now (alone 2.5); 37.5% right on all 40 test photos "
            "(alone 50.0%, bundle as shipped 50.0%); on their own classes 75.0% right choosing among these "
            "(alone 50.0%, bundle as shipped 53.1%), 50.0% choosing among all, which is harder; fewest right: b, 25.0%"
        ]
        run.say("a", 1, SAID["a"])
        assert len(run.told) == 1


def test_on_photos_of_own_classes_alone_stands_beside_the_same_task_only() -> None:
    """Choosing among all classes is no task of a device alone: 56 % there say nothing against 50 % here."""
    mean = {"all_classes": 0.5, "own_classes": 0.5, "alone": 0.56, "shipped": 0.56, "among_own": 0.81}
    mean |= {"alone_among_own": 0.56, "shipped_among_own": 0.56, "classes": 10.0, "own": 5.0}
    told = events.AccuracyTold(1, 1, 3, 16, mean, {}, "hall", 0.5)
    assert _lines(told) == [
        "  round 1: 1 of 3 devices, each can name 10 classes now (alone 5); on 16 test photos of their own classes "
        "81.0% right choosing among these (alone 56.0%, bundle as shipped 56.0%), 50.0% choosing among all, which is "
        "harder"
    ]
    everything = mean | {"own_classes": 0.81, "all_classes": 0.81, "own": 10.0}  # each has all classes: one task only
    assert _lines(replace(told, mean=everything)) == [
        "  round 1: 1 of 3 devices, each can name 10 classes now (alone 10); on 16 test photos of their own classes "
        "81.0% right (alone 56.0%, bundle as shipped 56.0%)"
    ]
    older = {"all_classes": 0.5, "own_classes": 0.5, "alone": 0.56}  # of devices that do not tell them apart
    assert _lines(replace(told, mean=older)) == [
        "  round 1: 1 of 3 devices, 50.0% right on 16 test photos of their own"
    ]


def test_what_is_there_is_told_when_the_next_round_closes_and_at_the_end(places: Places) -> None:
    """Nothing waits for a device that says nothing."""
    with _store(places) as store:
        run = Run(store)
        run.contribute(1.0)
        run.say("b", 1, SAID["b"])
        run.contribute(2.0)
        assert [(told.round, told.devices, told.contributors) for told in run.told] == [(1, 1, 2)]
        run.say("a", 1, SAID["a"])  # too late to be told, and kept
        assert store.accuracy(1) == SAID
        run.say("a", 2, SAID["a"])
        run.teller.accuracy(last=True)
        run.teller.accuracy(last=True)
        assert [(told.round, told.devices) for told in run.told] == [(1, 1), (2, 1)]


def test_only_who_was_in_a_closed_round_of_this_run_is_heard_and_the_first_word_stands(places: Places) -> None:
    with _store(places) as store:
        run = Run(store)
        run.contribute(1.0, ("a",))
        run.say("a", 1, SAID["a"])  # open still, though it has contributed
        run.contribute(1.0, ("b",))
        run.say("c", 1, SAID["a"])  # was not in it
        run.say("a", 2, SAID["a"])  # open
        run.say("a", 9, SAID["a"])  # not there
        run.say("a", 1, SAID["a"], run=b"else")
        run.say("a", 1, Accuracy(1001, 1.0))  # more than --max-samples
        assert store.accuracy(1) == {}
        for found in (SAID["a"], Accuracy(1, 1.0)):  # in one batch
            run.core.status(
                "a", encode(Status(True, b"instance", 1, metrics=found.metrics(run.core.parts.run, 1))), 1.0
            )
        run.core.take([], 1.0)
        run.say("a", 1, Accuracy(2, 1.0))
        store.keep_accuracy([AccuracyReport(1, "a", Accuracy(3, 1.0))])
        assert store.accuracy(1) == {"a": SAID["a"]}
        assert store.accuracy(2) == {}
        assert run.core.rounds.online == 2 + 1


def test_a_restart_keeps_what_was_said_and_goes_on_hearing(places: Places) -> None:
    with _store(places) as store:
        run = Run(store)
        run.contribute(1.0)
        run.say("a", 1, SAID["a"])
    with _store(places) as store:
        run = Run(store)  # the broker retains what devices said while nobody listened
        run.say("b", 1, SAID["b"])
        assert [(told.round, told.devices) for told in run.told] == [(1, 2)]
    with _store(places) as store:
        run = Run(store)
        run.teller.accuracy(last=True)
        assert run.told == []  # it has been told
        run.contribute(SETTLE_S + 1.0)
        assert store.accuracy(1) == SAID


def test_the_summary_has_what_came_after_the_round_had_been_summed_up(tmp_path: Path, places: Places) -> None:
    import json

    with _store(places) as store:
        run, summary = Run(store), Summary(store, "fleet", BUNDLE)

        def written(made: Summary) -> list[dict[str, object]]:
            write_json(tmp_path / "out.json", made.content(finished=False, global_version=1))
            return json.loads((tmp_path / "out.json").read_text())["rounds"]

        run.contribute(1.0)
        assert written(summary)[0]["accuracy"] is None
        run.say("b", 1, SAID["b"])
        run.say("a", 1, SAID["a"])
        (row,) = written(summary)
        found = fleet_accuracy(SAID)
        assert found is not None
        assert row["accuracy"] == json.loads(json.dumps(found.facts()))
        assert row["accuracy"]["by_device"]["a"] == SAID["a"].facts()  # type: ignore[index]
        assert written(Summary(store, "fleet", BUNDLE)) == [row]


share = st.floats(0, 1)
said = st.builds(Accuracy, st.integers(1, 10**6), share, share, shipped=share, alone=st.none() | share)


@example({"b": Accuracy(1, 0.5), "a": Accuracy(2, 0.5)})  # equals: the first by id
@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), said, min_size=1, max_size=8))
def test_averages_are_those_of_all_photos_one_by_one_and_of_all_devices(by_device: dict[str, Accuracy]) -> None:
    found = fleet_accuracy(by_device)
    assert found is not None
    told = list(by_device.values())
    right = sum(each.all_classes * each.samples for each in told)
    assert found.pooled["all_classes"] == pytest.approx(right / sum(each.samples for each in told))
    assert found.mean["all_classes"] == pytest.approx(sum(each.all_classes for each in told) / len(told))
    lowest = min(each.all_classes for each in told)
    assert found.worst == min(device for device, each in by_device.items() if each.all_classes == lowest)
    known = [each.alone for each in told if each.alone is not None]
    assert ("alone" in found.mean) == bool(known)
    for averages in (found.mean, found.pooled):
        assert all(-1e-12 <= value <= 1 + 1e-12 for value in averages.values())


@given(st.lists(said, min_size=2, max_size=8), said)
def test_one_that_lies_moves_the_mean_by_its_share_of_the_devices(told: list[Accuracy], lie: Accuracy) -> None:
    honest = fleet_accuracy({str(i): each for i, each in enumerate(told)})
    lied = fleet_accuracy({str(i): each for i, each in enumerate([lie, *told[1:]])})
    assert honest is not None
    assert lied is not None
    assert abs(honest.mean["all_classes"] - lied.mean["all_classes"]) <= 1 / len(told) + 1e-12


def test_nobody_said_anything() -> None:
    assert fleet_accuracy({}) is None

"""Accuracy in sight: what devices measured by themselves, what the aggregator printed, stored and wrote, and that these
are one and the same, over a real broker with processes of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleets import FLEET, Fleet, bundle, fleet_in, share

from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.accuracy import Accuracy
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.edge_client.device.evaluation import in_words

HELD = ((0, 1, 2), (2, 3, 4))
ROUNDS = 3  # two of FedProto and one of FFC


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with fleet_in(tmp_path) as made:
        yield made


def _history(fleet: Fleet, name: str) -> dict[int, dict[str, Any]]:
    lines = (fleet.folder / f"state-{name}" / "history.jsonl").read_text().splitlines()
    return {line["round"]: line["right"] for line in map(json.loads, lines)}


def _stored(fleet: Fleet, path: Path) -> dict[int, dict[str, dict[str, Any]]]:
    with DurableStore(fleet.folder / "store.sqlite", read_bundle(path).sha256, FLEET) as store:
        return {n: {d: a.facts() for d, a in store.accuracy(n).items()} for n in range(1, ROUNDS + 1)}


def test_what_is_printed_stored_and_written_is_what_the_devices_measured(fleet: Fleet) -> None:
    path = bundle(fleet.folder / "f.bundle", "fedproto")
    for index, classes in enumerate(HELD):
        fleet.client(f"d{index}", path, share(index, classes, 60), "--hold-out", 0.2)
    fleet.aggregator([path], "--rounds", ROUNDS - 1, "--min-clients", 2)
    assert set(fleet.finish().values()) == {0}
    told = {name: _history(fleet, name) for name in ("d0", "d1")}
    summary = fleet.told("summary")
    assert _stored(fleet, path) == {n: {d: told[d][n] for d in told} for n in range(1, ROUNDS + 1)}
    said = fleet.log("aggregator")
    for row in summary["rounds"]:
        number, by_device = row["round"], {name: rounds[row["round"]] for name, rounds in told.items()}
        assert row["accuracy"]["by_device"] == by_device
        assert row["accuracy"]["samples"] == 24  # a fifth of 60 from each
        for figure in ("all_classes", "own_classes", "shipped", "alone", "among_own", "alone_among_own"):
            shares = [each[figure] for each in by_device.values()]
            assert row["accuracy"]["mean"][figure] == pytest.approx(np.mean(shares), abs=1e-12)
        mean, worst = row["accuracy"]["mean"], row["accuracy"]["worst"]
        assert worst["all_classes"] == min(each["all_classes"] for each in by_device.values())
        alone = f"(alone {mean['alone_among_own']:.1%}, bundle as shipped {mean['shipped_among_own']:.1%})"
        line = (
            f"round {number}: 2 devices, each can name 5 classes now (alone 3); on 24 test photos of their own classes "
            f"{mean['among_own']:.1%} right choosing among these {alone}, {mean['own_classes']:.1%} choosing among "
            f"all, which is harder; fewest right: {worst['device']}, "
        )
        assert said.count(line + f"{worst['all_classes']:.1%}\n") == 1, said
        for name, each in by_device.items():
            line = f"round {number}: {in_words(Accuracy(**each), 'held-out photos')}\n"
            assert "it can name 5 classes now (alone 3); on 12 held-out photos of its own 3 classes: " in line
            assert fleet.log(name).count(line) == 1, fleet.log(name)
            assert each["among_own"] >= each["own_classes"]  # fewer classes to choose among
    for round in range(1, ROUNDS + 1):  # what was held out is in no sum
        assert [int(message.counts.sum()) for message in fleet.messages(round)] == [48, 48]


def test_a_restarted_aggregator_has_what_was_said_and_hears_the_rest(fleet: Fleet) -> None:
    """Another process goes on with the store: the figures of before are in the summary of after."""
    path = bundle(fleet.folder / "f.bundle", "ffc")
    for index, classes in enumerate(HELD):
        fleet.client(f"d{index}", path, share(index, classes, 60), "--hold-out", 0.1)
    fleet.aggregator([path], "--rounds", 1, "--min-clients", 2)
    assert set(fleet.finish().values()) == {0}
    before = fleet.told("summary")["rounds"]
    assert len(before[0]["accuracy"]["by_device"]) == 2
    silent: tuple[tuple[str, ...], ...] = ((), ("--no-report-accuracy",))
    fleet.aggregator([path], "--rounds", 2, "--min-clients", 2)
    fleet.wait_for(
        "aggregator", r"finished(.|\n)*waiting for devices: 0 online, 2"
    )  # the broker retains no end any more
    for index, classes in enumerate(HELD):
        fleet.client(f"d{index}", path, share(index, classes, 60), "--hold-out", 0.1, *silent[index])
    assert set(fleet.finish().values()) == {0}
    after = fleet.told("summary")["rounds"]
    assert after[0] == before[0]
    assert list(after[1]["accuracy"]["by_device"]) == ["d0"]  # the other one keeps its figures at home
    assert _history(fleet, "d1")[2]["samples"] == 6
    assert re.search(r"round 2: 1 of 2 devices, each can name", fleet.log("aggregator"))


def test_nothing_is_said_where_nothing_can_be_held_out(fleet: Fleet) -> None:
    path = bundle(fleet.folder / "f.bundle", "ncm")
    few = share(0, HELD[0], 60)
    rows = np.concatenate([np.flatnonzero(few[1] == j)[:4] for j in HELD[0]])
    fleet.client("d0", path, (few[0][rows], few[1][rows]), "--hold-out", 0.1)
    fleet.aggregator([path], "--rounds", 1)
    assert set(fleet.finish().values()) == {0}
    assert fleet.told("summary")["rounds"][0]["accuracy"] is None
    assert "accuracy" not in fleet.log("aggregator")
    assert fleet.log("d0").count("accuracy stays unknown") == 1
    assert int(fleet.messages(1)[0].counts.sum()) == len(rows)

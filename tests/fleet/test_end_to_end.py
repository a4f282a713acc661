"""A fleet of real processes on real images over real brokers: nothing lost, nothing doubled, whatever is killed.

Three `protofleet client` processes train a small CNN on parts of the shipped Fashion-MNIST subset; `protofleet
aggregate` and a broker run beside them. After each run every contribution in the store is, byte for byte, the one in
the journal of its device, and FFC's head equals ridge regression on the pooled features.
"""

from __future__ import annotations

import hashlib
import json
import re
import signal
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from brokers import BROKERS, TestBroker, make_broker
from fleets import PAYLOADS, Processes
from pooled_head import usual_head

from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import method
from protofleet.contract.sums.merge_rules import merge
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.contract.wire.codec import decode
from protofleet.edge_client.privacy.ledger import read_ledger

FLEET, DEVICES, SAMPLES = "e2e", 3, 200


@dataclass(kw_only=True)
class Fleet(Processes):
    """Folders, processes and what they were started with."""

    broker: TestBroker
    bundle_path: Path
    bundle: Bundle
    data: list[tuple[np.ndarray, np.ndarray]]
    options: tuple[str, ...] = ()

    def start_aggregator(self) -> None:
        store, summary = self.folder / "store.sqlite", self.folder / "summary.json"
        self._join("aggregator", "aggregate", "--store", str(store), "--json", str(summary), *self.options)

    def start_client(self, index: int, name: str | None = None) -> None:
        name = name or f"d{index}"
        state, data = self.folder / f"state-{name}", self.folder / f"d{index}.npz"
        if not data.exists():
            np.savez(data, x=self.data[index][0], y=self.data[index][1])
        told = ("--data", str(data), "--state", str(state), "--hold-out", "0")  # every sample is counted below
        self._join(name, "client", "--until-finished", "--id", f"d{index}", *told)

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def _join(self, name: str, command: str, *options: str) -> None:
        self.start(name, command, "--bundle", self.bundle_path, "--broker", self.broker.url, "--fleet", FLEET, *options)


@pytest.fixture(scope="module")
def bundle_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from protofleet.export.bundles.build import build_bundle

    out = tmp_path_factory.mktemp("bundle") / "fleet.bundle"
    labels = [f"class-{i}" for i in range(10)]
    build_bundle(
        backbone="small_cnn",
        method_name="fedproto",
        labels=labels,
        input_shape=(28, 28, 1),
        hyper={"epochs": 2, "lr": 0.05},
        out=out,
    )
    return out


@pytest.fixture(scope="module")
def data() -> list[tuple[np.ndarray, np.ndarray]]:
    """Uneven parts: device i holds six or seven of the ten classes."""
    from protofleet.lab.data.datasets import load_dataset

    train = load_dataset("fashion_mnist_subset").train
    parts = []
    for index in range(DEVICES):
        held = np.flatnonzero(~np.isin(train.y, [(3 * index + k) % 10 for k in range(3 + index % 2)]))
        chosen = np.random.default_rng(index).permutation(held)[: SAMPLES + 16 * index]
        parts.append((train.x[chosen], train.y[chosen]))
    return parts


@pytest.fixture(params=BROKERS)
def fleet(
    request: pytest.FixtureRequest, tmp_path: Path, bundle_path: Path, data: list[tuple[np.ndarray, np.ndarray]]
) -> Iterator[Fleet]:
    broker = make_broker(request.param, tmp_path)
    broker.start()
    made = Fleet(folder=tmp_path, broker=broker, bundle_path=bundle_path, bundle=read_bundle(bundle_path), data=data)
    yield made
    made.end()
    broker.stop()


def _sent(fleet: Fleet) -> dict[tuple[int, str, str], tuple[bytes, str]]:
    """(round, method, device) → the bytes that the device's journal holds, and how they ended."""
    sent = {}
    for index in range(DEVICES):
        with sqlite3.connect(fleet.folder / f"state-d{index}" / "journal.sqlite") as db:
            for round, name, payload, outcome in db.execute(
                "SELECT round, method, payload, outcome FROM contributions"
            ):
                sent[(round, name, f"d{index}")] = (payload, outcome)
        db.close()
    return sent


def _stored(fleet: Fleet) -> dict[tuple[int, str, str], bytes]:
    with sqlite3.connect(fleet.folder / "store.sqlite") as db:
        rows = db.execute(PAYLOADS).fetchall()
    db.close()
    return {(round, name, device): payload for round, name, device, payload in rows}


def _check_nothing_lost_nothing_doubled(fleet: Fleet, rounds: int) -> None:
    sent, stored = _sent(fleet), _stored(fleet)
    assert len(sent) == DEVICES * (rounds + 1)
    assert {outcome for _, outcome in sent.values()} <= {"committed", "duplicate"}
    assert stored == {key: payload for key, (payload, _) in sent.items()}
    for device in {device for _, _, device in sent}:  # and nothing that left is not in the ledger, or is there twice
        entries, _, _ = read_ledger(fleet.folder / f"state-{device}" / "ledger.sqlite")
        made = {(each.round, each.method): each.digest for each in entries if each.what == "round"}
        assert made == {
            (round, name): hashlib.sha256(payload).digest()
            for (round, name, whose), payload in stored.items()
            if whose == device
        }
        assert sum(each.what == "round" for each in entries) == len(made)
    told = json.loads((fleet.folder / "summary.json").read_text())
    assert told["finished"]
    assert told["totals"]["committed"] == len(sent)
    assert [row["method"] for row in told["rounds"]] == ["fedproto"] * rounds + ["ffc"]
    for row in told["rounds"]:
        counts = sum(
            int(decode(payload).counts.sum()) for (number, _, _), payload in stored.items() if number == row["round"]
        )
        assert counts == sum(len(y) for _, y in fleet.data)


def _check_head_is_pooled_ridge(fleet: Fleet) -> None:
    from protofleet.edge_client.training.extractor import Extractor

    manifest = fleet.bundle.manifest
    extractor = Extractor(fleet.bundle, fleet.bundle.params)
    z = unit_rows(np.concatenate([extractor.features(x) for x, _ in fleet.data]).astype(np.float64))
    y = np.concatenate([y for _, y in fleet.data])
    ridge = method("ffc").hyper["ridge"].default
    pooled = usual_head(FeatureGram.of(z, y, manifest.classes), ridge)
    with DurableStore(fleet.folder / "store.sqlite", fleet.bundle.sha256, FLEET) as store:
        rows, _ = store.state().head.dense(manifest.classes, manifest.features)
    assert np.linalg.norm(rows - pooled) <= 1e-6 * np.linalg.norm(pooled)
    np.testing.assert_array_equal((z @ rows.T).argmax(1), (z @ pooled.T).argmax(1))


@pytest.mark.parametrize("fleet", ["mosquitto"], indirect=True)
def test_a_fleet_learns_and_every_contribution_counts_once(fleet: Fleet) -> None:
    """FFC's sums travel in chunks, since messages are limited to 4 KB."""
    fleet.options = ("--rounds", "2", "--min-clients", str(DEVICES), "--limit-bytes", "4096")
    fleet.start_aggregator()
    for index in range(DEVICES):
        fleet.start_client(index)
    assert set(fleet.finish().values()) == {0}
    _check_nothing_lost_nothing_doubled(fleet, rounds=2)
    _check_head_is_pooled_ridge(fleet)
    told = json.loads((fleet.folder / "summary.json").read_text())
    assert told["totals"]["late"] == told["totals"]["rejected"] == told["totals"]["malformed"] == 0
    means = [len(payload) for (number, _, _), payload in _stored(fleet).items() if number == 1]
    assert sorted(told["rounds"][0]["uplink_bytes"].values()) == sorted(means)
    assert min(told["rounds"][2]["uplink_bytes"].values()) > 65_536  # D = 128: the triangle alone is 66 KB


@pytest.mark.parametrize("fleet", ["mosquitto", pytest.param("embedded", marks=pytest.mark.slow)], indirect=True)
def test_kill_9_of_a_client_the_aggregator_and_the_broker(fleet: Fleet) -> None:
    fleet.options = ("--rounds", "2", "--min-clients", str(DEVICES))
    fleet.start_aggregator()
    for index in range(DEVICES):
        fleet.start_client(index)
    fleet.wait_for("aggregator", "round 1/3")
    time.sleep(0.4)
    fleet.kill("d1")  # while it trains
    fleet.start_client(1)
    fleet.wait_for("aggregator", "round 2/3")
    time.sleep(0.3)
    fleet.kill("aggregator")  # while the round is open
    fleet.start_aggregator()
    fleet.wait_for("aggregator", "round 2 closed")
    fleet.broker.kill()  # while FFC's sums are on their way
    time.sleep(0.3)
    fleet.broker.start()
    assert set(fleet.finish().values()) == {0}
    _check_nothing_lost_nothing_doubled(fleet, rounds=2)
    _check_head_is_pooled_ridge(fleet)


@pytest.mark.parametrize("fleet", ["embedded"], indirect=True)
def test_two_clients_with_one_id(fleet: Fleet) -> None:
    """The second one ends with a clear line; the run goes on with the first, and counts it once."""
    fleet.options = ("--rounds", "2", "--min-clients", str(DEVICES))
    for index in range(DEVICES):
        fleet.start_client(index)
    fleet.wait_for("d0", "connected")
    fleet.start_client(0, name="d0-twin")
    deadline = time.monotonic() + 60
    while "error: " not in fleet.log("d0-twin"):
        assert time.monotonic() < deadline, fleet.log("d0") + fleet.log("d0-twin")
        time.sleep(0.02)
    fleet.start_aggregator()
    codes = fleet.finish()
    assert (codes["d0-twin"], codes["d0"], codes["aggregator"]) == (2, 0, 0), fleet.log("d0") + fleet.log("d0-twin")
    assert re.search(r"error: .*\bd0\b", fleet.log("d0-twin"))
    stored = _stored(fleet)
    assert len(stored) == DEVICES * 3
    merged = merge(lambda: [decode(p).statistic(FeatureGram, 10, 128) for (n, _, _), p in stored.items() if n == 3])
    assert int(merged.counts.sum()) == sum(len(y) for _, y in fleet.data)

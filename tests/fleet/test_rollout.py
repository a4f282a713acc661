"""Bundles rolled out over Mosquitto to devices that are processes: by stages, halted by a failure, to another fleet."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from brokers import TestBroker, make_broker
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fleets import LABELS, Fleet, bundle, run, share

from protofleet import Predictor
from protofleet.contract.bundle.bundle_file import Extends, read_bundle, write_bundle
from protofleet.contract.bundle.test_vectors import Vectors
from protofleet.export.bundles.extend import extend_bundle

pytestmark = pytest.mark.slow
SEED = bytes(range(32))
DEVICES = ("a", "b", "c")


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[TestBroker]:
    made = make_broker("mosquitto", tmp_path)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def fleet(broker: TestBroker, tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(folder=tmp_path, url=broker.url)
    public = Ed25519PrivateKey.from_private_bytes(SEED).public_key().public_bytes_raw()
    (tmp_path / "key.pub").write_bytes(public)
    (tmp_path / "key").write_bytes(SEED)
    yield made
    made.end()


def aggregator(fleet: Fleet, path: Path, of: str = "pets") -> None:
    told = ("--broker", fleet.url, "--fleet", of, "--store", fleet.folder / f"{of}.sqlite", "--method", "ffc")
    fleet.start(
        f"aggregator-{of}",
        "aggregate",
        "--bundle",
        path,
        *told,
        "--standing",
        "--every",
        "0.2s",
        "--sign",
        fleet.folder / "key",
    )


def device(fleet: Fleet, name: str, path: Path, *more: object) -> None:
    data = share(DEVICES.index(name), [0, 1, 2, 3])
    np.savez(fleet.folder / f"{name}.npz", x=data[0], y=data[1])
    told = ("--broker", fleet.url, "--fleet", "pets", "--id", name, "--bundle", path, "--hold-out", 0)
    own = ("--data", fleet.folder / f"{name}.npz", "--state", fleet.folder / f"state-{name}")
    fleet.start(name, "client", *told, *own, "--trust", fleet.folder / "key.pub", *more)


def stop(fleet: Fleet, name: str, how: signal.Signals = signal.SIGKILL) -> None:
    process = fleet.processes.pop(name)
    process.send_signal(how)
    process.wait()


def rollout(fleet: Fleet, *words: object) -> str:
    code, said = run("rollout", *words, "--store", fleet.folder / "pets.sqlite")
    assert code == 0, said
    return said


def told(fleet: Fleet) -> dict[str, Any]:
    rollout(fleet, "--json", fleet.folder / "rollout.json")
    return json.loads((fleet.folder / "rollout.json").read_text())["rollout"]


def broken(path: Path, old: Path) -> Path:
    """A bundle that extends the old one, signed and whole, whose extractor computes something else than it says."""
    first = read_bundle(old)
    assert first.vectors is not None
    wrong = Vectors(first.vectors.x, first.vectors.z[:, ::-1].copy())
    manifest = msgspec.structs.replace(
        first.manifest,
        version=2,
        labels=(*first.manifest.labels, "hamster"),
        extends=(Extends(first.sha256.hex(), first.manifest.classes),),
    )
    write_bundle(
        path, manifest, features=first.features, train_step=None, params=first.params, vectors=wrong, private_key=SEED
    )
    return path


def test_a_class_more_reaches_three_devices_stage_by_stage(fleet: Fleet, broker: TestBroker) -> None:
    """The aggregator, the broker and a device that fetches are killed on the way."""
    old = bundle(fleet.folder / "old.bundle", "ffc", labels=LABELS[:4], private_key=SEED)
    new = fleet.folder / "new.bundle"
    extend_bundle(old, [LABELS[4]], new, private_key=SEED)
    aggregator(fleet, new)
    for name in DEVICES:
        device(fleet, name, old)
    fleet.wait_for("aggregator-pets", "120 samples of 3 devices, 4 classes")
    rollout(fleet, new, "--soak", "2s", "--stage", "1%", "--stage", "60%", "--stage", "100%")
    fleet.wait_for("aggregator-pets", "rollout of version 2: [0-9.]+ %, 1 device of it known")
    first = next(name for name, said in told(fleet)["devices"].items() if said["in_stage"])
    stop(fleet, first)
    stop(fleet, "aggregator-pets")
    broker.kill()
    broker.start()
    aggregator(fleet, new)
    device(fleet, first, old)
    fleet.wait_for("aggregator-pets", "rollout of version 2 complete: 3 devices", 120)
    assert {said["told"] for said in told(fleet)["devices"].values()} == {"healthy"}
    _, shown = run("fleet", "list", "--store", fleet.folder / "pets.sqlite")
    assert shown.count("2 healthy") == 3
    for name in DEVICES:
        stop(fleet, name)
        device(fleet, name, old)  # the command still names the old file: what was rolled out goes on
        fleet.wait_for(name, "2 [0-9a-f]{8}|bundle " + read_bundle(new).sha256.hex()[:8])
        assert Predictor(fleet.folder / f"state-{name}").labels == LABELS


def test_a_bundle_that_fails_its_self_test_halts_in_the_first_stage(fleet: Fleet) -> None:
    old = bundle(fleet.folder / "old.bundle", "ffc", labels=LABELS[:4], private_key=SEED)
    new = broken(fleet.folder / "new.bundle", old)
    aggregator(fleet, new)
    for name in DEVICES:
        device(fleet, name, old)
    fleet.wait_for("aggregator-pets", "120 samples of 3 devices, 4 classes")
    rollout(fleet, new, "--soak", "1s", "--stage", "10%", "--stage", "100%")
    fleet.wait_for("aggregator-pets", "rollout of version 2 halted at [0-9.]+ %: 1 of 1 devices failed", 120)
    found = told(fleet)
    assert (found["state"], found["counts"]["failed"]) == ("halted", 1)
    words = sorted(str(said["told"]) for said in found["devices"].values())
    assert words == ["None", "None", "failed"]
    for name in DEVICES:
        assert fleet.processes[name].poll() is None
        assert Predictor(fleet.folder / f"state-{name}").labels == LABELS[:4]


def test_devices_go_over_to_another_fleet(fleet: Fleet) -> None:
    made = {
        name: bundle(fleet.folder / f"{name}.bundle", "ffc", seed=seed, bundle_version=1 + seed, private_key=SEED)
        for name, seed in {"pets": 0, "pets2": 1}.items()
    }
    for name, path in made.items():
        aggregator(fleet, path, name)
    for name in DEVICES:
        device(fleet, name, made["pets"])
    fleet.wait_for("aggregator-pets", "120 samples of 3 devices")
    rollout(fleet, made["pets2"], "--to-fleet", "pets2", "--soak", "1s", "--stage", "50%", "--stage", "100%")
    fleet.wait_for("aggregator-pets2", "120 samples of 3 devices", 120)
    fleet.wait_for("aggregator-pets", "rollout of version 2 complete: 3 devices", 60)
    for name in DEVICES:
        stop(fleet, name)
        device(fleet, name, made["pets"])
    for name in DEVICES:  # started anew, with the options of before, they are in the fleet that they went over to
        fleet.wait_for(name, "(of a roll-out runs in place of (.|\n)*){2}sums 1 stand")

"""Sums that stand, over a real broker with separate processes: whoever comes, changes, is killed or goes."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from commands import one_error_line, run
from fleets import CLASSES, FLEET, Fleet, bundle, fleet_in, share

from protofleet.aggregator.merging.exact_sums import ExactSum
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import method
from protofleet.contract.wire.codec import decode
from protofleet.contract.wire.messages import Contribution
from protofleet.edge_client.photos.kept_photo import NewPhoto
from protofleet.edge_client.photos.photo_ring import PhotoRing
from protofleet.edge_client.training.extractor import Extractor

STANDING = ("--standing", "--every", "0.2s")


@pytest.fixture(scope="module")
def ncm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundle(tmp_path_factory.mktemp("bundle") / "ncm.bundle", "ncm")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with fleet_in(tmp_path) as made:
        yield made


def stop(fleet: Fleet, name: str, how: signal.Signals = signal.SIGTERM) -> None:
    process = fleet.processes.pop(name)
    process.send_signal(how)
    process.wait()


def stands(fleet: Fleet, path: Path, name: str) -> tuple[dict[str, ExactSum], object]:
    """The exact sums that the store holds, by device, and its global state; the aggregator must have ended."""
    found, made = method(name), read_bundle(path)
    with DurableStore(fleet.folder / "store.sqlite", made.sha256, FLEET) as store:
        sums = {}
        for device, payload in store.standing.payloads():
            message = decode(payload)
            assert isinstance(message, Contribution)
            sums[device] = ExactSum.of(message.statistic(found.statistic, CLASSES, made.manifest.features))
        return sums, store.state()


def total(sums: dict[str, ExactSum]) -> ExactSum:
    first, *others = sums.values()
    for other in others:
        first = first.add(other)
    return first


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ncm", "ffc"])
def test_what_stands_is_of_those_who_are_there(fleet: Fleet, ncm: Path, name: str) -> None:
    """Two devices, one of which comes back with more; both ends are killed on the way; then one withdraws."""
    fleet.aggregator([ncm], "--method", name, *STANDING)
    fleet.client("a", ncm, share(0, [0, 1, 2]))
    fleet.client("b", ncm, share(1, [2, 3, 4]))
    fleet.wait_for("aggregator", "80 samples of 2 devices")
    stop(fleet, "a", signal.SIGKILL)
    stop(fleet, "aggregator", signal.SIGKILL)
    fleet.client("a", ncm, share(0, [0, 1, 2], 60))
    fleet.aggregator([ncm], "--method", name, *STANDING)
    fleet.wait_for("aggregator", "100 samples of 2 devices")
    stop(fleet, "aggregator")
    both, state = stands(fleet, ncm, name)
    assert sorted(both) == ["a", "b"]
    found, hyper = method(name), method(name).resolve({})
    width = read_bundle(ncm).manifest.features
    (kind,) = found.global_rows
    expected = found.next_rows({}, total(both).statistic(found.statistic, width), hyper)[kind]
    np.testing.assert_allclose(state.rows[kind].rows, expected.rows, rtol=1e-12, atol=1e-15)
    assert total(both).counts.sum() == 100


def test_a_device_withdraws_and_another_is_forgotten(fleet: Fleet, ncm: Path) -> None:
    """What remains is, as integers, what a fleet has in which they never were; both are refused until admitted."""
    store = fleet.folder / "store.sqlite"
    fleet.aggregator([ncm], *STANDING)
    for index, name in enumerate("abc"):
        fleet.client(name, ncm, share(index, [0, 1, 2, 3, 4]))
    fleet.wait_for("aggregator", "120 samples of 3 devices")
    stop(fleet, "a")
    told = ("--bundle", ncm, "--broker", fleet.url, "--fleet", FLEET, "--id", "a")
    told += ("--state", fleet.folder / "state-a")
    ring = PhotoRing(fleet.folder / "state-a", "net")
    x = np.zeros((8, 8, 3), np.uint8)
    ring.keep(NewPhoto(x, x, "photo", 1.0, np.ones(4, np.float32)))
    ring.close()
    done = run("client", *told, "--withdraw")
    assert (done.returncode, "withdrawn" in done.stderr) == (0, True), done.stderr
    assert "withdrawn from its fleet; the photos of its camera, 1 now, stay here until protofleet photos" in done.stderr
    assert "(this device has withdrawn from its fleet)" in run("photos", "--state", fleet.folder / "state-a").stdout
    fleet.wait_for("aggregator", "withdraw a, asked by the device: done, global version")
    done = run("forget", "b", "--store", store)
    assert (done.returncode, "done, global version" in done.stdout) == (0, True), done
    done = run("forget", "d", "--store", store)
    assert (done.returncode, one_error_line(done).partition(", got")[2]) == (2, " d, try one of a, b, c")
    assert run("fleet", "admit", "b", "--store", store).returncode == 0
    stop(fleet, "b")
    fleet.client("b", ncm, share(1, [0, 1, 2, 3, 4], 41))
    fleet.wait_for("aggregator", "81 samples of 2 devices")
    stop(fleet, "aggregator")
    left, _ = stands(fleet, ncm, "ncm")
    assert sorted(left) == ["b", "c"]
    said = run("fleet", "log", "--store", store).stdout
    assert [line.split(", ")[0] for line in said.splitlines()] == ["withdraw a", "forget b", "admit b"]


def test_few_photos_stand_as_a_factor_and_are_forgotten_exactly(fleet: Fleet, ncm: Path) -> None:
    """By default FFC's sums of few photos go up as a factor: in store and ledger, and gone to the integer."""
    store, few = fleet.folder / "store.sqlite", 20
    fleet.aggregator([ncm], "--method", "ffc", *STANDING)
    for index, name in enumerate("abc"):
        fleet.client(name, ncm, share(index, [0, 1, 2, 3, 4], few))
    fleet.wait_for("aggregator", f"{3 * few} samples of 3 devices")
    sent = {name: release_bytes(fleet.folder / f"state-{name}") for name in "abc"}
    stop(fleet, "b")
    done = run("forget", "b", "--store", store)
    assert (done.returncode, "done, global version" in done.stdout) == (0, True), done
    stop(fleet, "aggregator")
    left, state = stands(fleet, ncm, "ffc")
    assert sorted(left) == ["a", "c"]
    made = read_bundle(ncm)
    width = made.manifest.features
    with DurableStore(store, made.sha256, FLEET) as held:
        payloads = dict(held.standing.payloads())
    for name, payload in payloads.items():
        message = decode(payload)
        assert isinstance(message, Contribution)
        assert message.factor is not None
        assert message.factor.shape[1] == width
        assert len(message.factor) <= few
        assert len(payload) == sent[name] < 2 * few * width + 8 * CLASSES * width + 300
    found = method("ffc")
    expected = found.next_rows({}, total(left).statistic(found.statistic, width), found.resolve({}))["head"]
    np.testing.assert_array_equal(state.rows["head"].rows.astype(np.float32), expected.rows.astype(np.float32))
    z = Extractor(made, made.params).features(np.concatenate([share(i, [0, 1, 2, 3, 4], few)[0] for i in (0, 2)]))
    unit = np.asarray(unit_rows(z.astype(np.float64)), dtype=np.float64)
    np.testing.assert_allclose(total(left).statistic(found.statistic, width).matrix, unit.T @ unit, atol=2e-3)


def release_bytes(state: Path) -> int:
    """The bytes of a device's one release, as its ledger has them."""
    done = run("inspect", state, "--json", "-")
    (release,) = json.loads(done.stdout)["releases"]
    return int(release["payload_bytes"])

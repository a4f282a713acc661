"""A fleet of processes that gets a class more, and one that gets another backbone, over a real broker."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from fleets import LABELS, Fleet, Samples, bundle, fleet_in, run, share

from protofleet import Predictor
from protofleet.aggregator.merging.exact_sums import ExactSum
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.methods import method
from protofleet.contract.wire.codec import decode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Contribution

pytestmark = pytest.mark.slow


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with fleet_in(tmp_path) as made:
        yield made


def aggregator(fleet: Fleet, name: str, *bundles: Path) -> None:
    """Of the fleet of this name."""
    words = [word for path in bundles for word in ("--bundle", path)]
    told = ("--broker", fleet.url, "--fleet", name, "--store", fleet.folder / f"{name}.sqlite")
    fleet.start(f"aggregator-{name}", "aggregate", *words, *told, "--standing", "--every", "0.2s", "--method", "ffc")


def device(fleet: Fleet, of: str, name: str, made: Path, data: Samples) -> None:
    """A client that stays, in the fleet `of`."""
    path = fleet.folder / f"{of}-{name}.npz"
    np.savez(path, x=data[0], y=data[1])
    told = ("--broker", fleet.url, "--fleet", of, "--id", name, "--bundle", made, "--hold-out", 0)
    fleet.start(f"{of}-{name}", "client", *told, "--data", path, "--state", fleet.folder / f"state-{of}-{name}")


def stop(fleet: Fleet, name: str, how: signal.Signals = signal.SIGTERM) -> None:
    process = fleet.processes.pop(name)
    process.send_signal(how)
    process.wait()


def wait_until(holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def stands(fleet: Fleet, name: str, path: Path) -> tuple[dict[str, ExactSum], dict[str, int], GlobalState]:
    """The exact sums and the generations in the store of a fleet whose aggregator has ended, and its global state."""
    found, made = method("ffc"), read_bundle(path)
    sums = {}
    with DurableStore(fleet.folder / f"{name}.sqlite", made.sha256, name) as store:
        for sender, payload in store.standing.payloads():
            message = decode(payload)
            assert isinstance(message, Contribution)
            made_of = message.statistic(found.statistic, made.manifest.classes, made.manifest.features)
            sums[sender] = ExactSum.of(made_of)
        return sums, store.standing.generations(), store.state()


def test_a_class_more_in_a_fleet_that_runs(fleet: Fleet) -> None:
    """Beside a fleet that had the class from the start, on the same broker: the same integers, device by device."""
    old, new = bundle(fleet.folder / "old.bundle", "ffc", labels=LABELS[:4]), fleet.folder / "new.bundle"
    code, said = run("export", "--extend", old, "--classes", f"+{LABELS[4]}", "--out", new)
    assert code == 0, said
    with_new = share(0, [0, 1, 2, 4], 60)
    aggregator(fleet, "grown", old)
    device(fleet, "grown", "a", old, share(0, [0, 1, 2]))
    device(fleet, "grown", "b", old, share(1, [1, 2, 3]))
    fleet.wait_for("aggregator-grown", "80 samples of 2 devices")

    stop(fleet, "aggregator-grown", signal.SIGKILL)
    aggregator(fleet, "grown", new, old)
    device(fleet, "grown", "c", new, share(2, [3, 4]))
    fleet.wait_for("aggregator-grown", "120 samples of 3 devices, 5 classes")
    answers = Predictor(fleet.folder / "state-grown-a")
    wait_until(lambda: answers(with_new[0]).version >= 2)  # of a state that has the new class
    assert answers.labels == LABELS[:4]

    for wait_s in (0.4, 0.9, 1.4):  # killed while it changes its bundle, and while it connects
        stop(fleet, "grown-a", signal.SIGKILL)
        device(fleet, "grown", "a", new, share(0, [0, 1, 2]))
        time.sleep(wait_s)
    stop(fleet, "grown-a", signal.SIGKILL)
    device(fleet, "grown", "a", new, with_new)
    fleet.wait_for("aggregator-grown", "140 samples of 3 devices, 5 classes")
    wait_until(lambda: answers(with_new[0]).names == LABELS)  # the same predictor, without being touched
    wait_until(lambda: bool(np.isfinite(answers(with_new[0]).scores).all()))
    stop(fleet, "aggregator-grown")

    aggregator(fleet, "longer", new)
    for name, data in {"a": with_new, "b": share(1, [1, 2, 3]), "c": share(2, [3, 4])}.items():
        device(fleet, "longer", name, new, data)
    fleet.wait_for("aggregator-longer", "140 samples of 3 devices, 5 classes")
    stop(fleet, "aggregator-longer")
    (grown, generations, state), (longer, _, expected) = (stands(fleet, name, new) for name in ("grown", "longer"))
    assert generations == {"a": 2, "b": 1, "c": 1}  # nothing was sent again
    assert sorted(grown) == sorted(longer)
    assert all(grown[name].equal(longer[name]) for name in grown)
    np.testing.assert_array_equal(state.rows["head"].rows, expected.rows["head"].rows)
    np.testing.assert_array_equal(state.rows["head"].classes, np.arange(5))


def test_a_new_backbone_is_another_fleet_beside_the_old_one(fleet: Fleet) -> None:
    """Two generations on one broker, the same device ids in both; the old one is retired, the new one goes on."""
    made = {
        name: bundle(fleet.folder / f"{name}.bundle", "ffc", seed=seed) for name, seed in {"one": 0, "two": 1}.items()
    }
    for name, path in made.items():
        aggregator(fleet, name, path)
        device(fleet, name, "a", path, share(0, [0, 1, 2, 3, 4]))
    for name in made:
        fleet.wait_for(f"aggregator-{name}", "40 samples of 1 device")
    stop(fleet, "one-a")
    stop(fleet, "aggregator-one")
    device(fleet, "two", "b", made["two"], share(1, [0, 1, 2, 3, 4]))
    fleet.wait_for("aggregator-two", "80 samples of 2 devices")
    stop(fleet, "aggregator-two")
    (one, *_), (two, *_) = (stands(fleet, name, path) for name, path in made.items())
    assert (sorted(one), sorted(two)) == (["a"], ["a", "b"])
    assert not one["a"].equal(two["a"])

"""Each method over a real broker with processes of their own; what came out against naive sums of what the store holds.

The recomputation reads the rows, counts and triangles of the stored messages and nothing of the aggregator's: plain
loops over devices and classes, the weights as the papers write them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from fleets import CLASSES, Fleet, Samples, bundle, fleet_in, share

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.heads.sphere import projection
from protofleet.contract.methods import method as method_of
from protofleet.contract.wire.codec import decode
from protofleet.contract.wire.messages import Contribution
from protofleet.edge_client.training.extractor import Extractor

HELD = ((0, 1), (1, 2, 3))  # of two devices; class 4 is nobody's
Weight = Callable[[int, int], float]
Rows = dict[int, np.ndarray]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with fleet_in(tmp_path) as made:
        yield made


def _count(n: int, n_all: int) -> float:
    return n


def _client(n: int, n_all: int) -> float:
    return 1.0


def _share(n: int, n_all: int) -> float:
    return n / n_all


def _merged(rounds: list[list[Contribution]], weight: Weight, field: str = "body") -> Rows:
    """Class → row after these rounds: Σ w r / Σ w of the last round in which someone held the class."""
    known: Rows = {}
    for messages in rounds:
        for j in range(CLASSES):
            total, weights = 0.0, 0.0
            for message in (each for each in messages if not each.says_nothing):
                rows = message.body.rows if field == "body" else message.further[0]
                for number, n, row in zip(message.body.classes, message.counts, rows, strict=True):
                    if number == j:
                        w = weight(int(n), sum(int(c) for c in message.counts))
                        total, weights = total + w * row.astype(np.float64), weights + w
            if weights:
                known[j] = total / weights
    return known


def _check_rows(found: object, wanted: Rows) -> None:
    assert found.classes.tolist() == sorted(wanted)
    np.testing.assert_allclose(found.rows, [wanted[j] for j in sorted(wanted)], rtol=1e-5, atol=1e-6)


def _check_counts(messages: list[Contribution], data: list[Samples]) -> None:
    """Each device told the classes and counts of its labelled samples, in the order of the devices' names."""
    for message, (_, y) in zip(messages, data, strict=True):
        classes, counts = np.unique(y[y >= 0], return_counts=True)
        assert message.body.classes.tolist() == classes.tolist()
        assert message.counts.tolist() == counts.tolist()


def _run(fleet: Fleet, path: Path, data: list[Samples], *options: object) -> None:
    """Two rounds of all devices, each of which finishes; every payload is the one in its device's journal."""
    fleet.aggregator([path], "--rounds", 2, "--min-clients", len(data), *options)
    for index, samples in enumerate(data):
        fleet.client(f"d{index}", path, samples)
    assert set(fleet.finish().values()) == {0}, fleet.log("aggregator")
    for number, row in enumerate(fleet.told("summary")["rounds"], start=1):
        assert (row["round"], row["committed"], row["rejected"]) == (number, len(data), 0)
        for device, payload in fleet.payloads(number).items():
            assert fleet.sent(device)[number] == (payload, "committed")


@pytest.mark.parametrize(("method", "weight"), [("fedhp", _share), ("fedpr", _client)])
def test_prototypes_are_merged_as_the_paper_weights_them(fleet: Fleet, method: str, weight: Weight) -> None:
    path = bundle(fleet.folder / "a.bundle", method, hyper={"epochs": 1})
    data = [share(0, HELD[0], 30), share(1, HELD[1], 45)]
    _run(fleet, path, data, "--no-calibrate")
    state = fleet.state(read_bundle(path).sha256)
    assert (state.version, state.round, set(state.rows)) == (2, 2, {"prototypes"})
    rounds = [fleet.messages(1), fleet.messages(2)]
    _check_counts(rounds[0], data)
    wanted = _merged(rounds, weight)
    assert sorted(wanted) == [0, 1, 2, 3]
    _check_rows(state.prototypes, wanted)
    other = _merged(rounds, _count)[1]  # class 1, which both hold: the weighting matters there
    assert np.abs(other - wanted[1]).max() > 1e-5


def _deviations(multiplier: float, samples: Samples) -> float:
    """σ whose noise hides a device's samples as `multiplier` does one: see docs/decisions/095."""
    return multiplier * float(np.linalg.norm(np.bincount(samples[1])))


def _policy(fleet: Fleet, epsilon: float) -> tuple[str, Path]:
    path = fleet.folder / "policy.toml"
    path.write_text(f'epsilon = {epsilon}\ndelta = 1e-5\nneighbours = "replace"\n')
    return "--policy", path


def test_hyper_knowledge_with_noise_and_a_budget_that_one_device_spends(fleet: Fleet) -> None:
    """8 deviations cost ε = 0.634 after one round and 0.926 after two: a device with 0.8 answers the second without a
    row, and the round does not wait for it."""
    names, data = ["d0", "d1", "d2"], [share(0, (0, 4)), share(1, HELD[0]), share(2, HELD[1])]
    path = bundle(fleet.folder / "a.bundle", "fedhkd", hyper={"epochs": 1, "noise": _deviations(8.0, data[0])})
    for name, samples in zip(names, data, strict=True):
        fleet.client(name, path, samples, *(_policy(fleet, 0.8) if name == "d0" else ()))
    for name in names:
        fleet.wait_for(name, "connected", 120.0)
    fleet.aggregator([path], "--rounds", 2, "--min-clients", 3, "--no-calibrate")
    assert set(fleet.finish().values()) == {0}, fleet.log("d0")
    line = "round 2 (fedhkd) is refused: ε = 0.634 of 0.8 is spent, and it would be 0.926 with this release"
    assert fleet.log("d0").count(line) == 1
    assert "refused by the policy of d0, round 2 (fedhkd): epsilon is spent" in fleet.log("aggregator")
    told = {name: fleet.told(name)["privacy"] for name in names}
    assert [told[name]["releases"] for name in names] == [2, 2, 2]
    assert told["d0"]["epsilon"] < 0.8 < told["d1"]["epsilon"]
    assert told["d0"]["epsilon_add_remove"] is None  # FedHKD tells its counts
    rounds = [fleet.messages(1), fleet.messages(2)]
    assert [sum(bool(len(message.counts)) for message in messages) for messages in rounds] == [3, 2]
    _check_counts(rounds[0], data)
    state = fleet.state(read_bundle(path).sha256)
    prototypes, soft = _merged(rounds, _count), _merged(rounds, _count, "soft")
    assert sorted(soft) == [0, 1, 2, 3, 4]  # class 4, d0's alone, keeps what the first round gave
    _check_rows(state.prototypes, prototypes)
    _check_rows(state.rows["soft"], soft)


@pytest.mark.slow
def test_a_device_with_a_budget_sends_no_ffc_sums(fleet: Fleet) -> None:
    """They carry no noise: the device with a budget answers that round without a row, and stays for the head."""
    noise = _deviations(8.0, share(0, HELD[0]))
    path = bundle(fleet.folder / "a.bundle", "fedhkd", hyper={"epochs": 1, "noise": noise})
    for index in range(2):
        fleet.client(f"d{index}", path, share(index, HELD[index]), *(() if index else _policy(fleet, 5.0)))
        fleet.wait_for(f"d{index}", "connected", 120.0)
    fleet.aggregator([path], "--rounds", 1, "--min-clients", 2, "--calibrate")
    assert set(fleet.finish().values()) == {0}, fleet.log("d0")
    line = "round 2 (ffc) is refused: the policy asks an ε of every release, ffc adds no noise"
    assert fleet.log("d0").count(line) == 1
    assert {name: bool(len(decode(payload).counts)) for name, payload in fleet.payloads(2).items()} == {
        "d0": False,
        "d1": True,
    }
    told = [fleet.told(f"d{index}")["privacy"] for index in range(2)]
    assert told[0]["epsilon"] == pytest.approx(0.634, abs=1e-3)
    assert (told[1]["epsilon"], told[1]["releases_without_noise"]) == (None, 1)
    assert "no ε holds" in fleet.log("d1")


def _ridge(z: np.ndarray, y: np.ndarray, ridge: float) -> np.ndarray:
    """Ridge regression on the pooled rows by least squares, never a Gram matrix; a class nobody holds has no row."""
    width = z.shape[1]
    penalty = math.sqrt(ridge * (z**2).sum() / width) * np.eye(width)
    targets = np.concatenate([np.eye(CLASSES)[y], np.zeros((width, CLASSES))])
    return np.linalg.lstsq(np.concatenate([z, penalty]), targets, rcond=None)[0].T[np.unique(y)]


def _from_triangles(messages: list[Contribution], width: int, ridge: float, classes: list[int]) -> np.ndarray:
    """(Σ A + λI)⁻¹ Σ b of the stored sums, entry by entry."""
    a, b = np.zeros((width, width)), np.zeros((CLASSES, width))
    for message in messages:
        entries = iter(message.triangle.tolist())
        for i in range(width):
            for k in range(i, width):
                value = next(entries)
                a[i, k] += value
                a[k, i] += value if i != k else 0.0
        for number, row in zip(message.body.classes, message.body.rows, strict=True):
            b[number] += row
    return np.linalg.solve(a + ridge * np.trace(a) / width * np.eye(width), b.T).T[classes]


@pytest.mark.parametrize(("method", "project"), [("spherefed", 0), ("ffc", 24)])
def test_ffc_is_the_head_of_the_pooled_data(fleet: Fleet, method: str, project: int) -> None:
    """After rounds of SphereFed, which send that they were done and nothing else; or alone, on projected features."""
    hyper = {"ridge": 1e-3, "form": "ridge", "project": project, "project_seed": 3} | (
        {"epochs": 1} if method == "spherefed" else {}
    )
    path = bundle(fleet.folder / "a.bundle", method, hyper=hyper)
    data = [share(0, HELD[0], 60), share(1, HELD[1], 60)]
    _run(fleet, path, data, "--sums-encoding", "f64")
    told, made = fleet.told("summary"), read_bundle(path)
    methods = [row["method"] for row in told["rounds"]]
    assert methods[-1] == "ffc"
    if method == "spherefed":
        assert methods == ["spherefed", "spherefed", "ffc"]
        for message in [*fleet.messages(1), *fleet.messages(2)]:
            assert not len(message.body.classes)
            assert (message.triangle, message.further, message.extractor) == (None, (), b"")
        assert max(map(len, fleet.payloads(1).values())) < 100
    state, last = fleet.state(made.sha256), fleet.messages(len(methods))
    assert set(state.rows) == {"head"}
    assert {message.extractor for message in last} == {made.extractor(method_of("ffc"))[:4]}
    width = project or made.manifest.features
    _check_counts(last, data)
    assert {message.triangle.shape for message in last} == {(width * (width + 1) // 2,)}
    np.testing.assert_allclose(state.head.rows, _from_triangles(last, width, 1e-3, [0, 1, 2, 3]), rtol=1e-5, atol=1e-6)
    z = Extractor(made, made.params).features(np.concatenate([x for x, _ in data])).astype(np.float64)
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    z = z @ projection(z.shape[1], project, 3) if project else z
    pooled = _ridge(z, np.concatenate([y for _, y in data]), 1e-3)
    np.testing.assert_allclose(state.head.rows, pooled, rtol=1e-4, atol=1e-5)


def test_devices_with_different_backbones_share_prototypes(fleet: Fleet) -> None:
    """And with images of different sizes: the network of 18 channels sees 28×28 pixels, that of 22 the middle 20×20."""
    shapes = {"fedproto_mnist_18": (28, 28, 1), "fedproto_mnist_22": (20, 20, 1)}
    hyper = {"epochs": 1, "lr": 0.05}
    paths = [
        bundle(fleet.folder / f"{n}.bundle", "fedproto", n, input_shape=shape, hyper=hyper)
        for n, shape in shapes.items()
    ]
    made = [read_bundle(path) for path in paths]
    data = [share(0, HELD[0], whole=True), share(1, HELD[1], whole=True)]
    data[1] = (data[1][0][:, 4:24, 4:24], data[1][1])
    fleet.aggregator(paths, "--rounds", 2, "--min-clients", 2, "--no-calibrate")
    for index, samples in enumerate(data):
        fleet.client(f"d{index}", paths[index], samples)
    assert set(fleet.finish().values()) == {0}, fleet.log("aggregator")
    rounds = [fleet.messages(1), fleet.messages(2)]
    assert [[m.bundle for m in messages] for messages in rounds] == [[b.sha256[:4] for b in made]] * 2
    _check_counts(rounds[0], data)
    together = hashlib.sha256(b"".join(sorted(b.sha256 for b in made))).digest()
    _check_rows(fleet.state(together).prototypes, _merged(rounds, _count))
    assert [row["committed"] for row in fleet.told("summary")["rounds"]] == [2, 2]


def test_samples_without_a_label_train_and_are_never_counted(fleet: Fleet) -> None:
    path = bundle(fleet.folder / "a.bundle", "fedproto", hyper={"epochs": 1, "pu_weight": 0.5})
    data = []
    for index, classes in enumerate(HELD):
        x, y = share(index, classes, 60)
        data.append((x, np.where(np.arange(60) % 2, y, -1)))
    _run(fleet, path, data, "--no-calibrate")
    rounds = [fleet.messages(1), fleet.messages(2)]
    for messages in rounds:
        _check_counts(messages, data)
    _check_rows(fleet.state(read_bundle(path).sha256).prototypes, _merged(rounds, _count))
    assert "60 samples of 2 classes" in fleet.log("d0")
    assert "30 samples, " in fleet.log("d0")

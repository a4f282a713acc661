"""The cost models know no method by name: all of the registry, and two invented here, are costed by what they say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, get_args

import numpy as np
import pytest
from numpy.typing import NDArray
from step_workloads import riding, update_operations

from protofleet.cli import main
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.methods import METHODS, Head, Method, Value
from protofleet.contract.methods.base import LossTerm, Solves
from protofleet.contract.methods.fedproto import FedProto
from protofleet.contract.methods.optimizers import Update
from protofleet.contract.sums.statistics import Field, Participation, Rows, Statistic, Triangle
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Contribution
from protofleet.hw_profiles.workload.calibration_step import method_calibration, statistic_bytes, statistic_work
from protofleet.hw_profiles.workload.from_onnx import bundle_workloads, read_workload
from protofleet.hw_profiles.workload.model import Tensor, Workload
from protofleet.hw_profiles.workload.paper_networks import build_network
from protofleet.hw_profiles.workload.training import Training, bundle_training, method_training
from protofleet.hw_profiles.workload.training_step import training_step

MakeBundle = Callable[..., Path]
C, D = 10, 1024
ROOM = Path(__file__).parents[3] / "hw_profiles"


@dataclass(frozen=True, eq=False)
class Spread(Statistic):
    """Sums, their products, and what the head says."""

    NAME: ClassVar[str] = "spread"
    FIELDS: ClassVar[tuple[Field, ...]] = (
        Triangle("products"),
        Rows("sums"),
        Rows("said", "classes", holds="probabilities"),
    )

    products: NDArray[np.float64]
    sums: NDArray[np.float64]
    said: NDArray[np.float64]
    counts: NDArray[np.int64]


class Invented(FedProto):
    """A triangle and two kinds of rows, two terms in its loss, Adam for the head alone."""

    name = "invented"
    title = "Invented"
    heads: ClassVar[tuple[Head, ...]] = ("local",)
    loss: ClassVar[tuple[LossTerm, ...]] = ("cross-entropy", "mean-features")
    statistic = Spread
    solves: ClassVar[Solves] = "ridge"
    encoding = "f64"

    def update_of(self, name: str, hyper: Mapping[str, Value]) -> Update:
        return Update("adam", 1e-3) if name.startswith("head.") else super().update_of(name, hyper)


class InventedCalibration(Invented):
    """The same, where nothing is trained."""

    name = "invented-calibration"
    objective = None
    heads: ClassVar[tuple[Head, ...]] = ("none",)
    loss: ClassVar[tuple[LossTerm, ...]] = ()
    hyper = MappingProxyType({})
    unit_features = True


EVERY = (*METHODS.values(), Invented(), InventedCalibration())
TRAINED = [found for found in EVERY if found.trains]
by_name = pytest.mark.parametrize("found", EVERY, ids=lambda found: found.name)
trained_by_name = pytest.mark.parametrize("found", TRAINED, ids=lambda found: found.name)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The invented methods are found by name, in this file alone."""
    for found in (Invented(), InventedCalibration()):
        monkeypatch.setitem(METHODS._known, found.name, found)


@pytest.fixture(scope="module")
def forward() -> Workload:
    return read_workload(build_network("spherefed_convnet"), batch=4, name="spherefed_convnet")


def work_of(step: Workload) -> int:
    return step.macs + sum(layer.vector_ops for layer in step.layers)


def test_no_method_is_known_by_name() -> None:
    """What a paper published is a baseline of its own (`workload/baselines.py`), and says so in its name."""
    for path in [*ROOM.rglob("*.py"), ROOM.parent / "protofleet" / "commands" / "profile.py"]:
        if path.name == "baselines.py":
            continue
        text = path.read_text(encoding="utf-8").replace('"spherefed_', "a backbone of that paper: ")
        for name in METHODS:
            plain = text.replace(f"published_{name}", "a baseline")
            assert f'"{name}"' not in plain, path
            assert f"'{name}'" not in plain, path
            assert f"{name}_" not in plain, path


# ---- what goes up, and what is summed ----


@by_name
def test_its_bytes_are_those_of_a_contribution_that_is_really_encoded(found: Method) -> None:
    rng, room = np.random.default_rng(0), found.statistic.GROUPS
    samples = 1000 if found.statistic.COUNTED else 1
    counts = np.where(np.arange(C * room) % room < found.groups(found.resolve({})), samples, 0)
    drawn = [rng.random(array.shape) for array in found.statistic.zero(C, 64).arrays()]
    drawn = [array * (counts > 0)[:, None] if array.ndim == 2 else array for array in drawn]
    statistic = found.statistic.build(drawn, 0 * counts if found.statistic is Participation else counts)
    extractor = bytes(32) if found.extractor == "bundle" else b""
    sent = Contribution.of(statistic, run=bytes(4), round=1, method=found.name, bundle=bytes(32), extractor=extractor)
    assert statistic_bytes(found, C, 64) == len(encode(sent, found.encoding))


@by_name
def test_its_statistic_costs_what_its_fields_do(found: Method) -> None:
    samples, width = 500, 64
    work = method_calibration(found, samples, C, width)
    fields = found.statistic.FIELDS
    triangles = sum(isinstance(f, Triangle) for f in fields)
    heads = sum(isinstance(f, Rows) and f.holds == "probabilities" for f in fields)
    assert work.device.macs == samples * (triangles * width * width + heads * width * C)
    added = sum(samples * f.columns(C, width) for f in found.statistic.row_fields())
    prepared = 3 * samples * width * bool(found.unit_features and fields)
    assert sum(layer.vector_ops for layer in work.device.layers) == added + prepared + heads * 8 * samples * C
    assert bool(work.server.macs) is (found.solves == "ridge")
    assert work.statistic == found.statistic.NAME


def test_each_field_adds_work() -> None:
    done = [work_of(statistic_work(Spread.FIELDS[:n], 100, C, D)) for n in range(4)]
    assert sorted(set(done)) == done


# ---- a training step ----


@trained_by_name
def test_each_term_of_its_loss_adds_work(found: Method, forward: Workload) -> None:
    training = method_training(found, C, D)
    whole = work_of(training_step(forward, training))
    for term in training.loss:
        others = tuple(other for other in training.loss if other != term)
        assert work_of(training_step(forward, replace(training, loss=others))) < whole, term


@pytest.mark.parametrize("term", get_args(LossTerm))
def test_each_term_is_costed_forward_and_back(term: LossTerm, forward: Workload) -> None:
    """Every gradient that a term gives is written once and read; more classes are more work, where it sees classes."""

    def step(classes: int, loss: tuple[LossTerm, ...] = ("cross-entropy", term)) -> Workload:
        own = (Tensor("own.learned", (classes, D), "parameter"), Tensor("own.fixed", (classes, D), "frozen"))
        return training_step(forward, Training("t", classes, "trained", loss, lambda name: Update(), state=own))

    work = step(C, tuple(dict.fromkeys(("cross-entropy", term))))
    forwards, back = ([x for x in work.layers if x.name.startswith(term) and (x.phase == "forward") is ahead]
                      for ahead in (True, False))  # fmt: skip
    assert sum(x.macs + x.vector_ops for x in forwards) > 0
    assert sum(x.macs + x.vector_ops for x in back) > 0
    written = [name for layer in work.layers for name in layer.writes if name.startswith("grad")]
    assert len(written) == len(set(written))
    assert set(written) <= {name for layer in work.layers for name in layer.reads}
    if term != "prototype-distance":
        assert work_of(step(2 * C)) > work_of(step(C))


def test_soft_predictions_take_the_head_on_every_prototype_and_its_gradient(forward: Workload) -> None:
    training = method_training(METHODS["fedhkd"], C, D)
    plain = replace(training, loss=tuple(term for term in training.loss if term != "soft-predictions"))
    steps = [training_step(forward, each) for each in (training, plain)]
    more = {phase: steps[0].phase(phase).macs - steps[1].phase(phase).macs for phase in ("forward", "weight_gradient")}
    assert more == {"forward": C * C * D, "weight_gradient": C * C * D}
    assert steps[0].phase("input_gradient").macs == steps[1].phase("input_gradient").macs


@pytest.fixture(scope="module")
def bundle_of(mnist_like_bundle: MakeBundle) -> Iterator[Callable[[str], Path]]:
    with pytest.MonkeyPatch.context() as patch:
        for found in (Invented(), InventedCalibration()):
            patch.setitem(METHODS._known, found.name, found)
        yield lambda name: mnist_like_bundle(name, backbone="fedproto_mnist")


@trained_by_name
def test_its_optimizer_keeps_what_the_manifest_lists_and_works_in_the_update(
    found: Method, bundle_of: Callable[[str], Path]
) -> None:
    bundle = read_bundle(bundle_of(found.name))
    features, real = bundle_workloads(bundle, batch=bundle.manifest.batch)
    derived = training_step(features, bundle_training(bundle.manifest))
    listed = {t.name: t.shape for t in bundle.manifest.state if t.role == "optimizer"}
    assert real is not None
    for step in (derived, real):
        kept = {name: tensor.shape for name, tensor in step.tensors.items() if tensor.role == "optimizer"}
        assert kept == listed
        touching = [x for x in step.layers if set(kept) & set(x.reads) and x.name not in riding(step)]
        assert {layer.phase for layer in touching} == {"update"}
    operations = [update_operations(step) for step in (derived, real)]
    assert operations[0] == pytest.approx(operations[1], rel=0.03)
    by_adam = {layer.writes[0] for layer in derived.layers if layer.op == "Adam"} - {"adam.steps"}
    assert {name.removeprefix("adam.mean.") for name in listed if name.startswith("adam.mean.")} == by_adam


# ---- the two commands ----


@by_name
def test_cost_and_profile_have_heard_of_it(
    found: Method, bundle_of: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = bundle_of(found.name), tmp_path / "report.json"
    bundle = read_bundle(path)
    rows = found.row_width(found.resolved_in(bundle.manifest.hyper), bundle.manifest.features)
    up = statistic_bytes(found, bundle.manifest.classes, rows)

    assert main(["cost", str(path), "--json", str(out), "--html", str(tmp_path / "c.html")]) == 0
    report = json.loads(out.read_text())
    assert [row["method"] for row in report["methods"]] == ["fedavg", *(n for n, m in METHODS.items() if m.trains)]
    idle = [name for name, other in METHODS.items() if not other.trains]
    assert [row["method"] for row in report["calibration"]] == [*idle, "ccvr"]
    (row,) = [row for row in report["methods"] + report["calibration"] if row["method"] == found.name]
    assert row["uplink_bytes"] == up
    if found.trains:
        listed = sum(4 * int(np.prod(t.shape)) for t in bundle.manifest.state if t.role == "optimizer")
        assert 0 <= row["memory"]["optimizer_bytes"] - listed < 64 * 20, "but for whole lines of memory"
        assert row["step_ms"] > 0
        assert row["round_s"] > 0
    else:
        assert row["statistic"] == found.statistic.NAME
        assert row["total_ms"] > row["forward_ms"] > 0

    capsys.readouterr()
    assert main(["profile", str(path), "--devices", "raspberry-pi-4,fpga-vc707-32x64", "--json", str(out)]) == 0
    told = json.loads(out.read_text())["uplink"]
    assert (told["method"], told["statistic"], told["contribution_bytes"]) == (found.name, found.statistic.NAME, up)
    last = METHODS["ffc"] if found.trains else found
    assert (told["closing_method"], told["closing_statistic"]) == (last.name, last.statistic.NAME)
    said = capsys.readouterr().out
    assert "once" in said
    if found.name != told["closing_method"]:
        assert f"({found.statistic.NAME}), once for FFC" in said

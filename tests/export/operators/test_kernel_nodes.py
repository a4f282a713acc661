"""A training step in the operators of protofleet-kernels: what it is made of; where the wheel is, what it gives."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from export_samples import Device, device, make_device
from torch import nn

from protofleet.contract.bundle import native_kernels
from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.bundle.native_kernels import DOMAIN, FORM, installed_kernels, runnable_forms
from protofleet.edge_client.training.onnx_session import open_session
from protofleet.edge_client.trials.step_forms import tried
from protofleet.export.bundles.build import build_bundle
from protofleet.export.bundles.bundle_graphs import export_step
from protofleet.export.verify.verify import verify_step

needs_wheel = pytest.mark.skipif(
    installed_kernels() is None, reason="needs protofleet-kernels: pip install ./kernels, with a C++ compiler"
)
_KINDS = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(uint8)": np.uint8}
BASE = {"backbone": "small_cnn", "method_name": "fedproto", "labels": ["a", "b", "c"], "input_shape": (12, 12, 1)}


def exported(dev: Device) -> onnx.ModelProto:
    graph = export_step(dev.net, dev.preprocess, dev.plan, dev.batch, dev.input_shape, kernels=True)
    return onnx.load_from_string(graph)


def kinds(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node if node.domain == DOMAIN)


def verified(dev: Device, model: onnx.ModelProto) -> None:
    graph = model.SerializeToString()
    verify_step(graph, dev.net, dev.preprocess, dev.plan, dev.state, batch=dev.batch, input_shape=dev.input_shape)


@pytest.fixture
def _no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_kernels, "installed_kernels", lambda: None)


def test_normalisation_activation_and_residual_are_one_operator():
    """Between two convolutions nothing is left but it, and no order changes."""
    found = kinds(exported(device("short mobilenet_v2", "fedproto")))
    convolutions = found["Conv"]
    assert found["BatchNorm"] == found["BatchNormGrad"] == found["ConvWeightGradSgdMomentum"] == convolutions
    assert found["ConvInputGrad"] == convolutions - 1  # nobody asks for the gradient of the images
    assert found["FromBlocks"] == 0
    assert found["ToBlocks"] == 0
    assert found["Spread"] == 1  # the gradient of the mean over the last plane
    residual = exported(device("short resnet", "fedproto"))
    assert kinds(residual)["BatchNormAddGrad"] == 2
    assert sum(len(node.input) == 5 for node in residual.graph.node if node.op_type == "BatchNorm") == 2
    left = Counter(node.op_type for node in residual.graph.node)
    assert left["Relu"] == 0
    assert left["BatchNormalization"] == 1  # of the images


def test_the_update_is_one_operator_for_each_trained_tensor():
    dev = device("short mobilenet_v2", "fedproto")
    model = exported(dev)
    found = kinds(model)
    assert found["ConvWeightGrad"] == 0  # a kernel's gradient is never written
    assert found["ConvWeightGradSgdMomentum"] == found["Conv"]
    assert found["SgdMomentum"] + found["Conv"] == len(dev.plan.names("param"))
    assert {value.name for value in model.graph.output} == {
        value.name for value in onnx.load_from_string(dev.graph).graph.output
    }


def test_a_gate_and_a_hard_swish_stay_in_blocks():
    """Of a gated block: its mean, its product with the gate, and both of their gradients change no order."""
    model = exported(device("short mobilenet_v3", "fedproto"))
    left = Counter(node.op_type for node in model.graph.node)
    gates = left["GlobalMean"] // 2  # a gate's mean, and the sum that is its gradient; the last mean gives the features
    assert gates > 0
    assert left["ScaleChannels"] == 2 * gates
    assert left["Spread"] == gates + 1
    norms = [node for node in model.graph.node if node.op_type == "BatchNorm"]
    acts = {each.ints[4] for node in norms for each in node.attribute if each.name == "sizes"}
    assert acts == {0, 1, 3}
    assert left["HardSwish"] == 0


class Odd(nn.Module):
    """What has no operator: a dilated convolution, groups of four channels, an activation that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.dilated = nn.Conv2d(16, 32, 3, padding=2, dilation=2)
        self.grouped = nn.Conv2d(32, 32, 3, padding=1, groups=8)
        self.norm, self.other = nn.BatchNorm2d(32), nn.BatchNorm2d(32)

    def forward(self, x):
        y = self.norm(self.grouped(self.dilated(self.first(x)).relu()))
        z = self.other(y)
        return (nn.functional.relu6(y) + z * nn.functional.hardswish(y)).mean(dim=(2, 3))


@needs_wheel
@pytest.mark.parametrize("family", ["short mobilenet_v2", "short mobilenet_v3", "short resnet", "small_cnn"])
def test_a_step_of_the_wheels_operators_equals_torch(family: str):
    dev = device(family, "fedproto")
    model = exported(dev)
    assert kinds(model)["Conv"] > 1
    verified(dev, model)


@needs_wheel
def test_what_has_no_operator_is_translated_around_it():
    dev = make_device(Odd(), 32, "fedproto", (12, 12, 3), 6)
    model = exported(dev)
    assert kinds(model)["Conv"] == 1
    verified(dev, model)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    path = tmp_path_factory.mktemp("kernels") / "a.bundle"
    build_bundle(**BASE, batch=4, for_kernels=True, out=path)
    return read_bundle(path)


def test_the_form_is_a_member_beside_the_portable_step(bundle: Bundle, tmp_path: Path):
    assert set(bundle.forms) == {FORM}
    plain = tmp_path / "plain.bundle"
    build_bundle(**BASE, batch=4, out=plain)
    assert read_bundle(plain).train_step == bundle.train_step
    assert DOMAIN.encode() not in bundle.train_step


@pytest.mark.usefixtures("_no_wheel")
def test_without_the_wheel_nobody_looks_at_it(bundle: Bundle):
    assert runnable_forms({**bundle.forms, "lanes16": b""}) == {"lanes16": b""}
    assert "is not a registered function/op" in tried(bundle, FORM).failed


@needs_wheel
def test_a_device_with_the_wheel_finds_the_form_right(bundle: Bundle):
    assert runnable_forms(bundle.forms) == bundle.forms
    trial = tried(bundle, FORM)
    assert trial.is_right
    assert trial.error < 1e-3


@needs_wheel
def test_a_graph_without_its_operators_loads_no_native_code(bundle: Bundle, monkeypatch: pytest.MonkeyPatch):
    missing = replace(installed_kernels(), library=Path("/nowhere.so"))
    monkeypatch.setattr(native_kernels, "installed_kernels", lambda: missing)
    open_session(bundle.train_step, "train_step.onnx", training=True)
    with pytest.raises(Exception, match="nowhere"):
        open_session(bundle.forms[FORM], "train_step.kernels.onnx", training=True)


@needs_wheel
def test_two_runs_give_the_same_bits(bundle: Bundle):
    feeds, results = {}, []
    for _ in range(3):
        session, _ = open_session(bundle.forms[FORM], "form", threads=2, training=True)
        rng = np.random.default_rng(0)
        kinds_of = {"tensor(uint8)": np.uint8, "tensor(int64)": np.int64, "tensor(float)": np.float32}
        for each in session.get_inputs():
            values = rng.integers(0, 3, each.shape) if "int" in each.type else rng.random(each.shape)
            feeds.setdefault(each.name, np.asarray(values, dtype=kinds_of[each.type]))
        results.append(session.run(None, feeds))
    assert all(np.array_equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@needs_wheel
def test_a_weight_moves_as_soon_as_its_gradient_can_be_made(tmp_path: Path):
    """And not at the end of the step, until when all that the gradients are made of would be kept."""
    dev = device("short mobilenet_v2", "fedproto")
    graph = exported(dev).SerializeToString()
    session, _ = open_session(graph, "step", threads=1, training=True, trace=str(tmp_path / "trace"))
    session.run(None, {i.name: np.zeros(i.shape, _KINDS[i.type]) for i in session.get_inputs()})
    events = json.loads(Path(session.end_profiling()).read_text())
    ran = [event["args"]["op_name"] for event in events if event["name"].endswith("_kernel_time")]
    assert ran.count("ConvWeightGradSgdMomentum") > 10
    waits = max(
        sum(kind == "ConvInputGrad" for kind in ran[: place + 1])
        - sum(kind == "ConvWeightGradSgdMomentum" for kind in ran[: place + 1])
        for place in range(len(ran))
    )
    assert waits <= 1  # gradients that a weight's own still waits for


def test_a_gradient_that_may_be_written_in_place_has_its_shape_in_the_graph():
    """Without it ONNX Runtime gives the gradient of each normalisation memory of its own."""
    dev = device("short mobilenet_v2", "fedproto")
    model = exported(dev)
    told = {value.name: [d.dim_value for d in value.type.tensor_type.shape.dim] for value in model.graph.value_info}
    found = [node for node in model.graph.node if node.op_type == "BatchNormGrad"]
    assert len(found) > 10
    for node in found:
        b, c, h, w, _ = next(a.ints for a in node.attribute if a.name == "sizes")
        assert told[node.input[0]] == told[node.output[0]] == [b, -(-c // 16), h, w, 16]

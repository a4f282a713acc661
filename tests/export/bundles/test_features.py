"""features.onnx: any batch, weights from outside, as fast and as right as a graph that holds its own."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from protofleet.contract.bundle.onnx_runtime import ort
from protofleet.contract.errors import ExportError
from protofleet.contract.methods import method
from protofleet.export.backbones.backbone import build_backbone
from protofleet.export.bundles.build import export_step, initial_state
from protofleet.export.bundles.features import export_features
from protofleet.export.bundles.torch_exporter import PRODUCER
from protofleet.export.graphs.graph_builder import WEIGHTS_FILE
from protofleet.export.objectives import unit_features
from protofleet.export.operators.translation import TABLE
from protofleet.export.steps.step import Preprocess, plan_step
from protofleet.export.verify.agreement import distances
from protofleet.export.verify.verify import verify_features

CASES = {
    "small_cnn": (None, (16, 16, 1)),
    "fedproto_mnist": (None, (28, 28, 1)),
    "fedhp_cifar": (None, (32, 32, 3)),
    "spherefed_convnet": ("batch", (32, 32, 3)),
    "resnet18": (None, (32, 32, 3)),
    "vgg13": ("group", (32, 32, 3)),
    "squeezenet1_1": (None, (40, 40, 3)),
    "mobilenet_v2": (None, (32, 32, 3)),
    "mobilenet_v3_small": (None, (32, 32, 3)),
    "efficientnet_b0": ("group", (32, 32, 3)),
}


def _exported(name: str, unit: bool = False):
    norm, shape = CASES[name]
    net, width = build_backbone(name, shape, norm)  # type: ignore[arg-type]
    preprocess = Preprocess((0.4,) * shape[2], (0.3,) * shape[2])
    plan = plan_step(net, method("ffc"), {}, "none", 10, width)
    return net, preprocess, plan, shape, width, export_features(net, preprocess, plan.state, shape, unit=unit)


def _weights(net: torch.nn.Module, plan) -> dict[str, np.ndarray]:
    return {t.name: net.state_dict()[t.name.removeprefix("backbone.")].numpy() for t in plan.state}


def _session(graph: bytes, weights: dict[str, np.ndarray], optimised: str = "") -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if optimised:
        options.optimized_model_filepath = optimised
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    values = [ort.OrtValue.ortvalue_from_numpy(v) for v in weights.values()]
    options.add_external_initializers(list(weights), values)
    return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def _assert_equal(got: np.ndarray, net: nn.Module, preprocess: Preprocess, x: np.ndarray, unit: bool = False) -> None:
    """As near to torch in float64 as torch in float32 is."""
    wanted = []
    for dtype in (torch.float64, torch.float32):
        mean, std = preprocess.mean.to(dtype), preprocess.std.to(dtype)
        pixels = ((torch.from_numpy(x).to(dtype) / 255 - mean) / std).permute(0, 3, 1, 2)
        with torch.no_grad():
            z = copy.deepcopy(net).eval().to(dtype)(pixels)
        wanted.append({"z": (unit_features(z) if unit else z).numpy()})
    (found,) = distances({"z": got}, *wanted, {})
    assert found.holds, found


@pytest.mark.parametrize("name", CASES)
def test_features_equal_torch_for_any_batch(name: str):
    net, preprocess, plan, shape, width, graph = _exported(name)
    session = _session(graph, _weights(net, plan))
    assert session.get_inputs()[0].shape == ["batch", *shape]
    assert session.get_outputs()[0].shape == ["batch", width]
    for count in (1, 3, 8):
        x = np.random.default_rng(count).integers(0, 256, (count, *shape), dtype=np.uint8)
        (got,) = session.run(["z"], {"x": x})
        assert got.shape == (count, width)
        _assert_equal(got, net, preprocess, x)


def test_unit_features_are_unit():
    net, preprocess, plan, shape, _, graph = _exported("small_cnn", unit=True)
    x = np.random.default_rng(0).integers(0, 256, (4, *shape), dtype=np.uint8)
    (got,) = _session(graph, _weights(net, plan)).run(["z"], {"x": x})
    _assert_equal(got, net, preprocess, x, unit=True)
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1.0, rtol=1e-5)


def test_the_weights_are_the_devices_own():
    """Other weights, other features; and the running statistics count."""
    net, preprocess, plan, shape, _, graph = _exported("resnet18")
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.1)
        net.bn1.running_mean.add_(0.2)
    x = np.random.default_rng(0).integers(0, 256, (2, *shape), dtype=np.uint8)
    (got,) = _session(graph, _weights(net, plan)).run(["z"], {"x": x})
    _assert_equal(got, net, preprocess, x)


NORM = torch.ops.aten.native_batch_norm.default


@pytest.mark.parametrize("forgotten", ["weight", "bias", "running_mean", "running_var"])
def test_a_new_networks_ones_and_zeros_hide_nothing(forgotten: str, monkeypatch: pytest.MonkeyPatch):
    """Scales of 1, shifts and means of 0: a graph that leaves them out would give a new network's features."""
    right, place = TABLE[NORM], ["weight", "bias", "running_mean", "running_var"].index(forgotten)

    def wrong(e, out, x, *given):
        own = e.plain(given[place])
        ones_or_zeros = e.op("Div" if forgotten in ("weight", "running_var") else "Sub", own, own)
        return right(e, out, x, *given[:place], replace(given[place], plain=ones_or_zeros), *given[place + 1 :])

    monkeypatch.setitem(TABLE, NORM, wrong)
    net, preprocess, plan, shape, _, graph = _exported("spherefed_convnet")
    with pytest.raises(ExportError, match=r"features\.onnx disagrees with torch at z"):
        verify_features(graph, net, preprocess, _weights(net, plan), input_shape=shape, unit=False)


class FixedToFloat32(nn.Module):
    """A backbone that computes in float32 whatever it is given, as many do around a softmax or a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(48, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1)).float() @ torch.ones((6, 4), dtype=torch.float32)


def test_a_backbone_that_insists_on_float32_is_verified_too():
    torch.manual_seed(0)  # one number for each image: of some weights float32 happens to be as good as float64
    net, preprocess = FixedToFloat32(), Preprocess((0.5,) * 3, (0.25,) * 3)
    plan = plan_step(net, method("ffc"), {}, "none", 10, 4)
    graph = export_features(net, preprocess, plan.state, (4, 4, 3), unit=False)
    found = verify_features(graph, net, preprocess, _weights(net, plan), input_shape=(4, 4, 3), unit=False)
    assert found.torch_error > 1e-9  # torch's float64 was not float32 in disguise


def test_no_weight_bytes_are_in_the_graph():
    _, _, plan, _, _, graph = _exported("mobilenet_v2")
    model = onnx.ModelProto.FromString(graph)
    outside = {t.name for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL}
    assert outside == {t.name for t in plan.state}
    for tensor in model.graph.initializer:
        if tensor.name in outside:
            assert {(e.key, e.value) for e in tensor.external_data} == {("location", WEIGHTS_FILE)}
            assert not tensor.raw_data
            assert not tensor.float_data
    assert len(graph) < 100_000


def test_onnx_runtime_still_fuses(tmp_path):
    """With its weights supplied at session creation every BatchNorm folds into its convolution."""
    net, _, plan, _, _, graph = _exported("mobilenet_v2")
    before = [n.op_type for n in onnx.ModelProto.FromString(graph).graph.node]
    assert before.count("BatchNormalization") == 52 + 1  # and the preprocessing
    target = str(tmp_path / "optimised.onnx")
    _session(graph, _weights(net, plan), target)
    after = [n.op_type for n in onnx.load(target).graph.node]
    assert after.count("BatchNormalization") <= 1
    assert "Clip" not in after


def test_only_standard_operators_and_no_trace_of_this_machine():
    *_, graph = _exported("resnet18")
    model = onnx.ModelProto.FromString(graph)
    assert {n.domain for n in model.graph.node} == {""}
    assert [o.domain for o in model.opset_import] == [""]
    assert not model.metadata_props
    assert not any(n.doc_string or n.metadata_props for n in model.graph.node)
    assert b"/" not in b"".join(n.name.encode() for n in model.graph.node)


class _Running(torch.nn.Module):
    """Ends in a running sum, an operator that our own table does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)
        self.register_buffer("shift", torch.ones(4, 1, 1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(self.norm(self.conv(x)) + self.shift, 2).mean((2, 3))


def test_torchs_exporter_writes_what_our_table_cannot():
    """And its graph has the form of ours: weights outside, any batch, standard operators, nothing of this machine."""
    net = _Running()
    row, preprocess = method("fedproto"), Preprocess((0.5,) * 3, (0.25,) * 3)
    plan = plan_step(net, row, row.resolve({}), "local", 10, 4)
    graph = export_features(net, preprocess, plan.state, (8, 8, 3), unit=True)
    model = onnx.ModelProto.FromString(graph)
    assert model.producer_name == PRODUCER
    outside = {t.name for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL}
    assert outside == {t.name for t in plan.state if t.name.startswith("backbone.")}
    assert {n.domain for n in model.graph.node} == {""}
    assert b"/" not in graph
    state = initial_state(net, plan, 0)
    assert verify_features(graph, net, preprocess, state, input_shape=(8, 8, 3), unit=True).error < 1e-5
    with pytest.raises(ExportError, match=r"no translation to ONNX.*got aten.cumsum.*try .*--method ffc"):
        export_step(net, preprocess, plan, 4, (8, 8, 3))


class _Choosy(torch.nn.Module):
    """Asks the pixels which way to go: no graph can."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3)) if x.sum() > 0 else x.amax((2, 3))


def test_what_nobody_can_export_is_one_line():
    net = _Choosy()
    with pytest.raises(ExportError, match=r"torch.onnx.export cannot export the backbone's features") as caught:
        export_features(net, Preprocess((0.5,) * 3, (0.5,) * 3), (), (4, 4, 3), unit=False)
    assert "\n" not in str(caught.value)


def test_a_graph_that_holds_its_own_weights_is_refused():
    """A device's trained weights would change nothing: verification moves the weights and sees it."""
    net, preprocess, plan, shape, _, graph = _exported("small_cnn")
    weights = _weights(net, plan)
    model = onnx.ModelProto.FromString(graph)
    baked = weights.pop("backbone.0.weight")
    for index, tensor in enumerate(model.graph.initializer):
        if tensor.name == "backbone.0.weight":
            model.graph.initializer[index].CopyFrom(onnx.numpy_helper.from_array(baked, tensor.name))
    with pytest.raises(ExportError, match="disagrees with torch"):
        verify_features(model.SerializeToString(), net, preprocess, weights, input_shape=shape, unit=False)

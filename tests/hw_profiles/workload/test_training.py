"""Training steps derived from forward graphs, held against gradients counted by hand and against real step graphs."""

from __future__ import annotations

from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.helper import make_node
from step_workloads import riding, update_operations

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.errors import MethodError, UsageError
from protofleet.contract.methods import method
from protofleet.contract.methods.optimizers import Update
from protofleet.hw_profiles.devices.schema import find_device, load_devices
from protofleet.hw_profiles.reports.profile_report import Choice, profile_report
from protofleet.hw_profiles.reports.subject import bundle_subject
from protofleet.hw_profiles.workload.baselines import fedavg, published_spherefed, without_classifier
from protofleet.hw_profiles.workload.from_onnx import bundle_workloads, read_workload
from protofleet.hw_profiles.workload.model import ConvShape, Gemm, Layer, Tensor, Workload
from protofleet.hw_profiles.workload.paper_networks import build_network
from protofleet.hw_profiles.workload.phases import phase_of_nodes
from protofleet.hw_profiles.workload.training import Training, bundle_training, method_training
from protofleet.hw_profiles.workload.training_step import input_gradient_gemms, training_step


@lru_cache(maxsize=8)
def forward(name="spherefed_convnet", batch=4, side=32):
    return read_workload(build_network(name, side=side), batch=batch, name=name)


def macs(step, phase):
    return step.phase(phase).macs


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(3, 9),
    width=st.integers(3, 9),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    pad=st.integers(0, 2),
    dilation=st.integers(1, 2),
)
def test_an_input_gradient_multiplies_each_tap_that_touches_each_input(height, width, kernel, stride, pad, dilation):
    conv = ConvShape(2, height, width, 3, 5, (kernel,) * 2, (stride,) * 2, (pad,) * 4, (dilation,) * 2, 1, 1, 1)
    touches = sum(
        (row + pad - i * dilation) % stride == 0 and (col + pad - j * dilation) % stride == 0
        for row in range(height)
        for col in range(width)
        for i in range(kernel)
        for j in range(kernel)
    )
    assert sum(gemm.macs for gemm in input_gradient_gemms(conv)) == 2 * touches * 3 * 5


def test_gradients_of_the_convnet_cost_what_its_forward_pass_does():
    """Each weight's products are as many as forward; the input gradient lacks only the first layer's."""
    work = forward()
    step = training_step(work, fedavg(work, 10))
    head = 4 * 1024 * 10
    first = work.layers[0].macs
    assert macs(step, "forward") == work.macs + head
    assert macs(step, "weight_gradient") == work.macs + head
    assert macs(step, "input_gradient") == work.macs + head - first
    assert macs(step, "update") == 0


@pytest.mark.parametrize("classes", [10, 200])
def test_a_frozen_head_saves_its_weight_gradient_and_update_but_not_its_input_gradient(classes):
    trained, frozen = (training_step(forward(), as_in(forward(), classes)) for as_in in (fedavg, published_spherefed))
    head = 4 * 1024 * classes
    assert macs(trained, "weight_gradient") - macs(frozen, "weight_gradient") == head
    assert macs(trained, "input_gradient") == macs(frozen, "input_gradient")
    updates = [{layer.name for layer in step.phase("update").layers} for step in (trained, frozen)]
    assert updates[0] - updates[1] == {"head.weight:update"}


def test_a_skipped_head_has_no_products_at_all():
    trained, skipped = (training_step(forward(), as_in(forward(), 100)) for as_in in (fedavg, without_classifier))
    head = 4 * 1024 * 100
    for phase in ("forward", "input_gradient", "weight_gradient"):
        assert macs(trained, phase) - macs(skipped, phase) == head


def test_every_trained_tensor_is_updated_once_and_its_gradient_is_whole():
    """ResNet18's residual sums split gradients; each must have been added up before its update."""
    work = forward("spherefed_resnet18", 1)
    step = training_step(work, fedavg(work, 10))
    trained = {name for name, tensor in step.tensors.items() if tensor.role == "parameter"}
    updated = [layer.writes[0] for layer in step.phase("update").layers]
    assert sorted(updated) == sorted(trained)
    written = {name for layer in step.layers for name in layer.writes}
    gradients = {name for name, tensor in step.tensors.items() if name.startswith("grad")}
    assert gradients <= written
    read = {name for layer in step.layers for name in layer.reads}
    assert gradients <= read, "a gradient that nothing uses"
    assert any(layer.name.endswith(":accumulate") for layer in step.layers)


def test_momentum_and_weight_decay_cost_operations_and_state():
    plain = training_step(forward(), fedavg(forward(), 10, update_of=lambda name: Update()))
    full = training_step(forward(), fedavg(forward(), 10))
    ops = [sum(layer.vector_ops for layer in step.phase("update").layers) for step in (plain, full)]
    assert ops[1] == 3 * ops[0]
    assert not [t for t in plain.tensors.values() if t.role == "optimizer"]


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(UsageError, match="classes, expected a positive integer, got 0"):
        fedavg(forward(), 0)
    for loss, line in (("cross-entropy", "a head, got none"), ("anchors", "trained prototypes in its state, got none")):
        wrong = Training("wrong", 10, "skipped", (loss,), lambda name: Update())
        with pytest.raises(MethodError, match=f"the loss of wrong, expected {line}"):
            training_step(forward(), wrong)


@pytest.fixture(params=["small_cnn", "fedproto_mnist"])
def bundle(request, mnist_like_bundle):
    """A real bundle: its training graph was traced from torch's own backward pass.

    With one image in a batch no convolution is in bilinear form, which has fewer products (docs/decisions/200).
    """
    return read_bundle(mnist_like_bundle(backbone=request.param, batch=1))


def test_the_derived_step_has_the_products_of_the_real_training_graph_phase_by_phase(bundle):
    batch = bundle.manifest.batch
    features, step = bundle_workloads(bundle, batch=batch)
    derived = training_step(features, bundle_training(bundle.manifest))
    assert not step.unmodelled
    for phase in ("forward", "weight_gradient", "update"):
        assert macs(derived, phase) == macs(step, phase)
    # The real graph scatters each output's taps (ConvTranspose): as many products as forward, but for the first layer.
    # The derived step gathers them at each input position, also where a tap has left the output's plane.
    products = [layer for layer in features.layers if layer.macs]
    assert macs(step, "input_gradient") == macs(step, "forward") - products[0].macs
    gathered = sum(
        layer.macs * layer.conv.height * layer.conv.width // (layer.conv.out_height * layer.conv.out_width)
        if layer.conv
        else layer.macs
        for layer in products[1:]
    )
    head = bundle.manifest.batch * bundle.manifest.classes * bundle.manifest.features
    assert macs(derived, "input_gradient") == gathered + head
    assert step.batch == batch


def test_a_bilinear_convolution_is_counted_as_the_products_it_has(mnist_like_bundle):
    """Its transforms are counted as well, and it still has fewer than the direct form that the derived step has."""
    features, step = bundle_workloads(read_bundle(mnist_like_bundle()), batch=16)
    assert not step.unmodelled
    assert features.macs / 2 < macs(step, "forward") < features.macs


def test_the_real_training_graph_updates_exactly_the_trained_tensors(bundle):
    _, step = bundle_workloads(bundle)
    updated = {n.removesuffix(".next") for layer in step.phase("update").layers for n in layer.writes}
    trained = set(bundle.manifest.names("param"))
    assert trained <= updated
    assert step.parameters == sum(step.tensors[name].elements for name in trained)


def test_a_tails_step_has_the_products_of_its_real_graph_and_the_trunk_is_paid_once(mnist_like_bundle):
    """The same bundle as the device's tests have. Nothing of the trunk is in a step, derived or real."""
    bundle = read_bundle(mnist_like_bundle(norm="batch", trainable_blocks=2, hyper={"epochs": 2}, batch=1))
    subject = bundle_subject(bundle)
    step, derived, batch = subject.step, subject.derived_step(bundle.manifest.batch), bundle.manifest.batch
    trunk, tail = subject.halves_at(batch)
    for phase in ("forward", "weight_gradient", "update"):
        assert macs(derived, phase) == macs(step, phase)
    head = batch * bundle.manifest.classes * bundle.manifest.features
    assert macs(step, "forward") == tail.macs + head
    assert trunk.macs + tail.macs == subject.forward_at(batch).macs
    assert subject.trunk.macs * batch == trunk.macs > 0
    convolution, linear = [layer.macs for layer in tail.layers if layer.macs]
    assert macs(step, "input_gradient") == linear + head  # what the tail's first layer takes asks for none
    assert convolution > 0
    updated = {layer.name.removesuffix(":update") for layer in derived.phase("update").layers}
    assert {name for name in updated if "." in name} >= set(bundle.manifest.names("param"))
    report = profile_report(bundle, [find_device("raspberry-pi-4", load_devices())], Choice(samples=50))
    told = report["devices"][0]["training_step"]
    assert told["trunk_once_s"] == pytest.approx(50 * told["trunk_ms"] / 1e3)
    assert told["round_s"] == pytest.approx(2 * 50 * told["latency_ms"] / 1e3)
    assert any("25.1 kB of it are kept" in line for line in report["assumptions"])


# ---- every method's own step: what its optimizer keeps and does ----


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedproto", {}),
        ("fedhp", {}),
        ("fedpr", {}),
        ("fedhkd", {}),
        ("fedhkd", {"hyper": {"optimizer": "sgd", "momentum": 0.9}}),
        ("spherefed", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.get("hyper", {}).values())),
)
def test_the_derived_step_keeps_and_updates_what_the_methods_own_step_does(method, options, mnist_like_bundle):
    bundle = read_bundle(mnist_like_bundle(method, backbone="fedproto_mnist", **options))
    features, step = bundle_workloads(bundle, batch=bundle.manifest.batch)
    derived = training_step(features, bundle_training(bundle.manifest))

    def held(work):
        return {n: t.shape for n, t in work.tensors.items() if t.role == "optimizer"}

    assert held(derived) == held(step) == {t.name: t.shape for t in bundle.manifest.state if t.role == "optimizer"}
    assert update_operations(derived) == pytest.approx(update_operations(step), rel=0.03)
    assert macs(derived, "forward") == pytest.approx(macs(step, "forward"), rel=1e-3)
    assert macs(derived, "weight_gradient") == pytest.approx(macs(step, "weight_gradient"), rel=1e-3)


@pytest.mark.parametrize("method", ["fedproto", "fedhp", "fedhkd", "spherefed"])
def test_only_the_update_touches_the_optimizers_state(method, mnist_like_bundle):
    """Under Adam the whole step was counted as forward."""
    bundle = read_bundle(mnist_like_bundle(method, backbone="fedproto_mnist"))
    features, step = bundle_workloads(bundle, batch=bundle.manifest.batch)
    kept = {name for name, tensor in step.tensors.items() if tensor.role == "optimizer"}
    touching = [x for x in step.layers if kept & set(x.reads) or {f"{n}.next" for n in kept} & set(x.writes)]
    assert touching
    assert {layer.phase for layer in touching if layer.name not in riding(step)} == {"update"}
    forward, gradients = step.phase("forward"), step.phase("weight_gradient", "input_gradient")
    assert macs(step, "forward") == pytest.approx(features.macs, rel=0.05)
    assert gradients.macs > features.macs
    assert len(forward.layers) < 0.6 * len(step.layers)


def test_a_gradient_that_adam_reads_three_times_is_still_of_one_tensor():
    """A bias: its next value and its two moments are one update, and what leads there is its own gradient."""
    nodes = [
        make_node("Add", ["x", "b"], ["h"]),
        make_node("ReduceMean", ["h"], ["loss"]),
        make_node("Cos", ["h"], ["gy"]),
        make_node("ReduceSum", ["gy"], ["gb"]),
        make_node("Add", ["adam.mean.b", "gb"], ["adam.mean.b.next"]),
        make_node("Mul", ["gb", "gb"], ["gb2"]),
        make_node("Add", ["adam.square.b", "gb2"], ["adam.square.b.next"]),
        make_node("Div", ["adam.mean.b.next", "adam.square.b.next"], ["move"]),
        make_node("Mul", ["move", "lr"], ["step"]),
        make_node("Sub", ["b", "step"], ["b.next"]),
    ]
    outputs = ["loss", "b.next", "adam.mean.b.next", "adam.square.b.next"]
    phases = phase_of_nodes(nodes, outputs, {"x", "h", "loss", "gy", "gb", "gb2"})
    assert phases == ["forward"] * 2 + ["weight_gradient"] * 2 + ["update"] * 6


def test_learned_prototypes_are_trained_and_others_are_not():
    learns = method_training(method("fedhp"), 10, 1024)
    anchors, learned = (training_step(forward(), training) for training in (without_classifier(forward(), 10), learns))
    names = [{layer.name for layer in step.phase("update").layers} for step in (anchors, learned)]
    assert names[1] - names[0] == {"prototypes.learned:update", "adam.steps:update"}
    kept = [n for n, t in learned.tensors.items() if t.role == "optimizer" and n.endswith("prototypes.learned")]
    assert kept == ["adam.mean.prototypes.learned", "adam.square.prototypes.learned"]


def test_a_small_networks_backward_pass_by_hand():
    """Batch norm, ReLU, a product (2, 6) by (6, 4): every operation of the way back, and what it needs."""
    shapes = {"x": (2, 6), "s": (6,), "b": (6,), "n": (2, 6), "r": (2, 6), "w": (6, 4), "z": (2, 4)}
    roles = {"x": "input", "s": "parameter", "b": "parameter", "w": "parameter"}
    tensors = {name: Tensor(name, shape, roles.get(name, "activation")) for name, shape in shapes.items()}
    layers = (
        Layer("bn", "BatchNormalization", "norm", "forward", ("x", "s", "b"), ("n",), vector_ops=24),
        Layer("relu", "Relu", "elementwise", "forward", ("n",), ("r",), vector_ops=12),
        Layer("fc", "MatMul", "linear", "forward", ("r", "w"), ("z",), (Gemm(2, 4, 6),), weights=("w",)),
    )
    work = Workload("w", 2, layers, tensors, ("z",))
    step = training_step(work, without_classifier(work, 3))
    found = {layer.name: layer for layer in step.layers}
    assert found["bn"].vector_ops == 5 * 12, "statistics of the batch are taken"
    assert found["bn:gradient"].vector_ops == 8 * 12
    assert found["relu:gradient"].vector_ops == 2 * 12
    assert set(found["relu:gradient"].reads) == {"grad0:r", "r"}, "its output tells what it let through"
    assert found["fc:input_gradient"].gemms == (Gemm(2, 6, 4),)
    assert found["fc:weight_gradient"].gemms == (Gemm(6, 4, 2),)
    roles = {name: tensor.role for name, tensor in step.tensors.items() if name.startswith("grad")}
    assert {name for name, role in roles.items() if role == "gradient"} == {"grad0:s", "grad0:b", "grad0:w"}


def test_costing_asks_for_shapes_and_never_for_the_values_of_a_methods_state(monkeypatch):
    def found(*given):
        raise AssertionError("anchors for a thousand classes take a minute to find")

    monkeypatch.setattr("protofleet.contract.methods.fedhp.uniform_prototypes", found)
    training = method_training(method("fedhp"), 1000, 64)
    assert {tensor.shape for tensor in training.state} == {(1000, 64)}


def test_a_product_with_a_constant_hands_its_gradient_on_and_has_none_itself():
    """Pooling into windows of unequal size: a product (2, 6) by a constant (6, 3), which is not among what is read."""
    shapes = {"x": (2, 5), "v": (5, 6), "h": (2, 6), "p": (2, 3), "w": (3, 4), "z": (2, 4)}
    roles = {"x": "input", "v": "parameter", "w": "parameter"}
    tensors = {name: Tensor(name, shape, roles.get(name, "activation")) for name, shape in shapes.items()}
    layers = (
        Layer("first", "MatMul", "linear", "forward", ("x", "v"), ("h",), (Gemm(2, 6, 5),), weights=("v",)),
        Layer("pool", "MatMul", "linear", "forward", ("h",), ("p",), (Gemm(2, 3, 6),)),
        Layer("fc", "MatMul", "linear", "forward", ("p", "w"), ("z",), (Gemm(2, 4, 3),), weights=("w",)),
    )
    work = Workload("w", 2, layers, tensors, ("z",))
    step = training_step(work, without_classifier(work, 3))
    found = {layer.name: layer for layer in step.layers}
    assert found["pool:input_gradient"].gemms == (Gemm(2, 6, 3),)
    assert found["pool:input_gradient"].writes == ("grad0:h",)
    assert "pool:weight_gradient" not in found
    assert found["first:weight_gradient"].gemms == (Gemm(5, 6, 2),)


def test_an_input_gradient_of_attention_is_none_of_a_weight() -> None:
    """The gradient of `h` multiplies two things that vary with the data, and feeds the updates of two tensors."""
    nodes = [
        make_node("MatMul", ["x", "w0"], ["a"]),
        make_node("MatMul", ["a", "w1"], ["h"]),
        make_node("MatMul", ["h", "x"], ["y"]),
        make_node("ReduceSum", ["y"], ["loss"]),
        make_node("Expand", ["loss", "shape"], ["gy"]),
        make_node("MatMul", ["gy", "x"], ["gh"]),
        make_node("MatMul", ["a", "gh"], ["gw1"]),
        make_node("MatMul", ["gh", "w1"], ["ga"]),
        make_node("MatMul", ["x", "ga"], ["gw0"]),
    ]
    for name in ("w0", "w1"):
        nodes.append(make_node("Mul", [f"g{name}", "lr"], [f"s{name}"]))
        nodes.append(make_node("Sub", [name, f"s{name}"], [f"{name}.next"]))
    data = {"x", "a", "h", "y", "loss", "gy", "gh", "gw1", "ga", "gw0"}
    phases = phase_of_nodes(nodes, ["loss", "w0.next", "w1.next"], data)
    of = {node.output[0]: phase for node, phase in zip(nodes, phases, strict=True)}
    assert of["gh"] == of["ga"] == "input_gradient"
    assert of["gw0"] == of["gw1"] == "weight_gradient"


def test_a_gradient_on_its_way_to_the_one_tensor_that_is_left_is_none_of_a_weight() -> None:
    """Two products of data, a mask and a view lie before the first weight's own; a head comes after them."""
    nodes = [
        make_node("MatMul", ["x", "w0"], ["a"]),
        make_node("Relu", ["a"], ["r"]),
        make_node("MatMul", ["r", "x"], ["h"]),
        make_node("MatMul", ["h", "w1"], ["y"]),
        make_node("ReduceSum", ["y"], ["loss"]),
        make_node("Expand", ["loss", "shape"], ["gy"]),
        make_node("MatMul", ["h", "gy"], ["gw1"]),
        make_node("MatMul", ["gy", "w1"], ["gh"]),
        make_node("MatMul", ["gh", "x"], ["gr"]),
        make_node("Reshape", ["gr", "rows"], ["gr2"]),
        make_node("Where", ["r", "gr2", "zero"], ["ga"]),
        make_node("Transpose", ["ga"], ["ga_t"]),
        make_node("Pad", ["x", "pads"], ["x_p"]),
        make_node("MatMul", ["ga_t", "x_p"], ["gw_t"]),
        make_node("Transpose", ["gw_t"], ["gw0"]),
    ]
    for name in ("w0", "w1"):
        nodes.append(make_node("Mul", [f"g{name}", "lr"], [f"s{name}"]))
        nodes.append(make_node("Sub", [name, f"s{name}"], [f"{name}.next"]))
    data = {name for node in nodes for name in node.output} | {"x"}
    phases = phase_of_nodes(nodes, ["loss", "w0.next", "w1.next"], data)
    of = {node.output[0]: phase for node, phase in zip(nodes, phases, strict=True)}
    assert {of[name] for name in ("gh", "gr", "gr2", "ga")} == {"input_gradient"}
    assert {of[name] for name in ("ga_t", "x_p", "gw_t", "gw0", "gw1")} == {"weight_gradient"}

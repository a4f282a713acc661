"""What a runtime does with weights before it runs: held against the graphs that ONNX Runtime itself optimises."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.bundle.onnx_runtime import ort
from protofleet.hw_profiles.latency.operator_classes import demand
from protofleet.hw_profiles.workload.baselines import without_classifier
from protofleet.hw_profiles.workload.constant_folding import fold_weights
from protofleet.hw_profiles.workload.from_onnx import bundle_workloads, read_workload
from protofleet.hw_profiles.workload.training_step import training_step

EXTENDED = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED


def optimised(raw: bytes, folder: Path, weights: Mapping[str, np.ndarray] | None = None) -> list[onnx.NodeProto]:
    """The nodes that ONNX Runtime is left with, its own layouts aside."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = EXTENDED
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    values = [ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(v)) for v in (weights or {}).values()]
    if values:
        options.add_external_initializers(list(weights or {}), values)
    ort.InferenceSession(raw, options, providers=["CPUExecutionProvider"])
    return list(onnx.load(str(folder / "optimised.onnx"), load_external_data=False).graph.node)


def transposed_data(nodes: list[onnx.NodeProto]) -> set[str]:
    """What is transposed at run time, by the tensors read; one that ONNX Runtime moved keeps its name up to a token."""
    return {n.name.split("_token")[0] for n in nodes if n.op_type == "Transpose"}


@pytest.mark.parametrize("backbone", ["small_cnn", "fedproto_mnist", "fedhp_mnist_512"])
def test_inference_costs_no_transpose_that_the_runtime_does_not_run(backbone, mnist_like_bundle, tmp_path):
    bundle = read_bundle(mnist_like_bundle(backbone=backbone))
    weights = {n: v for n, v in bundle.params.items() if n.startswith("backbone.")}
    real = optimised(bundle.features, tmp_path, weights)
    forward, _ = bundle_workloads(bundle)
    costed = [layer for layer in fold_weights(forward).layers if layer.op == "Transpose"]
    assert len(costed) == sum(node.op_type == "Transpose" for node in real)
    assert {layer.node for layer in costed} == transposed_data(real)
    assert len([layer for layer in forward.layers if layer.op == "Transpose"]) > len(costed), "nothing to fold"


def test_a_training_step_costs_the_transposes_that_the_runtime_keeps(mnist_like_bundle, tmp_path):
    """Weights are inputs there: nothing is folded, but transposes beside products are read in the other order."""
    bundle = read_bundle(mnist_like_bundle())
    real = optimised(bundle.train_step, tmp_path)
    _, step = bundle_workloads(bundle)
    costed = {layer.node for layer in step.layers if layer.op == "Transpose" and layer.kind == "move"}
    views = {layer.node for layer in step.layers if layer.op == "Transpose" and layer.kind == "view"}
    run = {node.name for node in real if node.op_type == "Transpose"}
    assert not views & run, "costed as free, and run"
    kept = {name for name in run if "_token" not in name}
    assert kept <= costed
    moved = len(run) - len(kept)  # what the runtime pushed through element-wise work may have become two
    assert len(costed) - len(kept) <= moved <= 2 * (len(costed) - len(kept))
    assert len(views) >= 8


def graph(nodes, weights, out_shape):
    return helper.make_model(
        helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 8])],
            [helper.make_tensor_value_info("z", TensorProto.FLOAT, out_shape)],
            [numpy_helper.from_array(value, name) for name, value in weights.items()],
        ),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=9,
    )


def normalised_weights():
    """z = x (w / |w|)ᵀ: all but the product depends on the weights alone."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Mul", ["w", "w"], ["squares"], "squares"),
        helper.make_node("ReduceSum", ["squares", "axes"], ["sums"], "sums", keepdims=1),
        helper.make_node("Sqrt", ["sums"], ["norm"], "norm"),
        helper.make_node("Div", ["w", "norm"], ["unit"], "unit"),
        helper.make_node("Transpose", ["unit"], ["turned"], "turned"),
        helper.make_node("MatMul", ["x", "turned"], ["z"], "z"),
    ]
    weights = {"w": rng.normal(size=(6, 8)).astype(np.float32), "axes": np.array([1])}
    return graph(nodes, weights, [4, 6])


def test_what_depends_on_weights_only_is_computed_once_in_inference_and_at_every_step_in_training(tmp_path):
    model = normalised_weights()
    assert [node.op_type for node in optimised(model.SerializeToString(), tmp_path)] == ["MatMul"]
    whole = read_workload(model)
    folded = fold_weights(whole)
    assert [layer.op for layer in folded.layers] == ["MatMul"]
    assert folded.layers[0].weights == ("turned",)
    assert folded.macs == whole.macs
    assert folded.parameters == whole.parameters == 48, "the folded result stands for what it was made of"
    step = training_step(whole, without_classifier(whole, 3))
    assert {"squares", "norm", "unit"} <= {layer.name for layer in step.layers if layer.phase == "forward"}
    assert "w:update" in {layer.name for layer in step.layers}


def test_a_weight_that_is_also_read_directly_stays_beside_what_was_made_of_it():
    model = normalised_weights()
    model.graph.node.append(helper.make_node("MatMul", ["x", "w2"], ["other"], "other"))
    model.graph.node.append(helper.make_node("Mul", ["w2", "w2"], ["w2_squared"], "w2_squared"))
    model.graph.node.append(helper.make_node("MatMul", ["x", "w2_squared"], ["third"], "third"))
    model.graph.initializer.append(numpy_helper.from_array(np.ones((8, 6), np.float32), "w2"))
    folded = fold_weights(read_workload(model))
    assert [layer.name for layer in folded.layers] == ["z", "other", "third"]
    assert folded.parameters == 3 * 48


@pytest.mark.parametrize(
    ("permutation", "taker", "free"),
    [([1, 0], "MatMul", True), (None, "MatMul", True), ([1, 0], "Relu", False), ([0, 1], "MatMul", False)],
)
def test_only_a_swap_that_a_product_takes_in_is_free(permutation, taker, free):
    turn = helper.make_node("Transpose", ["x"], ["t"], "t", **({"perm": permutation} if permutation else {}))
    shape = [8, 4] if permutation != [0, 1] else [4, 8]
    take = ["t", "w"] if taker == "MatMul" else ["t"]
    weights = {"w": np.ones((shape[1], 3), np.float32)} if taker == "MatMul" else {}
    out = [shape[0], 3] if taker == "MatMul" else shape
    work = read_workload(graph([turn, helper.make_node(taker, take, ["z"], "z")], weights, out))
    assert (work.layers[0].kind == "view") is free


def test_a_transpose_that_leaves_the_graph_or_has_another_reader_is_run():
    turn = helper.make_node("Transpose", ["x"], ["t"], "t", perm=[1, 0])
    product = helper.make_node("MatMul", ["x", "t"], ["z"], "z")
    model = graph([turn, product, helper.make_node("Relu", ["t"], ["r"], "r")], {}, [4, 4])
    assert read_workload(model).layers[0].kind == "move"
    model = graph([turn, product], {}, [4, 4])
    model.graph.output.append(helper.make_tensor_value_info("t", TensorProto.FLOAT, [8, 4]))
    assert read_workload(model).layers[0].kind == "move"


def test_a_transpose_of_a_transpose_is_what_was_there_before():
    there = helper.make_node("Transpose", ["x"], ["t"], "t", perm=[1, 0])
    back = helper.make_node("Transpose", ["t"], ["b"], "b", perm=[1, 0])
    work = read_workload(graph([there, back, helper.make_node("Relu", ["b"], ["z"], "z")], {}, [4, 8]))
    assert [layer.kind for layer in work.layers] == ["view", "view", "elementwise"]


def test_a_linear_layer_asks_for_its_product_and_nothing_else(mnist_like_bundle):
    """The transpose of small_cnn's linear layer was 52 % of its time on the array."""
    forward, _ = bundle_workloads(read_bundle(mnist_like_bundle()))
    elements = forward.tensors["backbone.9.weight"].elements
    assert demand(fold_weights(forward))[12] < 4 * elements
    assert not [x for x in fold_weights(forward).layers if x.kind == "move" and "backbone.9.weight" in x.reads]

"""Workloads read from ONNX graphs: products counted by hand, phases of a real training step, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from protofleet.contract.bundle.onnx_runtime import ort
from protofleet.contract.errors import BundleError, UsageError
from protofleet.hw_profiles.workload.from_onnx import read_workload
from protofleet.hw_profiles.workload.model import KINDS
from protofleet.hw_profiles.workload.paper_networks import NETWORKS, build_network


def _model(nodes, inputs, outputs, weights=()):
    """A model of these nodes; shapes may hold names for symbolic dimensions."""
    values = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in side] for side in (inputs, outputs)]
    tensors = [helper.make_tensor(n, TensorProto.FLOAT, s, np.zeros(s, np.float32).ravel()) for n, s in weights]
    graph = helper.make_graph(nodes, "test", *values, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])


def _conv(x, w, **attributes):
    node = helper.make_node("Conv", ["x", "w"], ["z"], "conv", **attributes)
    return read_workload(_model([node], [("x", x)], [("z", None)], [("w", w)]))


def _naive_conv_macs(x, w, stride, pad, dilation, groups):
    """Every multiply-accumulate of a padded convolution, counted one output at a time (padding multiplies too)."""
    batch, _, height, width = x
    c_out, c_per_group, kh, kw = w
    rows = [r for r in range(0, height + 2 * pad, stride) if r + dilation * (kh - 1) < height + 2 * pad]
    cols = [c for c in range(0, width + 2 * pad, stride) if c + dilation * (kw - 1) < width + 2 * pad]
    return sum(c_per_group * kh * kw for _ in range(batch * c_out) for _ in rows for _ in cols)


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3),
    side=st.integers(5, 9),
    c_in=st.sampled_from([2, 4]),
    per=st.integers(1, 3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    pad=st.integers(0, 2),
    dilation=st.integers(1, 2),
    grouping=st.sampled_from(["dense", "depthwise", "half"]),
)
def test_a_convolutions_products_are_its_multiply_accumulates(
    batch, side, c_in, per, kernel, stride, pad, dilation, grouping
):
    groups = {"dense": 1, "depthwise": c_in, "half": c_in // 2}[grouping]
    x, w = (batch, c_in, side, side), (groups * per, c_in // groups, kernel, kernel)
    work = _conv(x, w, strides=[stride] * 2, pads=[pad] * 4, dilations=[dilation] * 2, group=groups)
    (layer,) = work.layers
    assert layer.macs == _naive_conv_macs(x, w, stride, pad, dilation, groups)
    assert layer.gemms[0].count == groups
    assert layer.weights == ("w",)


def test_matrix_products_of_every_rank_have_the_size_of_their_result():
    cases = {((4, 5), (5, 6)): 120, ((2, 4, 5), (5, 6)): 240, ((2, 4, 5), (2, 5, 6)): 240, ((5,), (5, 6)): 30}
    for (a, b), macs in cases.items():
        node = helper.make_node("MatMul", ["a", "b"], ["z"])
        assert read_workload(_model([node], [("a", a), ("b", b)], [("z", None)])).macs == macs


def test_an_einsum_is_a_product_over_the_letters_it_sums():
    node = helper.make_node("Einsum", ["a", "b"], ["z"], equation="bik,bkj->bij")
    (layer,) = read_workload(_model([node], [("a", (2, 3, 4)), ("b", (2, 4, 5))], [("z", None)])).layers
    assert (layer.gemms[0].m, layer.gemms[0].n, layer.gemms[0].k, layer.gemms[0].count) == (3, 5, 4, 2)


def test_the_symbolic_batch_is_set_and_everything_scales_with_it():
    model = build_network("spherefed_convnet")
    one, eight = read_workload(model, batch=1), read_workload(model, batch=8)
    assert eight.macs == 8 * one.macs
    assert eight.parameters == one.parameters
    assert eight.tensors["z"].shape == (8, 1024)


def test_an_unknown_operator_is_named_and_kept_with_its_bytes():
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Det", ["a"], ["z"])]
    work = read_workload(_model(nodes, [("x", (3, 4, 4))], [("z", None)]))
    assert work.unmodelled == {"Det": 1}
    assert work.layers[-1].reads == ("a",)
    foreign = helper.make_node("Wonder", ["x"], ["z"], domain="com.example")
    assert read_workload(_model([foreign], [("x", (3, 4))], [("z", (3, 4))])).unmodelled == {"Wonder": 1}


def test_a_graph_that_stays_dynamic_is_refused_by_the_tensors_name():
    nodes = [helper.make_node("NonZero", ["x"], ["where"]), helper.make_node("Cast", ["where"], ["z"], to=1)]
    with pytest.raises(BundleError, match=r"shape of where \(NonZero\) is not known, expected static shapes"):
        read_workload(_model(nodes, [("x", (3, 4))], [("z", None)]))


@pytest.mark.parametrize("wrong", [b"not a graph", b""])
def test_bytes_that_are_no_graph_are_refused(wrong):
    with pytest.raises(BundleError, match="is not an ONNX graph"):
        read_workload(wrong)


def test_an_absurd_batch_is_refused():
    with pytest.raises(UsageError, match="batch, expected a positive integer, got 0"):
        read_workload(build_network("spherefed_convnet"), batch=0)


WIDTHS = {"spherefed_convnet": 1024, "spherefed_mobilenetv2": 1280, "spherefed_resnet18": 512, "spherefed_vgg13": 512}


@pytest.mark.parametrize("name", sorted(NETWORKS))
@pytest.mark.parametrize("side", [32, 64])
def test_the_papers_backbones_are_valid_graphs_of_the_printed_feature_width(name, side):
    model = build_network(name, side=side)
    work = read_workload(model, batch=2, name=name)
    expected = 4096 if (name, side) == ("spherefed_convnet", 64) else WIDTHS[name]
    assert work.tensors["z"].shape == (2, expected)
    assert not work.unmodelled
    assert {layer.kind for layer in work.layers} <= set(KINDS)


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_the_papers_backbones_run(name):
    model, rng = build_network(name), np.random.default_rng(0)
    options = ort.SessionOptions()
    weights = {t.name: rng.normal(size=t.dims).astype(np.float32) * 0.05 for t in model.graph.initializer}
    values = [ort.OrtValue.ortvalue_from_numpy(value) for value in weights.values()]
    options.add_external_initializers(list(weights), values)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (z,) = session.run(["z"], {"x": rng.normal(size=(2, 3, 32, 32)).astype(np.float32)})
    assert z.shape == (2, WIDTHS[name])
    assert np.isfinite(z).all()


def test_resnet18_has_the_products_that_its_table_implies():
    """Table 15 at 32x32, summed by hand: stem, then per block pairs of 3x3 at each stage, and three 1x1 shortcuts."""
    stem = 32 * 32 * 64 * 27
    stage1 = 4 * 32 * 32 * 64 * 64 * 9
    stages = 0
    for side, c_in, c_out in ((16, 64, 128), (8, 128, 256), (4, 256, 512)):
        stages += side * side * c_out * (9 * c_in + 3 * 9 * c_out + c_in)
    work = read_workload(build_network("spherefed_resnet18"), batch=1)
    assert work.macs == stem + stage1 + stages


def test_an_unknown_backbone_names_its_neighbours():
    with pytest.raises(UsageError, match="spherefed_resnet18"):
        build_network("spherefed_resnet19")

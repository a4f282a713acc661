"""Convolutions in bilinear form: layer by layer against float64, what they multiply, and when kernels are made."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from export_samples import session
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from protofleet.export.graphs.bilinear import Bilinear
from protofleet.export.graphs.graph_builder import Graph
from protofleet.export.graphs.windows import Window
from protofleet.export.operators.conv import _Conv
from protofleet.export.operators.trace import record, to_onnx

# Of the largest number of the exact result: ten times what a product in float32 is off by, a thousandth of what a
# wrong coefficient is.
CLOSE = 1e-5


def _graph(form: Bilinear) -> Graph:
    """All three of a layer's results, in the order that activations have there."""
    graph, kernel = Graph("layer"), (form.outputs, form.inputs, 3, 3)
    x, g = (_ordered(form, (form.batch, channels, *form.plane)) for channels in (form.inputs, form.outputs))
    for name, shape in (("x", x), ("w", kernel), ("g", g)):
        graph.input(name, torch.float32, shape)
    graph.output(form.forward(graph, "x", "w"), "y", torch.float32, g)
    graph.output(form.input_gradient(graph, "g", "w"), "dx", torch.float32, x)
    graph.output(form.weight_gradient(graph, "g", "x"), "dw", torch.float32, kernel)
    return graph


def _ordered(form: Bilinear, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[1], shape[0], *shape[2:]) if form.is_channel_major else shape


def _layer(form: Bilinear, seed: int) -> dict[str, NDArray[np.float32]]:
    """x, w and g as torch has them, w small enough that y is around 1."""
    draw = np.random.default_rng(seed)
    return {
        "x": draw.standard_normal((form.batch, form.inputs, *form.plane)).astype(np.float32),
        "w": (draw.standard_normal((form.outputs, form.inputs, 3, 3)) / np.sqrt(9 * form.inputs)).astype(np.float32),
        "g": draw.standard_normal((form.batch, form.outputs, *form.plane)).astype(np.float32),
    }


def _exact(layer: dict[str, NDArray[np.float32]]) -> list[NDArray[np.float64]]:
    x, w = (torch.from_numpy(layer[name]).double().requires_grad_() for name in "xw")
    y = F.conv2d(x, w, padding=1)
    y.backward(torch.from_numpy(layer["g"]).double())
    assert x.grad is not None
    assert w.grad is not None
    return [t.detach().numpy() for t in (y, x.grad, w.grad)]


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 6), st.integers(1, 6), st.integers(1, 13), st.integers(1, 13), st.integers(0, 99)
)
@example(8, 256, 256, 4, 4, 0)
@example(4, 64, 64, 16, 16, 0)
@example(8, 300, 200, 2, 2, 0)
def test_a_layer_and_its_gradients_are_exact_to_1e_5(b: int, i: int, o: int, height: int, width: int, seed: int):
    form = Bilinear(b, i, o, (height, width))
    layer = _layer(form, seed)
    swap = (1, 0, 2, 3) if form.is_channel_major else (0, 1, 2, 3)
    feed = {n: v if n == "w" else np.ascontiguousarray(v.transpose(swap)) for n, v in layer.items()}
    y, dx, dw = session(_graph(form).to_bytes()).run(["y", "dx", "dw"], feed)
    for got, want in zip((y.transpose(swap), dx.transpose(swap), dw), _exact(layer), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=CLOSE * max(1.0, float(np.abs(want).max())))


@pytest.mark.parametrize(("plane", "less"), [((16, 16), 4.0), ((4, 4), 4.0), ((2, 2), 4.0), ((14, 14), 3.0)])
def test_it_multiplies_that_many_times_less(plane: tuple[int, int], less: float):
    """Direct convolution: 9·B·O·I·H·W, forward and in each gradient, and here only products over channels."""
    form = Bilinear(2, 48, 48, plane)
    direct = 9 * 2 * 48 * 48 * plane[0] * plane[1]
    products = _products(onnx.shape_inference.infer_shapes(onnx.load_from_string(_graph(form).to_bytes())))
    assert len(products) == 3
    assert sum(products) <= 3 * direct / less


def _products(model: onnx.ModelProto) -> list[int]:
    """The multiplications of every MatMul."""
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.value_info}
    matmuls = [node for node in model.graph.node if node.op_type == "MatMul"]
    return [int(np.prod(shapes[n.output[0]])) * shapes[n.input[0]][-1] for n in matmuls]


def _step(x: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    """Two layers, and their weights' gradients with decay added."""
    leaves = [w.detach().requires_grad_() for w in (first, second)]
    y = F.conv2d(torch.relu(F.conv2d(x, leaves[0], padding=1)), leaves[1], padding=1)
    grads = torch.autograd.grad((y * y).sum(), leaves)
    return tuple(g + 0.25 * w for g, w in zip(grads, leaves, strict=True))


def _step_model(channels: int) -> tuple[onnx.ModelProto, list[Tensor]]:
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(channels, channels, 3, 3, generator=draw) / (3 * channels**0.5) for _ in range(2)]
    inputs = [torch.randn(6, channels, 8, 8, generator=draw), *weights]
    graph = Graph("step")
    names = [graph.input(name, t.dtype, t.shape) for name, t in zip("xvw", inputs, strict=True)]
    return onnx.load_from_string(to_onnx(record(_step, inputs), graph, names, ["dv", "dw"])), inputs


def test_it_is_taken_where_it_pays_and_nowhere_else():
    """A layer of many channels is five Gemm and one product forward; one of few is a Conv."""
    wide, narrow = ([n.op_type for n in _step_model(c)[0].graph.node] for c in (32, 4))
    assert "Conv" not in wide
    assert wide.count("MatMul") == 5  # forward twice, a weight gradient twice, one input gradient
    assert "Conv" in narrow


@pytest.mark.parametrize(
    ("form", "pays"),
    [
        (Bilinear(16, 64, 64, (16, 16)), True),
        (Bilinear(32, 512, 512, (2, 2)), True),
        (Bilinear(8, 512, 512, (2, 2)), False),  # few places: its kernel's values cost more than they save
        (Bilinear(32, 1, 32, (28, 28)), False),  # few channels: so do those of its activations
        (Bilinear(99, 64, 64, (1, 1)), False),
    ],
)
def test_whether_it_pays_is_a_matter_of_shape(form: Bilinear, pays: bool):
    assert form.pays is pays


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "places", "groups", "has_form"),
    [
        (3, 1, 1, 1, 16, 1, True),
        (3, 1, 1, 1, 16, 2, False),
        (3, 1, 0, 1, 14, 1, False),
        (3, 2, 1, 1, 8, 1, False),
        (3, 1, 2, 2, 16, 1, False),
        (5, 1, 2, 1, 16, 1, False),
    ],
)
def test_no_other_window_has_the_form(kernel, stride, padding, dilation, places, groups, has_form):
    pairs = ((n, n) for n in (kernel, stride, padding, dilation, 16, places))
    assert (_Conv(16, 64, 64, groups, Window(*pairs)).bilinear is not None) is has_form


@pytest.mark.parametrize("form", [Bilinear(3, 32, 32, (12, 12)), Bilinear(18, 32, 32, (4, 4))])
def test_a_bias_is_added(form: Bilinear):
    assert form.pays
    layer = _layer(form, 0)
    x, w, b = (torch.from_numpy(layer[name]) for name in "xwg")
    b = b[0, :, 0, 0]
    graph, inputs = Graph("layer"), [x, w, b]
    names = [graph.input(name, t.dtype, t.shape) for name, t in zip("xwb", inputs, strict=True)]
    model = to_onnx(record(lambda x, w, b: (F.conv2d(x, w, b, padding=1),), inputs), graph, names, ["y"])
    (y,) = session(model).run(None, {"x": x.numpy(), "w": w.numpy(), "b": b.numpy()})
    exact = F.conv2d(x.double(), w.double(), b.double(), padding=1).numpy()
    np.testing.assert_allclose(y, exact, rtol=0, atol=CLOSE * float(np.abs(exact).max()))


def test_a_weights_decay_rides_on_its_gradients_product():
    """Neither scaled nor added by nodes of its own, and the sum is right."""
    model, inputs = _step_model(32)
    betas = [a.f for n in model.graph.node if n.op_type == "Gemm" for a in n.attribute if a.name == "beta"]
    assert sorted(filter(None, betas)) == [0.25, 0.25]
    assert not any(t.dims == [] and onnx.numpy_helper.to_array(t) == 0.25 for t in model.graph.initializer)
    feed = {name: t.numpy() for name, t in zip("xvw", inputs, strict=True)}
    exact = [t.detach().numpy() for t in _step(*(t.double() for t in inputs))]
    for got, want in zip(session(model.SerializeToString()).run(None, feed), exact, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=3 * CLOSE * float(np.abs(want).max()))


def test_a_kernels_values_wait_for_the_activation():
    """Weights are there from the start: with nothing to wait for, all layers' values would be made at once and kept."""
    nodes = _step_model(32)[0].graph.node
    made_by = {name: node for node in nodes for name in node.output}
    transforms = [n for n in nodes if n.op_type == "Gemm" and any(a.name == "beta" and a.f == 0 for a in n.attribute)]
    assert len(transforms) == 3
    for node in transforms:
        sources, seen = [node.input[2]], set()
        while sources:
            name = sources.pop()
            seen.add(name)
            sources += made_by[name].input if name in made_by else []
        assert "x" in seen


@pytest.mark.parametrize(("plane", "transforms"), [((16, 16), 13), ((4, 4), 8)])
def test_the_backward_pass_makes_the_values_of_x_anew(plane: tuple[int, int], transforms: int):
    """Were they the forward pass's, they would be kept until then, and be most of the step's memory. Those of ∂y are
    shared by both gradients."""
    nodes = onnx.load_from_string(_graph(Bilinear(2, 48, 48, plane)).to_bytes()).graph.node
    assert [n.op_type for n in nodes].count("Gemm") == transforms
    made_by = {name: node for node in nodes for name in node.output}

    def sources(node: onnx.NodeProto) -> set[str]:
        near = [made_by[name] for name in node.input if name in made_by]
        own = set() if node.op_type == "Reshape" else {*node.output}  # one of x itself costs nothing
        return own.union(*map(sources, near))

    forward, _, weights = (sources(made_by[name]) for name in ("y", "dx", "dw"))
    assert not forward & weights

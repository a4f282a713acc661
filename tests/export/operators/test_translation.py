"""Each translation on its own: a torch function and its gradients, recorded, translated, and run in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from export_samples import session
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from protofleet.contract.bundle.onnx_runtime import ort
from protofleet.contract.errors import ExportError
from protofleet.export.graphs.graph_builder import Graph
from protofleet.export.graphs.windows import Window, fold, tap_matrix, taps
from protofleet.export.operators.trace import record, to_onnx

# The sums here have up to 500 terms. In whatever order a processor adds them, each is rounded at most as many times,
# by half an epsilon; a wrong translation is off by far more, since all numbers are around 1.
ROUNDING = 500 * float(np.finfo(np.float32).eps) / 2


def _run(function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> list[np.ndarray]:
    """`function` through ONNX Runtime."""
    trace = record(function, inputs)
    outputs = [f"out{i}" for i in range(len(function(*inputs)))]
    graph = Graph("test")
    names = [graph.input(f"in{i}", t.dtype, t.shape) for i, t in enumerate(inputs)]
    feed = {n: t.numpy() for n, t in zip(names, inputs, strict=True)}
    running = session(to_onnx(trace, graph, names, outputs))
    known = {i.name for i in running.get_inputs()}
    return running.run(outputs, {n: v for n, v in feed.items() if n in known})


def _with_gradients(function: Callable[..., Tensor], count: int) -> Callable[..., tuple[Tensor, ...]]:
    """y and the gradients of Σ y·(a fixed pattern) with respect to the first `count` inputs."""

    def both(*inputs: Tensor) -> tuple[Tensor, ...]:
        def scalar(*leaves: Tensor) -> tuple[Tensor, Tensor]:
            y = function(*leaves, *inputs[count:])
            pattern = torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view(y.shape)
            return (y * pattern).sum(), y

        grads, (_, y) = torch.func.grad_and_value(scalar, argnums=tuple(range(count)), has_aux=True)(*inputs[:count])
        return (y, *grads)

    return both


def _check(function: Callable[..., Tensor], inputs: Sequence[Tensor], count: int | None = None) -> None:
    both = _with_gradients(function, len(inputs) if count is None else count)
    wanted = [t.numpy() for t in both(*(t.double() if t.is_floating_point() else t for t in inputs))]
    for got, want in zip(_run(both, inputs), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=ROUNDING, atol=ROUNDING * max(1.0, float(np.abs(want).max())))


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


CONVOLUTIONS = {
    "3x3": (3, 8, 3, 1, 1, 1, 1, (9, 9)),
    "3x3 no padding": (4, 6, 3, 1, 0, 1, 1, (8, 8)),
    "3x3 much padding": (4, 6, 3, 1, 4, 1, 1, (8, 8)),
    "5x5": (2, 5, 5, 1, 2, 1, 1, (12, 10)),
    "7x7 stride 2": (3, 8, 7, 2, 3, 1, 1, (19, 17)),
    "3x3 stride 2": (4, 8, 3, 2, 1, 1, 1, (12, 12)),
    "3x3 stride 2 odd": (4, 8, 3, 2, 1, 1, 1, (13, 11)),
    "3x3 stride 3, rest left over": (4, 8, 3, 3, 0, 1, 1, (17, 16)),
    "3x3 dilated": (4, 6, 3, 1, 2, 2, 1, (12, 12)),
    "3x3 few places": (16, 8, 3, 1, 1, 1, 1, (2, 2)),
    "3x3 few places stride 2": (8, 8, 3, 2, 1, 1, 1, (7, 8)),
    "3x3 few places, big plane": (4, 8, 3, 16, 1, 1, 1, (40, 40)),
    "1x1": (6, 10, 1, 1, 0, 1, 1, (7, 7)),
    "1x1 stride 2": (6, 10, 1, 2, 0, 1, 1, (7, 8)),
    "1x1 padded": (6, 10, 1, 1, 1, 1, 1, (7, 8)),
    "depthwise small": (8, 8, 3, 1, 1, 1, 8, (4, 4)),
    "depthwise small stride 2": (8, 8, 3, 2, 1, 1, 8, (7, 7)),
    "depthwise wide": (4, 4, 3, 1, 1, 1, 4, (12, 20)),
    "depthwise wide stride 2": (4, 4, 5, 2, 2, 1, 4, (17, 18)),
    "depthwise wide dilated": (4, 4, 3, 1, 2, 2, 4, (12, 12)),
    "grouped": (8, 12, 3, 1, 1, 1, 4, (9, 9)),
    "grouped stride 2": (8, 12, 3, 2, 1, 1, 4, (9, 10)),
    "depth multiplier": (4, 8, 3, 1, 1, 1, 4, (9, 9)),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution_and_its_gradients(name: str, bias: bool):
    inputs, outputs, kernel, stride, padding, dilation, groups, plane = CONVOLUTIONS[name]
    x, w = _normal(3, inputs, *plane), _normal(outputs, inputs // groups, kernel, kernel, seed=1)
    args = [x, w, _normal(outputs, seed=2)] if bias else [x, w]
    _check(
        lambda x, w, b=None: torch.tanh(F.conv2d(x, w, b, stride, padding, dilation, groups)),
        args,
    )


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_convolution(data: st.DataObject):
    groups = data.draw(st.sampled_from([1, 1, 2, 4]))
    inputs = groups * data.draw(st.integers(1, 3))
    outputs = groups * data.draw(st.integers(1, 3))
    pair = lambda low, high: (data.draw(st.integers(low, high)), data.draw(st.integers(low, high)))  # noqa: E731
    kernel, stride, padding, dilation = pair(1, 4), pair(1, 3), pair(0, 3), pair(1, 2)
    plane = tuple(
        data.draw(st.integers(max(1, (k - 1) * d + 1 - 2 * p), 14))
        for k, d, p in zip(kernel, dilation, padding, strict=True)
    )
    x, w = _normal(2, inputs, *plane), _normal(outputs, inputs // groups, *kernel, seed=1)
    _check(lambda x, w: F.conv2d(x, w, None, stride, padding, dilation, groups), [x, w])


def test_weight_gradient_in_chunks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("protofleet.export.operators.conv._CHUNK_ELEMENTS", 1)
    _check(lambda x, w: F.conv2d(x, w, None, 2, 1), [_normal(2, 3, 20, 20), _normal(4, 3, 5, 3, seed=1)])


def test_what_a_depthwise_convolution_cuts_is_not_kept_for_its_gradient(tmp_path):
    """Each cut of the input, in what ONNX Runtime makes of the graph, is for one product: a copy of the input that two
    passes read stays for all that is between them."""
    both = _with_gradients(lambda x, w: F.conv2d(x, w, None, 1, 1, 1, 4), 2)
    inputs, graph, options = (_normal(2, 4, 12, 20), _normal(4, 1, 3, 3)), Graph("test"), ort.SessionOptions()
    names = [graph.input(name, t.dtype, t.shape) for name, t in zip("xw", inputs, strict=True)]
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    ort.InferenceSession(to_onnx(record(both, inputs), graph, names, ["y", "gx", "gw"]), options)
    nodes = onnx.load(tmp_path / "optimized.onnx").graph.node
    origin = {node.output[0]: node.input[0] for node in nodes if node.op_type in ("Reshape", "Transpose")}
    cuts = {node.output[0] for node in nodes if node.op_type in ("Pad", "Slice")}
    read = [name if name in cuts else origin.get(name) for n in nodes if "MatMul" in n.op_type for name in n.input]
    found = [name for name in read if name in cuts]
    assert len(found) == 4, (
        "two of three phases, forward and for the kernel's gradient; the third is the input as it is"
    )
    assert len(found) == len(set(found))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "ceil", "plane"),
    [
        (2, 2, 0, 1, False, (8, 8)),
        (2, 2, 0, 1, False, (9, 7)),
        (3, 2, 1, 1, False, (12, 12)),
        (3, 2, 0, 1, True, (12, 11)),
        (3, 2, 0, 1, False, (12, 11)),
        (3, 1, 1, 1, False, (6, 6)),
        (2, 3, 0, 2, False, (11, 11)),
    ],
)
def test_max_pool_gives_ties_to_the_first(kernel, stride, padding, dilation, ceil, plane, ties):
    x = _normal(2, 3, *plane)
    x = torch.round(x) if ties else x  # few different values: nearly every window has ties
    _check(lambda x: F.max_pool2d(x, kernel, stride, padding, dilation, ceil), [x])


@pytest.mark.parametrize("plane", [(8, 8), (20, 22)])
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize(("kernel", "stride", "padding", "ceil"), [(2, 2, 0, False), (3, 2, 1, False), (3, 2, 1, True)])
def test_average_pool(kernel, stride, padding, ceil, include, plane):
    _check(lambda x: F.avg_pool2d(x, kernel, stride, padding, ceil, include), [_normal(2, 3, *plane)])


@pytest.mark.parametrize("size", [1, (2, 3), 5])
def test_adaptive_average_pool(size):
    _check(lambda x: F.adaptive_avg_pool2d(x, size) ** 2, [_normal(2, 3, 7, 8)])


ACTIVATIONS = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 2.0),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "gelu": F.gelu,
    "elu": F.elu,
    "softplus": F.softplus,
    "clamp": lambda x: x.clamp(-1.0, 1.0),
    "abs": torch.abs,
    "square": lambda x: x**2,
    "cube": lambda x: x**3,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_and_its_gradient(name: str):
    edges = torch.tensor([-6.0, -3.0, -1.0, -0.5, -1e-30, 0.0, 1e-30, 0.5, 1.0, 2.0, 3.0, 5.9999995, 6.0, 7.0])
    edges = edges[(edges != 0) if name in ("abs", "clamp") else slice(None)]
    if name == "clamp":
        edges = edges[edges.abs() != 1]
    _check(ACTIVATIONS[name], [torch.cat([edges, 4 * _normal(50)])])


MISCELLANY = {
    "sum and mean": lambda x: x.sum(1, keepdim=True) * x.mean((2, 3), keepdim=True),
    "softmax": lambda x: F.softmax(x, 1) * F.log_softmax(x, 3),
    "normalize": lambda x: F.normalize(x.flatten(1)),
    "cat and slices": lambda x: torch.cat([x[:, :2, ::2], x[:, 1:, 1::2]], 1) ** 2,
    "chunk": lambda x: torch.cat([x.chunk(2, 1)[1], x.chunk(2, 1)[0] ** 2], 1),
    "permute": lambda x: x.permute(0, 2, 3, 1).reshape(x.shape[0], -1)[:, 3:9] ** 2,
    "pad": lambda x: F.pad(x, (1, 2, 0, 1)) ** 2,
    "select": lambda x: x[:, 1] * x[:, 2],
    "where": lambda x: torch.where(x > 0.3, x * 2, x**2),
    "maximum": lambda x: torch.maximum(x, x * x),
    "exp log sqrt": lambda x: torch.log(torch.exp(x) + 1) * torch.sqrt(x * x + 1) * torch.rsqrt(x * x + 2),
    "matmul": lambda x: x @ x.transpose(2, 3),
    "layer norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "instance norm by groups": lambda x: F.group_norm(x, x.shape[1]),
    "stack and unbind": lambda x: torch.stack(x.unbind(1)[::-1], 1) ** 2,
    "division": lambda x: x / 3.0 + x / 4.0 + 1.0 / (x * x + 1.0),
}


@pytest.mark.parametrize("name", MISCELLANY)
def test_the_rest_and_its_gradient(name: str):
    _check(MISCELLANY[name], [_normal(2, 4, 6, 6)])


@pytest.mark.parametrize("name", MISCELLANY)
def test_the_rest_after_a_channel_major_result(name: str):
    """The same behind a 1×1 convolution, whose result has its axes exchanged."""
    function = MISCELLANY[name]
    _check(lambda x, w: function(F.conv2d(x, w)), [_normal(2, 4, 6, 6), _normal(4, 4, 1, 1, seed=1)])


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("shape", [(3, 4, 5, 5), (3, 4)])
def test_group_norm_and_its_gradients(groups, shape):
    _check(
        lambda x, w, b: F.group_norm(x, groups, w, b, 1e-5) ** 2, [_normal(*shape) + 2, _normal(4, seed=1), _normal(4)]
    )


def test_layer_norm_and_its_gradients():
    _check(lambda x, w, b: F.layer_norm(x, (6,), w, b) ** 2, [_normal(3, 4, 6), _normal(6, seed=1), _normal(6)])


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_fold_is_the_adjoint_of_taps(data: st.DataObject):
    """⟨taps(x), g⟩ = ⟨x, fold(g)⟩ for any window, and the 0/1 matrix cuts the same taps."""
    pair = lambda low, high: (data.draw(st.integers(low, high)), data.draw(st.integers(low, high)))  # noqa: E731
    kernel, stride, padding, dilation, plane = pair(1, 3), pair(1, 3), pair(0, 2), pair(1, 2), pair(1, 8)
    places = tuple(
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(plane, padding, dilation, kernel, stride, strict=True)
    )
    if min(places) < 1:
        return
    window = Window(kernel, stride, padding, dilation, plane, places)
    rng = np.random.default_rng(0)  # small integers: float32 adds them without rounding, in whatever order
    x = rng.integers(-8, 9, (2, 3, *plane)).astype(np.float32)
    g = rng.integers(-8, 9, (len(window.cells), 2, 3, *places)).astype(np.float32)
    graph = Graph("window")
    graph.input("x", torch.float32, x.shape)
    names = [graph.input(f"g{i}", torch.float32, t.shape) for i, t in enumerate(g)]
    cut = taps(graph, "x", window)
    stacked = graph.op("Concat", *(graph.reshape(t, (1, 2, 3, *places)) for t in cut), axis=0)
    graph.output(stacked, "cut", torch.float32, g.shape)
    graph.output(fold(graph, names, window, (2, 3)), "back", torch.float32, x.shape)
    got, back = session(graph.to_bytes()).run(["cut", "back"], {"x": x, **dict(zip(names, g, strict=True))})
    assert float((got * g).sum()) == float((x * back).sum())
    matrix = tap_matrix(window)  # (taps, H·W, OH·OW)
    by_matrix = np.einsum("abp,tpq->tabq", x.reshape(2, 3, -1), matrix).reshape(g.shape)
    np.testing.assert_array_equal(got, by_matrix)


def test_what_is_put_together_from_phases_moves_first_axes_alone() -> None:
    """Of an axis further in, ONNX Runtime would start its threads for each plane."""
    window = Window((3, 3), (2, 2), (1, 1), (1, 1), (8, 6), (4, 3))
    graph = Graph("window")
    names = [graph.input(f"g{i}", torch.float32, (2, 3, 4, 3)) for i in range(9)]
    graph.output(fold(graph, names, window, (2, 3)), "back", torch.float32, (2, 3, 8, 6))
    nodes = onnx.load_from_string(graph.to_bytes()).graph.node
    moved = [list(node.attribute[0].ints) for node in nodes if node.op_type == "Transpose"]
    assert sorted(moved) == [[1, 0], [1, 0, 2]]


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda x: (torch.fft.fft2(x).abs(),), "complex64"),
        (lambda x: (torch.cumsum(x, 1),), "cumsum"),
        (lambda x: (F.conv_transpose2d(x, torch.ones(4, 2, 3, 3)),), "transposed"),
        (lambda x: (F.batch_norm(x, None, None, training=True),), "batch norm"),
    ],
)
def test_what_has_no_translation_is_refused_by_name(function, named):
    with pytest.raises(ExportError, match=named) as error:
        _run(function, [_normal(2, 4, 6, 6)])
    assert "try" in str(error.value)


def test_same_operation_is_emitted_once():
    graph = Graph("once")
    graph.input("x", torch.float32, (2,))
    assert graph.op("Relu", "x") == graph.op("Relu", "x")
    assert len(graph._nodes) == 1
    assert graph.constant(np.zeros(3, np.float32)) == graph.constant(np.zeros(3, np.float32))
    assert graph.constant(np.zeros(3, np.float32)) != graph.constant(np.zeros((3, 1), np.float32))
    assert graph.ints([0, 0]) != graph.constant(np.zeros(4, np.float32))

"""Large activations in runs of channels, and samples as the lanes of ONNX Runtime's blocked convolutions."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from export_samples import Device, device, session

from protofleet.export.bundles.bundle_graphs import export_step
from protofleet.export.graphs.blocked_kernels import block_here, suits
from protofleet.export.graphs.graph_builder import Graph
from protofleet.export.graphs.windows import Window
from protofleet.export.operators import channel_runs
from protofleet.export.operators.trace import record, to_onnx
from protofleet.export.verify.verify import verify_step

ROUNDING = 500 * float(np.finfo(np.float32).eps) / 2  # as in tests/export/operators/test_translation.py


def _verified(dev: Device, lanes: int | None) -> onnx.ModelProto:
    graph = export_step(dev.net, dev.preprocess, dev.plan, dev.batch, dev.input_shape, lanes)
    verify_step(graph, dev.net, dev.preprocess, dev.plan, dev.state, batch=dev.batch, input_shape=dev.input_shape)
    return onnx.load_from_string(graph)


@pytest.mark.parametrize("family", ["short mobilenet_v2", "short mobilenet_v3"])
def test_a_step_in_runs_equals_torch(family: str, monkeypatch: pytest.MonkeyPatch):
    dev = device(family, "fedproto")
    whole = len(onnx.load_from_string(dev.graph).graph.node)
    monkeypatch.setattr(channel_runs, "RUN_ELEMENTS", 4096)
    model = _verified(dev, None)
    assert len(model.graph.node) > whole
    products = [n for n in model.graph.node if n.op_type == "Gemm" and len(n.input) == 3]
    assert products, "runs that meet in a 1×1 convolution are added up within its product"


def test_a_result_that_mixes_channels_is_not_made_in_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channel_runs, "RUN_ELEMENTS", 64)
    x, w = torch.randn(2, 8, 6, 6), torch.randn(16, 8, 1, 1)
    apart = record(lambda x, w: (F.relu(F.conv2d(x, w)),), (x, w))
    assert not channel_runs.plan(apart), "nobody takes the runs of a step's output"
    mixed = record(lambda x, w, v: (F.conv2d(torch.softmax(F.conv2d(x, w), 1), v),), (x, w, torch.randn(4, 16, 1, 1)))
    assert not channel_runs.plan(mixed)
    chain = record(lambda x, w, v: (F.conv2d(F.relu(F.conv2d(x, w)), v),), (x, w, torch.randn(4, 16, 1, 1)))
    assert list(channel_runs.plan(chain).values()) == [8]


BLOCK = block_here()
needs_blocks = pytest.mark.skipif(BLOCK is None, reason="this ONNX Runtime has no blocked operators")


@needs_blocks
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "plane"),
    [(3, 1, 1, 1, (6, 7)), (3, 2, 1, 1, (8, 8)), (3, 2, 1, 1, (7, 9)), (5, 2, 2, 1, (9, 8)), (3, 1, 2, 2, (7, 7))],
)
def test_depthwise_in_lanes_equals_torch(kernel, stride, padding, dilation, plane):
    x = torch.randn(2 * BLOCK, 3, *plane, generator=torch.Generator().manual_seed(0))
    w = torch.randn(3, 1, kernel, kernel, generator=torch.Generator().manual_seed(1))

    def function(x, w):
        y, back = torch.func.vjp(lambda x, w: F.conv2d(x, w, None, stride, padding, dilation, 3), x, w)
        return (y, *back(torch.cos(y)))

    graph = Graph("test", lanes=BLOCK)
    names = [graph.input(name, torch.float32, t.shape) for name, t in (("x", x), ("w", w))]
    model = to_onnx(record(function, (x, w)), graph, names, ["y", "gx", "gw"])
    domains = [n.domain for n in onnx.load_from_string(model).graph.node if n.op_type == "Conv"]
    assert domains == ["com.microsoft.nchwc"] * 3
    got = session(model).run(None, {"x": x.numpy(), "w": w.numpy()})
    for have, want in zip(got, function(x.double(), w.double()), strict=True):
        limit = ROUNDING * max(1.0, float(want.abs().max()))
        np.testing.assert_allclose(have, want.numpy(), rtol=ROUNDING, atol=limit)


def test_a_window_that_leaves_pixels_over_is_not_for_lanes():
    assert suits(Window((3, 3), (2, 2), (1, 1), (1, 1), (8, 8), (4, 4)))
    assert not suits(Window((3, 3), (3, 3), (0, 0), (1, 1), (17, 17), (5, 5)))


@needs_blocks
@pytest.mark.parametrize("family", ["short mobilenet_v2", "short mobilenet_v3"])
def test_a_step_in_lanes_equals_torch(family: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channel_runs, "RUN_ELEMENTS", 4096)
    dev = device(family, "fedproto", 16)
    model = _verified(dev, BLOCK)
    assert any(n.domain == "com.microsoft.nchwc" for n in model.graph.node)

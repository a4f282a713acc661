"""A training step whose depthwise convolutions are ONNX Runtime's own blocked kernels, with samples as the block.

ONNX Runtime computes on blocks of channels, (N, C/b, H, W, b), where it can lay out weights beforehand; b is what its
vector units hold, 16 or 8, and the operators (`com.microsoft.nchwc`) are not in every build. A depthwise convolution
does not care what its "channels" are. Here they are the samples of a batch, b at a time:

    lanes    (1, C, B/b · H·W · b)     the rows of one channel, in which b samples lie side by side
    as seen by the operator            (1, C·B, H, W) in blocks of b: image c·B + s is sample s of channel c

So no channel count has to fit b, only the batch; whatever works on rows (1×1 convolution, normalisation, activations)
works on these as they are, and no convolution needs another layout than its neighbours. Both gradients are depthwise
convolutions, too: of ∂y, spread by the stride, with the kernel turned around; and of x with ∂y as the kernel.

A device takes such a graph only where it gives what the portable one does and takes less time
(edge_client/trials/step_forms.py, docs/decisions/171).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from protofleet.contract.bundle.onnx_runtime import ORT_ERRORS, ort
from protofleet.export.graphs.graph_builder import IR_VERSION, OPSET, Graph
from protofleet.export.graphs.windows import Window

__all__ = [
    "LANES",
    "block_here",
    "by_position",
    "forward",
    "input_gradient",
    "suits",
    "sums_by_sample",
    "to_channel_major",
    "to_rows",
    "uses_lanes",
    "weight_gradient",
]

LANES = (16, 8)  # block sizes of ONNX Runtime's builds
_DOMAIN = "com.microsoft.nchwc"


def block_here() -> int | None:
    """The block size of this ONNX Runtime on this processor, asked of the runtime itself; None where it has none."""
    order = helper.make_node("ReorderInput", ["x"], ["y"], domain=_DOMAIN)
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 64, 1, 2])]
    graph = helper.make_graph([order], "order", inputs, [helper.make_empty_tensor_value_info("y")])
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        (blocked,) = session.run(None, {"x": np.arange(128, dtype=np.float32).reshape(1, 64, 1, 2)})
    except ORT_ERRORS:
        return None
    return int(np.argmax(blocked.ravel() == 1.0))  # the second pixel of the first channel comes after a whole block


def uses_lanes(graph: bytes) -> bool:
    """Whether a model has one of the blocked operators."""
    return any(opset.domain == _DOMAIN for opset in onnx.load_from_string(graph).opset_import)


def to_rows(graph: Graph, name: str, shape: Sequence[int]) -> str:
    """(C, B, H, W) as rows (1, C, B·H·W), of a tensor whose shape is (B, C, H, W)."""
    batch, channels, positions = shape[0], shape[1], int(np.prod(shape[2:]))
    if graph.lanes and positions > 1:
        apart = graph.reshape(name, (channels, batch // graph.lanes, graph.lanes, positions))
        name = graph.transpose(apart, (0, 1, 3, 2))
    return graph.reshape(name, (1, channels, batch * positions))


def to_channel_major(graph: Graph, name: str, shape: Sequence[int]) -> str:
    """The inverse of `to_rows`."""
    batch, channels, positions = shape[0], shape[1], int(np.prod(shape[2:]))
    if graph.lanes and positions > 1:
        apart = graph.reshape(name, (channels, batch // graph.lanes, positions, graph.lanes))
        name = graph.transpose(apart, (0, 1, 3, 2))
    return graph.reshape(name, (channels, batch, *shape[2:]))


def sums_by_sample(graph: Graph, rows: str, channels: int, batch: int, positions: int) -> str:
    """Rows (1, C, B·P) summed over each sample's positions: (C, B)."""
    if not graph.lanes:
        return graph.op("ReduceSum", graph.reshape(rows, (channels, batch, positions)), graph.ints([2]), keepdims=0)
    apart = graph.reshape(rows, (channels * batch // graph.lanes, positions, graph.lanes))
    return graph.reshape(graph.op("ReduceSum", apart, graph.ints([1]), keepdims=0), (channels, batch))


def by_position(graph: Graph, values: str, batch: int, positions: int) -> str:
    """One value per sample, (B, 1), as one for each position of a row, (B·P,)."""
    if graph.lanes:
        apart = graph.reshape(values, (batch // graph.lanes, 1, graph.lanes))
        spread = graph.expand(apart, (batch // graph.lanes, positions, graph.lanes))
    else:
        spread = graph.expand(values, (batch, positions))
    return graph.reshape(spread, (batch * positions,))


def suits(window: Window) -> bool:
    """Whether both gradients of a convolution with this window are one convolution each, without cropping."""
    return all(
        min(_padding_of_input_gradient(window, a)) >= 0 and _padding_below_weights(window, a) >= 0 for a in (0, 1)
    )


def forward(graph: Graph, x: str, kernel: str, batch: int, channels: int, window: Window) -> str:
    """Rows x, kernel (C, 1, kh, kw) → rows y."""
    filters = _spread(graph, kernel, batch, channels, window)
    pads = [*window.padding, *(_padding_below(window, axis) for axis in (0, 1))]
    image = graph.reshape(x, (1, channels * batch, *window.plane))
    y = _convolve(graph, image, filters, window.kernel, window.stride, window.dilation, pads, channels * batch)
    return graph.reshape(y, (1, channels, batch * int(np.prod(window.places))))


def input_gradient(graph: Graph, grad: str, kernel: str, batch: int, channels: int, window: Window) -> str:
    """Rows ∂y, kernel (C, 1, kh, kw) → rows ∂x."""
    filters = _spread(graph, kernel, batch, channels, window, turned=True)
    (oh, ow), (sy, sx), lanes = window.places, window.stride, int(graph.lanes or 1)
    images = channels * batch // lanes
    if (sy, sx) != (1, 1):  # zeros between the rows and the columns
        apart = graph.reshape(grad, (images, oh, 1, ow, lanes))
        grad = graph.op("Pad", apart, graph.ints([0, 0, 0, 0, 0, 0, 0, sy - 1, 0, (sx - 1) * lanes]))
    image = graph.reshape(grad, (1, channels * batch, oh * sy, ow * sx))
    (top, bottom), (left, right) = (_padding_of_input_gradient(window, axis) for axis in (0, 1))
    pads = [top, left, bottom, right]
    y = _convolve(graph, image, filters, window.kernel, (1, 1), window.dilation, pads, channels * batch)
    return graph.reshape(y, (1, channels, batch * int(np.prod(window.plane))))


def weight_gradient(graph: Graph, grad: str, x: str, batch: int, channels: int, window: Window) -> str:
    """Rows ∂y and x → ∂kernel (C, kh·kw)."""
    image = graph.reshape(x, (1, channels * batch, *window.plane))
    filters = graph.reshape(grad, (channels * batch, 1, *window.places))
    pads = [*window.padding, *(_padding_below_weights(window, axis) for axis in (0, 1))]
    y = _convolve(graph, image, filters, window.places, window.dilation, window.stride, pads, channels * batch)
    lanes, cells = int(graph.lanes or 1), len(window.cells)
    apart = graph.reshape(y, (channels, batch // lanes, cells, lanes))
    return graph.op("ReduceSum", apart, graph.ints([1, 3]), keepdims=0)


def _convolve(
    graph: Graph,
    image: str,
    filters: str,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    pads: Sequence[int],
    images: int,
) -> str:
    attributes = {"kernel_shape": kernel, "strides": stride, "dilations": dilation, "pads": pads}
    lists = {name: list(value) for name, value in attributes.items()}
    return graph.op("Conv", image, filters, group=images, domain=_DOMAIN, **lists)


def _spread(graph: Graph, kernel: str, batch: int, channels: int, window: Window, *, turned: bool = False) -> str:
    """A kernel (C, 1, kh, kw), turned around or not, for every lane: (C·B, 1, kh, kw) in blocks of b.

    By a product with zeros and ones, which is 15 times faster than Expand here.
    """
    lanes, cells = int(graph.lanes or 1), len(window.cells)
    identity = np.eye(cells, dtype=np.float32)[:, :: -1 if turned else 1]
    matrix = np.repeat(np.tile(identity, (1, batch // lanes)), lanes, axis=1)  # (cells, B/b · cells · b)
    spread = graph.op("MatMul", graph.reshape(kernel, (channels, cells)), graph.constant(matrix))
    return graph.reshape(spread, (channels * batch, 1, *window.kernel))


def _reach(window: Window, axis: int) -> int:
    return (window.kernel[axis] - 1) * window.dilation[axis]


def _padding_below(window: Window, axis: int) -> int:
    """What a convolution needs after the plane to have its places, and no more."""
    needed = (window.places[axis] - 1) * window.stride[axis] + _reach(window, axis) + 1
    return max(0, needed - window.plane[axis] - window.padding[axis])


def _padding_of_input_gradient(window: Window, axis: int) -> tuple[int, int]:
    before = _reach(window, axis) - window.padding[axis]
    return before, window.plane[axis] - window.places[axis] * window.stride[axis] + window.padding[axis]


def _padding_below_weights(window: Window, axis: int) -> int:
    places = (window.places[axis] - 1) * window.stride[axis]
    return _reach(window, axis) + places + 1 - window.plane[axis] - window.padding[axis]

"""Translations of 2-D convolution and its two gradients, each chosen by shape so that ONNX Runtime runs it fast.

The kernels of a training step are inputs, not constants, so ONNX Runtime cannot repack them, and it has no gradient
kernels at all. What it does have is a good matrix product. So, with measurements in docs/decisions/011:

    1 × 1                 matrix products on channel-major rows (C, B·H·W), forward and backward
    depthwise             each channel's window as a small banded matrix T (H·W, OH·OW), made from the kernel by one
                          product with a constant; forward x·T, input gradient g·Tᵀ, weight gradient xᵀ·g read at
                          the taps. Wide planes: the same over rows of the image only.
    3 × 3, many channels  in bilinear form (export/graphs/bilinear.py), a quarter of the products, forward and backward
    small planes          forward and gradients by taps and one product (im2col, and its adjoint)
    everything else       forward ONNX Conv; input gradient ConvTranspose; weight gradient one product per run of
                          kernel rows over channel-major taps

Every form computes the same sums; only their order differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from protofleet.contract.errors import ExportError
from protofleet.export.graphs import blocked_kernels, depthwise
from protofleet.export.graphs.bilinear import Bilinear
from protofleet.export.graphs.windows import Window, fold, tap_matrix, taps
from protofleet.export.operators import pointwise
from protofleet.export.operators.emitter import Emitter
from protofleet.export.operators.translation import ChannelMajor, Meta, Rows, Value, translates

__all__: list[str] = []

aten = torch.ops.aten
Gradients = tuple[str | Value | None, str | None, str | None]
_FEW_PLACES = 16  # output positions per image up to which Conv's one product per image is slower than im2col
_CHUNK_ELEMENTS = 2_000_000  # taps gathered at once for a weight gradient: bounds the step's memory


@dataclass(frozen=True)
class _Conv:
    """One convolution: x (B, I, H, W), kernel (O, I/groups, kh, kw) → y (B, O, OH, OW)."""

    batch: int
    inputs: int
    outputs: int
    groups: int
    window: Window

    @property
    def is_depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.inputs == self.outputs

    def in_lanes(self, e: Emitter) -> bool:
        """Whether its samples are the lanes of a blocked operator."""
        return bool(e.graph.lanes) and blocked_kernels.suits(self.window)

    @property
    def is_pointwise(self) -> bool:
        return self.groups == 1 and self.window.kernel == (1, 1) and self.window.padding == (0, 0)

    @property
    def has_few_places(self) -> bool:
        return self.groups == 1 and int(np.prod(self.window.places)) <= _FEW_PLACES

    @property
    def bilinear(self) -> Bilinear | None:
        """Its bilinear form, where it has one that pays."""
        same = Window((3, 3), (1, 1), (1, 1), (1, 1), self.window.plane, self.window.plane)
        if self.groups != 1 or self.window != same:
            return None
        form = Bilinear(self.batch, self.inputs, self.outputs, self.window.plane)
        return form if form.pays else None

    @property
    def length(self) -> int:
        """B·OH·OW."""
        return self.batch * int(np.prod(self.window.places))

    @property
    def attributes(self) -> dict[str, Any]:
        """As ONNX Conv wants them."""
        w = self.window
        return {
            "kernel_shape": list(w.kernel),
            "strides": list(w.stride),
            "dilations": list(w.dilation),
            "pads": [*w.padding, *w.padding],
            "group": self.groups,
        }


def _describe(x: tuple[int, ...], w: tuple[int, ...], y: tuple[int, ...], options: Sequence[Any]) -> _Conv:
    stride, padding, dilation, transposed, _, groups = options
    if transposed or len(x) != 4:
        raise ExportError(
            "convolution of the backbone",
            expected="Conv2d",
            got="a transposed convolution" if transposed else f"one over {len(x) - 2} axes",
            hint="another layer",
        )
    window = Window(tuple(w[2:]), tuple(stride), tuple(padding), tuple(dilation), tuple(x[2:]), tuple(y[2:]))  # type: ignore[arg-type]
    return _Conv(x[0], x[1], w[0], groups, window)


@translates(aten.convolution.default)
def _convolution(e: Emitter, out: Meta, x: Value, w: Value, bias: Value | None, *options: Any) -> str | Value:
    conv = _describe(x.shape, w.shape, out.shape, options)
    if e.graph.any_batch:  # inference: kernels are constants there, and ONNX Runtime packs and fuses them
        extra = [e.plain(bias)] if bias is not None else []
        return e.op("Conv", e.plain(x), e.plain(w), *extra, **conv.attributes)
    if conv.is_pointwise and conv.window.stride == (1, 1):
        return pointwise.forward(e, x, w, bias, out)
    if conv.is_depthwise and conv.in_lanes(e):
        y = blocked_kernels.forward(e.graph, e.rows(x), e.plain(w), conv.batch, conv.inputs, conv.window)
        return Rows(e.op("Add", y, e.graph.reshape(e.plain(bias), (conv.outputs, 1))) if bias is not None else y)
    if conv.is_pointwise:
        y = e.op("MatMul", _matrix(e, w), _strided_rows(e, x, conv))
    elif conv.bilinear is not None and not conv.bilinear.is_channel_major:
        y = conv.bilinear.forward(e.graph, e.plain(x), e.plain(w))
        return y if bias is None else e.op("Add", y, e.graph.reshape(e.plain(bias), (conv.outputs, 1, 1)))
    elif conv.bilinear is not None:
        y = conv.bilinear.forward(e.graph, e.channel_major(x), e.plain(w))
    elif conv.is_depthwise:
        y = depthwise.forward(e.graph, e.channel_major(x), e.plain(w), conv.batch, conv.inputs, conv.window)
    elif conv.has_few_places:
        y = e.op("MatMul", _matrix(e, w), _columns(e, x, conv, conv.window.cells))
    else:
        extra = [e.plain(bias)] if bias is not None else []
        return e.op("Conv", e.plain(x), e.plain(w), *extra, **conv.attributes)
    shape = (conv.outputs, conv.batch, *conv.window.places)
    if bias is not None:
        column = e.graph.reshape(e.plain(bias), (conv.outputs, 1))
        y = e.op("Add", e.graph.reshape(y, (conv.outputs, conv.length)), column)
    return ChannelMajor(e.graph.reshape(y, shape))


@translates(aten.convolution_backward.default)
def _convolution_backward(
    e: Emitter, out: tuple[Meta, ...], grad: Value, x: Value, w: Value, bias_sizes: Any, *options: Any
) -> Gradients:
    mask = options[-1]
    conv = _describe(x.shape, w.shape, grad.shape, options[:-1])
    if conv.is_pointwise and conv.window.stride == (1, 1):
        return pointwise.gradients(e, grad, x, w, mask)
    if grad.factor is not None and grad.rows is None and w.size < grad.size:
        return _scaled(e, grad, x, w, conv, mask)
    return _gradients(e, grad, x, w, conv, mask)


def _scaled(e: Emitter, grad: Value, x: Value, w: Value, conv: _Conv, mask: Sequence[bool]) -> Gradients:
    """Gradients where the factor per channel of `grad` is left to the kernel, which is smaller."""
    factor, flat = str(grad.factor), (w.shape[0], int(np.prod(w.shape[1:])))
    column = e.graph.reshape(factor, (w.shape[0], 1))

    def times(name: str) -> str:
        return e.graph.reshape(e.op("Mul", e.graph.reshape(name, flat), column), w.shape)

    scaled = Value(w.shape, w.dtype, plain=times(e.plain(w)))
    gx, gw, gb = _gradients(e, Value(grad.shape, grad.dtype, rows=grad.unscaled), x, scaled, conv, mask)
    return gx, None if gw is None else times(gw), None if gb is None else e.op("Mul", gb, factor)


def _gradients(e: Emitter, grad: Value, x: Value, w: Value, conv: _Conv, mask: Sequence[bool]) -> Gradients:
    gx = _input_gradient(e, grad, w, conv) if mask[0] else None
    gw = _weight_gradient(e, grad, x, w, conv) if mask[1] else None
    gb = e.op("ReduceSum", _rows(e, grad), e.graph.ints([1]), keepdims=0) if mask[2] else None
    return gx, gw, gb


def _matrix(e: Emitter, w: Value) -> str:
    """The kernel as (O, I·kh·kw)."""
    return e.graph.reshape(e.plain(w), (w.shape[0], int(np.prod(w.shape[1:]))))


def _rows(e: Emitter, value: Value) -> str:
    """An activation as (channels, B·H·W), image after image."""
    b, c, h, w = value.shape
    return e.graph.reshape(e.channel_major(value), (c, b * h * w))


def _strided_rows(e: Emitter, x: Value, conv: _Conv) -> str:
    """What a 1×1 kernel of a larger stride sees: (I, B·OH·OW)."""
    cut = taps(e.graph, e.channel_major(x), conv.window)[0]
    return e.graph.reshape(cut, (conv.inputs, conv.length))


def _columns(e: Emitter, x: Value, conv: _Conv, cells: list[tuple[int, int]]) -> str:
    """The taps of these cells as rows (I·cells, B·OH·OW), in the kernel's order."""
    graph, window = e.graph, conv.window
    name, count = e.channel_major(x), len(cells)
    if window.is_small and count == len(window.cells):
        matrix = tap_matrix(window).transpose(1, 0, 2).reshape(int(np.prod(window.plane)), -1)  # (H·W, taps·OH·OW)
        flat = graph.reshape(name, (conv.inputs * conv.batch, matrix.shape[0]))
        cut = graph.op("MatMul", flat, graph.constant(matrix))
        apart = graph.reshape(cut, (conv.inputs, conv.batch, count, int(np.prod(window.places))))
        joined = graph.transpose(apart, (0, 2, 1, 3))
    else:
        planes = taps(graph, name, window, cells)
        joined = graph.op("Concat", *(graph.reshape(p, (conv.inputs, 1, conv.length)) for p in planes), axis=1)
    return graph.reshape(joined, (conv.inputs * count, conv.length))


def _input_gradient(e: Emitter, grad: Value, w: Value, conv: _Conv) -> str:
    window, shape = conv.window, (conv.inputs, conv.batch, *conv.window.plane)
    if conv.bilinear is not None:
        if conv.bilinear.is_channel_major:
            return ChannelMajor(conv.bilinear.input_gradient(e.graph, e.channel_major(grad), e.plain(w)))
        return conv.bilinear.input_gradient(e.graph, e.plain(grad), e.plain(w))
    if conv.is_depthwise and conv.in_lanes(e):
        return Rows(blocked_kernels.input_gradient(e.graph, e.rows(grad), e.plain(w), conv.batch, conv.inputs, window))
    if conv.is_depthwise:
        flat = depthwise.input_gradient(e.graph, e.channel_major(grad), e.plain(w), conv.batch, conv.inputs, window)
        return ChannelMajor(e.graph.reshape(flat, shape))
    if conv.is_pointwise:
        rows = e.op("MatMul", e.graph.transpose(_matrix(e, w), (1, 0)), _rows(e, grad))  # (I, B·OH·OW)
        plane = e.graph.reshape(rows, (conv.inputs, conv.batch, *window.places))
        return ChannelMajor(fold(e.graph, [plane], window, shape[:2]))
    if conv.has_few_places:
        return ChannelMajor(_folded_gradient(e, grad, w, conv))
    return _transposed(e, grad, w, conv)


def _folded_gradient(e: Emitter, grad: Value, w: Value, conv: _Conv) -> str:
    """Input gradient where places are few: Wᵀ·g gives every tap, and the adjoint of cutting adds them up."""
    graph, window, count = e.graph, conv.window, len(conv.window.cells)
    columns = e.op("Gemm", _matrix(e, w), _rows(e, grad), transA=1)  # (I·taps, B·OH·OW)
    apart = graph.reshape(columns, (conv.inputs, count, conv.batch, int(np.prod(window.places))))
    if window.is_small:
        matrix = tap_matrix(window).transpose(0, 2, 1).reshape(-1, int(np.prod(window.plane)))  # (taps·OH·OW, H·W)
        flat = graph.reshape(graph.transpose(apart, (0, 2, 1, 3)), (conv.inputs * conv.batch, matrix.shape[0]))
        summed = graph.op("MatMul", flat, graph.constant(np.ascontiguousarray(matrix)))
        return graph.reshape(summed, (conv.inputs, conv.batch, *window.plane))
    parts = graph.ops("Split", apart, graph.ints([1] * count), outputs=count, axis=1)
    planes = [graph.reshape(p, (conv.inputs, conv.batch, *window.places)) for p in parts]
    return fold(graph, planes, window, (conv.inputs, conv.batch))


def _transposed(e: Emitter, grad: Value, w: Value, conv: _Conv) -> str:
    """Input gradient by ONNX ConvTranspose: one product and one overlapping sum per image, in little memory."""
    window = conv.window
    output_padding = []
    for axis in (0, 1):
        reach = (window.places[axis] - 1) * window.stride[axis] + (window.kernel[axis] - 1) * window.dilation[axis] + 1
        output_padding.append(window.plane[axis] + 2 * window.padding[axis] - reach)
    return e.op("ConvTranspose", e.plain(grad), e.plain(w), output_padding=output_padding, **conv.attributes)


def _weight_gradient(e: Emitter, grad: Value, x: Value, w: Value, conv: _Conv) -> str:
    graph, window = e.graph, conv.window
    if conv.bilinear is not None:
        order = e.channel_major if conv.bilinear.is_channel_major else e.plain
        return conv.bilinear.weight_gradient(graph, order(grad), order(x))
    if conv.is_depthwise and conv.in_lanes(e):
        flat = blocked_kernels.weight_gradient(graph, e.rows(grad), e.rows(x), conv.batch, conv.inputs, window)
        return graph.reshape(flat, w.shape)
    if conv.is_depthwise:
        args = (e.channel_major(grad), e.channel_major(x), conv.batch, conv.inputs, window)
        return graph.reshape(depthwise.weight_gradient(graph, *args), w.shape)
    if conv.is_pointwise:
        gw = graph.product(_rows(e, grad), _strided_rows(e, x, conv), (conv.outputs, conv.inputs), transB=1)
        return graph.reshape(gw, w.shape)
    if conv.groups > 1:
        return _grouped_weight_gradient(e, grad, x, w, conv)
    chunks = _chunks(conv)
    if len(chunks) == 1:
        shape = (conv.outputs, conv.inputs * len(chunks[0]))
        gw = graph.product(_rows(e, grad), _columns(e, x, conv, chunks[0]), shape, transB=1)
        return graph.reshape(gw, w.shape)
    parts = []
    for cells in chunks:
        gw = e.op("Gemm", _rows(e, grad), _columns(e, x, conv, cells), transB=1)  # (O, I·cells)
        parts.append(graph.reshape(gw, (conv.outputs, conv.inputs, len(cells))))
    return graph.reshape(graph.op("Concat", *parts, axis=2), w.shape)


def _chunks(conv: _Conv) -> list[list[tuple[int, int]]]:
    """The window's cells in runs of whole kernel rows, each run's taps within the memory budget."""
    cells, row = conv.window.cells, conv.window.kernel[1]
    if conv.has_few_places:
        return [cells]
    rows = max(1, _CHUNK_ELEMENTS // (conv.inputs * conv.length * row))
    return [cells[i : i + rows * row] for i in range(0, len(cells), rows * row)]


def _grouped_weight_gradient(e: Emitter, grad: Value, x: Value, w: Value, conv: _Conv) -> str:
    """One product per group, batched: (G, O/G, L) × (G, L, I/G·taps)."""
    graph, groups = e.graph, conv.groups
    columns = _columns(e, x, conv, conv.window.cells)
    right = graph.reshape(columns, (groups, int(np.prod(w.shape[1:])), conv.length))
    left = graph.reshape(_rows(e, grad), (groups, conv.outputs // groups, conv.length))
    return graph.reshape(e.op("MatMul", left, graph.transpose(right, (0, 2, 1))), w.shape)

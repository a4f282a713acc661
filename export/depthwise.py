"""Depthwise convolution and its gradients as batched matrix products.

ONNX Runtime's Conv treats a depthwise convolution as one tiny product per channel and image. Here each channel's
kernel becomes a banded matrix instead, by one product with a constant 0/1 matrix:

    small planes     T (C, H·W, OH·OW):      y = x·T,  ∂x = g·Tᵀ,  ∂Tᵀ = gᵀ·x
    wide planes      T (C, kh·W, OW):        the same for rows of the image, kh shifted rows side by side

The kernel's gradient is ∂T read at the band, by the transpose of the same constant; ∂T itself is made transposed, gᵀ·x,
since the narrower factor is the cheaper one to turn. Activations are channel-major,
(C, B, H, W). docs/decisions/011 has the timings.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from export.graph import Graph
from export.windows import Window, fold, tap_matrix, taps

__all__ = ["forward", "input_gradient", "weight_gradient"]

_SMALL_PLANE = 64  # pixels up to which the whole plane is one matrix


def forward(graph: Graph, x: str, kernel: str, batch: int, channels: int, window: Window) -> str:
    """x (C, B, H, W), kernel (C, 1, kh, kw) → y, C·B·OH·OW values in channel-major order."""
    left = _left(graph, x, batch, channels, window)
    return graph.op("MatMul", left, _bands(graph, kernel, channels, window))


def input_gradient(graph: Graph, grad: str, kernel: str, batch: int, channels: int, window: Window) -> str:
    """grad (C, B, OH, OW) → ∂x, C·B·H·W values in channel-major order."""
    bands = graph.transpose(_bands(graph, kernel, channels, window), (0, 2, 1))
    product = graph.op("MatMul", graph.reshape(grad, _right_shape(batch, channels, window)), bands)
    if _is_small(window):
        return product
    w, oh, rows = window.plane[1], window.places[0], window.kernel[0]
    apart = graph.reshape(product, (channels, batch, oh, rows * w))
    parts = graph.ops("Split", apart, graph.ints([w] * rows), outputs=rows, axis=3)
    return fold(graph, list(parts), _row_window(window), (channels, batch))


def weight_gradient(graph: Graph, grad: str, x: str, batch: int, channels: int, window: Window) -> str:
    """grad (C, B, OH, OW) and x (C, B, H, W) → ∂kernel, C·kh·kw values."""
    left = graph.transpose(graph.reshape(grad, _right_shape(batch, channels, window)), (0, 2, 1))
    bands = graph.op("MatMul", left, _left(graph, x, batch, channels, window))  # ∂Tᵀ: the narrower factor turned
    reader = graph.constant(_reader(window))
    return graph.op("MatMul", graph.reshape(bands, (channels, -1)), reader)


def _reader(window: Window) -> NDArray[np.float32]:
    """0/1: elements of ∂Tᵀ to kernel cells: (OH·OW·H·W, kh·kw), or (OW·kh·W, kh·kw)."""
    small = _is_small(window)
    cells = tap_matrix(window if small else _column_window(window)).transpose(2, 1, 0)  # (out, in, cells)
    if small:
        return np.ascontiguousarray(cells.reshape(-1, cells.shape[2]))
    rows = window.kernel[0]
    reader = np.zeros((cells.shape[0], rows, cells.shape[1], rows, cells.shape[2]), dtype=np.float32)
    for row in range(rows):
        reader[:, row, :, row, :] = cells
    return reader.reshape(-1, rows * cells.shape[2])


def _is_small(window: Window) -> bool:
    return int(np.prod(window.plane)) <= _SMALL_PLANE


def _row_window(window: Window) -> Window:
    """The vertical part of the window: whole rows of the image, one tap per kernel row."""
    return Window(
        kernel=(window.kernel[0], 1),
        stride=(window.stride[0], 1),
        padding=(window.padding[0], 0),
        dilation=(window.dilation[0], 1),
        plane=window.plane,
        places=(window.places[0], window.plane[1]),
    )


def _column_window(window: Window) -> Window:
    """The horizontal part of the window, over one row of the image."""
    return Window(
        kernel=(1, window.kernel[1]),
        stride=(1, window.stride[1]),
        padding=(0, window.padding[1]),
        dilation=(1, window.dilation[1]),
        plane=(1, window.plane[1]),
        places=(1, window.places[1]),
    )


def _band_matrix(window: Window) -> NDArray[np.float32]:
    """0/1: kernel cells to elements of T: (kh·kw, H·W·OH·OW), or per kernel row (kw, W·OW)."""
    matrix = tap_matrix(window if _is_small(window) else _column_window(window))
    return matrix.reshape(matrix.shape[0], -1)


def _bands(graph: Graph, kernel: str, channels: int, window: Window) -> str:
    """T (C, H·W, OH·OW), or (C, kh·W, OW)."""
    constant = _band_matrix(window)
    rows = 1 if _is_small(window) else window.kernel[0]
    flat = graph.reshape(kernel, (channels * rows, constant.shape[0]))
    product = graph.op("MatMul", flat, graph.constant(constant))
    if _is_small(window):
        return graph.reshape(product, (channels, int(np.prod(window.plane)), int(np.prod(window.places))))
    return graph.reshape(product, (channels, rows * window.plane[1], window.places[1]))


def _left(graph: Graph, x: str, batch: int, channels: int, window: Window) -> str:
    """x as the left factor: (C, B, H·W), or rows side by side (C, B·OH, kh·W)."""
    if _is_small(window):
        return graph.reshape(x, (channels, batch, int(np.prod(window.plane))))
    rows = taps(graph, x, _row_window(window))  # each (C, B, OH, W)
    joined = graph.op("Concat", *rows, axis=3) if len(rows) > 1 else rows[0]
    return graph.reshape(joined, (channels, batch * window.places[0], window.kernel[0] * window.plane[1]))


def _right_shape(batch: int, channels: int, window: Window) -> tuple[int, int, int]:
    if _is_small(window):
        return (channels, batch, int(np.prod(window.places)))
    return (channels, batch * window.places[0], window.places[1])

"""Depthwise convolution and its gradients as batched matrix products.

ONNX Runtime's Conv treats a depthwise convolution as one tiny product per channel and image. Here each channel's
kernel becomes a banded matrix instead, by one product with a constant 0/1 matrix:

    small planes     T (C, H·W, OH·OW):   y = x·T,  ∂x = g·Tᵀ,  ∂Tᵀ = gᵀ·x
    wide planes      T (C, G·W, OW):      the same for runs of G image rows at a time

The kernel's gradient is ∂T read at the band, by the transpose of the same constant; ∂T itself is made transposed,
since the narrower factor is the cheaper one to turn.

The runs of a wide plane. An output row sees a run of image rows that starts `stride` rows below its neighbour's, so
runs overlap. Every q-th run does not, for q·stride = G at least the window's height; those lie end to end in memory,
and cutting them out is one block copy. So a plane is cut q times, once per phase, instead of once per kernel row and
then joined. The weight gradient cuts them again: kept from the forward pass to the backward pass, they would be q
copies of each layer's input (docs/decisions/168). Activations are channel-major, (C, B, H, W). docs/decisions/011 has
the timings.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protofleet.export.graphs.graph_builder import Graph
from protofleet.export.graphs.windows import Window, tap_matrix

__all__ = ["forward", "input_gradient", "weight_gradient"]

_SMALL_PLANE = 64  # pixels up to which the whole plane is one matrix


def forward(graph: Graph, x: str, kernel: str, batch: int, channels: int, window: Window) -> str:
    """x (C, B, H, W), kernel (C, 1, kh, kw) → y, C·B·OH·OW values in channel-major order."""
    bands = _bands(graph, kernel, channels, window)
    if _is_small(window):
        return graph.op("MatMul", _whole(graph, x, batch, channels, window.plane), bands)
    runs, (oh, ow) = _Runs.of(window), window.places
    shape = (channels, batch, runs.count, 1, ow)
    parts = [
        graph.reshape(graph.op("MatMul", part, bands), shape) for part in runs.cut(graph, x, batch, channels, window)
    ]
    joined = graph.reshape(graph.op("Concat", *parts, axis=3), (channels, batch, runs.count * runs.phases, ow))
    return joined if runs.count * runs.phases == oh else graph.slice(joined, [2], [0], [oh])


def input_gradient(graph: Graph, grad: str, kernel: str, batch: int, channels: int, window: Window) -> str:
    """grad (C, B, OH, OW) → ∂x, C·B·H·W values in channel-major order."""
    bands = graph.transpose(_bands(graph, kernel, channels, window), (0, 2, 1))
    if _is_small(window):
        return graph.op("MatMul", _whole(graph, grad, batch, channels, window.places), bands)
    runs, (height, width), step = _Runs.of(window), window.plane, window.stride[0]
    padded = []
    for phase, part in enumerate(runs.split(graph, grad, batch, channels, window)):
        length = runs.count * runs.rows
        rows = graph.reshape(graph.op("MatMul", part, bands), (channels, batch, length, width))
        padded.append(_moved(graph, rows, length, phase * step - window.padding[0], height))
    return graph.op("Sum", *padded) if len(padded) > 1 else padded[0]


def weight_gradient(graph: Graph, grad: str, x: str, batch: int, channels: int, window: Window) -> str:
    """grad (C, B, OH, OW) and x (C, B, H, W) → ∂kernel, C·kh·kw values."""
    if _is_small(window):
        lefts = [_whole(graph, grad, batch, channels, window.places)]
        rights = [_whole(graph, x, batch, channels, window.plane)]
    else:
        runs = _Runs.of(window)
        lefts = runs.split(graph, grad, batch, channels, window)
        rights = runs.cut(graph, x, batch, channels, window, again=True)
    parts = [
        graph.op("MatMul", graph.transpose(left, (0, 2, 1)), right) for left, right in zip(lefts, rights, strict=True)
    ]
    bands = graph.op("Sum", *parts) if len(parts) > 1 else parts[0]  # ∂Tᵀ
    reader = np.ascontiguousarray(_band_cells(window).transpose(2, 1, 0))  # (out, in, cells)
    flat = graph.reshape(bands, (channels, reader.shape[0] * reader.shape[1]))
    return graph.op("MatMul", flat, graph.constant(reader.reshape(-1, reader.shape[2])))


@dataclass(frozen=True)
class _Runs:
    """How a wide plane is cut into runs of rows.

    Attributes:
        phases: q, how many sets of runs that do not overlap.
        rows: G, image rows in a run.
        count: runs per image in each phase.
    """

    phases: int
    rows: int
    count: int

    @classmethod
    def of(cls, window: Window) -> _Runs:
        height, stride = window.offset(window.kernel[0] - 1, 0) + 1, window.stride[0]
        phases = -(-height // stride)
        rows, count = phases * stride, -(-window.places[0] // phases)
        return cls(phases, rows, count)

    def cut(self, graph: Graph, x: str, batch: int, channels: int, window: Window, *, again: bool = False) -> list[str]:
        """x (C, B, H, W) → each phase's runs (C, B·count, G·W).

        Args:
            again: as nodes of their own, so that what the forward pass has cut is not kept for the backward pass.
        """
        height, width = window.plane
        shape = (channels, batch * self.count, self.rows * width)
        starts = [window.padding[0] - phase * window.stride[0] for phase in range(self.phases)]
        length = self.count * self.rows
        return [graph.reshape(_moved(graph, x, height, s, length, again=again), shape) for s in starts]

    def split(self, graph: Graph, grad: str, batch: int, channels: int, window: Window) -> list[str]:
        """grad (C, B, OH, OW) → each phase's output rows (C, B·count, OW)."""
        oh, ow = window.places
        missing = self.count * self.phases - oh
        name = graph.op("Pad", grad, graph.ints([0, 0, 0, 0, 0, 0, missing, 0])) if missing else grad
        apart = graph.reshape(name, (channels, batch * self.count, self.phases * ow))
        if self.phases == 1:
            return [apart]
        return list(graph.ops("Split", apart, graph.ints([ow] * self.phases), outputs=self.phases, axis=2))


def _moved(graph: Graph, planes: str, height: int, start: int, length: int, *, again: bool = False) -> str:
    """Planes of `height` rows as planes of `length` rows, row 0 becoming row `start`: what is outside is cut off, what
    is missing is zero. One pass, where Pad and Slice are two.

    Args:
        again: as a node that differs from the one without it by saying that the filling is zero.
    """
    end = length - start - height
    if start == end == 0:
        return planes
    filling = [graph.scalar(0.0)] if again else []
    return graph.op("Pad", planes, graph.ints([0, 0, start, 0, 0, 0, end, 0]), *filling)


def _is_small(window: Window) -> bool:
    return int(np.prod(window.plane)) <= _SMALL_PLANE


def _whole(graph: Graph, name: str, batch: int, channels: int, plane: tuple[int, int]) -> str:
    """Planes (C, B, H, W) as (C, B, H·W)."""
    return graph.reshape(name, (channels, batch, plane[0] * plane[1]))


def _band_cells(window: Window) -> NDArray[np.float32]:
    """0/1: which elements of T each kernel cell fills: (kh·kw, H·W, OH·OW), or (kh·kw, G·W, OW)."""
    if _is_small(window):
        return tap_matrix(window)
    (kh, kw), width, runs = window.kernel, window.plane[1], _Runs.of(window)
    across = Window(
        kernel=(1, kw),
        stride=(1, window.stride[1]),
        padding=(0, window.padding[1]),
        dilation=(1, window.dilation[1]),
        plane=(1, width),
        places=(1, window.places[1]),
    )
    row = tap_matrix(across)  # (kw, W, OW)
    cells = np.zeros((kh, kw, runs.rows, width, window.places[1]), dtype=np.float32)
    for i in range(kh):
        cells[i, :, window.offset(i, 0)] = row
    return cells.reshape(kh * kw, runs.rows * width, window.places[1])


def _bands(graph: Graph, kernel: str, channels: int, window: Window) -> str:
    """T (C, H·W, OH·OW), or (C, G·W, OW)."""
    cells = _band_cells(window)
    flat = graph.reshape(kernel, (channels, len(cells)))
    product = graph.op("MatMul", flat, graph.constant(cells.reshape(len(cells), -1)))
    return graph.reshape(product, (channels, *cells.shape[1:]))

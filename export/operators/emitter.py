"""The graph under construction, and the orders in which it holds each activation.

Activations of rank 4 may be held in several orders, and one of them in two shapes. A translation asks for the one in
which it is fast:

    plain           (B, C, H, W)   torch's own order; what ONNX Conv needs
    channel-major   (C, B, H, W)   what a matrix product over all positions needs: 1×1 and depthwise convolution,
                                   weight gradients, batch normalisation
    rows            (1, C, B·H·W)  channel-major without planes. A reshape leads from one shape to the other, and takes
                                   time, too
    blocks          (B, C/16, H, W, 16)  in the form for protofleet-kernels alone (export/operators/kernel_nodes.py)

A change of order is emitted once, and only where a translation asks for the other order. Elementwise operators stay in
the order of their inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from protofleet.contract.bundle.native_kernels import DOMAIN
from protofleet.export.graphs import blocked_kernels
from protofleet.export.graphs.graph_builder import Graph
from protofleet.export.graphs.values import Blocks, ChannelMajor, Form, Rows, Value

__all__ = ["KERNELS", "SWAP", "Emitter"]

SWAP = (1, 0, 2, 3)
KERNELS = DOMAIN  # of the operators of the wheel protofleet-kernels
LANES = 16  # channels of one of its blocks


class Emitter:
    """The graph under construction, and the orders in which it holds each activation."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.op = graph.op
        self.run_channels: int | None = None  # of the result of the operator in hand, where it is made in runs
        self.in_blocks = False  # whether the operator in hand may work on blocks of channels

    def plain(self, value: Value) -> str:
        """The tensor's name in torch's own order."""
        self.make(value)
        if value.plain is None:
            if value.blocks is not None:
                value.plain = self.op("FromBlocks", value.blocks, domain=KERNELS, sizes=list(value.shape))
            elif value.is_swapped:
                value.plain = self.swap(self.channel_major(value), value.shape[1], value.shape[0], value.shape[2:])
            elif value.runs:  # vectors, kernels
                value.plain = self.op("Concat", *(self.plain(run) for run in value.runs), axis=0)
            else:
                value.plain = self._filled(value)
        return value.plain

    def make(self, value: Value) -> None:
        """Make a tensor that waited to be asked for."""
        if value.pending is not None:
            make, value.pending = value.pending, None
            make()

    def blocks(self, value: Value) -> str:
        """The name of a rank-4 tensor as (B, C/16, H, W, 16)."""
        self.make(value)
        if value.blocks is None:
            value.blocks = self.op("ToBlocks", self.plain(value), domain=KERNELS, sizes=list(value.shape))
        b, c, *plane = value.shape
        self.graph.tell_shape(value.blocks, (b, -(-c // LANES), *plane, LANES))
        return value.blocks

    def channel_major(self, value: Value) -> str:
        """The name of a rank-4 tensor as (C, B, H, W)."""
        if value.channel_major is None:
            b, c, *plane = value.shape
            if value.is_in_rows:
                value.channel_major = blocked_kernels.to_channel_major(self.graph, self.rows(value), value.shape)
            else:
                value.channel_major = self.swap(self.plain(value), b, c, plane)
        return value.channel_major

    def rows(self, value: Value) -> str:
        """The name of a rank-4 tensor as (1, C, B·H·W)."""
        if value.rows is None:
            c = value.shape[1]
            if value.runs:
                value.rows = self.op("Concat", *(self.rows(run) for run in value.runs), axis=1)
            elif value.unscaled is not None and value.factor is not None:
                value.rows = self.affine(value.unscaled, value.factor, self.filled(c, 0.0), c)
            else:
                value.rows = blocked_kernels.to_rows(self.graph, self.channel_major(value), value.shape)
        return value.rows

    def affine(self, rows: str, scale: str, shift: str, count: int) -> str:
        """a·x + b with one a and one b (count,) per row of (1, count, L): a single pass.

        ONNX BatchNormalization with mean 0, variance 1 and no epsilon is exactly that, and ONNX Runtime has it as one
        kernel, where Mul and Add are two.
        """
        statistics = (self.filled(count, 0.0), self.filled(count, 1.0))
        return self.op("BatchNormalization", rows, scale, shift, *statistics, epsilon=0.0)

    def filled(self, count: int, value: float) -> str:
        """A constant vector (count,)."""
        return self.graph.constant(np.full(count, value, dtype=np.float32))

    def swap(self, name: str, first: int, second: int, rest: Sequence[int]) -> str:
        """Exchange the two leading axes (first, second); free where one of them is 1."""
        if first == 1 or second == 1:
            return self.graph.reshape(name, (second, first, *rest))
        return self.graph.transpose(name, SWAP)

    def prefers_channel_major(self, values: Sequence[Value]) -> bool:
        """Whether an elementwise operator on these should stay channel-major."""
        ranks_fit = all(len(v.shape) == 4 or v.size == 1 for v in values)
        return ranks_fit and any(v.is_swapped for v in values)

    def form(self, values: Sequence[Value]) -> Form:
        """The order and shape in which an elementwise operator on these costs least."""
        if self.in_blocks and self._fit_in_blocks(values):
            return Blocks
        if not self.prefers_channel_major(values):
            return str
        shapes = {v.shape for v in values if v.size > 1 and v.fill is None}
        return Rows if len(shapes) == 1 and any(v.is_in_rows for v in values) else ChannelMajor

    def _fit_in_blocks(self, values: Sequence[Value]) -> bool:
        """Whether they are activations of one shape, or numbers, and one of them is in blocks already."""
        large = [v for v in values if v.size > 1]
        held = any(v.blocks is not None or v.pending is not None for v in large)
        return held and len({v.shape for v in large}) == 1 and len(large[0].shape) == 4

    def named(self, value: Value, form: Form) -> str:
        """The tensor's name in that form; one of a single element as it is."""
        if value.size == 1 and form is not str:
            return self.graph.reshape(self.plain(value), (1,))
        order = {str: self.plain, ChannelMajor: self.channel_major, Rows: self.rows, Blocks: self.blocks}
        return order[form](value)

    def _filled(self, value: Value) -> str:
        """A constant tensor, expanded only because somebody needs its full shape."""
        scalar = self.graph.scalar(value.fill or 0.0, value.dtype)
        return self.graph.spread(scalar, value.shape) if value.shape else scalar

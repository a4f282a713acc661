"""3×3 convolution of stride 1 in bilinear form, with its exact gradients, as standard ONNX nodes.

A product of two polynomials is a product of their values at enough points. Along a line, m outputs of a window of three
need m + 2 products instead of 3·m (Toom 1963, Cook 1966; for convolutions Winograd 1980, and Lavin and Gray 2016,
arXiv:1509.09308). With K the values of the inputs at the points, G those of the kernel and A what turns products into
outputs, per axis,

    y = Aᵀ [(G w) ⊙ (K x)],   ∂x = Kᵀ [(G w) ⊙ (A g)],   ∂w = Gᵀ [(A g) ⊙ (K x)]

which is one identity read three ways: the gradients are exact, not approximations. In two dimensions each matrix acts
on rows and on columns, and ⊙ over all images and tiles becomes, for each of the (m + 2)² points, one matrix product
over the channels. F(4, 3) takes 36 of them where 144 were: a quarter of the multiplications, for transforms whose cost
grows with I + O where that of the products grows with I·O.

    wide planes      line by line: (B, C, H, W) → (points, tiles·B, C), whose transposes move whole runs of B·C
    planes up to 4   both axes by one matrix on channel-major activations: (C, B, H, W) → (points, C, tiles·B)

The backward pass has its points in the reverse order. It computes the same, and no optimizer takes the values that the
forward pass had for its own and keeps them until then: the step needs as little memory as before.

A padded line of two needs three products, by hand. The points are 0, ±3/4, ±3/2 and ∞; with ±1 and ±2 rounding is five
times as bad (docs/decisions/200).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from protofleet.export.graphs.graph_builder import Graph

__all__ = ["Bilinear"]

Matrix = NDArray[np.float64]

_POINTS = {2: (0.0, 1.0, -1.0), 4: (0.0, 0.75, -0.75, 1.5, -1.5)}  # finite ones, by the outputs of a tile
_TAPS = 3
_CHANNELS = 10  # I·O / (I + O) from which it pays
_SAVED = 54  # products saved for each value of the kernel's, from which it pays


@dataclass(frozen=True)
class _Line:
    """One axis of a plane of n, padded by one at both ends: y = Σ over tiles and points of a ⊙ (k x) ⊙ (g w).

    Attributes:
        inputs: k (points, tiles, n).
        kernel: g (points, 3).
        outputs: a (points, tiles, n).
    """

    inputs: Matrix
    kernel: Matrix
    outputs: Matrix

    @classmethod
    def of(cls, n: int) -> _Line:
        """For a line of n places."""
        return _pair() if n == 2 else _tiled(n, 4 if n > 2 else 2)

    def reversed(self) -> _Line:
        """The same with its points in the other order."""
        return _Line(self.inputs[::-1], self.kernel[::-1], self.outputs[::-1])


def _pair() -> _Line:
    """y₀ = w₁x₀ + w₂x₁ and y₁ = w₀x₀ + w₁x₁ by three products: w₁(x₀ + x₁), (w₂ − w₁)x₁ and (w₀ − w₁)x₀."""
    inputs = np.array([[[1.0, 1.0]], [[0.0, 1.0]], [[1.0, 0.0]]])
    kernel = np.array([[0.0, 1.0, 0.0], [0.0, -1.0, 1.0], [1.0, -1.0, 0.0]])
    outputs = np.array([[[1.0, 1.0]], [[1.0, 0.0]], [[0.0, 1.0]]])
    return _Line(inputs, kernel, outputs)


def _tiled(n: int, tile: int) -> _Line:
    """Tiles of so many outputs side by side; the last one hangs over the end, where nothing is read and written."""
    finite, points = _POINTS[tile], tile + _TAPS - 1
    values = np.vander([*finite, 0.0], points, increasing=True)
    values[-1] = [0.0] * (points - 1) + [1.0]  # at infinity: the leading coefficient
    reader = np.linalg.inv(values).T  # (points, points): the transpose of interpolation
    scale = np.array([1.0 / np.abs(row)[np.abs(row) > 1e-12].min() for row in reader])
    scale = np.where(np.abs(scale) > 64, 1.0, scale)
    reader = reader * scale[:, None]
    kernel = _at(finite, _TAPS) / scale[:, None]
    writer = _at(finite, tile)  # (points, tile)
    tiles = -(-n // tile)
    inputs, outputs = np.zeros((points, tiles, n)), np.zeros((points, tiles, n))
    for t in range(tiles):
        for j in range(points):
            if 0 <= (place := t * tile + j - 1) < n:
                inputs[:, t, place] += reader[:, j]
        for i in range(min(tile, n - t * tile)):
            outputs[:, t, t * tile + i] = writer[:, i]
    return _Line(inputs, kernel, outputs)


def _at(finite: tuple[float, ...], terms: int) -> Matrix:
    """The powers 0 to terms − 1 of every point, infinity last: (points, terms)."""
    return np.vstack([np.vander(finite, terms, increasing=True), [0.0] * (terms - 1) + [1.0]])


@dataclass(frozen=True)
class Bilinear:
    """One convolution x (B, I, H, W) * w (O, I, 3, 3) → y (B, O, H, W), padded by one.

    Attributes:
        plane: (H, W).
    """

    batch: int
    inputs: int
    outputs: int
    plane: tuple[int, int]

    @property
    def is_channel_major(self) -> bool:
        """Whether activations are (C, B, H, W) rather than (B, C, H, W)."""
        return max(self.plane) <= 4

    @property
    def pays(self) -> bool:
        """Whether it takes less time than the direct form: whether what it multiplies less is worth its transforms.

        Those of activations grow with I + O where products grow with I·O; those of the kernel are the same however few
        places there are. Both limits are from `benchmarks/device/convolutions.py` (docs/decisions/200).
        """
        (height, width), axis = self.plane, self._forth.inputs
        points, tiles = (int(np.prod(sizes)) for sizes in (axis.points, axis.tiles))
        saved = self.batch * (_TAPS * _TAPS * height * width - points * tiles)  # products for each number of the kernel
        enough_channels = self.inputs * self.outputs >= _CHANNELS * (self.inputs + self.outputs)
        return enough_channels and saved >= _SAVED * points

    def forward(self, graph: Graph, x: str, w: str) -> str:
        """y, in the order that activations have here."""
        values = self._values(graph, x, self.inputs, self._forth.inputs)
        kernel = self._kernel(graph, w, self._forth, x)
        if self.is_channel_major:
            product = graph.op("MatMul", kernel, values)
        else:
            product = graph.op("MatMul", values, graph.transpose(kernel, (0, 2, 1)))
        return self._places(graph, product, self.outputs, self._forth.outputs)

    def input_gradient(self, graph: Graph, grad: str, w: str) -> str:
        """∂x of grad (B, O, H, W), in the order that activations have here."""
        values, kernel = (
            self._values(graph, grad, self.outputs, self._back.outputs),
            self._kernel(graph, w, self._back, grad),
        )
        if self.is_channel_major:
            product = graph.op("MatMul", graph.transpose(kernel, (0, 2, 1)), values)
        else:
            product = graph.op("MatMul", values, kernel)
        return self._places(graph, product, self.inputs, self._back.inputs)

    def weight_gradient(self, graph: Graph, grad: str, x: str) -> str:
        """∂w (O, I, 3, 3)."""
        left = self._values(graph, grad, self.outputs, self._back.outputs)
        right = self._values(graph, x, self.inputs, self._back.inputs)
        if self.is_channel_major:
            product = graph.op("MatMul", left, graph.transpose(right, (0, 2, 1)))
        else:
            product = graph.op("MatMul", graph.transpose(left, (0, 2, 1)), right)
        flat = graph.reshape(product, (len(self._back.kernel), self.outputs * self.inputs))
        shape = (self.outputs * self.inputs, _TAPS * _TAPS)
        taps = graph.product(flat, _constant(graph, self._back.kernel), shape, transA=1)
        return graph.reshape(taps, (self.outputs, self.inputs, _TAPS, _TAPS))

    @cached_property
    def _forth(self) -> _Axes:
        return _Axes.of(_Line.of(self.plane[0]), _Line.of(self.plane[1]))

    @cached_property
    def _back(self) -> _Axes:
        return _Axes.of(_Line.of(self.plane[0]).reversed(), _Line.of(self.plane[1]).reversed())

    def _kernel(self, graph: Graph, w: str, axes: _Axes, after: str) -> str:
        """w at every point: (points, O, I).

        Args:
            after: an activation (rank 4) that must be there first. Weights are there from the start, and ONNX Runtime
                would have every layer's values at once. A Gemm with β = 0 waits for a C that it does not add.
        """
        flat = graph.reshape(w, (self.outputs * self.inputs, _TAPS * _TAPS))
        first = graph.reshape(graph.slice(after, range(4), [0] * 4, [1] * 4), (1,))
        values = graph.op("Gemm", _constant(graph, axes.kernel), flat, first, transB=1, beta=0.0)
        return graph.reshape(values, (len(axes.kernel), self.outputs, self.inputs))

    def _values(self, graph: Graph, x: str, channels: int, axis: _Pair) -> str:
        """x at every point: (points, tiles·B, C), or channel-major (points, C, tiles·B)."""
        (height, width), lead = self.plane, self.batch * channels
        points, tiles = axis.points, axis.tiles
        if self.is_channel_major:
            both = _constant(graph, axis.whole)
            values = graph.op("Gemm", both, graph.reshape(x, (lead, height * width)), transB=1)
            if tiles[0] * tiles[1] == 1:
                return graph.reshape(values, (points[0] * points[1], channels, self.batch))
            apart = graph.reshape(values, (points[0] * points[1], tiles[0] * tiles[1], channels, self.batch))
            shape = (points[0] * points[1], channels, tiles[0] * tiles[1] * self.batch)
            return graph.reshape(graph.transpose(apart, (0, 2, 1, 3)), shape)
        columns = graph.op("Gemm", _constant(graph, axis.columns), graph.reshape(x, (lead * height, width)), transB=1)
        rest = points[1] * tiles[1] * lead
        values = graph.op("Gemm", _constant(graph, axis.rows), graph.reshape(columns, (rest, height)), transB=1)
        apart = graph.reshape(values, (points[0], tiles[0], points[1], tiles[1], lead))
        shape = (points[0] * points[1], tiles[0] * tiles[1] * self.batch, channels)
        return graph.reshape(graph.transpose(apart, (0, 2, 1, 3, 4)), shape)

    def _places(self, graph: Graph, products: str, channels: int, axis: _Pair) -> str:
        """The adjoint of `_values`: (points, tiles·B, C) → (B, C, H, W), or the same channel-major."""
        (height, width), lead = self.plane, self.batch * channels
        points, tiles = axis.points, axis.tiles
        if self.is_channel_major:
            if tiles[0] * tiles[1] > 1:
                apart = graph.reshape(products, (points[0] * points[1], channels, tiles[0] * tiles[1], self.batch))
                products = graph.transpose(apart, (0, 2, 1, 3))
            flat = graph.reshape(products, (len(axis.whole), lead))
            places = graph.op("Gemm", flat, _constant(graph, axis.whole), transA=1)
            return graph.reshape(places, (channels, self.batch, height, width))
        apart = graph.reshape(products, (points[0], points[1], tiles[0], tiles[1], lead))
        together = graph.transpose(apart, (0, 2, 1, 3, 4))
        rest = points[1] * tiles[1] * lead
        rows = graph.op(
            "Gemm",
            graph.reshape(together, (points[0] * tiles[0], rest)),
            _constant(graph, axis.rows),
            transA=1,
        )
        columns = graph.op(
            "Gemm",
            graph.reshape(rows, (points[1] * tiles[1], lead * height)),
            _constant(graph, axis.columns),
            transA=1,
        )
        return graph.reshape(columns, (self.batch, channels, height, width))


@dataclass(frozen=True)
class _Pair:
    """What acts on rows and on columns: each (points·tiles, extent)."""

    rows: Matrix
    columns: Matrix
    points: tuple[int, int]
    tiles: tuple[int, int]

    @classmethod
    def of(cls, rows: Matrix, columns: Matrix) -> _Pair:
        """Of (points, tiles, extent) each."""
        flat = rows.reshape(-1, rows.shape[2]), columns.reshape(-1, columns.shape[2])
        return cls(*flat, (rows.shape[0], columns.shape[0]), (rows.shape[1], columns.shape[1]))

    @cached_property
    def whole(self) -> Matrix:
        """Both in one: (points · points · tiles · tiles, H·W)."""
        (p, q), (t, u) = self.points, self.tiles
        rows, columns = self.rows.reshape(p, t, -1), self.columns.reshape(q, u, -1)
        return np.einsum("pty,qux->pqtuyx", rows, columns).reshape(p * q * t * u, -1)


@dataclass(frozen=True)
class _Axes:
    """The three transforms of a plane."""

    inputs: _Pair
    outputs: _Pair
    kernel: Matrix  # (points · points, 9)

    @classmethod
    def of(cls, rows: _Line, columns: _Line) -> _Axes:
        kernel = np.einsum("pi,qj->pqij", rows.kernel, columns.kernel).reshape(-1, _TAPS * _TAPS)
        return cls(_Pair.of(rows.inputs, columns.inputs), _Pair.of(rows.outputs, columns.outputs), kernel)


def _constant(graph: Graph, matrix: Matrix) -> str:
    return graph.constant(np.ascontiguousarray(matrix, dtype=np.float32))

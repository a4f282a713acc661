"""Sliding windows as plain ONNX nodes: cutting a plane into its taps, and the adjoint, adding taps back into a plane.

A window of kh × kw cells slides over planes of H × W and stops at OH × OW places. *Tap* (i, j) is the plane of OH × OW
values that cell (i, j) sees. Three things need taps: the weight gradient of a convolution (a matrix product with all
of them), its input gradient (their adjoint), and max pooling's gradient. Two ways of cutting are emitted:

    small planes   one product with a constant 0/1 matrix S (H·W, taps·OH·OW); its transpose is the adjoint
    large planes   one strided Slice per tap; the adjoint adds padded taps, phase by phase of the stride

Both leave the two leading axes, (B, C) or (C, B), untouched.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protofleet.export.graphs.graph_builder import Graph

__all__ = ["Window", "fold", "tap_matrix", "taps"]

_SMALL_MATRIX = 16_384  # elements of S up to which the product is cheaper than slicing (docs/decisions/011)


@dataclass(frozen=True)
class Window:
    """A sliding window over planes.

    Attributes:
        kernel, stride, padding, dilation: (rows, columns).
        plane: (H, W) of the input.
        places: (OH, OW) of the output.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    plane: tuple[int, int]
    places: tuple[int, int]

    @property
    def cells(self) -> list[tuple[int, int]]:
        """(i, j) of every tap, row by row."""
        return [(i, j) for i in range(self.kernel[0]) for j in range(self.kernel[1])]

    @property
    def is_small(self) -> bool:
        """Whether the 0/1 matrix is the better way."""
        return int(np.prod(self.plane) * np.prod(self.places)) * len(self.cells) <= _SMALL_MATRIX

    def offset(self, cell: int, axis: int) -> int:
        """Where a cell's row (axis 0) or column (axis 1) starts in the padded plane."""
        return cell * self.dilation[axis]

    def padded(self, axis: int) -> int:
        """The extent that the windows reach over, padding included."""
        reach = (self.places[axis] - 1) * self.stride[axis] + (self.kernel[axis] - 1) * self.dilation[axis] + 1
        return max(reach, self.plane[axis] + self.padding[axis])


def tap_matrix(window: Window) -> NDArray[np.float32]:
    """The 0/1 matrix S (taps, H·W, OH·OW): S[t, p, q] = 1 where place q sees pixel p through tap t."""
    (h, w), (oh, ow) = window.plane, window.places
    matrix = np.zeros((len(window.cells), h, w, oh, ow), dtype=np.float32)
    rows, columns = np.arange(oh), np.arange(ow)
    for t, (i, j) in enumerate(window.cells):
        y = rows * window.stride[0] + window.offset(i, 0) - window.padding[0]  # (OH,)
        x = columns * window.stride[1] + window.offset(j, 1) - window.padding[1]  # (OW,)
        fits_y, fits_x = (y >= 0) & (y < h), (x >= 0) & (x < w)
        a, b = np.meshgrid(rows[fits_y], columns[fits_x], indexing="ij")
        matrix[t, y[fits_y][:, None], x[fits_x][None, :], a, b] = 1.0
    return matrix.reshape(len(window.cells), h * w, oh * ow)


def taps(
    graph: Graph, name: str, window: Window, cells: list[tuple[int, int]] | None = None, fill: float = 0.0
) -> list[str]:
    """Cut planes (A, B, H, W) into taps, each (A, B, OH, OW), by slicing.

    Args:
        cells: which taps; all when None.
        fill: the value outside the plane.
    """
    (h, w), (ph, pw) = window.plane, window.padding
    bottom, right = window.padded(0) - h - ph, window.padded(1) - w - pw
    if ph or pw or bottom or right:
        pads = graph.ints([0, 0, ph, pw, 0, 0, bottom, right])
        name = graph.op("Pad", name, pads, *([graph.scalar(fill)] if fill else []))
    return [_tap(graph, name, window, cell) for cell in (window.cells if cells is None else cells)]


def _tap(graph: Graph, name: str, window: Window, cell: tuple[int, int]) -> str:
    starts = [window.offset(cell[axis], axis) for axis in (0, 1)]
    if starts == [0, 0] and window.stride == (1, 1) and (window.padded(0), window.padded(1)) == window.places:
        return name
    ends = [starts[axis] + (window.places[axis] - 1) * window.stride[axis] + 1 for axis in (0, 1)]
    return graph.slice(name, [2, 3], starts, ends, window.stride)


def fold(graph: Graph, planes: list[str], window: Window, lead: tuple[int, int]) -> str:
    """The adjoint of `taps`: add each tap's plane (A, B, OH, OW) back where it was cut from → (A, B, H, W).

    Args:
        lead: (A, B).
    """
    (sy, sx), (oh, ow) = window.stride, window.places
    grid = [-(-max(window.padded(axis), 1) // window.stride[axis]) for axis in (0, 1)]  # phase rows, phase columns
    phases: dict[tuple[int, int], list[str]] = {(a, b): [] for a in range(sy) for b in range(sx)}
    for (i, j), plane in zip(window.cells, planes, strict=True):
        top, phase_y = divmod(window.offset(i, 0), sy)
        left, phase_x = divmod(window.offset(j, 1), sx)
        pads = [0, 0, top, left, 0, 0, grid[0] - oh - top, grid[1] - ow - left]
        phases[phase_y, phase_x].append(graph.op("Pad", plane, graph.ints(pads)) if any(pads) else plane)
    shape = (*lead, *grid)
    sums = [_total(graph, parts, shape) for parts in phases.values()]
    whole = sums[0] if len(sums) == 1 else _interleave(graph, sums, (sy, sx), shape)
    (h, w), (ph, pw) = window.plane, window.padding
    if (ph, pw, h, w) == (0, 0, grid[0] * sy, grid[1] * sx):
        return whole
    return graph.slice(whole, [2, 3], [ph, pw], [ph + h, pw + w])


def _total(graph: Graph, parts: list[str], shape: tuple[int, ...]) -> str:
    if not parts:
        return graph.expand(graph.scalar(0.0), shape)
    return parts[0] if len(parts) == 1 else graph.op("Sum", *parts)


def _interleave(graph: Graph, phases: list[str], stride: tuple[int, int], shape: tuple[int, ...]) -> str:
    """Phases, each (A, B, R, Q), to the plane (A, B, R·sy, Q·sx) whose pixel (r·sy + a, q·sx + b) is phase (a, b)'s.

    Columns first, rows after: each alone moves blocks, both at once move single numbers. The axis that is moved is the
    first, so that each is one transposition of a matrix: ONNX Runtime starts its threads once for each of them, and for
    an axis further in as often as there are planes.
    """
    (a, b, rows, columns), (sy, sx) = shape, stride
    by_columns = [phases[y * sx + x] for x in range(sx) for y in range(sy)]
    joined = graph.op("Concat", *by_columns, axis=0)  # (sx·sy·A, B, R, Q)
    if sx > 1:
        joined = graph.transpose(graph.reshape(joined, (sx, sy * a * b * rows * columns)), (1, 0))
    if sy > 1:
        joined = graph.transpose(graph.reshape(joined, (sy, a * b * rows, columns * sx)), (1, 0, 2))
    return graph.reshape(joined, (a, b, rows * sy, columns * sx))

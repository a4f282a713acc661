"""How many elements an operator works through at one go: those that lie side by side until it has to look up where the
next ones are.

A runtime copies, adds and sums in runs. A transposition that keeps the last axis moves whole rows, one that turns it
moves single numbers; a sum of an activation and one number for each channel begins anew at each channel. The run says
why one and the same number of elements takes three times as long in another shape.

    broadcast        trailing axes along which each operand is either whole or repeated
    transpose        trailing axes that stay in their place
    cut, joined      trailing axes that are taken whole, and what is taken of the axis before them; every second
                     number of the last axis is one by itself
    padded           trailing axes that are taken whole, and the one before them; a row, where something is cut off
    reduced          the trailing axes that are summed, or that are kept
    batch norm       the places of one channel
    anything else    all of it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from protofleet.hw_profiles.workload.model import Tensor

if TYPE_CHECKING:
    from onnx import NodeProto

__all__ = ["span_of"]

_CUT = frozenset(("Slice", "Split", "Concat"))
_REPEAT = frozenset(("Expand", "Tile"))
_BY_CHANNEL = frozenset(("BatchNormalization", "InstanceNormalization"))
Shape = Sequence[int]


def span_of(node: NodeProto, tensors: Mapping[str, Tensor], constants: Mapping[str, object]) -> int:
    """Elements in one run of what the node reads or writes; at least 1.

    Args:
        constants: values of small constants by name, among them the steps of a slice.
    """
    shapes = [tensors[name].shape for name in node.input if name in tensors]
    written = next((tensors[name].shape for name in node.output if name in tensors), ())
    if not shapes:
        return max(1, prod(written))
    first = shapes[0]
    if node.op_type == "Transpose":
        span = _kept(first, _order(node, len(first)))
    elif node.op_type == "Pad":
        span = _padded(node, first, written, constants)
    elif node.op_type == "Slice" and _skips(node, constants):
        span = 1
    elif node.op_type in _CUT:
        span = _whole(first, written)
    elif node.op_type in _REPEAT:
        span = _repeated(first, written)
    elif node.op_type.startswith("Reduce"):
        span = _reduced(first, written)
    elif node.op_type in _BY_CHANNEL:
        span = prod(first[2:])
    else:
        span = min((_repeated(shape, written) for shape in shapes), default=1)
    return max(1, span)


def _skips(node: NodeProto, constants: Mapping[str, object]) -> bool:
    steps = constants.get(node.input[4]) if len(node.input) > 4 else None
    return steps is not None and any(int(step) != 1 for step in np.atleast_1d(steps))  # type: ignore[call-overload]


def _padded(node: NodeProto, shape: Shape, written: Shape, constants: Mapping[str, object]) -> int:
    pads = np.ravel(constants.get(node.input[1], 1) if len(node.input) > 1 else 1)  # type: ignore[call-overload]
    if len(pads) != 2 * len(shape) or (pads < 0).any():
        return written[-1] if written else 1
    span = 1
    for axis in reversed(range(len(shape))):
        span *= shape[axis]
        if pads[axis] or pads[axis + len(shape)]:
            break
    return span


def _order(node: NodeProto, rank: int) -> list[int]:
    return next((list(a.ints) for a in node.attribute if a.name == "perm"), list(reversed(range(rank))))


def _kept(shape: Shape, order: Sequence[int]) -> int:
    order = [axis for axis in order if shape[axis] > 1]
    last = [axis for axis in range(len(shape)) if shape[axis] > 1]
    span = 1
    while order and order[-1] == last[-1]:
        span *= shape[order.pop()]
        last.pop()
    return span


def _whole(shape: Shape, written: Shape) -> int:
    """Of two shapes of one rank, the trailing axes that agree, and the shorter of the axis before them."""
    span = 1
    for one, other in zip(reversed(shape), reversed(written), strict=False):
        span *= min(one, other)
        if one != other:
            break
    return span


def _reduced(shape: Shape, written: Shape) -> int:
    """The trailing axes of one kind: of those that stay, or of those that go."""
    stays = _trailing(shape, written)
    return stays if stays > 1 else prod(shape) // max(1, prod(written))


def _trailing(shape: Shape, written: Shape) -> int:
    span = 1
    for one, other in zip(reversed(shape), reversed(written), strict=False):
        if one != other:
            break
        span *= one
    return span


def _repeated(shape: Shape, written: Shape) -> int:
    """The trailing axes along which `shape` is whole, or along which it is repeated."""
    if prod(shape) == 1 or not written:
        return max(1, prod(written))
    padded = [1] * (len(written) - len(shape)) + list(shape)
    span, kind = 1, None
    for one, other in zip(reversed(padded), reversed(written), strict=False):
        if other == 1:
            continue
        if kind is not None and (one == other) is not kind:
            break
        kind = one == other
        span *= other
    return span

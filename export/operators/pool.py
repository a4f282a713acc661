"""Translations of pooling and its gradients.

Max pooling's gradient goes to the first largest cell of each window, as in torch. It is made of taps and exact
comparisons rather than of ONNX MaxPool's index output, whose kernel in ONNX Runtime is twenty times slower than plain
MaxPool (1.50 against 0.07 ms for 16×32×28×28): walking the taps in order, a gradient stays with the first tap that
equals the maximum and what is left goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from protofleet.export.graphs.windows import Window, fold, tap_matrix, taps
from protofleet.export.operators.elementwise import STEEP, positive
from protofleet.export.operators.emitter import Emitter
from protofleet.export.operators.translation import ChannelMajor, Meta, Value, translates

__all__: list[str] = []

aten = torch.ops.aten
_LOWEST = float(np.finfo(np.float32).min)


def _pair(values: Sequence[int]) -> tuple[int, int]:
    return (values[0], values[-1])


def _window(a: tuple[int, ...], out: tuple[int, ...], kernel: Any, stride: Any, padding: Any, dilation: Any) -> Window:
    return Window(_pair(kernel), _pair(stride or kernel), _pair(padding), _pair(dilation), _pair(a[2:]), _pair(out[2:]))


def _either(e: Emitter, *values: Value) -> tuple[bool, list[str]]:
    """All values in one order: pooling does not care which of the leading axes is the batch."""
    swapped = e.prefers_channel_major(values)
    return swapped, [e.channel_major(v) if swapped else e.plain(v) for v in values]


def _lead(value: Value, swapped: bool) -> tuple[int, int]:
    return (value.shape[1], value.shape[0]) if swapped else (value.shape[0], value.shape[1])


def _ordered(swapped: bool, name: str) -> str:
    return ChannelMajor(name) if swapped else name


def _end_pads(window: Window) -> list[int]:
    """ONNX pads [top, left, bottom, right] that give exactly the window's places, rounding up included."""
    ends = []
    for axis in (0, 1):
        reach = (window.places[axis] - 1) * window.stride[axis] + (window.kernel[axis] - 1) * window.dilation[axis] + 1
        ends.append(max(0, reach - window.plane[axis] - window.padding[axis]))
    return [*window.padding, *ends]


def _max_pool_node(e: Emitter, name: str, window: Window) -> str:
    return e.op(
        "MaxPool",
        name,
        kernel_shape=list(window.kernel),
        strides=list(window.stride),
        pads=_end_pads(window),
        dilations=list(window.dilation),
    )


@translates(aten.max_pool2d_with_indices.default)
def _max_pool(
    e: Emitter,
    out: tuple[Meta, ...],
    a: Value,
    kernel: Any,
    stride: Any = (),
    padding: Any = (0, 0),
    dilation: Any = (1, 1),
    ceil_mode: bool = False,
) -> tuple[str, None]:
    swapped, (name,) = _either(e, a)
    window = _window(a.shape, out[0].shape, kernel, stride, padding, dilation)
    return _ordered(swapped, _max_pool_node(e, name, window)), None


@translates(aten.max_pool2d_with_indices_backward.default)
def _max_pool_backward(
    e: Emitter,
    out: Meta,
    grad: Value,
    a: Value,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    indices: Any,
) -> str:
    swapped, (x, go) = _either(e, a, grad)
    window = _window(a.shape, grad.shape, kernel, stride, padding, dilation)
    if window.kernel == window.stride == (2, 2) and window.plane == (2 * window.places[0], 2 * window.places[1]):
        return _ordered(swapped, _halves_backward(e, x, go, window, _lead(a, swapped)))
    largest = _max_pool_node(e, x, window)
    cut = taps(e.graph, x, window, fill=_LOWEST)
    left, shares = go, []
    for tap in cut[:-1]:
        differs = e.op("HardSigmoid", e.op("Sub", largest, tap), alpha=STEEP, beta=0.0)  # 1 where tap < largest
        onward = e.op("Mul", left, differs)
        shares.append(e.op("Sub", left, onward))
        left = onward
    return _ordered(swapped, fold(e.graph, [*shares, left], window, _lead(a, swapped)))


def _halves_backward(e: Emitter, x: str, go: str, window: Window, lead: tuple[int, int]) -> str:
    """Max pooling by 2 × 2: first which row of a window, then which column, each taking the first where both are equal.

    That is the order of the taps, at half the passes: columns are split and joined once, by a transpose.
    """
    graph, (oh, ow), planes = e.graph, window.places, lead[0] * lead[1]
    columns = graph.transpose(graph.reshape(x, (planes * 2 * oh * ow, 2)), (1, 0))
    left, right = graph.ops("Split", columns, graph.ints([1, 1]), outputs=2, axis=0)
    rows = graph.reshape(e.op("Max", left, right), (planes * oh, 2, ow))
    top, bottom = graph.ops("Split", rows, graph.ints([1, 1]), outputs=2, axis=1)
    share = graph.reshape(go, (planes * oh, 1, ow))
    low = e.op("Mul", share, positive(e, e.op("Sub", bottom, top)))
    both = graph.op("Concat", e.op("Sub", share, low), low, axis=1)  # (planes·OH, 2, OW)
    spread = graph.reshape(both, (1, planes * 2 * oh * ow))
    second = e.op("Mul", spread, positive(e, e.op("Sub", right, left)))
    joined = graph.op("Concat", e.op("Sub", spread, second), second, axis=0)
    return graph.reshape(graph.transpose(joined, (1, 0)), (*lead, *window.plane))


@translates(aten.avg_pool2d.default)
def _avg_pool(
    e: Emitter,
    out: Meta,
    a: Value,
    kernel: Any,
    stride: Any = (),
    padding: Any = (0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> str:
    swapped, (name,) = _either(e, a)
    window = _window(a.shape, out.shape, kernel, stride, padding, (1, 1))
    divisors = _divisors(window, count_include_pad, divisor)  # (OH, OW)
    if window.is_small:
        weights = tap_matrix(window).sum(axis=0) / divisors.reshape(-1)  # (H·W, OH·OW)
        return _ordered(swapped, _planes_times(e, name, weights, _lead(a, swapped), window.places))
    sums = e.op("Sum", *taps(e.graph, name, window))
    return _ordered(swapped, e.op("Div", sums, e.graph.constant(divisors)))


@translates(aten.avg_pool2d_backward.default)
def _avg_pool_backward(
    e: Emitter,
    out: Meta,
    grad: Value,
    a: Value,
    kernel: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> str:
    swapped, (go,) = _either(e, grad)
    window = _window(a.shape, grad.shape, kernel, stride, padding, (1, 1))
    divisors = _divisors(window, count_include_pad, divisor)
    if window.is_small:
        weights = tap_matrix(window).sum(axis=0) / divisors.reshape(-1)
        return _ordered(swapped, _planes_times(e, go, weights.T, _lead(a, swapped), window.plane))
    share = e.op("Div", go, e.graph.constant(divisors))
    return _ordered(swapped, fold(e.graph, [share] * len(window.cells), window, _lead(a, swapped)))


def _divisors(window: Window, count_include_pad: bool, divisor: int | None) -> np.ndarray:
    """How many cells each place averages (OH, OW), float32; cells past the padding never count."""
    if divisor:
        return np.full(window.places, divisor, dtype=np.float32)
    counts = []
    for axis in (0, 1):
        starts = np.arange(window.places[axis]) * window.stride[axis] - window.padding[axis]
        limit = window.plane[axis] + (window.padding[axis] if count_include_pad else 0)
        low = starts if count_include_pad else np.maximum(starts, 0)
        counts.append(np.minimum(starts + window.kernel[axis], limit) - low)
    return np.multiply.outer(*counts).astype(np.float32)


def _bins(plane: tuple[int, int], places: tuple[int, int]) -> np.ndarray:
    """Adaptive averaging as a matrix (H·W, OH·OW), float32."""
    axes = []
    for size, bins in zip(plane, places, strict=True):
        weights = np.zeros((size, bins))
        for k in range(bins):
            low, high = (k * size) // bins, -(-((k + 1) * size) // bins)
            weights[low:high, k] = 1.0 / (high - low)
        axes.append(weights)
    return np.kron(axes[0], axes[1]).astype(np.float32)


def _planes_times(e: Emitter, name: str, weights: np.ndarray, lead: tuple[int, int], plane: tuple[int, ...]) -> str:
    """Each flattened plane times a constant matrix (pixels in, pixels out), as planes again."""
    flat = e.graph.reshape(name, (*lead, weights.shape[0]))
    product = e.op("MatMul", flat, e.graph.constant(np.ascontiguousarray(weights)))
    return e.graph.reshape(product, (*lead, *plane))


@translates(aten._adaptive_avg_pool2d.default)
def _adaptive(e: Emitter, out: Meta, a: Value, size: Any) -> str:
    swapped, (name,) = _either(e, a)
    weights = _bins(_pair(a.shape[2:]), _pair(out.shape[2:]))
    return _ordered(swapped, _planes_times(e, name, weights, _lead(a, swapped), out.shape[2:]))


@translates(aten._adaptive_avg_pool2d_backward.default)
def _adaptive_backward(e: Emitter, out: Meta, grad: Value, a: Value) -> str:
    swapped, (go,) = _either(e, grad)
    weights = _bins(_pair(a.shape[2:]), _pair(grad.shape[2:])).T
    return _ordered(swapped, _planes_times(e, go, weights, _lead(a, swapped), out.shape[2:]))

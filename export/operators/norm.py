"""Translations of normalisation: batch (over the real samples), group and layer, with their gradients.

Batch normalisation works channel-major, where each channel's B·H·W values are one row. Sums over a row, weighted by
which samples are real, are then products with a vector, one pass each. The forward pass and the gradient ask for the
same centred values, and the graph builder gives them the same nodes. Variances are always those of centred values:
the one-pass formula E[x²] − E[x]² loses what float32 has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from protofleet.export.graphs import blocked_kernels
from protofleet.export.modules import norms, preprocess  # noqa: F401  they register protofleet::batch_norm and protofleet::preprocess
from protofleet.export.operators.emitter import Emitter
from protofleet.export.operators.translation import Meta, Rows, Value, refusal, translates

__all__: list[str] = []

aten = torch.ops.aten
_MANY_POSITIONS = 32  # of a sample, from which on they are added up sample by sample


def _rows(e: Emitter, value: Value) -> str:
    """A (B, C, H, W) or (B, C) tensor as rows (1, C, B·H·W)."""
    if len(value.shape) == 2:
        return e.graph.reshape(e.graph.transpose(e.plain(value), (1, 0)), (1, *value.shape[::-1]))
    return e.rows(value)


def _from_rows(e: Emitter, name: str, shape: Sequence[int]) -> str:
    if len(shape) == 2:
        return e.graph.transpose(e.graph.reshape(name, shape[::-1]), (1, 0))
    return Rows(name)


def _shares(e: Emitter, real: Value, positions: int) -> str:
    """(B, 1): 1/n for real samples, where n is how many values per channel they have, and 0 for padding."""
    total = e.op("ReduceSum", e.plain(real), e.graph.ints([0]), keepdims=1)
    count = e.op("Max", e.op("Mul", total, e.graph.scalar(float(positions))), e.graph.scalar(1.0))
    return e.graph.reshape(e.op("Div", e.plain(real), count), (real.shape[0], 1))


def _row_sums(e: Emitter, rows: str, weights: str, sizes: tuple[int, int, int]) -> str:
    """Σ over each row, weighted by sample: (1, C, B·P) and (B, 1) → (C,); `sizes` is C, B, P.

    Where a sample has many positions they are added up first, which reads each value once and fast. Where it has few,
    a product with a column is quicker.
    """
    channels, batch, positions = sizes
    if positions >= _MANY_POSITIONS:
        by_sample = blocked_kernels.sums_by_sample(e.graph, rows, *sizes)
        return e.graph.reshape(e.op("MatMul", by_sample, weights), (channels,))
    column = e.graph.reshape(blocked_kernels.by_position(e.graph, weights, batch, positions), (batch * positions, 1))
    return e.graph.reshape(e.op("MatMul", rows, column), (channels,))


def _inverse_root(e: Emitter, variance: str, eps: float) -> str:
    return e.op("Reciprocal", e.op("Sqrt", e.op("Add", variance, e.graph.scalar(eps))))


def _centred(e: Emitter, rows: str, mean: str, count: int) -> str:
    """x − mean, one mean per row, as `Emitter.affine`."""
    ones, zeros = e.filled(count, 1.0), e.filled(count, 0.0)
    return e.op("BatchNormalization", rows, ones, zeros, mean, ones, epsilon=0.0)


@translates(torch.ops.protofleet.preprocess.default)
def _preprocess(e: Emitter, out: Meta, x: Value, mean: Sequence[float], std: Sequence[float]) -> str:
    planes = e.graph.cast(e.graph.transpose(e.plain(x), (0, 3, 1, 2)), torch.float32)
    centre = 255.0 * np.asarray(mean, dtype=np.float64)
    variance = (255.0 * np.asarray(std, dtype=np.float64)) ** 2
    statistics = [e.graph.constant(v, np.float32) for v in (centre, variance)]
    ones, zeros = (e.filled(len(centre), v) for v in (1.0, 0.0))
    return e.op("BatchNormalization", planes, ones, zeros, *statistics, epsilon=0.0)


@translates(torch.ops.protofleet.batch_norm.default)
def _batch_norm(
    e: Emitter, out: tuple[Meta, ...], x: Value, weight: Value, bias: Value, real: Value, eps: float
) -> tuple[str, str, str]:
    channels, sizes = x.shape[1], _sizes(x)
    rows, shares = _rows(e, x), _shares(e, real, sizes[2])
    mean = _row_sums(e, rows, shares, sizes)
    centred = _centred(e, rows, mean, channels)
    variance = _row_sums(e, e.op("Mul", centred, centred), shares, sizes)
    scale = e.op("Mul", e.plain(weight), _inverse_root(e, variance, eps))
    y = e.affine(centred, scale, e.plain(bias), channels)
    return _from_rows(e, y, x.shape), mean, variance


@translates(torch.ops.protofleet.batch_norm_backward.default)
def _batch_norm_backward(
    e: Emitter,
    out: tuple[Meta, ...],
    grad: Value,
    x: Value,
    weight: Value,
    mean: Value,
    variance: Value,
    real: Value,
    eps: float,
) -> tuple[str | Value, str, str]:
    """∂x = w·r·(g − (Σg + x̂·Σg·x̂)·share), with x̂ = r·centred; share is 1/n on real samples and 0 on padding.

    The last product, with w·r, is left to the convolution that the gradient goes to, where there is one.
    """
    channels, batch, positions = sizes = _sizes(x)
    go, shares = _rows(e, grad), _shares(e, real, positions)
    centred = _centred(e, _rows(e, x), e.plain(mean), channels)
    root = _inverse_root(e, e.plain(variance), eps)  # (C,)
    ones = e.graph.reshape(e.filled(batch, 1.0), (batch, 1))
    grad_bias = _row_sums(e, go, ones, sizes)
    grad_weight = e.op("Mul", _row_sums(e, e.op("Mul", go, centred), ones, sizes), root)
    along = e.op("Mul", grad_weight, root)
    if (
        positions >= _MANY_POSITIONS and not e.graph.lanes
    ):  # one factor and one shift per channel and sample, in which shares are
        row = e.graph.reshape(e.op("Neg", shares), (1, batch))
        vectors = [e.op("MatMul", e.graph.reshape(v, (channels, 1)), row) for v in (along, grad_bias)]
        count = channels * batch
        flat = e.graph.reshape(centred, (1, count, positions))
        pull = e.affine(flat, *(e.graph.reshape(v, (count,)) for v in vectors), count)
        inner = e.op("Add", go, e.graph.reshape(pull, (1, channels, batch * positions)))
    else:
        pull = e.affine(centred, along, grad_bias, channels)
        inner = e.op("Sub", go, e.op("Mul", pull, blocked_kernels.by_position(e.graph, shares, batch, positions)))
    outer = e.op("Mul", e.plain(weight), root)
    if len(x.shape) == 4:
        return Value(x.shape, x.dtype, unscaled=inner, factor=outer), grad_weight, grad_bias
    gx = e.affine(inner, outer, e.filled(channels, 0.0), channels)
    return _from_rows(e, gx, x.shape), grad_weight, grad_bias


def _sizes(x: Value) -> tuple[int, int, int]:
    """Channels, samples, positions of a sample."""
    return x.shape[1], x.shape[0], int(np.prod(x.shape[2:]))


@translates(aten.native_group_norm.default)
def _group_norm(
    e: Emitter,
    out: tuple[Meta, ...],
    x: Value,
    weight: Value | None,
    bias: Value | None,
    b: int,
    c: int,
    positions: int,
    groups: int,
    eps: float,
) -> tuple[str, str, str]:
    if e.graph.any_batch:
        return _inference_group_norm(e, x, weight, bias, groups, eps), None, None
    inner = c // groups * positions
    flat = e.graph.reshape(e.plain(x), (b, groups, inner))
    mean = e.graph.reshape(e.op("ReduceMean", flat, e.graph.ints([2]), keepdims=1), (b, groups, 1))
    centred = e.op("Sub", flat, mean)
    variance = e.op("ReduceMean", e.op("Mul", centred, centred), e.graph.ints([2]), keepdims=1)
    root = _inverse_root(e, variance, eps)
    stats = (e.graph.reshape(mean, (b, groups)), e.graph.reshape(root, (b, groups)))
    if weight is None:
        return (e.graph.reshape(e.op("Mul", centred, root), x.shape), *stats)
    scale = _group_scale(e, root, weight, b, c, groups)  # (B, C, 1)
    shift = e.plain(bias) if bias is not None else e.graph.constant(np.zeros(c, dtype=np.float32))
    shifts = e.graph.expand(e.graph.reshape(shift, (1, c)), (b, c))
    rows = e.graph.reshape(centred, (1, b * c, positions))
    y = e.affine(rows, *(e.graph.reshape(v, (b * c,)) for v in (scale, shifts)), b * c)
    return (e.graph.reshape(y, x.shape), *stats)


def _inference_group_norm(e: Emitter, x: Value, weight: Any, bias: Any, groups: int, eps: float) -> str:
    """One fused kernel, InstanceNormalization over each group, then scale and shift."""
    b, c, *plane = x.shape
    flat = e.graph.reshape(e.plain(x), (b, groups, c // groups * int(np.prod(plane))))
    one, zero = (e.graph.constant(np.full(groups, v, dtype=np.float32)) for v in (1.0, 0.0))
    y = e.graph.reshape(e.op("InstanceNormalization", flat, one, zero, epsilon=eps), x.shape)
    column = (1, c, *[1] * len(plane))
    y = e.op("Mul", y, e.graph.reshape(e.plain(weight), column)) if weight is not None else y
    return e.op("Add", y, e.graph.reshape(e.plain(bias), column)) if bias is not None else y


@translates(aten.native_batch_norm.default, aten._native_batch_norm_legit_no_training.default)
def _inference_batch_norm(
    e: Emitter, out: tuple[Meta, ...], x: Value, weight: Any, bias: Any, mean: Value, variance: Value, *rest: Any
) -> tuple[str, None, None]:
    """With running statistics. Training statistics are refused: only protofleet::batch_norm keeps padding out."""
    training, eps = (rest[0], rest[-1]) if isinstance(rest[0], bool) else (False, rest[-1])
    if training:
        raise refusal(
            "batch normalisation outside a BatchNorm module", "nn.BatchNorm1d, nn.BatchNorm2d or GroupNorm modules"
        )
    scale = e.plain(weight) if weight is not None else e.filled(x.shape[1], 1.0)
    shift = e.plain(bias) if bias is not None else e.filled(x.shape[1], 0.0)
    y = e.op("BatchNormalization", e.plain(x), scale, shift, e.plain(mean), e.plain(variance), epsilon=float(eps))
    return y, None, None


def _group_scale(e: Emitter, root: str, weight: Value, b: int, c: int, groups: int) -> str:
    """w·r for every sample and channel: (B, C, 1)."""
    product = e.op("Mul", root, e.graph.reshape(e.plain(weight), (1, groups, c // groups)))
    return e.graph.reshape(product, (b, c, 1))


# arguments: the tensors of the operator
@translates(aten.native_group_norm_backward.default)
def _group_norm_backward(
    e: Emitter,
    out: tuple[Meta, ...],
    grad: Value,
    x: Value,
    mean: Value,
    root: Value,
    weight: Value | None,
    b: int,
    c: int,
    positions: int,
    groups: int,
    mask: Sequence[bool],
) -> tuple[str | None, str | None, str | None]:
    """∂x = r·(g·w − mean(g·w) − x̂·mean(g·w·x̂)), means over each group; all but one pass are on (B, C) sums."""
    inner = c // groups
    mean3 = e.graph.reshape(e.plain(mean), (b, groups, 1))
    root3 = e.graph.reshape(e.plain(root), (b, groups, 1))
    centred = e.op("Sub", e.graph.reshape(e.plain(x), (b, groups, inner * positions)), mean3)
    go = e.graph.reshape(e.plain(grad), (b, c, positions))
    rows = e.graph.reshape(centred, (b, c, positions))
    sums = e.op("ReduceSum", go, e.graph.ints([2]), keepdims=0)  # Σg (B, C)
    products = e.op("ReduceSum", e.op("Mul", go, rows), e.graph.ints([2]), keepdims=0)  # Σg·centred (B, C)
    grouped = [e.graph.reshape(t, (b, groups, inner)) for t in (sums, products)]
    scaled = e.op("Mul", grouped[1], root3)  # Σg·x̂
    grad_weight = e.op("ReduceSum", e.graph.reshape(scaled, (b, c)), e.graph.ints([0]), keepdims=0)
    grad_bias = e.op("ReduceSum", sums, e.graph.ints([0]), keepdims=0)
    w = e.graph.reshape(e.plain(weight), (1, groups, inner)) if weight is not None else e.graph.scalar(1.0)
    share = e.graph.scalar(1.0 / (inner * positions))
    mean_g, mean_gx = (
        e.op("Mul", e.op("ReduceSum", e.op("Mul", t, w), e.graph.ints([2]), keepdims=1), share)
        for t in (grouped[0], scaled)
    )  # (B, G, 1)
    along = e.op("Mul", e.op("Mul", root3, root3), mean_gx)
    flat = e.graph.reshape(centred, (1, b * groups, inner * positions))
    vectors = [e.graph.reshape(v, (b * groups,)) for v in (along, e.op("Mul", root3, mean_g))]
    pull = e.affine(flat, *vectors, b * groups)
    scale = e.graph.expand(e.op("Mul", root3, w), (b, groups, inner))
    gx = e.op("Sub", e.op("Mul", go, e.graph.reshape(scale, (b, c, 1))), e.graph.reshape(pull, (b, c, positions)))
    return e.graph.reshape(gx, x.shape), grad_weight, grad_bias


@translates(aten.native_layer_norm.default)
def _layer_norm(
    e: Emitter, out: tuple[Meta, ...], x: Value, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[str, str | None, str | None]:
    if e.graph.any_batch and weight is not None:  # inference: one kernel
        shift = [e.plain(bias)] if bias is not None else []
        axis = len(x.shape) - len(shape)
        return e.op("LayerNormalization", e.plain(x), e.plain(weight), *shift, axis=axis, epsilon=eps), None, None
    axes = e.graph.ints(range(len(x.shape) - len(shape), len(x.shape)))
    mean = e.op("ReduceMean", e.plain(x), axes, keepdims=1)
    centred = e.op("Sub", e.plain(x), mean)
    root = _inverse_root(e, e.op("ReduceMean", e.op("Mul", centred, centred), axes, keepdims=1), eps)
    y = e.op("Mul", centred, root)
    y = e.op("Mul", y, e.plain(weight)) if weight is not None else y
    y = e.op("Add", y, e.plain(bias)) if bias is not None else y
    return y, mean, root


@translates(aten.native_layer_norm_backward.default)
def _layer_norm_backward(
    e: Emitter,
    out: tuple[Meta, ...],
    grad: Value,
    x: Value,
    shape: Sequence[int],
    mean: Value,
    root: Value,
    weight: Value | None,
    bias: Value | None,
    mask: Sequence[bool],
) -> tuple[str, str | None, str | None]:
    lead = len(x.shape) - len(shape)
    axes, outer = e.graph.ints(range(lead, len(x.shape))), e.graph.ints(range(lead))
    normal = e.op("Mul", e.op("Sub", e.plain(x), e.plain(mean)), e.plain(root))
    go = e.plain(grad)
    inner = e.op("Mul", go, e.plain(weight)) if weight is not None else go
    mean_g = e.op("ReduceMean", inner, axes, keepdims=1)
    mean_gx = e.op("ReduceMean", e.op("Mul", inner, normal), axes, keepdims=1)
    gx = e.op("Mul", e.op("Sub", e.op("Sub", inner, mean_g), e.op("Mul", normal, mean_gx)), e.plain(root))
    grad_weight = e.op("ReduceSum", e.op("Mul", go, normal), outer, keepdims=0) if weight is not None else None
    return gx, grad_weight, e.op("ReduceSum", go, outer, keepdims=0) if bias is not None else None

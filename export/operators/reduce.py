"""Translations of sums, means, extremes, norms, softmaxes and matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from protofleet.export.operators.emitter import Emitter
from protofleet.export.operators.translation import ChannelMajor, Meta, Value, refusal, translates

__all__: list[str] = []

aten = torch.ops.aten


def _reduce(e: Emitter, kind: str, out: Meta, a: Value, dims: Sequence[int] | None, keepdim: bool) -> str:
    rank = len(a.shape)
    axes = sorted(d % rank for d in dims) if dims else list(range(rank))
    if not rank:
        return e.plain(a)
    swap = {0: 1, 1: 0}
    if e.prefers_channel_major([a]) and (keepdim or {0, 1} <= set(axes)):
        axes = sorted(swap.get(d, d) for d in axes)
        name = e.op(kind, _typed(e, a, out, True), e.graph.ints(axes), keepdims=int(keepdim))
        return ChannelMajor(name) if keepdim else name
    return e.op(kind, _typed(e, a, out, False), e.graph.ints(axes), keepdims=int(keepdim))


def _typed(e: Emitter, a: Value, out: Meta, swapped: bool) -> str:
    name = e.channel_major(a) if swapped else e.plain(a)
    return name if a.dtype == out.dtype else e.graph.cast(name, out.dtype)


@translates(aten.sum.dim_IntList)
def _sum(e: Emitter, out: Meta, a: Value, dims: Any, keepdim: bool = False, **_: Any) -> Any:
    if all(a.shape[d] == 1 for d in (dims or range(len(a.shape)))) and a.dtype == out.dtype:
        return e.graph.reshape(e.plain(a), out.shape)  # what broadcasting a single row leaves behind
    return _reduce(e, "ReduceSum", out, a, dims, keepdim)


@translates(aten.sum.default)
def _sum_all(e: Emitter, out: Meta, a: Value, **_: Any) -> str:
    return _reduce(e, "ReduceSum", out, a, None, False)


@translates(aten.mean.dim)
def _mean(e: Emitter, out: Meta, a: Value, dims: Any, keepdim: bool = False, **_: Any) -> str:
    return _reduce(e, "ReduceMean", out, a, dims, keepdim)


@translates(aten.mean.default)
def _mean_all(e: Emitter, out: Meta, a: Value, **_: Any) -> str:
    return _reduce(e, "ReduceMean", out, a, None, False)


@translates(aten.amax.default)
def _amax(e: Emitter, out: Meta, a: Value, dims: Sequence[int] = (), keepdim: bool = False) -> str:
    return _reduce(e, "ReduceMax", out, a, dims, keepdim)


@translates(aten.amin.default)
def _amin(e: Emitter, out: Meta, a: Value, dims: Sequence[int] = (), keepdim: bool = False) -> str:
    return _reduce(e, "ReduceMin", out, a, dims, keepdim)


@translates(aten.linalg_vector_norm.default)
def _vector_norm(
    e: Emitter, out: Meta, a: Value, order: float = 2, dims: Any = None, keepdim: bool = False, **_: Any
) -> str:
    if order not in (1, 2):
        raise refusal(f"vector norm of order {order}", "order 1 or 2")
    return _reduce(e, "ReduceL2" if order == 2 else "ReduceL1", out, a, dims, keepdim)


@translates(aten.mm.default, aten.bmm.default, aten.matmul.default, aten.mv.default, aten.dot.default)
def _matmul(e: Emitter, out: Meta, a: Value, b: Value) -> str:
    return e.op("MatMul", e.plain(a), e.graph.right_side(e.plain(b)))


@translates(aten.addmm.default)
def _addmm(e: Emitter, out: Meta, bias: Value, a: Value, b: Value, beta: float = 1, alpha: float = 1) -> str:
    return e.op("Gemm", e.plain(a), e.plain(b), e.plain(bias), alpha=float(alpha), beta=float(beta))


@translates(aten._softmax.default)
def _softmax(e: Emitter, out: Meta, a: Value, dim: int, half: bool) -> str:
    return e.op("Softmax", e.plain(a), axis=dim)


@translates(aten._safe_softmax.default)
def _safe_softmax(e: Emitter, out: Meta, a: Value, dim: int, dtype: Any = None) -> str:
    """A row of −∞ alone, a position that may look at nothing, is zeros and not NaN."""
    x = e.plain(a)
    top = e.op("ReduceMax", x, e.graph.ints([dim % len(out.shape)]), keepdims=1)
    has_any = e.op("Greater", top, e.graph.scalar(float("-inf")))
    return e.op("Where", has_any, e.op("Softmax", x, axis=dim), e.graph.scalar(0.0))


@translates(aten.baddbmm.default)
def _baddbmm(e: Emitter, out: Meta, bias: Value, a: Value, b: Value, beta: float = 1, alpha: float = 1) -> str:
    product = e.op("MatMul", e.plain(a), e.plain(b))
    scaled = product if alpha == 1 else e.op("Mul", product, e.graph.scalar(float(alpha)))
    shift = e.plain(bias) if beta == 1 else e.op("Mul", e.plain(bias), e.graph.scalar(float(beta)))
    return e.op("Add", scaled, shift)


@translates(aten._log_softmax.default)
def _log_softmax(e: Emitter, out: Meta, a: Value, dim: int, half: bool) -> str:
    return e.op("LogSoftmax", e.plain(a), axis=dim)


@translates(aten._log_softmax_backward_data.default)
def _log_softmax_backward(e: Emitter, out: Meta, grad: Value, result: Value, dim: int, dtype: Any) -> str:
    go = e.plain(grad)
    total = e.op("ReduceSum", go, e.graph.ints([dim % len(out.shape)]), keepdims=1)
    return e.op("Sub", go, e.op("Mul", e.op("Exp", e.plain(result)), total))


@translates(aten._softmax_backward_data.default)
def _softmax_backward(e: Emitter, out: Meta, grad: Value, result: Value, dim: int, dtype: Any) -> str:
    go, y = e.plain(grad), e.plain(result)
    weighted = e.op("Mul", go, y)
    total = e.op("ReduceSum", weighted, e.graph.ints([dim % len(out.shape)]), keepdims=1)
    return e.op("Sub", weighted, e.op("Mul", y, total))

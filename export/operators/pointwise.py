"""1×1 convolution of stride 1 and its gradients: products of matrices over all positions, whole or in runs.

Activations are rows (I, L) with L = B·H·W, the kernel is W (O, I):

    y = W·x            in runs of O: rows of W; from runs of I: sums over columns of W, added up by Gemm
    ∂x = Wᵀ·g          in the runs that x is in, from the runs that g is in
    ∂W = g·xᵀ          put together of one block for each run of g and of x

Gradients that come with a factor per channel (export/graphs/values.py) leave it to W and ∂W, where that is less work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from protofleet.export.graphs.values import Meta, Value
from protofleet.export.operators.channel_runs import spans

if TYPE_CHECKING:
    from protofleet.export.operators.emitter import Emitter

__all__ = ["forward", "gradients"]


def forward(e: Emitter, x: Value, w: Value, bias: Value | None, out: Meta) -> Value:
    """y (B, O, H, W), in runs of `e.run_channels` where that is set."""
    outputs, step = out.shape[1], e.run_channels or out.shape[1]
    matrix = e.graph.reshape(e.plain(w), w.shape[:2])
    runs = []
    for start in range(0, outputs, step):
        end = min(start + step, outputs)
        rows = _block(e, matrix, 0, (start, end), outputs)
        blocks = [_block(e, rows, 1, span, w.shape[1]) for span in spans(x)]
        y = _sum_of_products(e, blocks, [e.rows(run) for run in x.runs or (x,)], (end - start, _length(x)))
        if bias is not None:
            column = e.graph.reshape(_block(e, e.plain(bias), 0, (start, end), outputs), (end - start, 1))
            y = e.op("Add", y, column)
        runs.append(Value((out.shape[0], end - start, *out.shape[2:]), out.dtype, rows=y))
    return runs[0] if len(runs) == 1 else Value(out.shape, out.dtype, runs=tuple(runs))


def gradients(
    e: Emitter, grad: Value, x: Value, w: Value, mask: Sequence[bool]
) -> tuple[Value | None, str | None, str | None]:
    """∂x like x, ∂W like w, and the bias's (O,); `mask` says which of them are wanted."""
    matrix = e.graph.reshape(e.plain(w), w.shape[:2])
    rights = [
        (e.graph.transpose(e.rows(run), (0, 2, 1)), span) for run, span in zip(x.runs or (x,), spans(x), strict=True)
    ]
    rows, lefts, weight, bias = [], [], [], []
    for run, span in zip(grad.runs or (grad,), spans(grad), strict=True):
        block = _block(e, matrix, 0, span, w.shape[0])
        factor = run.factor if run.rows is None and w.size < grad.size else None
        name = run.unscaled if factor is not None else None
        name = e.rows(run) if name is None else name
        rows.append(name)
        column = None if factor is None else e.graph.reshape(factor, (run.shape[1], 1))
        lefts.append(block if column is None else e.op("Mul", block, column))
        if mask[1]:
            products = [e.op("MatMul", name, right) for right, _ in rights]
            part = products[0] if len(products) == 1 else e.op("Concat", *products, axis=2)
            part = e.graph.reshape(part, (run.shape[1], w.shape[1]))
            weight.append(part if column is None else e.op("Mul", part, column))
        if mask[2]:
            total = e.op("ReduceSum", e.graph.reshape(name, (run.shape[1], _length(x))), e.graph.ints([1]), keepdims=0)
            bias.append(total if factor is None else e.op("Mul", total, factor))
    gx = _input_gradient(e, lefts, rows, x, w.shape[1]) if mask[0] else None
    gw = e.graph.reshape(_joined(e, weight), w.shape) if mask[1] else None
    return gx, gw, _joined(e, bias) if mask[2] else None


def _input_gradient(e: Emitter, lefts: list[str], rows: list[str], x: Value, inputs: int) -> Value:
    runs = []
    for run, span in zip(x.runs or (x,), spans(x), strict=True):
        turned = [e.graph.transpose(_block(e, left, 1, span, inputs), (1, 0)) for left in lefts]
        y = _sum_of_products(e, turned, rows, (run.shape[1], _length(x)))
        runs.append(Value(run.shape, run.dtype, rows=y))
    return runs[0] if len(runs) == 1 else Value(x.shape, x.dtype, runs=tuple(runs))


def _sum_of_products(e: Emitter, lefts: Sequence[str], rights: Sequence[str], shape: tuple[int, int]) -> str:
    """Σ left·right as rows (1, *shape); each right is rows (1, n, L)."""
    if len(lefts) == 1:
        return e.op("MatMul", lefts[0], rights[0])
    total: list[str] = []
    for left, right in zip(lefts, rights, strict=True):  # Gemm wants two axes
        total = [e.op("Gemm", left, e.graph.reshape(right, (-1, shape[1])), *total)]
    return e.graph.reshape(total[0], (1, *shape))


def _block(e: Emitter, matrix: str, axis: int, span: tuple[int, int], extent: int) -> str:
    """Rows or columns of a matrix."""
    return matrix if span == (0, extent) else e.graph.slice(matrix, [axis], span[:1], span[1:])


def _joined(e: Emitter, parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else e.op("Concat", *parts, axis=0)


def _length(x: Value) -> int:
    return x.shape[0] * x.shape[2] * x.shape[3]

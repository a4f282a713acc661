"""Translations of operators that move numbers without changing them: views, slices, joins, constants, conversions.

Shapes are static in a training step, so every target shape is a constant. A reshape that ends in the axes it started
from, which is what flattening a 1×1 plane is, keeps channel-major order where it can.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from protofleet.export.graphs.graph_builder import ANY
from protofleet.export.operators.emitter import Emitter
from protofleet.export.operators.translation import ChannelMajor, Meta, Value, as_values, refusal, translates

__all__: list[str] = []

aten = torch.ops.aten


@translates(operator.getitem)
def _getitem(e: Emitter, out: Meta, values: Sequence[Any], index: int) -> Any:
    return values[index]


@translates(
    aten.alias.default,
    aten.detach.default,
    aten.clone.default,
    aten.lift_fresh_copy.default,
    aten.contiguous.default,
)
def _same(e: Emitter, out: Meta, a: Value, *_: Any, **__: Any) -> Value:
    return a


@translates(aten._to_copy.default)
def _to_copy(e: Emitter, out: Meta, a: Value, **_: Any) -> Any:
    if a.dtype == out.dtype:
        return a
    if a.fill is not None:
        return Value(out.shape, out.dtype, fill=a.fill)
    if e.prefers_channel_major([a]):
        return ChannelMajor(e.graph.cast(e.channel_major(a), out.dtype))
    return e.graph.cast(e.plain(a), out.dtype)


@translates(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(e: Emitter, out: Meta, a: Value, shape: Sequence[int]) -> Any:
    if a.fill is not None:
        return Value(out.shape, out.dtype, fill=a.fill)
    if a.shape == out.shape:
        return a
    return e.graph.reshape(e.plain(a), out.shape)


@translates(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def _reshaped(e: Emitter, out: Meta, a: Value, *_: Any) -> Any:
    return _view(e, out, a, out.shape)


@translates(aten.copy.default)
def _copy(e: Emitter, out: Meta, target: Value, source: Value, *_: Any) -> Any:
    return _expand(e, out, source) if source.dtype == out.dtype else _to_copy(e, out, source)


@translates(aten.as_strided.default)
def _as_strided(e: Emitter, out: Meta, a: Value, size: Sequence[int], stride: Sequence[int], offset: Any = None) -> Any:
    _check_whole(a, size, stride, offset)
    return _view(e, out, a, size)


@translates(aten.as_strided_scatter.default)
def _as_strided_scatter(
    e: Emitter, out: Meta, a: Value, source: Value, size: Sequence[int], stride: Sequence[int], offset: Any = None
) -> Any:
    _check_whole(a, size, stride, offset)
    return _view(e, out, source, out.shape)


def _check_whole(a: Value, size: Sequence[int], stride: Sequence[int], offset: Any) -> None:
    """Only the restriding that autograd does around pooling to 1×1: all of a tensor, in order, which is a reshape."""
    plain = torch.empty(tuple(size), device="meta").stride()
    differs = any(n > 1 and s != p for n, s, p in zip(size, stride, plain, strict=True))
    if differs or offset or a.size != int(np.prod(size)):
        raise refusal("as_strided", "contiguous views")


@translates(aten.expand.default)
def _expand(e: Emitter, out: Meta, a: Value, *_: Any, **__: Any) -> Any:
    if a.fill is not None:
        return Value(out.shape, out.dtype, fill=a.fill)
    if a.shape == out.shape:
        return a
    own = (1,) * (len(out.shape) - len(a.shape)) + a.shape
    if any(n and n % ANY == 0 and n != mine for n, mine in zip(out.shape, own, strict=True)):
        return _of_a_matrix(e, e.graph.spread(e.plain(a), out.shape), out, a)
    if e.prefers_channel_major([a]) and len(out.shape) == 4:
        b, c, *rest = out.shape
        return ChannelMajor(e.graph.expand(e.channel_major(a), (c, b, *rest)))
    return _of_a_matrix(e, e.graph.expand(e.plain(a), out.shape), out, a)


def _of_a_matrix(e: Emitter, name: str, out: Meta, a: Value) -> str:
    """The name of what was expanded, noted where it repeats one whole matrix."""
    if len(a.shape) == 2 and out.shape[-2:] == a.shape:
        e.graph.repeats(name, e.plain(a))
    return name


def _expanded(e: Emitter, a: Value, shape: tuple[int, ...]) -> Value:
    meta = Meta(shape, a.dtype)
    return as_values(_expand(e, meta, a), meta)


@translates(aten.permute.default)
def _permute(e: Emitter, out: Meta, a: Value, dims: Sequence[int]) -> str:
    return e.graph.transpose(e.plain(a), [d % len(a.shape) for d in dims])


@translates(aten.t.default)
def _t(e: Emitter, out: Meta, a: Value) -> str:
    return e.graph.transpose(e.plain(a), range(len(a.shape))[::-1])


@translates(aten.transpose.int)
def _transpose(e: Emitter, out: Meta, a: Value, first: int, second: int) -> str:
    perm = list(range(len(a.shape)))
    perm[first], perm[second] = perm[second], perm[first]
    return e.graph.transpose(e.plain(a), perm)


@translates(aten.slice.Tensor)
def _slice(e: Emitter, out: Meta, a: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if a.shape == out.shape:
        return a
    size = a.shape[dim]
    low, high, _ = slice(start, end, step).indices(size)
    return e.graph.slice(e.plain(a), [dim % len(a.shape)], [low], [high], [step])


@translates(aten.slice_scatter.default)
def _slice_scatter(
    e: Emitter, out: Meta, a: Value, source: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> str:
    """What lies before the slice, the new values, what lies behind it."""
    dim %= len(out.shape)
    size = out.shape[dim]
    low, high, _ = slice(start, end, step).indices(size)
    if step != 1:
        raise refusal("writing every n-th element of a tensor", "writes into a run of elements")
    middle = e.plain(_expanded(e, source, (*out.shape[:dim], high - low, *out.shape[dim + 1 :])))
    ends = [(0, low), (high, size)]
    parts = [e.graph.slice(e.plain(a), [dim], [first], [last]) if last > first else None for first, last in ends]
    return e.op("Concat", *(part for part in (parts[0], middle, parts[1]) if part is not None), axis=dim)


@translates(aten.slice_backward.default)
def _slice_backward(
    e: Emitter, out: Meta, grad: Value, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> str:
    """Zeros around the gradient; between its rows too where the slice took every step-th."""
    rank, name = len(out.shape), e.plain(grad)
    dim %= rank
    low = slice(start, end, step).indices(out.shape[dim])[0]
    count = grad.shape[dim]
    if step > 1:
        shape = (*grad.shape[: dim + 1], 1, *grad.shape[dim + 1 :])
        after = [0] * (rank + 1)
        after[dim + 1] = step - 1
        name = e.op("Pad", e.graph.reshape(name, shape), e.graph.ints([0] * (rank + 1) + after))
        name = e.graph.reshape(name, (*grad.shape[:dim], count * step, *grad.shape[dim + 1 :]))
    before, after = [0] * rank, [0] * rank
    before[dim], after[dim] = low, out.shape[dim] - low - count * step  # negative: crops the last zeros
    return e.op("Pad", name, e.graph.ints(before + after))


@translates(aten.select.int)
def _select(e: Emitter, out: Meta, a: Value, dim: int, index: int) -> str:
    position = e.graph.constant(np.int64(index % a.shape[dim]))
    return e.op("Gather", e.plain(a), position, axis=dim % len(a.shape))


@translates(aten.select_backward.default)
def _select_backward(e: Emitter, out: Meta, grad: Value, sizes: Sequence[int], dim: int, index: int) -> str:
    rank = len(out.shape)
    dim, index = dim % rank, index % out.shape[dim]
    shape = [*grad.shape[:dim], 1, *grad.shape[dim:]]
    before, after = [0] * rank, [0] * rank
    before[dim], after[dim] = index, out.shape[dim] - index - 1
    return e.op("Pad", e.graph.reshape(e.plain(grad), shape), e.graph.ints(before + after))


@translates(aten.cat.default)
def _cat(e: Emitter, out: Meta, tensors: Sequence[Value], dim: int = 0) -> str:
    dim %= len(out.shape)
    if e.prefers_channel_major(tensors):
        axis = {0: 1, 1: 0}.get(dim, dim)
        return ChannelMajor(e.op("Concat", *(e.channel_major(t) for t in tensors), axis=axis))
    return e.op("Concat", *(e.plain(t) for t in tensors), axis=dim)


@translates(aten.stack.default)
def _stack(e: Emitter, out: Meta, tensors: Sequence[Value], dim: int = 0) -> str:
    dim %= len(out.shape)
    shape = [1 if i == dim else n for i, n in enumerate(out.shape)]
    return e.op("Concat", *(e.graph.reshape(e.plain(t), shape) for t in tensors), axis=dim)


@translates(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)
def _split(e: Emitter, out: tuple[Meta, ...], a: Value, sizes: Any, dim: int = 0) -> tuple[Any, ...]:
    dim %= len(a.shape)
    lengths = e.graph.ints([meta.shape[dim] for meta in out])
    if e.prefers_channel_major([a]):
        axis = {0: 1, 1: 0}.get(dim, dim)
        parts = e.graph.ops("Split", e.channel_major(a), lengths, outputs=len(out), axis=axis)
        return tuple(ChannelMajor(p) for p in parts)
    return e.graph.ops("Split", e.plain(a), lengths, outputs=len(out), axis=dim)


@translates(aten.unbind.int)
def _unbind(e: Emitter, out: tuple[Meta, ...], a: Value, dim: int = 0) -> tuple[str, ...]:
    return tuple(_select(e, meta, a, dim, i) for i, meta in enumerate(out))


@translates(aten.constant_pad_nd.default)
def _pad(e: Emitter, out: Meta, a: Value, pads: Sequence[int], value: float = 0.0) -> str:
    rank = len(a.shape)
    before, after = [0] * rank, [0] * rank
    for i in range(len(pads) // 2):
        before[rank - 1 - i], after[rank - 1 - i] = pads[2 * i], pads[2 * i + 1]
    return e.op("Pad", e.plain(a), e.graph.ints(before + after), e.graph.scalar(value, out.dtype))


@translates(aten.roll.default)
def _roll(e: Emitter, out: Meta, a: Value, shifts: Sequence[int], dims: Sequence[int] = ()) -> str:
    name = e.plain(a)
    for shift, dim in zip(shifts, dims, strict=True):
        cut = -shift % a.shape[dim]
        if cut:
            ends = ((cut, a.shape[dim]), (0, cut))
            name = e.op("Concat", *(e.graph.slice(name, [dim], [low], [high]) for low, high in ends), axis=dim)
    return name


@translates(aten.index.Tensor)
def _index(e: Emitter, out: Meta, a: Value, indices: Sequence[Value | None]) -> str:
    dim = _one_index(indices)
    return e.op("Gather", e.plain(a), e.plain(indices[dim]), axis=dim)  # type: ignore[arg-type]


@translates(aten.index_put.default)
def _index_put(
    e: Emitter, out: Meta, a: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False
) -> str:
    """The gradient of `index`: rows added where they were taken from."""
    dim = _one_index(indices)
    index = indices[dim]
    assert index is not None
    if dim or a.fill != 0 or not accumulate:
        raise refusal("an assignment by index", "indices that are only read")
    rows = e.graph.reshape(e.plain(index), (index.size, 1))
    spread = e.plain(_expanded(e, values, (*index.shape, *a.shape[1:])))
    added = e.graph.reshape(spread, (index.size, *a.shape[1:]))
    return e.op("ScatterND", e.plain(a), rows, added, reduction="add")


def _one_index(indices: Sequence[Value | None]) -> int:
    """The axis that is indexed, by whole numbers; more than one at once has no ONNX operator."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1 or given[0][1].dtype not in (torch.int64, torch.int32):
        raise refusal("indexing by several tensors, or by a mask", "one tensor of whole numbers")
    return given[0][0]


@translates(aten.index_select.default)
def _index_select(e: Emitter, out: Meta, a: Value, dim: int, index: Value) -> str:
    return e.op("Gather", e.plain(a), e.plain(index), axis=dim % len(a.shape))


def _filled(value: float | None) -> Any:
    def handler(e: Emitter, out: Meta, *args: Any, **_: Any) -> Value:
        number = value if value is not None else args[1]
        return Value(out.shape, out.dtype, fill=float(number))

    return handler


translates(
    aten.zeros.default,
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty_strided.default,
    aten.empty_strided.default,
)(_filled(0.0))
translates(aten.ones.default, aten.ones_like.default, aten.new_ones.default)(_filled(1.0))
translates(aten.full.default, aten.full_like.default)(_filled(None))


@translates(aten.new_full.default)
def _new_full(e: Emitter, out: Meta, a: Value, size: Sequence[int], value: float, **_: Any) -> Value:
    return Value(out.shape, out.dtype, fill=float(value))


@translates(aten.scalar_tensor.default)
def _scalar_tensor(e: Emitter, out: Meta, value: float, **_: Any) -> Value:
    return Value(out.shape, out.dtype, fill=float(value))


@translates(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(e: Emitter, out: Meta, *args: int, **_: Any) -> str:
    numbers = torch.arange(*args, dtype=out.dtype).numpy()
    return e.graph.constant(numbers)

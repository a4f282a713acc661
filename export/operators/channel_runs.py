"""Large activations in runs of channels, so that a chain of operators on one run stays in the processor's cache.

Between two 1×1 convolutions of a MobileNet lie normalisation, activation, depthwise convolution, and their gradients.
All of them treat each channel alike and mix none. Applied to the whole activation, each of these operators streams it
through memory. Applied run by run, an operator finds the output of the one before it in the cache. The convolutions at
both ends make runs (rows of their kernel) and take them (sums over columns of it), so nothing is cut or joined.

    plan     which convolutions make their result in runs: large ones whose result meets nothing but such operators
    by_runs  a translation of such an operator, applied to each run

The size of a run was measured (docs/decisions/170).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from protofleet.export.graphs.values import Meta, Value, as_values
from protofleet.export.modules import norms  # noqa: F401  it registers protofleet::batch_norm
from protofleet.export.operators.emitter import Emitter

__all__ = ["RUN_ELEMENTS", "by_runs", "cut", "plan", "spans"]

RUN_ELEMENTS = 1 << 18  # of a run: 1 MB, which with its neighbours in a formula fits a second-level cache
_MULTIPLE = 8  # channels of a run are a multiple of this: what products are fast with

aten = torch.ops.aten
_CONVOLUTION, _BACKWARD = aten.convolution.default, aten.convolution_backward.default
_CHANNELWISE: dict[Any, tuple[int, ...]] = {  # and which of their arguments are per channel
    torch.ops.protofleet.batch_norm.default: (1, 2),
    torch.ops.protofleet.batch_norm_backward.default: (2, 3, 4),
    aten.clone.default: (),
    aten.clamp.default: (),
    aten.clamp_min.default: (),
    aten.hardtanh.default: (),
    aten.hardtanh_backward.default: (),
    aten.relu.default: (),
    aten.threshold_backward.default: (),
    aten.hardswish.default: (),
    aten.hardswish_backward.default: (),
    aten.silu.default: (),
    aten.silu_backward.default: (),
    aten.add.Tensor: (),
    aten.mul.Tensor: (),
}


def spans(value: Value) -> list[tuple[int, int]]:
    """(start, end) in channels of each run of a rank-4 activation; one where it is whole."""
    ends, start = [], 0
    for run in value.runs or (value,):
        ends.append((start, start + run.shape[1]))
        start += run.shape[1]
    return ends


def plan(trace: fx.GraphModule) -> dict[fx.Node, int]:
    """The convolutions whose result is made in runs, and in how many channels each."""
    channels_of = {}
    for node in trace.graph.nodes:
        if node.op != "call_function" or node.target is not _CONVOLUTION or not _is_pointwise(node):
            continue
        shape = node.meta["val"].shape
        length = shape[0] * shape[2] * shape[3]
        channels = max(1, RUN_ELEMENTS // length // _MULTIPLE) * _MULTIPLE
        if channels < shape[1] and _stays_apart(node):
            runs = -(-shape[1] // channels)
            channels_of[node] = -(-shape[1] // runs // _MULTIPLE) * _MULTIPLE
    return channels_of


def _stays_apart(start: fx.Node) -> bool:
    """Whether all that takes the result, up to convolutions that take runs, works on each channel alone."""
    reached, open_nodes = {start}, [start]
    while open_nodes:
        node = open_nodes.pop()
        for user in node.users:
            if not _takes_runs(user, node):
                return False
            for result in _results_in_runs(user, node):
                if result not in reached:
                    reached.add(result)
                    open_nodes.append(result)
    return True


def _takes_runs(user: fx.Node, node: fx.Node) -> bool:
    if user.target in (_CONVOLUTION, _BACKWARD):
        return _is_depthwise(user) or _is_pointwise(user)
    if user.target not in _CHANNELWISE:
        return False
    others = [n.meta["val"].shape for n in user.all_input_nodes if len(n.meta["val"].shape) == 4]
    return all(shape == node.meta["val"].shape for shape in others)


def _results_in_runs(user: fx.Node, node: fx.Node) -> list[fx.Node]:
    """Of the results of `user`, those in the same runs: all activations but what a 1×1 convolution makes."""
    mixes = user.target in (_CONVOLUTION, _BACKWARD) and _is_pointwise(user)
    if mixes and (user.target is _CONVOLUTION or user.args[1] is not node):
        return []
    if not isinstance(user.meta["val"], list | tuple):
        return [user]
    return [n for n in user.users if n.target is operator.getitem and n.args[1] == 0]


def _kernel(node: fx.Node) -> tuple[torch.Size, int]:
    """Shape of the kernel of a convolution or of its gradient, and its groups."""
    kernel_index = 2 if node.target is _BACKWARD else 1
    return node.args[kernel_index].meta["val"].shape, node.args[9 if kernel_index == 2 else 8]  # type: ignore[union-attr,return-value]


def _is_pointwise(node: fx.Node) -> bool:
    shape, groups = _kernel(node)
    first = 4 if node.target is _BACKWARD else 3
    unmoved = all(set(node.args[i]) == {n} for i, n in ((first, 1), (first + 1, 0)))  # type: ignore[arg-type]
    return groups == 1 and tuple(shape[2:]) == (1, 1) and unmoved


def _is_depthwise(node: fx.Node) -> bool:
    shape, groups = _kernel(node)
    return groups > 1 and groups == shape[0] and shape[1] == 1


def by_runs(handler: Callable[..., Any], e: Emitter, target: Any, out: Any, args: Sequence[Any]) -> Any:
    """What `handler` returns for each run, put together; None where the operator is not done run by run."""
    acts = [a for a in args if isinstance(a, Value) and a.runs and len(a.shape) == 4 and a.shape[1] != 1]
    if not acts:
        return None
    args = list(args)
    if target in (_CONVOLUTION, _BACKWARD):
        kernel_index = 2 if target is _BACKWARD else 1
        channels = args[kernel_index].shape[0]
        if args[kernel_index].shape[1] != 1 or args[9 if kernel_index == 2 else 8] != channels:
            return None
        own: tuple[int, ...] = (kernel_index,) if kernel_index == 2 else (1, 2)
    elif target in _CHANNELWISE:
        own, kernel_index = _CHANNELWISE[target], 0
    else:
        return None
    leads = {a.shape[:2] for i, a in enumerate(args) if i not in own and isinstance(a, Value) and len(a.shape) == 4}
    if len(leads) != 1:
        return None
    results = []
    for start, end in spans(acts[0]):
        part = [_part(e, a, start, end, i in own) for i, a in enumerate(args)]
        if kernel_index:
            part[9 if kernel_index == 2 else 8] = end - start
        meta = _narrowed(out, acts[0].shape[1], end - start)
        results.append(as_values(handler(e, meta, *part), meta))
    return _whole(results, out)


def _whole(results: Sequence[Any], out: Any) -> Any:
    """The tensors whose runs these are."""
    if isinstance(out, tuple):
        return tuple(_whole([result[i] for result in results], meta) for i, meta in enumerate(out))
    return None if results[0] is None else Value(out.shape, out.dtype, runs=tuple(results))


def _narrowed(out: Any, channels: int, count: int) -> Any:
    """The description of a result's run."""
    if isinstance(out, tuple):
        return tuple(_narrowed(part, channels, count) for part in out)
    if out is None:
        return None
    axis = _axis(out.shape, channels)
    return Meta((*out.shape[:axis], count, *out.shape[axis + 1 :]), out.dtype)


def _axis(shape: tuple[int, ...], channels: int) -> int:
    """Where a result's channels are: first in vectors and kernels, second in activations."""
    return 0 if len(shape) == 1 or (shape[0] == channels and shape[1] == 1) else 1


def _part(e: Emitter, value: Any, start: int, end: int, is_own: bool) -> Any:
    if not isinstance(value, Value) or value.size == 1 or value.fill is not None:
        return value
    return cut(e, value, start, end) if is_own or len(value.shape) == 4 else value


def cut(e: Emitter, value: Value, start: int, end: int) -> Value:
    """Channels start to end of an activation, or of what has one entry per channel."""
    axis = 0 if len(value.shape) < 4 or value.shape[1] == 1 else 1
    if (start, end) == (0, value.shape[axis]):
        return value
    shape = (*value.shape[:axis], end - start, *value.shape[axis + 1 :])
    first = 0
    for run in value.runs:
        if (first, first + run.shape[axis]) == (start, end):
            return run
        first += run.shape[axis]
    if axis == 1:
        return Value(shape, value.dtype, rows=e.graph.slice(e.rows(value), [1], [start], [end]))
    return Value(shape, value.dtype, plain=e.graph.slice(e.plain(value), [0], [start], [end]))

"""From a traced torch function to an ONNX graph, one `aten` operator at a time.

`translate` walks an fx graph in order. Each node's operator is looked up in one table, filled by the `translate_*`
modules through the decorator `translates`; the entry emits ONNX nodes and returns their names. An operator without
an entry is refused by name: nothing is ever translated approximately.

Activations of rank 4 may live in two orders, one of them in two shapes, and a translation asks for the one it is fast
in:

    plain           (B, C, H, W)   what torch means; what ONNX Conv wants
    channel-major   (C, B, H, W)   what a matrix product over all positions wants: 1×1 and depthwise convolution,
                                   weight gradients, batch normalisation
    rows            (1, C, B·H·W)  channel-major again, for who needs no planes: a reshape apart, and those cost too

The change of order is emitted once, and only where somebody asks for the other one; elementwise operators stay in
whatever order their inputs have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from contract.errors import ExportError
from export import lanes, runs
from export.graph import ONNX_TYPE, Graph
from export.values import ChannelMajor, Form, Meta, Rows, Value, as_values

__all__ = [
    "NOTHING_TRAINED",
    "TABLE",
    "ChannelMajor",
    "Emitter",
    "Form",
    "Meta",
    "Rows",
    "Value",
    "as_values",
    "refusal",
    "translate",
    "translates",
]

SWAP = (1, 0, 2, 3)
Handler = Callable[..., Any]
TABLE: dict[Any, Handler] = {}
NOTHING_TRAINED = "another layer in the backbone, or --method ffc, which needs its features only"


def translates(*targets: Any) -> Callable[[Handler], Handler]:
    """Enter a function into the table as the translation of these operators.

    It is called as `f(emitter, out, *args, **kwargs)` with tensors as `Value` and `out` as `Meta` (or a tuple of
    them), and returns the result's name, a `ChannelMajor` name, a `Value`, or a tuple of these.
    """

    def enter(handler: Handler) -> Handler:
        for target in targets:
            TABLE[target] = handler
        return handler

    return enter


class Emitter:
    """The graph under construction, and the orders in which it holds each activation."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.op = graph.op
        self.run_channels: int | None = None  # of the result of the operator in hand, where it is made in runs

    def plain(self, value: Value) -> str:
        """The tensor's name in torch's own order."""
        if value.plain is None:
            if value.is_swapped:
                value.plain = self.swap(self.channel_major(value), value.shape[1], value.shape[0], value.shape[2:])
            elif value.runs:  # vectors, kernels
                value.plain = self.op("Concat", *(self.plain(run) for run in value.runs), axis=0)
            else:
                value.plain = self._filled(value)
        return value.plain

    def channel_major(self, value: Value) -> str:
        """The name of a rank-4 tensor as (C, B, H, W)."""
        if value.channel_major is None:
            b, c, *plane = value.shape
            if value.is_in_rows:
                value.channel_major = lanes.to_channel_major(self.graph, self.rows(value), value.shape)
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
                value.rows = lanes.to_rows(self.graph, self.channel_major(value), value.shape)
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
        if not self.prefers_channel_major(values):
            return str
        shapes = {v.shape for v in values if v.size > 1 and v.fill is None}
        return Rows if len(shapes) == 1 and any(v.is_in_rows for v in values) else ChannelMajor

    def named(self, value: Value, form: Form) -> str:
        """The tensor's name in that form; one of a single element as it is."""
        if value.size == 1 and form is not str:
            return self.graph.reshape(self.plain(value), (1,))
        return {str: self.plain, ChannelMajor: self.channel_major, Rows: self.rows}[form](value)

    def _filled(self, value: Value) -> str:
        """A constant tensor, expanded only because somebody needs its full shape."""
        scalar = self.graph.scalar(value.fill or 0.0, value.dtype)
        return self.graph.spread(scalar, value.shape) if value.shape else scalar


def refusal(got: str, expected: str) -> ExportError:
    """The error for an operator, or a use of one, that a training step cannot hold."""
    return ExportError(
        "the training step has no translation to ONNX",
        expected=expected,
        got=got,
        hint=NOTHING_TRAINED,
    )


def translate(trace: fx.GraphModule, graph: Graph, inputs: Mapping[str, str], outputs: Sequence[str]) -> None:
    """Emit every node of `trace` into `graph`.

    Args:
        trace: functional fx graph whose nodes carry `meta["val"]` (fake tensors).
        inputs: for each placeholder, in order: its public name to the graph input's name.
        outputs: public names of the returned tensors, in order.

    Raises:
        ExportError: naming the first operator that has no translation.
    """
    emitter = Emitter(graph)
    in_runs = {} if graph.any_batch else runs.plan(trace)
    values: dict[fx.Node, Any] = {}
    names = iter(inputs.values())
    for node in trace.graph.nodes:
        if node.op == "placeholder":
            meta = _meta(node)
            values[node] = Value(meta.shape, meta.dtype, plain=next(names))
        elif node.op == "get_attr":
            values[node] = _attribute(trace, node, graph)
        elif node.op == "call_function":
            emitter.run_channels = in_runs.get(node)
            values[node] = _call(emitter, node, values)
        elif node.op == "output":
            returned = [values[n] for n in node.args[0]]
            for value, name in zip(returned, outputs, strict=True):
                graph.output(emitter.plain(value), name, value.dtype, value.shape)


def _call(emitter: Emitter, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    handler, meta = TABLE.get(node.target), _meta(node)
    if handler is None:
        raise refusal(str(node.target), "operators of convolution, attention and what goes with them")
    if isinstance(meta, Meta) and meta.dtype not in ONNX_TYPE:
        raise refusal(f"{meta.dtype} from {node.target}", "real numbers")
    args = fx.map_arg(node.args, lambda n: values[n])
    kwargs = fx.map_arg(node.kwargs, lambda n: values[n])
    by_runs = runs.by_runs(handler, emitter, node.target, meta, args) if not kwargs else None
    return as_values(handler(emitter, meta, *args, **kwargs), meta) if by_runs is None else by_runs


def _meta(node: fx.Node) -> Any:
    def describe(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Meta(tuple(int(n) for n in value.shape), value.dtype)
        if isinstance(value, list | tuple):
            return tuple(describe(v) for v in value)
        return None

    return describe(node.meta.get("val"))


def _attribute(trace: fx.GraphModule, node: fx.Node, graph: Graph) -> Value:
    tensor = getattr(trace, str(node.target)).detach().cpu()
    return Value(tuple(tensor.shape), tensor.dtype, plain=graph.constant(tensor.numpy()))

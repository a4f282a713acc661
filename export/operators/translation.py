"""From a traced torch function to an ONNX graph, one `aten` operator at a time.

`translate` walks an fx graph in order. It looks up the operator of each node in one table, which the modules of this
folder fill through the decorator `translates`. The entry emits ONNX nodes and returns their names. An operator without
an entry is refused by name: nothing is ever translated approximately.

`emitter.py` describes the orders in which activations are held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from protofleet.contract.errors import ExportError
from protofleet.export.graphs.graph_builder import ONNX_TYPE, Graph
from protofleet.export.graphs.values import Blocks, ChannelMajor, Form, Meta, Rows, Value, as_values
from protofleet.export.operators import channel_runs
from protofleet.export.operators.emitter import Emitter
from protofleet.export.operators.kernel_nodes import IN_BLOCKS, KernelNodes

__all__ = [
    "NOTHING_TRAINED",
    "TABLE",
    "Blocks",
    "ChannelMajor",
    "Form",
    "Meta",
    "Rows",
    "Value",
    "as_values",
    "refusal",
    "translate",
    "translates",
]

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
    in_runs = {} if graph.any_batch or graph.kernels else channel_runs.plan(trace)
    kernels = KernelNodes(emitter, trace) if graph.kernels else None
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
            values[node] = _call(emitter, node, values, kernels)
        elif node.op == "output":
            returned = [values[n] for n in node.args[0]]
            for value, name in zip(returned, outputs, strict=True):
                graph.output(emitter.plain(value), name, value.dtype, value.shape)


def _call(emitter: Emitter, node: fx.Node, values: Mapping[fx.Node, Any], kernels: KernelNodes | None) -> Any:
    handler, meta = TABLE.get(node.target), _meta(node)
    if handler is None:
        raise refusal(str(node.target), "operators of convolution, attention and what goes with them")
    if isinstance(meta, Meta) and meta.dtype not in ONNX_TYPE:
        raise refusal(f"{meta.dtype} from {node.target}", "real numbers")
    args = fx.map_arg(node.args, lambda n: values[n])
    kwargs = fx.map_arg(node.kwargs, lambda n: values[n])
    if kernels is not None:
        emitter.in_blocks = node.target in IN_BLOCKS
        result = kernels(node, meta, values)
        if result is not NotImplemented:
            return as_values(result, meta)
    by_runs = channel_runs.by_runs(handler, emitter, node.target, meta, args) if not kwargs else None
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

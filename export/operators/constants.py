"""Constant folding: what a recorded function computes without its inputs is computed once, at export.

A network may make tables while it runs: which patches share a window, a mask of shifted windows, an order to gather in.
In the trace they are a dozen small operators on constants, often operators without a translation. `fold_constants` runs
them in torch and keeps the results. A constant whose elements are all equal stays as it is: the translation broadcasts
it from a scalar.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["fold_constants"]

aten = torch.ops.aten
_MAX_ELEMENTS = 1 << 22  # beyond this a table would make the graph large; the batch of a trace is beyond it, too
_FIRST_ARGUMENT_IS_A_PATTERN = (  # of type and device only
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
)


def fold_constants(trace: fx.GraphModule) -> None:
    """Replace, in place, every node that no input reaches and whose elements differ by its value."""
    values: dict[fx.Node, Tensor] = {}
    for node in trace.graph.nodes:
        value = _value(trace, node, values)
        if value is not None:
            values[node] = value
    for number, (node, value) in enumerate(values.items()):
        if node.op != "call_function" or bool((value == value.reshape(-1)[0]).all()):
            continue
        name = f"_folded_{number}"
        trace.register_buffer(name, value)
        with trace.graph.inserting_before(node):
            constant = trace.graph.get_attr(name)
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)


def _value(trace: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Tensor]) -> Tensor | None:
    """The node's value, or None where it depends on an input, is no single tensor, or is too large."""
    shape = getattr(node.meta.get("val"), "shape", None)
    if node.op == "get_attr":
        attribute = getattr(trace, str(node.target))
        return attribute.detach().cpu() if isinstance(attribute, Tensor) else None
    if node.op != "call_function" or shape is None or not 0 < int(shape.numel()) <= _MAX_ELEMENTS:
        return None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    args: tuple[Any, ...] = node.args
    if node.target in _FIRST_ARGUMENT_IS_A_PATTERN:
        args = (torch.empty(0, dtype=node.meta["val"].dtype), *args[1:])
    if any(leaf not in values for leaf in (*_nodes(args), *_nodes(node.kwargs))):
        return None
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return None
    result = node.target(*fx.map_arg(args, values.__getitem__), **fx.map_arg(node.kwargs, values.__getitem__))
    return result if isinstance(result, Tensor) else None


def _nodes(arguments: Any) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    fx.map_arg(arguments, lambda node: nodes.append(node))
    return nodes

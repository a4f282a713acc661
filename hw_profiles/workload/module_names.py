"""Names of a graph's nodes by the modules that they belong to: `features.3.conv.0`, not `Conv_17`.

1. A node that reads a weight, be it through casts and transposes, has the weight's name without its last part.
2. Else the exporter's word: scopes in the node's name (`/layer1/layer1.0/relu/Relu`) or torch's `name_scopes`.
3. Else the name of a node by hand, where it is no number of a kind of node; else that of a weight without parts.
4. Else the module before it, with the operator: `features.3.conv.0:Relu`; of what comes first, `input:Cast`.

What only prepares weights leaves the module's name to the node that takes them. A name that is taken gets the operator
behind it, and then a number: no two are alike.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import NodeProto

__all__ = ["module_names"]

_SCOPES = "pkg.torch.onnx.name_scopes"


def module_names(nodes: Sequence[NodeProto], weights: Collection[str], data: Collection[str]) -> list[str]:
    """One name for each node, in order.

    Args:
        nodes: in topological order.
        weights: names of tensors that are parameters or statistics.
        data: names of tensors that vary with the input.
    """
    owner = {name: _module(name) for name in weights if "::" not in name}  # torch numbers what it has folded
    before: dict[str, str] = {}
    taken: set[str] = set()
    names = []
    for node in nodes:
        varies = any(name in data for name in node.output)
        read = next((owner[name] for name in node.input if name in owner), "")
        by_weight = read.removesuffix(".") if read.endswith(".") else ""
        module = by_weight or _scope(node) or _by_hand(node) or read
        if not varies and module and node.op_type != "Identity":  # torch keeps one of equal tensors, whoever's it is
            owner.update(dict.fromkeys(node.output, f"{module}." if by_weight else module))
        near = module or next((before[name] for name in node.input if name in before), "input")
        before.update(dict.fromkeys(node.output, near))
        name = (module if varies else _by_hand(node)) or f"{near}:{node.op_type}"
        names.append(_untaken(name, node.op_type, taken))
    return names


def _module(weight: str) -> str:
    """`layer1.0.conv1.weight` → `layer1.0.conv1.`; a name without parts stands for itself, and has no dot."""
    return f"{weight.rpartition('.')[0]}." if "." in weight else weight


def _scope(node: NodeProto) -> str:
    """The module by what the exporter wrote down, or ""."""
    for entry in node.metadata_props:
        if entry.key == _SCOPES:
            try:
                scopes = ast.literal_eval(entry.value)
            except (ValueError, SyntaxError):
                return ""
            return str(scopes[-2]) if isinstance(scopes, list) and len(scopes) > 1 else ""
    parts = node.name.split("/")[1:-1] if node.name.startswith("/") else []
    module = ""
    for part in parts:  # `layer1`, `layer1.0`, `relu`: each within the one before, some with its name in front
        if not module or part == module or part.startswith(f"{module}."):
            module = part
        elif part.startswith(f"{_last(module)}."):
            module = module.removesuffix(_last(module)) + part
        else:
            module = f"{module}.{part}"
    return module


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def _by_hand(node: NodeProto) -> str:
    """The node's own name, unless it only counts: `Conv_3`, `node_conv2d_3`, `/Conv`."""
    counted = re.fullmatch(
        rf"(?:node_)?{re.escape(node.op_type)}(?:_\d+)*|node_\w+|n?\d+|/\w+", node.name, re.IGNORECASE
    )
    return "" if counted else node.name


def _untaken(name: str, op: str, taken: set[str]) -> str:
    chosen = name
    if chosen in taken and not chosen.endswith(f":{op}"):
        chosen = f"{name}:{op}"
    number, base = 2, chosen
    while chosen in taken:
        chosen = f"{base}#{number}"
        number += 1
    taken.add(chosen)
    return chosen

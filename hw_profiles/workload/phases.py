"""Which phase of training a node of a step graph belongs to.

A step graph is plain dataflow, so the phase is read from what a node depends on and what depends on it:

    forward           `loss` or a running statistic (`<buffer>.next`) needs it
    update            elementwise, at the end of a chain to `<param>.next` that begins where the gradient is whole:
                      what reads `lr`, the parameter or the optimizer's state (momentum, or Adam's means of gradients
                      and of their squares), and what scales or squares a gradient for these alone
    weight gradient   the rest that feeds one tensor's update only; a product of it multiplies two things that vary with
                      the data (attention's input gradients do so, too, and feed several tensors' updates)
    input gradient    the rest: the gradient on its way to earlier layers

See docs/hardware.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx import NodeProto

from protofleet.hw_profiles.workload.model import Phase

__all__ = ["phase_of_nodes"]

_PRODUCTS = frozenset(("Conv", "ConvTranspose", "MatMul", "Gemm", "Einsum"))
_UPDATE_OPS = frozenset(
    [
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Neg",
        "Sum",
        "Cast",
        "Reshape",
        "Identity",
        "Where",
        "Sqrt",
        "Exp",
        "Pow",
        "Reciprocal",
    ]
)
_OF_PARAMETER = ("momentum.", "adam.mean.", "adam.square.")  # the optimizer's tensors of one parameter
_OPTIMIZER = ("momentum.", "adam.")  # these and Adam's count of steps


def phase_of_nodes(nodes: Sequence[NodeProto], outputs: Sequence[str], data: set[str]) -> list[Phase]:
    """One phase for each node, in order.

    Args:
        nodes: in topological order.
        outputs: `loss`, then `<name>.next` for each tensor that the step updates.
        data: names that vary with the input data.
    """
    makers = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    produced = [set(node.output) for node in nodes]
    forward = _ancestors(nodes, makers, {"loss"} if "loss" in outputs else set(outputs[:1]))
    targets = [name for name in outputs if name.endswith(".next")]
    forward |= _ancestors(nodes, makers, {t for t in targets if not _has_gradient(t, nodes, makers, forward)})
    update = set()
    for target in targets:
        update |= _update_chain(target, nodes, makers, forward)
    update |= _prepared(nodes, makers, data, update)
    reached = _targets_reached(nodes, targets)
    phases: list[Phase] = []
    for index, node in enumerate(nodes):
        if index in update:
            phases.append("update")
        elif index in forward:
            phases.append("forward")
        else:
            alone = len(set().union(*(reached.get(n, set()) for n in produced[index]))) <= 1
            varies = node.op_type not in _PRODUCTS or all(name in data for name in node.input[:2])
            phases.append("weight_gradient" if alone and varies else "input_gradient")
    return phases


def _ancestors(nodes: Sequence[NodeProto], makers: dict[str, int], names: set[str]) -> set[int]:
    ancestors: set[int] = set()
    waiting = [makers[n] for n in names if n in makers]
    while waiting:
        index = waiting.pop()
        if index not in ancestors:
            ancestors.add(index)
            waiting += [makers[n] for n in nodes[index].input if n in makers]
    return ancestors


def _has_gradient(target: str, nodes: Sequence[NodeProto], makers: dict[str, int], forward: set[int]) -> bool:
    """Whether this tensor's next value is the optimizer's doing: trained, where a running statistic is not."""
    if target.startswith(_OPTIMIZER):
        return True
    visited: set[int] = set()
    waiting = [makers[target]] if target in makers else []
    while waiting:
        index = waiting.pop()
        if index in visited or index in forward:
            continue
        visited.add(index)
        if any(name == "lr" or name.startswith(_OPTIMIZER) for name in nodes[index].input):
            return True
        waiting += [makers[n] for n in nodes[index].input if n in makers]
    return False


def _update_chain(target: str, nodes: Sequence[NodeProto], makers: dict[str, int], forward: set[int]) -> set[int]:
    """Nodes from `target` back through elementwise operators, up to and including the last that reads lr or state."""
    chain: set[int] = set()
    if not _has_gradient(target, nodes, makers, forward):
        return chain

    def rests_on_state(index: int, depth: int) -> bool:
        node = nodes[index]
        if index in forward or node.op_type not in _UPDATE_OPS or depth > 12:
            return False
        direct = any(n == "lr" or n == own or (n.startswith(_OPTIMIZER) and n not in makers) for n in node.input)
        below = [rests_on_state(makers[n], depth + 1) for n in node.input if n in makers]
        if direct or any(below):
            chain.add(index)
            return True
        return False

    own = _parameter(target)
    rests_on_state(makers[target], 0)
    return chain


def _prepared(nodes: Sequence[NodeProto], makers: dict[str, int], data: set[str], update: set[int]) -> set[int]:
    """Products of a whole gradient with a constant or with itself that only the update reads, as Adam takes them."""
    users: dict[str, set[int]] = {}
    for index, node in enumerate(nodes):
        for name in node.input:
            users.setdefault(name, set()).add(index)
    prepared: set[int] = set()
    for index in range(len(nodes) - 1, -1, -1):
        node = nodes[index]
        takers = users.get(node.output[0], set()) if node.op_type == "Mul" else set()
        scales = len(set(node.input)) == 1 or any(name not in makers and name not in data for name in node.input)
        if takers and scales and takers <= update | prepared and index not in update:
            prepared.add(index)
    return prepared


def _parameter(target: str) -> str:
    """The parameter that an output `<name>.next` is the next value of, or that the optimizer keeps it for."""
    name = target.removesuffix(".next")
    return next((name.removeprefix(prefix) for prefix in _OF_PARAMETER if name.startswith(prefix)), name)


def _targets_reached(nodes: Sequence[NodeProto], targets: Sequence[str]) -> dict[str, frozenset[str]]:
    """For each tensor, which parameters' updates it reaches; the optimizer's state counts as its parameter's. Capped at
    two."""
    reached: dict[str, set[str]] = {t: {_parameter(t)} for t in targets}
    for node in reversed(nodes):
        down: set[str] = set()
        for name in node.output:
            down |= reached.get(name, set())
        if down:
            for name in node.input:
                if len(reached.setdefault(name, set())) < 2:
                    reached[name] |= set(sorted(down)[:2])
    return {name: frozenset(names) for name, names in reached.items()}

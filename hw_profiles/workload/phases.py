"""Which phase of training a node of a step graph belongs to.

A step graph is plain dataflow, so the phase is read from what a node depends on and what depends on it:

    forward           `loss` or a running statistic (`<buffer>.next`) needs it
    update            elementwise, at the end of a chain to `<param>.next` that begins where the gradient is whole:
                      what reads `lr`, the parameter or the optimizer's state (momentum, or Adam's means of gradients
                      and of their squares), and what scales or squares a gradient for these alone
    weight gradient   what of the rest feeds one tensor's update only: from its last product of two things that vary
                      with the data on, and what lays out the operands of that product
    input gradient    the rest: the gradient on its way to earlier layers, though one tensor may be all that is left

See docs/hardware.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx import NodeProto

from protofleet.hw_profiles.workload.model import Phase

__all__ = ["phase_of_nodes"]

_PRODUCTS = frozenset(("Conv", "ConvTranspose", "MatMul", "Gemm", "Einsum"))
_LAYOUTS = frozenset(("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Cast"))
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
    backward = [index for index in range(len(nodes)) if index not in update and index not in forward]
    alone = {i for i in backward if len(set().union(*(reached.get(n, set()) for n in produced[i]))) <= 1}
    earlier = _before_the_product(nodes, makers, backward, alone, data)
    own = {i for i in alone - earlier if nodes[i].op_type not in _PRODUCTS or _of_data(nodes[i], data)}
    phases: list[Phase] = ["input_gradient"] * len(nodes)
    whose: tuple[tuple[set[int], Phase], ...] = ((own, "weight_gradient"), (forward, "forward"), (update, "update"))
    for indices, phase in whose:
        for index in indices:
            phases[index] = phase
    return phases


def _of_data(node: NodeProto, data: set[str]) -> bool:
    return node.op_type in _PRODUCTS and all(name in data for name in node.input[:2])


def _before_the_product(
    nodes: Sequence[NodeProto], makers: dict[str, int], backward: Sequence[int], alone: set[int], data: set[str]
) -> set[int]:
    """What a gradient goes through on its way to the one tensor that is left, before the product that is its gradient.

    These are products, masks and poolings. What only lays out an operand of that product is none of them.
    """
    users: dict[int, set[int]] = {}
    carries = set(backward) - alone  # a gradient that comes from later layers
    for index in backward:
        above = {makers[name] for name in nodes[index].input if name in makers}
        if above & carries:
            carries.add(index)
        if index in alone:
            for maker in above:
                users.setdefault(maker, set()).add(index)
    leads: set[int] = set()  # to a later product
    before: set[int] = set()
    for index in reversed(backward):
        takers = users.get(index, set()) if index in alone else set()
        if any(user in leads or _of_data(nodes[user], data) for user in takers):
            leads.add(index)
            if nodes[index].op_type not in _LAYOUTS or takers & before:
                before.add(index)
    return before & carries


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
    if target not in makers or not _has_gradient(target, nodes, makers, forward):
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

"""What a runtime makes of the weights of a graph before it runs it: computed once, or read in another order for free.

Two things happen to what a graph does with its weights, and neither costs time at run time:

    fused    a transpose that only swaps the last two dimensions and feeds nothing but matrix products is read in the
             other order by them (ONNX Runtime's GemmTransposeFusion and MatmulTransposeFusion: transA, transB); a
             transpose of a transpose is what was there before. So it is in inference and in training.
    folded   where the weights do not change, all that depends on nothing else is computed when the graph is loaded
             (constant folding). So it is in inference alone: in a training step the weights are inputs.

`free_transposes` finds the first on ONNX nodes; `fold_weights` does the second to a `Workload`. Both are held against
the graphs that ONNX Runtime itself writes after optimising (`tests/hw_profiles/latency/test_fold.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from protofleet.hw_profiles.workload.model import Tensor, Workload

if TYPE_CHECKING:  # what reads the cost of a round needs no onnx
    from onnx import NodeProto

__all__ = ["fold_weights", "free_transposes"]

_PRODUCTS = frozenset(("MatMul", "Gemm"))
_STORED = ("parameter", "frozen", "buffer", "constant")


def free_transposes(nodes: Sequence[NodeProto], outputs: Collection[str], rank: Mapping[str, int]) -> set[int]:
    """Which nodes, by index, are transposes that the matrix products around them take in.

    Args:
        nodes: in topological order.
        outputs: of the graph; what leaves it must be there in its own order.
        rank: number of dimensions by tensor name.
    """
    order = {index: _permutation(node, rank) for index, node in enumerate(nodes) if node.op_type == "Transpose"}
    maker = {nodes[index].output[0]: index for index in order}
    users: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        for name in node.input:
            users.setdefault(name, []).append(index)

    def undoes(index: int) -> bool:
        """Whether it brings back what another transpose has exchanged."""
        first = order.get(maker.get(nodes[index].input[0], -1), ())
        return bool(first) and [first[axis] for axis in order[index]] == list(range(len(first)))

    free = {index for index in order if undoes(index)}
    for index, permutation in order.items():
        takers = users.get(nodes[index].output[0], [])
        taken = all(taker in free or nodes[taker].op_type in _PRODUCTS for taker in takers)
        if takers and taken and _swaps_the_last_two(permutation) and nodes[index].output[0] not in outputs:
            free.add(index)
    return free


def fold_weights(workload: Workload) -> Workload:
    """The workload as it runs when its weights never change: what depends on nothing else is among the weights.

    A folded result takes the place of the weights it was made of, unless something else still reads those.
    """
    known = {name for name, tensor in workload.tensors.items() if tensor.role in _STORED}
    folded: set[str] = set()
    kept = []
    for layer in workload.layers:
        if all(name in known or name in folded for name in layer.reads):
            folded.update(layer.writes)
        else:
            kept.append(layer)
    if not folded:
        return workload
    read = {name for layer in kept for name in layer.reads} | set(workload.outputs)
    unused = {name for layer in workload.layers for name in (*layer.reads, *layer.writes)} - read
    unused -= {name for layer in kept for name in layer.writes}
    tensors = {n: _stored(t) if n in folded else t for n, t in workload.tensors.items() if n not in unused}
    layers = [replace(x, weights=tuple(n for n in x.reads if tensors[n].role in ("parameter", "frozen"))) for x in kept]
    return replace(workload, layers=tuple(layers), tensors=tensors)


def _stored(tensor: Tensor) -> Tensor:
    return replace(tensor, role="frozen")


def _permutation(node: NodeProto, rank: Mapping[str, int]) -> list[int]:
    """The order of the dimensions, which is reversed where the node does not say."""
    backwards = list(reversed(range(rank.get(node.input[0], 0))))
    return next((list(a.ints) for a in node.attribute if a.name == "perm"), backwards)


def _swaps_the_last_two(permutation: Sequence[int]) -> bool:
    size = len(permutation)
    return size >= 2 and list(permutation) == [*range(size - 2), size - 1, size - 2]

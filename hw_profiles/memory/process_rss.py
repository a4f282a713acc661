"""Resident memory of our own client on a board: at each thing it does, as a central estimate and as an upper bound.

What the process holds, in order: the interpreter and its packages (`base`); the local samples; the bundle's weights;
and then, one after the other, never together:

    inference   a session over the weights: some bytes for each node, the weights again as the runtime rearranges them,
                and the arena
    training    the state twice (the step is a function: it reads one copy and writes the other), the trained weights of
                the round before and those on their way out, a session and its arena
    closing     inference, with the sums of the run's last round beside it in float64: after rounds that trained FFC's,
                a triangle of D(D+1)/2, the full matrix it is taken from, and the copies of which the contribution is
                encoded and put into the outbox; of a bundle that trains nothing those of its own method

The arena is the greedy packing of `liveness` with the nodes in ONNX Runtime's order (depth first from the last result),
times a factor for what its allocator wastes and for the second copies it makes of blocked layouts.

The coefficients are data, `client_memory.json`, with how they were measured, on real clients; `python
benchmarks/device/memory_model.py --fit` measures them anew. The same file has the margin of the upper bound, which
decides whether a bundle fits, and the largest of everything that was measured: beyond that a figure is extrapolated.
Figures are `predicted`. Decisions 053 and 067.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from math import prod

from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.contract.methods import last_method, method
from protofleet.hw_profiles.memory.liveness import blocks_of, pack
from protofleet.hw_profiles.workload.model import Workload

__all__ = [
    "COEFFICIENTS",
    "ClientMemory",
    "Model",
    "Terms",
    "client_memory",
    "execution_order",
    "load_model",
    "memory_terms",
]

_STORED = ("parameter", "frozen", "buffer", "optimizer")
_STATE = ("parameter", "buffer", "optimizer", "next", "frozen")
COEFFICIENTS = ("base_bytes", "session_bytes", "node_bytes", "weight_factor", "arena_factor", "gram_factor")
_RANGED = ("weights", "state", "nodes", "arena", "step_nodes", "step_arena", "gram")
_WORDS = {
    "weights": "weights", "state": "training state", "nodes": "graph", "arena": "working values of inference",
    "step_nodes": "training graph", "step_arena": "working values of training",
    "gram": "sums of the closing round",
}  # fmt: skip


@dataclass(frozen=True)
class Terms:
    """What the coefficients multiply, and what is known without them: bytes, but for the two numbers of nodes.

    Attributes:
        data: the local samples, uint8, and their labels.
        weights: of the bundle.
        trained: weights and running statistics that training has changed; 0 where nothing trains.
        state: both copies of what the training step reads and writes.
        nodes, arena: of the features graph at as many photos as a device takes at a time.
        step_nodes, step_arena: of the training step.
        gram: the sums of the run's last round, float64.
    """

    data: int
    weights: int
    trained: int
    state: int
    nodes: int
    arena: int
    step_nodes: int
    step_arena: int
    gram: int


@dataclass(frozen=True)
class Model:
    """`client_memory.json`: coefficients, margin of the upper bound, and the largest terms that were measured."""

    coefficients: Mapping[str, float]
    margin: float
    largest: Mapping[str, float]


@dataclass(frozen=True)
class ClientMemory:
    """Peak resident bytes of the client by what it does, as central estimates; `kind` is `predicted`.

    Attributes:
        process: the interpreter, its packages and the samples, which are there all the time.
        training: 0 where nothing trains.
        loading: while the samples are read, when they may be there twice.
        margin: what the upper bound is, in units of the estimate.
        beyond: in words, in what it is larger than all that was measured.
    """

    process: int
    loading: int
    inference: int
    training: int
    closing: int
    margin: float
    beyond: tuple[str, ...] = ()
    kind: str = "predicted"

    @property
    def peak_bytes(self) -> int:
        """The central estimate over a device's life: rounds of the bundle's method and the closing one."""
        return max(self.loading, self.inference, self.training, self.closing)

    def at_most(self, estimate: int) -> int:
        """The upper bound of one of the estimates."""
        return int(self.margin * estimate)


def client_memory(terms: Terms, model: Model | None = None) -> ClientMemory:
    """Peak resident memory of the client with a bundle of these terms.

    Args:
        model: None for the one that ships.
    """
    known = model or load_model()
    c = known.coefficients
    process = c["base_bytes"] + terms.data
    session = process + terms.weights + c["session_bytes"]
    inference = session + terms.trained + c["node_bytes"] * terms.nodes
    inference += c["weight_factor"] * terms.weights + c["arena_factor"] * terms.arena
    training = session + 2 * terms.trained + terms.state
    training += c["node_bytes"] * terms.step_nodes + c["arena_factor"] * terms.step_arena
    return ClientMemory(
        process=int(process),
        loading=int(process + terms.data + terms.weights),
        inference=int(inference),
        training=int(training) if terms.state else 0,
        closing=int(inference + c["gram_factor"] * terms.gram),
        margin=known.margin,
        beyond=tuple(_WORDS[name] for name in _RANGED if getattr(terms, name) > known.largest[name]),
    )


@lru_cache(maxsize=1)
def load_model() -> Model:
    """The coefficients that ship with Protofleet."""
    text = resources.files("protofleet.hw_profiles.memory").joinpath("client_memory.json").read_text(encoding="utf-8")
    table = json.loads(text)
    coefficients = {name: float(table["coefficients"][name]) for name in COEFFICIENTS}
    return Model(coefficients, float(table["margin"]), {name: float(table["largest"][name]) for name in _RANGED})


def memory_terms(manifest: Manifest, features: Workload, step: Workload | None, samples: int) -> Terms:
    """The terms of a bundle on a device that holds `samples` images.

    Args:
        features: the inference graph at `manifest.extraction_batch`, weights folded (`constant_folding.fold_weights`).
        step: the training step, or None.
    """
    last = last_method(method(manifest.method))
    width = last.row_width(last.resolved_in(manifest.hyper), manifest.features)
    stored = {role: sum(4 * prod(t.shape) for t in manifest.state if t.role == role) for role in _STORED_IN_BUNDLE}
    trained = stored["param"] + stored["buffer"] if step is not None else 0
    return Terms(
        data=samples * (prod(manifest.input_shape) + 8),
        weights=sum(stored.values()),
        trained=trained,
        state=0 if step is None else sum(t.nbytes() for t in step.tensors.values() if t.role in _STATE),
        nodes=len(features.layers),
        arena=_arena(features, training=False),
        step_nodes=0 if step is None else len(step.layers),
        step_arena=0 if step is None else _arena(step, training=True),
        gram=8 * last.statistic.numbers(manifest.classes, width),
    )


_STORED_IN_BUNDLE = ("param", "buffer", "frozen", "trunk")


def _arena(workload: Workload, *, training: bool) -> int:
    ordered = execution_order(workload)
    bound = set(ordered.outputs) if training else set()
    tensors = ordered.tensors
    return pack([b for b in blocks_of(ordered) if tensors[b.name].role != "input" and b.name not in bound])


def execution_order(workload: Workload) -> Workload:
    """The same layers in the order in which ONNX Runtime runs them: depth first, from the last result backwards."""
    stored = {
        name for name, tensor in workload.tensors.items() if tensor.role in _STORED
    }  # updated in place, if at all
    maker = {n: index for index, layer in enumerate(workload.layers) for n in layer.writes if n not in stored}
    used = {name for layer in workload.layers for name in layer.reads} - stored
    leaves = [i for i, layer in enumerate(workload.layers) if not any(name in used for name in layer.writes)]
    waiting, visited, order = [(index, False) for index in leaves], set(), []
    while waiting:
        index, done = waiting.pop()
        if done:
            order.append(workload.layers[index])
        elif index not in visited:
            visited.add(index)
            before = sorted({maker[name] for name in workload.layers[index].reads if name in maker})
            waiting += [(index, True), *((earlier, False) for earlier in before)]
    return replace(workload, layers=tuple(order))

"""Resident memory of our own client on a board: the process, ONNX Runtime, the weights, and what a step holds.

In order: the interpreter and its packages (`base`); the weights that the bundle keeps; a session, which takes a fixed
amount and some for each node; in training, the state twice (the step is a function: it reads one copy and writes the
other) and the arena; in inference, the weights again as the runtime rearranges them, and the arena. The arena is the
greedy packing of `memory` with the nodes in ONNX Runtime's order (depth first from the last result), times a factor
for what its allocator wastes and for the second copies it makes of blocked layouts.

The five coefficients are data, `client_memory.json`, with how they were measured; `python benchmarks/memory_model.py
--fit` measures them anew. Figures are `predicted`. DESIGN section 5, memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources

from hw_profiles.memory import blocks_of, pack
from hw_profiles.workload import Workload

__all__ = ["COEFFICIENTS", "ClientMemory", "client_memory", "execution_order", "load_coefficients", "memory_terms"]

_STORED = ("parameter", "frozen", "buffer", "optimizer")
COEFFICIENTS = ("base_bytes", "session_bytes", "node_bytes", "inference_weight_factor", "arena_factor")


@dataclass(frozen=True)
class ClientMemory:
    """Peak resident bytes of the client, by part; `kind` is `predicted`."""

    process: int
    runtime: int
    weights: int
    state: int
    arena: int
    kind: str = "predicted"

    @property
    def peak_bytes(self) -> int:
        """All parts together."""
        return self.process + self.runtime + self.weights + self.state + self.arena

    def by_use(self) -> dict[str, int]:
        """The parts, which sum to `peak_bytes`."""
        return {name: getattr(self, name) for name in ("process", "runtime", "weights", "state", "arena")}


def client_memory(
    workload: Workload,
    *,
    training: bool,
    float_bytes: float = 4,
    arena_scale: float = 1.0,
    coefficients: Mapping[str, float] | None = None,
) -> ClientMemory:
    """Peak resident memory of the client while it runs this graph of a bundle.

    Args:
        workload: `features.onnx` at the batch it runs at, or `train_step.onnx`.
        training: which of the two it is.
        float_bytes: of weights and values in inference at another precision; training is fp32.
        arena_scale: for another batch than the training graph's own: how much its working values grow.
        coefficients: by the names in `COEFFICIENTS`; None for those that ship.
    """
    given = coefficients or load_coefficients()
    terms = memory_terms(workload, training=training)
    narrow = float_bytes / 4
    copies = narrow * terms["weights"] * (0 if training else given["inference_weight_factor"])
    return ClientMemory(
        process=int(given["base_bytes"]),
        runtime=int(given["session_bytes"] + given["node_bytes"] * terms["nodes"] + copies),
        weights=int(narrow * terms["weights"]),
        state=terms["state"],
        arena=int(given["arena_factor"] * terms["arena"] * arena_scale * narrow),
    )


@lru_cache(maxsize=1)
def load_coefficients() -> dict[str, float]:
    """The coefficients that ship with Protofleet."""
    text = resources.files("hw_profiles").joinpath("client_memory.json").read_text(encoding="utf-8")
    return {name: float(json.loads(text)["coefficients"][name]) for name in COEFFICIENTS}


def memory_terms(workload: Workload, *, training: bool) -> dict[str, int]:
    """What the coefficients multiply: nodes, bytes of weights, of both copies of the state, of the packed arena."""
    ordered = execution_order(workload)
    bound = set(ordered.outputs) if training else set()
    tensors = ordered.tensors
    blocks = [b for b in blocks_of(ordered) if tensors[b.name].role != "input" and b.name not in bound]
    stored = ("parameter", "frozen", "buffer")
    state = ("parameter", "buffer", "optimizer", "next", "frozen")
    return {
        "nodes": len(ordered.layers),
        "weights": sum(t.nbytes() for t in tensors.values() if t.role in stored),
        "state": sum(t.nbytes() for t in tensors.values() if t.role in state) if training else 0,
        "arena": pack(blocks),
    }


def execution_order(workload: Workload) -> Workload:
    """The same layers in the order in which ONNX Runtime runs them: depth first, from the last result backwards."""
    stored = {
        name for name, tensor in workload.tensors.items() if tensor.role in _STORED
    }  # updated in place, if at all
    maker = {n: index for index, layer in enumerate(workload.layers) for n in layer.writes if n not in stored}
    used = {name for layer in workload.layers for name in layer.reads} - stored
    leaves = [i for i, layer in enumerate(workload.layers) if not any(name in used for name in layer.writes)]
    waiting, seen, order = [(index, False) for index in leaves], set(), []
    while waiting:
        index, done = waiting.pop()
        if done:
            order.append(workload.layers[index])
        elif index not in seen:
            seen.add(index)
            before = sorted({maker[name] for name in workload.layers[index].reads if name in maker})
            waiting += [(index, True), *((earlier, False) for earlier in before)]
    return replace(workload, layers=tuple(order))

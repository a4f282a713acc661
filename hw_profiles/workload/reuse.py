"""How far back each number of a workload was last touched: what a cache of a given size would have lost by then.

A network that runs again and again meets its weights once a run, after all its other bytes; an activation is met
soon after it was written. So the same operator reads from another level of the memory in a network than by itself.

1. A tensor lies in a buffer. Views, and what a runtime computes in the product before it, lie in the buffer of what
   they read; a view that leaves the graph is a copy. Weights, inputs and outputs have buffers of their own. Of the
   buffers that are no longer needed an intermediate takes the one that was touched longest ago, if it is large enough
   and not twice as large: an arena puts what was given back together with its neighbours and takes the next piece of
   its list, not what a cache still holds. If there is none, it takes the smallest that is large enough, or a new one.
2. The run is gone through twice, with `between` bytes of something else after each; the second time counts.
3. The distance of a touch is the bytes of all buffers that were touched since, and its own.
4. A runtime, too, finds its own things again: what it keeps of a layer, a run after it last needed that, and the
   instructions of an operator, since the last layer of this operator.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from protofleet.hw_profiles.workload.model import Layer, Workload

__all__ = ["Touch", "constant_layers", "copied_view", "touches"]

_SPLIT = 64 << 10  # bytes; beyond twice a size and this, an arena cuts off what is too much
_PERSISTENT = frozenset(("input", "parameter", "frozen", "buffer", "optimizer", "next", "constant"))


@dataclass(frozen=True)
class Touch:
    """One tensor that a layer reads or writes, or what the runtime itself needs to begin with it.

    Attributes:
        elements: of the tensor; 1 of what is the runtime's.
        distance: bytes that were touched since this memory was, and its own.
        kind: `weight`, `read` or `written`; `node` for what is kept of the layer, `code` for its operator's.
    """

    elements: int
    distance: float
    kind: str


def constant_layers(workload: Workload) -> frozenset[str]:
    """Names of the layers that read nothing but constants: a runtime computes them once, when it loads the graph."""
    known: set[str] = set()
    names: set[str] = set()
    for layer in workload.layers:
        if all(name in known for name in layer.reads):
            known.update(layer.writes)
            names.add(layer.name)
    return frozenset(names)


def copied_view(layer: Layer, workload: Workload) -> bool:
    """Whether it is a view that leaves the graph: its bytes are copied to where they are wanted."""
    return layer.kind == "view" and any(name in workload.outputs for name in layer.writes)


def touches(workload: Workload, *, between: float = 0.0, inside: Iterable[str] = ()) -> list[list[Touch]]:
    """Of each layer, in execution order.

    Args:
        between: bytes of something else that are touched between two runs.
        inside: names of layers that run as part of the one before them.

    A layer of constants alone has none.
    """
    merged, fixed = frozenset(inside), constant_layers(workload)
    roots = _roots(workload, merged)
    layers = [
        None
        if layer.name in merged | fixed or (layer.kind == "view" and not copied_view(layer, workload))
        else (_reads(layer, roots), _writes(layer, roots))
        for layer in workload.layers
    ]
    for index, layer in enumerate(workload.layers):  # what a merged layer reads beside its product, the product reads
        if layer.name in merged - fixed and layer.kind != "view":
            layers[index] = ([n for n in _reads(layer, roots) if n not in {roots.get(w, w) for w in layer.writes}], [])
    last = {name: index for index, sets in enumerate(layers) if sets for name in (*sets[0], *sets[1])}
    kept = {roots.get(name, name) for name in workload.outputs}
    kept |= {name for name, tensor in workload.tensors.items() if tensor.role in _PERSISTENT}
    kept |= {name for layer in workload.layers if layer.name in fixed for name in layer.writes}
    memory = _Memory()
    found: list[list[Touch]] = []
    for _ in range(2):
        found = []
        for index, (layer, sets) in enumerate(zip(workload.layers, layers, strict=True)):
            row: list[Touch] = []
            if layer.name not in merged | fixed:
                row.append(Touch(1, memory.touch(f"node {index}", 0, own=True), "node"))
                row.append(Touch(1, memory.touch(f"code {layer.op}", 0, own=True), "code"))
            for place, names in enumerate(sets or ()):
                for name in names:
                    tensor = workload.tensors[name]
                    size = tensor.nbytes()
                    distance = memory.touch(name, size, own=name in kept)
                    kind = "written" if place else "weight" if tensor.role in ("parameter", "frozen") else "read"
                    row.append(Touch(tensor.elements, distance, kind))
            for names in sets or ():
                for name in names:
                    if last[name] == index and name not in kept:
                        memory.give_back(name)
            found.append(row)
        memory.others(between)
    return found


def _roots(workload: Workload, merged: frozenset[str]) -> dict[str, str]:
    """The tensor in whose buffer another lies."""
    roots: dict[str, str] = {}
    for layer in workload.layers:
        if layer.name not in merged and (layer.kind != "view" or copied_view(layer, workload)):
            continue
        made = [n for n in layer.reads if workload.tensors[n].role not in _PERSISTENT] or list(layer.reads)
        if made:
            for name in layer.writes:
                roots[name] = roots.get(made[0], made[0])
    return roots


def _reads(layer: Layer, roots: dict[str, str]) -> list[str]:
    return list(dict.fromkeys(roots.get(name, name) for name in layer.reads))


def _writes(layer: Layer, roots: dict[str, str]) -> list[str]:
    return list(dict.fromkeys(roots.get(name, name) for name in layer.writes))


class _Memory:
    """Buffers in order of their last touch."""

    def __init__(self) -> None:
        self._sizes = np.zeros(64)
        self._times = np.full(64, -1.0)
        self._buffers: dict[str, int] = {}
        self._free: list[tuple[float, int]] = []  # the smallest first
        self._count, self._now = 0, 0.0
        self._elsewhere: list[tuple[float, float]] = []  # when something else was touched, how much

    def touch(self, name: str, size: float, *, own: bool) -> float:
        if name not in self._buffers:
            place = len(self._free) if own else self._fitting(size)
            self._buffers[name] = self._free.pop(place)[1] if place < len(self._free) else self._new(size)
        index = self._buffers[name]
        at = self._times[index]
        since = float(self._sizes[: self._count][self._times[: self._count] > at].sum())
        since += sum(much for when, much in self._elsewhere if when > at)
        self._now += 1.0
        self._times[index] = self._now
        return since + size

    def _fitting(self, size: float) -> int:
        """The place in the free ones of what is taken for a size; their number where nothing fits."""
        first, end = bisect_left(self._free, (size, -1)), bisect_left(self._free, (2 * size + _SPLIT, -1))
        return min(range(first, end), key=lambda place: self._times[self._free[place][1]], default=first)

    def give_back(self, name: str) -> None:
        if name in self._buffers:
            index = self._buffers.pop(name)
            insort(self._free, (float(self._sizes[index]), index))

    def others(self, size: float) -> None:
        self._now += 1.0
        self._elsewhere.append((self._now, size))

    def _new(self, size: float) -> int:
        if self._count == len(self._sizes):
            self._sizes = np.concatenate([self._sizes, np.zeros(self._count)])
            self._times = np.concatenate([self._times, np.full(self._count, -1.0)])
        self._sizes[self._count] = size
        self._count += 1
        return self._count - 1

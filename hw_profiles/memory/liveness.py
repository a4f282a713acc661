"""The peak memory of a workload, by use.

1. A view shares the bytes of its tensor. Every other intermediate lives from the layer that writes it to the last layer
   that reads it.
2. An elementwise result may take the place of an operand that is not needed later.
3. The intermediates are packed into one arena, largest first, each at the lowest offset that is free for its whole
   life. This is the greedy-by-size packing of Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net
   Inference", 2020.

Weights, running statistics and the optimizer's state live throughout. At the fullest moment the arena's content is
divided into gradients of weights, activations saved for the backward pass, and working values. See docs/hardware.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from protofleet.hw_profiles.workload.model import Layer, Tensor, Workload

__all__ = ["LARGEST_SEARCHED", "Block", "Memory", "batch_text", "blocks_of", "largest_batch", "pack", "peak_memory"]

LARGEST_SEARCHED = 4096  # `protofleet cost` looks for no larger batch

_ALIGN = 64


@dataclass(frozen=True)
class Block:
    """One buffer: its size, and the first and last layer (inclusive) during which it must be kept."""

    name: str
    nbytes: int
    start: int
    end: int
    use: str


@dataclass(frozen=True)
class Memory:
    """Bytes at the worst moment, by use. `arena_bytes` covers gradients, activations and workspace, packed.

    Attributes:
        weights: trained and frozen parameters, and running statistics.
        optimizer: momentum.
        gradients: of the weights, live at that moment.
        activations: written by the forward pass and still to be read by the backward pass, live at that moment; in
            inference, 0.
        workspace: everything else in the arena, its gaps included.
        at_layer: the name of the layer at which the most is live.
    """

    weights: int
    optimizer: int
    gradients: int
    activations: int
    workspace: int
    arena_bytes: int
    live_bytes: int
    at_layer: str

    @property
    def peak_bytes(self) -> int:
        """All of it."""
        return self.weights + self.optimizer + self.arena_bytes

    def by_use(self) -> dict[str, int]:
        """The parts, which sum to `peak_bytes`."""
        names = ("weights", "optimizer", "gradients", "activations", "workspace")
        return {name: getattr(self, name) for name in names}


def peak_memory(workload: Workload, *, float_bytes: float | None = None) -> Memory:
    """Peak memory of running a workload once.

    Args:
        float_bytes: bytes a float takes on the device; None for the graph's own widths.
    """
    blocks = blocks_of(workload, float_bytes)
    arena = pack(blocks)
    live = _live_bytes(blocks, len(workload.layers))
    worst = int(live.argmax()) if len(live) else 0
    parts = {"gradient": 0, "saved": 0}
    for block in blocks:
        if block.start <= worst <= block.end and block.use in parts:
            parts[block.use] += block.nbytes
    weights, optimizer = _persistent(workload, float_bytes)
    return Memory(
        weights=weights,
        optimizer=optimizer,
        gradients=parts["gradient"],
        activations=parts["saved"],
        workspace=arena - parts["gradient"] - parts["saved"],
        arena_bytes=arena,
        live_bytes=int(live.max(initial=0)),
        at_layer=workload.layers[worst].name if workload.layers else "",
    )


def blocks_of(workload: Workload, float_bytes: float | None = None) -> list[Block]:
    """Every buffer of the intermediates, with its lifetime."""
    owner = _owners(workload)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    phases: dict[str, list[bool]] = {}
    size: dict[str, int] = {}
    use: dict[str, str] = {}
    for name, tensor in workload.tensors.items():
        if tensor.role == "input":
            first[owner[name]] = 0
    for index, layer in enumerate(workload.layers):
        for name in (*layer.reads, *layer.writes):
            root = owner[name]
            first.setdefault(root, index)
            last[root] = index
            phases.setdefault(root, []).append(layer.phase == "forward")
    for name in workload.outputs:
        if name in owner and owner[name] in first:
            last[owner[name]] = len(workload.layers) - 1
    for name, root in owner.items():
        tensor = workload.tensors[name]
        size[root] = max(size.get(root, 0), tensor.nbytes(float_bytes))
        if tensor.role == "gradient":
            use[root] = "gradient"
    blocks = []
    for root, start in first.items():
        if root not in last or not _transient(workload.tensors[root]):
            continue
        spans = phases[root][0] and not all(phases[root])
        blocks.append(Block(root, _aligned(size[root]), start, last[root], use.get(root, "saved" if spans else "work")))
    return blocks


def pack(blocks: list[Block]) -> int:
    """Bytes of one arena that holds every block, no two overlapping in both time and place."""
    order = sorted(blocks, key=lambda b: (-b.nbytes, b.start))
    starts, ends, lows, highs = (np.zeros(len(order), np.int64) for _ in range(4))
    for index, block in enumerate(order):
        together = (starts[:index] <= block.end) & (ends[:index] >= block.start)
        offset = _lowest_gap(lows[:index][together], highs[:index][together], block.nbytes)
        starts[index], ends[index], lows[index], highs[index] = block.start, block.end, offset, offset + block.nbytes
    return int(highs.max(initial=0))


def largest_batch(peak_bytes: Callable[[int], int], available_bytes: int, *, limit: int = 65_536) -> int:
    """The largest B in 1..limit whose peak fits; 0 when not even one sample does. The peak must not fall with B."""
    if peak_bytes(1) > available_bytes:
        return 0
    low, high = 1, 2
    while high <= limit and peak_bytes(high) <= available_bytes:
        low, high = high, high * 2
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if peak_bytes(middle) <= available_bytes else (low, middle)
    return low


def batch_text(largest: int) -> str:
    """The largest batch that fits, as a person reads it."""
    return f"{largest:,}" if largest < LARGEST_SEARCHED else f"{largest:,} or more"


def _lowest_gap(lows: np.ndarray, highs: np.ndarray, nbytes: int) -> int:
    order = np.argsort(lows, kind="stable")
    offset = 0
    for low, high in zip(lows[order].tolist(), highs[order].tolist(), strict=True):
        if low - offset >= nbytes:
            break
        offset = max(offset, high)
    return offset


def _transient(tensor: Tensor) -> bool:
    return tensor.role in ("activation", "gradient", "input")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _persistent(workload: Workload, float_bytes: float | None) -> tuple[int, int]:
    used = {n for layer in workload.layers for n in (*layer.reads, *layer.writes)}
    sizes: Mapping[str, int] = {n: workload.tensors[n].nbytes(float_bytes) for n in used}
    role = {n: workload.tensors[n].role for n in used}
    role |= {n: role.get(n.removesuffix(".next"), "parameter") for n in used if role[n] == "next"}
    weights = sum(s for n, s in sizes.items() if role[n] in ("parameter", "frozen", "buffer"))
    return weights, sum(s for n, s in sizes.items() if role[n] == "optimizer")


def _owners(workload: Workload) -> dict[str, str]:
    """Which buffer each tensor lives in: its own, or that of what it views or replaces."""
    owner = {name: name for name in workload.tensors}
    ends = {name: index for index, layer in enumerate(workload.layers) for name in layer.reads}
    ends |= dict.fromkeys(workload.outputs, len(workload.layers))
    for layer in reversed(workload.layers):  # what is viewed lives as long as its views
        if layer.kind == "view" and layer.reads:
            ends[layer.reads[0]] = max(ends.get(name, -1) for name in (layer.reads[0], *layer.writes))
    busy = dict(ends)  # until when each buffer is in use, by its owner
    for index, layer in enumerate(workload.layers):
        if layer.kind == "view" and layer.reads:
            owner |= dict.fromkeys(layer.writes, owner[layer.reads[0]])
        elif layer.kind == "elementwise" and len(layer.writes) == 1:
            _take_place(layer, index, workload.tensors, owner, busy)
    return owner


def _take_place(
    layer: Layer, index: int, tensors: Mapping[str, Tensor], owner: dict[str, str], busy: dict[str, int]
) -> None:
    """Put the result where an operand of the same size was, if nothing needs that operand any more."""
    result = tensors[layer.writes[0]]
    if result.role != "activation":
        return
    for name in layer.reads:
        root, operand = owner[name], tensors[name]
        same = operand.elements == result.elements and operand.bits == result.bits
        if same and tensors[root].role == "activation" and busy.get(root, index) == index:
            owner[result.name] = root
            busy[root] = max(index, busy.get(result.name, index))
            return


def _live_bytes(blocks: list[Block], layers: int) -> np.ndarray:
    change = np.zeros(layers + 1, np.int64)
    for block in blocks:
        change[block.start] += block.nbytes
        change[block.end + 1] -= block.nbytes
    return change.cumsum()[:layers]

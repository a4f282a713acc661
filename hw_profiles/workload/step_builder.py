"""A training step under construction: layers in order, their tensors, and gradients that wait to be passed on.

`loss_terms` writes the head and the loss on it, `training_step` the way back and the update.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from protofleet.hw_profiles.workload.model import ConvShape, Gemm, Kind, Layer, Phase, Tensor

__all__ = ["Tape"]


@dataclass
class Tape:
    """The step under construction, and the gradients that wait for the layer that made their value.

    Attributes:
        losses: names of the layers that end the forward pass: their gradients are seeded, not derived.
    """

    tensors: dict[str, Tensor]
    batch: int
    layers: list[Layer] = field(default_factory=list)
    waiting: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    losses: set[str] = field(default_factory=set)

    def tensor(self, name: str, shape: tuple[int, ...], role: str = "activation") -> str:
        self.tensors[name] = Tensor(name, shape, role)  # type: ignore[arg-type]
        return name

    def add(
        self, name: str, op: str, kind: Kind, phase: Phase, reads: tuple[str, ...], writes: tuple[str, ...],
        gemms: tuple[Gemm, ...] = (), vector_ops: int = 0, conv: ConvShape | None = None,
    ) -> None:  # fmt: skip
        reads = tuple(dict.fromkeys(reads))
        weights = tuple(n for n in reads if self.tensors[n].role in ("parameter", "frozen"))
        self.layers.append(Layer(name, op, kind, phase, reads, writes, gemms, vector_ops, conv, weights))

    def partial(self, value: str) -> str:
        """A new gradient tensor of `value`, left waiting for it."""
        tensor = self.tensors[value]
        role = "gradient" if tensor.role == "parameter" else "activation"
        name = self.tensor(f"grad{len(self.waiting[value])}:{value}", tensor.shape, role)
        self.waiting[value].append(name)
        return name

    def gradient(self, value: str, phase: Phase) -> str | None:
        """The whole gradient of `value`: the waiting ones, added."""
        parts = self.waiting.pop(value, [])
        if len(parts) < 2:
            return parts[0] if parts else None
        total = self.tensor(f"grad:{value}", self.tensors[value].shape, self.tensors[parts[0]].role)
        ops = (len(parts) - 1) * self.tensors[value].elements
        self.add(f"{value}:accumulate", "Add", "elementwise", phase, tuple(parts), (total,), vector_ops=ops)
        return total

"""The operations of a network as values, which every cost model of this room takes.

A `Workload` is an ordered list of `Layer`s over named `Tensor`s. A layer says what it computes (its operator class, its
matrix products, its vector operations) and what it touches (the tensors it reads and writes), so that the same value
answers three questions: how many cycles (`systolic`), how many bytes move (`layer_traffic`), how many live
(`liveness`).

`from_onnx` reads a workload from an ONNX graph, `training_step` derives the backward pass and the update from a forward
one, `calibration_step` what statistics cost. Nothing here knows a device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Literal

__all__ = ["KINDS", "PHASES", "ConvShape", "Gemm", "Kind", "Layer", "Phase", "Role", "Tensor", "Workload"]

Phase = Literal["forward", "input_gradient", "weight_gradient", "update", "statistic"]
Kind = Literal[
    "conv",  # k x k, dense
    "pointwise",  # 1 x 1, dense
    "depthwise",  # one filter per channel
    "grouped",  # other groups
    "linear",  # matrix product, no window
    "elementwise",
    "norm",
    "softmax",
    "pool",
    "reduce",
    "move",  # transposes, concatenations, slices, gathers: bytes but no arithmetic
    "view",  # another shape of the same bytes: free
    "unmodelled",  # an operator this room does not know: named, never silently free
]
Role = Literal["input", "parameter", "frozen", "buffer", "optimizer", "next", "gradient", "activation", "constant"]

PHASES: tuple[Phase, ...] = ("forward", "input_gradient", "weight_gradient", "update", "statistic")
KINDS: tuple[Kind, ...] = Kind.__args__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Gemm:
    """`count` independent products of (m, k) by (k, n).

    Attributes:
        diagonal: how `packed` may lay several of the `count` products side by side as one block-diagonal product:
            `k` when each has its own contraction (depthwise forward, input gradient), `mn` when they share the
            contraction and only the diagonal blocks of the result are wanted (depthwise weight gradient), empty when
            `count` is 1 or the products are not of one layer.
    """

    m: int
    n: int
    k: int
    count: int = 1
    diagonal: Literal["", "k", "mn"] = ""

    @property
    def macs(self) -> int:
        """Multiply-accumulates that are wanted; the zeros of a packed block diagonal are not."""
        return self.m * self.n * self.k * self.count


@dataclass(frozen=True)
class ConvShape:
    """A convolution's window: sizes in elements, `pads` as (top, left, bottom, right)."""

    batch: int
    height: int
    width: int
    c_in: int
    c_out: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    pads: tuple[int, int, int, int]
    dilation: tuple[int, int]
    groups: int
    out_height: int
    out_width: int


@dataclass(frozen=True)
class Tensor:
    """One named array. `bits` is its width in the graph; a cost model may store floats at another precision.

    Attributes:
        role: `next` is the second copy of a state tensor, which a functional training step writes.
        floating: whether the precision of the device applies to it (float data), or its own width does (labels, u8).
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    bits: int = 32
    floating: bool = True

    @property
    def elements(self) -> int:
        """How many numbers it holds; 1 for a scalar."""
        return prod(self.shape)

    def nbytes(self, float_bytes: float | None = None) -> int:
        """Its size in bytes, floats at `float_bytes` each where that is given."""
        width = float_bytes if self.floating and float_bytes is not None else self.bits / 8
        return int(self.elements * width)


@dataclass(frozen=True)
class Layer:
    """One operation.

    Attributes:
        name: its module's, or the module's before it with the operator (`module_names`); no two are alike.
        op: the ONNX operator, or what `training_step` calls the derived one.
        node: the name of its node in the graph; empty for a derived layer.
        gemms: the matrix products it consists of; empty when it is not one.
        vector_ops: scalar operations outside the matrix products (comparisons, adds, exponentials each count 1).
        weights: the names among `reads` that are parameters (trained or frozen).
        span: how many elements it works through at one go, side by side (`spans`); 0 where nobody has said.
        packed: whether the second operand of its product is a constant matrix, which a runtime lays out when it loads.
    """

    name: str
    op: str
    kind: Kind
    phase: Phase
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    gemms: tuple[Gemm, ...] = ()
    vector_ops: int = 0
    conv: ConvShape | None = None
    weights: tuple[str, ...] = ()
    node: str = ""
    span: int = 0
    packed: bool = False

    @property
    def macs(self) -> int:
        """Multiply-accumulates of its matrix products."""
        return sum(gemm.macs for gemm in self.gemms)


@dataclass(frozen=True)
class Workload:
    """A network at one batch size: layers in execution order, and every tensor they name.

    Attributes:
        batch: B.
        outputs: tensors that must outlive the last layer.
    """

    name: str
    batch: int
    layers: tuple[Layer, ...]
    tensors: dict[str, Tensor] = field(hash=False)
    outputs: tuple[str, ...] = ()

    @cached_property
    def unmodelled(self) -> dict[str, int]:
        """Operators that no model here covers, with how often each occurs."""
        return dict(Counter(layer.op for layer in self.layers if layer.kind == "unmodelled"))

    @property
    def macs(self) -> int:
        """Multiply-accumulates of all layers."""
        return sum(layer.macs for layer in self.layers)

    @property
    def parameters(self) -> int:
        """Trained and frozen numbers (weights, biases, norms' scales), buffers left out."""
        return sum(t.elements for t in self.tensors.values() if t.role in ("parameter", "frozen"))

    def phase(self, *phases: Phase) -> Workload:
        """The layers of these phases only."""
        return replace(self, layers=tuple(layer for layer in self.layers if layer.phase in phases))

    def elements(self, names: Iterable[str]) -> int:
        """How many numbers these tensors hold together."""
        return sum(self.tensors[name].elements for name in names)

    def nbytes(self, names: Iterable[str], float_bytes: float | None = None) -> int:
        """How many bytes these tensors hold together."""
        return sum(self.tensors[name].nbytes(float_bytes) for name in names)

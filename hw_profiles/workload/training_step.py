"""A training step, derived layer by layer from a forward graph, for each way of treating the classifier.

In order: the forward layers; the head and the loss of the method; then backwards through the layers, each giving a
weight gradient (where it has trained weights) and an input gradient (where something trained lies before it); where a
value was used twice, its gradients are added; last, the optimizer's update of every trained tensor. The result is a
`Workload` like any other: `accelerator.simulate` costs it, `memory.liveness` finds its peak.

What a method trains (docs/hardware.md, `methods`):

    fedavg       the classifier is trained: forward, input gradient, weight gradient, update; weights go up
    fedproto     as fedavg, with the distance to the class prototypes in the loss (FedProto eq. 5, 6)
    spherefed    the classifier is frozen, on unit features: no weight gradient, no update of it (SphereFed eq. 4, 5)
    prototypes   the classifier is skipped: the loss is the distance to the prototypes, which FedHP trains too

Input gradients of strided convolutions are taken as stride**2 dense products, one for each output phase, so that no
zeros are multiplied. Gradients are kept until the backward pass is over, as optimizers of the frameworks do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from contract.bundle import Manifest
from contract.errors import UsageError, near_names
from hw_profiles.workload.model import ConvShape, Gemm, Kind, Layer, Phase, Tensor, Workload

__all__ = ["HEADS", "bundle_training", "input_gradient_gemms", "training_step"]

HeadUse = Literal["trained", "frozen", "skipped"]
Optimizer = Literal["sgd", "momentum", "adam"]
# what the optimizer keeps of each parameter, and scalar operations for each of its numbers (a square root counts 3)
_OPTIMIZERS: Mapping[Optimizer, tuple[tuple[str, ...], int]] = {
    "sgd": ((), 2),
    "momentum": (("momentum",), 4),
    "adam": (("adam.mean", "adam.square"), 16),
}
HEADS: Mapping[str, HeadUse] = {
    "fedavg": "trained",
    "fedproto": "trained",
    "spherefed": "frozen",
    "prototypes": "skipped",
}
_SAVES_OUTPUT = frozenset(
    [
        "Relu",
        "Clip",
        "Sigmoid",
        "Tanh",
        "Exp",
        "Sqrt",
        "Reciprocal",
        "HardSigmoid",
        "LeakyRelu",
        "Softmax",
        "LogSoftmax",
    ]
)
_LEARNED = "prototypes.learned"
_PASSES_THROUGH = frozenset(("Add", "Sub", "Sum", "Cast"))
_LINEAR_BACKWARD = frozenset(("AveragePool", "GlobalAveragePool", "ReduceMean", "ReduceSum", "Dropout", "Neg"))


def training_step(
    forward: Workload,
    method: str,
    classes: int,
    *,
    bias: bool = False,
    optimizer: Optimizer = "momentum",
    weight_decay: bool = True,
    normalised: bool = False,
    learned: bool = False,
) -> Workload:
    """One step of `method` on the backbone whose features are `forward`'s first output, (B, D).

    Args:
        classes: C.
        bias: whether the trained head has one.
        optimizer: plain SGD, with momentum, or Adam.
        normalised: the graph already ends in unit features.
        learned: with the classifier skipped, the prototypes of all classes are trained too, by Adam (FedHP eq. 1, 2).

    Raises:
        UsageError: for an unknown method or fewer than one class.
    """
    if method not in HEADS:
        raise UsageError("training cost", expected="a method it knows", got=method, hint=near_names(method, HEADS))
    if classes < 1:
        raise UsageError("classes", expected="a positive integer", got=classes)
    tape = _Tape(dict(forward.tensors), forward.batch)
    tape.layers += [_in_training(layer, forward) for layer in forward.layers]
    loss = _append_head(tape, forward.outputs[0], method, classes, bias, normalised, learned)
    _differentiate(tape, loss)
    for name in [n for n, t in tape.tensors.items() if t.role == "parameter"]:
        gradient = tape.gradient(name, "weight_gradient")
        if gradient is not None:
            _update(tape, name, gradient, "adam" if name == _LEARNED else optimizer, weight_decay and name != _LEARNED)
    return Workload(f"{forward.name} {method}", forward.batch, tuple(tape.layers), tape.tensors)


def bundle_training(manifest: Manifest) -> tuple[str, dict[str, Any]]:
    """The method and the options with which `training_step` derives the step that a bundle was exported with."""
    method = {"local": "fedproto", "frozen": "spherefed", "none": "prototypes"}[manifest.head]
    return method, {
        "bias": "head.bias" in manifest.names("param"),
        "normalised": manifest.method == "spherefed",
        "optimizer": _optimizer(manifest),
        "learned": _LEARNED in manifest.names("param"),
        "weight_decay": float(manifest.hyper.get("weight_decay", 0)) > 0,
    }


def _optimizer(manifest: Manifest) -> Optimizer:
    """Of the backbone; a bundle that trains nothing is costed as the papers train."""
    kept = [name for name in manifest.names("optimizer") if not name.endswith(_LEARNED) and name != "adam.steps"]
    if not kept:
        return "sgd" if manifest.trainable else "momentum"
    return "adam" if kept[0].startswith("adam.") else "momentum"


def input_gradient_gemms(conv: ConvShape) -> tuple[Gemm, ...]:
    """The products that a convolution's input gradient consists of.

    Input position p is touched by the taps t with (p + pad - t*dilation) divisible by the stride. Positions with the
    same remainder share their taps: one product of (positions) by C_in over (taps * C_out) for each remainder.
    """
    diagonal: Literal["", "k"] = "k" if conv.groups > 1 else ""
    found: dict[tuple[int, int, int], int] = defaultdict(int)
    rows = _phases(conv.height, conv.kernel[0], conv.stride[0], conv.pads[0], conv.dilation[0])
    cols = _phases(conv.width, conv.kernel[1], conv.stride[1], conv.pads[1], conv.dilation[1])
    for high, taps_h in rows:
        for wide, taps_w in cols:
            k = taps_h * taps_w * conv.c_out // conv.groups
            if k:
                found[conv.batch * high * wide, conv.c_in // conv.groups, k] += 1
    return tuple(Gemm(m, n, k, conv.groups, diagonal) for (m, n, k), times in found.items() for _ in range(times))


def _phases(size: int, kernel: int, stride: int, pad: int, dilation: int) -> list[tuple[int, int]]:
    """For each remainder: how many positions have it, and how many taps touch them."""
    found = []
    for remainder in range(min(stride, size)):
        taps = sum((remainder + pad - tap * dilation) % stride == 0 for tap in range(kernel))
        found.append((len(range(remainder, size, stride)), taps))
    return found


def _weight_gradient_gemm(conv: ConvShape) -> Gemm:
    taps, positions = conv.kernel[0] * conv.kernel[1], conv.batch * conv.out_height * conv.out_width
    diagonal: Literal["", "mn"] = "mn" if conv.groups > 1 else ""
    return Gemm(taps * conv.c_in // conv.groups, conv.c_out // conv.groups, positions, conv.groups, diagonal)


def _in_training(layer: Layer, forward: Workload) -> Layer:
    """Batch norm takes live statistics in training: five operations a number, not two."""
    if layer.op == "BatchNormalization":
        return replace(layer, vector_ops=5 * forward.tensors[layer.reads[0]].elements)
    return layer


@dataclass
class _Tape:
    """The step under construction, and the gradients that wait for the layer that made their value."""

    tensors: dict[str, Tensor]
    batch: int
    layers: list[Layer] = field(default_factory=list)
    waiting: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

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


def _append_head(tape: _Tape, z: str, method: str, classes: int, bias: bool, normalised: bool, learned: bool) -> str:
    """Head and loss; returns the tensor whose gradient the loss gives, with that gradient waiting."""
    batch, width = tape.tensors[z].shape
    size = batch * width
    if HEADS[method] == "frozen" and not normalised:
        unit = tape.tensor("unit_features", (batch, width))
        tape.add("unit_features", "LpNormalization", "norm", "forward", (z,), (unit,), vector_ops=3 * size)
        z = unit
    start = z
    if HEADS[method] != "skipped":
        role = "parameter" if HEADS[method] == "trained" else "frozen"
        weight = tape.tensor("head.weight", (classes, width), role)
        extra = (tape.tensor("head.bias", (classes,), role),) if bias and role == "parameter" else ()
        start = tape.tensor("logits", (batch, classes))
        gemm, ops = Gemm(batch, classes, width), batch * classes if extra else 0
        tape.add("head", "Gemm", "linear", "forward", (z, weight, *extra), (start,), (gemm,), ops)
        per_number = 8 if HEADS[method] == "trained" else 3
        loss = tape.tensor("probabilities", (batch, classes))
        tape.add("loss", "Loss", "softmax", "forward", (start,), (loss,), vector_ops=per_number * batch * classes)
        gradient = tape.partial(start)
        tape.add("loss:seed", "Sub", "elementwise", "input_gradient", (loss,), (gradient,), vector_ops=batch * classes)
    if method == "prototypes" and learned:
        _append_learned_prototypes(tape, z, classes)
    elif method in ("fedproto", "prototypes"):
        anchors = tape.tensor("prototypes", (min(batch, classes), width), "buffer")  # the rows that the labels pick
        distance = tape.tensor("offsets", (batch, width))
        tape.add("prototype_loss", "Distance", "elementwise", "forward", (z, anchors), (distance,), vector_ops=3 * size)
        gradient = tape.partial(z)
        tape.add(
            "prototype_loss:seed", "Mul", "elementwise", "input_gradient", (distance,), (gradient,), vector_ops=size
        )
    return start


def _append_learned_prototypes(tape: _Tape, z: str, classes: int) -> None:
    """Distances of every sample to every prototype and a softmax over them; gradients of both (FedHP eq. 1)."""
    batch, width = tape.tensors[z].shape
    anchors = tape.tensor(_LEARNED, (classes, width), "parameter")
    offsets = tape.tensor("offsets", (batch, classes, width))
    ops = 3 * batch * classes * width + 8 * batch * classes
    tape.add("prototype_loss", "Distance", "elementwise", "forward", (z, anchors), (offsets,), vector_ops=ops)
    partials = (tape.partial(z), tape.partial(anchors))
    for name, phase, gradient in (
        ("prototype_loss:seed", "input_gradient", partials[0]),
        ("prototype_loss:prototypes", "weight_gradient", partials[1]),
    ):
        ops = 2 * batch * classes * width
        tape.add(name, "ReduceSum", "reduce", phase, (offsets,), (gradient,), vector_ops=ops)  # type: ignore[arg-type]


def _differentiate(tape: _Tape, loss: str) -> None:
    forward = [layer for layer in tape.layers if layer.phase == "forward"]
    wanted = {n for n, t in tape.tensors.items() if t.role == "parameter"}
    data = {n for n, t in tape.tensors.items() if t.role == "input"}
    for layer in forward:
        if any(n in wanted for n in layer.reads):
            wanted.update(layer.writes)
        if any(n in data for n in layer.reads):
            data.update(layer.writes)
    for layer in reversed(forward):
        if layer.name in ("loss", "prototype_loss"):
            continue
        targets = [n for n in layer.reads if n in wanted]
        output = next((n for n in layer.writes if n in tape.waiting), None)
        if output is None or not targets:
            continue
        gradient = tape.gradient(output, "input_gradient")
        if gradient is not None:
            _backward(tape, layer, gradient, targets, data)


def _backward(tape: _Tape, layer: Layer, gradient: str, targets: list[str], data: set[str]) -> None:
    """Append what one layer's backward pass consists of."""
    if layer.gemms:
        _backward_product(tape, layer, gradient, targets, data)
    elif layer.kind == "norm":
        size = tape.tensors[layer.reads[0]].elements
        reads, writes = (gradient, *layer.reads), tuple(tape.partial(n) for n in targets)
        tape.add(f"{layer.name}:gradient", layer.op, "norm", "input_gradient", reads, writes, vector_ops=8 * size)
    elif layer.kind == "view" or layer.op in _PASSES_THROUGH:
        for target in targets:
            _pass_through(tape, layer, gradient, target)
    else:
        reads = (gradient, *_saved(layer))
        for target in targets:
            phase: Phase = "input_gradient" if target in data else "weight_gradient"
            ops = 0 if layer.kind == "move" else 2 * max(tape.tensors[n].elements for n in (gradient, target))
            name = f"{layer.name}:gradient"
            tape.add(name, layer.op, layer.kind, phase, reads, (tape.partial(target),), vector_ops=ops)


def _saved(layer: Layer) -> tuple[str, ...]:
    """What the layer's backward pass needs of its forward pass."""
    if layer.kind in ("move",) or layer.op in _LINEAR_BACKWARD:
        return ()
    if layer.op in _SAVES_OUTPUT:
        return layer.writes[:1]
    if layer.kind in ("pool", "reduce"):
        return (*layer.reads, *layer.writes[:1])
    return layer.reads


def _pass_through(tape: _Tape, layer: Layer, gradient: str, target: str) -> None:
    """The gradient unchanged, or summed over what was broadcast."""
    name, phase = f"{layer.name}:gradient", tape.layers[-1].phase
    size, full = tape.tensors[target].elements, tape.tensors[gradient].elements
    partial = tape.partial(target)
    if size == full:
        tape.add(name, "Identity", "view", phase, (gradient,), (partial,))
    else:
        tape.add(name, "ReduceSum", "reduce", phase, (gradient,), (partial,), vector_ops=full)


def _backward_product(tape: _Tape, layer: Layer, gradient: str, targets: list[str], data: set[str]) -> None:
    first, second = layer.reads[0], layer.reads[1]
    if second in targets:
        extra = tuple(n for n in layer.reads[2:] if n in targets)
        writes = tuple(tape.partial(n) for n in (second, *extra))
        ops = tape.tensors[gradient].elements if extra else 0  # the bias gradient: a sum over the batch
        phase: Phase = "input_gradient" if second in data else "weight_gradient"
        gemms = _second_operand(layer)
        tape.add(
            f"{layer.name}:{phase}", layer.op, layer.kind, phase, (gradient, first), writes, gemms, ops, layer.conv
        )
    if first in targets:
        phase = "input_gradient" if first in data else "weight_gradient"
        gemms = _first_operand(layer)
        write = (tape.partial(first),)
        tape.add(f"{layer.name}:{phase}", layer.op, layer.kind, phase, (gradient, second), write, gemms, 0, layer.conv)


def _second_operand(layer: Layer) -> tuple[Gemm, ...]:
    if layer.conv is not None:
        return (_weight_gradient_gemm(layer.conv),)
    return tuple(Gemm(g.k, g.n, g.m, g.count, "mn" if g.diagonal else "") for g in layer.gemms)


def _first_operand(layer: Layer) -> tuple[Gemm, ...]:
    if layer.conv is not None:
        return input_gradient_gemms(layer.conv)
    return tuple(Gemm(g.m, g.k, g.n, g.count, g.diagonal) for g in layer.gemms)


def _update(tape: _Tape, name: str, gradient: str, optimizer: Optimizer, weight_decay: bool) -> None:
    """v ← μ·v + g + wd·p, then p ← p - lr·v, or Adam's step, in place."""
    tensor = tape.tensors[name]
    kept, ops_each = _OPTIMIZERS[optimizer]
    state = tuple(tape.tensor(f"{each}.{name}", tensor.shape, "optimizer") for each in kept)
    ops = tensor.elements * (ops_each + 2 * weight_decay)
    tape.add(
        f"{name}:update",
        "Adam" if optimizer == "adam" else "SGD",
        "elementwise",
        "update",
        (name, gradient, *state),
        (name, *state),
        vector_ops=ops,
    )

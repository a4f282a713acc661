"""A training step, derived layer by layer from a forward graph and what is trained on it.

1. The forward layers.
2. The head and the terms of the loss (`loss_terms`).
3. Backwards through the layers. Each gives a weight gradient if it has trained weights, and an input gradient if
   something trained lies before it. Gradients of a value that was used twice are added.
4. The optimizer's update of every trained tensor.

A `Training` says what is trained: that of a method's class, or of a paper's baseline. The result is a `Workload`.
`accelerator.simulate` gives its cost, and `memory.liveness` its peak.

Input gradients of strided convolutions are computed as stride**2 dense products, one for each output phase, so that no
zeros are multiplied. Gradients are kept until the backward pass is over, as in the frameworks' optimizers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from protofleet.contract.methods.optimizers import Update
from protofleet.hw_profiles.workload.loss_terms import append_loss
from protofleet.hw_profiles.workload.model import ConvShape, Gemm, Layer, Phase, Tensor, Workload
from protofleet.hw_profiles.workload.step_builder import Tape
from protofleet.hw_profiles.workload.training import Training

__all__ = ["input_gradient_gemms", "training_step"]

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
_PASSES_THROUGH = frozenset(("Add", "Sub", "Sum", "Cast"))
_LINEAR_BACKWARD = frozenset(("AveragePool", "GlobalAveragePool", "ReduceMean", "ReduceSum", "Dropout", "Neg"))


def training_step(forward: Workload, training: Training) -> Workload:
    """One step of `training` on the backbone whose features are `forward`'s first output, (B, D).

    Raises:
        MethodError: when a term of the loss needs a head or a state tensor that is not trained on.
    """
    tape = Tape(dict(forward.tensors), forward.batch)
    tape.layers += [_in_training(layer, forward) for layer in forward.layers]
    append_loss(tape, forward.outputs[0], training)
    _differentiate(tape)
    for name in [n for n, t in tape.tensors.items() if t.role == "parameter"]:
        gradient = tape.gradient(name, "weight_gradient")
        if gradient is not None:
            _update(tape, name, gradient, training.update_of(name))
    return Workload(f"{forward.name} {training.name}", forward.batch, tuple(tape.layers), tape.tensors)


def input_gradient_gemms(conv: ConvShape) -> tuple[Gemm, ...]:
    """The products that a convolution's input gradient consists of.

    Input position p is touched by the taps t with (p + pad - t*dilation) divisible by the stride. Positions with the
    same remainder share their taps: one product of (positions) by C_in over (taps * C_out) for each remainder.
    """
    diagonal: Literal["", "k"] = "k" if conv.groups > 1 else ""
    counts: dict[tuple[int, int, int], int] = defaultdict(int)
    rows = _phases(conv.height, conv.kernel[0], conv.stride[0], conv.pads[0], conv.dilation[0])
    cols = _phases(conv.width, conv.kernel[1], conv.stride[1], conv.pads[1], conv.dilation[1])
    for high, taps_h in rows:
        for wide, taps_w in cols:
            k = taps_h * taps_w * conv.c_out // conv.groups
            if k:
                counts[conv.batch * high * wide, conv.c_in // conv.groups, k] += 1
    return tuple(Gemm(m, n, k, conv.groups, diagonal) for (m, n, k), times in counts.items() for _ in range(times))


def _phases(size: int, kernel: int, stride: int, pad: int, dilation: int) -> list[tuple[int, int]]:
    """For each remainder: how many positions have it, and how many taps touch them."""
    phases = []
    for remainder in range(min(stride, size)):
        taps = sum((remainder + pad - tap * dilation) % stride == 0 for tap in range(kernel))
        phases.append((len(range(remainder, size, stride)), taps))
    return phases


def _weight_gradient_gemm(conv: ConvShape) -> Gemm:
    taps, positions = conv.kernel[0] * conv.kernel[1], conv.batch * conv.out_height * conv.out_width
    diagonal: Literal["", "mn"] = "mn" if conv.groups > 1 else ""
    return Gemm(taps * conv.c_in // conv.groups, conv.c_out // conv.groups, positions, conv.groups, diagonal)


def _in_training(layer: Layer, forward: Workload) -> Layer:
    """Batch norm takes live statistics in training, five operations a number, not two; in a tail they stay."""
    if layer.op == "BatchNormalization" and _is_live(layer, forward.tensors):
        return replace(layer, vector_ops=5 * forward.tensors[layer.reads[0]].elements)
    return layer


def _is_live(layer: Layer, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a normalisation takes the batch's statistics: a tail's takes those that it was pretrained with."""
    statistics = [name for name in layer.reads[3:] if name in tensors]
    return layer.op != "BatchNormalization" or not statistics or tensors[statistics[0]].role != "frozen"


def _differentiate(tape: Tape) -> None:
    forward = [layer for layer in tape.layers if layer.phase == "forward"]
    wanted = {n for n, t in tape.tensors.items() if t.role == "parameter"}
    data = {n for n, t in tape.tensors.items() if t.role == "input"}
    for layer in forward:
        if any(n in wanted for n in layer.reads):
            wanted.update(layer.writes)
        if any(n in data for n in layer.reads):
            data.update(layer.writes)
    for layer in reversed(forward):
        if layer.name in tape.losses:
            continue
        targets = [n for n in layer.reads if n in wanted]
        output = next((n for n in layer.writes if n in tape.waiting), None)
        if output is None or not targets:
            continue
        gradient = tape.gradient(output, "input_gradient")
        if gradient is not None:
            _backward(tape, layer, gradient, targets, data)


def _backward(tape: Tape, layer: Layer, gradient: str, targets: list[str], data: set[str]) -> None:
    """Append what one layer's backward pass consists of."""
    if layer.gemms:
        _backward_product(tape, layer, gradient, targets, data)
    elif layer.kind == "norm":
        size = tape.tensors[layer.reads[0]].elements
        ops_each = 8 if _is_live(layer, tape.tensors) else 5
        reads, writes = (gradient, *layer.reads), tuple(tape.partial(n) for n in targets)
        tape.add(
            f"{layer.name}:gradient", layer.op, "norm", "input_gradient", reads, writes, vector_ops=ops_each * size
        )
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


def _pass_through(tape: Tape, layer: Layer, gradient: str, target: str) -> None:
    """The gradient unchanged, or summed over what was broadcast."""
    name, phase = f"{layer.name}:gradient", tape.layers[-1].phase
    size, full = tape.tensors[target].elements, tape.tensors[gradient].elements
    partial = tape.partial(target)
    if size == full:
        tape.add(name, "Identity", "view", phase, (gradient,), (partial,))
    else:
        tape.add(name, "ReduceSum", "reduce", phase, (gradient,), (partial,), vector_ops=full)


def _backward_product(tape: Tape, layer: Layer, gradient: str, targets: list[str], data: set[str]) -> None:
    first = layer.reads[0]
    second = layer.reads[1] if len(layer.reads) > 1 else None  # a constant, which is not among what is read
    if second is not None and second in targets:
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
        reads = (gradient,) if second is None else (gradient, second)
        write = (tape.partial(first),)
        tape.add(f"{layer.name}:{phase}", layer.op, layer.kind, phase, reads, write, gemms, 0, layer.conv)


def _second_operand(layer: Layer) -> tuple[Gemm, ...]:
    if layer.conv is not None:
        return (_weight_gradient_gemm(layer.conv),)
    return tuple(Gemm(g.k, g.n, g.m, g.count, "mn" if g.diagonal else "") for g in layer.gemms)


def _first_operand(layer: Layer) -> tuple[Gemm, ...]:
    if layer.conv is not None:
        return input_gradient_gemms(layer.conv)
    return tuple(Gemm(g.m, g.k, g.n, g.count, g.diagonal) for g in layer.gemms)


def _update(tape: Tape, name: str, gradient: str, update: Update) -> None:
    """The optimizer's step, in place: `contract/methods/optimizers.py` has what it keeps and how much it takes."""
    tensor, rule = tape.tensors[name], update.rule
    state = tuple(tape.tensor(f"{key}.{name}", tensor.shape, "optimizer") for key in rule.kept)
    if rule.steps is not None and rule.steps not in tape.tensors:  # one more step, for both bias corrections
        steps = tape.tensor(rule.steps, (), "optimizer")
        tape.add(f"{steps}:update", rule.title, "elementwise", "update", (steps,), (steps,), vector_ops=1)
    tape.add(
        f"{name}:update",
        rule.title,
        "elementwise",
        "update",
        (name, gradient, *state),
        (name, *state),
        vector_ops=tensor.elements * update.operations,
    )

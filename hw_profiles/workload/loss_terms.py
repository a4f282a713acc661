"""The head and the loss of a training step: what each term of a loss takes, forward and back.

A method names its terms (`protofleet.contract.methods.base.LossTerm`); each is written here once, for B samples, C
classes and features of width D. The gradients that are products are derived of the products before them by
`training_step`; here is what a term seeds them with. In scalar operations:

    cross-entropy        softmax over the head's answers: 8·B·C; seed B·C
    squared-error        against the one-hot label: 3·B·C; seed B·C
    prototype-distance   each sample to its class's prototype: 3·B·D; seed B·D
    all-prototypes       each sample to every prototype, and a softmax: 3·B·C·D + 8·B·C; 2·B·C·D for the features'
                         gradient, and as much for the prototypes' where those are trained
    anchors              the cosine of each trained prototype to a fixed one: 5·C·D; 8·C·D back
    soft-predictions     the head on C prototypes (a product C x C x D, and one for the head's gradient), a softmax and
                         a distance for each: 11·C·C; seed 5·C·C
    mean-features        the batch's class means (a product C x D x B, and one back), each to its prototype: 3·C·D;
                         seed 2·C·D
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from protofleet.contract.errors import MethodError
from protofleet.contract.methods.base import LossTerm
from protofleet.hw_profiles.workload.model import Gemm
from protofleet.hw_profiles.workload.step_builder import Tape
from protofleet.hw_profiles.workload.training import Training

__all__ = ["append_loss"]


def append_loss(tape: Tape, features: str, training: Training) -> None:
    """Write head and loss of `training` on the tape, with the gradients that the loss gives waiting there.

    Args:
        features: the name of f(x), (B, D).

    Raises:
        MethodError: when a term needs a head, or a state tensor, that there is none of.
    """
    for tensor in training.state:
        tape.tensors[tensor.name] = tensor
    scene = _Scene(tape, features, training)
    for term in training.loss:
        _TERMS[term](scene)
    for tensor in training.state:
        if tensor.role == "parameter" and not tape.waiting[tensor.name]:  # of a term that is the method's own
            gradient, ops = tape.partial(tensor.name), 2 * tensor.elements
            tape.add(
                f"{tensor.name}:gradient", "Mul", "elementwise", "weight_gradient", (tensor.name,), (gradient,),
                vector_ops=ops,
            )  # fmt: skip


@dataclass(frozen=True)
class _Scene:
    """What the terms share: features and the head's answers to them, made once."""

    tape: Tape
    features: str
    training: Training

    @property
    def batch(self) -> int:
        return self.tape.tensors[self.features].shape[0]

    @property
    def classes(self) -> int:
        return self.training.classes

    @property
    def width(self) -> int:
        return self.tape.tensors[self.features].shape[1]

    @cached_property
    def z(self) -> str:
        """The features, on the unit sphere where the method has them there."""
        if not self.training.unit_features:
            return self.features
        unit, ops = self.tape.tensor("unit_features", (self.batch, self.width)), 3 * self.batch * self.width
        self.tape.add("unit_features", "LpNormalization", "norm", "forward", (self.features,), (unit,), vector_ops=ops)
        return unit

    @cached_property
    def head(self) -> tuple[str, ...]:
        """The head's weight, and its bias."""
        if self.training.head == "skipped":
            raise MethodError(f"the loss of {self.training.name}", expected="a head", got="none")
        role = "parameter" if self.training.head == "trained" else "frozen"
        weight = self.tape.tensor("head.weight", (self.classes, self.width), role)
        extra = self.training.bias and role == "parameter"
        return (weight, self.tape.tensor("head.bias", (self.classes,), role)) if extra else (weight,)

    def answers(self, name: str, rows: str) -> str:
        """The head's answers to rows (n, D): (n, C)."""
        count = self.tape.tensors[rows].shape[0]
        head, scores = (
            self.head,
            self.tape.tensor("logits" if name == "head" else f"{name}.logits", (count, self.classes)),
        )
        gemm, ops = Gemm(count, self.classes, self.width), count * self.classes * (len(head) - 1)
        self.tape.add(name, "Gemm", "linear", "forward", (rows, *head), (scores,), (gemm,), ops)
        return scores

    @cached_property
    def logits(self) -> str:
        return self.answers("head", self.z)

    @cached_property
    def prototypes(self) -> str:
        """The global prototypes: of the labels in the batch, or all, where a term asks for all."""
        all_of_them = any(term not in _PER_LABEL for term in self.training.loss)
        rows = self.classes if all_of_them else min(self.batch, self.classes)
        return self.tape.tensor("prototypes", (rows, self.width), "buffer")

    def own_rows(self, role: str) -> str | None:
        """The method's own tensor of one row a class: its trained one, or its fixed one."""
        shape = (self.classes, self.width)
        return next((t.name for t in self.training.state if (t.role, t.shape) == (role, shape)), None)

    def loss(self, name: str, op: str, reads: tuple[str, ...], shape: tuple[int, ...], ops: int) -> str:
        """A layer that ends the forward pass; what it writes is kept for its gradient."""
        kept = self.tape.tensor(f"{name}.kept", shape)
        self.tape.losses.add(name)
        kind = "softmax" if op == "Loss" else "elementwise"
        self.tape.add(name, op, kind, "forward", reads, (kept,), vector_ops=ops)  # type: ignore[arg-type]
        return kept

    def seed(self, name: str, op: str, kept: str, value: str, ops: int) -> None:
        """The gradient that the loss gives of `value`."""
        gradient = self.tape.partial(value)
        trained = self.tape.tensors[value].role == "parameter"
        phase, kind = (
            "weight_gradient" if trained else "input_gradient",
            "reduce" if op == "ReduceSum" else "elementwise",
        )
        self.tape.add(name, op, kind, phase, (kept,), (gradient,), vector_ops=ops)  # type: ignore[arg-type]


def _of_logits(name: LossTerm, ops_each: int) -> Callable[[_Scene], None]:
    def append(scene: _Scene) -> None:
        size, shape = scene.batch * scene.classes, (scene.batch, scene.classes)
        kept = scene.loss(name, "Loss", (scene.logits,), shape, ops_each * size)
        scene.seed(f"{name}:seed", "Sub", kept, scene.logits, size)

    return append


def _prototype_distance(scene: _Scene) -> None:
    name, size = "prototype-distance", scene.batch * scene.width
    kept = scene.loss(name, "Distance", (scene.z, scene.prototypes), (scene.batch, scene.width), 3 * size)
    scene.seed(f"{name}:seed", "Mul", kept, scene.z, size)


def _all_prototypes(scene: _Scene) -> None:
    name, learned = "all-prototypes", scene.own_rows("parameter")
    shape = (scene.batch, scene.classes, scene.width)
    size = scene.batch * scene.classes * scene.width
    ops = 3 * size + 8 * scene.batch * scene.classes
    kept = scene.loss(name, "Distance", (scene.z, learned or scene.prototypes), shape, ops)
    scene.seed(f"{name}:seed", "ReduceSum", kept, scene.z, 2 * size)
    if learned is not None:
        scene.seed(f"{name}:prototypes", "ReduceSum", kept, learned, 2 * size)


def _anchors(scene: _Scene) -> None:
    learned = scene.own_rows("parameter")
    if learned is None:
        raise MethodError(f"the loss of {scene.training.name}", expected="trained prototypes in its state", got="none")
    name, size = "anchors", scene.classes * scene.width
    fixed = scene.own_rows("frozen") or scene.prototypes
    kept = scene.loss(name, "Distance", (learned, fixed), (scene.classes, scene.width), 5 * size)
    scene.seed(f"{name}:seed", "Mul", kept, learned, 8 * size)


def _soft_predictions(scene: _Scene) -> None:
    name, size = "soft-predictions", scene.classes * scene.classes
    taught = scene.tape.tensor("soft_predictions", (scene.classes, scene.classes), "buffer")
    scores = scene.answers(f"{name}:head", scene.prototypes)
    kept = scene.loss(name, "Loss", (scores, taught), (scene.classes, scene.classes), 11 * size)
    scene.seed(f"{name}:seed", "Mul", kept, scores, 5 * size)


def _mean_features(scene: _Scene) -> None:
    name, size = "mean-features", scene.classes * scene.width
    members = scene.tape.tensor("members", (scene.classes, scene.batch), "input")  # the labels, one-hot
    means, gemm = (
        scene.tape.tensor("class_means", (scene.classes, scene.width)),
        Gemm(scene.classes, scene.width, scene.batch),
    )
    scene.tape.add(f"{name}:means", "MatMul", "linear", "forward", (members, scene.z), (means,), (gemm,))
    kept = scene.loss(name, "Distance", (means, scene.prototypes), (scene.classes, scene.width), 3 * size)
    scene.seed(f"{name}:seed", "Mul", kept, means, 2 * size)


_PER_LABEL: tuple[LossTerm, ...] = ("cross-entropy", "squared-error", "prototype-distance")
_TERMS: Mapping[LossTerm, Callable[[_Scene], None]] = {
    "cross-entropy": _of_logits("cross-entropy", 8),
    "squared-error": _of_logits("squared-error", 3),
    "prototype-distance": _prototype_distance,
    "all-prototypes": _all_prototypes,
    "anchors": _anchors,
    "soft-predictions": _soft_predictions,
    "mean-features": _mean_features,
}

"""One training step as a pure function, and its trace.

    x, y, sample_weight, prototypes, prototype_mask, lr, further…, state…  →  loss, state′…

- `StepPlan` lists the state tensors and their roles.
- `TrainingStep` is the function: images to features, features to the method's objective (export/objectives/), gradients
  by autograd, then the update (export/steps/optimizers.py).
- `trace_step` records it as a functional fx graph of `aten` operators. It uses fake tensors, so tracing computes
  nothing.

Properties of the step:

- Dropout and stochastic depth are off: an ONNX graph that draws random numbers cannot be compared with torch.
- BatchNorm counts real samples only (export/modules/norms.py).
- A batch of padding only leaves parameters and running statistics as they are. See docs/bundle.md.
- If only the tail is trained (export/steps/cut.py), the step takes the trunk's activations in place of the images, and
  has no tensor that the tail does not read. Batch normalisation then keeps its running statistics.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from protofleet.contract.bundle.bundle_file import STEP_INPUTS, Role, StateTensor
from protofleet.contract.methods import Method, Value
from protofleet.contract.names import named
from protofleet.export.modules.norms import BatchContext, RealBatchNorm, allow_one_value, to_real_batch_norm
from protofleet.export.modules.preprocess import Preprocess
from protofleet.export.modules.random_layers import switch_off
from protofleet.export.objectives import Scene, find_objective
from protofleet.export.operators.trace import record
from protofleet.export.steps.cut import Cut
from protofleet.export.steps.optimizers import optimizer_state, update

__all__ = ["Preprocess", "StepPlan", "TrainingStep", "example_inputs", "plan_step", "quiet", "trace_step"]

HEADS: Mapping[str, Mapping[str, Role]] = MappingProxyType(  # by the head's form: its tensors, and the role of each
    {"local": {"head.weight": "param", "head.bias": "param"}, "frozen": {"head.weight": "frozen"}, "none": {}}
)


@dataclass(frozen=True)
class StepPlan:
    """What a training step consists of.

    Attributes:
        method: whose objective is minimised, and which says how its own tensors move.
        hyper: its resolved hyper-parameters; all but `lr` are baked into the graph.
        classes: C.
        features: D.
        state: every state tensor, in input order.
        inputs: the inputs that are not state, in order.
        cut: where only the tail of the network is trained.
    """

    method: Method
    hyper: Mapping[str, Value]
    classes: int
    features: int
    state: tuple[StateTensor, ...]
    inputs: tuple[str, ...] = STEP_INPUTS
    cut: Cut | None = None

    @property
    def step_state(self) -> tuple[StateTensor, ...]:
        """The state tensors that the step takes: all but the trunk's."""
        return tuple(t for t in self.state if t.role != "trunk")

    def names(self, *roles: str) -> tuple[str, ...]:
        """State tensors of these roles, in order."""
        return tuple(t.name for t in self.state if t.role in roles)

    @property
    def updated(self) -> tuple[str, ...]:
        """State tensors that a step writes, in output order."""
        return self.names("param", "buffer", "optimizer")

    def reading(self, weights: Collection[str]) -> StepPlan:
        """The plan without those tensors of the backbone, and of its optimizer, that are not among `weights`.

        A network may have parameters that its features do not depend on.
        """
        idle = [t.name for t in self.state if t.name.startswith("backbone.") and t.name not in weights]
        used = [t for t in self.state if not any(t.name == name or t.name.endswith(f".{name}") for name in idle)]
        return replace(self, state=tuple(used))


def plan_step(
    backbone: nn.Module,
    entry: Method,
    hyper: Mapping[str, Value],
    head: str,
    classes: int,
    features: int,
    cut: Cut | None = None,
) -> StepPlan:
    """List the state tensors of training `backbone` by a method: param, buffer, frozen, trunk, then optimizer.

    Args:
        hyper: resolved.
        head: one of the method's.
        cut: where only the tail is trained.
    """
    state = []
    for name, tensor in backbone.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            role = _role(backbone, name) if cut is None else _role_in(cut, name)
            state.append(StateTensor(f"backbone.{name}", tuple(tensor.shape), role))  # type: ignore[arg-type]
    shapes = {"head.weight": (classes, features), "head.bias": (classes,)}
    state += [StateTensor(name, shapes[name], role) for name, role in named(HEADS, head, "the head").items()]
    for name, own in entry.state(classes, features, seed=0).items():
        state.append(StateTensor(name, own.shape, "param" if own.trained else "frozen"))
    state += optimizer_state([t for t in state if t.role == "param"], entry, hyper)
    images = STEP_INPUTS[:1] if cut is None else tuple(activation.name for activation in cut.activations)
    inputs = (*images, *STEP_INPUTS[1:], *entry.step_inputs(hyper))
    return StepPlan(entry, hyper, classes, features, tuple(state), inputs, cut)


def _role(backbone: nn.Module, name: str) -> str:
    """The role of a tensor of the network, if all of the network is trained."""
    running = {f"{n}.{b}" for n, m in _batch_norms(backbone) for b in ("running_mean", "running_var")}
    trained = {n for n, p in backbone.named_parameters() if p.requires_grad}
    return "param" if name in trained else "buffer" if name in running else "frozen"


def _role_in(cut: Cut, name: str) -> str:
    """The role of a tensor of the network, if only its tail is trained."""
    return "param" if name in cut.trained else "frozen" if name in cut.read else "trunk"


def quiet(net: nn.Module) -> nn.Module:
    """Training mode without random layers, in place: BatchNorm trains, dropout and stochastic depth are off."""
    return switch_off(allow_one_value(net).train())


class TrainingStep(nn.Module):
    """The step as a function of its inputs; the backbone's own weights are never used.

    Args:
        batch: B.
    """

    def __init__(self, backbone: nn.Module, preprocess: Preprocess, plan: StepPlan, batch: int) -> None:
        super().__init__()
        self._context = BatchContext()
        self._tail = None if plan.cut is None else plan.cut.trainable_tail(batch)
        self._net = to_real_batch_norm(quiet(copy.deepcopy(backbone)), self._context, "backbone.")
        self._preprocess = preprocess
        self._plan = plan

    def names(self) -> tuple[str, ...]:
        """What `forward` takes, in order: the plan's inputs, then its state."""
        return (*self._plan.inputs, *(t.name for t in self._plan.step_state))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Loss, then every updated state tensor in the plan's order."""
        plan = self._plan
        tensors, loss, grads = self.gradients(inputs)
        moves = torch.clamp(self._context.real.sum(), max=1.0)  # a batch of padding moves nothing
        new = {**tensors, **update(tensors, grads, moves, plan.method, plan.hyper), **self._context.new_running()}
        return (loss.detach(), *(new[name] for name in plan.updated))

    def gradients(self, inputs: Sequence[Tensor]) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
        """The inputs of `forward` by name, the loss, and the gradient of each trained tensor that has one."""
        plan, tensors = self._plan, dict(zip(self.names(), inputs, strict=True))
        self._context.seen = []
        self._context.real = (tensors["sample_weight"] > 0).to(torch.float32)
        trained = {name: tensors[name].detach().requires_grad_() for name in plan.names("param")}
        merged = {**tensors, **trained}
        features = self._features(tensors, merged)
        loss = find_objective(plan.method.objective or "")(Scene.of(features, merged, merged), plan.hyper)
        # Not torch.func.grad: it asks for gradients that can be differentiated again, which are longer formulas.
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        return tensors, loss, {n: g for n, g in zip(trained, gradients, strict=True) if g is not None}

    def _features(self, inputs: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> Tensor:
        """(B, D) features, of the images or of the trunk's activations."""
        weights = {n.removeprefix("backbone."): t for n, t in state.items() if n.startswith("backbone.")}
        if self._tail is None or self._plan.cut is None:
            return functional_call(self._net, weights, (self._preprocess(inputs["x"]),))
        activations = [inputs[activation.name] for activation in self._plan.cut.activations]
        return self._tail.module(*activations, *(weights[name] for name in self._tail.weights))[0]


def example_inputs(plan: StepPlan, batch: int, input_shape: tuple[int, int, int]) -> dict[str, Tensor]:
    """Tensors of the shapes and types of the step's inputs that are not state, by name; their values do not matter."""
    sizes = {"classes": plan.classes, "features": plan.features}
    activations = plan.cut.activations if plan.cut else ()
    return {
        "x": torch.zeros((batch, *input_shape), dtype=torch.uint8),
        **{activation.name: torch.zeros((batch, *activation.shape)) for activation in activations},
        "y": torch.zeros(batch, dtype=torch.int64),
        "sample_weight": torch.ones(batch),
        "prototypes": torch.zeros(plan.classes, plan.features),
        "prototype_mask": torch.zeros(plan.classes),
        "lr": torch.tensor(0.0),
        **{
            name: torch.zeros([sizes[axis] for axis in axes])
            for name, axes in plan.method.step_inputs(plan.hyper).items()
        },
    }


def trace_step(step: TrainingStep, example: tuple[Tensor, ...]) -> fx.GraphModule:
    """The step as a functional graph of `aten` operators, those that have no translation being decomposed.

    Args:
        example: tensors of the right shapes and types; their values do not matter.

    Raises:
        ExportError: when the backbone normalises over the batch by other means than BatchNorm modules, writes to its
            buffers, or draws random numbers.
    """
    return record(step, example)


def _batch_norms(net: nn.Module) -> list[tuple[str, nn.Module]]:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, RealBatchNorm)
    return [(name, module) for name, module in net.named_modules() if isinstance(module, kinds)]

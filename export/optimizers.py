"""The update of a training step, as plain functions of tensors: what torch.optim's SGD and Adam do.

    SGD    g += wd·p;  v = μ·v + g;  p −= lr·v            v = 0 before the first step
    Adam   g += wd·p;  m = β₁m + (1−β₁)g;  s = β₂s + (1−β₂)g²;  p −= lr·(m/(1−β₁ᵗ)) / (√(s/(1−β₂ᵗ)) + ε)

Which of them moves a tensor follows from the method's hyper-parameters: `optimizer` (SGD where there is none) for the
weights, and Adam with `prototype_lr` and without weight decay for learned prototypes (FedHP). Their state is tensors
among the step's, all zero at the start of a round. Sources: torch.optim's documentation; Kingma and Ba, ICLR 2015.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from contract.bundle import StateTensor
from contract.methods import Value

__all__ = ["BETAS", "EPSILON", "LEARNED", "is_adam", "optimizer_state", "torch_optimizers", "update"]

LEARNED = "prototypes.learned"
BETAS = (0.9, 0.999)
EPSILON = 1e-8
_STEPS = "adam.steps"


def is_adam(name: str, hyper: Mapping[str, Value]) -> bool:
    """Whether the trained tensor of that name is moved by Adam."""
    return name == LEARNED or hyper.get("optimizer") == "adam"


def optimizer_state(trained: Sequence[StateTensor], hyper: Mapping[str, Value]) -> list[StateTensor]:
    """The optimizer's tensors for these trained ones."""
    state = []
    for t in trained:
        if is_adam(t.name, hyper):
            state += [StateTensor(f"adam.{moment}.{t.name}", t.shape, "optimizer") for moment in ("mean", "square")]
        elif hyper.get("momentum"):
            state.append(StateTensor(f"momentum.{t.name}", t.shape, "optimizer"))
    if any(t.name.startswith("adam.") for t in state):
        state.append(StateTensor(_STEPS, (), "optimizer"))
    return state


def update(
    tensors: Mapping[str, Tensor], grads: Mapping[str, Tensor], moves: Tensor, hyper: Mapping[str, Value]
) -> dict[str, Tensor]:
    """New values of the tensors that have a gradient, and of their optimizer state.

    Args:
        tensors: the step's inputs and state, `lr` among them.
        grads: by name of the trained tensor; those without a gradient are left alone, as torch does.
        moves: scalar, 1 for a step, 0 for one that must move nothing.
    """
    new: dict[str, Tensor] = {}
    adam = [name for name in grads if is_adam(name, hyper)]
    if adam:
        new[_STEPS] = tensors[_STEPS] + 1.0
        own_rate = {name: float(hyper["prototype_lr"]) if name == LEARNED else tensors["lr"] for name in adam}
        rates = {name: moves * rate for name, rate in own_rate.items()}
        scale = [_bias_correction(beta, new[_STEPS]) for beta in BETAS]
        for name in adam:
            new |= _adam(name, tensors, _decayed(name, tensors, grads, hyper), rates[name], scale)
    rate, momentum = tensors["lr"] * moves, float(hyper.get("momentum", 0.0))
    for name in grads:
        if name in adam:
            continue
        step = _decayed(name, tensors, grads, hyper)
        if momentum:
            step = momentum * tensors[f"momentum.{name}"] + step
            new[f"momentum.{name}"] = step
        new[name] = tensors[name] - rate * step
    return new


def torch_optimizers(
    trained: Mapping[str, nn.Parameter], hyper: Mapping[str, Value], lr: float
) -> list[torch.optim.Optimizer]:
    """The same update by torch's own optimizers: what `update` is held against, and what the lab trains with."""
    groups: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for name, parameter in trained.items():
        if name != LEARNED:
            groups[is_adam(name, hyper)].append(parameter)
    decay = float(hyper["weight_decay"])
    optimizers: list[torch.optim.Optimizer] = []
    if groups[False]:
        momentum = float(hyper.get("momentum", 0.0))
        optimizers.append(torch.optim.SGD(groups[False], lr=lr, momentum=momentum, weight_decay=decay))
    if groups[True]:
        optimizers.append(torch.optim.Adam(groups[True], lr=lr, betas=BETAS, eps=EPSILON, weight_decay=decay))
    if LEARNED in trained:
        rate = float(hyper["prototype_lr"])
        optimizers.append(torch.optim.Adam([trained[LEARNED]], lr=rate, betas=BETAS, eps=EPSILON))
    return optimizers


def _decayed(
    name: str, tensors: Mapping[str, Tensor], grads: Mapping[str, Tensor], hyper: Mapping[str, Value]
) -> Tensor:
    decay = 0.0 if name == LEARNED else float(hyper["weight_decay"])
    return grads[name] + decay * tensors[name] if decay else grads[name]


def _bias_correction(beta: float, steps: Tensor) -> Tensor:
    """1 − βᵗ, to the last digits of a float32.

    βᵗ is near 1 at first, and what is left of 1 − βᵗ would be mostly rounding. With h = (t/2)·ln β it is also
    −tanh(h)·(1 + e²ʰ), where nothing cancels.
    """
    half = steps * (math.log(beta) / 2)
    return -torch.tanh(half) * (1.0 + torch.exp(2.0 * half))


def _adam(
    name: str, tensors: Mapping[str, Tensor], grad: Tensor, rate: Tensor, scale: Sequence[Tensor]
) -> dict[str, Tensor]:
    mean = BETAS[0] * tensors[f"adam.mean.{name}"] + (1.0 - BETAS[0]) * grad
    square = BETAS[1] * tensors[f"adam.square.{name}"] + (1.0 - BETAS[1]) * (grad * grad)
    step = (mean / scale[0]) / (torch.sqrt(square / scale[1]) + EPSILON)
    return {name: tensors[name] - rate * step, f"adam.mean.{name}": mean, f"adam.square.{name}": square}

"""The update of a training step, as plain functions of tensors: the same as torch.optim's SGD and Adam.

    SGD    g += wd·p;  v = μ·v + g;  p −= lr·v            v = 0 before the first step
    Adam   g += wd·p;  m = β₁m + (1−β₁)g;  s = β₂s + (1−β₂)g²;  p −= lr·(m/(1−β₁ᵗ)) / (√(s/(1−β₂ᵗ)) + ε)

The method says which of them moves a tensor, and at which rate (`Method.update_of`). Their state is tensors of the
step, all zero at the start of a round. Sources: torch.optim's documentation; Kingma and Ba, ICLR 2015.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from protofleet.contract.bundle.bundle_file import StateTensor
from protofleet.contract.methods import Method, Value
from protofleet.contract.methods.base import Update

__all__ = ["BETAS", "EPSILON", "optimizer_state", "torch_optimizers", "update"]

BETAS = (0.9, 0.999)
EPSILON = 1e-8
_STEPS = "adam.steps"


def optimizer_state(trained: Sequence[StateTensor], method: Method, hyper: Mapping[str, Value]) -> list[StateTensor]:
    """The optimizer's tensors for these trained ones."""
    state = []
    for t in trained:
        move = method.update_of(t.name, hyper)
        if move.optimizer == "adam":
            state += [StateTensor(f"adam.{moment}.{t.name}", t.shape, "optimizer") for moment in ("mean", "square")]
        elif move.momentum:
            state.append(StateTensor(f"momentum.{t.name}", t.shape, "optimizer"))
    if any(t.name.startswith("adam.") for t in state):
        state.append(StateTensor(_STEPS, (), "optimizer"))
    return state


def update(
    tensors: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    moves: Tensor,
    method: Method,
    hyper: Mapping[str, Value],
) -> dict[str, Tensor]:
    """New values of the tensors that have a gradient, and of their optimizer state.

    Args:
        tensors: the step's inputs and state, `lr` among them.
        grads: by name of the trained tensor; those without a gradient are left alone, as torch does.
        moves: scalar, 1 for a step, 0 for one that must move nothing.
    """
    new: dict[str, Tensor] = {}
    updates = {name: method.update_of(name, hyper) for name in grads}
    if any(move.optimizer == "adam" for move in updates.values()):
        new[_STEPS] = tensors[_STEPS] + 1.0
        scale = [_bias_correction(beta, new[_STEPS]) for beta in BETAS]
    rates = {lr: moves * (tensors["lr"] if lr is None else lr) for lr in {move.lr for move in updates.values()}}
    for name, move in updates.items():
        rate = rates[move.lr]
        grad = grads[name] + move.weight_decay * tensors[name] if move.weight_decay else grads[name]
        if move.optimizer == "adam":
            new |= _adam(name, tensors, grad, rate, scale)
            continue
        if move.momentum:
            grad = new[f"momentum.{name}"] = move.momentum * tensors[f"momentum.{name}"] + grad
        new[name] = tensors[name] - rate * grad
    return new


def torch_optimizers(
    trained: Mapping[str, nn.Parameter], method: Method, hyper: Mapping[str, Value], lr: float
) -> list[torch.optim.Optimizer]:
    """The same update by torch's own optimizers: what `update` is held against."""
    groups: dict[Update, list[nn.Parameter]] = {}
    for name, parameter in trained.items():
        groups.setdefault(method.update_of(name, hyper), []).append(parameter)
    optimizers: list[torch.optim.Optimizer] = []
    for move, parameters in groups.items():
        rate, decay = lr if move.lr is None else move.lr, move.weight_decay
        if move.optimizer == "adam":
            optimizers.append(torch.optim.Adam(parameters, lr=rate, betas=BETAS, eps=EPSILON, weight_decay=decay))
        else:
            optimizers.append(torch.optim.SGD(parameters, lr=rate, momentum=move.momentum, weight_decay=decay))
    return optimizers


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

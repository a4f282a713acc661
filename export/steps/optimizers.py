"""The update of a training step, as plain functions of tensors: the same as torch.optim's SGD and Adam.

    SGD    g += wd·p;  v = μ·v + g;  p −= lr·v            v = 0 before the first step
    Adam   g += wd·p;  m = β₁m + (1−β₁)g;  s = β₂s + (1−β₂)g²;  p −= lr·(m/(1−β₁ᵗ)) / (√(s/(1−β₂ᵗ)) + ε)

The method says which of them moves a tensor, and at which rate (`Method.update_of`). Their state is tensors of the
step, all zero at the start of a round. Sources: torch.optim's documentation; Kingma and Ba, ICLR 2015.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from protofleet.contract.bundle.bundle_file import StateTensor
from protofleet.contract.methods import Method, Value
from protofleet.contract.methods.optimizers import Update

__all__ = ["BETAS", "EPSILON", "optimizer_state", "torch_optimizer", "torch_optimizers", "update"]

BETAS = (0.9, 0.999)
EPSILON = 1e-8


def optimizer_state(trained: Sequence[StateTensor], method: Method, hyper: Mapping[str, Value]) -> list[StateTensor]:
    """The optimizer's tensors for these trained ones."""
    state, counts = [], dict[str, None]()  # each count of steps once, in order
    for t in trained:
        rule = method.update_of(t.name, hyper).rule
        state += [StateTensor(f"{kept}.{t.name}", t.shape, "optimizer") for kept in rule.kept]
        counts |= {rule.steps: None} if rule.steps is not None else {}
    return [*state, *(StateTensor(steps, (), "optimizer") for steps in counts)]


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
    for steps in dict.fromkeys(move.rule.steps for move in updates.values() if move.rule.steps is not None):
        new[steps] = tensors[steps] + 1.0
    scales = {steps: [_bias_correction(beta, count) for beta in BETAS] for steps, count in new.items()}
    rates = {lr: moves * (tensors["lr"] if lr is None else lr) for lr in {move.lr for move in updates.values()}}
    for name, move in updates.items():
        grad = grads[name] + move.weight_decay * tensors[name] if move.weight_decay else grads[name]
        step, kept = _STEPS[move.optimizer](move, name, tensors, grad, scales.get(move.rule.steps, ()))
        new |= {name: tensors[name] - rates[move.lr] * step, **kept}
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
        optimizers.append(torch_optimizer(parameters, move, lr))
    return optimizers


def torch_optimizer(parameters: Iterable[Tensor], move: Update, lr: float) -> torch.optim.Optimizer:
    """Torch's optimizer of an update; `lr` is the rate where the update has none of its own."""
    return _OF_TORCH[move.optimizer](parameters, move, lr if move.lr is None else move.lr)


def _bias_correction(beta: float, steps: Tensor) -> Tensor:
    """1 − βᵗ, to the last digits of a float32.

    βᵗ is near 1 at first, and what is left of 1 − βᵗ would be mostly rounding. With h = (t/2)·ln β it is also
    −tanh(h)·(1 + e²ʰ), where nothing cancels.
    """
    half = steps * (math.log(beta) / 2)
    return -torch.tanh(half) * (1.0 + torch.exp(2.0 * half))


Step = tuple[Tensor, dict[str, Tensor]]
"""What the rate multiplies, and new values of the tensors that the optimizer keeps."""


def _sgd(move: Update, name: str, tensors: Mapping[str, Tensor], grad: Tensor, scale: Sequence[Tensor]) -> Step:
    if not move.momentum:
        return grad, {}
    moved = move.momentum * tensors[f"momentum.{name}"] + grad
    return moved, {f"momentum.{name}": moved}


def _adam(move: Update, name: str, tensors: Mapping[str, Tensor], grad: Tensor, scale: Sequence[Tensor]) -> Step:
    mean = BETAS[0] * tensors[f"adam.mean.{name}"] + (1.0 - BETAS[0]) * grad
    square = BETAS[1] * tensors[f"adam.square.{name}"] + (1.0 - BETAS[1]) * (grad * grad)
    step = (mean / scale[0]) / (torch.sqrt(square / scale[1]) + EPSILON)
    return step, {f"adam.mean.{name}": mean, f"adam.square.{name}": square}


def _torch_sgd(parameters: Iterable[Tensor], move: Update, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=move.momentum, weight_decay=move.weight_decay)


def _torch_adam(parameters: Iterable[Tensor], move: Update, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=lr, betas=BETAS, eps=EPSILON, weight_decay=move.weight_decay)


_STEPS = {"sgd": _sgd, "adam": _adam}  # by the name in `OPTIMIZERS`
_OF_TORCH = {"sgd": _torch_sgd, "adam": _torch_adam}

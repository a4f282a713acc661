"""What the server does with the clients' weights: the base algorithms, one function each.

Every rule sees the weights w that the clients started from, each client's weights w_i, and its share p_i of the
samples, and returns the next w.

- `fedavg` (McMahan et al., AISTATS 2017): Σ p_i w_i. `fedprox` (Li et al., MLSys 2020) is the same at the server; its
  proximal term is in the clients' steps.
- `fednova` (Wang et al., NeurIPS 2020): with ‖a_i‖ the pull of client i's optimiser (its steps, more with momentum),
  w − (Σ p_i ‖a_i‖)·Σ p_i (w − w_i)/‖a_i‖: clients that take more steps count no more than their samples.
- `fedavgm`, `fedadam` (Reddi et al., ICLR 2021, algorithm 2): Δ = Σ p_i w_i − w is a gradient for a server optimiser,
  SGD with momentum, or Adam without bias correction and with ε outside the root.

Only trained tensors follow these; running statistics of BatchNorm are averaged by p_i whatever the rule. All sums are
float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from contract.methods import Value

__all__ = ["BASES", "Outcome", "Server", "average"]

BASES = ("fedavg", "fedprox", "fednova", "fedavgm", "fedadam")
State = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one client's local training left.

    Attributes:
        client: its number, from 0.
        state: its floating-point tensors by name.
        pull: as in `lab.engine.local_training.Fitted`.
    """

    client: int
    state: State
    samples: int
    pull: float
    loss: float


@dataclass
class Server:
    """One server; keeps the moments of its optimiser between rounds.

    Attributes:
        hyper: `base`, `server_lr`, `server_momentum`, `server_beta`, `server_epsilon`.
        trained: names of the tensors that training moves.
        moments: by name of the tensor, of the server's optimiser.
    """

    hyper: Mapping[str, Value]
    trained: frozenset[str]
    moments: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def step(self, start: Mapping[str, Tensor], outcomes: Sequence[Outcome]) -> State:
        """The next weights; `start` where no client took part."""
        if not outcomes:
            return dict(start)
        samples, base = [each.samples for each in outcomes], str(self.hyper["base"])
        states = [each.state for each in outcomes]
        if base == "fednova":
            states = _rescaled(start, outcomes, self.trained)
        mean = average(states, samples)
        if base not in ("fedavgm", "fedadam"):
            return mean
        return {name: self._moved(base, name, start[name], mean[name]) for name in mean}

    def _moved(self, base: str, name: str, start: Tensor, mean: Tensor) -> Tensor:
        if name not in self.trained:
            return mean
        delta = mean.double() - start.double()
        zero = torch.zeros_like(delta)
        first, second = self.moments.get(name, (zero, zero))
        beta, lr = float(self.hyper["server_momentum"]), float(self.hyper["server_lr"])
        if base == "fedavgm":
            first = beta * first + delta
            step = first
        else:
            squares = float(self.hyper["server_beta"])
            first = beta * first + (1.0 - beta) * delta
            second = squares * second + (1.0 - squares) * delta**2
            step = first / (second.sqrt() + float(self.hyper["server_epsilon"]))
        self.moments[name] = (first, second)
        return (start.double() + lr * step).to(start.dtype)


def average(states: Sequence[Mapping[str, Tensor]], samples: Sequence[float]) -> State:
    """Σ n_i w_i / Σ n_i for each tensor, summed in float64, in the tensors' own dtype."""
    shares = [n / sum(samples) for n in samples]
    averaged = {}
    for name, like in states[0].items():
        total = torch.zeros(like.shape, dtype=torch.float64)
        for state, share in zip(states, shares, strict=True):
            total.add_(state[name], alpha=share)
        averaged[name] = total.to(like.dtype)
    return averaged


def _rescaled(start: Mapping[str, Tensor], outcomes: Sequence[Outcome], trained: frozenset[str]) -> list[State]:
    """Each client's weights, its way from `start` rescaled to the mean pull: their average is FedNova's step."""
    total = sum(each.samples for each in outcomes)
    effective = sum(each.samples / total * each.pull for each in outcomes)
    return [
        {
            name: start[name].double() + (tensor.double() - start[name].double()) * (effective / each.pull)
            if name in trained
            else tensor
            for name, tensor in each.state.items()
        }
        for each in outcomes
    ]

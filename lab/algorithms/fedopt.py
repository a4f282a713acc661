"""FedOpt (Reddi et al., ICLR 2021, algorithm 2): an optimiser at the server.

The optimiser uses Δ = Σ p_i w_i − w as a gradient. It is SGD with momentum (FedAvgM), or Adam without bias correction
and with ε outside the root (FedAdam).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from protofleet.contract.methods import Hyper, Value
from protofleet.lab.algorithms.base import CrossEntropy, Outcome, State, WeightRule

__all__ = ["FedAdam", "FedAvgM", "ServerAdam", "ServerMomentum"]

_PAPER = "Reddi et al., ICLR 2021"
_MOMENTUM = {"server_momentum": Hyper(0.9, f"β of fedavgm, β₁ of fedadam, {_PAPER}", high=0.9999)}


class ServerMomentum(WeightRule):
    """SGD with momentum at the server. It keeps its moments between rounds, by name of the tensor."""

    name = "fedavgm"
    source = _PAPER
    hyper: ClassVar = {"server_lr": Hyper(1.0, f"of the server's optimiser, {_PAPER}", low=1e-9), **_MOMENTUM}

    def __init__(self, hyper: Mapping[str, Value], trained: frozenset[str], clients: int) -> None:
        super().__init__(hyper, trained, clients)
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}

    def merge(self, start: Mapping[str, Tensor], outcomes: Sequence[Outcome]) -> State:
        mean = super().merge(start, outcomes)
        if not outcomes:
            return mean
        return {
            name: self._moved(name, start[name], mean[name]) if name in self._trained else mean[name] for name in mean
        }

    def _moved(self, name: str, start: Tensor, mean: Tensor) -> Tensor:
        delta = mean.double() - start.double()
        zero = torch.zeros_like(delta)
        step, self._moments[name] = self._step(delta, *self._moments.get(name, (zero, zero)))
        return (start.double() + float(self.settled["server_lr"]) * step).to(start.dtype)

    def _step(self, delta: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The step, and the moments for the next round."""
        first = float(self.settled["server_momentum"]) * first + delta
        return first, (first, second)

    def state(self) -> dict[str, Any]:
        return {"moments": self._moments}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._moments = state["moments"]


class ServerAdam(ServerMomentum):
    """Adam at the server."""

    name = "fedadam"
    hyper: ClassVar = {
        "server_lr": Hyper(0.01, f"of the server's optimiser, {_PAPER}", low=1e-9),
        **_MOMENTUM,
        "server_beta": Hyper(0.99, f"β₂ of fedadam, {_PAPER}", high=0.999999),
        "server_epsilon": Hyper(1e-3, f"τ of fedadam, {_PAPER}", low=1e-12),
    }

    def _step(self, delta: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        beta, squares = float(self.settled["server_momentum"]), float(self.settled["server_beta"])
        first = beta * first + (1.0 - beta) * delta
        second = squares * second + (1.0 - squares) * delta**2
        return first / (second.sqrt() + float(self.settled["server_epsilon"])), (first, second)


class FedAvgM(CrossEntropy):
    name = "fedavgm"
    summary = "FedAvg, momentum at the server"
    source = _PAPER
    base = "fedavgm"


class FedAdam(CrossEntropy):
    name = "fedadam"
    summary = "FedAvg, Adam at the server"
    source = _PAPER
    base = "fedadam"

"""SCAFFOLD (Karimireddy et al., ICML 2020): control variates against the drift of clients with different data.

The server holds c and each client its own c_i, all zero at first. From each of a client's gradients c_i is subtracted
and c is added, so that clients move towards the common optimum. After K steps (the paper's option II),

    c_i⁺ = c_i − c + (x − y_i)/(K·η)          η: the clients' rate
    x⁺   = x + η_g·mean_i(y_i − x)            over the participants S, each counting the same
    c⁺   = c + |S|/N · mean_i(c_i⁺ − c_i)

With momentum or a rate that halves, K is the optimiser's pull ‖a‖₁ (`Fitted.pull`), so that (x − y_i)/(η·pull) is a
weighted mean of the client's gradients, as it is for plain SGD. A client sends its weights and c_i⁺ − c_i: twice the
bytes of FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from protofleet.contract.errors import MethodError
from protofleet.contract.methods import Hyper, Value
from protofleet.lab.algorithms.base import Correction, CrossEntropy, Outcome, State, WeightRule, average
from protofleet.lab.training.local_training import Fitted

__all__ = ["ControlVariates", "Scaffold"]

_PAPER = "Karimireddy et al., ICML 2020"


class ControlVariates(WeightRule):
    """The server's c and every client's c_i, both by name of the tensor.

    Raises:
        MethodError: the clients' optimiser is not SGD, so its steps are no sums of gradients.
    """

    name = "scaffold"
    source = _PAPER
    correction_ops = 2
    hyper: ClassVar = {"server_lr": Hyper(1.0, f"η_g, {_PAPER}", low=1e-9)}

    def __init__(self, hyper: Mapping[str, Value], trained: frozenset[str], clients: int) -> None:
        super().__init__(hyper, trained, clients)
        if hyper["optimizer"] != "sgd":
            raise MethodError("optimizer", expected="sgd, for the base scaffold", got=hyper["optimizer"])
        self._server: State = {}
        self._own: dict[int, State] = {}
        self._changes: list[State] = []  # c_i⁺ − c_i of this round's participants

    def told(self, client: int) -> tuple[State, State]:
        """c and c_i."""
        return self._server, self._own.get(client, {})

    def correction(self, told: tuple[State, State], start: Mapping[str, Tensor]) -> Correction | None:
        server, own = told

        def correct(parameters: Mapping[str, Tensor]) -> None:
            for name, p in parameters.items():
                if p.grad is not None and name in server:
                    p.grad.add_(server[name])
                if p.grad is not None and name in own:
                    p.grad.sub_(own[name])

        return correct

    def trained(self, client: int, start: Mapping[str, Tensor], state: Mapping[str, Tensor], fitted: Fitted) -> int:
        own, change = self._own.get(client, {}), {}
        for name in sorted(self._trained):
            mean_gradient = (start[name] - state[name]) / (fitted.lr * fitted.pull)
            change[name] = mean_gradient - self._server.get(name, torch.zeros_like(mean_gradient))
        self._own[client] = {name: own[name] + moved if name in own else moved for name, moved in change.items()}
        self._changes.append(change)
        return 4 * sum(moved.numel() for moved in change.values())

    def merge(self, start: Mapping[str, Tensor], outcomes: Sequence[Outcome]) -> State:
        if not outcomes:
            return dict(start)
        weighted, alike = super().merge(start, outcomes), average([o.state for o in outcomes], [1.0] * len(outcomes))
        step, share = float(self.settled["server_lr"]), len(self._changes) / self._clients
        mean = average(self._changes, [1.0] * len(self._changes))
        for name, moved in mean.items():
            self._server[name] = self._server.get(name, torch.zeros_like(moved)) + share * moved
        self._changes = []
        return {
            name: start[name] + step * (alike[name] - start[name]) if name in self._trained else weighted[name]
            for name in weighted
        }

    def state(self) -> dict[str, Any]:
        return {"server": self._server, "own": self._own}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._server, self._own = state["server"], state["own"]


class Scaffold(CrossEntropy):
    name = "scaffold"
    summary = "FedAvg with control variates against client drift"
    source = _PAPER
    base = "scaffold"
    hyper: ClassVar = {"momentum": Hyper(0.0, f"{_PAPER}: plain SGD", high=0.9999)}

"""FedProx (Li et al., MLSys 2020): FedAvg at the server, and μ/2·‖w − w₀‖² in each client's objective.

The term's gradient, μ(w − w₀), is added to each step's; w₀ are the weights that the client started from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from protofleet.contract.methods import Hyper
from protofleet.lab.algorithms.base import Correction, CrossEntropy, WeightRule

__all__ = ["FedProx", "Proximal"]

_PAPER = "Li et al., MLSys 2020"


class Proximal(WeightRule):
    """FedAvg's average. A correction pulls clients back to the weights that they started from."""

    name = "fedprox"
    source = _PAPER
    correction_ops = 3  # the way from the start, times μ, added
    hyper: ClassVar = {"mu": Hyper(0.01, f"weight of the proximal term, {_PAPER}; ours", low=1e-12)}

    def correction(self, told: Any, start: Mapping[str, Tensor]) -> Correction | None:
        mu, trained = float(self.settled["mu"]), self._trained

        def hold_back(parameters: Mapping[str, Tensor]) -> None:
            for name, p in parameters.items():
                if name in trained and p.grad is not None:
                    p.grad.add_(p.detach() - start[name], alpha=mu)

        return hold_back


class FedProx(CrossEntropy):
    name = "fedprox"
    summary = "FedAvg with a proximal term"
    source = _PAPER
    base = "fedprox"

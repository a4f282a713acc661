"""FedNova (Wang et al., NeurIPS 2020): clients that take more steps count no more than their samples.

With ‖a_i‖ the pull of client i's optimiser (its steps, more with momentum), the next weights are
w − (Σ p_i ‖a_i‖)·Σ p_i (w − w_i)/‖a_i‖.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from protofleet.lab.algorithms.base import CrossEntropy, Outcome, State, WeightRule

__all__ = ["FedNova", "Normalised"]

_PAPER = "Wang et al., NeurIPS 2020"


class Normalised(WeightRule):
    """FedNova's step: each client's change is rescaled to the mean pull, and these are averaged."""

    name = "fednova"
    source = _PAPER

    def merge(self, start: Mapping[str, Tensor], outcomes: Sequence[Outcome]) -> State:
        total = sum(outcome.samples for outcome in outcomes)
        effective = sum(outcome.samples / total * outcome.pull for outcome in outcomes)
        return super().merge(start, [self._rescaled(start, outcome, effective) for outcome in outcomes])

    def _rescaled(self, start: Mapping[str, Tensor], outcome: Outcome, effective: float) -> Outcome:
        factor = effective / outcome.pull
        return replace(
            outcome,
            state={
                name: start[name].double() + (tensor.double() - start[name].double()) * factor
                if name in self._trained
                else tensor
                for name, tensor in outcome.state.items()
            },
        )


class FedNova(CrossEntropy):
    name = "fednova"
    summary = "FedAvg, normalised by local steps"
    source = _PAPER
    base = "fednova"

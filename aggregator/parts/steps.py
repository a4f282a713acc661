"""What a coordinator did, which the server publishes and the listener is told."""

from __future__ import annotations

from dataclasses import dataclass

from protofleet.aggregator.rollout.rollout_stages import Moved
from protofleet.aggregator.rounds.round_machine import Step
from protofleet.aggregator.store.operator_orders import Obeyed

__all__ = ["CoordinatorStep", "Solved"]


@dataclass(frozen=True)
class Solved:
    """There is a new head, made of standing sums or come from above. The caller publishes it."""

    version: int
    devices: int
    samples: int
    classes: int


CoordinatorStep = Step | Solved | Obeyed | Moved

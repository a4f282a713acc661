"""From a round's merged statistic to the next global state: a pure function, the same in a server and in the lab.

- A round of prototypes replaces the prototypes of the classes that someone held in it; a class that nobody held keeps
  the prototype it had.
- A round of hyper-knowledge replaces prototypes and soft predictions in the same way.
- An FFC round sets the head; prototypes stay as they are beside it.
- A round in which devices only took part changes nothing, and has no version of its own.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from contract.errors import StatisticError
from contract.messages import ClassRows
from contract.methods import method as method_row
from contract.ridge import solve_head
from contract.state import GlobalState
from contract.statistics import ClassMeans, FeatureGram, HyperKnowledge, Statistic

__all__ = ["next_global"]


def next_global(previous: GlobalState, method: str, merged: Statistic, *, round: int, ridge: float) -> GlobalState:
    """The global state after `round` of `method`, one version above `previous`; `previous` itself when nothing changes.

    Args:
        previous: the state that the round started from; version 0, empty, before the first.
        merged: the method's statistic.
        ridge: see `solve_head`; of no effect on prototypes.

    Raises:
        StatisticError: when the statistic is not the method's.
        MethodError: for an unknown method.
    """
    row = method_row(method)
    if row.global_state is None:
        return previous
    new = replace(previous, version=previous.version + 1, round=round)
    if row.global_state == "prototypes" and isinstance(merged, ClassMeans):
        return replace(new, prototypes=_replaced(previous.prototypes, merged.means, merged))
    if row.global_state == "hyper-knowledge" and isinstance(merged, HyperKnowledge):
        prototypes = _replaced(previous.prototypes, merged.means, merged)
        return replace(new, prototypes=prototypes, soft=_replaced(previous.soft, merged.soft_means, merged))
    if row.global_state == "head" and isinstance(merged, FeatureGram):
        return replace(new, head=ClassRows.of(solve_head(merged, ridge), merged.present))
    raise StatisticError(f"round of {method}", expected=f"{row.statistic}", got=type(merged).__name__)


def _replaced(previous: ClassRows | None, rows: NDArray[np.float64], merged: Statistic) -> ClassRows:
    """The rows of the classes that someone held, and the previous rows of the others."""
    if previous is None:
        return ClassRows.of(rows, merged.present)
    before, held = previous.dense(*rows.shape)
    return ClassRows.of(np.where(merged.present[:, None], rows, before), held | merged.present)

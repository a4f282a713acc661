"""From a round's merged statistic to the next global state: a pure function, the same in a server and in the lab.

- A round of prototypes replaces the prototypes of the classes that someone held in it; a class that nobody held keeps
  the prototype it had.
- An FFC round sets the head; prototypes stay as they are beside it.
"""

from __future__ import annotations

import numpy as np

from aggregator.ffc import solve_head
from contract.errors import StatisticError
from contract.messages import ClassRows
from contract.methods import method as method_row
from contract.state import GlobalState
from contract.statistics import ClassMeans, FeatureGram, Statistic

__all__ = ["next_global"]


def next_global(previous: GlobalState, method: str, merged: Statistic, *, round: int, ridge: float) -> GlobalState:
    """The global state after `round` of `method`, one version above `previous`.

    Args:
        previous: the state that the round started from; version 0, empty, before the first.
        merged: class means for a method whose global state is prototypes, FFC's sums for one whose is a head.
        ridge: see `solve_head`; of no effect on prototypes.

    Raises:
        StatisticError: when the statistic is not the method's.
        MethodError: for an unknown method.
    """
    row = method_row(method)
    prototypes, head = previous.prototypes, previous.head
    if row.global_state == "prototypes" and isinstance(merged, ClassMeans):
        prototypes = _prototypes(previous.prototypes, merged)
    elif row.global_state == "head" and isinstance(merged, FeatureGram):
        head = ClassRows.of(solve_head(merged, ridge), merged.present)
    else:
        raise StatisticError(f"round of {method}", expected=f"{row.statistic}", got=type(merged).__name__)
    return GlobalState(previous.run, previous.version + 1, round, prototypes, head)


def _prototypes(previous: ClassRows | None, merged: ClassMeans) -> ClassRows:
    if previous is None:
        return ClassRows.of(merged.means, merged.present)
    rows, held = previous.dense(merged.classes, merged.width)
    rows = np.where(merged.present[:, None], merged.means, rows)  # (C, D)
    return ClassRows.of(rows, held | merged.present)

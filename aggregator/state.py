"""From a round's merged statistic to the next global state: a pure function, the same in a server and in the lab.

What a round changes is the method's own to say (`Method.next_rows`): some kinds of class rows are new, the others stay
as they are beside them. A round in which devices only took part changes nothing, and has no version of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from contract.errors import MethodError, StatisticError
from contract.messages import ClassRows
from contract.methods import Method, Value
from contract.methods.base import Merged
from contract.state import GlobalState

__all__ = ["next_global"]


def next_global(
    previous: GlobalState, found: Method, merged: Merged, *, round: int, hyper: Mapping[str, Value]
) -> GlobalState:
    """The global state after `round` of a method, one version above `previous`; `previous` itself when nothing changes.

    Args:
        previous: the state that the round started from; version 0, empty, before the first.
        merged: what the method's `merge` gave.
        hyper: the method's hyper-parameters, settled.

    Raises:
        StatisticError: when it is not the method's.
    """
    if not isinstance(merged, found.merged):
        raise StatisticError(f"round of {found.name}", expected=found.statistic.NAME, got=type(merged).__name__)
    new = found.next_rows(previous.rows, merged, hyper)
    if not new:
        return previous
    for kind, rows in new.items():  # who wrote the method may not be who runs the fleet
        if kind not in found.global_rows or not isinstance(rows, ClassRows):
            raise MethodError(
                f"next_rows of method {found.name}",
                expected=f"class rows of {' and '.join(found.global_rows) or 'no kind'}",
                got=f"{type(rows).__name__} as {kind}",
            )
    return replace(previous, version=previous.version + 1, round=round, rows={**previous.rows, **new})

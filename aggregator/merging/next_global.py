"""From a round's merged statistic to the next global state: a pure function, the same in a server and in the lab.

The method decides what a round changes (`Method.next_rows`): some kinds of class rows are new, the others stay
unchanged beside them. A round in which devices only took part changes nothing, and has no version of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from protofleet.contract.errors import MethodError, StatisticError
from protofleet.contract.methods import Method, Value
from protofleet.contract.methods.base import Merged
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import ClassRows

__all__ = ["next_global"]


def next_global(
    previous: GlobalState, method: Method, merged: Merged, *, round: int, hyper: Mapping[str, Value]
) -> GlobalState:
    """The global state after `round` of a method, one version above `previous`; `previous` itself when nothing changes.

    Args:
        previous: the state that the round started from; version 0, empty, before the first.
        merged: the result of the method's `merge`.
        hyper: the method's hyper-parameters, resolved.

    Raises:
        StatisticError: `merged` is not of this method.
    """
    if not isinstance(merged, method.merged):
        raise StatisticError(f"round of {method.name}", expected=method.statistic.NAME, got=type(merged).__name__)
    new = method.next_rows(previous.rows, merged, hyper)
    if not new:
        return previous
    for kind, rows in new.items():  # who wrote the method may not be who runs the fleet
        if kind not in method.global_rows or not isinstance(rows, ClassRows):
            raise MethodError(
                f"next_rows of method {method.name}",
                expected=f"class rows of {' and '.join(method.global_rows) or 'no kind'}",
                got=f"{type(rows).__name__} as {kind}",
            )
    return replace(previous, version=previous.version + 1, round=round, rows={**previous.rows, **new})

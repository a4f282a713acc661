"""Errors of third-party methods, each turned into one line that names the method.

A method that somebody else wrote may raise any error, and may return a wrong type. The guard turns both into a
`MethodError`. Protofleet's own methods are not guarded: an unexpected error in them is a bug, and its traceback is
needed. Errors that Protofleet raises on purpose pass through unchanged, also when they come from a guarded method.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from protofleet.contract.errors import MethodError, ProtofleetError
from protofleet.contract.methods.base import Method
from protofleet.contract.sums.statistics import Statistic

__all__ = ["guarded"]

# What a method is asked for while a fleet runs, and what it must give; `object` where others look at it.
_ASKED: dict[str, type] = {
    "groups": int,
    "row_kinds": dict,
    "row_width": int,
    "preparation": dict,
    "agreement": dict,
    "check": object,
    "state": dict,
    "update_of": object,
    "step_inputs": dict,
    "inputs": dict,
    "start": dict,
    "uses_unlabelled": bool,
    "summarise": Statistic,
    "mechanism": object,
    "weighting_of": str,
    "merge": object,
    "next_rows": dict,
    "told": str,
    "doubt": str,
    "alone_way": str,
    "own_prototypes": tuple,
    "personal_head": object,
    "answers": dict,
    "shared_answers": dict,
}


def guarded(rule: Method, place: str) -> Method:
    """Guard the functions of a method, in place, and return the method.

    A guarded function raises `MethodError` where it raises an error that is not one of Protofleet's, and where its
    result is of another type than expected. A function that the method inherits from `Method` is not guarded.

    Args:
        rule: the method.
        place: `package.module:Class`, for the line.
    """
    for name, kind in _ASKED.items():
        if getattr(type(rule), name) is not getattr(Method, name):
            setattr(rule, name, _guarded(getattr(rule, name), f"{name} of method {place}", kind))
    return rule


def _guarded(function: Callable[..., Any], what: str, kind: type) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **named: Any) -> Any:
        try:
            result = function(*args, **named)
        except (ProtofleetError, OSError, MemoryError):  # a disk and a memory that are full are no method's doing
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise MethodError(what, expected="a result", got=problem, hint="asking its author") from error
        if not isinstance(result, kind):
            raise MethodError(what, expected=kind.__name__, got=type(result).__name__, hint="asking its author")
        return result

    return checked

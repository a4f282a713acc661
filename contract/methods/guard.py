"""A method that somebody else wrote may raise anything, or give nothing: here that becomes one line with its name.

Our own methods are not guarded: what they raise unasked is a bug of ours, and its traceback is wanted. What Protofleet
raises on purpose goes through unchanged, also where a method asked for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from contract.errors import MethodError, ProtofleetError
from contract.methods.base import Method
from contract.statistics import Statistic

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


def guarded(found: Method, place: str) -> Method:
    """`found`, whose own functions raise `MethodError` where they raise what is none of ours, or give another type.

    Args:
        place: `package.module:Class`, for the line.
    """
    for name, kind in _ASKED.items():
        if getattr(type(found), name) is not getattr(Method, name):
            setattr(found, name, _guarded(getattr(found, name), f"{name} of method {place}", kind))
    return found


def _guarded(asked: Callable[..., Any], what: str, kind: type) -> Callable[..., Any]:
    @functools.wraps(asked)
    def ask(*args: Any, **named: Any) -> Any:
        try:
            given = asked(*args, **named)
        except (ProtofleetError, OSError, MemoryError):  # a disk and a memory that are full are no method's doing
            raise
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            raise MethodError(what, expected="a result", got=words, hint="asking its author") from error
        if not isinstance(given, kind):
            raise MethodError(what, expected=kind.__name__, got=type(given).__name__, hint="asking its author")
        return given

    return ask

"""Durations as people write them: `90`, `90s`, `10m`, `6h`, `7d`; and back."""

from __future__ import annotations

import math
import re

from protofleet.contract.errors import UsageError

__all__ = ["in_words", "seconds"]

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")


def seconds(option: str, given: str | float) -> float:
    """A duration in seconds.

    Args:
        option: what an error calls it.

    Raises:
        UsageError: it is none, or longer than ten years.
    """
    match = _FORM.fullmatch(str(given).strip().lower())
    value = float(match[1]) * _UNITS[match[2]] if match is not None else math.nan
    if not 0 <= value <= 3650 * _UNITS["d"]:
        raise UsageError(option, expected="a duration such as 90s, 10m, 6h or 7d", got=given)
    return value


def in_words(duration_s: float) -> str:
    """A duration for a person: in the largest unit of which it is two or more."""
    for unit in ("d", "h", "m"):
        if duration_s >= 2 * _UNITS[unit]:
            return f"{duration_s / _UNITS[unit]:.3g} {unit if unit != 'm' else 'min'}"
    return f"{duration_s:.3g} s"

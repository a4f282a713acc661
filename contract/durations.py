"""Lengths of time as a person writes them: `90`, `60s`, `15m`, `6h`, `1d`."""

from __future__ import annotations

import math
import re

from contract.errors import UsageError

__all__ = ["seconds"]

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(option: str, given: float | str) -> float:
    """So many seconds.

    Args:
        option: what it was given for.

    Raises:
        UsageError: when it is no length of time.
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smhd]?)\s*", str(given))
    value = float(found[1]) * _UNITS[found[2]] if found else math.nan
    if not math.isfinite(value):
        raise UsageError(option, expected="a length of time: 60s, 15m, 6h or 1d", got=given)
    return value

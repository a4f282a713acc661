"""Sizes of memory as a person writes them."""

from __future__ import annotations

import re

from protofleet.contract.errors import UsageError

__all__ = ["read_size"]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
_MOST = 10**15


def read_size(text: str, option: str, *, least: str = "10MB") -> int:
    """`400MB`, `400M`, `0.4 GB`, `381MiB` or a number of bytes → bytes.

    Args:
        least: the smallest that makes sense; the default is less than any process of ours takes.

    Raises:
        UsageError: it is none, less than `least`, or more than any machine has.
    """
    size = _bytes(text)
    if not _bytes(least) <= size <= _MOST:
        example = "400MB" if least == "10MB" else "512KiB"
        raise UsageError(option, expected=f"a size from {least}", got=text, hint=f"{option} {example}")
    return int(size)


def _bytes(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?)?B?\s*", text.upper())
    return float(match[1]) * _UNITS[match[2] or ""] if match else 0.0

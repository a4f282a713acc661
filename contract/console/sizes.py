"""Sizes of memory as a person writes them."""

from __future__ import annotations

import re

from protofleet.contract.errors import UsageError

__all__ = ["read_size"]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
_LEAST, _MOST = 10**7, 10**15


def read_size(text: str, option: str) -> int:
    """`400MB`, `400M`, `0.4 GB`, `381MiB` or a number of bytes → bytes.

    Raises:
        UsageError: it is none, less than any process of ours takes, or more than any machine has.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?)?B?\s*", text.upper())
    size = float(match[1]) * _UNITS[match[2] or ""] if match else 0.0
    if not _LEAST <= size <= _MOST:
        raise UsageError(option, expected="a size from 10MB", got=text, hint=f"{option} 400MB")
    return int(size)

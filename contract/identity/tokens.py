"""One-time tokens: 160 random bits, written so that a person can copy them."""

from __future__ import annotations

import base64
import binascii
import os
from typing import Final

from protofleet.contract.errors import UsageError

__all__ = ["draw_token", "read_token", "token_text"]

_BYTES: Final = 20
_GROUP: Final = 4


def draw_token() -> bytes:
    """A new one."""
    return os.urandom(_BYTES)


def token_text(token: bytes) -> str:
    """As a person reads it: 32 letters and digits in groups of four."""
    text = base64.b32encode(token).decode("ascii").lower()
    return "-".join(text[start : start + _GROUP] for start in range(0, len(text), _GROUP))


def read_token(text: str) -> bytes:
    """The token that was written so; spaces, dashes and capitals make no difference.

    Raises:
        UsageError: it is none.
    """
    letters = "".join(text.split()).replace("-", "").upper()
    try:
        token = base64.b32decode(letters)
    except (binascii.Error, ValueError):
        token = b""
    if len(token) != _BYTES:
        got = f"{len(letters)} others"
        raise UsageError("--token", expected="the 32 letters and digits of protofleet fleet invite", got=got)
    return token

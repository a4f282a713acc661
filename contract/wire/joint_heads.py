"""The name of a joint head: rows for a group of devices that a round left out.

The rows travel like parts of a global state, on the downward topic of each member. A global state never comes there.
The kind of the rows says for how many devices they are: `head of 3`.
"""

from __future__ import annotations

import re
from typing import Final

from protofleet.contract.wire.messages import MAX_KIND

__all__ = ["JOINT", "LEAST", "joint_kind", "kind_and_members"]

JOINT: Final = "joint-head"  # among the versions of a status, where the device's owner allows it
LEAST: Final = 3  # members: of two each would see the other's means
_KIND = re.compile(r"(.+) of ([1-9][0-9]{0,5})")


def joint_kind(kind: str, members: int) -> str:
    """The name of rows of this kind that are made for `members` devices together."""
    return f"{kind} of {members}"[:MAX_KIND]


def kind_and_members(kind: str) -> tuple[str, int] | None:
    """The inverse of `joint_kind`; None for any other kind, and for fewer members than `LEAST`."""
    match = _KIND.fullmatch(kind)
    return None if match is None or int(match[2]) < LEAST else (match[1], int(match[2]))

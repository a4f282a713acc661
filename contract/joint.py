"""The words about a joint head: the rows that a group of devices is given which a round left out.

They travel as parts of a global state do, on each member's downward topic, where a global state never comes; their kind
says of how many devices they are: `head of 3`.
"""

from __future__ import annotations

import re
from typing import Final

from contract.messages import MAX_KIND

__all__ = ["JOINT", "LEAST", "joint_kind", "kind_and_members"]

JOINT: Final = "joint-head"  # among the versions of a status, where the device's owner allows it
LEAST: Final = 3  # members: of two each would see the other's means
_KIND = re.compile(r"(.+) of ([1-9][0-9]{0,5})")


def joint_kind(kind: str, members: int) -> str:
    """What rows of a kind are called that are of so many devices together."""
    return f"{kind} of {members}"[:MAX_KIND]


def kind_and_members(kind: str) -> tuple[str, int] | None:
    """What `joint_kind` was given; None for any other kind, and for fewer members than there may be."""
    found = _KIND.fullmatch(kind)
    return None if found is None or int(found[2]) < LEAST else (found[1], int(found[2]))

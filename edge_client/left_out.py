"""A device that the fleet's aggregator left out of a round: what it keeps of that, and what it then answers by.

The aggregator says so by a receipt once the round is closed (docs/wire.md), and says when the device counts again. A
device that sees differently, by night or upside down, is not told from a liar by its class means; what it sees is its
own all the same. So it answers by whichever of the fleet's head and its own names more of its own held-out photos
right, the fleet's where neither does. Its own is what a fleet of this device alone would have been given; it never
leaves the device. Where its owner allows it (`joint_head` in the policy), the aggregator may give it a third, that of
all that were left out and agree with it. What the device's own photos teach is in that one, too, so few held-out photos
need not tell one from the other: it is taken where it names more right than the fleet's, unless the own head is ahead
of it by more than a standard error (docs/decisions/232). Nobody else has the choice: where all had, one device in seven
would choose worse by chance (docs/decisions/221).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from contract.messages import MAX_ROUND, ClassRows
from contract.state import GlobalState
from contract.terminal import counted

__all__ = ["LeftOut", "is_joint_best", "packed_state", "unpacked_state"]


def is_joint_best(photos: int, fleet: int, own: int, joint: int, errors: float = 1.0) -> bool:
    """Whether a device answers by the joint head, where it has one.

    It has to name more held-out photos right than the fleet's, and the own head may be ahead of it by so many standard
    errors of the difference of two such shares at most, or by one photo.

    Args:
        photos: how many held-out photos the heads were asked about.
        fleet, own, joint: how many of them each names right.
    """
    if joint <= fleet:
        return False
    variance = sum(right * (photos - right) for right in (own, joint)) / photos  # of the difference, in photos squared
    return own - joint <= max(errors * variance**0.5, 1.0)


@dataclass(frozen=True)
class LeftOut:
    """The newest closed round that a device took part in left it out.

    Attributes:
        run: 4 bytes, in hex.
        round, method: which round.
        why: the aggregator's words.
        photos: how many held-out photos these heads were asked about; 0 where they were not, or there are none.
        fleet, own, joint: how many of them each named right; `joint` is 0 where there is no such head.
        others: how many others the joint head is of; 0 where there is none.
    """

    run: str
    round: int
    method: str
    why: str
    photos: int = 0
    fleet: int = 0
    own: int = 0
    joint: int = 0
    others: int = 0

    @property
    def answers_together(self) -> bool:
        """Whether the device answers by the joint head."""
        return self.others > 0 and is_joint_best(self.photos, self.fleet, self.own, self.joint)

    @property
    def answers_alone(self) -> bool:
        """Whether the device answers by its own head."""
        return self.own > self.fleet and not self.answers_together

    @property
    def leaves_fleet(self) -> bool:
        """Whether it answers by another head than the fleet's."""
        return self.answers_together or self.answers_alone

    @property
    def whose(self) -> str:
        """Of whom the head is that it answers by, for a person."""
        if self.answers_together:
            return "its group's"
        return "this device's own" if self.answers_alone else "the fleet's"

    @property
    def chosen(self) -> str:
        """Which head it answers by where that is not the fleet's, and how the others compare, for a person."""
        of = f"of {self.photos} held-out photos"
        if self.answers_together:
            line = f"{self._joint}, right on {self.joint} {of}, the fleet's head on {self.fleet}, its own on {self.own}"
            return f"{line}, which so few photos do not tell apart" if self.own > self.joint else line
        return f"own head, right on {self.own} {of}, the fleet's head on {self.fleet}{self._joint_beside}"

    @property
    def _joint(self) -> str:
        return f"head together with {counted(self.others, 'other')} that agree with it"

    @property
    def _joint_beside(self) -> str:
        return f", its {self._joint} on {self.joint}" if self.others else ""

    def in_words(self) -> str:
        """One line for a person."""
        line = f"the fleet's aggregator left this device's round {self.round} out: {self.why}; it answers by "
        if not self.photos:
            return f"{line}the fleet's head: it has no held-out photos to compare its own with"
        if self.leaves_fleet:
            return f"{line}its {self.chosen}"
        right = f"right on {self.fleet} of {self.photos} held-out photos, its own on {self.own}"
        return f"{line}the fleet's head, {right}{self._joint_beside}"

    def written(self) -> str:
        """As the journal keeps it."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, written: str) -> LeftOut:
        """What `written` gave.

        Raises:
            ValueError, TypeError: something else.
        """
        found = cls(**json.loads(written))
        texts = (found.run, found.method, found.why)
        numbers = (found.round, found.photos, found.fleet, found.own, found.joint, found.others)
        if not all(isinstance(each, str) for each in texts) or not all(isinstance(each, int) for each in numbers):
            raise TypeError(f"a round that was left out: {found}")
        if not (0 < found.round <= MAX_ROUND and 0 <= max(found.fleet, found.own, found.joint) <= found.photos):
            raise ValueError(f"a round that was left out: {found}")
        return found


def packed_state(state: GlobalState) -> bytes:
    """What a fleet of one device, or of some, would have been given, as the journal keeps it."""
    tensors: dict[str, NDArray[Any]] = {}
    for kind, rows in state.rows.items():
        tensors |= {f"{kind}/classes": rows.classes, f"{kind}/rows": rows.rows}
    return save({name: np.ascontiguousarray(value) for name, value in tensors.items()})


def unpacked_state(packed: bytes) -> GlobalState:
    """What `packed_state` was given.

    Raises:
        SafetensorError, KeyError, WireError: something else.
    """
    tensors = load(packed)
    kinds = sorted({name.rpartition("/")[0] for name in tensors})
    rows = {kind: ClassRows(tensors[f"{kind}/classes"], tensors[f"{kind}/rows"]) for kind in kinds}
    return GlobalState(bytes(4), 1, 1, rows)

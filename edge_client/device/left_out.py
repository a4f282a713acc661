"""A device that the fleet's aggregator left out of a round: what it remembers of that, and which head it answers by.

The aggregator tells the device by a receipt once the round is closed (docs/wire.md). It also tells it when its rounds
count again. Class means alone do not tell a liar from an honest device that sees differently, for example by night or
upside down. So the device compares heads on its own held-out photos:

    fleet's head   the global state of the fleet
    own head       what a fleet of this device alone would be given; it never leaves the device
    joint head     of all devices that were left out and agree with each other; the aggregator may give it where the
                   owner's policy allows it (`joint_head`)

The device chooses in this order:

1. The joint head, if it names more held-out photos right than the fleet's head, and the own head is ahead of it by at
   most one standard error, or one photo (docs/decisions/232). The joint head contains the device's own samples, too.
   So few photos cannot tell the two apart, and need not.
2. The own head, if it names more held-out photos right than the fleet's head.
3. Otherwise the fleet's head.

No other device has this choice. If all devices had it, one in seven would choose worse by chance (docs/decisions/221).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from protofleet.contract.printable import counted
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import MAX_ROUND, ClassRows

__all__ = ["LeftOut", "is_joint_best", "packed_state", "unpacked_state"]


def is_joint_best(photos: int, fleet: int, own: int, joint: int, errors: float = 1.0) -> bool:
    """Whether a device answers by the joint head, where it has one.

    The joint head has to name more held-out photos right than the fleet's head. The own head may be ahead of the joint
    head by at most `errors` standard errors of the difference of two such shares, or by one photo.

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
    """The newest closed round in which this device took part, and which left it out.

    Attributes:
        run: 4 bytes, in hex.
        round, method: which round.
        why: the aggregator's words.
        photos: how many held-out photos the heads were asked about; 0 where they were not asked, or there are none.
        fleet, own, joint: how many of them each head named right; `joint` is 0 where there is no joint head.
        others: how many other devices the joint head is of; 0 where there is none.
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
    def head_owner(self) -> str:
        """Whose head the device answers by, for a person."""
        if self.answers_together:
            return "its group's"
        return "this device's own" if self.answers_alone else "the fleet's"

    @property
    def chosen(self) -> str:
        """Which head it answers by where that is not the fleet's, and how the others compare, for a person."""
        of_photos = f"of {self.photos} held-out photos"
        if self.answers_together:
            others = f"the fleet's head on {self.fleet}, its own on {self.own}"
            line = f"{self._joint}, right on {self.joint} {of_photos}, {others}"
            return f"{line}, which so few photos do not tell apart" if self.own > self.joint else line
        return f"own head, right on {self.own} {of_photos}, the fleet's head on {self.fleet}{self._joint_beside}"

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
        left_out = cls(**json.loads(written))
        texts = (left_out.run, left_out.method, left_out.why)
        numbers = (left_out.round, left_out.photos, left_out.fleet, left_out.own, left_out.joint, left_out.others)
        if not all(isinstance(text, str) for text in texts) or not all(isinstance(number, int) for number in numbers):
            raise TypeError(f"a round that was left out: {left_out}")
        if not (
            0 < left_out.round <= MAX_ROUND
            and 0 <= max(left_out.fleet, left_out.own, left_out.joint) <= left_out.photos
        ):
            raise ValueError(f"a round that was left out: {left_out}")
        return left_out


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

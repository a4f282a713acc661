"""The values that a store and its users exchange: accepted contributions, rounds, and marks of held sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from protofleet.contract.wire.messages import Contribution

__all__ = ["Accepted", "Key", "RoundRecord", "StandingMark", "Tally"]

Key = tuple[int, str, str]  # round, method, device
Tally = Mapping[tuple[int, str], int]  # (round, outcome) → messages; round 0 where none can be named


@dataclass(frozen=True)
class Accepted:
    """A contribution that was accepted.

    Attributes:
        payload: its encoded form in the store.
        received_bytes: the size of what arrived.
        message: the decoded contribution, for code that needs it before it is freed; None where no code does.
        without: the numbers of the classes whose rows were removed from it on arrival.
    """

    round: int
    method: str
    device: str
    payload: bytes
    received_bytes: int
    message: Contribution | None = field(default=None, compare=False, repr=False)
    without: tuple[int, ...] = ()


@dataclass(frozen=True)
class RoundRecord:
    """What the store knows of one round.

    Attributes:
        opened_at: seconds since the epoch.
        seconds: how long it was open; None while it is open.
        classes_merged: how many classes its result holds; None while it is open.
        uplink_bytes: payload bytes received for each committed contribution, by device.
        tally: messages by outcome.
        taken_back: whether it no longer counts (`aggregator/closing/rollback.py`).
    """

    number: int
    method: str
    seed: int
    opened_at: float
    closed: bool
    seconds: float | None
    classes_merged: int | None
    uplink_bytes: Mapping[str, int] = field(default_factory=dict)
    tally: Mapping[str, int] = field(default_factory=dict)
    taken_back: bool = False


@dataclass(frozen=True)
class StandingMark:
    """What is held of a device where sums stand.

    Attributes:
        generation: of its sums, also of sums that were taken out; 0 when nothing ever came.
        digest: of the standing contribution, as `digest_of`; empty for none.
    """

    generation: int = 0
    digest: bytes = b""

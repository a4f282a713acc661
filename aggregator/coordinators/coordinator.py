"""The one interface of what runs a fleet: rounds, blinded rounds, sums that stand, and those of a gateway's site.

    take:     a batch of messages → decide each → make the accepted ones durable in one transaction → decisions
    advance:  what is due: a step of the rounds, a head, an operator's order; durable before it is returned

The caller publishes what the coordinator returns: receipts for decisions, and after a step an announcement and the
global state. The server, a worker and the metrics use this interface and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, Protocol

from protofleet.aggregator.blinded.blinded_rounds import BlindedRounds
from protofleet.aggregator.closing.joint_heads import JointHead
from protofleet.aggregator.ingest.ingest import Decision
from protofleet.aggregator.parts.common_parts import Parts
from protofleet.aggregator.parts.steps import CoordinatorStep
from protofleet.contract.methods import Method
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Announcement, Chunk, Receipt

__all__ = ["AtOnce", "Coordinator", "Replies", "Turns"]


class Turns(Protocol):
    """Who is online, and when something is due: a machine of rounds, or its stand-in where there are none.

    Attributes:
        number, phase: of the newest round; 0 and "standing" where there are none.
        contributions: the devices that have contributed to it.
        awaited_count: how many devices are awaited.
        stays: whether the broker is waited for without limit.
        online: how many devices are online.
    """

    @property
    def number(self) -> int: ...
    @property
    def phase(self) -> str: ...
    @property
    def contributions(self) -> Collection[str]: ...
    @property
    def awaited_count(self) -> int: ...
    @property
    def stays(self) -> bool: ...
    @property
    def online(self) -> int: ...
    def is_online(self, device: str) -> bool: ...
    def take_lost(self) -> list[tuple[str, bytes]]: ...
    def due_in_s(self, now: float) -> float | None: ...


class Replies(Protocol):
    """When devices get what was decided on their messages: at once, or once an aggregator above has answered."""

    def of(self, decisions: list[Decision]) -> list[Decision]:
        """Those of the decisions that are told now."""

    def due(self) -> list[Decision]:
        """Those that were held back, and are told now."""


class AtOnce:
    """Every decision is told at once."""

    def of(self, decisions: list[Decision]) -> list[Decision]:
        return decisions

    def due(self) -> list[Decision]:
        return []


class Coordinator(Protocol):
    """What runs one fleet, without its network.

    Attributes:
        kind: whether there are rounds, or sums that stand.
        parts: what every kind has.
        rounds: who is online, and when something is due.
        state: the global state that devices get.
        method: the one whose statistic is gathered now.
        verdicts: the receipts for devices that were ever left out, by name: whether they count in the newest closed
            round that they took part in.
        helper: what is asked of a helper; None where nothing is.
        is_finished: whether every planned round is done.
        largest_message_bytes: the largest useful message. One that was made for a larger limit is still taken whole.
        opened_at: when the newest round opened, seconds since the epoch; None without rounds.
        lags: where several processes take contributions, whether there was more to learn than `learn` takes at once.
        rest: so many times as long as `learn` took, nothing is to be learned after it.
    """

    kind: Literal["rounds", "standing"]
    parts: Parts
    rest: float

    @property
    def lags(self) -> bool: ...
    @property
    def rounds(self) -> Turns: ...
    @property
    def state(self) -> GlobalState: ...
    @property
    def method(self) -> Method: ...
    @property
    def verdicts(self) -> Mapping[str, Receipt]: ...
    @property
    def helper(self) -> BlindedRounds | None: ...
    @property
    def is_finished(self) -> bool: ...
    @property
    def largest_message_bytes(self) -> int: ...
    @property
    def opened_at(self) -> float | None: ...

    def counts(self) -> dict[str, int]:
        """How many devices are awaited, or how many stand, by that word."""

    def announcement(self, limit_bytes: int | None = None) -> Announcement:
        """What every device should know now.

        Args:
            limit_bytes: the largest message that both the broker and this aggregator take; None for the limit of
                this aggregator.
        """

    def status(self, device: str, payload: bytes, now: float, *, is_ours: bool = False, is_news: bool = True) -> bool:
        """Take a device's birth or death; returns whether it changed who is online.

        A message that is no status is counted and answered.
        """

    def joint_of(self, device: str) -> JointHead | None:
        """The joint head for a left-out device, made of the devices that agree with it; None when there is none."""

    def take(self, batch: Sequence[tuple[str, bytes]], now: float) -> list[Decision]:
        """Decide on (device, payload) messages and make the accepted ones durable.

        Receipts may be sent after the return.

        Raises:
            StaleError: beside other processes: the decisions depend on something that has changed since.
            StoreError: the disk refuses; then nothing was committed, nothing may be acknowledged, and this object can
                no longer be used.
        """

    def stalled(self, now: float) -> list[Decision]:
        """The questions to devices whose chunks have stopped coming, and what devices are told late."""

    def advance(self, now: float, wall: float) -> CoordinatorStep | None:
        """Do the next due step or an operator's order, durably, and return it; None when nothing is due.

        Args:
            wall: seconds since the epoch, for the record.
        """

    # where several processes take contributions (`aggregator/workers`)

    def look(self, devices: Collection[str]) -> None:
        """Called before a batch of these devices' messages is decided on: read what other processes took of them."""

    def reload(self) -> None:
        """Read again what another process may have changed: an enrolment, or a device's withdrawal."""

    def learn(self, now: float) -> bool:
        """For the leader: read what any process committed; returns whether anything of it is new here.

        Raises:
            StoreError: the server refuses.
        """

    def decide_again(self) -> None:
        """Forget the last decisions: they were not committed."""

    def chunk_of(self, device: str, payload: bytes) -> Chunk | None:
        """The chunk of a contribution that may still count, after `look`; None for any other message."""

    def has_taken(self, device: str, receipt: Receipt) -> bool:
        """Whether the contribution that a receipt is about is committed, by whichever process."""

"""What the parts of a coordinator of rounds share: the machine, the open round's contributions, the newest result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from protofleet.aggregator.closing.joint_heads import JointHeads
from protofleet.aggregator.closing.late_contributions import LateContributions
from protofleet.aggregator.ingest.ingest import View
from protofleet.aggregator.merging.forgotten_classes import held_by
from protofleet.aggregator.parts.common_parts import Parts
from protofleet.aggregator.rounds.round_machine import Rounds, Step
from protofleet.aggregator.screening.outliers import Finding, Screening, Suspects, Traits
from protofleet.aggregator.store.order_table import Order
from protofleet.aggregator.store.records import RoundRecord
from protofleet.contract.methods import Method
from protofleet.contract.methods import method as method_of
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Announcement, Contribution, Receipt

__all__ = ["RoundBooks", "RoundClosing"]


class RoundBooks:
    """Of one run.

    Args:
        rounds: the machine, as it begins.
        late: the late contributions that stand in.

    Attributes:
        state: the global state that devices get.
        findings: about devices whose contribution to the last closed round does not count, or counts in part.
        doubt: why the head of the last closed round may be bad; empty when nothing speaks against it.
        told: which choices were made for the last closed round's result, in words.
        verdicts: as of `Coordinator`.
        traits: of the open round's contributions, as far as this process took them.
        joint: who may have a joint head, and the one that there is.
    """

    def __init__(self, parts: Parts, rounds: Rounds, late: LateContributions | None = None) -> None:
        self.parts, self.rounds, self.late = parts, rounds, late or LateContributions()
        self.state: GlobalState = parts.store.state()
        self.findings: tuple[Finding, ...] = ()
        self.doubt, self.told = "", ""
        self.verdicts: Mapping[str, Receipt] = parts.store.verdicts()
        self.traits: dict[str, Traits] = {}
        self.joint = JointHeads(parts.store)

    @property
    def method(self) -> Method:
        """The method of the current round."""
        return method_of(self.rounds.method)

    def announcement(self, limit_bytes: int | None = None) -> Announcement:
        """What every device should know now, where nothing is blinded; see `Coordinator.announcement`."""
        rounds, policy = self.rounds, self.parts.terms.settings.policy
        return self.parts.announcement(
            self.method,
            self.state,
            "closed" if rounds.phase == "waiting" or rounds.held else rounds.phase,
            limit_bytes,
            round=rounds.number,
            deadline_s=policy.limit_s,
            fraction=policy.fraction,
            seed=rounds.seed,
        )

    def view(self) -> View:
        """What is gathered at this moment, where nothing is blinded."""
        rounds = self.rounds
        return self.parts.view(
            self.method,
            round=rounds.number,
            open=rounds.phase == "open" and not rounds.held,
            seed=rounds.seed,
            fraction=self.parts.terms.settings.policy.fraction,
        )

    def learn(self) -> bool:
        """Read what other processes committed to the open round; returns whether a device is new here.

        Raises:
            StoreError: the server refuses.
        """
        rounds = self.rounds
        if rounds.phase != "open":
            return False
        devices, refused = self.parts.store.taken(rounds.number, rounds.method)
        newer = [device for device in devices if device not in rounds.contributions]
        for device in newer:
            rounds.contributed(device)
        for device in refused:
            rounds.refused(device)
        return bool(newer)

    def screening(self, method: Method) -> Screening:
        settings = self.parts.terms.settings
        return Screening(settings.max_share, self.suspects(method), settings.vouch)

    def suspects(self, method: Method) -> Suspects:
        """What becomes of devices that contradict others: means of different backbones' own features always do."""
        terms = self.parts.terms
        return "ignore" if terms.others and method.extractor == "local" else terms.settings.suspects

    def messages(self, round: int, method: str) -> Iterator[Contribution]:
        """The contributions of a round, ordered by device."""
        return map(held_by, self.parts.store.contributions(round, method))

    def newest_round(self) -> list[RoundRecord]:
        """The one that was opened last, if any was."""
        store = self.parts.store
        return store.rounds(after=store.last_round() - 1)

    def has_result(self, record: RoundRecord) -> bool:
        """Whether something came of a round: nothing is kept of a blinded one that closed without a result."""
        was_summed = record.classes_merged or not (record.closed and record.uplink_bytes)
        return bool(was_summed) or next(self.parts.store.contributions(record.number, record.method), None) is not None

    def is_stored(self, round: int, method: str, device: str) -> bool:
        """Whether a contribution is in the store; for the open round that is known without asking it."""
        rounds = self.rounds
        is_open = rounds.phase == "open" and not rounds.held  # else others may have committed what we have not heard of
        if is_open and (round, method) == (rounds.number, rounds.method):
            return device in rounds.contributions
        return self.parts.store.holds(round, method, device) and not self.late.stood(round, device)


class RoundClosing(Protocol):
    """How rounds gather, and how one closes: openly, or with a helper."""

    def step(self, now: float, wall: float) -> Step | None:
        """What rounds themselves make due, done and durable."""

    def next_order(self, now: float) -> Order | None:
        """The next order that can be carried out now: not one that changes what is being summed."""

    def unfit(self, order: Order) -> str:
        """Why rounds of this kind can do nothing with an order, as its outcome; empty where they can."""

    def announced(self, announcement: Announcement) -> Announcement:
        """An announcement, with what this kind asks of devices."""

    def viewed(self, view: View) -> View:
        """What is gathered, with what this kind asks of contributions."""

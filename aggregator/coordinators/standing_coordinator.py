"""The coordinator of a fleet without rounds: ingest, and sums that stand.

Who commits what is accepted, where heads come from, what orders do, and when devices are answered are parts that it is
given (`kinds.py` puts them together).

Standing sums are exactly what all present devices sent. Unlike in rounds, no device is left out or counts for less.
`--max-samples` bounds how many samples one device may say it has, and FFC's sums must be those of unit features
(`aggregator/ingest/validation.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from protofleet.aggregator.closing.joint_heads import JointHead
from protofleet.aggregator.coordinators.coordinator import Replies
from protofleet.aggregator.ingest.ingest import Decision, Ingest, View, largest_contribution_bytes
from protofleet.aggregator.merging.exact_sums import Standing
from protofleet.aggregator.parts.steps import CoordinatorStep
from protofleet.aggregator.rounds.presence import NoRounds, Presence
from protofleet.aggregator.standing.standing_heads import Heads
from protofleet.aggregator.standing.standing_notices import StandingNotices
from protofleet.aggregator.standing.standing_orders import StandingOrders
from protofleet.aggregator.standing.standing_sums import Keeper, StandingSums
from protofleet.aggregator.store.durable_store import OUTCOMES
from protofleet.aggregator.store.standing_tables import WITHDREW, Stands, Taken, with_taken
from protofleet.contract.methods import Method
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Announcement, Chunk, Contribution, Receipt

__all__ = ["StandingCoordinator"]


class StandingCoordinator:
    """One run of one fleet without rounds; an `aggregator/coordinators/coordinator.py: Coordinator`.

    Args:
        keeper: commits what is accepted.
        heads: where they come from.
        notices: what devices are told unasked.
        replies: when devices are answered.

    Attributes:
        rounds: which devices are online, and when something is due.
        told, doubt, standing, devices: as of `StandingSums`.
    """

    kind: Literal["rounds", "standing"] = "standing"
    rest = 1.0
    helper = None
    opened_at = None
    is_finished = False  # standing sums have no end
    verdicts: Mapping[str, Receipt] = {}

    def __init__(
        self, sums: StandingSums, keeper: Keeper, heads: Heads, notices: StandingNotices, replies: Replies
    ) -> None:
        self.parts, self.sums = sums.parts, sums
        self._keeper, self._heads, self._notices, self._replies = keeper, heads, notices, replies
        self._presence = Presence()
        self.rounds = NoRounds(self._presence, self._due_in_s)
        self._ingest = Ingest(lambda round, method, device: False, patient=sums.parts.store.shared)
        self._orders = StandingOrders(sums, heads, notices, self._presence.is_online)

    @property
    def method(self) -> Method:
        """The method whose sums stand."""
        return self.sums.method

    @property
    def state(self) -> GlobalState:
        return self.sums.state

    @property
    def told(self) -> str:
        return self.sums.told

    @property
    def doubt(self) -> str:
        return self.sums.doubt

    @property
    def standing(self) -> Standing:
        return self.sums.standing

    @property
    def devices(self) -> int:
        return self.sums.devices

    @property
    def lags(self) -> bool:
        return self._keeper.lags

    @property
    def largest_message_bytes(self) -> int:
        """The largest useful message."""
        return max(self.parts.terms.limit_bytes, largest_contribution_bytes(self._view()))

    def counts(self) -> dict[str, int]:
        return {"standing": len(self.standing.present)}

    def announcement(self, limit_bytes: int | None = None) -> Announcement:
        return self.parts.announcement(self.method, self.state, "standing", limit_bytes, round=0)

    def joint_of(self, device: str) -> JointHead | None:
        return None

    def _view(self) -> View:
        return self.parts.view(self.method, round=0, open=True, standing=True, held=self._keeper.mark_of)

    # ── what comes ──────────────────────────────────────────────────────────────────────────────────────────────────

    def status(self, device: str, payload: bytes, now: float, *, is_ours: bool = False, is_news: bool = True) -> bool:
        message = self.parts.statuses.read(device, payload, self._view, is_ours=is_ours, is_news=is_news)
        if message is None:
            return False
        note = self._presence.birth if message.online else self._presence.death
        changed = note(device, message.instance)
        if changed and message.online:
            self._notices.tell(device)
            self._notices.tell_held(device)
        return changed

    def take(self, batch: Sequence[tuple[str, bytes]], now: float) -> list[Decision]:
        refused = self.parts.exclusions.refused
        try:
            return self._replies.of(self._take(batch, now))
        except BaseException:
            self.parts.exclusions.refused = refused
            raise
        finally:
            self._keeper.look(())

    def _take(self, batch: Sequence[tuple[str, bytes]], now: float) -> list[Decision]:
        view, exclusions = self._view(), self.parts.exclusions
        uncounted, labels = self.parts.uncounted.tally, self.parts.terms.manifest.labels
        decisions, newer, taken = [], dict[str, tuple[Stands, Contribution]](), Taken()
        for name, sent in batch:
            decision = self._ingest.decide(name, sent, view, now)
            decisions.append(decision)
            accepted = decision.accepted
            if accepted is None:
                continue
            assert accepted.message is not None
            withdrawn = accepted.message.standing == "withdrawn"
            if withdrawn:  # what follows it in this batch is refused
                exclusions.refused = {**exclusions.refused, name: WITHDREW}
            payload, received_bytes = (None, 0) if withdrawn else (accepted.payload, accepted.received_bytes)
            newer[name] = Stands(name, accepted.round, payload, received_bytes), accepted.message
            for number in accepted.without:
                taken = with_taken(taken, labels[number], {name: accepted.round})
        tally = uncounted + Counter((0, d.outcome) for d in decisions if d.outcome in OUTCOMES)
        if newer or tally:
            self._keeper.keep(list(newer.values()), tally, taken, now)
        uncounted.clear()
        self._ingest.forget_accepted()
        self.parts.decided(batch, decisions)
        return decisions

    def stalled(self, now: float) -> list[Decision]:
        is_online = (lambda device: True) if self.parts.store.shared else self._presence.is_online
        return self._replies.due() + self._notices.take() + self._ingest.stalled(now, self._view(), is_online)

    # ── what is due ─────────────────────────────────────────────────────────────────────────────────────────────────

    def advance(self, now: float, wall: float) -> CoordinatorStep | None:
        order = None if self.parts.closing.has_work else self.parts.orders.next(now)  # it waits for the head
        if order is not None:
            with self._keeper.alone(now):
                return self._orders.obey(order, now, wall)
        moved = self.parts.rollouts.advance(wall)
        if moved is not None:
            return moved
        return self._heads.step(now)

    def _due_in_s(self, now: float) -> float:
        """Seconds until a head is due, or the next look for orders."""
        wait_s, orders_s = self._heads.due_in_s(now), max(0.0, self.parts.orders.look_at - now)
        return orders_s if wait_s is None else min(wait_s, orders_s)

    # ── beside other processes ──────────────────────────────────────────────────────────────────────────────────────

    def look(self, devices: Collection[str]) -> None:
        self._keeper.look(devices)

    def reload(self) -> None:
        self.parts.reload()
        self._keeper.reload()

    def learn(self, now: float) -> bool:
        return self._keeper.learn(now)

    def decide_again(self) -> None:
        self._ingest.forget_accepted()

    def chunk_of(self, device: str, payload: bytes) -> Chunk | None:
        return self._ingest.chunk_of(device, payload, self._view())

    def has_taken(self, device: str, receipt: Receipt) -> bool:
        return self._keeper.has_taken(device, receipt.round)

"""The coordinator of a fleet with rounds: ingest, the machine of rounds, and what a round comes to.

It decides and commits. How a round closes, what it comes to, what orders do to it, and when devices are answered are
parts that it is given (`kinds.py` puts them together).

If the process dies anywhere, a new coordinator on the same store continues at the same place: an open round is open
with the promised contributions, and nothing is counted a second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from protofleet.aggregator.blinded.blinded_rounds import BlindedRounds
from protofleet.aggregator.closing.accuracy_reports import AccuracyReports
from protofleet.aggregator.closing.joint_heads import JointHead
from protofleet.aggregator.closing.round_books import RoundBooks, RoundClosing
from protofleet.aggregator.closing.round_orders import RoundOrders
from protofleet.aggregator.closing.round_results import RoundResults
from protofleet.aggregator.coordinators.coordinator import Replies
from protofleet.aggregator.ingest.ingest import Decision, Ingest, View, largest_contribution_bytes
from protofleet.aggregator.parts.steps import CoordinatorStep
from protofleet.aggregator.rounds.round_machine import Rounds
from protofleet.aggregator.screening.outliers import Finding
from protofleet.aggregator.store.durable_store import OUTCOMES
from protofleet.aggregator.store.records import Key, RoundRecord
from protofleet.contract.methods import Method
from protofleet.contract.methods import method as method_of
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Announcement, Chunk, Receipt

__all__ = ["RoundCoordinator"]

CONTRADICTS_S = 15.0  # after a death of an enrolled device that is awaited: one that lives says so within ten
SETTLE_S = 2.0  # retained births arrive right after the subscription; devices that must reconnect take longer


class RoundCoordinator:
    """One run of one fleet; an `aggregator/coordinators/coordinator.py: Coordinator`.

    Args:
        closing: how rounds gather and close.
        results: what they come to.
        replies: when devices are answered.
        helper: what is asked of a helper, if there is one.

    Attributes:
        findings, doubt, told: as of `RoundBooks`.
        accuracy: what devices report after rounds.
    """

    kind: Literal["rounds", "standing"] = "rounds"
    lags = False
    rest = 10.0

    def __init__(
        self,
        books: RoundBooks,
        closing: RoundClosing,
        results: RoundResults,
        replies: Replies,
        helper: BlindedRounds | None = None,
    ) -> None:
        self.parts, self.books, self.helper = books.parts, books, helper
        self._closing, self._results, self._replies = closing, results, replies
        self._store, self._orders = books.parts.store, RoundOrders(books, closing, results)
        self._ingest = Ingest(books.is_stored, patient=self._store.shared)
        self._doubted: dict[str, tuple[bytes, float]] = {}  # deaths of who is awaited, and from when on they are true
        self.accuracy = AccuracyReports(self._store)
        self._count = (-1, -1, -1)

    @property
    def rounds(self) -> Rounds:
        return self.books.rounds

    @property
    def state(self) -> GlobalState:
        return self.books.state

    @property
    def findings(self) -> tuple[Finding, ...]:
        return self.books.findings

    @property
    def doubt(self) -> str:
        return self.books.doubt

    @property
    def told(self) -> str:
        return self.books.told

    @property
    def verdicts(self) -> Mapping[str, Receipt]:
        return self.books.verdicts

    @property
    def method(self) -> Method:
        """The method of the current round."""
        return self.books.method

    @property
    def largest_message_bytes(self) -> int:
        """The largest useful message. A contribution that was made for a larger limit is still taken whole."""
        methods = {*self.rounds.plan, *(record.method for record in self.books.newest_round())}
        view, width = self._view(), self.parts.terms.width
        views = [replace(view, method=name, width=width(method_of(name))) for name in methods]
        return max([self.parts.terms.limit_bytes, *map(largest_contribution_bytes, views)])

    @property
    def is_finished(self) -> bool:
        """Whether the store already holds every planned round."""
        return self.rounds.phase == "waiting" and self.rounds.is_done

    @property
    def opened_at(self) -> float | None:
        return self.record(self.rounds.number).opened_at if self.rounds.number else None

    def record(self, round: int) -> RoundRecord:
        """What the store knows of a round that was opened."""
        return self._store.record(round)

    def counts(self) -> dict[str, int]:
        return {"awaited": self.rounds.awaited_count}

    def announcement(self, limit_bytes: int | None = None) -> Announcement:
        return self._closing.announced(self.books.announcement(limit_bytes))

    def joint_of(self, device: str) -> JointHead | None:
        is_refused = device in self.parts.exclusions.refused
        return None if is_refused else self.books.joint.of(device, self.verdicts.get(device))

    def _view(self) -> View:
        return replace(self._closing.viewed(self.books.view()), exact=self._results.exact)

    # ── what comes ──────────────────────────────────────────────────────────────────────────────────────────────────

    def status(self, device: str, payload: bytes, now: float, *, is_ours: bool = False, is_news: bool = True) -> bool:
        message = self.parts.statuses.read(device, payload, self._view, is_ours=is_ours, is_news=is_news)
        if message is None:
            return False
        self.accuracy.hear(device, message, max_samples=self.parts.terms.settings.max_samples)
        news = 0.0 if device in self.parts.exclusions.refused else message.metrics.get("samples_new", 0.0)
        self.rounds.schedule.heard(device, news)
        self.books.joint.hear(device, message.versions)
        if message.online:
            self._doubted.pop(device, None)
            self.rounds.leaves_out(device, is_apart=device in self.parts.statuses.apart, now=now)
            return self.rounds.birth(device, message.instance, now)
        if device in self.parts.gate.enrolled and self.rounds.awaits(device):
            self._doubted.setdefault(device, (message.instance, now + CONTRADICTS_S))
            return False
        return self.rounds.death(device, message.instance)

    def take(self, batch: Sequence[tuple[str, bytes]], now: float) -> list[Decision]:
        view, uncounted = self._view(), self.parts.uncounted.tally
        decisions = [self._ingest.decide(device, payload, view, now) for device, payload in batch]
        keeps_late = self.rounds.policy.stays and not self._store.shared  # another process may close the round
        for decision, (_, payload) in zip(decisions, batch if keeps_late else (), strict=False):
            self.books.late.hear(decision, payload, view)
        refused = [d for d in decisions if d.outcome == "rejected" and _answers(d, view)]
        tally = uncounted + Counter((d.round, d.outcome) for d in decisions if d.outcome in OUTCOMES)
        accepted = [d.accepted for d in decisions if d.accepted is not None]
        stored_elsewhere: Collection[Key] = ()
        if accepted or tally:
            stored_elsewhere = self._store.commit(accepted, tally, [(d.round, d.device) for d in refused])
        uncounted.clear()
        if stored_elsewhere:
            decisions = [self._known_elsewhere(decision, stored_elsewhere) for decision in decisions]
            accepted = [d.accepted for d in decisions if d.accepted is not None]
        self.parts.decided(batch, decisions)
        self.accuracy.keep()
        self._ingest.forget_accepted()
        for decision in decisions:
            if decision.outcome != "malformed" and decision.cause != "intruder":
                self.rounds.heard(decision.device, now)
        for contribution in accepted:
            self.rounds.contributed(contribution.device)
        self.books.traits |= {d.device: d.traits for d in decisions if d.traits is not None}
        for decision in refused:
            self.rounds.refused(decision.device)
        return self._replies.of(decisions)

    def _known_elsewhere(self, decision: Decision, stored_elsewhere: Collection[Key]) -> Decision:
        """What another process has committed meanwhile is a duplicate here."""
        accepted = decision.accepted
        if accepted is None or (accepted.round, accepted.method, accepted.device) not in stored_elsewhere:
            return decision
        assert decision.receipt is not None
        self.rounds.contributed(decision.device)
        self.parts.uncounted.tally[(decision.round, "duplicate")] += 1
        receipt = replace(decision.receipt, status="duplicate")
        return replace(decision, outcome="duplicate", receipt=receipt, accepted=None, traits=None)

    def stalled(self, now: float) -> list[Decision]:
        is_online = (lambda device: True) if self._store.shared else self.rounds.is_online  # who leads hears of it
        return self._replies.due() + self._ingest.stalled(now, self._view(), is_online)

    # ── what is due ─────────────────────────────────────────────────────────────────────────────────────────────────

    def advance(self, now: float, wall: float) -> CoordinatorStep | None:
        news = self._results.news()
        if news is not None:
            return news
        for device, (instance, due_at) in list(self._doubted.items()):
            if now >= due_at:
                del self._doubted[device]
                self.rounds.death(device, instance)
        order = self._closing.next_order(now)
        if order is not None:
            with self._store.alone():
                return self._orders.obey(order, wall)
        moved = self.parts.rollouts.advance(wall)
        if moved is not None:
            return moved
        if self.parts.orders.paused and self.rounds.phase == "waiting" and not self.is_finished:
            return None
        return self._closing.step(now, wall)

    # ── beside other processes ──────────────────────────────────────────────────────────────────────────────────────

    def look(self, devices: Collection[str]) -> None:
        return

    def reload(self) -> None:
        self.parts.reload()

    def learn(self, now: float) -> bool:
        count = (self.rounds.number, *self._store.taken_count(self.rounds.number, self.rounds.method))
        is_new = count != self._count and self.books.learn()
        self._count = count
        return is_new

    def decide_again(self) -> None:
        self._ingest.forget_accepted()

    def chunk_of(self, device: str, payload: bytes) -> Chunk | None:
        return self._ingest.chunk_of(device, payload, self._view())

    def has_taken(self, device: str, receipt: Receipt) -> bool:
        return self._store.holds(receipt.round, receipt.method, device)


def _answers(decision: Decision, view: View) -> bool:
    """Whether a refusal was of the very contribution that the open round waits for."""
    receipt = decision.receipt
    return view.open and decision.round == view.round and receipt is not None and receipt.method == view.method

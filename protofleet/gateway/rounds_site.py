"""The site of a gateway while the aggregator above runs rounds: the same rounds here, one contribution to each.

It has a coordinator as of any fleet with rounds, and gives it what is different on a site:

    rounds      open and close as the rounds above do (`followed_rounds.py`), with the same number, method, seed and
                share of devices. So the same devices take part as without a gateway.
    results     are not computed here. Contributions that may merge are added up as whole numbers, and that sum goes up.
                The global state is the one from above, under the same version.
    terms       are those from above (`site_terms.py`).
    receipts    wait until the site's contribution to the round has its receipt from above, and repeat its status.

Guarantee: a closed round in the store never changes. The site's contribution is a function of it, so after a kill the
same contribution is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from protofleet.aggregator.closing.open_rounds import OpenRounds
from protofleet.aggregator.coordinators.kinds import planned, round_books
from protofleet.aggregator.coordinators.round_coordinator import RoundCoordinator
from protofleet.aggregator.ingest.ingest import Decision
from protofleet.aggregator.merging.exact_sums import ExactSum
from protofleet.aggregator.merging.merge_round import RoundEnd, Some, exact_total, screened_round, traits_of
from protofleet.aggregator.parts.common_parts import Parts
from protofleet.aggregator.parts.steps import Solved
from protofleet.aggregator.screening.outliers import Finding, Traits
from protofleet.aggregator.settings import Settings, adds_up
from protofleet.aggregator.store.durable_store import DurableStore, as_written, global_parts
from protofleet.aggregator.store.order_table import Order
from protofleet.aggregator.store.records import Key, RoundRecord
from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.methods import METHODS, Method
from protofleet.contract.methods import method as method_of
from protofleet.contract.printable import counted
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Announcement, Contribution, ReceiptStatus
from protofleet.gateway.followed_rounds import FollowedRounds, policy_of
from protofleet.gateway.site_terms import ABOVE, SiteTerms
from protofleet.gateway.unfit_devices import fitted

__all__ = ["Fate", "RoundsSite", "is_of_rounds", "why_not"]

Fate = tuple[ReceiptStatus, str]
"""The outcome of a site's contribution above, and the reason."""
_Sum = tuple[ExactSum, int, tuple[Finding, ...]]
"""The exact sum of a round, the number of devices in it, and the findings about the others."""
_RUN = "gateway run"  # key in the store's meta table: the run above whose rounds these are


@dataclass(frozen=True, eq=False)
class _Gathered(RoundEnd):
    """The end of a round on the site.

    Attributes:
        gathered: the sum that goes up.
    """

    gathered: _Sum


class RoundsSite:
    """One site of one fleet that has rounds: the `RoundResults` and the `Replies` of its coordinator.

    Args:
        store, settings, now, shorter, wall: as of `aggregator/coordinators/kinds.py: rounds_of`.
        bundle: the fleet's whole bundle.

    Attributes:
        core: the coordinator.
        terms: those from above.
        rounds: the round machine.
        fate: gives the outcome of the site's contribution to a round above; None while it is open.
    """

    exact = True

    def __init__(
        self,
        store: DurableStore,
        bundle: Bundle,
        settings: Settings,
        *,
        now: float,
        shorter: Mapping[bytes, int] | None = None,
        wall: float | None = None,
    ) -> None:
        self._waiting: dict[tuple[str, int, str], Decision] = {}
        self._gathered: tuple[int, _Sum] | None = None
        self.fate: Callable[[int, str], Fate | None] = lambda round, method: None
        methods = planned(store, bundle.manifest, settings, shorter=shorter)
        parts = self._parts = Parts.of(store, bundle.manifest, bundle.sha256, settings, now=now, shorter=shorter)
        self.rounds = FollowedRounds(methods, settings.policy)
        self._books = round_books(parts, self.rounds, now=now, wall=wall)
        self.core = RoundCoordinator(self._books, OpenRounds(self._books, self), self, self)
        self.terms = SiteTerms(parts, bundle, lambda: self._books.method)
        self._take_policy()
        newest = self.closed
        self.rounds.expect(() if newest is None else newest.uplink_bytes)

    @property
    def run_above(self) -> bytes | None:
        """The run above whose rounds these are; None before the first announcement."""
        kept = self._parts.store.meta.get(_RUN)
        return None if kept is None else bytes.fromhex(kept)

    # ── what comes from above ───────────────────────────────────────────────────────────────────────────────────────

    def follow(self, a: Announcement, state: GlobalState | None, now: float) -> None:
        """Take over the announcement and the newest global state from above. They are durable on return.

        Raises:
            StoreError: when the disk refuses.
        """
        store = self._parts.store
        if store.meta.get(_RUN) is None:
            store.meta.put(_RUN, a.run.hex())
        self.rounds.plan = (a.method,)
        if self.terms.hold_to(a, now):
            self._take_policy()
        if state is not None and state.version > self._books.state.version:
            known = state.below(self._parts.terms.manifest.classes)
            newer = GlobalState(self._parts.run, known.version, known.round, known.rows)
            store.standing.solved(global_parts(newer), "")
            self._books.state, self.terms.is_news = newer, True
        self.rounds.above, self.rounds.ready = a, self._books.state.version == a.global_version

    def _take_policy(self) -> None:
        terms, newest = self._parts.terms, self.terms.newest
        fraction, deadline_s = float(newest.get("fraction", 1.0)), float(newest.get("deadline_s", 0.0))
        self.rounds.policy = policy_of(terms.settings.policy.min_clients, fraction, deadline_s)
        terms.settings = replace(terms.settings, fraction=fraction, deadline=self.rounds.policy.deadline_s)

    def news(self) -> Solved | None:
        """A newer state from above, or newer terms, passed on between rounds."""
        if not self.terms.is_news or self.rounds.phase == "open":
            return None
        self.terms.is_news = False
        return Solved(self._books.state.version, 0, 0, 0)

    # ── receipts ────────────────────────────────────────────────────────────────────────────────────────────────────

    def of(self, decisions: list[Decision]) -> list[Decision]:
        """Those that are told now: a contribution that is not committed above is not answered yet."""
        answered = map(self._answered, decisions)
        return [decision for decision in answered if decision is not None]

    def due(self) -> list[Decision]:
        """Those that were held back, and whose outcome above is known."""
        rounds = {(number, method) for _, number, method in self._waiting}
        known = {key for key in rounds if self.fate(*key) is not None}
        return self.of([self._waiting.pop(key) for key in list(self._waiting) if key[1:] in known])

    def _answered(self, decision: Decision) -> Decision | None:
        """The decision that a device is told; None while the outcome above is not known."""
        receipt = decision.receipt
        if receipt is None or decision.outcome not in ("committed", "duplicate"):
            return decision
        fate, key = self.fate(receipt.round, receipt.method), (decision.device, receipt.round, receipt.method)
        if fate is None:
            if decision.outcome == "committed" or key not in self._waiting:
                self._waiting[key] = decision
            return None
        status, why = fate
        decision = self._waiting.pop(key, decision)  # the first decision says more than the one about a repetition
        if status in ("committed", "duplicate"):
            return decision
        reason = f"{ABOVE}: {why}"[:200] if status == "rejected" else ""
        answer = replace(receipt, status=status, reason=reason)
        return replace(decision, outcome=status, receipt=answer, reason=reason)

    # ── what goes up ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def closed(self) -> RoundRecord | None:
        """The newest closed round, None without one. All rounds before it have gone up."""
        after = self.rounds.number - 1 - (self.rounds.phase == "open")
        closed_rounds = [record for record in self._parts.store.rounds(after=max(0, after)) if record.closed]
        if not closed_rounds and self.rounds.number > 1:  # numbers may be missing where a gateway was away
            closed_rounds = [record for record in self._parts.store.rounds() if record.closed]
        return closed_rounds[-1] if closed_rounds else None

    def contribution(self, a: Announcement, record: RoundRecord) -> Contribution:
        """The sum of a closed round as one contribution.

        Args:
            a: the announcement from above.

        Raises:
            StatisticError: the sums are too large for one gateway.
        """
        method = method_of(record.method)
        total, devices, _ = self._sum_of(record)
        nothing = self.terms.nothing(a, method, record.number, None)
        return total.for_others(method.statistic, self._parts.terms.width(method), devices, nothing)

    def _sum_of(self, record: RoundRecord) -> _Sum:
        """The sum of a closed round, computed once."""
        if self._gathered is None or self._gathered[0] != record.number:
            self._gathered = record.number, self._summed(record)
        return self._gathered[1]

    def _summed(self, record: RoundRecord) -> _Sum:
        method, devices = method_of(record.method), list(record.uplink_bytes)

        def messages(only: Collection[str] = frozenset(devices)) -> Iterator[tuple[str, Contribution]]:
            with as_written(self._parts.store.standing.path):
                for device, message in zip(devices, self._books.messages(record.number, record.method), strict=True):
                    if device in only:
                        yield device, message

        return self._adder(method)(messages, traits_of(method, messages, self._parts.terms.hyper(method)))

    def _adder(self, method: Method) -> Callable[[Some, Mapping[str, Traits]], _Sum]:
        """A function that adds up the contributions of a round that may merge. It reads no state that may change."""
        terms = self._parts.terms
        hyper, how, most = terms.hyper(method), self._books.screening(method), terms.settings.max_samples
        classes, width, labels = terms.manifest.classes, terms.width(method), terms.manifest.labels

        def add(messages: Some, traits: Mapping[str, Traits]) -> _Sum:
            screened = screened_round(
                method,
                lambda: messages(traits),
                traits,
                hyper,
                classes=classes,
                width=width,
                how=how,
                labels=labels,
                some=messages,
            )
            out = {finding.device for finding in screened.findings if finding.left_out}
            counted_in = [device for device in traits if device not in out]

            def sums() -> Iterator[tuple[str, ExactSum]]:
                return zip(counted_in, map(ExactSum.of, screened.source()), strict=True)

            contributors = sum(traits[device].samples > 0 for device in counted_in)
            fits = fitted(exact_total(method, screened, classes, width), contributors, sums, max_samples=most)
            heavy = tuple(Finding(device, "left out", reason) for device, reason in fits.left_out.items())
            return fits.total, contributors - len(heavy), (*screened.findings, *heavy)

        return add

    def maker(self, method: Method) -> Callable[[Some, Mapping[str, Traits]], RoundEnd]:
        """A function that makes the end of a round: its sum, which goes up."""
        add, how = self._adder(method), self._books.screening(method)

        def make(messages: Some, traits: Mapping[str, Traits]) -> RoundEnd:
            total, devices, findings = gathered = add(messages, traits)
            line = f"goes up for {counted(devices, 'device')}"
            return _Gathered(int((total.counts > 0).sum()), None, how, findings, "", line, gathered)

        return make

    def recorded(self, round: int, end: RoundEnd) -> None:
        assert isinstance(end, _Gathered)
        self._gathered = round, end.gathered

    # ── what operators ask for: results are those from above, and a sum that has gone up is not taken back ──────────

    def without(self, device: str, records: list[RoundRecord]) -> GlobalState:
        self._gathered = None
        return self._books.state

    def without_class(self, number: int, holders: Collection[Key]) -> GlobalState:
        self._gathered = None
        return self._books.state

    def still_in(self, device: str, records: list[RoundRecord]) -> str:
        was = [str(record.number) for record in records if record.closed and device in record.uplink_bytes]
        return f"; {ABOVE} has it in the site's sum of round {was[-1]}, and of earlier ones" if was else ""

    def roll_back(self, order: Order, wall: float) -> str:
        before, outcome = self._books.state.version, "refused: what rounds come to is made by the aggregator above"
        self._parts.store.orders.done(order, wall, outcome, before, before)
        return outcome


def is_of_rounds(store: DurableStore) -> bool:
    """Whether a gateway's store is one of rounds."""
    return store.meta.get(_RUN) is not None


def why_not(a: Announcement, manifest_hyper: Mapping[str, object]) -> str:
    """Why no gateway can take part in the announced rounds; empty where one can."""
    if a.helper is not None:
        return f"above there are blinded rounds of {a.method}: of a blinded sum nobody may hold a part"
    method = METHODS.get(a.method)
    if method is None:
        return f"above there are rounds of {a.method}, a method that is not installed here"
    hyper = method.resolved_in(manifest_hyper)  # type: ignore[arg-type]
    if not adds_up(method, hyper):
        why = "weighs devices one by one, hides them in noise, or sends no sums"
        return f"above there are rounds of {a.method}, which {why}: a gateway can send sums alone"
    return ""

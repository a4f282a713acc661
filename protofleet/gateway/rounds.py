"""What a site's aggregator is while the one above runs rounds: the same rounds below, and one contribution to each.

It is the aggregator of `aggregator/coordinator.py` with these differences:

    rounds      open and close as those above do (`followed.py`): the same number, method, seed and share of devices, so
                that the devices that take part are those that would without a gateway
    results     are not made here: what may merge is added up as whole numbers, which is what goes up; the global state
                is the one from above, under the same version
    terms       are those from above (`site.py`)
    receipts    a device's waits until the site's contribution to that round has its own, and says what that says

A closed round in the store never changes, so what goes up is a function of it: made anew after a kill it is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from aggregator.coordinator import Coordinator
from aggregator.ingest import Decision, View
from aggregator.merging import Made, Some, exact_total, screened_round, traits_of
from aggregator.orders import Obeyed
from aggregator.outliers import Finding, Traits
from aggregator.rollout import Moved
from aggregator.rounds import Closed, Rounds, Step
from aggregator.settings import Settings, adds_up
from aggregator.standing import ExactSum
from aggregator.standing_coordinator import Solved
from aggregator.standing_store import Order
from aggregator.store import DurableStore, Key, RoundRecord, as_written, global_parts
from contract.bundle import Bundle
from contract.messages import Announcement, Contribution, ReceiptStatus
from contract.methods import METHODS, Method
from contract.methods import method as method_of
from contract.state import GlobalState
from contract.terminal import counted
from protofleet.gateway.fitting import fitted
from protofleet.gateway.followed import FollowedRounds, policy_of
from protofleet.gateway.site import ABOVE, Site

__all__ = ["Fate", "GatewayRounds", "is_of_rounds", "why_not"]

Fate = tuple[ReceiptStatus, str]
"""What became of a site's contribution, and why."""
_Sum = tuple[ExactSum, int, tuple[Finding, ...]]
"""The exact sum of a round, of how many devices it is, and what speaks against others."""
_RUN = "gateway run"  # in the store's table of names: whose rounds these are


@dataclass(frozen=True, eq=False)
class _Gathered(Made):
    """What a round came to here.

    Attributes:
        gathered: what goes up.
    """

    gathered: _Sum


class GatewayRounds(Site, Coordinator):
    """One site of one fleet that has rounds.

    Args:
        store, settings, now, shorter, wall: as of `Coordinator`.
        bundle: the fleet's, whole.

    Attributes:
        rounds: the machine.
        fate: says what became of the site's contribution to a round above; None where nothing did yet.
    """

    rounds: FollowedRounds

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
        self._whole = bundle
        self._waiting: dict[tuple[str, int, str], Decision] = {}
        self._gathered: tuple[int, _Sum] | None = None
        self.fate: Callable[[int, str], Fate | None] = lambda round, method: None
        super().__init__(store, bundle.manifest, bundle.sha256, settings, now=now, shorter=shorter, wall=wall)
        self._take_up(store)
        newest = self.closed
        self.rounds.expect(() if newest is None else newest.uplink_bytes)

    @property
    def run_above(self) -> bytes | None:
        """The run whose rounds these are; None before there is one."""
        kept = self._tables.meta(_RUN)
        return None if kept is None else bytes.fromhex(kept)

    def _machine(self, methods: tuple[str, ...]) -> Rounds:
        return FollowedRounds(methods, self._settings.policy)

    # ── what comes from above ───────────────────────────────────────────────────────────────────────────────────────

    def follow(self, a: Announcement, state: GlobalState | None, now: float) -> None:
        """What is announced above, and the newest global state there; durable on return.

        Raises:
            StoreError: when the disk refuses.
        """
        if self._tables.meta(_RUN) is None:
            self._tables.set_meta(_RUN, a.run.hex())
        self.rounds.plan = (a.method,)
        self.hold_to(a, now)
        if state is not None and state.version > self.state.version:
            known = state.below(self._manifest.classes)
            newer = GlobalState(self.run, known.version, known.round, known.rows)
            self._tables.solved(global_parts(newer), "")
            self.state, self._announces = newer, True
        self.rounds.above, self.rounds.ready = a, self.state.version == a.global_version

    def _hold_to_terms(self) -> None:
        super()._hold_to_terms()
        fraction, deadline_s = float(self._terms.get("fraction", 1.0)), float(self._terms.get("deadline_s", 0.0))
        self.rounds.policy = policy_of(self._settings.policy.min_clients, fraction, deadline_s)
        self._settings = replace(self._settings, policy=self.rounds.policy)

    def advance(self, now: float, wall: float) -> Step | Solved | Obeyed | Moved | None:  # type: ignore[override]
        """As without a gateway; news from above are given on between rounds."""
        if self._announces and self.rounds.phase != "open":
            self._announces = False
            return Solved(self.state.version, 0, 0, 0)
        return super().advance(now, wall)

    # ── receipts ────────────────────────────────────────────────────────────────────────────────────────────────────

    def take(self, batch: Sequence[tuple[str, bytes]], now: float) -> list[Decision]:
        """As without a gateway; what is not committed above is not answered yet."""
        made = (self._answered(decision) for decision in super().take(batch, now))
        return [decision for decision in made if decision is not None]

    def stalled(self, now: float) -> list[Decision]:
        """Also the answers that were held back, once it is known what they are."""
        rounds = {(number, method) for _, number, method in self._waiting}
        known = {key for key in rounds if self.fate(*key) is not None}
        ready = [key for key in self._waiting if key[1:] in known]
        told = [self._answered(self._waiting.pop(key)) for key in ready]
        return [decision for decision in told if decision is not None] + super().stalled(now)

    def _answered(self, decision: Decision) -> Decision | None:
        """What a device is told now; None where that is not known yet."""
        receipt = decision.receipt
        if receipt is None or decision.outcome not in ("committed", "duplicate"):
            return decision
        fate, key = self.fate(receipt.round, receipt.method), (decision.device, receipt.round, receipt.method)
        if fate is None:
            if decision.outcome == "committed" or key not in self._waiting:
                self._waiting[key] = decision
            return None
        status, why = fate
        decision = self._waiting.pop(key, decision)  # its repetition says less
        if status in ("committed", "duplicate"):
            return decision
        reason = f"{ABOVE}: {why}"[:200] if status == "rejected" else ""
        said = replace(receipt, status=status, reason=reason)
        return replace(decision, outcome=status, receipt=said, reason=reason)

    # ── what goes up ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def closed(self) -> RoundRecord | None:
        """The newest closed round, if there is one; all before it have gone up."""
        after = self.rounds.number - 1 - (self.rounds.phase == "open")
        found = [record for record in self._store.rounds(after=max(0, after)) if record.closed]
        if not found and self.rounds.number > 1:  # numbers may be missing where a gateway was away
            found = [record for record in self._store.rounds() if record.closed]
        return found[-1] if found else None

    def contribution(self, a: Announcement, record: RoundRecord) -> Contribution:
        """What a closed round gathered, as one contribution.

        Args:
            a: the announcement from above.

        Raises:
            StatisticError: the sums are too large for one gateway.
        """
        found = method_of(record.method)
        total, devices, _ = self._sum_of(record)
        return total.for_others(
            found.statistic, self._width(found), devices, self._nothing(a, found, record.number, None)
        )

    def _sum_of(self, record: RoundRecord) -> _Sum:
        """That of a closed round."""
        if self._gathered is None or self._gathered[0] != record.number:
            self._gathered = record.number, self._summed(record)
        return self._gathered[1]

    def _summed(self, record: RoundRecord) -> _Sum:
        found, devices = method_of(record.method), list(record.uplink_bytes)

        def messages(only: Collection[str] = frozenset(devices)) -> Iterator[tuple[str, Contribution]]:
            with as_written(self._tables.path):
                for device, message in zip(devices, self._messages(record.number, record.method), strict=True):
                    if device in only:
                        yield device, message

        return self._adder(found)(messages, traits_of(found, messages, self._hyper(found)))

    def _adder(self, found: Method) -> Callable[[Some, Mapping[str, Traits]], _Sum]:
        """Adds up what may merge of a round, and of nothing that changes meanwhile."""
        hyper, how, most = self._hyper(found), self._screening(found), self._settings.max_samples
        classes, width, labels = self._manifest.classes, self._width(found), self._manifest.labels

        def add(messages: Some, traits: Mapping[str, Traits]) -> _Sum:
            screened = screened_round(
                found,
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
            here = [device for device in traits if device not in out]

            def sums() -> Iterator[tuple[str, ExactSum]]:
                return zip(here, map(ExactSum.of, screened.source()), strict=True)

            said = sum(traits[device].samples > 0 for device in here)
            fits = fitted(exact_total(found, screened, classes, width), said, sums, max_samples=most)
            heavy = tuple(Finding(device, "left out", reason) for device, reason in fits.left_out.items())
            return fits.total, said - len(heavy), (*screened.findings, *heavy)

        return add

    def _maker(self, found: Method) -> Callable[[Some, Mapping[str, Traits]], Made]:
        """The round below is over: what it gathered goes up."""
        add, how, state = self._adder(found), self._screening(found), self.state

        def make(messages: Some, traits: Mapping[str, Traits]) -> Made:
            total, devices, findings = gathered = add(messages, traits)
            told = f"goes up for {counted(devices, 'device')}"
            return _Gathered(int((total.counts > 0).sum()), state, how, findings, "", told, gathered)

        return make

    def _record(self, devices: list[str], made: Made, wall: float) -> Closed | None:
        step = super()._record(devices, replace(made, state=self.state), wall)  # one from above may have come
        if step is not None and isinstance(made, _Gathered):
            self._gathered = step.round, made.gathered
        return step

    # ── what operators ask for ──────────────────────────────────────────────────────────────────────────────────────

    def _forget(self, order: Order, wall: float) -> str:
        """As without a gateway; what has gone up is not taken back."""
        self._gathered = None
        return super()._forget(order, wall)

    def _forget_class(self, order: Order, wall: float) -> str:
        self._gathered = None
        return super()._forget_class(order, wall)

    def _roll_back(self, order: Order, wall: float) -> str:
        before, outcome = self.state.version, "refused: what rounds come to is made by the aggregator above"
        self._tables.done(order, wall, outcome, before, before)
        return outcome

    def _still_in(self, device: str, records: list[RoundRecord]) -> str:
        was = [str(record.number) for record in records if record.closed and device in record.uplink_bytes]
        return f"; {ABOVE} has it in the site's sum of round {was[-1]}, and of earlier ones" if was else ""

    def _without(self, device: str, records: list[RoundRecord]) -> GlobalState:
        return self.state  # which comes from above

    def _without_class(self, number: int, holders: Collection[Key]) -> GlobalState:
        return self.state

    def _view(self) -> View:
        return replace(super()._view(), exact=True)


def is_of_rounds(store: DurableStore) -> bool:
    """Whether a gateway's store is one of rounds."""
    return store.standing.meta(_RUN) is not None


def why_not(a: Announcement, manifest_hyper: Mapping[str, object]) -> str:
    """Why no gateway can take part in the rounds that are announced; empty where one can."""
    if a.helper is not None:
        return f"above there are blinded rounds of {a.method}: of a blinded sum nobody may hold a part"
    found = METHODS.get(a.method)
    if found is None:
        return f"above there are rounds of {a.method}, a method that is not installed here"
    hyper = found.settled_in(manifest_hyper)  # type: ignore[arg-type]
    if not adds_up(found, hyper):
        why = "weighs devices one by one, hides them in noise, or sends no sums"
        return f"above there are rounds of {a.method}, which {why}: a gateway can send sums alone"
    return ""

"""Rounds whose contributions nobody sees: gathered as shares, summed, and opened by the helper as a whole.

1. A round gathers as any other does.
2. When it would close it is held instead: its devices become a set (`blinded_set.py`), and the helper is asked for its
   sum. With the helper's answer

       words   = Σ shares, here + Σ pads, the helper's    (mod 2⁶⁴)

   is the statistic of all devices together. The method makes its result from it as from any sum.
3. Closing the round, its result and the end of its shares are one transaction.

Devices that the helper does not sum are left out and named, and the helper is asked for the rest. If fewer than k are
left, the round continues, since a sum of fewer is never opened. Devices that abstain are left out, too: the round does
not wait for them, and they are in no set.

No contribution can be screened, since none is seen. The sum is checked instead: whether any data can have it
(`aggregator/ingest/validation.py`). A sum that no data can have closes its round without a result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np

from protofleet.aggregator.coordinators.blinded_set import Answered, BlindedSet
from protofleet.aggregator.coordinators.late_contributions import LateContributions
from protofleet.aggregator.coordinators.round_coordinator import Coordinator
from protofleet.aggregator.ingest.blinded_shares import ShareTerms
from protofleet.aggregator.ingest.ingest import View
from protofleet.aggregator.ingest.validation import Terms, check_content
from protofleet.aggregator.merging.forgotten_classes import held_by
from protofleet.aggregator.merging.next_global import next_global
from protofleet.aggregator.rounds.round_machine import AwaitingSum, Closed, Opened, Step
from protofleet.aggregator.screening.outliers import Finding
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.blinded_tables import AskedSet
from protofleet.aggregator.store.durable_store import Store, as_written, contributions
from protofleet.aggregator.store.order_table import Order
from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.contract.errors import StatisticError, UsageError, WireError
from protofleet.contract.methods import Method
from protofleet.contract.methods import method as method_of
from protofleet.contract.printable import counted
from protofleet.contract.privacy.blinding import SCALE_BITS, share_words, statistic_of
from protofleet.contract.privacy.sealing import HelperPublic, round_terms
from protofleet.contract.sums.statistics import Statistic
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.helper_messages import HelperTerms, Opening
from protofleet.contract.wire.helper_messages import Opened as HelperOpened
from protofleet.contract.wire.messages import Announcement, Contribution

__all__ = ["BlindedCoordinator"]

_ABSTAINS = "it sent no share, as a device does whose owner's policy refuses the round"


class BlindedCoordinator(Coordinator):
    """One run of one fleet; arguments and errors as of `Coordinator`, with a helper in the settings."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        bundle: bytes,
        settings: Settings,
        *,
        now: float,
        others: tuple[bytes, ...] = (),
        shorter: Mapping[bytes, int] | None = None,
        wall: float | None = None,
    ) -> None:
        assert settings.helper is not None
        self._helper: HelperPublic = settings.helper
        super().__init__(store, manifest, bundle, settings, now=now, others=others, shorter=shorter, wall=wall)
        _check_methods(map(method_of, self.rounds.plan), self)
        if self._forgotten:
            got = f"{', '.join(self._forgotten[:4])} forgotten: a sum without a class shows it beside one with it"
            raise UsageError("--helper", expected="a store of all classes", got=got, hint="a new --store")
        self._late_contributions = LateContributions(0)  # a share is of its round
        self._set, self._by_order = BlindedSet(store.blinded, store.run), False
        self._left_out: dict[str, str] = {}
        if self._set.asked is not None:
            with as_written(self._tables.path):
                self._check_asked(self._set.asked)
            self.rounds.hold()

    def _check_asked(self, pending: AskedSet) -> None:
        """That the set is of the round that is open.

        Raises:
            ValueError: somebody has changed one of both.
        """
        rounds = self.rounds
        if rounds.phase != "open" or (pending.round, pending.method) != (rounds.number, rounds.method):
            raise ValueError(f"a set of round {pending.round} ({pending.method}), which is not open")

    # ── the helper ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def helper(self) -> HelperPublic:
        """Whose helper opens sums."""
        return self._helper

    @property
    def asked(self) -> AskedSet | None:
        """The set that the helper is asked for now; none once it has answered."""
        return None if self.closing.has_work else self._set.asked

    def asks(self, limit_bytes: int) -> list[Opening]:
        """What the helper is asked, as messages of at most so many bytes."""
        return self._set.asks(limit_bytes)

    def hear_helper(self, part: HelperOpened) -> None:
        """A part of what the helper answers."""
        self._set.hear(part)

    # ── as in open rounds, but for ──────────────────────────────────────────────────────────────────────────────────

    def announcement(self, limit_bytes: int | None = None) -> Announcement:
        announced = super().announcement(limit_bytes)
        terms = HelperTerms(self._helper.seal, self._settings.least, SCALE_BITS)
        return replace(announced, helper=terms)

    def _view(self) -> View:
        view = super()._view()
        word_count = share_words(self.method.statistic, view.classes, view.width)
        share = ShareTerms(word_count, self._settings.least, round_terms(self.announcement()))
        return replace(view, terms=replace(view.terms, blinded=share))

    def _next_order(self, now: float) -> Order | None:
        """What takes a device's share away waits as long as the helper may have opened it; the end of that does not."""
        order = super()._next_order(now)
        waits = order is not None and order.what == "forget" and self.rounds.held
        return self._store.orders.next_order("close-round") if waits else order

    def _unfit(self, order: Order) -> str:
        if order.what == "forget class":
            return "refused: in blinded rounds a class cannot be taken out of a sum, try a new --store without it"
        return super()._unfit(order)

    @property
    def _is_left(self) -> bool:
        return False  # a set that was asked for, the helper is asked for again

    def _step(self, now: float, wall: float) -> Step | None:
        if self.closing.has_work:
            return self.closing.step()
        if self.rounds.held:
            return self._held_step(now, wall)
        by_order, step = self.rounds.closing, self.rounds.advance(now)
        if isinstance(step, Opened):
            self._store.open_round(step.round, step.method, step.seed, wall)
        if not isinstance(step, Closed):
            return step
        self.rounds.hold()
        with self._store.alone():  # what is committed is of the set, by whomever
            if self._store.shared:
                self.learn()
            contributors = self.rounds.contributions
            shared = list(self._store.blinded.seeds(self.rounds.number, contributors))
            self._by_order, self._left_out = by_order, dict.fromkeys(contributors.difference(shared), _ABSTAINS)
            return self._ask(shared, "too few shares came", now, wall)

    def _held_step(self, now: float, wall: float) -> Step | None:
        """What the helper's answer makes due."""
        if self.rounds.closing:
            return self._without_result("closed by order before the helper answered", wall)
        answer = self._set.answer()
        if answer is None:
            return None
        if answer.total is not None:
            return self._sum(answer, wall)
        self._set.drop()
        self._left_out |= answer.refused or {}
        remaining = (
            [device for device in answer.asked.devices if device not in self._left_out] if answer.refused else []
        )
        return self._ask(remaining, f"the helper says: {answer.reason}", now, wall)

    def _ask(self, devices: list[str], otherwise: str, now: float, wall: float) -> Step:
        """Ask for the sum over these devices; where they are too few the round goes on, or ends if that was ordered."""
        if len(devices) >= self._settings.least:
            asked = self._set.begin(self.rounds.number, self.rounds.method, devices, wall)
            return AwaitingSum(asked.round, len(asked.devices))
        if self._by_order:
            return self._without_result(otherwise, wall)
        return self.rounds.release(now)

    # ── the sum ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _sum(self, answer: Answered, wall: float) -> Step | None:
        """The result of the sum that is open now, durable; None while it is being made."""
        summed, method, before = answer.asked, method_of(answer.asked.method), self.state
        hyper, devices = self._hyper(method), counted(len(answer.asked.devices), "device")

        def work() -> Callable[[], Step]:
            try:
                statistic, message = self._sum_of(answer, method)
                merged = method.merge(lambda: iter([statistic]), "mean", hyper)
            except (StatisticError, WireError) as error:
                why = f"the sum of {devices} is none that data can have, so one of them lies ({error})"
                return lambda: self._without_result(why, wall)
            state = next_global(before, method, merged, round=summed.round, hyper=hyper)
            payload = encode(message, "f64")
            doubt = method.doubt(merged, hyper) if merged.present.any() else "no device has a sample"
            told = (method.told(merged, hyper), f"one sum of {devices}", _shows(statistic))

            def record() -> Step:
                classes = int(merged.present.sum())
                self._finish(summed.round, summed.method, wall, classes, state, payload, len(summed.devices))
                self.state, self.doubt, self.told = state, doubt, "; ".join(filter(None, told))
                return self._ended()

            return record

        self.closing.begin(work)
        return self.closing.step()

    def _sum_of(self, answer: Answered, method: Method) -> tuple[Statistic, Contribution]:
        """The statistic of all devices of the set together, and the same as a contribution.

        Raises:
            StatisticError, WireError: no data can have it.
        """
        assert answer.total is not None
        summed, total = answer.asked, np.array(answer.total)
        classes, width = self._manifest.classes, self._width(method)
        expected = share_words(method.statistic, classes, width)
        if len(total) != expected:
            raise WireError("the helper's sum", expected=f"{expected} words", got=len(total))
        inside = set(summed.devices)
        with self._store.snapshot() as db, as_written(self._tables.path):
            for device, payload in contributions(db, summed.round, summed.method):
                self.closing.go_on()
                if device in inside:
                    share = held_by(payload).share
                    assert share is not None
                    np.add(total, share, out=total)
        statistic = statistic_of(method.statistic, classes, width, total)
        message = Contribution.of(
            statistic,
            run=self.run,
            round=summed.round,
            method=summed.method,
            bundle=self._bundle,
            extractor=self._extractor,
        )
        most = self._settings.max_samples * len(summed.devices)
        terms = Terms(max_samples=most, extractor=self._extractor)
        check_content(message, terms, bundles=(self._bundle,), classes=classes, width=width)
        return statistic, message

    def _without_result(self, why: str, wall: float) -> Step:
        rounds = self.rounds
        self._finish(rounds.number, rounds.method, wall, 0, self.state, None, 0)
        self.doubt, self.told = f"closed without a result: {why}", ""
        return self._ended()

    def _finish(
        self,
        round: int,
        method: str,
        wall: float,
        classes: int,
        state: GlobalState,
        payload: bytes | None,
        devices: int,
    ) -> None:
        tables = self._store.blinded
        self.findings = tuple(Finding(device, "left out", why) for device, why in sorted(self._left_out.items()))
        self._store.close_round(
            round,
            wall,
            classes,
            state,
            findings=self.findings,
            also=lambda db: tables.closed(db, round, method, devices, payload),
        )
        self._set.over()

    def _ended(self) -> Step:
        self._left_out = {}
        return self.rounds.end()


def _shows(statistic: Statistic) -> str:
    """What a sum shows because it is of few samples; empty for nothing more than any sum does."""
    samples, width = int(statistic.counts.sum()), statistic.width
    if not statistic.has_triangle() or samples >= width:
        return ""
    few = f"{counted(samples, 'sample')}, fewer than {width:,} features"
    return f"of {few}: who has it and a photo can tell whether that is in it"


def _check_methods(methods: Iterable[Method], core: BlindedCoordinator) -> None:
    """That every round of the plan is a sum that adds up, over one extractor.

    Raises:
        UsageError: when one is not.
    """
    for method in methods:
        if not method.stands:
            raise UsageError(
                "--helper",
                expected="rounds whose sums add up over the bundle's extractor: ncm or ffc",
                got=f"rounds of {method.name}",
                hint="--method ffc",
            )
        if method.mechanism(core._hyper(method)) is not None:
            raise UsageError("--helper", expected="a bundle without noise", got=f"{method.name} with noise")

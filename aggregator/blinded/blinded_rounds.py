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

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from protofleet.aggregator.blinded.blinded_set import Answered, BlindedSet
from protofleet.aggregator.closing.round_books import RoundBooks
from protofleet.aggregator.ingest.blinded_shares import ShareTerms
from protofleet.aggregator.ingest.ingest import View
from protofleet.aggregator.ingest.validation import Terms, check_content
from protofleet.aggregator.merging.forgotten_classes import held_by
from protofleet.aggregator.merging.next_global import next_global
from protofleet.aggregator.rounds.round_machine import AwaitingSum, Closed, Opened, Step
from protofleet.aggregator.screening.outliers import Finding
from protofleet.aggregator.store.blinded_tables import AskedSet
from protofleet.aggregator.store.durable_store import as_written, contributions
from protofleet.aggregator.store.order_table import Order
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

__all__ = ["BlindedRounds"]

_ABSTAINS = "it sent no share, as a device does whose owner's policy refuses the round"


class BlindedRounds:
    """How blinded rounds close: an `aggregator/closing/round_books.py: RoundClosing`, and what a helper is asked.

    Args:
        books: without late contributions, since a share is of its round.
        key: of the helper that opens sums.

    Raises:
        UsageError: a method's sums do not add up over one extractor, or a class is forgotten.
        StoreError: the store holds what no aggregator wrote.
    """

    def __init__(self, books: RoundBooks, key: HelperPublic) -> None:
        self._books, self._rounds, self.key = books, books.rounds, key
        self._parts, self._store, self._terms = books.parts, books.parts.store, books.parts.terms
        self._check_methods(map(method_of, self._rounds.plan))
        forgotten, store = self._parts.exclusions.forgotten, self._store
        if forgotten:
            got = f"{', '.join(forgotten[:4])} forgotten: a sum without a class shows it beside one with it"
            raise UsageError("--helper", expected="a store of all classes", got=got, hint="a new --store")
        self._set, self._by_order = BlindedSet(store.blinded, store.run), False
        self._left_out: dict[str, str] = {}
        if self._set.asked is not None:
            with as_written(store.standing.path):
                self._check_asked(self._set.asked)
            self._rounds.hold()

    def _check_methods(self, methods: Iterable[Method]) -> None:
        """That every round of the plan is a sum that adds up, over one extractor."""
        for method in methods:
            if not method.stands:
                raise UsageError(
                    "--helper",
                    expected="rounds whose sums add up over the bundle's extractor: ncm or ffc",
                    got=f"rounds of {method.name}",
                    hint="--method ffc",
                )
            if method.mechanism(self._terms.hyper(method)) is not None:
                raise UsageError("--helper", expected="a bundle without noise", got=f"{method.name} with noise")

    def _check_asked(self, pending: AskedSet) -> None:
        """That the set is of the round that is open.

        Raises:
            ValueError: somebody has changed one of both.
        """
        rounds = self._rounds
        if rounds.phase != "open" or (pending.round, pending.method) != (rounds.number, rounds.method):
            raise ValueError(f"a set of round {pending.round} ({pending.method}), which is not open")

    # ── the helper ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def asked(self) -> AskedSet | None:
        """The set that the helper is asked for now; none once it has answered."""
        return None if self._parts.closing.has_work else self._set.asked

    def asks(self, limit_bytes: int) -> list[Opening]:
        """What the helper is asked, as messages of at most so many bytes."""
        return self._set.asks(limit_bytes)

    def hear(self, part: HelperOpened) -> None:
        """A part of what the helper answers."""
        self._set.hear(part)

    # ── as in open rounds, but for ──────────────────────────────────────────────────────────────────────────────────

    def announced(self, announcement: Announcement) -> Announcement:
        helper = HelperTerms(self.key.seal, self._terms.settings.smallest_sum, SCALE_BITS)
        return replace(announcement, helper=helper, factors=False)  # a share is of as many numbers for every device

    def viewed(self, view: View) -> View:
        word_count = share_words(self._books.method.statistic, view.classes, view.width)
        asked = round_terms(self.announced(self._books.announcement()))
        share = ShareTerms(word_count, self._terms.settings.smallest_sum, asked)
        return replace(view, terms=replace(view.terms, blinded=share))

    def next_order(self, now: float) -> Order | None:
        """What takes a device's share away waits as long as the helper may have opened it; the end of that does not."""
        order = None if self._parts.closing.has_work else self._parts.orders.next(now)
        waits = order is not None and order.what == "forget" and self._rounds.held
        return self._store.orders.next_order("close-round") if waits else order

    def unfit(self, order: Order) -> str:
        if order.what == "forget class":
            return "refused: in blinded rounds a class cannot be taken out of a sum, try a new --store without it"
        return ""

    def step(self, now: float, wall: float) -> Step | None:
        if self._parts.closing.has_work:
            return self._parts.closing.step()
        if self._rounds.held:
            return self._held_step(now, wall)
        by_order, step = self._rounds.closing, self._rounds.advance(now)
        if isinstance(step, Opened):
            self._store.open_round(step.round, step.method, step.seed, wall)
        if not isinstance(step, Closed):
            return step
        self._rounds.hold()
        with self._store.alone():  # what is committed is of the set, by whomever
            if self._store.shared:
                self._books.learn()
            contributors = self._rounds.contributions
            shared = list(self._store.blinded.seeds(self._rounds.number, contributors))
            self._by_order, self._left_out = by_order, dict.fromkeys(contributors.difference(shared), _ABSTAINS)
            return self._ask(shared, "too few shares came", now, wall)

    def _held_step(self, now: float, wall: float) -> Step | None:
        """What the helper's answer makes due."""
        if self._rounds.closing:
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
        if len(devices) >= self._terms.settings.smallest_sum:
            asked = self._set.begin(self._rounds.number, self._rounds.method, devices, wall)
            return AwaitingSum(asked.round, len(asked.devices))
        if self._by_order:
            return self._without_result(otherwise, wall)
        return self._rounds.release(now)

    # ── the sum ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _sum(self, answer: Answered, wall: float) -> Step | None:
        """The result of the sum that is open now, durable; None while it is being made."""
        summed, method, before = answer.asked, method_of(answer.asked.method), self._books.state
        hyper, devices = self._terms.hyper(method), counted(len(answer.asked.devices), "device")

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
                self._books.state, self._books.doubt, self._books.told = state, doubt, "; ".join(filter(None, told))
                return self._ended()

            return record

        self._parts.closing.begin(work)
        return self._parts.closing.step()

    def _sum_of(self, answer: Answered, method: Method) -> tuple[Statistic, Contribution]:
        """The statistic of all devices of the set together, and the same as a contribution.

        Raises:
            StatisticError, WireError: no data can have it.
        """
        assert answer.total is not None
        summed, total = answer.asked, np.array(answer.total)
        classes, width = self._terms.manifest.classes, self._terms.width(method)
        expected = share_words(method.statistic, classes, width)
        if len(total) != expected:
            raise WireError("the helper's sum", expected=f"{expected} words", got=len(total))
        inside = set(summed.devices)
        with self._store.snapshot() as db, as_written(self._store.standing.path):
            for device, payload in contributions(db, summed.round, summed.method):
                self._parts.closing.go_on()
                if device in inside:
                    share = held_by(payload).share
                    assert share is not None
                    np.add(total, share, out=total)
        statistic = statistic_of(method.statistic, classes, width, total)
        message = Contribution.of(
            statistic,
            run=self._parts.run,
            round=summed.round,
            method=summed.method,
            bundle=self._terms.bundle,
            extractor=self._terms.extractor(method),
        )
        most = self._terms.settings.max_samples * len(summed.devices)
        terms = Terms(max_samples=most, extractor=self._terms.extractor(method))
        check_content(message, terms, bundles=(self._terms.bundle,), classes=classes, width=width)
        return statistic, message

    def _without_result(self, why: str, wall: float) -> Step:
        rounds = self._rounds
        self._finish(rounds.number, rounds.method, wall, 0, self._books.state, None, 0)
        self._books.doubt, self._books.told = f"closed without a result: {why}", ""
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
        self._books.findings = tuple(Finding(device, "left out", why) for device, why in sorted(self._left_out.items()))
        self._store.close_round(
            round,
            wall,
            classes,
            state,
            findings=self._books.findings,
            also=lambda db: tables.closed(db, round, method, devices, payload),
        )
        self._set.over()

    def _ended(self) -> Step:
        self._left_out = {}
        return self._rounds.end()


def _shows(statistic: Statistic) -> str:
    """What a sum shows because it is of few samples; empty for nothing more than any sum does."""
    samples, width = int(statistic.counts.sum()), statistic.width
    if not statistic.has_triangle() or samples >= width:
        return ""
    few = f"{counted(samples, 'sample')}, fewer than {width:,} features"
    return f"of {few}: who has it and a photo can tell whether that is in it"

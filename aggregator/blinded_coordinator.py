"""Rounds whose contributions nobody sees: gathered as shares, summed, and opened by the helper as a whole.

A round gathers as any other does. When it would close it is held instead: its devices become a set (`blinded.py`), the
helper is asked for its sum, and when that is here

    words   = Σ shares, here + Σ pads, the helper's    (mod 2⁶⁴)

is the statistic of all of them together, from which the method makes its result as from any sum. Closing the round, its
result and the end of its shares are one transaction. Devices that the helper does not sum are left out and named, and
the rest is asked for; where fewer than k are left the round goes on, since a sum of fewer is never opened. So are those
that abstain: the round does not wait for them, and they are of no set.

Nothing can be screened, since nothing is seen: what the sum is asked is whether any data can have it
(`aggregator/validation.py`). A sum that none can have closes its round without a result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np

from aggregator.blinded import Answered, BlindedSet
from aggregator.blinded_store import AskedSet
from aggregator.coordinator import Coordinator
from aggregator.forgotten_classes import held_by
from aggregator.ingest import View
from aggregator.outliers import Finding
from aggregator.rounds import Closed, Held, Opened, Step
from aggregator.settings import Settings
from aggregator.shares import ShareTerms
from aggregator.stand_ins import StandIns
from aggregator.standing_store import Order
from aggregator.state import next_global
from aggregator.store import Store, as_written, contributions
from aggregator.validation import Terms, check_content
from contract.blinding import SCALE_BITS, share_words, statistic_of
from contract.bundle import Manifest
from contract.errors import StatisticError, UsageError, WireError
from contract.helper_messages import HelperTerms, Opening
from contract.helper_messages import Opened as HelperOpened
from contract.messages import Announcement, Contribution
from contract.methods import Method
from contract.methods import method as method_of
from contract.sealing import HelperPublic, round_terms
from contract.state import GlobalState
from contract.statistics import Statistic
from contract.terminal import counted
from contract.wire import encode

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
        self._stand_ins = StandIns(0)  # a share is of its round
        self._set, self._by_order = BlindedSet(store.blinded, store.run), False
        self._left_out: dict[str, str] = {}
        if self._set.asked is not None:
            with as_written(self._tables.path):
                self._check_asked(self._set.asked)
            self.rounds.hold()

    def _check_asked(self, asked: AskedSet) -> None:
        """That the set is of the round that is open.

        Raises:
            ValueError: somebody has changed one of both.
        """
        rounds = self.rounds
        if rounds.phase != "open" or (asked.round, asked.method) != (rounds.number, rounds.method):
            raise ValueError(f"a set of round {asked.round} ({asked.method}), which is not open")

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
        made = super().announcement(limit_bytes)
        terms = HelperTerms(self._helper.seal, self._settings.least, SCALE_BITS)
        return replace(made, helper=terms)

    def _view(self) -> View:
        view = super()._view()
        words = share_words(self.method.statistic, view.classes, view.width)
        share = ShareTerms(words, self._settings.least, round_terms(self.announcement()))
        return replace(view, terms=replace(view.terms, blinded=share))

    def _next_order(self, now: float) -> Order | None:
        """What takes a device's share away waits as long as the helper may have opened it; the end of that does not."""
        order = super()._next_order(now)
        waits = order is not None and order.what == "forget" and self.rounds.held
        return self._tables.next_order("close-round") if waits else order

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
            came = self.rounds.contributions
            shared = list(self._store.blinded.seeds(self.rounds.number, came))
            self._by_order, self._left_out = by_order, dict.fromkeys(came.difference(shared), _ABSTAINS)
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
        rest = [device for device in answer.asked.devices if device not in self._left_out] if answer.refused else []
        return self._ask(rest, f"the helper says: {answer.reason}", now, wall)

    def _ask(self, devices: list[str], otherwise: str, now: float, wall: float) -> Step:
        """Ask for the sum over these devices; where they are too few the round goes on, or ends if that was ordered."""
        if len(devices) >= self._settings.least:
            asked = self._set.begin(self.rounds.number, self.rounds.method, devices, wall)
            return Held(asked.round, len(asked.devices))
        if self._by_order:
            return self._without_result(otherwise, wall)
        return self.rounds.release(now)

    # ── the sum ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _sum(self, answer: Answered, wall: float) -> Step | None:
        """The result of the sum that is open now, durable; None while it is being made."""
        asked, found, before = answer.asked, method_of(answer.asked.method), self.state
        hyper, devices = self._hyper(found), counted(len(answer.asked.devices), "device")

        def work() -> Callable[[], Step]:
            try:
                statistic, message = self._sum_of(answer, found)
                merged = found.merge(lambda: iter([statistic]), "mean", hyper)
            except (StatisticError, WireError) as error:
                why = f"the sum of {devices} is none that data can have, so one of them lies ({error})"
                return lambda: self._without_result(why, wall)
            state, payload = next_global(before, found, merged, round=asked.round, hyper=hyper), encode(message, "f64")
            doubt = found.doubt(merged, hyper) if merged.present.any() else "no device has a sample"
            told = (found.told(merged, hyper), f"one sum of {devices}", _shows(statistic))

            def record() -> Step:
                classes = int(merged.present.sum())
                self._finish(asked.round, asked.method, wall, classes, state, payload, len(asked.devices))
                self.state, self.doubt, self.told = state, doubt, "; ".join(filter(None, told))
                return self._ended()

            return record

        self.closing.begin(work)
        return self.closing.step()

    def _sum_of(self, answer: Answered, found: Method) -> tuple[Statistic, Contribution]:
        """The statistic of all devices of the set together, and the same as a contribution.

        Raises:
            StatisticError, WireError: no data can have it.
        """
        assert answer.total is not None
        asked, total = answer.asked, np.array(answer.total)
        classes, width = self._manifest.classes, self._width(found)
        expected = share_words(found.statistic, classes, width)
        if len(total) != expected:
            raise WireError("the helper's sum", expected=f"{expected} words", got=len(total))
        inside = set(asked.devices)
        with self._store.snapshot() as db, as_written(self._tables.path):
            for device, payload in contributions(db, asked.round, asked.method):
                self.closing.go_on()
                if device in inside:
                    share = held_by(payload).share
                    assert share is not None
                    np.add(total, share, out=total)
        statistic = statistic_of(found.statistic, classes, width, total)
        message = Contribution.of(
            statistic,
            run=self.run,
            round=asked.round,
            method=asked.method,
            bundle=self._bundle,
            extractor=self._extractor,
        )
        most = self._settings.max_samples * len(asked.devices)
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
    for found in methods:
        if not found.stands:
            raise UsageError(
                "--helper",
                expected="rounds whose sums add up over the bundle's extractor: ncm or ffc",
                got=f"rounds of {found.name}",
                hint="--method ffc",
            )
        if found.mechanism(core._hyper(found)) is not None:
            raise UsageError("--helper", expected="a bundle without noise", got=f"{found.name} with noise")

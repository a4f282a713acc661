"""What rounds come to: the next global state, made of what devices sent, and made anew when some of that is gone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from protofleet.aggregator.closing.forgetting import Remaking, state_without, state_without_class
from protofleet.aggregator.closing.joint_heads import joint_head
from protofleet.aggregator.closing.rollback import roll_back
from protofleet.aggregator.closing.round_books import RoundBooks
from protofleet.aggregator.merging.merge_round import RoundEnd, Some, merge_round
from protofleet.aggregator.merging.next_global import next_global
from protofleet.aggregator.parts.steps import Solved
from protofleet.aggregator.screening.outliers import Traits
from protofleet.aggregator.store.order_table import Order
from protofleet.aggregator.store.records import Key, RoundRecord
from protofleet.contract.methods import Method
from protofleet.contract.wire.global_state import GlobalState

__all__ = ["MergedResults", "RoundResults"]


class RoundResults(Protocol):
    """Of one run: made here, or by the aggregator above a site.

    Attributes:
        exact: whether contributions must fit exact sums although no gateway is named.
    """

    exact: bool

    def maker(self, method: Method) -> Callable[[Some, Mapping[str, Traits]], RoundEnd]:
        """Makes the end of the held round of what devices sent, and of nothing that changes meanwhile."""

    def recorded(self, round: int, end: RoundEnd) -> None:
        """The end of a round is durable."""

    def news(self) -> Solved | None:
        """A newer global state that is to be published and that no round here has made; None for none."""

    def without(self, device: str, records: list[RoundRecord]) -> GlobalState:
        """The global state without a device; the present one where the device is in none of it."""

    def without_class(self, number: int, holders: Collection[Key]) -> GlobalState:
        """The global state without a class; the present one where the class is in none of it."""

    def still_in(self, device: str, records: list[RoundRecord]) -> str:
        """Where a device stays in a sum that it cannot be taken out of, as part of an outcome."""

    def roll_back(self, order: Order, wall: float) -> str:
        """Make what devices had before the last rounds what they get now; the outcome, recorded."""


class MergedResults:
    """Rounds whose contributions are merged here."""

    exact = False

    def __init__(self, books: RoundBooks) -> None:
        self._books, self._terms = books, books.parts.terms
        terms, rule = self._terms, self._terms.settings.rule
        self._remaking = Remaking(terms.hyper, terms.manifest.classes, terms.width, rule, books.screening)

    def maker(self, method: Method) -> Callable[[Some, Mapping[str, Traits]], RoundEnd]:
        books, terms = self._books, self._terms
        number, before, rule, run = books.rounds.number, books.state, terms.settings.rule, books.parts.run
        hyper, screening, leave = terms.hyper(method), books.screening(method), frozenset(books.joint.leave)
        classes, width, labels = terms.manifest.classes, terms.width(method), terms.manifest.labels

        def make(messages: Some, traits: Mapping[str, Traits]) -> RoundEnd:
            result = merge_round(
                method,
                lambda: messages(traits),
                traits,
                hyper,
                classes=classes,
                width=width,
                rule=rule,
                how=screening,
                labels=labels,
                some=messages,
            )
            state = next_global(before, method, result.merged, round=number, hyper=hyper)
            joint = joint_head(
                method, messages, traits, hyper, result, leave, run=run, round=number, classes=classes, width=width
            )
            return RoundEnd(
                int(result.merged.present.sum()),
                state,
                screening,
                result.findings,
                result.doubt,
                result.told,
                joint="" if joint is None else joint.written(),
            )

        return make

    def recorded(self, round: int, end: RoundEnd) -> None:
        return

    def news(self) -> Solved | None:
        return None

    def without(self, device: str, records: list[RoundRecord]) -> GlobalState:
        books = self._books
        return state_without(device, books.state, records, books.messages, self._remaking)

    def without_class(self, number: int, holders: Collection[Key]) -> GlobalState:
        books = self._books
        records = [record for record in books.parts.store.rounds() if books.has_result(record)]
        return state_without_class(number, holders, books.state, records, books.messages, self._remaking)

    def still_in(self, device: str, records: list[RoundRecord]) -> str:
        blinded = self._books.parts.store.blinded.sums().values()
        summed = [str(n) for n in blinded if any(n == r.number and device in r.uplink_bytes for r in records)]
        return f"; the sum of round {', '.join(summed)} has it until one without it is opened" if summed else ""

    def roll_back(self, order: Order, wall: float) -> str:
        self._books.joint.end()
        back = roll_back(self._books.parts.store, order, self._books.state, wall)
        self._books.state = back.state
        return back.outcome

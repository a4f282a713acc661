"""What operators' orders do to rounds: a device or a class is forgotten, rounds are taken back, a round is steered."""

from __future__ import annotations

from protofleet.aggregator.closing.round_books import RoundBooks, RoundClosing
from protofleet.aggregator.closing.round_results import RoundResults
from protofleet.aggregator.merging.forgotten_classes import (
    cannot_forget,
    emptied,
    had_sent,
    held_by,
    kept_of,
    with_class,
)
from protofleet.aggregator.store.durable_store import global_parts
from protofleet.aggregator.store.operator_orders import FORGOTTEN, OF_A_CLASS, Obeyed
from protofleet.aggregator.store.order_table import Order
from protofleet.contract.methods import method as method_of

__all__ = ["RoundOrders"]


class RoundOrders:
    """Of one run."""

    def __init__(self, books: RoundBooks, closing: RoundClosing, results: RoundResults) -> None:
        self._books, self._closing, self._results = books, closing, results
        self._parts, self._store, self._tables = books.parts, books.parts.store, books.parts.store.standing

    def obey(self, order: Order, wall: float) -> Obeyed:
        """Carry out an order, durably."""
        books, rounds = self._books, self._books.rounds
        before, wrong = books.state.version, self._unfit(order)
        if order.what == "forget" and not wrong:
            outcome = self._forget(order, wall)
        elif order.what == "rollback" and not wrong:
            outcome = self._results.roll_back(order, wall)
        elif order.what == "forget class" and not wrong:
            outcome = self._forget_class(order, wall)
        elif order.what in OF_A_CLASS and not wrong:
            outcome = self._parts.exclusions.admit_class(order, wall, before)
        else:
            outcome = wrong or self._parts.orders.carry_out(order, wall) or rounds.steer(order.what)
            if order.device in self._parts.exclusions.refused:
                books.late.forget(order.device)
                rounds.schedule.heard(order.device, 0.0)
            self._store.orders.done(order, wall, outcome, before, before)
        return Obeyed(order, outcome, books.state.version)

    def _unfit(self, order: Order) -> str:
        wrong = self._closing.unfit(order)
        if order.what == "forget class" and not wrong:
            if self._store.blinded.sums():
                return "refused: a class cannot be taken out of a blinded round's sum, try a new --store without it"
            wrong = cannot_forget({*self._books.rounds.plan, *(record.method for record in self._store.rounds())})
        return wrong or self._parts.orders.unfit(order)

    def _forget(self, order: Order, wall: float) -> str:
        """Remove all that is held of a device, and make anew what it may be in."""
        books, device, records = self._books, order.device, self._store.rounds()
        books.joint.end(device)
        books.joint.leave.discard(device)
        blinded = self._store.blinded.sums()  # whose parts nobody has
        remade = [record for record in records if record.method not in blinded and books.has_result(record)]
        before, state = books.state, self._results.without(device, remade)
        trained = sorted({r.method for r in records if device in r.uplink_bytes and method_of(r.method).trains})
        outcome = f"done, but for what devices trained in rounds of {', '.join(trained)}" if trained else "done"
        outcome += self._results.still_in(device, records)
        self._tables.take_out(
            order,
            [] if state is before else global_parts(state),
            None,
            at=wall,
            before=before.version,
            after=state.version,
            reason=FORGOTTEN,
            outcome=outcome,
        )
        books.state = state
        self._parts.exclusions.refused[device] = FORGOTTEN
        books.traits.pop(device, None)
        books.verdicts = self._store.verdicts()
        books.late.forget(device)
        self._parts.forget(device)
        books.rounds.schedule.heard(device, 0.0)
        books.rounds.contributions.discard(device)
        books.rounds.refused(device)
        return outcome

    def _forget_class(self, order: Order, wall: float) -> str:
        """Take a class out of all that is kept of rounds, and make anew what it may be in."""
        books, exclusions = self._books, self._parts.exclusions
        number, before = self._parts.terms.manifest.labels.index(order.detail), books.state
        books.joint.end()
        payloads = self._tables.round_payloads()
        affected = {stored: key for stored, key, payload in payloads if held_by(payload).holds((number,))}
        holders = set(affected.values())
        state = self._results.without_class(number, holders)
        whole = {key for key in holders if method_of(key[1]).statistic.has_triangle()}
        outcome = had_sent({device for _, _, device in holders}, whole="until the next round" if whole else "")
        forgotten = with_class(exclusions.forgotten, order.detail)
        self._tables.class_done(
            order,
            forgotten,
            {},
            ((stored, self._left_of_round(stored, key[0], number)) for stored, key in affected.items()),
            [] if state is before else global_parts(state),
            at=wall,
            before=before.version,
            after=state.version,
            outcome=outcome,
        )
        books.state, exclusions.forgotten = state, forgotten
        books.late.clear()
        books.traits.clear()  # read again of what is left
        return outcome

    def _left_of_round(self, stored: int, round: int, number: int) -> bytes | None:
        """The payload that remains of a contribution without a class; None for nothing.

        A device that took part in the open round sends nothing more in it. So its contribution stays with no sample,
        and the round does not wait for it in vain.
        """
        payload = self._tables.round_payload(stored)
        reduced = kept_of(payload, number)
        is_open = self._books.rounds.phase == "open" and round == self._books.rounds.number
        return emptied(payload) if reduced is None and is_open else reduced

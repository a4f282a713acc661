"""What operators' orders do to standing sums: all of a device, or of a class, is taken out of them."""

from __future__ import annotations

from collections.abc import Callable

from protofleet.aggregator.ingest.broken_message import digest_of
from protofleet.aggregator.merging.forgotten_classes import as_kept, had_sent, held_by, kept_of, left_of, with_class
from protofleet.aggregator.standing.standing_heads import Heads
from protofleet.aggregator.standing.standing_notices import StandingNotices
from protofleet.aggregator.standing.standing_sums import StandingSums
from protofleet.aggregator.store.operator_orders import FORGOTTEN, OF_A_CLASS, Obeyed
from protofleet.aggregator.store.order_table import Order
from protofleet.aggregator.store.standing_tables import WITHDREW, with_taken

__all__ = ["StandingOrders"]


class StandingOrders:
    """Of one run.

    Args:
        is_online: whether a device is online.
    """

    def __init__(
        self, sums: StandingSums, heads: Heads, notices: StandingNotices, is_online: Callable[[str], bool]
    ) -> None:
        self._sums, self._heads, self._notices, self._is_online = sums, heads, notices, is_online
        self._parts, self._standing = sums.parts, sums.standing
        self._store, self._tables = sums.parts.store, sums.parts.store.standing

    def obey(self, order: Order, now: float, wall: float) -> Obeyed:
        """Carry out an order, durably."""
        before, wrong = self._sums.state.version, self._parts.orders.unfit(order)
        if order.what in ("forget", "withdraw") and not wrong:
            outcome = self._take_out(order, now, wall)
        elif order.what == "forget class" and not wrong:
            outcome = self._forget_class(order, now, wall)
        elif order.what in OF_A_CLASS and not wrong:
            outcome = self._admit_class(order, wall)
        else:
            outcome = wrong or self._carry_out(order, wall)
            self._store.orders.done(order, wall, outcome, before, before)
        if not wrong and order.what in ("forget", "admit"):
            self._notices.tell(order.device)
        return Obeyed(order, outcome, self._sums.state.version)

    def _take_out(self, order: Order, now: float, wall: float) -> str:
        """Remove all that is held of a device."""
        device, before = order.device, self._sums.state.version
        stands = device in self._standing.generations
        payload = self._tables.payload(device)
        if payload is not None:
            self._standing.replace(device, self._standing.held(device), self._sums.exact(payload), None, now)
            self._sums.digests.pop(device)
        state, parts, digest = self._heads.anew()
        reason = WITHDREW if order.what == "withdraw" else FORGOTTEN
        outcome = "done" if stands else "done: nothing was held of it"
        self._tables.take_out(
            order, parts, digest, at=wall, before=before, after=state.version, reason=reason, outcome=outcome
        )
        self._sums.state = state
        self._parts.exclusions.refused[device] = reason
        self._parts.forget(device)
        self._taken_out(order, now)
        return outcome

    def _forget_class(self, order: Order, now: float, wall: float) -> str:
        """Take a class out of all that stands."""
        sums, standing, exclusions, holders = self._sums, self._standing, self._parts.exclusions, list[str]()
        number, before = self._parts.terms.manifest.labels.index(order.detail), sums.state.version
        for device in sorted(standing.present):
            message = held_by(sums.payload(device))
            if not message.holds((number,)):
                continue
            reduced = left_of(message, (number,))
            newer = None if reduced is None else sums.exact_of(reduced)
            standing.replace(device, standing.held(device), sums.exact_of(message), newer, now)
            sums.digests[device] = b"" if reduced is None else digest_of(as_kept(reduced))
            holders.append(device)
        state, parts, digest = self._heads.anew()
        whole = "until those devices send again without it" if sums.method.statistic.has_triangle() else ""
        taken = with_taken(exclusions.taken, order.detail, {device: standing.held(device) for device in holders})
        outcome, forgotten = had_sent(holders, whole=whole), with_class(exclusions.forgotten, order.detail)
        self._tables.class_done(
            order,
            forgotten,
            taken,
            ((device, kept_of(sums.payload(device), number)) for device in holders),
            parts,
            digest,
            at=wall,
            before=before,
            after=state.version,
            outcome=outcome,
        )
        sums.state, exclusions.forgotten, exclusions.taken = state, forgotten, taken
        self._taken_out(order, now)
        return outcome

    def _taken_out(self, order: Order, now: float) -> None:
        self._store.class_drift.look()
        self._heads.taken_out(order, now)
        self._parts.orders.look_at = now  # there may be more, and what the log holds of it is to be overwritten

    def _admit_class(self, order: Order, wall: float) -> str:
        """Whose rows were taken out is told that they do not count, if it has not heard."""
        outcome = self._parts.exclusions.admit_class(order, wall, self._sums.state.version)
        for device in self._standing.generations:
            if self._is_online(device):
                self._notices.tell(device)
        return outcome

    def _carry_out(self, order: Order, wall: float) -> str:
        """The orders that change no sum."""
        outcome = self._parts.orders.carry_out(order, wall)
        self._standing.paused = self._parts.orders.paused
        instead = "; forget DEVICE makes the head as if it had never been there" if order.what == "rollback" else ""
        return outcome or f"refused: {order.what} is for rounds, and sums stand here{instead}"

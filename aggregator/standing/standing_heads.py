"""Heads of standing sums: when one is made, beside the loop, and what devices get when something was taken out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from protofleet.aggregator.merging.next_global import next_global
from protofleet.aggregator.parts.steps import Solved
from protofleet.aggregator.standing.standing_sums import StandingSums
from protofleet.aggregator.store.durable_store import global_parts
from protofleet.aggregator.store.order_table import Order
from protofleet.contract.wire.global_state import GlobalState

__all__ = ["Anew", "Heads", "SolvedHeads"]

Anew = tuple[GlobalState, list[tuple[int, int, bytes]], str]
"""The global state of what stands now, its parts for the store, and the digest of what it is made of; no parts where
the state is as it was."""


class Heads(Protocol):
    """Where heads come from: solved here, or from the aggregator above a site."""

    def step(self, now: float) -> Solved | None:
        """A new head, durable, when it is due."""

    def due_in_s(self, now: float) -> float | None:
        """Seconds until a head may be due; None for not before something changes."""

    def anew(self) -> Anew:
        """What devices get now that something was taken out, at once and also while paused."""

    def taken_out(self, order: Order, now: float) -> None:
        """An order has taken something out, and what `anew` gave is durable."""


@dataclass(frozen=True)
class _Head:
    """A global state, and what is told of its making."""

    state: GlobalState
    told: str
    doubt: str


class SolvedHeads:
    """Heads that are solved here. Nothing of the head before stays in one."""

    def __init__(self, sums: StandingSums) -> None:
        self._sums, self._closing = sums, sums.parts.closing

    def step(self, now: float) -> Solved | None:
        """A new head of what stands when it is due; what comes while it is made is in the next."""
        if self._sums.standing.due(now) and not self._closing.has_work:
            self._sums.standing.solved(now)
            self._begin()
        return self._closing.step()

    def due_in_s(self, now: float) -> float | None:
        return self._sums.standing.due_in_s(now)

    def anew(self) -> Anew:
        sums = self._sums
        if not sums.is_unsolved:
            return sums.state, [], sums.digest()
        head = self.solver()()
        sums.told, sums.doubt = head.told, head.doubt
        return head.state, global_parts(head.state), sums.digest()

    def taken_out(self, order: Order, now: float) -> None:
        self._sums.standing.solved(now)

    def _begin(self) -> None:
        """Begin to make a head of what stands now."""
        sums, solver, total, devices = self._sums, self.solver(), self._sums.standing.total, self._sums.devices

        def work() -> Callable[[], Solved]:
            head, digest, counts = solver(), sums.digest_of(total), total.counts

            def record() -> Solved:
                sums.parts.store.standing.solved(global_parts(head.state), digest)
                sums.state, sums.told, sums.doubt = head.state, head.told, head.doubt
                return Solved(head.state.version, devices, int(counts.sum()), int((counts > 0).sum()))

            return record

        self._closing.begin(work)

    def solver(self) -> Callable[[], _Head]:
        """Makes the head of what stands now, whenever it is called."""
        sums = self._sums
        method, total, columns, settled = sums.method, sums.standing.total, sums.columns, sums.settled
        empty = replace(sums.state, rows={})

        def make() -> _Head:
            merged = total.statistic(method.statistic, columns)
            state = next_global(empty, method, merged, round=empty.version + 1, hyper=settled)
            return _Head(state, method.told(merged, settled), method.doubt(merged, settled))

        return make

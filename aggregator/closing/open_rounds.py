"""How an open round closes: its contributions are compared and merged beside the loop.

A round closes in three parts. Only the second is long (`background_work.py`, docs/decisions/166):

    1. Late contributions stand in. The store records that the round is being closed: from then on nobody adds to it.
    2. The contributions are streamed from the store, compared and merged. The next global state is made.
    3. If the store still holds the same contributions, result and state are recorded in one transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from protofleet.aggregator.closing.joint_heads import META
from protofleet.aggregator.closing.round_books import RoundBooks
from protofleet.aggregator.closing.round_results import RoundResults
from protofleet.aggregator.database import Connection
from protofleet.aggregator.ingest.ingest import View
from protofleet.aggregator.merging.forgotten_classes import held_by
from protofleet.aggregator.merging.merge_round import RoundEnd, traits_of
from protofleet.aggregator.rounds.round_machine import Closed, Opened, Step
from protofleet.aggregator.store.durable_store import as_written, contributions, devices_of
from protofleet.aggregator.store.meta_table import put_meta
from protofleet.aggregator.store.order_table import Order
from protofleet.contract.wire.messages import Announcement, Contribution

__all__ = ["OpenRounds"]


class OpenRounds:
    """Of one run.

    Args:
        results: what a round comes to.
    """

    def __init__(self, books: RoundBooks, results: RoundResults) -> None:
        self._books, self._results, self._parts = books, results, books.parts

    def announced(self, announcement: Announcement) -> Announcement:
        return announcement

    def viewed(self, view: View) -> View:
        return view

    def unfit(self, order: Order) -> str:
        return ""

    def next_order(self, now: float) -> Order | None:
        """What changes what is summed, or what comes of it, waits until a round that is being closed is recorded."""
        waits = self._parts.closing.has_work or self._books.rounds.held
        return None if waits else self._parts.orders.next(now)

    def step(self, now: float, wall: float) -> Step | None:
        rounds, store, closing = self._books.rounds, self._parts.store, self._parts.closing
        if closing.has_work:
            return closing.step()
        if rounds.held:  # a process that has gone has begun to close the round
            self._close(wall)
            return closing.step()
        step = rounds.advance(now)
        if isinstance(step, Opened):
            store.open_round(step.round, step.method, step.seed, wall)
            self._books.traits.clear()
        elif isinstance(step, Closed):
            rounds.hold()
            with store.alone():  # who commits beside it comes before this, or late
                self._let_stand_in(step)
                store.begin_close(step.round)
            self._close(wall)
            return closing.step()
        return step

    def _let_stand_in(self, step: Closed) -> None:
        """Late contributions count for devices of which the round has nothing."""
        rounds, store = self._books.rounds, self._parts.store
        heard = {*rounds.contributions, *store.refusals(step.round)}
        late = self._books.late.due(step.round, step.method, lambda d: d not in heard and rounds.is_sampled(d))
        if late:
            store.commit(late, {})

    def _close(self, wall: float) -> None:
        """Begin to merge the round that is held, as the store has it."""
        books, store, closing = self._books, self._parts.store, self._parts.closing
        number, method, known_traits = books.rounds.number, books.method, dict(books.traits)
        hyper, make = self._parts.terms.hyper(method), self._results.maker(method)

        def work() -> Callable[[], Closed | None]:
            with store.snapshot() as db:
                with as_written(store.standing.path):
                    devices = devices_of(db, number, method.name)

                def messages(only: Collection[str] = frozenset(devices)) -> Iterator[tuple[str, Contribution]]:
                    stored, wanted_devices = contributions(db, number, method.name), frozenset(only)
                    with as_written(store.standing.path):  # a contribution that is counted has its bytes
                        for device, (_, payload) in zip(devices, stored, strict=True):
                            closing.go_on()
                            if device in wanted_devices:
                                yield device, held_by(payload)

                # some were taken before a restart, or by others
                traits = known_traits if known_traits.keys() >= set(devices) else traits_of(method, messages, hyper)
                end = make(messages, {device: traits[device] for device in devices})
            return lambda: self._record(devices, end, wall)

        closing.begin(work)

    def _record(self, devices: list[str], end: RoundEnd, wall: float) -> Closed | None:
        """The held round's end, durable; None where the store has other contributions by now: then all again."""
        books, store = self._books, self._parts.store
        number, method, state = books.rounds.number, books.rounds.method, end.state or books.state

        def also(db: Connection) -> None:
            store.blinded.replaced(db, method)
            put_meta(db, META, end.joint)

        with store.alone():
            merged_all = devices == list(store.record(number).uplink_bytes)
            if merged_all:
                store.close_round(number, wall, end.classes, state, end.screening, end.findings, also=also)
        if not merged_all:
            self._close(wall)
            return None
        books.state = state
        books.findings, books.doubt, books.told = end.findings, end.doubt, end.told
        books.verdicts = store.verdicts()
        books.joint.recorded(end.joint)
        self._results.recorded(number, end)
        return books.rounds.end()

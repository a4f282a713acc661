"""Standing sums taken by several processes: the devices' contributions are the truth, the leader's total is a cache.

    take     reads from the store what is held of a batch's devices; commits the accepted contributions beside the other
             processes, each only if it is still newer than the held one
             (`aggregator/workers/shared_standing_tables.py`)
    learn    for the leader: for each device that changed, the total loses what stood at the last learn, and gains what
             stands now, whichever process took it

Sums are integers, so the total is that of one aggregator in any order, and whichever process took what. A worker holds
no sums. A process that begins to lead adds up what stands while no other process commits. So kill -9 of any process, at
any moment, leaves nothing to repair. An order, or a device's withdrawal, is also carried out while no other process
commits, on a total that has learned everything (docs/decisions/192).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from protofleet.aggregator.ingest.broken_message import digest_of
from protofleet.aggregator.ingest.ingest import largest_contribution_bytes
from protofleet.aggregator.merging.forgotten_classes import held_by
from protofleet.aggregator.standing.standing_sums import StandingSums
from protofleet.aggregator.store.records import StandingMark, Tally
from protofleet.aggregator.store.standing_tables import Stands, Taken
from protofleet.aggregator.workers.shared_store import SharedStore
from protofleet.contract.wire.messages import Contribution

__all__ = ["SharedStanding"]

_MOST, _MOST_BYTES = 256, 64 << 20  # of what is learned at once


class SharedStanding:
    """One process's part: an `aggregator/standing/standing_sums.py: Keeper`.

    Args:
        wall: gives seconds since the epoch, to record when something came.
        store: that of the sums.

    Attributes:
        lags: whether there was more to learn than `learn` takes at once.
    """

    def __init__(self, sums: StandingSums, wall: Callable[[], float], store: SharedStore) -> None:
        self._sums, self._wall, self._store, self._tables = sums, wall, store, store.standing_beside
        self.lags = False
        self._marks: dict[str, StandingMark] = {}  # what was held when it was looked at last
        self._looked: dict[str, StandingMark] = {}  # of the batch's devices
        view = sums.parts.view(sums.method, round=0, open=True, standing=True)
        largest_bytes = max(sums.parts.terms.limit_bytes, largest_contribution_bytes(view))
        self._at_once = max(1, min(_MOST, _MOST_BYTES // (2 * largest_bytes)))

    def begin(self, now: float) -> None:
        """The leader adds up what stands; no other process needs to."""
        if self._store.leads:
            with self._store.alone():
                self._tables.nothing_replaced()
                self._sums.add_up(now)

    # ── what comes ──────────────────────────────────────────────────────────────────────────────────────────────────

    def look(self, devices: Collection[str]) -> None:
        generations = self._tables.held(devices) if devices else {}
        unknown = [
            device
            for device, generation in generations.items()
            if self._marks.get(device, StandingMark()).generation != generation
        ]
        if unknown:
            self._marks |= self._tables.held_whole(unknown)
        self._looked = {device: self._marks[device] if device in generations else StandingMark() for device in devices}

    def reload(self) -> None:
        self._marks.clear()

    def keep(self, newer: Sequence[tuple[Stands, Contribution]], tally: Tally, more: Taken, now: float) -> None:
        self._tables.put([stands for stands, _ in newer], tally, self._wall(), more, self._store.based_on)
        for stands, _ in newer:
            digest = b"" if stands.payload is None else digest_of(stands.payload)
            self._marks[stands.device] = StandingMark(stands.generation, digest)

    def mark_of(self, device: str) -> StandingMark:
        return self._looked[device] if device in self._looked else self._sums.mark_of(device)

    def has_taken(self, device: str, generation: int) -> bool:
        return self._tables.held([device]).get(device, 0) >= generation

    # ── the leader's ────────────────────────────────────────────────────────────────────────────────────────────────

    def learn(self, now: float) -> bool:
        changes = self._tables.replaced(self._at_once)
        for change in changes:
            message = None if change.payload is None else held_by(change.payload)
            self._sums.replace(change.device, change.generation, change.former, change.payload, message, now)
        self.lags = len(changes) == self._at_once
        return bool(changes)

    @contextmanager
    def alone(self, now: float) -> Iterator[None]:
        with self._store.alone():
            while self.learn(now):
                pass
            self._sums.parts.exclusions.taken = self._tables.classes_taken()
            yield

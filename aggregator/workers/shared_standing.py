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

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from protofleet.aggregator.coordinators.standing_coordinator import StandingCoordinator
from protofleet.aggregator.database.postgres_members import StaleError
from protofleet.aggregator.ingest.broken_message import digest_of
from protofleet.aggregator.ingest.ingest import Decision
from protofleet.aggregator.merging.forgotten_classes import held_by
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.operator_orders import Obeyed
from protofleet.aggregator.store.order_table import Order
from protofleet.aggregator.store.records import StandingMark, Tally
from protofleet.aggregator.store.standing_tables import Stands, Taken
from protofleet.aggregator.workers.shared_store import SharedStore
from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.contract.wire.messages import Chunk, Contribution

__all__ = ["SharedStanding"]

_MOST, _MOST_BYTES = 256, 64 << 20  # of what is learned at once


class SharedStanding(StandingCoordinator):
    """One process's part in a fleet without rounds; arguments and errors as of `StandingCoordinator`.

    Attributes:
        lags: whether there was more to learn than `learn` takes at once.
    """

    def __init__(
        self,
        store: SharedStore,
        manifest: Manifest,
        bundle: bytes,
        settings: Settings,
        *,
        now: float,
        shorter: Mapping[bytes, int] | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._shared, self._beside, self.lags = store, store.standing_beside, False
        self._marks: dict[str, StandingMark] = {}  # what was held when it was looked at last
        self._looked: dict[str, StandingMark] = {}  # of the batch's devices
        super().__init__(store, manifest, bundle, settings, now=now, shorter=shorter, wall=wall)
        self._ingest.patient = True
        self._at_once = max(1, min(_MOST, _MOST_BYTES // (2 * self.largest_message_bytes)))

    def _resume(self, now: float) -> None:
        """The leader adds up what stands; no other process needs to."""
        if self._shared.leads:
            with self._shared.alone():
                self._beside.nothing_replaced()
                super()._resume(now)

    # ── what comes ──────────────────────────────────────────────────────────────────────────────────────────────────

    def look(self, devices: Collection[str]) -> None:
        generations = self._beside.held(devices)
        unknown = [
            device
            for device, generation in generations.items()
            if self._marks.get(device, StandingMark()).generation != generation
        ]
        if unknown:
            self._marks |= self._beside.held_whole(unknown)
        self._looked = {device: self._marks[device] if device in generations else StandingMark() for device in devices}

    def reload(self) -> None:
        super().reload()
        self._marks.clear()

    def take(self, batch: Sequence[tuple[str, bytes]], now: float) -> list[Decision]:
        """As in a single aggregator, after `look`.

        Raises:
            StaleError: the decisions depend on something that has changed since; nothing was committed.
            StoreError: the server refuses; nothing was committed.
        """
        refused = dict(self._refused)
        try:
            return super().take(batch, now)
        except StaleError:
            self._refused = refused
            raise
        finally:
            self._looked = {}

    def _keep(self, newer: Sequence[tuple[Stands, Contribution]], tally: Tally, more: Taken, now: float) -> None:
        self._beside.put([stands for stands, _ in newer], tally, self._wall(), more, self._shared.based_on)
        for stands, _ in newer:
            digest = b"" if stands.payload is None else digest_of(stands.payload)
            self._marks[stands.device] = StandingMark(stands.generation, digest)

    def _mark_of(self, device: str) -> StandingMark:
        return self._looked[device] if device in self._looked else super()._mark_of(device)

    def decide_again(self) -> None:
        """Forget the last decisions: they were not committed."""
        self._ingest.forget_accepted()

    def has_taken(self, device: str, generation: int) -> bool:
        """Whether this generation of a device, or a newer one, is committed, by whichever process."""
        return self._beside.held([device]).get(device, 0) >= generation

    def chunk_of(self, device: str, payload: bytes) -> Chunk | None:
        """The chunk of a contribution that may still count, after `look`; None for any other message."""
        return self._ingest.chunk_of(device, payload, self._view())

    def stalled(self, now: float) -> list[Decision]:
        """As in a single aggregator. The leader knows which devices are online; the other processes ask."""
        untold, self._untold = self._untold, []
        return untold + self._ingest.stalled(now, self._view(), lambda device: True)

    # ── the leader's ────────────────────────────────────────────────────────────────────────────────────────────────

    def learn(self, now: float) -> bool:
        """Take up what any process committed; returns whether that was anything.

        Raises:
            LedError: another process leads.
            StoreError: the server refuses.
        """
        changes = self._beside.replaced(self._at_once)
        for change in changes:
            message = None if change.payload is None else held_by(change.payload)
            self._replace(change.device, change.generation, change.former, change.payload, message, now)
        self.lags = len(changes) == self._at_once
        return bool(changes)

    def _obey(self, order: Order, now: float, wall: float) -> Obeyed:
        with self._shared.alone():  # of all that is committed
            while self.learn(now):
                pass
            self._taken = self._tables.classes_taken()
            return super()._obey(order, now, wall)

"""Sums that stand, taken by several processes: what devices sent is the truth, and the leader's total a cache of it.

    take     what is held of a batch's devices is asked of the store; what is accepted is committed beside the others,
             each only if it is still newer than what is held (`aggregator/shared_standing_store.py`)
    learn    the leader's: of each device that changed, by whomever, its total loses what stood when the leader learned
             of it last, and gains what stands now

Sums are integers, so the total is that of one aggregator whatever the order, and whoever took what. A worker holds no
sums. Who begins to lead adds up what stands, while nobody commits; so kill -9 of any, at any moment, leaves nothing
that has to be mended. What an operator, or a device that withdraws, asks for is done while nobody commits, too, of a
total that has learned everything (docs/decisions/192).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from aggregator.broken_message import digest_of
from aggregator.database.members import StaleError
from aggregator.forgotten_classes import held_by
from aggregator.ingest import Decision, Held
from aggregator.orders import Obeyed
from aggregator.settings import Settings
from aggregator.shared_store import SharedStore
from aggregator.standing_coordinator import StandingCoordinator
from aggregator.standing_store import Order, Stands, Taken
from aggregator.store import Tally
from contract.bundle import Manifest
from contract.messages import Chunk, Contribution

__all__ = ["SharedStanding"]

_MOST, _MOST_BYTES = 256, 64 << 20  # of what is learned at once


class SharedStanding(StandingCoordinator):
    """One process's part in a fleet without rounds; arguments and errors as of `StandingCoordinator`.

    Attributes:
        lags: whether there was more to learn than `learn` takes up at once.
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
        self._known: dict[str, Held] = {}  # what was held when it was looked at last
        self._looked: dict[str, Held] = {}  # of the batch's devices
        super().__init__(store, manifest, bundle, settings, now=now, shorter=shorter, wall=wall)
        self._ingest.patient = True
        self._at_once = max(1, min(_MOST, _MOST_BYTES // (2 * self.largest_message_bytes)))

    def _resume(self, now: float) -> None:
        """Who leads adds up what stands; nobody else needs to."""
        if self._shared.leads:
            with self._shared.alone():
                self._beside.nothing_replaced()
                super()._resume(now)

    # ── what comes ──────────────────────────────────────────────────────────────────────────────────────────────────

    def look(self, devices: Collection[str]) -> None:
        held = self._beside.held(devices)
        unknown = [
            device for device, generation in held.items() if self._known.get(device, Held()).generation != generation
        ]
        if unknown:
            self._known |= self._beside.held_whole(unknown)
        self._looked = {device: self._known[device] if device in held else Held() for device in devices}

    def reload(self) -> None:
        super().reload()
        self._known.clear()

    def take(self, batch: Sequence[tuple[str, bytes]], now: float) -> list[Decision]:
        """As of one aggregator alone, after `look`.

        Raises:
            StaleError: it was decided on what is no longer so; nothing was committed.
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
            self._known[stands.device] = Held(stands.generation, digest)

    def _held(self, device: str) -> Held:
        return self._looked[device] if device in self._looked else super()._held(device)

    def decide_again(self) -> None:
        """What was decided was not committed: nothing of it holds."""
        self._ingest.forget_accepted()

    def has_taken(self, device: str, generation: int) -> bool:
        """Whether as new a generation of a device is committed, by whomever."""
        return self._beside.held([device]).get(device, 0) >= generation

    def chunk_of(self, device: str, payload: bytes) -> Chunk | None:
        """A piece of a contribution that may still count, after `look`; None for any other message."""
        return self._ingest.chunk_of(device, payload, self._view())

    def stalled(self, now: float) -> list[Decision]:
        """As of one aggregator; who leads hears which devices are online, and the others ask."""
        untold, self._untold = self._untold, []
        return untold + self._ingest.stalled(now, self._view(), lambda device: True)

    # ── the leader's ────────────────────────────────────────────────────────────────────────────────────────────────

    def learn(self, now: float) -> bool:
        """Take up what was committed, by whomever; whether that was anything.

        Raises:
            LedError: another process leads.
            StoreError: the server refuses.
        """
        found = self._beside.replaced(self._at_once)
        for each in found:
            message = None if each.payload is None else held_by(each.payload)
            self._replace(each.device, each.generation, each.former, each.payload, message, now)
        self.lags = len(found) == self._at_once
        return bool(found)

    def _obey(self, order: Order, now: float, wall: float) -> Obeyed:
        with self._shared.alone():  # of all that is committed
            while self.learn(now):
                pass
            self._taken = self._tables.classes_taken()
            return super()._obey(order, now, wall)

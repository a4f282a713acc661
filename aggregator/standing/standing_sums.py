"""What stands: the exact total of all present devices' sums, what of each device is in it, and who keeps it.

If the process dies anywhere, a new one on the same store adds up the stored sums: the same integers, in any order
(`aggregator/merging/exact_sums.py`). A digest tells whether the stored head was made of these sums. So a head that was
due is made after the restart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from protofleet.aggregator.ingest.broken_message import digest_of
from protofleet.aggregator.merging.exact_sums import ExactSum, Standing
from protofleet.aggregator.merging.forgotten_classes import held_by
from protofleet.aggregator.monitoring.class_drift import moved
from protofleet.aggregator.parts.common_parts import Parts
from protofleet.aggregator.store.durable_store import as_written
from protofleet.aggregator.store.records import StandingMark, Tally
from protofleet.aggregator.store.standing_tables import Stands, Taken, with_taken
from protofleet.contract.methods import Method
from protofleet.contract.sums.statistics import Statistic
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Contribution

__all__ = ["Keeper", "OneKeeper", "StandingSums"]


class StandingSums:
    """Of one run without rounds.

    Args:
        every_s: how long a head stays at least before the next is made.

    Attributes:
        method: the one whose sums stand.
        columns, settled: the width of its rows, and its hyper-parameters.
        standing: the total, who is in it, and when a head is due.
        digests: of what stands, by device.
        state: the global state that devices get.
        told, doubt: which choices were made for the last head, and why it may be bad; empty for nothing.
    """

    def __init__(self, parts: Parts, method: Method, every_s: float) -> None:
        self.parts, self.method = parts, method
        self.settled, self.columns = parts.terms.hyper(method), parts.terms.width(method)
        self._classes, self._tables = parts.terms.manifest.classes, parts.store.standing
        self.standing = Standing(ExactSum.zero(method.statistic, self._classes, self.columns), every_s)
        self.digests: dict[str, bytes] = {}
        self._behind: dict[str, int] = {}  # for how many devices each gateway stands
        self.state: GlobalState = parts.store.state()
        self.told = self.doubt = ""

    def add_up(self, now: float) -> None:
        """Add up what stands in the store. A head is due where the stored one is of other sums."""
        self.standing.paused = self.parts.orders.paused
        with as_written(self._tables.path):
            self.standing.generations = self._tables.generations()
            for device, payload in self._tables.payloads():
                message = held_by(payload)
                self.standing.total = self.standing.total.add(self.exact_of(message))
                self.standing.present.add(device)
                self._behind[device] = message.devices
                self.digests[device] = digest_of(payload)
            if self.is_unsolved:
                self.standing.changed(now)

    @property
    def devices(self) -> int:
        """How many devices have standing sums. Devices behind gateways count, the gateways do not."""
        return sum(self._behind.get(device, 0) or 1 for device in self.standing.present)

    def mark_of(self, device: str) -> StandingMark:
        """The generation of what stands of a device, and its digest."""
        return StandingMark(self.standing.held(device), self.digests.get(device, b""))

    def replace(
        self,
        device: str,
        generation: int,
        former: bytes | None,
        payload: bytes | None,
        message: Contribution | None,
        now: float,
    ) -> None:
        """What is held of a device changes in the total, from `former` to `payload`, which is `message`."""
        before = None if former is None else held_by(former)
        self._behind[device] = 0 if message is None else message.devices
        self.digests[device] = b"" if payload is None else digest_of(payload)
        after = None if payload is None else message
        self.standing.replace(
            device,
            generation,
            None if before is None else self.exact_of(before),
            None if after is None else self.exact_of(after),
            now,
        )
        if before is not None and after is not None and not (before.devices or after.devices):
            drift, labels = self.parts.store.class_drift, self.parts.terms.manifest.labels
            drift.hear(device, moved(self._sums_of(before), self._sums_of(after)), labels)

    def payload(self, device: str) -> bytes:
        """What stands of a device, of which something does."""
        payload = self._tables.payload(device)
        assert payload is not None
        return payload

    def exact(self, payload: bytes) -> ExactSum:
        return self.exact_of(held_by(payload))

    def exact_of(self, message: Contribution) -> ExactSum:
        return ExactSum.sent_in(message, self.method.statistic, self._classes, self.columns)

    def _sums_of(self, message: Contribution) -> Statistic:
        return message.statistic(self.method.statistic, self._classes, self.columns)

    def digest(self) -> str:
        """Of what a global state is made of: what stands, and the settings that it is solved with."""
        return self.digest_of(self.standing.total)

    def digest_of(self, total: ExactSum) -> str:
        settings = repr(sorted(self.settled.items()))
        return hashlib.sha256(f"{total.digest()} {settings}".encode()).hexdigest()

    @property
    def is_unsolved(self) -> bool:
        """Whether the stored head is of other sums than those that stand."""
        is_other = self.parts.store.meta.get("standing solved") != self.digest()
        return is_other and bool(self.state.version or self.standing.present)


class Keeper(Protocol):
    """Who commits what is accepted: one process, or one of several (`aggregator/workers/shared_standing.py`).

    Attributes:
        lags: as of `Coordinator`.
    """

    lags: bool

    def begin(self, now: float) -> None:
        """Take up what stands in the store, where this process needs it."""

    def look(self, devices: Collection[str]) -> None:
        """As of `Coordinator`."""

    def reload(self) -> None:
        """Something else than sums was changed by another process."""

    def learn(self, now: float) -> bool:
        """As of `Coordinator`."""

    def mark_of(self, device: str) -> StandingMark:
        """The generation and the digest of what is held of a device, by whichever process."""

    def has_taken(self, device: str, generation: int) -> bool:
        """Whether this generation of a device, or a newer one, is committed."""

    def keep(self, newer: Sequence[tuple[Stands, Contribution]], tally: Tally, more: Taken, now: float) -> None:
        """Make a batch durable.

        Args:
            more: what is to be added to `Exclusions.taken`.

        Raises:
            StaleError: as `Coordinator.take`; then nothing was committed.
            StoreError: the disk refuses.
        """

    def alone(self, now: float) -> AbstractContextManager[None]:
        """In the block, the total has all that is committed, and no other process commits."""


class OneKeeper:
    """The process that has the store for itself.

    Args:
        wall: gives seconds since the epoch, to record when something came.
    """

    lags = False

    def __init__(self, sums: StandingSums, wall: Callable[[], float]) -> None:
        self._sums, self._wall = sums, wall
        self._tables, self._exclusions = sums.parts.store.standing, sums.parts.exclusions

    def begin(self, now: float) -> None:
        self._sums.add_up(now)

    def look(self, devices: Collection[str]) -> None:
        return

    def reload(self) -> None:
        return

    def learn(self, now: float) -> bool:
        return False

    def mark_of(self, device: str) -> StandingMark:
        return self._sums.mark_of(device)

    def has_taken(self, device: str, generation: int) -> bool:
        return self._sums.standing.held(device) >= generation

    def keep(self, newer: Sequence[tuple[Stands, Contribution]], tally: Tally, more: Taken, now: float) -> None:
        for stands, message in newer:
            former = self._tables.payload(stands.device)
            self._sums.replace(stands.device, stands.generation, former, stands.payload, message, now)
        taken = self._exclusions.taken
        for name, generations in more.items():
            taken = with_taken(taken, name, generations)
        self._tables.commit([stands for stands, _ in newer], tally, self._wall(), taken if more else None)
        self._exclusions.taken = taken

    def alone(self, now: float) -> AbstractContextManager[None]:
        return nullcontext()

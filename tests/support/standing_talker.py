"""A device reduced to its manners where sums stand: one generation after the other, each until it has a receipt."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from aggregator_samples import CLASSES, WIDTH
from talker import Talker

from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods.ncm import UnitMeans
from protofleet.contract.mqtt.address import Address
from protofleet.contract.sums.statistics import Statistic
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Announcement, Contribution, Receipt

Make = Callable[[int], Statistic]


def unit_means(seed: int, samples: int = 12) -> UnitMeans:
    rng = np.random.default_rng(seed)
    return UnitMeans.of(unit_rows(rng.normal(size=(samples, WIDTH))), rng.integers(0, CLASSES, samples), CLASSES)


class StandingTalker(Talker):
    """Sends `make(1)`, `make(2)` and so on, `pause_s` after each receipt.

    Attributes:
        generation: of what was made last.
        confirmed: the newest generation that an aggregator has said is committed.
        overtaken: receipts that said that something newer was held than what waited for one.
        holds: make nothing new.
    """

    def __init__(
        self, url: str | Address, fleet: str, device: str, make: Make, *, pause_s: float = 0.1, resend_s: float = 1.0
    ) -> None:
        super().__init__(url, fleet, device, lambda announcement: None, resend_s=resend_s)
        self.generation = self.confirmed = self.overtaken = 0
        self.holds = False
        self._make_sums, self._pause_s, self._next_at = make, pause_s, 0.0
        self._told: Announcement | None = None

    def _hear(self, message: object) -> None:
        if isinstance(message, Announcement):
            self._told = message if message.phase == "standing" else self._told
            return
        waited = isinstance(message, Receipt) and (message.round, message.method) in self._pending
        super()._hear(message)
        if waited and isinstance(message, Receipt) and message.status != "need-chunks":
            self._next_at = time.monotonic() + self._pause_s
            self.overtaken += message.status == "late"
            if message.status in ("committed", "duplicate"):
                self.confirmed = message.round

    def _send_due(self) -> None:
        told = self._told
        if told is not None and not self._pending and not self.holds and time.monotonic() >= self._next_at:
            self.generation += 1
            self.sent[self.generation, told.method] = self._make_sums(self.generation)
            self._pending[self.generation, told.method] = (self.message(self.generation, told), told, 0.0)
        super()._send_due()

    def message(self, generation: int, told: Announcement) -> bytes:
        """A generation that was made, as it is sent after this announcement."""
        key = {"run": told.run, "round": generation, "method": told.method, "bundle": told.bundle}
        statistic = self.sent[generation, told.method]
        made = Contribution.of(statistic, **key, extractor=told.extractor, standing="present")
        return encode(made, told.encoding)

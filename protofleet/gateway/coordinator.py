"""What a site's aggregator is when another one stands above it: sums of its devices stand here, heads come from there.

It is the aggregator of `aggregator/standing_coordinator.py` with three differences:

    heads       are not made here: the newest global state from above is given on, under a version of this store
    terms       are those from above (`site.py`)
    receipts    a device's wait until what it sent is committed above, in the sums that say that they hold it; what
                stands here is durable meanwhile, and a device that asks again is answered as soon as that is so

A device that was forgotten or withdrew is out of the total at once; its own receipt says so once it is above, too. A
device whose sums cannot go up with the others' (`fitting.py`) is taken out, and told why.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from aggregator.ingest import Decision
from aggregator.settings import Settings
from aggregator.standing import ExactSum
from aggregator.standing_coordinator import Solved, StandingCoordinator
from aggregator.standing_store import Order
from aggregator.store import DurableStore, global_parts
from contract.bundle import Bundle
from contract.messages import Announcement, Contribution, Receipt
from contract.state import GlobalState
from protofleet.gateway.fitting import fitted
from protofleet.gateway.site import ABOVE, Site

__all__ = ["GatewayCoordinator"]

_HEAD = "gateway head"


class GatewayCoordinator(Site, StandingCoordinator):
    """One site of one fleet.

    Args:
        store, bundle, settings, now, shorter: as of `StandingCoordinator`; the bundle is whole.

    Attributes:
        settled: the generation of each device in what is committed above; None while that is not known.
        wait_s: seconds until something is due on the way up.
    """

    def __init__(
        self,
        store: DurableStore,
        bundle: Bundle,
        settings: Settings,
        *,
        now: float,
        shorter: Mapping[bytes, int] | None = None,
    ) -> None:
        self._whole = bundle
        self._waiting: dict[str, Decision] = {}
        self._above: GlobalState | None = None
        self.settled: Mapping[str, int] | None = None
        self.wait_s = 1.0
        self._fits: ExactSum | None = None  # the total that is known to go up whole
        super().__init__(store, bundle.manifest, bundle.sha256, settings, now=now, shorter=shorter)
        self._take_up(store)
        self.standing.changed(now)  # whether it is what was sent last, the way up knows

    # ── receipts ────────────────────────────────────────────────────────────────────────────────────────────────────

    def take(self, batch: Sequence[tuple[str, bytes]], now: float) -> list[Decision]:
        """As without a gateway; what is not committed above is not answered yet."""
        return [decision for decision in super().take(batch, now) if not self._holds_back(decision)]

    def stalled(self, now: float) -> list[Decision]:
        """Also the answers that were held back, once what they speak of is committed above."""
        ready = [device for device in self._waiting if self._is_settled(device)]
        return [self._waiting.pop(device) for device in ready] + super().stalled(now)

    def _holds_back(self, decision: Decision) -> bool:
        device = decision.device
        if decision.receipt is None or decision.outcome not in ("committed", "duplicate") or self._is_settled(device):
            return False
        if decision.outcome == "committed" or device not in self._waiting:  # and not the repetition of what waits
            self._waiting[device] = decision
        return True

    def _is_settled(self, device: str) -> bool:
        here = self.standing.held(device) if device in self.standing.present else 0
        return self.settled is not None and self.settled.get(device, 0) == here

    # ── what does not go up ─────────────────────────────────────────────────────────────────────────────────────────

    def _hold_to_terms(self) -> None:
        super()._hold_to_terms()
        self._fits = None

    def _make_fit(self, now: float) -> None:
        """Take out whose sums cannot go up with the others', so that those can; durable before anybody is told."""
        if self.standing.total is self._fits:
            return
        most = self._settings.max_samples
        out = fitted(self.standing.total, self.devices, self._sums, max_samples=most).left_out
        for device in out:
            self._replace(device, self.standing.held(device), self._payload(device), None, None, now)
        if out:
            self._tables.left_out(out)
        for device, reason in out.items():
            sent = self._waiting.pop(device, None)
            key = Receipt(self.run, self.standing.held(device), self.method.name, "rejected")
            receipt = replace(key if sent is None or sent.receipt is None else sent.receipt, status="rejected")
            told = replace(receipt, reason=reason[:200])
            self._untold.append(Decision(device, "rejected", 0, told, reason=reason, cause="content"))
        self._fits = self.standing.total

    def _sums(self) -> Iterator[tuple[str, ExactSum]]:
        """Of each device whose sums stand."""
        return ((device, self._exact(payload)) for device, payload in self._tables.payloads())

    # ── what goes up ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def generations(self) -> dict[str, int]:
        """Of the devices whose sums stand."""
        return {device: self.standing.held(device) for device in sorted(self.standing.present)}

    def mark(self) -> bytes:
        """What stands: of whom, and a digest of the sums."""
        return json.dumps({"sums": self.standing.total.digest(), "devices": self.generations}).encode()

    def contribution(self, a: Announcement, generation: int) -> Contribution:
        """What stands, as one contribution.

        Args:
            a: the announcement from above.

        Raises:
            StatisticError: the sums are too large for one gateway.
        """
        found = self.method
        nothing = self._nothing(a, found, generation, "present")
        return self.standing.total.for_others(found.statistic, self._columns, self.devices, nothing)

    # ── what comes from above ───────────────────────────────────────────────────────────────────────────────────────

    def hear(self, state: GlobalState) -> None:
        """The newest global state from above."""
        self._above = state.below(self._manifest.classes)

    def _head(self, now: float) -> Solved | None:
        self._make_fit(now)
        above = self._above
        mark = "" if above is None else f"{above.run.hex()} {above.version}"
        is_new = above is not None and not self.standing.paused and self._tables.meta(_HEAD) != mark
        if not (is_new or self._announces):
            return None
        if is_new and above is not None:
            state = GlobalState(self.run, self.state.version + 1, self.state.version + 1, above.rows)
            self._tables.solved(global_parts(state), self._digest())
            self._tables.set_meta(_HEAD, mark)
            self.state = state
            self.told = f"the head is version {above.version} of {ABOVE}"
        self._announces = False
        counts = self.standing.total.counts
        return Solved(self.state.version, self.devices, int(counts.sum()), int((counts > 0).sum()))

    def _anew(self) -> tuple[GlobalState, list[tuple[int, int, bytes]], str]:
        """What remains goes up; the head of it comes from there."""
        return self.state, [], self._digest()

    def _take_out(self, order: Order, now: float, wall: float) -> str:
        outcome = super()._take_out(order, now, wall)
        self.standing.changed(now)
        if order.what == "forget":
            self._waiting.pop(order.device, None)
        return outcome

    def _forget_class(self, order: Order, now: float, wall: float) -> str:
        outcome = super()._forget_class(order, now, wall)
        self.standing.changed(now)
        return outcome

    def _due_in_s(self, now: float) -> float:
        return min(max(0.0, self._orders_at - now), self.wait_s)

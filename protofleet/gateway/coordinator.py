"""The aggregator of a site whose sums stand: its devices' sums stand here, and heads come from the aggregator above.

It is the coordinator of `aggregator/coordinators/standing_coordinator.py` with three differences:

    heads       are not solved here. The newest global state from above is passed on, under a version of this store.
    terms       are those from above (`site_terms.py`).
    receipts    wait. A device gets its receipt when the sums that contain its contribution are committed above. Until
                then its sums are durable here. A device that asks again is answered as soon as they are committed.

Guarantees:

- A device that was forgotten, or withdrew, leaves the total at once. Its receipt says so when the total above agrees.
- A device whose sums cannot go up with the others' (`unfit_devices.py`) is taken out, and is told why.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from protofleet.aggregator.coordinators.standing_coordinator import Solved, StandingCoordinator
from protofleet.aggregator.ingest.ingest import Decision
from protofleet.aggregator.merging.exact_sums import ExactSum
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore, global_parts
from protofleet.aggregator.store.order_table import Order
from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Announcement, Contribution, Receipt
from protofleet.gateway.site_terms import ABOVE, Site
from protofleet.gateway.unfit_devices import fitted

__all__ = ["GatewayCoordinator"]

_HEAD = "gateway head"


class GatewayCoordinator(Site, StandingCoordinator):
    """One site of one fleet, with standing sums.

    Args:
        store, bundle, settings, now, shorter: as of `StandingCoordinator`; `bundle` is the whole bundle.

    Attributes:
        settled: the generation of each device in the sums that are committed above; None while that is not known.
        wait_s: seconds until the uplink has something to do.
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
        self._fits: ExactSum | None = None  # the total that is known to fit one message
        super().__init__(store, bundle.manifest, bundle.sha256, settings, now=now, shorter=shorter)
        self._take_up(store)
        self.standing.changed(now)  # the uplink knows whether these sums were sent already

    # ── receipts ────────────────────────────────────────────────────────────────────────────────────────────────────

    def take(self, batch: Sequence[tuple[str, bytes]], now: float) -> list[Decision]:
        """As in `StandingCoordinator`, but a contribution that is not committed above is not answered yet."""
        return [decision for decision in super().take(batch, now) if not self._holds_back(decision)]

    def stalled(self, now: float) -> list[Decision]:
        """Also the receipts that were held back, when their contributions are committed above."""
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
        generation = self.standing.held(device) if device in self.standing.present else 0
        return self.settled is not None and self.settled.get(device, 0) == generation

    # ── what does not go up ─────────────────────────────────────────────────────────────────────────────────────────

    def _hold_to_terms(self) -> None:
        super()._hold_to_terms()
        self._fits = None

    def _make_fit(self, now: float) -> None:
        """Take out the devices whose sums do not fit with the others'. This is durable before any device is told."""
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
            rejection = replace(receipt, reason=reason[:200])
            self._untold.append(Decision(device, "rejected", 0, rejection, reason=reason, cause="content"))
        self._fits = self.standing.total

    def _sums(self) -> Iterator[tuple[str, ExactSum]]:
        """The sums of each device whose sums stand."""
        return ((device, self._exact(payload)) for device, payload in self._tables.payloads())

    # ── what goes up ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def generations(self) -> dict[str, int]:
        """The generation of each device whose sums stand."""
        return {device: self.standing.held(device) for device in sorted(self.standing.present)}

    def mark(self) -> bytes:
        """Identifies the standing sums: their digest, and the generation of each device in them."""
        return json.dumps({"sums": self.standing.total.digest(), "devices": self.generations}).encode()

    def contribution(self, a: Announcement, generation: int) -> Contribution:
        """The standing sums as one contribution.

        Args:
            a: the announcement from above.

        Raises:
            StatisticError: the sums are too large for one gateway.
        """
        method = self.method
        nothing = self._nothing(a, method, generation, "present")
        return self.standing.total.for_others(method.statistic, self._columns, self.devices, nothing)

    # ── what comes from above ───────────────────────────────────────────────────────────────────────────────────────

    def hear(self, state: GlobalState) -> None:
        """Take over the newest global state from above."""
        self._above = state.below(self._manifest.classes)

    def _head(self, now: float) -> Solved | None:
        self._make_fit(now)
        above = self._above
        mark = "" if above is None else f"{above.run.hex()} {above.version}"
        is_new = above is not None and not self.standing.paused and self._store.meta.get(_HEAD) != mark
        if not (is_new or self._announces):
            return None
        if is_new and above is not None:
            state = GlobalState(self.run, self.state.version + 1, self.state.version + 1, above.rows)
            self._tables.solved(global_parts(state), self._digest())
            self._store.meta.put(_HEAD, mark)
            self.state = state
            self.told = f"the head is version {above.version} of {ABOVE}"
        self._announces = False
        counts = self.standing.total.counts
        return Solved(self.state.version, self.devices, int(counts.sum()), int((counts > 0).sum()))

    def _anew(self) -> tuple[GlobalState, list[tuple[int, int, bytes]], str]:
        """The state after a removal. The remaining sums go up, and their head comes from above."""
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

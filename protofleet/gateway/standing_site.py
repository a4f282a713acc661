"""The site of a gateway whose sums stand: its devices' sums stand here, and heads come from the aggregator above.

It has a coordinator as of any fleet without rounds, and gives it what is different on a site:

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
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

from protofleet.aggregator.coordinators.kinds import sums_of
from protofleet.aggregator.coordinators.standing_coordinator import StandingCoordinator
from protofleet.aggregator.ingest.ingest import Decision
from protofleet.aggregator.merging.exact_sums import ExactSum
from protofleet.aggregator.parts.steps import Solved
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.standing.standing_heads import Anew
from protofleet.aggregator.standing.standing_notices import StandingNotices
from protofleet.aggregator.standing.standing_sums import OneKeeper
from protofleet.aggregator.store.durable_store import DurableStore, global_parts
from protofleet.aggregator.store.order_table import Order
from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Announcement, Contribution, Receipt
from protofleet.gateway.site_terms import ABOVE, SiteTerms
from protofleet.gateway.unfit_devices import fitted

__all__ = ["StandingSite"]

_HEAD = "gateway head"


class StandingSite:
    """One site of one fleet, with standing sums: the `Heads` and the `Replies` of its coordinator.

    Args:
        store, settings, now, shorter: as of `aggregator/coordinators/kinds.py: standing_sums`.
        bundle: the fleet's whole bundle.

    Attributes:
        core: the coordinator.
        terms: those from above.
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
        self._waiting: dict[str, Decision] = {}
        self._above: GlobalState | None = None
        self.settled: Mapping[str, int] | None = None
        self.wait_s = 1.0
        self._fits: ExactSum | None = None  # the total that is known to fit one message
        sums = self._sums = sums_of(store, bundle.manifest, bundle.sha256, settings, now=now, shorter=shorter)
        keeper = OneKeeper(sums, time.time)
        keeper.begin(now)
        self._parts, self._standing = sums.parts, sums.standing
        self._notices = StandingNotices(sums.parts, sums.method.name, keeper.mark_of)
        self.core = StandingCoordinator(sums, keeper, self, self._notices, self)
        self.terms = SiteTerms(sums.parts, bundle, lambda: sums.method)
        sums.standing.changed(now)  # the uplink knows whether these sums were sent already

    # ── receipts ────────────────────────────────────────────────────────────────────────────────────────────────────

    def of(self, decisions: list[Decision]) -> list[Decision]:
        """Those that are told now: a contribution that is not committed above is not answered yet."""
        return [decision for decision in decisions if not self._holds_back(decision)]

    def due(self) -> list[Decision]:
        """Those that were held back, and whose contributions are committed above."""
        ready = [device for device in self._waiting if self._is_settled(device)]
        return [self._waiting.pop(device) for device in ready]

    def _holds_back(self, decision: Decision) -> bool:
        device = decision.device
        if decision.receipt is None or decision.outcome not in ("committed", "duplicate") or self._is_settled(device):
            return False
        if decision.outcome == "committed" or device not in self._waiting:  # and not the repetition of what waits
            self._waiting[device] = decision
        return True

    def _is_settled(self, device: str) -> bool:
        generation = self._standing.held(device) if device in self._standing.present else 0
        return self.settled is not None and self.settled.get(device, 0) == generation

    # ── what goes up ────────────────────────────────────────────────────────────────────────────────────────────────

    def _make_fit(self, now: float) -> None:
        """Take out the devices whose sums do not fit with the others'. This is durable before any device is told."""
        sums, standing = self._sums, self._standing
        if standing.total is self._fits:
            return
        most = self._parts.terms.settings.max_samples
        out = fitted(standing.total, sums.devices, self._each, max_samples=most).left_out
        for device in out:
            sums.replace(device, standing.held(device), sums.payload(device), None, None, now)
        if out:
            self._parts.store.standing.left_out(out)
        for device, reason in out.items():
            sent = self._waiting.pop(device, None)
            key = Receipt(self._parts.run, standing.held(device), sums.method.name, "rejected")
            receipt = replace(key if sent is None or sent.receipt is None else sent.receipt, status="rejected")
            rejection = replace(receipt, reason=reason[:200])
            self._notices.add(Decision(device, "rejected", 0, rejection, reason=reason, cause="content"))
        self._fits = standing.total

    def _each(self) -> Iterator[tuple[str, ExactSum]]:
        """The sums of each device whose sums stand."""
        return ((device, self._sums.exact(payload)) for device, payload in self._parts.store.standing.payloads())

    @property
    def generations(self) -> dict[str, int]:
        """The generation of each device whose sums stand."""
        return {device: self._standing.held(device) for device in sorted(self._standing.present)}

    def mark(self) -> bytes:
        """Identifies the standing sums: their digest, and the generation of each device in them."""
        return json.dumps({"sums": self._standing.total.digest(), "devices": self.generations}).encode()

    def contribution(self, a: Announcement, generation: int) -> Contribution:
        """The standing sums as one contribution.

        Args:
            a: the announcement from above.

        Raises:
            StatisticError: the sums are too large for one gateway.
        """
        sums, method = self._sums, self._sums.method
        nothing = self.terms.nothing(a, method, generation, "present")
        return self._standing.total.for_others(method.statistic, sums.columns, sums.devices, nothing)

    # ── what comes from above ───────────────────────────────────────────────────────────────────────────────────────

    def hold_to(self, a: Announcement, now: float) -> None:
        """Hold the site to the announcement from above; see `SiteTerms`."""
        if self.terms.hold_to(a, now):
            self._fits = None

    def hear(self, state: GlobalState) -> None:
        """Take over the newest global state from above."""
        self._above = state.below(self._parts.terms.manifest.classes)

    # ── heads ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self, now: float) -> Solved | None:
        self._make_fit(now)
        sums, meta, above = self._sums, self._parts.store.meta, self._above
        mark = "" if above is None else f"{above.run.hex()} {above.version}"
        is_new = above is not None and not self._standing.paused and meta.get(_HEAD) != mark
        if not (is_new or self.terms.is_news):
            return None
        if is_new and above is not None:
            state = GlobalState(self._parts.run, sums.state.version + 1, sums.state.version + 1, above.rows)
            self._parts.store.standing.solved(global_parts(state), sums.digest())
            meta.put(_HEAD, mark)
            sums.state = state
            sums.told = f"the head is version {above.version} of {ABOVE}"
        self.terms.is_news = False
        counts = self._standing.total.counts
        return Solved(sums.state.version, sums.devices, int(counts.sum()), int((counts > 0).sum()))

    def due_in_s(self, now: float) -> float:
        return self.wait_s

    def anew(self) -> Anew:
        """The state as it is: the remaining sums go up, and their head comes from above."""
        return self._sums.state, [], self._sums.digest()

    def taken_out(self, order: Order, now: float) -> None:
        self._standing.solved(now)
        self._standing.changed(now)
        if order.what == "forget":
            self._waiting.pop(order.device, None)

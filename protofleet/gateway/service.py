"""One gateway, from its files to its end: the aggregator of a site and its uplink, in one loop.

At its first start the gateway waits for the announcement from above before it asks a device for anything. The site's
devices are held to these terms (`site_terms.py`). The store keeps them, so a later start serves the site while nobody
above can be reached.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from protofleet.aggregator.coordinators.coordinator import Coordinator
from protofleet.aggregator.metrics.metrics import Metrics
from protofleet.aggregator.monitoring.events import Listener
from protofleet.aggregator.server.service import OnSummary, Service
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.workers.shared_store import SharedStore
from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.errors import UsageError
from protofleet.gateway.rounds_site import RoundsSite, is_of_rounds
from protofleet.gateway.settings import GatewaySettings
from protofleet.gateway.site_terms import kept_terms
from protofleet.gateway.standing_site import StandingSite
from protofleet.gateway.uplink import Uplink, Upward
from protofleet.gateway.upward import RoundsUpward, StandingUpward

__all__ = ["Gateway"]

logger = logging.getLogger(__name__)

_WAIT_S = 0.2


class Gateway(Service):
    """The aggregator of a site, with its uplink."""

    def __init__(self, settings: GatewaySettings) -> None:
        super().__init__(settings.of_site)
        self._min_clients, self._above = settings.min_clients, settings.of_member
        self._uplink: Uplink | None = None
        self._upward: Upward | None = None
        if self._roster.others:
            raise UsageError("gateway", expected="one extractor", got=f"{1 + len(self._roster.others)} bundles")

    def run(self, listener: Listener, on_summary: OnSummary) -> dict[str, Any]:
        """Serve until `stop`. Returns and raises as `Service.run`."""
        self._uplink = Uplink(self._above, self._bundle())
        self._uplink.open()
        try:
            return super().run(listener, on_summary)
        finally:
            self._uplink.close()

    def _bundle(self) -> Bundle:
        """The fleet's bundle, not one that it extends."""
        bundles = (read_bundle(path) for path in map(Path, self.settings.bundle))
        return next(bundle for bundle in bundles if bundle.sha256 == self._roster.bundle)

    def _core(self, store: DurableStore, shared: SharedStore | None = None) -> Coordinator:
        assert self._uplink is not None
        if kept_terms(store) is None:
            logger.info("waiting for the announcement from above")
        while kept_terms(store) is None and self._uplink.announcement is None and not self._stopping.is_set():
            self._uplink.turn(None, _WAIT_S)
        core = self._of_rounds(store) if self._has_rounds(store) else self._of_standing_sums(store)
        self._uplink.turn(self._upward)
        return core

    def _has_rounds(self, store: DurableStore) -> bool:
        """Whether the aggregator above runs rounds. The store says so, or else the announcement."""
        assert self._uplink is not None
        if kept_terms(store) is not None:
            return is_of_rounds(store)
        a = self._uplink.announcement
        return a is not None and a.phase != "standing"

    def _of_standing_sums(self, store: DurableStore) -> Coordinator:
        assert self._uplink is not None
        now, shorter = time.monotonic(), self._roster.shorter
        site = StandingSite(store, self._bundle(), self.settings, now=now, shorter=shorter)
        self._upward = StandingUpward(self._uplink, site)
        return site.core

    def _of_rounds(self, store: DurableStore) -> Coordinator:
        """Of rounds.

        The announcement names the method, so `--method` is ignored: it is for standing sums. A device may have any
        share of the site's samples. Only the aggregator above knows the share of all devices' samples, and it cannot
        take a part out of a sum.
        """
        assert self._uplink is not None
        now, shorter = time.monotonic(), self._roster.shorter
        of_rounds = {"standing": False, "every": None, "method": None, "min_clients": self._min_clients}
        settings = replace(self.settings, **of_rounds, max_share=1.0)  # type: ignore[arg-type]
        site = RoundsSite(store, self._bundle(), settings, now=now, shorter=shorter, wall=time.time())
        self._upward = RoundsUpward(self._uplink, site)
        return site.core

    def _turned(self, core: Coordinator, metrics: Metrics) -> None:
        assert self._uplink is not None
        super()._turned(core, metrics)
        self._uplink.turn(self._upward)

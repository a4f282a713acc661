"""One gateway, from its files to its end: the aggregator of a site and its uplink, in one loop.

At its first start the gateway waits for the announcement from above before it asks a device for anything. The site's
devices are held to these terms (`site_terms.py`). The store keeps them, so a later start serves the site while nobody
above can be reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from protofleet.aggregator.metrics.metrics import Metrics
from protofleet.aggregator.monitoring.events import Listener
from protofleet.aggregator.server.service import OnSummary, Service
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.errors import UsageError
from protofleet.edge_client.settings import ClientConfig
from protofleet.gateway.coordinator import GatewayCoordinator
from protofleet.gateway.rounds import GatewayRounds, is_of_rounds
from protofleet.gateway.site_terms import kept_terms
from protofleet.gateway.uplink import Uplink

__all__ = ["Gateway"]

_WAIT_S = 0.2


@dataclass
class Gateway(Service):
    """The aggregator of a site, with its uplink.

    Attributes:
        above: settings of the uplink: broker, fleet, id, state directory, certificates and keys.
        log: receives one line for a person.
    """

    above: ClientConfig | None = None
    log: Callable[[str], None] = lambda line: None
    _uplink: Uplink | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._roster.others:
            raise UsageError("gateway", expected="one extractor", got=f"{1 + len(self._roster.others)} bundles")

    def run(self, listener: Listener, on_summary: OnSummary) -> dict[str, Any]:
        """Serve until `stop`. Returns and raises as `Service.run`."""
        assert self.above is not None
        self._uplink = Uplink(self.above, self._bundle(), self.log)
        self._uplink.open()
        try:
            return super().run(listener, on_summary)
        finally:
            self._uplink.close()

    def _bundle(self) -> Bundle:
        """The fleet's bundle, not one that it extends."""
        bundles = (read_bundle(path) for path in self.bundles)
        return next(bundle for bundle in bundles if bundle.sha256 == self._roster.bundle)

    def _core(self, store: DurableStore) -> GatewayCoordinator | GatewayRounds:
        assert self._uplink is not None
        if kept_terms(store) is None:
            self.log("waiting for the announcement from above")
        while kept_terms(store) is None and self._uplink.announcement is None and not self._stopping.is_set():
            self._uplink.turn(None, _WAIT_S)
        core = self._of_rounds(store) if self._has_rounds(store) else self._of_standing_sums(store)
        self._uplink.turn(core)
        return core

    def _has_rounds(self, store: DurableStore) -> bool:
        """Whether the aggregator above runs rounds. The store says so, or else the announcement."""
        assert self._uplink is not None
        if kept_terms(store) is not None:
            return is_of_rounds(store)
        a = self._uplink.announcement
        return a is not None and a.phase != "standing"

    def _of_standing_sums(self, store: DurableStore) -> GatewayCoordinator:
        about = {"now": time.monotonic(), "shorter": self._roster.shorter}
        return GatewayCoordinator(store, self._bundle(), self.settings, **about)  # type: ignore[arg-type]

    def _of_rounds(self, store: DurableStore) -> GatewayRounds:
        """The coordinator for rounds.

        The announcement names the method, so `--method` is ignored: it is for standing sums. A device may have any
        share of the site's samples. Only the aggregator above knows the share of all devices' samples, and it cannot
        take a part out of a sum.
        """
        about = {"now": time.monotonic(), "shorter": self._roster.shorter, "wall": time.time()}
        settings = replace(self.settings, standing_every_s=None, method=None, max_share=1.0)
        return GatewayRounds(store, self._bundle(), settings, **about)  # type: ignore[arg-type]

    def _turned(self, core: Any, metrics: Metrics) -> None:
        assert self._uplink is not None
        super()._turned(core, metrics)
        self._uplink.turn(core)

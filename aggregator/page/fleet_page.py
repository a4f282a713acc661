"""The operator's page: it looks at the store again and again, and tells browsers what has changed.

1. A thread reads the store, as `protofleet status` does: it writes nothing, and holds no lock of the store. Where
   nothing was written since, it does not read. After a look it rests `_REST` times as long as that took: looking costs
   at most 1 % of a processor's core, whatever the size of the fleet.
2. Each device is a row. A row has the version at which it changed last. A browser that has version v is told the rows
   that changed after v, so it costs nothing to have many devices that stay as they are.
3. Where sums stand, another thread compares them (`StandingComparison`), and a look says what it has found.
4. A browser has a thread of the server's (`contract/page/page_server.py`). A slow one holds up neither another one nor
   the aggregator: what it was not told yet is not kept for it, but found again by its version.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from protofleet.aggregator.database import Place, is_taken, watch
from protofleet.aggregator.monitoring.device_table import DeviceReader
from protofleet.aggregator.overview.fleet_state import FleetState, state_of
from protofleet.aggregator.page.fleet_content import COLUMNS, KeptRows, Look, device_content, look_at, runbook_part
from protofleet.aggregator.page.page_orders import PageOrders
from protofleet.aggregator.page.standing_comparison import StandingComparison
from protofleet.aggregator.store.schema import KIND
from protofleet.contract.errors import ProtofleetError
from protofleet.contract.mqtt.certificates import Expiry
from protofleet.contract.page.site import Content, Site
from protofleet.contract.page.visitors import Visitor
from protofleet.contract.printable import printable

__all__ = ["FleetPage"]

logger = logging.getLogger(__name__)

LOOK_S = 1.0
_REST = 99.0  # times as long as looking took
_MOST_REST_S = 30.0  # what depends on the clock alone (who is gone for long) is told by then
_JSON = "application/json"


class FleetPage(Site):
    """The page of one fleet.

    Args:
        runs: whether an aggregator has the store; by default as its lock says. The aggregator's own process must not
            look at its own lock, which that would end.
        expiring: the certificates of the aggregator's connection; None where this is not its process.
        orders: who may give orders; None for a page that only shows.
    """

    PACKAGE: ClassVar[str] = __package__
    ABOUT: ClassVar[str] = "fleet"
    CODE_AT: ClassVar[str] = "the terminal or in the log of the command that serves this page"

    # arguments: where the fleet is, and what only its own process knows
    def __init__(
        self,
        store: Place,
        fleet: str,
        *,
        runs: Callable[[], bool] | None = None,
        expiring: Callable[[], Sequence[Expiry]] | None = None,
        orders: PageOrders | None = None,
    ) -> None:
        super().__init__()
        self._store, self._fleet = store, fleet
        self._runs = runs or (lambda: is_taken(store, KIND))
        self._expiring, self._orders = expiring, orders
        self._devices, self._kept = DeviceReader(), KeptRows()
        self._comparison = StandingComparison(store, self.look_soon)
        self._lock = threading.Lock()
        self._rows: dict[str, tuple[int, str]] = {}  # version, JSON
        self._parts: dict[str, tuple[int, str]] = {}
        self._floor = 0  # who has an older version is told everything
        self._names: frozenset[str] = frozenset()
        self._state: FleetState | None = None
        self._over, self._wake, self._is_stale = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._look_again, name="fleet page", daemon=True)
        self.looked_s = 0.0  # of the processor, in all

    # ── looking ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Look, from now on."""
        self.look()
        self._thread.start()
        self._comparison.start()

    def stop(self) -> None:
        """Look no more."""
        self._comparison.stop()
        self._over.set()
        self._wake.set()
        self._thread.join()

    def look_soon(self) -> None:
        """Look as soon as the rest is over, although nothing was written."""
        self._is_stale.set()

    def look(self) -> None:
        """Look once; what has changed is told."""
        began = time.thread_time()
        try:
            compared, is_served = self._comparison.newest, self._expiring is not None
            accused = {} if compared is None else compared.accused
            state = state_of(self._store, self._runs(), self._devices, accused)
            expiring = () if self._expiring is None else self._expiring()
            look = look_at(self._store, state, self._kept, expiring, compared=compared, is_served=is_served)
            parts = {**look.parts, "wrong": '""'}
        except ProtofleetError as error:  # a server that restarts: the page stays, and says so
            self._take(None, {"wrong": json.dumps(printable(str(error)))})
        else:
            self._state = state
            self._take(look, parts)
        self.looked_s += time.thread_time() - began

    def _take(self, look: Look | None, parts: Mapping[str, str]) -> None:
        with self._lock:
            version, is_new = self.version + 1, False
            for name, text in parts.items():
                if name not in self._parts or self._parts[name][1] != text:
                    self._parts[name], is_new = (version, text), True
            if look is not None:
                self._names = look.names
                for name in self._rows.keys() - look.rows.keys():
                    del self._rows[name]
                    self._floor, is_new = version, True
                for name, text in look.rows.items():
                    before = self._rows.get(name)
                    if before is None or before[1] != text:
                        self._rows[name], is_new = (version, text), True
        if is_new:
            self.came()

    def _look_again(self) -> None:
        watched, looked_at = watch(self._store), float("-inf")
        while not self._over.is_set():
            self._wake.clear()
            before = self.looked_s
            try:
                if watched.changed() or self._is_stale.is_set() or time.monotonic() - looked_at >= _MOST_REST_S:
                    looked_at = time.monotonic()
                    self._is_stale.clear()
                    self.look()
            except Exception:  # the page must not end with what nobody thought of; the next look tries again
                logger.exception("the operator's page")
            rest_s = min(_MOST_REST_S, max(LOOK_S, _REST * (self.looked_s - before)))
            self._wake.wait(rest_s)

    # ── what a browser is told ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def title(self) -> str:
        return self._fleet

    def first(self, visitor: Visitor) -> str:
        return self._news(-1)[1]

    def event(self, visitor: Visitor, known: int) -> tuple[int, str]:
        return self._news(known)

    def _news(self, known: int) -> tuple[int, str]:
        with self._lock:
            version = self.version
            is_whole = known < self._floor or known > version
            known = -1 if is_whole else known
            rows = [text for changed, text in self._rows.values() if changed > known]
            parts = [f'"{name}":{text}' for name, (changed, text) in self._parts.items() if changed > known]
        about = {"version": version, "whole": is_whole, "now": time.time(), "control": self._orders is not None}
        heads = json.dumps(about | ({"fleet": self._fleet, "columns": COLUMNS} if is_whole else {}))
        return version, f'{heads[:-1]},"rows":[{",".join(rows)}]{"".join("," + part for part in parts)}}}'

    def get(self, visitor: Visitor, path: str, query: Mapping[str, str]) -> Content | None:
        found: Mapping[str, Any] | None = None
        if path == "/device" and self._state is not None:
            found = device_content(self._store, self._state, query.get("name", ""))
        elif path == "/runbook":
            found = runbook_part(query.get("part", ""))
        return None if found is None else Content(json.dumps(found).encode(), _JSON)

    def post(self, visitor: Visitor, path: str, given: Mapping[str, Any]) -> Mapping[str, Any] | None:
        if self._orders is None:
            return None
        if path == "/control":
            return {"operator": self._orders.enter(visitor, str(given["token"]))}
        if path == "/leave":
            self._orders.leave(visitor)
            return {}
        if path == "/order":
            said = self._orders.give(visitor, given, self._names)
            self._wake.set()
            return {"said": said}
        return None

"""One aggregator, from its files to its end: the one entry point for the command and for a program.

1. The settings are checked as they are made (`aggregator/settings.py`).
2. A `Service` reads the bundles and opens the store.
3. It serves its fleet until the plan is done or `stop` is called.
4. It writes a summary after every round.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from protofleet.aggregator.coordinators.coordinator import Coordinator
from protofleet.aggregator.coordinators.kinds import coordinator_of
from protofleet.aggregator.metrics.console import Progress
from protofleet.aggregator.metrics.metrics import Counts, Metrics
from protofleet.aggregator.metrics.metrics_server import MetricsServer
from protofleet.aggregator.monitoring.events import Event, Listener, ListsCounted, MetricsServed, RunFinished, StoreAway
from protofleet.aggregator.rounds.round_machine import Policy
from protofleet.aggregator.server.beginning import Beginning, Process
from protofleet.aggregator.server.kinds import KINDS
from protofleet.aggregator.server.server import Server
from protofleet.aggregator.settings import AggregateSettings, metrics_address
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.workers.leadership import Leadership
from protofleet.aggregator.workers.shared_rounds import Sharing
from protofleet.aggregator.workers.shared_standing import SharedStanding
from protofleet.aggregator.workers.shared_store import SharedStore
from protofleet.aggregator.workers.store_outage import StoreOutage
from protofleet.aggregator.workers.worker import Worker
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.bundle.fleet_compatibility import check_fleet
from protofleet.contract.console.logs import about
from protofleet.contract.console.service_manager import ServiceManager
from protofleet.contract.errors import StoreError
from protofleet.contract.identity.signatures import Signer
from protofleet.contract.identity.signing_keys import read_private_key
from protofleet.contract.mqtt.certificates import Expiry, expiries

__all__ = ["OnSummary", "Service"]

OnSummary = Callable[[dict[str, Any], bool], None]
"""Takes a run's summary so far, and whether it is the last one of a finished run."""


class Service:
    """An aggregator of one fleet."""

    def __init__(self, settings: AggregateSettings) -> None:
        self.settings, self.fleet, self.address = settings, settings.fleet, settings.address
        self._is_new_run = settings.new_run
        self._signer = None if settings.sign is None else Signer(read_private_key(settings.sign))
        self._roster = check_fleet([(Path(path), read_bundle(path)) for path in settings.bundle])  # without weights
        self._stopping, self._counts = threading.Event(), Counts()
        self._leadership: Leadership | None = None
        self._summary: dict[str, Any] = {}  # the newest summary
        self._broker_certificate: Callable[[], Expiry | None] = lambda: None

    def run(self, listener: Listener, on_summary: OnSummary) -> dict[str, Any]:
        """Serve until the plan is done and the devices have left, or until `stop`; returns the summary.

        Raises:
            LinkError: there is no broker, it refuses us, or another aggregator serves this fleet.
            StoreError, UsageError: the disk refuses, or the store is another fleet's or bundle's.
            KeyboardInterrupt: as it was raised within, also where the store is gone at the same moment.
        """
        listener = _to_both(Progress(), listener)
        patience_s = math.inf if self.settings.patience is None else self.settings.patience
        outage, manager = StoreOutage(patience_s if self.settings.worker else 0.0), ServiceManager()
        with self._page_served():
            return self._run(listener, on_summary, outage, manager)

    def _run(
        self, listener: Listener, on_summary: OnSummary, outage: StoreOutage, manager: ServiceManager
    ) -> dict[str, Any]:
        while True:
            try:
                with about(fleet=self.fleet):
                    return self._serve(listener, on_summary, outage)
            except StoreError as error:
                if (interrupt := _interrupt_before(error)) is not None:
                    raise interrupt from None
                wait_s = outage.wait_s(error, time.monotonic())
                if wait_s is None:
                    raise
                listener(StoreAway(str(error), wait_s))
                manager.ready()  # it waits, as for a broker
                manager.alive()
                if self._stopping.wait(wait_s):
                    return self._summary

    def _serve(self, listener: Listener, on_summary: OnSummary, outage: StoreOutage) -> dict[str, Any]:
        """From the store as it is, as after a kill: what is confirmed is in it, and what is not comes again."""
        roster = self._roster
        owner = (self.settings.store, _together((roster.bundle, *roster.others)), self.fleet)
        if not self.settings.worker:
            with DurableStore(*owner, extends=roster.shorter) as store:
                return self._lead(store, listener, on_summary, outage)
        if self._leadership is None:
            self._leadership = Leadership(owner, roster.shorter, self.settings, self._stopping)
        return self._leadership.serve(
            lambda store: self._lead(store, listener, on_summary, outage, shared=store),
            lambda store: self._worker(store, listener, outage),
            lambda: self._summary,
        )

    def _worker(self, store: SharedStore, listener: Listener, outage: StoreOutage) -> Worker:
        outage.opened()
        core = lambda: self._core(store, store)  # noqa: E731
        about = {"listener": _to_both(self._counts, listener), "signer": self._signer, "stopping": self._stopping}
        worker = Worker(store, core, self.address, self.fleet, **about, manager=ServiceManager())  # type: ignore[arg-type]
        watched = {"address": self.address, "counts": self._counts, "leads": False}
        metrics = Metrics(self.fleet, worker.core, store.refused_devices, **watched)  # type: ignore[arg-type]
        metrics.broker_certificate = self._broker_certificate = worker.broker_certificate
        worker.each_turn, worker.within = lambda: metrics.look(worker.core), self._served(metrics, listener)
        return worker

    def _lead(
        self,
        store: DurableStore,
        listener: Listener,
        on_summary: OnSummary,
        outage: StoreOutage,
        shared: SharedStore | None = None,
    ) -> dict[str, Any]:
        roster, first = self._roster, self._roster.bundle
        outage.opened()
        is_new_run, self._is_new_run = self._is_new_run, False
        if is_new_run:
            store.begin_new_run()
        core = self._core(store, shared)
        metrics = Metrics(
            self.fleet, core, store.refused_devices, address=self.address, counts=self._counts, store=store
        )
        tell = _to_both(metrics, listener)
        summary = KINDS[core.kind].summary(store, self.fleet, first)

        is_finished = False

        def content() -> dict[str, Any]:
            written = summary.content(finished=is_finished, global_version=core.state.version)
            self._summary = written | {"schedule": _schedule(self.settings.policy)}
            return self._summary

        def on_round(finished: bool) -> None:
            nonlocal is_finished
            is_finished = finished
            written = content()
            on_summary(written, False)  # the last one comes when the devices have said how good they are
            if finished:
                totals = written["totals"]
                tell(
                    RunFinished(
                        written["rounds_before"] + len(written["rounds"]), totals["committed"], totals["uplink_bytes"]
                    )
                )

        if roster.shorter:
            tell(ListsCounted(roster.manifest.classes, tuple(sorted(set(roster.shorter.values())))))
        on_summary(content(), False)  # now, so that a path that cannot be written is known now
        server = Server(
            core,
            self.address,
            self.fleet,
            listener=tell,
            on_round=on_round,
            signer=self._signer,
            beginning=Beginning(
                self.settings.patience, self.settings.take_over, is_new_run or store.orders.is_restored_as(store.run)
            ),
            process=Process(self._stopping, ServiceManager(), lambda: self._turned(core, metrics)),
            sharing=None if shared is None else Sharing(core, shared),
        )
        metrics.broker_certificate = self._broker_certificate = server.broker_certificate
        try:
            with about(run=store.run.hex()), self._served(metrics, tell):
                server.run()
        finally:
            on_summary(content(), is_finished)
        return content()

    @contextlib.contextmanager
    def _served(self, metrics: Metrics, listener: Listener) -> Iterator[None]:
        """Metrics, where they are wanted, for as long as the block lasts."""
        if self.settings.metrics is None:
            yield
            return
        with MetricsServer(*metrics_address(self.settings.metrics), metrics) as server:
            listener(MetricsServed(server.url, server.is_local))
            yield

    @contextlib.contextmanager
    def _page_served(self) -> Iterator[None]:
        """The operator's page, where it is wanted, for as long as the block lasts."""
        settings = self.settings
        if settings.page is None:
            yield
            return
        from protofleet.aggregator.page.served_page import served_page  # and none of it elsewhere

        with served_page(settings, lambda: (*expiries(self.address), *filter(None, [self._broker_certificate()]))):
            yield

    def _turned(self, core: Coordinator, metrics: Metrics) -> None:
        """Another turn of the server's loop is done."""
        metrics.look()

    def _core(self, store: DurableStore, shared: SharedStore | None = None) -> Coordinator:
        """What the settings ask for.

        Args:
            shared: the same store, where several processes take contributions.
        """
        roster = self._roster
        about: dict[str, Any] = {"now": time.monotonic(), "others": roster.others, "shorter": roster.shorter}
        if shared is not None:
            about |= {"keep": partial(SharedStanding, store=shared)}
        return coordinator_of(store, roster.manifest, roster.bundle, self.settings, **about)

    def stop(self) -> None:
        """End `run` within about a second, from any thread. The run can continue with the same store."""
        self._stopping.set()


def _interrupt_before(error: BaseException) -> KeyboardInterrupt | None:
    """SIGTERM or Ctrl-C in whose clean-up the store turned out to be gone; None for an error that nobody asked for."""
    before = error.__context__
    while before is not None and not isinstance(before, KeyboardInterrupt):
        before = before.__context__
    return before


def _to_both(first: Listener, second: Listener) -> Listener:
    """A listener that passes each event to `first`, then to `second`."""

    def tell(event: Event) -> None:
        first(event)
        second(event)

    return tell


def _schedule(policy: Policy) -> dict[str, float | int] | None:
    """When rounds open and close, as the summary says it; None for an aggregator that ends with its plan."""
    names = ("every_s", "when_new", "window_s", "open_clients", "min_clients", "max_clients")
    return {name: getattr(policy, name) for name in names} if policy.stays else None


def _together(hashes: tuple[bytes, ...]) -> bytes:
    """The store's name of its bundle: the one hash, or all of them together in any order."""
    return hashes[0] if len(hashes) == 1 else hashlib.sha256(b"".join(sorted(hashes))).digest()

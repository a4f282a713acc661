"""One aggregator, from its files to its end: the one entry point for the command and for a program.

1. `settings_of` checks the settings.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from protofleet.aggregator.coordinators.blinded_coordinator import BlindedCoordinator
from protofleet.aggregator.coordinators.round_coordinator import Coordinator, Settings
from protofleet.aggregator.coordinators.standing_coordinator import StandingCoordinator
from protofleet.aggregator.database import Place
from protofleet.aggregator.ingest.validation import MAX_SAMPLES
from protofleet.aggregator.metrics.metrics import Counts, Metrics
from protofleet.aggregator.metrics.metrics_server import MetricsServer
from protofleet.aggregator.monitoring.events import Event, Listener, ListsCounted, MetricsServed, RunFinished, StoreAway
from protofleet.aggregator.rounds.round_machine import DEADLINE_S, Policy
from protofleet.aggregator.screening.outliers import SUSPECTS, Suspects
from protofleet.aggregator.server.run_report import Summary
from protofleet.aggregator.server.server import Server
from protofleet.aggregator.server.standing_report import StandingSummary
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.workers.leadership import Leadership
from protofleet.aggregator.workers.shared_rounds import Sharing
from protofleet.aggregator.workers.shared_standing import SharedStanding
from protofleet.aggregator.workers.shared_store import SharedStore
from protofleet.aggregator.workers.store_outage import StoreOutage
from protofleet.aggregator.workers.worker import Worker
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.bundle.fleet_compatibility import check_fleet
from protofleet.contract.console.durations import in_words, seconds
from protofleet.contract.console.service_manager import ServiceManager
from protofleet.contract.errors import StoreError, UsageError, near_names
from protofleet.contract.identity.ed25519 import library
from protofleet.contract.identity.signatures import Signer
from protofleet.contract.identity.signing_keys import read_private_key
from protofleet.contract.methods import Value, closing_method
from protofleet.contract.methods import method as find_method
from protofleet.contract.mqtt.link import Address
from protofleet.contract.privacy.sealing import check_least, read_helper_public
from protofleet.contract.sums.merge_rules import check_rule
from protofleet.contract.sums.statistics import ClassMeans
from protofleet.contract.wire.messages import Encoding
from protofleet.contract.wire.topics import check_device, check_id

__all__ = ["Service", "settings_of"]

WINDOW_S = 3600.0  # a device that is awake some minutes of each hour meets every window
STANDING_EVERY_S = 60.0
LEAST = 10  # devices of a blinded sum

OnSummary = Callable[[dict[str, Any], bool], None]
"""Takes a run's summary so far, and whether it is the last one of a finished run."""


@dataclass
class Service:
    """An aggregator of one fleet.

    Attributes:
        bundles: the fleet's bundle, those that it extends, and one for each further backbone that devices may have.
        address: of the broker.
        store: the place of the run, a file or a server; made when absent, resumed otherwise.
        patience_s: how long the broker may be absent at the start, and for a worker the store's server. None for
            60 s; for ever where the plan has no end, or for a worker.
        take_over: end another aggregator that serves this fleet, instead of refusing.
        new_run: continue from the store as a new run: for a store from a backup.
        metrics: host and port to serve metrics on; None for no metrics.
        sign: file of the Ed25519 private key that signs what is published; None for no signatures.
        worker: whether this is one of several processes on one store, of which one leads at a time.
    """

    bundles: Sequence[Path]
    address: Address
    store: Place
    fleet: str
    settings: Settings
    patience_s: float | None = None
    take_over: bool = False
    new_run: bool = False
    metrics: tuple[str, int] | None = None
    sign: str | None = None
    worker: bool = False
    _stopping: threading.Event = field(default_factory=threading.Event)
    _counts: Counts = field(default_factory=Counts)
    _leadership: Leadership | None = None
    _summary: dict[str, Any] = field(default_factory=dict)  # the newest summary

    def __post_init__(self) -> None:
        check_id(self.fleet, "--fleet")
        if self.patience_s is not None:
            _between("--patience", self.patience_s, 0.1, 1e6)
        self._signer = None if self.sign is None else Signer(read_private_key(self.sign))
        read = [(path, read_bundle(path)) for path in self.bundles]
        self._roster = check_fleet(read)  # graphs and weights do not stay in memory

    def run(self, listener: Listener, on_summary: OnSummary) -> dict[str, Any]:
        """Serve until the plan is done and the devices have left, or until `stop`; returns the summary.

        Raises:
            LinkError: there is no broker, it refuses us, or another aggregator serves this fleet.
            StoreError, UsageError: the disk refuses, or the store is another fleet's or bundle's.
        """
        patience_s = math.inf if self.patience_s is None else self.patience_s
        outage, manager = StoreOutage(patience_s if self.worker else 0.0), ServiceManager()
        while True:
            try:
                return self._serve(listener, on_summary, outage)
            except StoreError as error:
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
        owner = (self.store, _together((roster.bundle, *roster.others)), self.fleet)
        if not self.worker:
            with DurableStore(*owner, extends=roster.shorter) as store:
                return self._lead(store, listener, on_summary, outage)
        if self._leadership is None:
            self._leadership = Leadership(owner, roster.shorter, self.settings, self._stopping)
        return self._leadership.serve(
            lambda store: self._lead(store, listener, on_summary, outage),
            lambda store: self._worker(store, listener, outage),
            lambda: self._summary,
        )

    def _worker(self, store: SharedStore, listener: Listener, outage: StoreOutage) -> Worker:
        outage.opened()

        def core() -> Coordinator | SharedStanding:
            made = self._core(store)
            assert isinstance(made, Coordinator | SharedStanding)
            return made

        about = {"listener": _to_both(self._counts, listener), "signer": self._signer, "stopping": self._stopping}
        worker = Worker(store, core, self.address, self.fleet, **about, manager=ServiceManager())  # type: ignore[arg-type]
        watched = {"address": self.address, "counts": self._counts, "leads": False}
        metrics = Metrics(self.fleet, worker.core, store.refused_devices, **watched)  # type: ignore[arg-type]
        metrics.broker_certificate = worker.broker_certificate
        worker.each_turn, worker.within = lambda: metrics.look(worker.core), self._served(metrics, listener)
        return worker

    def _lead(
        self, store: DurableStore, listener: Listener, on_summary: OnSummary, outage: StoreOutage
    ) -> dict[str, Any]:
        roster, first = self._roster, self._roster.bundle
        outage.opened()
        is_new_run, self.new_run = self.new_run, False
        if is_new_run:
            store.begin_new_run()
        core = self._core(store)
        sharing = None
        if isinstance(store, SharedStore):
            assert isinstance(core, Coordinator | SharedStanding)
            sharing = Sharing(core, store)
        standing = isinstance(core, StandingCoordinator)
        metrics = Metrics(
            self.fleet, core, store.refused_devices, address=self.address, counts=self._counts, store=store
        )
        tell = _to_both(metrics, listener)
        summary = StandingSummary(store, self.fleet, first) if standing else Summary(store, self.fleet, first)

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
            patience_s=self.patience_s,
            signer=self._signer,
            take_over=self.take_over,
            is_new_run=is_new_run,
            stopping=self._stopping,
            manager=ServiceManager(),
            each_turn=lambda: self._turned(core, metrics),
            sharing=sharing,
        )
        metrics.broker_certificate = server.broker_certificate
        try:
            with self._served(metrics, tell):
                server.run()
        finally:
            on_summary(content(), is_finished)
        return content()

    @contextlib.contextmanager
    def _served(self, metrics: Metrics, listener: Listener) -> Iterator[None]:
        """Metrics, where they are wanted, for as long as the block lasts."""
        if self.metrics is None:
            yield
            return
        with MetricsServer(*self.metrics, metrics.text) as server:
            listener(MetricsServed(server.url, server.is_local))
            yield

    def _turned(self, core: Coordinator | StandingCoordinator, metrics: Metrics) -> None:
        """Another turn of the server's loop is done."""
        metrics.look()

    def _core(self, store: DurableStore) -> Coordinator | StandingCoordinator:
        """Of rounds, or of sums that stand."""
        roster, now = self._roster, time.monotonic()
        bundle = (store, roster.manifest, roster.bundle, self.settings)
        if self.settings.standing_every_s is None:
            core = Coordinator if self.settings.helper is None else BlindedCoordinator
            return core(*bundle, now=now, others=roster.others, shorter=roster.shorter, wall=time.time())
        if roster.others:
            got = f"{1 + len(roster.others)}"
            raise UsageError("--standing", expected="one extractor", got=got, hint="one fleet for each")
        if isinstance(store, SharedStore):
            return SharedStanding(store, *bundle[1:], now=now, shorter=roster.shorter)
        return StandingCoordinator(*bundle, now=now, shorter=roster.shorter)

    def stop(self) -> None:
        """End `run` within about a second, from any thread. The run can continue with the same store."""
        self._stopping.set()


def settings_of(
    *,
    method: str | None = None,
    rounds: int | None = None,
    calibrate: bool = True,
    min_clients: int = 1,
    deadline: float = DEADLINE_S,
    fraction: float = 1.0,
    seed: int = 0,
    min_samples: int = 1,
    max_samples: int = MAX_SAMPLES,
    max_share: float | None = None,
    suspects: str = "leave-out",
    vouch: Sequence[str] = (),
    ridge: float | str | None = None,
    form: str | None = None,
    rule: str = "mean",
    encoding: str = "f32",
    sums_encoding: str = "f64",
    limit_bytes: int = 65_536,
    every: str | float | None = None,
    when_new: int = 0,
    window: str | float | None = None,
    open_clients: int | None = None,
    max_clients: int = 0,
    standing: bool = False,
    helper: str | None = None,
    least: int | None = None,
    enrolled: bool = False,
    gateways: Sequence[str] = (),
) -> Settings:
    """Check the values that `protofleet aggregate` takes under these names.

    Raises:
        UsageError: a value is out of range, a name is unknown, or an option of rounds is given where sums stand.
    """
    if standing:
        of_rounds = {"--rounds": rounds is not None, "--rule": rule != "mean", "--fraction": fraction != 1.0}
        of_rounds |= {"--max-share": max_share is not None, "--min-clients": min_clients != 1}
        of_rounds |= {"--suspects": suspects != "leave-out", "--vouch": bool(vouch)}
        of_rounds |= {"--when-new": when_new != 0, "--window": window is not None}
        of_rounds |= {"--deadline": deadline != DEADLINE_S, "--seed": seed != 0, "--no-calibrate": not calibrate}
        of_rounds |= {"--helper": helper is not None}
        of_rounds |= {"--open-clients": open_clients is not None, "--max-clients": max_clients != 0}
        for option in (name for name, is_given in of_rounds.items() if is_given):
            raise UsageError(f"{option} with --standing", expected="one of them", got="both: there are no rounds")
    if enrolled:
        library("--enrolled")
    for option, clashes in {"--helper": helper is not None, "--rule": rule != "mean"}.items():
        if gateways and clashes:
            raise UsageError(f"{option} with --gateway", expected="one of them", got="both: a gateway sends a sum")
    if helper is None and least is not None:
        raise UsageError("--least", expected="--helper beside it", got="none")
    if helper is not None:
        least = check_least(LEAST if least is None else least)
        min_clients = max(min_clients, least)
        of_single = {
            "--rule": rule != "mean",
            "--max-share": max_share is not None,
            "--suspects": suspects != "leave-out",
        }
        _check_blinded(of_single | {"--min-samples": min_samples != 1, "--vouch": bool(vouch)}, when_new)
    return Settings(
        method=None if method is None else find_method(method).name,
        rounds=rounds,
        calibrate=calibrate,
        policy=_policy(
            min_clients,
            deadline,
            fraction,
            seed,
            open_clients,
            0 if standing else every or 0,
            when_new,
            window,
            max_clients,
        ),
        rule=check_rule(rule, ClassMeans),
        encoding=_encoding("--encoding", encoding, get_args(Encoding)),
        sums_encoding=_encoding("--sums-encoding", sums_encoding, ("f64", "int32", "f32", "f16")),
        min_samples=_at_least("--min-samples", min_samples, 1),
        max_samples=_at_least("--max-samples", max_samples, 1),
        max_share=None if max_share is None else _between("--max-share", max_share, 0.01, 1.0),
        suspects=_suspects(suspects),
        vouched=_vouched(vouch, suspects),
        hyper=_solved_with(ridge=ridge, form=form),
        limit_bytes=limit_bytes,
        enrolled=enrolled,
        gateways=tuple(dict.fromkeys(check_device(name, "--gateway") for name in gateways)),
        standing_every_s=seconds("--every", STANDING_EVERY_S if every is None else every) if standing else None,
        helper=None if helper is None else read_helper_public(helper, "--helper"),
        least=least or 0,
    )


def _check_blinded(of_open_rounds: Mapping[str, bool], when_new: int) -> None:
    """Check that no option needs single contributions or sample counts, which blinded rounds do not show."""
    for option in (name for name, is_given in of_open_rounds.items() if is_given):
        raise UsageError(f"{option} with --helper", expected="one of them", got="both: nothing but a sum is seen")
    if when_new:
        got = "both: blinded devices do not say how many photos they have"
        raise UsageError("--when-new with --helper", expected="one of them", got=got, hint="--every")


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


def _solved_with(**given: float | str | None) -> dict[str, Value]:
    """Hyper-parameters of the heads that are made of sums, as far as they were given."""
    options = closing_method().hyper
    return {name: options[name].check(f"--{name}", value) for name, value in given.items() if value is not None}


def _together(hashes: tuple[bytes, ...]) -> bytes:
    """The store's name of its bundle: the one hash, or all of them together in any order."""
    return hashes[0] if len(hashes) == 1 else hashlib.sha256(b"".join(sorted(hashes))).digest()


def _policy(
    min_clients: int,
    deadline_s: float,
    fraction: float,
    seed: int,
    open_clients: int | None,
    every: str | float,
    when_new: int,
    window: str | float | None,
    max_clients: int,
) -> Policy:
    _at_least("--min-clients", min_clients, 1)
    if not 0 <= deadline_s < 10**9:
        raise UsageError("--deadline", expected="seconds, 0 or more", got=deadline_s)
    if not 0 < fraction <= 1:
        raise UsageError("--fraction", expected="above 0, up to 1", got=fraction)
    if not 0 <= seed < 2**32:
        raise UsageError("--seed", expected="0 to 4294967295", got=seed)
    every_s = seconds("--every", every)
    stays = every_s > 0 or _at_least("--when-new", when_new, 0) > 0
    for option, value in (("--window", window), ("--max-clients", max_clients or None)):
        if value is not None and not stays:
            raise UsageError(option, expected="--every or --when-new beside it", got="neither")
    if open_clients is not None:
        _at_least("--open-clients", open_clients, 1)
    if max_clients:
        _at_least("--max-clients", max_clients, min_clients)
    longest = every_s or WINDOW_S
    window_s = min(WINDOW_S, longest) if window is None else seconds("--window", window)
    if stays and not 0 < window_s <= (every_s or window_s):
        raise UsageError("--window", expected=f"above 0, up to --every ({in_words(every_s)})", got=in_words(window_s))
    if not stays:
        return Policy(min_clients, deadline_s, fraction, seed, open_clients)
    opens = 1 if open_clients is None else open_clients
    return Policy(min_clients, deadline_s, fraction, seed, opens, every_s, when_new, window_s, max_clients)


def _at_least(option: str, value: int, lowest: int) -> int:
    if not lowest <= value < 2**32:
        raise UsageError(option, expected=f"{lowest} or more", got=value)
    return value


def _between(option: str, value: float, low: float, high: float) -> float:
    if not low <= value <= high:  # NaN is not
        raise UsageError(option, expected=f"{low:g} to {high:g}", got=value)
    return value


def _suspects(text: str) -> Suspects:
    for choice in SUSPECTS:
        if text == choice:
            return choice
    raise UsageError("--suspects", expected=" or ".join(SUSPECTS), got=text, hint=near_names(text, SUSPECTS))


def _vouched(names: Sequence[str], suspects: str) -> tuple[str, ...]:
    if names and suspects == "ignore":
        raise UsageError("--vouch with --suspects ignore", expected="one of them", got="both", hint="--suspects name")
    return tuple(dict.fromkeys(check_id(name, "--vouch") for name in names))


def _encoding(option: str, text: str, allowed: tuple[Encoding, ...]) -> Encoding:
    for encoding in allowed:
        if text == encoding:
            return encoding
    raise UsageError(option, expected="an encoding", got=text, hint=near_names(text, allowed))

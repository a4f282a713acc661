"""The aggregator's numbers for a monitoring system, in Prometheus' text format (version 0.0.4).

Counters count since this process started, as Prometheus expects, from the same events that other listeners get. Gauges
are read after each turn of the server's loop, in its thread. A scraper gets the newest such look, formatted on the
scraper's own thread (`aggregator/metrics/metrics_server.py`): nothing waits for it.

Where several processes work on one store, each reports its own work, and whether it leads. Only the leader reports what
only the leader knows: devices, contributions of the round, roll-outs, the store's size.

No label is a device's name or anything that a device says, so the number of series is fixed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from protofleet.aggregator.coordinators.round_coordinator import Coordinator
from protofleet.aggregator.coordinators.standing_coordinator import StandingCoordinator
from protofleet.aggregator.ingest.ingest import Cause
from protofleet.aggregator.monitoring import events
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.refused_devices import RefusedDevices
from protofleet.contract.mqtt.address import Address
from protofleet.contract.mqtt.certificates import Expiry, expiries

__all__ = ["CONTENT_TYPE", "Counts", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_OUTCOMES = ("committed", "duplicate", "late", "rejected", "malformed")
_CAUSES = tuple(cause for cause in get_args(Cause) if cause)
_SIZE_S = 60.0  # between two questions after the store's size


class Counts:
    """What happened since this process started, whether it has led meanwhile or not. Give it every event."""

    def __init__(self) -> None:
        self.outcomes, self.causes = Counter(dict.fromkeys(_OUTCOMES, 0)), Counter(dict.fromkeys(_CAUSES, 0))
        self.closed = self.connections = self.batches = 0
        self.batch_s = 0.0
        self.is_up = False

    def __call__(self, event: events.Event) -> None:
        """In the aggregator's thread."""
        if isinstance(event, events.Decided):
            if event.outcome in _OUTCOMES:
                self.outcomes[event.outcome] += 1
            if event.cause:
                self.causes[event.cause] += 1
        elif isinstance(event, events.BatchTaken):
            self.batches, self.batch_s = self.batches + 1, self.batch_s + event.seconds
        elif isinstance(event, events.RoundClosed):
            self.closed += 1
        elif isinstance(event, events.LinkUp):
            self.connections, self.is_up = self.connections + 1, True
        elif isinstance(event, events.LinkDown):
            self.is_up = False


@dataclass(frozen=True)
class _Look:
    """What the aggregator was at the end of a turn; never changed after."""

    at: float = 0.0
    leads: bool = True
    epoch: int = 0
    store_bytes: int | None = None
    batches: int = 0
    batch_s: float = 0.0
    round: int = 0
    is_open: bool = False
    opened_at: float | None = None
    contributions: int = 0
    version: int = 0
    devices: Mapping[str, int] = field(default_factory=dict)
    classes: int = 0
    outcomes: Mapping[str, int] = field(default_factory=dict)
    causes: Mapping[str, int] = field(default_factory=dict)
    closed: int = 0
    connections: int = 0
    is_up: bool = False
    rollout: Mapping[str, int] = field(default_factory=dict)
    offered: float = 0.0


class Metrics:
    """The metrics of one aggregator: give it every event, and `look` after each turn.

    Args:
        fleet: the fleet's id.
        core: what it serves.
        refused: the table of refused devices in its store.
        wall: seconds since the epoch.
        address: of the broker; its certificate files are read when the metrics are requested.
        counts: of this process; the owner of a process that does not lead gives it the events.
        leads: whether this process opens and closes rounds.
        store: its size is read now and then.

    Attributes:
        broker_certificate: gives the certificate that the broker has shown, if it has.
    """

    def __init__(
        self,
        fleet: str,
        core: Coordinator | StandingCoordinator,
        refused: RefusedDevices,
        wall: Callable[[], float] = time.time,
        address: Address | None = None,
        *,
        counts: Counts | None = None,
        leads: bool = True,
        store: DurableStore | None = None,
    ) -> None:
        self._about = _family(
            "info", "gauge", "Which fleet and run this is.", f'fleet="{fleet}",run', {core.run.hex(): 1}
        )
        self._core, self._refused_devices, self._wall, self._address = core, refused, wall, address
        self._counts, self._leads, self._store = counts or Counts(), leads, store
        self._size_at, self._size = float("-inf"), None if store is None else 0
        self._refused = len(refused.reasons())
        self._opened: tuple[int, float | None] = 0, None  # the newest round, and when it opened
        self._newest = _Look()
        self.broker_certificate: Callable[[], Expiry | None] = lambda: None
        self.look()

    def __call__(self, event: events.Event) -> None:
        """Count what happened; in the aggregator's thread."""
        self._counts(event)
        if isinstance(event, events.OrderDone):
            self._refused = len(self._refused_devices.reasons())

    def look(self, core: Coordinator | StandingCoordinator | None = None) -> None:
        """Read the present state, for all scrapers until the next look; in the aggregator's thread.

        Args:
            core: what is served from now on, if that has changed.
        """
        self._core = core = self._core if core is None else core
        rounds, counts = core.rounds, self._counts
        devices = {"online": rounds.online, "refused": self._refused, "drifting": len(core.drift.suspected)}
        if isinstance(core, StandingCoordinator):
            devices |= {"standing": len(core.standing.present)}
        else:
            devices |= {"awaited": core.rounds.awaited_count}
        self._newest = _Look(
            at=self._wall(),
            leads=self._leads,
            epoch=0 if self._store is None else self._store.epoch,
            store_bytes=self._size_bytes(),
            batches=counts.batches,
            batch_s=counts.batch_s,
            round=rounds.number,
            is_open=isinstance(core, Coordinator) and core.rounds.phase == "open",
            opened_at=self._opened_at(),
            contributions=len(rounds.contributions),
            version=core.state.version,
            devices=devices,
            classes=len(core.class_drift.suspected),
            outcomes={**counts.outcomes, "malformed": counts.outcomes["malformed"] + core.skipped},
            causes=dict(counts.causes),
            closed=counts.closed,
            connections=counts.connections,
            is_up=counts.is_up,
            rollout=core.rollouts.counts,
            offered=0.0 if core.rollouts.offer is None else core.rollouts.offer.fraction,
        )

    def _size_bytes(self) -> int | None:
        if self._store is not None and time.monotonic() >= self._size_at:
            self._size_at, self._size = time.monotonic() + _SIZE_S, self._store.size_bytes()
        return self._size

    def _opened_at(self) -> float | None:
        core = self._core
        if isinstance(core, Coordinator) and core.rounds.number != self._opened[0]:
            self._opened = core.rounds.number, core.record(core.rounds.number).opened_at
        return self._opened[1]

    def text(self) -> str:
        """All of it as Prometheus reads it; from any thread."""
        shown, files = self.broker_certificate(), [] if self._address is None else expiries(self._address)
        families = _families(self._newest, self._wall(), files if shown is None else [*files, shown])
        return self._about + "".join(_family(*family) for family in families)


def _families(
    look: _Look, now: float, expire: Sequence[Expiry]
) -> Iterator[tuple[str, str, str, str, Mapping[str, float]]]:
    """Each metric: name, type, line of help, label, and numbers by the label's value, "" for a metric without one."""
    yield "leads", "gauge", "Whether this process opens and closes rounds.", "", {"": look.leads}
    yield "messages_total", "counter", "Messages of devices by what became of them.", "outcome", look.outcomes
    yield "refusals_total", "counter", "Messages that were refused, by why.", "reason", look.causes
    yield "batches_total", "counter", "Batches of messages that were decided on.", "", {"": look.batches}
    yield "batch_seconds_total", "counter", "Until they were decided on and durable.", "", {"": look.batch_s}
    yield "broker_up", "gauge", "Whether the broker is connected.", "", {"": look.is_up}
    yield "broker_connections_total", "counter", "Connections to the broker.", "", {"": look.connections}
    if expire:
        until = {expiry.what.replace("'s", "").replace(" ", "_"): expiry.until for expiry in expire}
        yield "expiry_timestamp_seconds", "gauge", "When what the connection hangs on expires.", "of", until
    yield "last_turn_timestamp_seconds", "gauge", "When the aggregator's loop last went round.", "", {"": look.at}
    if look.leads:
        yield from _of_the_fleet(look, now)


def _of_the_fleet(look: _Look, now: float) -> Iterator[tuple[str, str, str, str, Mapping[str, float]]]:
    """What only the one that leads knows."""
    age_s = 0.0 if look.opened_at is None else max(0.0, now - look.opened_at)
    yield "epoch", "gauge", "How many processes have led this store; 0 for a file.", "", {"": look.epoch}
    if look.store_bytes is not None:
        yield "store_bytes", "gauge", "What the store takes on its disk.", "", {"": look.store_bytes}
    yield "devices", "gauge", "Devices by state; one may be in several.", "state", look.devices
    yield "classes_drifting", "gauge", "Classes that depart from themselves.", "", {"": look.classes}
    rollout_help = "Devices of the present stage of a roll-out, by what they said of it."
    yield "rollout_devices", "gauge", rollout_help, "state", look.rollout
    yield "rollout_fraction", "gauge", "Of the devices, that a bundle is offered to.", "", {"": look.offered}
    yield "round", "gauge", "The newest round; 0 before the first, and where sums stand.", "", {"": look.round}
    yield "round_open", "gauge", "Whether it is open.", "", {"": look.is_open}
    yield "round_age_seconds", "gauge", "How long ago it was opened.", "", {"": age_s}
    yield "round_contributions", "gauge", "Contributions to it that are committed.", "", {"": look.contributions}
    yield "rounds_closed_total", "counter", "Rounds that were closed.", "", {"": look.closed}
    yield "global_version", "gauge", "Of the global state.", "", {"": look.version}


def _family(name: str, kind: str, help_text: str, label: str, samples: Mapping[str, float]) -> str:
    lines = [f"# HELP protofleet_{name} {help_text}", f"# TYPE protofleet_{name} {kind}"]
    for value, number in samples.items():
        label_text = f'{{{label}="{value}"}}' if label else ""
        lines.append(f"protofleet_{name}{label_text} {float(number):.17g}")
    return "\n".join(lines) + "\n"

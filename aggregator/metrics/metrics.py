"""The aggregator's numbers for Prometheus, as a collector of `prometheus_client`.

Counters count since this process started, as Prometheus expects, from the same events that other listeners get. Gauges
are read after each turn of the server's loop, in its thread. A scraper gets the newest such look, formatted on the
scraper's own thread (`aggregator/metrics/metrics_server.py`): nothing waits for it. The package is loaded then, and not
before: without `--metrics` it need not be installed.

Where several processes work on one store, each reports its own work, and whether it leads. Only the leader reports what
only the leader knows: devices, contributions of the round, roll-outs, the store's size.

No label is a device's name or anything that a device says, so the number of series is fixed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, get_args

from protofleet.aggregator.coordinators.coordinator import Coordinator
from protofleet.aggregator.ingest.ingest import Cause
from protofleet.aggregator.monitoring import events
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.refused_devices import RefusedDevices
from protofleet.contract.mqtt.address import Address
from protofleet.contract.mqtt.certificates import Expiry, expiries

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["Counts", "Metrics"]

_OUTCOMES = ("committed", "duplicate", "late", "rejected", "malformed")
_CAUSES = tuple(cause for cause in get_args(Cause) if cause)
_SIZE_S = 60.0  # between two questions after the store's size
_Family = tuple[str, str, str, Mapping[str, float]]  # name, help, label, and numbers by its value: "" without a label


class Counts:
    """What happened since this process started, whether it has led meanwhile or not. Give it every event."""

    def __init__(self) -> None:
        self.outcomes, self.causes = Counter(dict.fromkeys(_OUTCOMES, 0)), Counter(dict.fromkeys(_CAUSES, 0))
        self.closed = self.connections = self.batches = 0
        self.batch_s = 0.0
        self.is_up = False
        self.accuracy: float | None = None  # as devices reported it after the newest round

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
        elif isinstance(event, events.AccuracyTold):
            self.accuracy = event.mean.get("all_classes")
        elif isinstance(event, events.LinkUp):
            self.connections, self.is_up = self.connections + 1, True
        elif isinstance(event, events.LinkDown):
            self.is_up = False


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
        core: Coordinator,
        refused: RefusedDevices,
        wall: Callable[[], float] = time.time,
        address: Address | None = None,
        *,
        counts: Counts | None = None,
        leads: bool = True,
        store: DurableStore | None = None,
    ) -> None:
        self._about = fleet, core.parts.run.hex()
        self._core, self._refused_devices, self._wall, self._address = core, refused, wall, address
        self._counts, self._leads, self._store = counts or Counts(), leads, store
        self._size_at, self._size = float("-inf"), None if store is None else 0
        self._refused = len(refused.reasons())
        self._opened: tuple[int, float | None] = 0, None  # the newest round, and when it opened
        self._newest: tuple[tuple[_Family, ...], float | None] = (), None  # never changed; and when the round opened
        self.broker_certificate: Callable[[], Expiry | None] = lambda: None
        self.look()

    def __call__(self, event: events.Event) -> None:
        """Count what happened; in the aggregator's thread."""
        self._counts(event)
        if isinstance(event, events.OrderDone):
            self._refused = len(self._refused_devices.reasons())

    def look(self, core: Coordinator | None = None) -> None:
        """Read the present state, for all scrapers until the next look; in the aggregator's thread.

        Args:
            core: what is served from now on, if that has changed.
        """
        self._core = self._core if core is None else core
        of_the_fleet = self._of_the_fleet(self._core) if self._leads else ()
        self._newest = (*self._of_the_process(self._core), *of_the_fleet), self._opened_at()

    def _of_the_process(self, core: Coordinator) -> Iterator[_Family]:
        counts = self._counts
        outcomes = {**counts.outcomes, "malformed": counts.outcomes["malformed"] + core.parts.uncounted.skipped}
        yield "leads", "Whether this process opens and closes rounds.", "", {"": self._leads}
        yield "messages_total", "Messages of devices by what became of them.", "outcome", outcomes
        yield "refusals_total", "Messages that were refused, by why.", "reason", dict(counts.causes)
        yield "batches_total", "Batches of messages that were decided on.", "", {"": counts.batches}
        yield "batch_seconds_total", "Until they were decided on and durable.", "", {"": counts.batch_s}
        yield "broker_up", "Whether the broker is connected.", "", {"": counts.is_up}
        yield "broker_connections_total", "Connections to the broker.", "", {"": counts.connections}
        devices = core.parts.store.devices
        yield "uplink_bytes_total", "Payloads that came from devices.", "", {"": devices.up_bytes}
        yield "downlink_bytes_total", "Payloads that were published.", "", {"": devices.down_bytes}
        yield "last_turn_timestamp_seconds", "When the aggregator's loop last went round.", "", {"": self._wall()}

    def _of_the_fleet(self, core: Coordinator) -> Iterator[_Family]:
        """What only the one that leads knows."""
        rounds, rollouts, store = core.rounds, core.parts.rollouts, core.parts.store
        drifting, offer = len(store.drift.suspected), rollouts.offer
        devices = {"online": rounds.online, "refused": self._refused, "drifting": drifting, **core.counts()}
        devices |= store.devices.counts
        epoch, contributions = 0 if self._store is None else self._store.epoch, len(rounds.contributions)
        yield "epoch", "How many processes have led this store; 0 for a file.", "", {"": epoch}
        if (size := self._size_bytes()) is not None:
            yield "store_bytes", "What the store takes on its disk.", "", {"": size}
        yield "devices", "Devices by state; one may be in several.", "state", devices
        yield "classes_drifting", "Classes that depart from themselves.", "", {"": len(store.class_drift.suspected)}
        rollout_help = "Devices of the present stage of a roll-out, by what they said of it."
        yield "rollout_devices", rollout_help, "state", rollouts.counts
        offered = 0.0 if offer is None else offer.fraction
        halted = rollouts.current is not None and rollouts.current.state == "halted"
        yield "rollout_halted", "Whether a roll-out has halted.", "", {"": halted}
        yield (
            "rollout_fraction",
            "Of the devices, that a bundle is offered to; 0 for none, and while it is halted.",
            "",
            {"": offered},
        )
        yield "round", "The newest round; 0 before the first, and where sums stand.", "", {"": rounds.number}
        yield "round_open", "Whether it is open.", "", {"": rounds.phase == "open"}
        yield "round_contributions", "Contributions to it that are committed.", "", {"": contributions}
        yield "rounds_closed_total", "Rounds that were closed.", "", {"": self._counts.closed}
        if self._counts.accuracy is not None:
            accuracy_help = "Mean of what devices reported after the newest round, of all classes."
            yield "accuracy", accuracy_help, "", {"": self._counts.accuracy}
        yield "global_version", "Of the global state.", "", {"": core.state.version}

    def _size_bytes(self) -> int | None:
        if self._store is not None and time.monotonic() >= self._size_at:
            self._size_at, self._size = time.monotonic() + _SIZE_S, self._store.size_bytes()
        return self._size

    def _opened_at(self) -> float | None:
        core = self._core
        if core.rounds.number != self._opened[0]:
            self._opened = core.rounds.number, core.opened_at
        return self._opened[1]

    def collect(self) -> Iterator[Metric]:
        """All of it, for a registry; from any thread."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        info = GaugeMetricFamily("protofleet_info", "Which fleet and run this is.", labels=("fleet", "run"))
        info.add_metric(self._about, 1)
        yield info
        (families, opened_at), shown = self._newest, self.broker_certificate()
        expire = [*([] if self._address is None else expiries(self._address)), *([] if shown is None else [shown])]
        if expire:
            until = {expiry.what.replace("'s", "").replace(" ", "_"): expiry.until for expiry in expire}
            families += (("expiry_timestamp_seconds", "When what the connection hangs on expires.", "of", until),)
        if self._leads:
            age_s = 0.0 if opened_at is None else max(0.0, self._wall() - opened_at)
            families += (("round_age_seconds", "How long ago it was opened.", "", {"": age_s}),)
        for name, help_text, label, numbers in families:
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(f"protofleet_{name}", help_text, labels=(label,) if label else ())
            for value, number in numbers.items():
                family.add_metric((value,) if label else (), number)
            yield family

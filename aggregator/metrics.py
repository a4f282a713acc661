"""What an aggregator tells a monitoring system: numbers, in Prometheus' text format (version 0.0.4).

Counters count since this process started, as Prometheus expects, from the events that everybody else is told; gauges
are looked at after each turn of the server's loop, in its thread. A scraper is given the newest such look, put into
words on its own thread (`aggregator/metrics_server.py`): nothing waits for it.

No label is a device's name or anything that it says, so the number of series is fixed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from aggregator import events
from aggregator.coordinator import Coordinator
from aggregator.ingest import Cause
from aggregator.standing_coordinator import StandingCoordinator
from aggregator.standing_store import StandingTables
from contract.address import Address
from contract.certificates import Expiry, expiries

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_OUTCOMES = ("committed", "duplicate", "late", "rejected", "malformed")
_CAUSES = tuple(cause for cause in get_args(Cause) if cause)


@dataclass(frozen=True)
class _Look:
    """What the aggregator was at the end of a turn; never changed after."""

    at: float = 0.0
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
        tables: of its store.
        wall: seconds since the epoch.
        address: of the broker, whose certificate files are looked at when somebody asks.

    Attributes:
        broker_certificate: gives the one that the broker has shown, if it has.
    """

    def __init__(
        self,
        fleet: str,
        core: Coordinator | StandingCoordinator,
        tables: StandingTables,
        wall: Callable[[], float] = time.time,
        address: Address | None = None,
    ) -> None:
        self._about = _family(
            "info", "gauge", "Which fleet and run this is.", f'fleet="{fleet}",run', {core.run.hex(): 1}
        )
        self._core, self._tables, self._wall, self._address = core, tables, wall, address
        self._outcomes, self._causes = Counter(dict.fromkeys(_OUTCOMES, 0)), Counter(dict.fromkeys(_CAUSES, 0))
        self._closed = self._connections = 0
        self._is_up = False
        self._refused = len(tables.refused())
        self._opened: tuple[int, float | None] = 0, None  # the newest round, and when it opened
        self._newest = _Look()
        self.broker_certificate: Callable[[], Expiry | None] = lambda: None
        self.look()

    def __call__(self, event: events.Event) -> None:
        """Count what happened; in the aggregator's thread."""
        if isinstance(event, events.Decided):
            if event.outcome in _OUTCOMES:
                self._outcomes[event.outcome] += 1
            if event.cause:
                self._causes[event.cause] += 1
        elif isinstance(event, events.RoundClosed):
            self._closed += 1
        elif isinstance(event, events.LinkUp):
            self._connections, self._is_up = self._connections + 1, True
        elif isinstance(event, events.LinkDown):
            self._is_up = False
        elif isinstance(event, events.OrderDone):
            self._refused = len(self._tables.refused())

    def look(self) -> None:
        """See how things are, for whoever asks until the next look; in the aggregator's thread."""
        core, rounds = self._core, self._core.rounds
        devices = {"online": rounds.online, "refused": self._refused, "drifting": len(core.drift.suspected)}
        if isinstance(core, StandingCoordinator):
            devices |= {"standing": len(core.standing.present)}
        else:
            devices |= {"awaited": core.rounds.awaited_count}
        self._newest = _Look(
            at=self._wall(),
            round=rounds.number,
            is_open=isinstance(core, Coordinator) and core.rounds.phase == "open",
            opened_at=self._opened_at(),
            contributions=len(rounds.contributions),
            version=core.state.version,
            devices=devices,
            classes=len(core.class_drift.suspected),
            outcomes={**self._outcomes, "malformed": self._outcomes["malformed"] + core.skipped},
            causes=dict(self._causes),
            closed=self._closed,
            connections=self._connections,
            is_up=self._is_up,
            rollout=core.rollouts.counts,
            offered=0.0 if core.rollouts.offer is None else core.rollouts.offer.fraction,
        )

    def _opened_at(self) -> float | None:
        core = self._core
        if isinstance(core, Coordinator) and core.rounds.number != self._opened[0]:
            self._opened = core.rounds.number, core.record(core.rounds.number).opened_at
        return self._opened[1]

    def text(self) -> str:
        """All of it as Prometheus reads it; from any thread."""
        shown, files = self.broker_certificate(), [] if self._address is None else expiries(self._address)
        families = _families(self._newest, self._wall(), files if shown is None else [*files, shown])
        return self._about + "".join(_family(*each) for each in families)


def _families(
    seen: _Look, now: float, expire: Sequence[Expiry]
) -> Iterator[tuple[str, str, str, str, Mapping[str, float]]]:
    """Each metric: name, type, line of help, label, and numbers by the label's value, "" for a metric without one."""
    age_s = 0.0 if seen.opened_at is None else max(0.0, now - seen.opened_at)
    yield "devices", "gauge", "Devices by state; one may be in several.", "state", seen.devices
    yield "classes_drifting", "gauge", "Classes that depart from themselves.", "", {"": seen.classes}
    told = "Devices of the present stage of a roll-out, by what they said of it."
    yield "rollout_devices", "gauge", told, "state", seen.rollout
    yield "rollout_fraction", "gauge", "Of the devices, that a bundle is offered to.", "", {"": seen.offered}
    yield "messages_total", "counter", "Messages of devices by what became of them.", "outcome", seen.outcomes
    yield "refusals_total", "counter", "Messages that were refused, by why.", "reason", seen.causes
    yield "round", "gauge", "The newest round; 0 before the first, and where sums stand.", "", {"": seen.round}
    yield "round_open", "gauge", "Whether it is open.", "", {"": seen.is_open}
    yield "round_age_seconds", "gauge", "How long ago it was opened.", "", {"": age_s}
    yield "round_contributions", "gauge", "Contributions to it that are committed.", "", {"": seen.contributions}
    yield "rounds_closed_total", "counter", "Rounds that were closed.", "", {"": seen.closed}
    yield "global_version", "gauge", "Of the global state.", "", {"": seen.version}
    yield "broker_up", "gauge", "Whether the broker is connected.", "", {"": seen.is_up}
    yield "broker_connections_total", "counter", "Connections to the broker.", "", {"": seen.connections}
    if expire:
        until = {expiry.what.replace("'s", "").replace(" ", "_"): expiry.until for expiry in expire}
        yield "expiry_timestamp_seconds", "gauge", "When what the connection hangs on expires.", "of", until
    yield "last_turn_timestamp_seconds", "gauge", "When the aggregator's loop last went round.", "", {"": seen.at}


def _family(name: str, kind: str, told: str, label: str, samples: Mapping[str, float]) -> str:
    lines = [f"# HELP protofleet_{name} {told}", f"# TYPE protofleet_{name} {kind}"]
    for value, number in samples.items():
        of = f'{{{label}="{value}"}}' if label else ""
        lines.append(f"protofleet_{name}{of} {float(number):.17g}")
    return "\n".join(lines) + "\n"

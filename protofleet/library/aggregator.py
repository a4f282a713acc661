"""An aggregator inside a program: what `protofleet aggregate` does, with events as values."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from protofleet.aggregator.monitoring.events import Event
from protofleet.aggregator.server.service import Service
from protofleet.aggregator.settings import AggregateSettings
from protofleet.contract.settings.sources import read_settings

__all__ = ["Aggregator"]

Source = str | os.PathLike[str]


class Aggregator:
    """Runs the rounds of one fleet, or keeps its standing sums.

    Args:
        bundle: the fleet's bundle; a list where devices have several backbones.
        broker: `mqtt://host[:port]` or `mqtts://host[:port]`.
        store: where the run is stored: a SQLite file or `postgresql://…`. Created when absent, resumed otherwise.
        options: as `protofleet aggregate` takes them, with _ for -: the fields of
            `protofleet.aggregator.settings.AggregateSettings`. With `every`, `when_new` or `standing` it runs until
            `stop`.

    Raises:
        ProtofleetError: a bundle cannot be read, or an option is unknown or out of range. One line says what to do.
    """

    def __init__(self, bundle: Source | Sequence[Source], *, broker: str, store: Source, **options: Any) -> None:
        bundles = (bundle,) if isinstance(bundle, str | os.PathLike) else tuple(bundle)
        given = {"bundle": tuple(map(os.fspath, bundles)), "broker": broker, "store": store, **options}
        self._service = Service(read_settings(AggregateSettings, given))

    def run(
        self,
        on_event: Callable[[Event], None] = lambda event: None,
        on_summary: Callable[[dict[str, Any]], None] = lambda summary: None,
    ) -> dict[str, Any]:
        """Serve until the rounds are done and the devices have left, or until `stop`; returns the summary.

        Args:
            on_event: receives each event as it happens, on this thread.
            on_summary: receives the summary so far after each round. It is what `aggregate --json` writes.

        Raises:
            ProtofleetError: no broker, another aggregator on this fleet, a full disk; one line says what to do.
        """
        return self._service.run(on_event, lambda content, finished: on_summary(content))

    def stop(self) -> None:
        """End `run` within about a second. Any thread or event may call it. A new aggregator on the store continues."""
        self._service.stop()

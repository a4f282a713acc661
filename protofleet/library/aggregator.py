"""An aggregator inside a program: what `protofleet aggregate` does, with events as values."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from protofleet.aggregator.database import place_of
from protofleet.aggregator.metrics.metrics_server import parse_metrics
from protofleet.aggregator.monitoring.events import Event
from protofleet.aggregator.server.service import Service, settings_of
from protofleet.contract.mqtt.link import Address

__all__ = ["Aggregator"]

Source = str | os.PathLike[str]


class Aggregator:
    """Runs the rounds of one fleet, or keeps its standing sums.

    Args:
        bundle: the fleet's bundle; a list where devices have several backbones.
        broker: `mqtt://host[:port]` or `mqtts://host[:port]`.
        store: where the run is stored: a SQLite file or `postgresql://…`. Created when absent, resumed otherwise.
        fleet: the fleet's id; it is part of every topic.
        calibrate: end with one FFC round. Default: yes where there is one bundle, or sums stand.
        ca, cert, key, crl: PEM files, for `mqtts://`.
        patience_s: how long the broker may be absent at the start. Default: 60 s, and without limit with `every` or
            `when_new`.
        sign: file of the Ed25519 private key that signs every published message.
        worker: this is one of several processes on one store (`postgresql://…`). One of them leads at a time.
        take_over, new_run, metrics, and further options: as `protofleet aggregate` takes them, with _ for -: `rounds`,
            `method`, `min_clients`, `deadline`, `fraction`, `seed`, `min_samples`, `max_samples`, `max_share`,
            `suspects`, `vouch`, `ridge`, `form`, `rule`, `encoding`, `sums_encoding`, `limit_bytes`, `every`,
            `when_new`, `window`, `open_clients`, `max_clients`, `standing`, `enrolled`; with `every`, `when_new` or
            `standing` it runs until `stop`.

    Raises:
        ProtofleetError: a bundle cannot be read, or an option is out of range. One line says what to do.
    """

    def __init__(
        self,
        bundle: Source | Sequence[Source],
        *,
        broker: str,
        store: Source,
        fleet: str = "fleet",
        calibrate: bool | None = None,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        crl: str | None = None,
        patience_s: float | None = None,
        take_over: bool = False,
        new_run: bool = False,
        metrics: str | None = None,
        sign: str | None = None,
        worker: bool = False,
        **options: Any,
    ) -> None:
        bundles = [Path(bundle)] if isinstance(bundle, str | os.PathLike) else [Path(path) for path in bundle]
        if calibrate is None:
            calibrate = len(bundles) == 1 or bool(options.get("standing"))
        settings = settings_of(calibrate=calibrate, **options)
        address = Address.parse(broker, ca_file=ca, cert_file=cert, key_file=key, crl_file=crl)
        served = None if metrics is None else parse_metrics(metrics)
        where = place_of(store)
        about = (patience_s, take_over, new_run, served, sign, worker)
        self._service = Service(bundles, address, where, fleet, settings, *about)

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

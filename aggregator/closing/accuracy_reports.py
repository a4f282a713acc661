"""What births say of their devices' accuracy after a round, kept with the next batch."""

from __future__ import annotations

from protofleet.aggregator.monitoring.accuracy import AccuracyReport, FleetAccuracy, fleet_accuracy
from protofleet.aggregator.store.durable_store import Store
from protofleet.contract.accuracy import read_accuracy
from protofleet.contract.wire.messages import Status

__all__ = ["AccuracyReports"]


class AccuracyReports:
    """Of one run.

    Attributes:
        batches: how often reports became durable.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._heard: dict[tuple[int, str], AccuracyReport] = {}  # not durable yet
        self.batches = 0

    def hear(self, device: str, message: Status, *, max_samples: int) -> None:
        """Take what a status says of a round of this run."""
        reported = read_accuracy(message.metrics, self._store.run, max_samples=max_samples)
        if reported is not None and self._store.awaits_accuracy(reported[0], device):
            self._heard.setdefault((reported[0], device), AccuracyReport(reported[0], device, reported[1]))

    def keep(self) -> None:
        """Make the reports since the last call durable."""
        if self._heard:
            self._store.keep_accuracy(list(self._heard.values()))
            self._heard.clear()
            self.batches += 1

    def after(self, round: int) -> FleetAccuracy | None:
        """The accuracy that devices reported after a round; None when none did."""
        return fleet_accuracy(self._store.accuracy(round))

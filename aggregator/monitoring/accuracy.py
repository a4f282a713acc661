"""The accuracy that a fleet's devices reported after a round, summed up.

There are two averages, because neither is the truth alone. `mean` counts every device the same. `pooled` counts every
test photo the same, so that a device that claims very many weighs as much.

A report counts only from a device that contributed to a closed round (`store.keep_accuracy`), once. A device can report
any value from 0 to 1 of itself: over n devices, one that lies moves the mean by 1 / n at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protofleet.contract.accuracy import SHARES, Accuracy

__all__ = ["AccuracyReport", "FleetAccuracy", "fleet_accuracy"]

_OVER_OWN_PHOTOS = ("own_classes", "among_own", "shipped_among_own", "alone_among_own")


@dataclass(frozen=True)
class AccuracyReport:
    """One device's report on one round."""

    round: int
    device: str
    accuracy: Accuracy


@dataclass(frozen=True)
class FleetAccuracy:
    """The accuracy of a fleet after a round.

    Attributes:
        by_device: each device's report, by its id.
        mean: by name of the figure, the plain mean over the devices that have it; also of `classes` and `own`.
        pooled: each share weighted by its test photos, over the devices that report how many these are.
        worst: the device that names the fewest of its test photos right, the first by id among equals.
    """

    by_device: Mapping[str, Accuracy]
    mean: Mapping[str, float]
    pooled: Mapping[str, float]
    worst: str

    @property
    def samples(self) -> int:
        """Test photos of all devices together."""
        return sum(accuracy.samples for accuracy in self.by_device.values())

    def facts(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "devices": len(self.by_device),
            "samples": self.samples,
            "mean": dict(self.mean),
            "pooled": dict(self.pooled),
            "worst": {"device": self.worst, "all_classes": self.by_device[self.worst].all_classes},
            "by_device": {device: accuracy.facts() for device, accuracy in self.by_device.items()},
        }


def fleet_accuracy(by_device: Mapping[str, Accuracy]) -> FleetAccuracy | None:
    """The reports of all devices, summed up; None without a report."""
    if not by_device:
        return None
    mean, pooled = {}, {}
    for name in (*SHARES, "shipped_among_own", "classes", "own"):
        reports = [report for report in by_device.values() if getattr(report, name) is not None]
        if reports:
            mean[name] = sum(getattr(report, name) for report in reports) / len(reports)
        if name not in ("classes", "own") and (photos := sum(_photos(report, name) for report in reports)):
            pooled[name] = sum(getattr(report, name) * _photos(report, name) for report in reports) / photos
    worst = min(sorted(by_device), key=lambda device: by_device[device].all_classes)
    return FleetAccuracy(dict(sorted(by_device.items())), mean, pooled, worst)


def _photos(accuracy: Accuracy, name: str) -> int:
    """How many test photos a share is of; 0 where that was not said."""
    return (accuracy.own_samples or 0) if name in _OVER_OWN_PHOTOS else accuracy.samples

"""What a fleet's devices said of their accuracy after a round, summed up.

Two averages stand side by side, since neither is the truth alone: `mean` counts every device the same, `pooled` counts
every test photo the same, so that one that claims very many weighs as much. Only who contributed to a closed round is
heard of it (`store.keep_accuracy`), once. A device can say of itself what it likes within 0 to 1: over n devices, one
that lies moves the mean by 1 / n at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contract.accuracy import SHARES, Accuracy

__all__ = ["FleetAccuracy", "Told", "fleet_accuracy"]

_OVER_OWN_PHOTOS = ("own_classes", "among_own", "shipped_among_own", "alone_among_own")


@dataclass(frozen=True)
class Told:
    """What one device said of one round."""

    round: int
    device: str
    accuracy: Accuracy


@dataclass(frozen=True)
class FleetAccuracy:
    """The accuracy of a fleet after a round.

    Attributes:
        by_device: what each device said, by its id.
        mean: by name of the figure, the plain mean over the devices that have it; also of `classes` and `own`.
        pooled: each share weighted by the test photos that it is of, over the devices that say how many these are.
        worst: the device that names the fewest of its test photos right, the first by id among equals.
    """

    by_device: Mapping[str, Accuracy]
    mean: Mapping[str, float]
    pooled: Mapping[str, float]
    worst: str

    @property
    def samples(self) -> int:
        """Test photos of all devices together."""
        return sum(told.samples for told in self.by_device.values())

    def facts(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "devices": len(self.by_device),
            "samples": self.samples,
            "mean": dict(self.mean),
            "pooled": dict(self.pooled),
            "worst": {"device": self.worst, "all_classes": self.by_device[self.worst].all_classes},
            "by_device": {device: told.facts() for device, told in self.by_device.items()},
        }


def fleet_accuracy(by_device: Mapping[str, Accuracy]) -> FleetAccuracy | None:
    """The sum of what devices said; None where nobody said anything."""
    if not by_device:
        return None
    mean, pooled = {}, {}
    for name in (*SHARES, "shipped_among_own", "classes", "own"):
        said = [each for each in by_device.values() if getattr(each, name) is not None]
        if said:
            mean[name] = sum(getattr(each, name) for each in said) / len(said)
        if name not in ("classes", "own") and (photos := sum(_photos(each, name) for each in said)):
            pooled[name] = sum(getattr(each, name) * _photos(each, name) for each in said) / photos
    worst = min(sorted(by_device), key=lambda device: by_device[device].all_classes)
    return FleetAccuracy(dict(sorted(by_device.items())), mean, pooled, worst)


def _photos(told: Accuracy, name: str) -> int:
    """How many test photos a share is of; 0 where that was not said."""
    return (told.own_samples or 0) if name in _OVER_OWN_PHOTOS else told.samples

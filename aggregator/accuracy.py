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

_OVER_ALL_PHOTOS = tuple(name for name in SHARES if name != "own_classes")


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
        mean: by name of the figure, the plain mean over the devices that have it.
        pooled: the same weighted by their test photos, of the figures that are over all of them.
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
    for name in SHARES:
        told = [(getattr(each, name), each.samples) for each in by_device.values() if getattr(each, name) is not None]
        if told:
            mean[name] = sum(share for share, _ in told) / len(told)
            if name in _OVER_ALL_PHOTOS:
                pooled[name] = sum(share * count for share, count in told) / sum(count for _, count in told)
    worst = min(sorted(by_device), key=lambda device: by_device[device].all_classes)
    return FleetAccuracy(dict(sorted(by_device.items())), mean, pooled, worst)

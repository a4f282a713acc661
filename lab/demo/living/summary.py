"""`summary.json` of the living demo, schema `protofleet.living/1`: everything its page says, in plain values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofleet.lab.demo.living.figures import Asked, Day
from protofleet.lab.demo.living.life import Life
from protofleet.lab.demo.living.story import DAYS, DEVICES, GROWN, HAPPENINGS, Device
from protofleet.lab.demo.shown_images import png

__all__ = ["SCHEMA", "Ended", "summarise"]

SCHEMA = "protofleet.living/1"
SHOWN = (1, GROWN - 1, DAYS)


@dataclass(frozen=True, eq=False)
class Ended:
    """What the end of the month was found to be.

    Attributes:
        never: the month's fleet beside one in which none of it happened (`proofs.compare`).
        generations: what the aggregator holds of each device, by number, also of those that were taken out.
        outcomes: of each device's contributions, as its journal counts them.
        histories: each device's generations.
        shipped: what the devices of the other fleet say of the bundle as shipped (docs/accuracy.md), by name.
        head_error: of the head that was published, beside one of all photos in one place.
        equal_to_pooled: on how many test images both answer the same.
        equal_to_predict: by device, on how many `protofleet predict --state` answers as the page's figures have it.
    """

    never: dict[str, Any]
    generations: Mapping[str, int]
    outcomes: Mapping[str, Mapping[str, int]]
    histories: Mapping[str, list[dict[str, Any]]]
    shipped: Mapping[str, float]
    head_error: float
    equal_to_pooled: int
    equal_to_predict: Mapping[str, int]


def summarise(life: Life, ended: Ended, *, seed: int) -> dict[str, Any]:
    """The summary, but for `seconds`, which its caller knows."""
    days, labels, images = life.days, life.labels, life.images
    devices = [_device(device, life, ended) for device in DEVICES]
    manifest = life.bundle.bundle.manifest
    return {
        "schema": SCHEMA,
        "dataset": images.name,
        "seed": seed,
        "labels": list(labels),
        "new_label": labels[-1],
        "test_images": len(images.test),
        "new_test_images": int((images.test.y == images.classes - 1).sum()),
        "days": [_day(day) for day in days],
        "happenings": _happenings(labels[-1]),
        "devices": devices,
        "bundle_as_shipped": float(np.mean(list(ended.shipped.values()))),
        "forgotten": None if life.gone is None else asdict(life.gone),
        "never": ended.never,
        "pooled_at_the_end": {"relative_error": ended.head_error, "equal_predictions": ended.equal_to_pooled},
        "equal_to_predict": dict(ended.equal_to_predict),
        "contributions": _contributions(ended),
        "device_peak_rss_bytes": max(device["peak_rss_bytes"] for device in devices),
        "shown_days": list(SHOWN),
        "shown": _shown(life),
        "backbone": {
            "name": manifest.backbone,
            "features": manifest.features,
            "provenance": manifest.provenance,
            "bundles": [life.has[DEVICES[0].name].sha256.hex()] + [sha256.hex() for sha256 in manifest.extended],
        },
        "machine": {"cores": os.cpu_count()},
    }


def _day(day: Day) -> dict[str, Any]:
    return {
        "day": day.number,
        "awake": list(day.awake),
        "photos": dict(day.photos),
        "global_version": day.version,
        "fleet": _figures(day.fleet),
        "devices": {name: _figures(asked) for name, asked in day.devices.items()},
        "pooled": _figures(day.pooled),
        "alone": {
            part: float(np.mean([getattr(asked, part) for asked in day.alone.values()])) for part in ("right", "new")
        },
    }


def _figures(asked: Asked) -> dict[str, float]:
    return {"right": asked.right, "new": asked.new}


def _happenings(new: str) -> list[dict[str, Any]]:
    """What happened, those that are marked in the chart with a number each."""
    lines, number = [], 0
    for happening in HAPPENINGS:
        number += happening.marked
        facts = {**asdict(happening), "words": happening.words.format(new=new)}
        lines.append(facts | {"number": number if happening.marked else None})
    return lines


def _device(device: Device, life: Life, ended: Ended) -> dict[str, Any]:
    history, outcomes = ended.histories[device.name], ended.outcomes[device.name]
    present_days = [day.number for day in life.days if device.is_there(day.number)]
    return {
        "id": device.name,
        "holds": [life.labels[number] for number in device.holds],
        "on_mains": device.stays_awake,
        "joins": device.joins,
        "leaves": None if device.is_there(DAYS) else device.leaves,
        "awake": [day.number for day in life.days if device.name in day.awake],
        "starts": life.starts[device.name],
        "photos": len(life.month.there(device, present_days[-1])),
        "sums": len(history),
        "outcomes": dict(outcomes),
        "uplink_bytes": sum(line["uplink_bytes"] for line in history),
        "peak_rss_bytes": max(line["peak_rss_bytes"] for line in history),
    }


def _contributions(ended: Ended) -> dict[str, int]:
    """By how they ended, as devices know it. `counted` are those that stood or stand: `duplicate` were committed, too,
    and their receipt was lost when the aggregator was killed. `late` were replaced before they had a receipt."""
    names = ("sent", "committed", "duplicate", "late", "rejected", "pending")
    counts = {name: sum(outcomes.get(name, 0) for outcomes in ended.outcomes.values()) for name in names}
    return counts | {
        "counted": counts["committed"] + counts["duplicate"],
        "generations_held": sum(ended.generations.values()),
    }


def _shown(life: Life) -> list[dict[str, Any]]:
    """The first test image of each class, none picked, and what the first device answered on three days."""
    first, images = DEVICES[0].name, life.images
    answers: list[NDArray[np.int64]] = [life.days[number - 1].devices[first].answers for number in SHOWN]
    shown = []
    for number, label in enumerate(life.labels):
        row = int(np.flatnonzero(images.test.y == number)[0])
        names = [life.labels[int(classes[row])] for classes in answers]
        shown.append({"png": png(images.test.x[row]), "label": label, "new": label == life.labels[-1], "said": names})
    return shown

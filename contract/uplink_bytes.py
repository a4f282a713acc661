"""How many bytes a device sends up in a round: real contributions, encoded as they travel.

In order: `sent_bytes` makes the statistic of a device that holds every class, wraps it as a contribution and encodes
it, as the method says its numbers travel (class rows in f32, FFC's sums in f64: decision 035), which is what the
aggregator announces unless told otherwise. `uplink_bytes` lays a bundle's beside what FedAvg would send. `rungs` are
the ways of a frozen backbone, each with its bytes. All who tell a person about the uplink ask here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from contract.bundle import Manifest
from contract.messages import Contribution
from contract.methods import METHODS, Method, Value, closing_method, method
from contract.statistics import Participation
from contract.wire import MAX_MESSAGE_BYTES, encode

__all__ = ["Rung", "counted_bytes", "payload_bytes", "rungs", "sent_bytes", "uplink_bytes"]

_MADE_NUMBERS = 1 << 22  # in the statistic of a rung whose contribution is made and measured


@dataclasses.dataclass(frozen=True)
class Rung:
    """One way of a frozen backbone: a method that trains nothing, and its settings.

    Attributes:
        name: the method, and the settings that tell this way from its others.
        hyper: settled.
        beside: those that differ from the bundle's own, so that a bundle has to be exported for them; empty where the
            bundle serves as it is.
        solved_with: those that differ, and that the aggregator is told instead.
        uplink_bytes: of a device that holds every class, once; of more than 4 million numbers these alone; None for
            what no message can hold.
    """

    name: str
    method: Method
    hyper: Mapping[str, Value]
    beside: Mapping[str, Value]
    uplink_bytes: int | None
    solved_with: Mapping[str, Value] = dataclasses.field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "way": self.name,
            "method": self.method.name,
            "set": dict(self.beside),
            "solved_with": dict(self.solved_with),
            "sends": self.method.sends,
            "bytes": self.uplink_bytes,
        }


def rungs(manifest: Manifest) -> list[Rung]:
    """Every way in which devices with this backbone can answer without training, fewest bytes first: the methods that
    train nothing as the bundle has them, and with the settings that they name as worth comparing."""
    found = []
    for each in METHODS.values():
        if each.trains:
            continue
        own, variants = each.settled_in(manifest.hyper), each.variants(manifest.features)
        settings = [own, *({**own, **given} for given in variants)]
        for hyper in [one for place, one in enumerate(settings) if one not in settings[:place]]:
            differs = {name: value for name, value in hyper.items() if value != own[name]}
            solved = {name: differs.pop(name) for name in each.solved_with if name in differs}
            found.append(
                Rung(_name(each, hyper, variants), each, hyper, differs, _told_bytes(manifest, each, hyper), solved)
            )
    return sorted(found, key=lambda rung: math.inf if rung.uplink_bytes is None else rung.uplink_bytes)


def _told_bytes(manifest: Manifest, found: Method, hyper: Mapping[str, Value]) -> int | None:
    """Of a rung: exact, or of a large one without what frames its numbers, so that a list of many costs no memory."""
    if not _can_be_sent(manifest, found, hyper):
        return None
    classes, width, groups = _sizes(manifest, found, hyper)
    if found.statistic.numbers(classes, width) <= _MADE_NUMBERS:
        return payload_bytes(manifest, found, hyper)
    return counted_bytes(found, classes, width, groups)


def _name(found: Method, hyper: Mapping[str, Value], variants: Iterable[Mapping[str, Value]]) -> str:
    """With every setting that is not the default, and the number by which this way differs from others: `ncm`,
    `fedcof groups=4`, `ffc project=256`. A word speaks for itself: `ffc discriminant`."""
    numbers = {name for given in variants for name, value in given.items() if not isinstance(value, str)}
    told = {k: v for k, v in hyper.items() if v != found.hyper[k].default or (k in numbers and v)}
    return " ".join([found.name, *(v if isinstance(v, str) else f"{k}={v}" for k, v in told.items())])


def uplink_bytes(manifest: Manifest) -> dict[str, int | None]:
    """Payload bytes of a round of the bundle's own method and of the one that closes runs, beside `fedavg`; None for
    what no message can hold: a manifest may claim any width."""
    return {"fedavg": _fedavg_bytes(manifest)} | {
        found.name: payload_bytes(manifest, found) if _can_be_sent(manifest, found) else None
        for found in (method(manifest.method), closing_method())
    }


def payload_bytes(manifest: Manifest, found: Method, hyper: Mapping[str, Value] | None = None) -> int:
    """Payload bytes of a device that holds every class, in a round of this method.

    Args:
        hyper: the method's, settled; the bundle's own when None.
    """
    return sent_bytes(found, *_sizes(manifest, found, hyper))


def sent_bytes(found: Method, classes: int, width: int, groups: int = 1) -> int:
    """The same for C classes, rows of `width` numbers, and so many of them for each class."""
    statistic = found.statistic.zero(classes, width)
    if not isinstance(statistic, Participation):
        room = found.statistic.GROUPS
        samples = 1000 if found.statistic.COUNTED else 1
        counts = np.where(np.arange(classes * room) % room < groups, samples, 0)
        statistic = dataclasses.replace(statistic, counts=counts)  # type: ignore[type-var]
    extractor = bytes(32) if found.extractor == "bundle" else b""
    contribution = Contribution.of(
        statistic, run=bytes(4), round=1, method=found.name, bundle=bytes(32), extractor=extractor
    )
    return len(encode(contribution, found.encoding))


def counted_bytes(found: Method, classes: int, width: int, groups: int = 1) -> int:
    """The same by its numbers alone, without what frames them: for what may be too large to be made."""
    numbers = found.statistic.numbers(classes, width) * groups // found.statistic.GROUPS
    return (8 if found.encoding == "f64" else 4) * numbers


def _can_be_sent(manifest: Manifest, found: Method, hyper: Mapping[str, Value] | None = None) -> bool:
    """Whether a message can hold it, and all the room that is made for it: asked before anything is allocated."""
    classes, width, _ = _sizes(manifest, found, hyper)
    return counted_bytes(found, classes, width, found.statistic.GROUPS) <= MAX_MESSAGE_BYTES


def _sizes(manifest: Manifest, found: Method, hyper: Mapping[str, Value] | None) -> tuple[int, int, int]:
    """Classes, the width of a row, and rows of each class."""
    settled = found.settled_in(manifest.hyper) if hyper is None else hyper
    return manifest.classes, found.row_width(settled, manifest.features), found.groups(settled)


def _fedavg_bytes(manifest: Manifest) -> int:
    """Every trained number as float32. A bundle that trains nothing is given the head that FedAvg would need."""
    head = 0 if manifest.trainable else manifest.classes * manifest.features
    return 4 * (manifest.parameter_count + head)

"""How many bytes a device sends up in a round: real contributions, encoded as they travel.

In order: `sent_bytes` makes the statistic of a device that holds every class, wraps it as a contribution and encodes
it, as the method says its numbers travel (class rows in f32, FFC's sums in f64: decision 035), which is what the
aggregator announces unless told otherwise. `uplink_bytes` lays a bundle's beside what FedAvg would send. All who tell a
person about the uplink ask here.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from contract.bundle import Manifest
from contract.messages import Contribution
from contract.methods import Method, closing_method, method
from contract.statistics import Participation
from contract.wire import MAX_MESSAGE_BYTES, encode

__all__ = ["counted_bytes", "payload_bytes", "sent_bytes", "uplink_bytes"]


def uplink_bytes(manifest: Manifest) -> dict[str, int | None]:
    """Payload bytes of a round of the bundle's own method and of the one that closes runs, beside `fedavg`; None for
    what no message can hold: a manifest may claim any width."""
    return {"fedavg": _fedavg_bytes(manifest)} | {
        found.name: payload_bytes(manifest, found) if _can_be_sent(manifest, found) else None
        for found in (method(manifest.method), closing_method())
    }


def payload_bytes(manifest: Manifest, found: Method) -> int:
    """Payload bytes of a device that holds every class, in a round of this method."""
    return sent_bytes(found, *_sizes(manifest, found))


def sent_bytes(found: Method, classes: int, width: int, groups: int = 1) -> int:
    """The same for C classes, rows of `width` numbers, and so many of them for each class."""
    statistic = found.statistic.zero(classes, width)
    if not isinstance(statistic, Participation):
        room = found.statistic.GROUPS
        counts = np.where(np.arange(classes * room) % room < groups, 1000, 0)
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


def _can_be_sent(manifest: Manifest, found: Method) -> bool:
    """Whether a message can hold it, and all the room that is made for it: asked before anything is allocated."""
    classes, width, _ = _sizes(manifest, found)
    return counted_bytes(found, classes, width, found.statistic.GROUPS) <= MAX_MESSAGE_BYTES


def _sizes(manifest: Manifest, found: Method) -> tuple[int, int, int]:
    """Classes, the width of a row, and rows of each class."""
    hyper = found.settled_in(manifest.hyper)
    return manifest.classes, found.row_width(hyper, manifest.features), found.groups(hyper)


def _fedavg_bytes(manifest: Manifest) -> int:
    """Every trained number as float32. A bundle that trains nothing is given the head that FedAvg would need."""
    head = 0 if manifest.trainable else manifest.classes * manifest.features
    return 4 * (manifest.parameter_count + head)

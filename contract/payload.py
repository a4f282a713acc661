"""How many bytes a device sends up in a round: real contributions, encoded as they travel.

In order: `sent` makes the statistic of a device that holds every class, as the method's row says which; `payload_bytes`
wraps it as a contribution and encodes it, class rows in f32 and FFC's sums in f64 (decision 035), which is what the
aggregator announces unless told otherwise. `uplink_bytes` lays them beside what FedAvg would send. All who tell a
person about the uplink ask here.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from contract.bundle import Manifest
from contract.messages import Contribution, Encoding
from contract.methods import Kind, calibration, method
from contract.statistics import ClassMeans, FeatureGram, HyperKnowledge, Statistic
from contract.wire import MAX_MESSAGE_BYTES, encode

__all__ = ["encoding_of", "payload_bytes", "sent", "sent_bytes", "uplink_bytes"]


def uplink_bytes(manifest: Manifest) -> dict[str, int | None]:
    """Payload bytes of a round of each kind that the bundle allows, its own method's and FFC's, beside `fedavg`; None
    for what no message can hold: a manifest may claim any width."""
    return {"fedavg": _fedavg_bytes(manifest)} | {
        name: payload_bytes(manifest, name) if _can_be_sent(manifest, name) else None
        for name in (manifest.method, "ffc")
    }


def payload_bytes(manifest: Manifest, name: str) -> int:
    """Payload bytes of a device that holds every class, in a round of the method `name`.

    Raises:
        MethodError: there is no such method.
    """
    return sent_bytes(method(name).statistic, manifest.classes, _width(manifest, name), name)


def sent_bytes(kind: Kind, classes: int, width: int, name: str = "fedproto") -> int:
    """The same for a statistic of `classes` rows of `width` numbers, sent in a round of the method `name`."""
    statistic = sent(kind, classes, width)
    contribution = Contribution.of(statistic, run=bytes(4), round=1, method=name, bundle=bytes(32))
    return len(encode(contribution, encoding_of(kind)))


def encoding_of(kind: Kind) -> Encoding:
    """How the numbers of a statistic travel unless the aggregator announces another encoding."""
    return "f64" if kind == "feature-gram" else "f32"


def sent(kind: Kind, classes: int, width: int) -> Statistic:
    """A statistic as a device sends it that has a thousand examples of every class: its size is that of any such."""
    if kind == "feature-gram":
        return _of_all(FeatureGram.zero(classes, width))
    if kind == "hyper-knowledge":
        return _of_all(HyperKnowledge.zero(classes, width))
    rows = ClassMeans.zero(classes, width)
    return rows if kind == "participation" else _of_all(rows)


def _width(manifest: Manifest, name: str) -> int:
    gram = method(name).statistic == "feature-gram"
    return calibration(manifest.hyper).width(manifest.features) if gram else manifest.features


def _can_be_sent(manifest: Manifest, name: str) -> bool:
    """Whether a message can hold it; asked before anything is allocated."""
    kind, classes, width = method(name).statistic, manifest.classes, _width(manifest, name)
    triangle = width * (width + 1) // 2 if kind == "feature-gram" else 0
    soft = classes**2 if kind == "hyper-knowledge" else 0
    return (8 if triangle else 4) * (classes * width + triangle + soft) <= MAX_MESSAGE_BYTES


def _of_all(zero: Statistic) -> Statistic:
    return dataclasses.replace(zero, counts=np.full(zero.classes, 1000))


def _fedavg_bytes(manifest: Manifest) -> int:
    """Every trained number as float32. A bundle that trains nothing is given the head that FedAvg would need."""
    head = 0 if manifest.trainable else manifest.classes * manifest.features
    return 4 * (manifest.parameter_count + head)

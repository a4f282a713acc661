"""How many bytes a device sends up in a round. The numbers are measured on real contributions in their wire encoding.

1. `sent_bytes` makes the statistic of a device that holds every class, wraps it as a contribution and encodes it. The
   encoding is the method's own: class rows in f32, FFC's sums in f64 (decision 035). The aggregator announces this
   encoding unless it was told to use another one.
2. `uplink_bytes` compares a bundle's bytes with the bytes that FedAvg would send.
3. `rungs` lists the ways of a frozen backbone, each with its bytes.

Every command that reports uplink bytes calls this module.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from protofleet.contract.bundle.bundle_file import Bundle, Manifest
from protofleet.contract.methods import METHODS, Method, Value, closing_method, method
from protofleet.contract.sums.statistics import Participation
from protofleet.contract.wire.codec import MAX_MESSAGE_BYTES, encode
from protofleet.contract.wire.encodings import ENCODINGS
from protofleet.contract.wire.messages import Contribution

__all__ = ["Rung", "counted_bytes", "payload_bytes", "rungs", "sent_bytes", "uplink_bytes"]

_MADE_NUMBERS = 1 << 22  # in the statistic of a rung whose contribution is made and measured


@dataclasses.dataclass(frozen=True)
class Rung:
    """One way of a frozen backbone: a method that trains nothing, and its settings.

    Attributes:
        name: the name of the method, with the settings that distinguish this way from the method's other ways.
        hyper: the resolved hyper-parameters.
        beside: the hyper-parameters that differ from the bundle's own. A new bundle must be exported for them. Empty
            where the bundle can be used as it is.
        solved_with: the hyper-parameters that differ, but that only the aggregator needs (`Method.solved_with`).
        uplink_bytes: the bytes that a device with every class sends in one round. For more than 4 million numbers, the
            bytes of the numbers alone. None if no message can hold them.
    """

    name: str
    method: Method
    hyper: Mapping[str, Value]
    beside: Mapping[str, Value]
    uplink_bytes: int | None
    solved_with: Mapping[str, Value] = dataclasses.field(default_factory=dict)

    def of_bundle(self, bundle: Bundle) -> Bundle:
        """The bundle as if it was exported with this method and these settings, as far as a round needs it."""
        named = {"method": self.method.name, "head": self.method.heads[0], "hyper": dict(self.hyper)}
        return dataclasses.replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, **named))

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
    """Every way in which devices with this backbone can answer without training, fewest bytes first.

    These are the methods that train nothing: with the bundle's settings, and with each of the method's `variants`.
    """
    ways = []
    for rule in METHODS.values():
        if rule.trains:
            continue
        own, variants = rule.resolved_in(manifest.hyper), rule.variants(manifest.features)
        settings = [own, *({**own, **variant} for variant in variants)]
        for hyper in [candidate for position, candidate in enumerate(settings) if candidate not in settings[:position]]:
            differs = {key: value for key, value in hyper.items() if value != own[key]}
            by_aggregator = {key: differs.pop(key) for key in rule.solved_with if key in differs}
            name, size = _name(rule, hyper, variants), _rung_bytes(manifest, rule, hyper)
            ways.append(Rung(name, rule, hyper, differs, size, by_aggregator))
    return sorted(ways, key=lambda rung: math.inf if rung.uplink_bytes is None else rung.uplink_bytes)


def _rung_bytes(manifest: Manifest, rule: Method, hyper: Mapping[str, Value]) -> int | None:
    """The uplink bytes of a rung. They are exact, but for a large rung: there the bytes of the numbers alone, so that
    listing many rungs costs no memory."""
    if not _can_be_sent(manifest, rule, hyper):
        return None
    classes, width, groups = _sizes(manifest, rule, hyper)
    if rule.statistic.numbers(classes, width) <= _MADE_NUMBERS:
        return payload_bytes(manifest, rule, hyper)
    return counted_bytes(rule, classes, width, groups)


def _name(rule: Method, hyper: Mapping[str, Value], variants: Iterable[Mapping[str, Value]]) -> str:
    """The name of a way: the method, every setting that is not the default, and the numbers by which the method's ways
    differ: `ncm`, `fedcof groups=4`, `ffc project=256`. A setting that is a word stands without its name:
    `ffc discriminant`."""
    numbers = {name for variant in variants for name, value in variant.items() if not isinstance(value, str)}
    shown = {k: v for k, v in hyper.items() if v != rule.hyper[k].default or (k in numbers and v)}
    return " ".join([rule.name, *(v if isinstance(v, str) else f"{k}={v}" for k, v in shown.items())])


def uplink_bytes(manifest: Manifest) -> dict[str, int | None]:
    """Payload bytes of a round, by method: `fedavg`, the bundle's own method, and the method that closes runs.

    None means that no message can hold the statistic: a manifest may claim any width.
    """
    return {"fedavg": _fedavg_bytes(manifest)} | {
        rule.name: payload_bytes(manifest, rule) if _can_be_sent(manifest, rule) else None
        for rule in (method(manifest.method), closing_method())
    }


def payload_bytes(manifest: Manifest, rule: Method, hyper: Mapping[str, Value] | None = None) -> int:
    """Payload bytes of a device that holds every class, in a round of this method.

    Args:
        hyper: the method's, resolved; the bundle's own when None.
    """
    return sent_bytes(rule, *_sizes(manifest, rule, hyper))


def sent_bytes(rule: Method, classes: int, width: int, groups: int = 1) -> int:
    """Payload bytes for C classes whose rows have `width` numbers, with `groups` rows for each class."""
    statistic = rule.statistic.zero(classes, width)
    if not isinstance(statistic, Participation):
        room = rule.statistic.GROUPS
        samples = 1000 if rule.statistic.COUNTED else 1
        counts = np.where(np.arange(classes * room) % room < groups, samples, 0)
        statistic = dataclasses.replace(statistic, counts=counts)  # type: ignore[type-var]
    extractor = bytes(32) if rule.extractor == "bundle" else b""
    contribution = Contribution.of(
        statistic, run=bytes(4), round=1, method=rule.name, bundle=bytes(32), extractor=extractor
    )
    return len(encode(contribution, rule.encoding))


def counted_bytes(rule: Method, classes: int, width: int, groups: int = 1) -> int:
    """Bytes of the numbers alone, without the CBOR around them: for a statistic that may be too large to be built."""
    numbers = rule.statistic.numbers(classes, width) * groups // rule.statistic.GROUPS
    return ENCODINGS[rule.encoding].number_bytes * numbers


def _can_be_sent(manifest: Manifest, rule: Method, hyper: Mapping[str, Value] | None = None) -> bool:
    """Whether a message can hold the statistic with all its groups. To be checked before anything is allocated."""
    classes, width, _ = _sizes(manifest, rule, hyper)
    return counted_bytes(rule, classes, width, rule.statistic.GROUPS) <= MAX_MESSAGE_BYTES


def _sizes(manifest: Manifest, rule: Method, hyper: Mapping[str, Value] | None) -> tuple[int, int, int]:
    """Classes, the width of a row, and rows of each class."""
    settled = rule.resolved_in(manifest.hyper) if hyper is None else hyper
    return manifest.classes, rule.row_width(settled, manifest.features), rule.groups(settled)


def _fedavg_bytes(manifest: Manifest) -> int:
    """Every trained number as float32. For a bundle that trains nothing, the head that FedAvg would need is counted."""
    head = 0 if manifest.trainable else manifest.classes * manifest.features
    return 4 * (manifest.parameter_count + head)

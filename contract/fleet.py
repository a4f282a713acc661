"""Whether devices with different bundles can be one fleet.

FedProto's devices may have different backbones (its model-heterogeneous setting): all that they share is the space of
prototypes. What must agree is what the aggregator merges and what comes back: the method, the classes and their order,
the feature width, what the method says must agree (how contributions are weighted, say), and state tensors that it
shares. The backbone, the image size, the batch and the settings of local training are each device's own. A round over
the bundle's extractor is not possible, since sums of features only add up over one.

Where devices share the extractor and train nothing, a fleet can grow: bundles whose classes are the first of another's,
in its order, are of that one's fleet, since a class number means the same to both. The longest list is the fleet's
(docs/decisions/125).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from contract.bundle import Bundle, Manifest
from contract.errors import BundleError
from contract.messages import MAX_BUNDLES
from contract.methods import closing_method, method

__all__ = ["Roster", "announced_lists", "check_fleet", "further_bundles", "list_digest"]


@dataclass(frozen=True)
class Roster:
    """The bundles of one fleet.

    Attributes:
        manifest, bundle: of the bundle with the longest list of classes, and its sha256 (32 bytes).
        others: sha256 of bundles of other backbones.
        shorter: how many classes those have that are of the same extractor and begin the same list, by sha256: bundles
            that were given, and those that they extend. Those with more classes come first.
    """

    manifest: Manifest
    bundle: bytes
    others: tuple[bytes, ...]
    shorter: Mapping[bytes, int]


def list_digest(labels: Sequence[str]) -> bytes:
    """What stands for a list of classes on the wire: 8 bytes of the SHA-256 of its names as a JSON array."""
    return hashlib.sha256(msgspec.json.encode(list(labels))).digest()[:8]


def announced_lists(manifest: Manifest, shorter: Mapping[bytes, int]) -> tuple[bytes, ...]:
    """The digests of the fleet's list of classes and of the shorter ones that it began with, longest first."""
    sizes = sorted({manifest.classes, *shorter.values()}, reverse=True)
    return tuple(list_digest(manifest.labels[:size]) for size in sizes[:MAX_BUNDLES])


def further_bundles(others: Sequence[bytes], shorter: Mapping[bytes, int]) -> tuple[bytes, ...]:
    """What an announcement names beside the fleet's first bundle; of more than fit, those with the fewest classes are
    left out, and known by their list alone."""
    return (*others, *shorter)[: MAX_BUNDLES - 1]


def check_fleet(bundles: Sequence[tuple[Path, Bundle]]) -> Roster:
    """Refuse bundles that cannot be one fleet; the first with the longest list says what the others must be.

    Raises:
        BundleError: naming the bundle and what differs.
    """
    (path, first), *rest = sorted(bundles, key=lambda each: -each[1].manifest.classes)
    seen, others, shorter = {first.sha256}, [], dict(first.manifest.extended)
    for other_path, bundle in rest:
        _check_labels(other_path, bundle.manifest, path, first.manifest)
        extends = _shares_extractor(first.manifest, bundle.manifest)
        _check_agreement(other_path, first, bundle, may_grow=extends)
        if bundle.sha256 in seen:
            raise BundleError(f"{other_path}", expected="a bundle that was not given yet", got="the same one again")
        seen.add(bundle.sha256)
        if extends:
            shorter |= {bundle.sha256: bundle.manifest.classes, **bundle.manifest.extended}
        else:
            others.append(bundle.sha256)
    ordered = dict(sorted(shorter.items(), key=lambda each: -each[1]))
    return Roster(first.manifest, first.sha256, tuple(others), ordered)


def _shares_extractor(one: Manifest, two: Manifest) -> bool:
    """Whether nothing but the classes keeps two bundles of one method apart: its sums are over one extractor."""
    return bool(one.extractor) and one.extractor == two.extractor and not method(one.method).trains


def _check_labels(path: Path, short: Manifest, long_path: Path, long: Manifest) -> None:
    """That the shorter list begins the longer one."""
    for number, (mine, theirs) in enumerate(zip(short.labels, long.labels, strict=False)):
        if mine != theirs:
            raise BundleError(
                f"{path}: class {number} is another than in {long_path}", expected=theirs, got=mine,
                hint="exporting it anew, or export --extend",
            )  # fmt: skip


def _check_agreement(path: Path, first: Bundle, bundle: Bundle, *, may_grow: bool) -> None:
    for what, expected, got in _agreements(first, bundle):
        if expected != got and not (what == "number of classes" and may_grow):
            raise BundleError(
                f"{path}: another {what} than the fleet's first bundle",
                expected=expected,
                got=got,
                hint="exporting it anew",
            )
    for name in method(first.manifest.method).shared_state:
        mine, theirs = first.params.get(name), bundle.params.get(name)
        if mine is None or theirs is None or not np.array_equal(mine, theirs):
            raise BundleError(f"{path}: other {name}", expected="the first bundle's", got="others", hint="one --seed")


def _agreements(first: Bundle, other: Bundle) -> list[tuple[str, object, object]]:
    one, two = first.manifest, other.manifest
    found: list[tuple[str, object, object]] = [
        ("method", one.method, two.method),
        ("number of classes", one.classes, two.classes),
        ("feature width", one.features, two.features),
    ]
    for rule in (method(one.method), closing_method()):
        mine, theirs = (rule.agreement(rule.settled_in(m.hyper)) for m in (one, two))
        found += [(what, mine[what], theirs[what]) for what in mine]
    return found

"""The check whether devices with different bundles can be one fleet.

FedProto's devices may have different backbones (its model-heterogeneous setting). They share only the space of
prototypes. These must agree in all bundles, because the aggregator merges them or sends them back:

- the method;
- the classes and their order;
- the feature width;
- what the method names in `agreement` (for example how contributions are weighted);
- state tensors that the method shares.

The backbone, the image size, the batch and the settings of local training may differ between devices. With different
backbones, a round over the bundle's extractor is not possible: sums of features add up only over one extractor.

A fleet can grow where devices share the extractor and train nothing. A bundle belongs to the fleet if its classes are
the first classes of the longest list, in the same order: a class number then means the same in both
(docs/decisions/125).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from protofleet.contract.bundle.bundle_file import Bundle, Manifest
from protofleet.contract.errors import BundleError
from protofleet.contract.methods import closing_method, method
from protofleet.contract.wire.messages import MAX_BUNDLES

__all__ = ["Roster", "announced_lists", "check_fleet", "further_bundles", "list_digest"]


@dataclass(frozen=True)
class Roster:
    """The bundles of one fleet.

    Attributes:
        manifest: of the bundle with the longest list of classes.
        bundle: the sha256 of that bundle, 32 bytes.
        others: sha256 of the bundles with other backbones.
        shorter: the number of classes, by sha256, of each bundle with the same extractor and a shorter list that begins
            the longest one: bundles that were given, and bundles that these extend. More classes come first.
    """

    manifest: Manifest
    bundle: bytes
    others: tuple[bytes, ...]
    shorter: Mapping[bytes, int]


def list_digest(labels: Sequence[str]) -> bytes:
    """The digest of a list of classes on the wire: the first 8 bytes of the SHA-256 of its names as a JSON array."""
    return hashlib.sha256(msgspec.json.encode(list(labels))).digest()[:8]


def announced_lists(manifest: Manifest, shorter: Mapping[bytes, int]) -> tuple[bytes, ...]:
    """The digests of the fleet's list of classes and of the shorter ones that it began with, longest first."""
    sizes = sorted({manifest.classes, *shorter.values()}, reverse=True)
    return tuple(list_digest(manifest.labels[:size]) for size in sizes[:MAX_BUNDLES])


def further_bundles(others: Sequence[bytes], shorter: Mapping[bytes, int]) -> tuple[bytes, ...]:
    """The bundles that an announcement names beside the fleet's first one.

    An announcement has room for `MAX_BUNDLES`. Of more, those with the fewest classes are left out; the announcement
    then names only their list of classes.
    """
    return (*others, *shorter)[: MAX_BUNDLES - 1]


def check_fleet(bundles: Sequence[tuple[Path, Bundle]]) -> Roster:
    """Refuse bundles that cannot be one fleet. All others are compared with the first bundle of the longest list.

    Raises:
        BundleError: naming the bundle and what differs.
    """
    (path, first), *others_given = sorted(bundles, key=lambda entry: -entry[1].manifest.classes)
    hashes, others, shorter = {first.sha256}, [], dict(first.manifest.extended)
    for other_path, bundle in others_given:
        _check_labels(other_path, bundle.manifest, path, first.manifest)
        extends = _shares_extractor(first.manifest, bundle.manifest)
        _check_agreement(other_path, first, bundle, may_grow=extends)
        if bundle.sha256 in hashes:
            raise BundleError(f"{other_path}", expected="a bundle that was not given yet", got="the same one again")
        hashes.add(bundle.sha256)
        if extends:
            shorter |= {bundle.sha256: bundle.manifest.classes, **bundle.manifest.extended}
        else:
            others.append(bundle.sha256)
    ordered = dict(sorted(shorter.items(), key=lambda entry: -entry[1]))
    return Roster(first.manifest, first.sha256, tuple(others), ordered)


def _shares_extractor(first: Manifest, second: Manifest) -> bool:
    """Whether two bundles of one method share the extractor and train nothing, so that they may differ in classes."""
    return bool(first.extractor) and first.extractor == second.extractor and not method(first.method).trains


def _check_labels(path: Path, short: Manifest, long_path: Path, long: Manifest) -> None:
    """Check that the shorter list of classes is the beginning of the longer one."""
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
    first_manifest, other_manifest = first.manifest, other.manifest
    facts: list[tuple[str, object, object]] = [
        ("method", first_manifest.method, other_manifest.method),
        ("number of classes", first_manifest.classes, other_manifest.classes),
        ("feature width", first_manifest.features, other_manifest.features),
    ]
    for rule in (method(first_manifest.method), closing_method()):
        mine, theirs = (rule.agreement(rule.resolved_in(m.hyper)) for m in (first_manifest, other_manifest))
        facts += [(what, mine[what], theirs[what]) for what in mine]
    return facts

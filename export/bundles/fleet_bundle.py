"""A fleet's bundle from one that is there: the same extractor, byte for byte, with other classes and another method.

Of a bundle whose method trains nothing, only the manifest knows of classes: their names, the method and its
hyper-parameters. The features graph, the weights, the preprocessing and the test vectors are copied. So the extractor
that `protofleet-photos` ships (`contract/bundle/shipped_extractor.py`) serves any classes. Nothing is computed, and
torch is not loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from protofleet.contract.bundle.bundle_file import Bundle, Manifest, pack_params, write_bundle
from protofleet.contract.bundle.class_names import check_names
from protofleet.contract.errors import BundleError, UsageError
from protofleet.contract.methods import METHODS, method

__all__ = ["FleetBundle", "fleet_bundle"]


@dataclass(frozen=True)
class FleetBundle:
    """A bundle that was written by `fleet_bundle`: its path, its identity (32 bytes), and its manifest."""

    path: Path
    sha256: bytes
    manifest: Manifest


def fleet_bundle(
    source: Bundle,
    labels: Sequence[str],
    out: str | Path,
    *,
    method_name: str = "ncm",
    hyper: Mapping[str, object] | None = None,
    provenance: str | None = None,
    bundle_version: int = 1,
    private_key: bytes | None = None,
) -> FleetBundle:
    """Write a bundle of another one's extractor.

    Args:
        source: the bundle whose extractor is taken. Its method trains nothing.
        labels: C class names, in the order of the class numbers.
        out: the file to write.
        method_name: a method that trains nothing.
        hyper: hyper-parameters that differ from the method's defaults.
        provenance: words that replace those of `source`.
        bundle_version: must grow with each bundle for one fleet.
        private_key: 32 bytes Ed25519 seed, to sign the manifest.

    Raises:
        UsageError, MethodError: for arguments out of range.
        BundleError: the bundle has no extractor that can be taken, or the new one cannot be written.
    """
    m, rule = source.manifest, method(method_name)
    if rule.trains:
        raise UsageError(
            f"--method {method_name}", expected="one that trains nothing", got="one that trains", hint="--method ffc"
        )
    if method(m.method).trains or not m.extractor:
        able = ", ".join(name for name, known in METHODS.items() if not known.trains)
        raise BundleError("the extractor's bundle", expected=f"a bundle of {able}", got=f"one of {m.method}")
    if method(m.method).unit_features != rule.unit_features:
        raise BundleError("the extractor's bundle", expected=f"features as {method_name} has them", got=m.method)
    if hashlib.sha256(pack_params(source.params)).hexdigest() != m.members["params.safetensors"]:
        raise BundleError("the extractor's params.safetensors", expected="weights as export packs them", got="others")
    if not 2 <= len(labels) <= 65_535:
        raise UsageError("--classes", expected="2 to 65,535 classes", got=len(labels))
    check_names(labels)
    settled = rule.resolve(hyper or {})
    rule.check(settled, len(labels), m.features)
    manifest = msgspec.structs.replace(
        m,
        version=bundle_version,
        labels=tuple(labels),
        method=rule.name,
        head=rule.heads[0],
        hyper=settled,
        provenance=provenance or m.provenance,
        extends=(),
    )
    sha256 = write_bundle(
        out,
        manifest,
        features=source.features,
        train_step=None,
        params=source.params,
        vectors=source.vectors,
        private_key=private_key,
    )
    return FleetBundle(Path(out), sha256, manifest)

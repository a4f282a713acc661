"""A bundle with more classes than an older one, over the same extractor, byte for byte.

- Copied are the features graph, the weights, the preprocessing, the test vectors, and the method with its
  hyper-parameters.
- The old classes come first, in their order; the new ones follow. So every sum of features that was made with the old
  bundle is a sum of the new one (docs/decisions/125).
- Nothing is computed, and torch is not loaded.

A bundle whose method trains cannot be extended: its graphs have as many outputs as there are classes. Such a bundle is
exported anew.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from protofleet.contract.bundle.bundle_file import Extends, Manifest, pack_params, read_bundle, write_bundle
from protofleet.contract.bundle.class_names import check_names
from protofleet.contract.errors import BundleError, UsageError
from protofleet.contract.methods import METHODS, method

__all__ = ["Extension", "extend_bundle"]


@dataclass(frozen=True)
class Extension:
    """A bundle that was written by `extend_bundle`.

    Attributes:
        sha256: 32 bytes, the identity of the new bundle.
        extended: 32 bytes, the identity of the old bundle.
        unsigned: whether the old bundle was signed and the new one is not.
    """

    path: Path
    sha256: bytes
    manifest: Manifest
    extended: bytes
    unsigned: bool


def extend_bundle(
    old: str | Path,
    added: Sequence[str],
    out: str | Path,
    *,
    provenance: str | None = None,
    bundle_version: int | None = None,
    private_key: bytes | None = None,
) -> Extension:
    """Write a bundle with the classes of another one and some more.

    Args:
        old: the bundle to extend.
        added: names of the new classes, in the order of their numbers.
        out: the file to write.
        provenance: words that replace the old bundle's. The name of the extended bundle is added to them.
        bundle_version: above the old bundle's version; the next one when None.
        private_key: 32 bytes Ed25519 seed, to sign the manifest.

    Raises:
        BundleError: the old bundle cannot be read or extended, or the new one cannot be written.
        UsageError: the new classes or the version do not fit it.
    """
    bundle = read_bundle(old)
    m = bundle.manifest
    _check_extensible(m, old)
    if os.path.realpath(out) == os.path.realpath(old):
        raise UsageError("--out", expected="another file than the bundle that is extended, which devices have", got=out)
    if hashlib.sha256(pack_params(bundle.params)).hexdigest() != m.members["params.safetensors"]:
        raise BundleError(f"{old}: params.safetensors", expected="weights as export packs them", got="another order")
    _check_added(added, m)
    version = m.version + 1 if bundle_version is None else bundle_version
    if version <= m.version:
        raise UsageError("--bundle-version", expected=f"above {m.version}, which {old} has", got=version)
    manifest = msgspec.structs.replace(
        m,
        version=version,
        labels=(*m.labels, *added),
        provenance=f"{provenance or m.provenance}; {' and '.join(added)} added to bundle {bundle.sha256.hex()}",
        extends=(Extends(bundle.sha256.hex(), m.classes), *m.extends),
    )
    method(m.method).check(m.hyper, manifest.classes, m.features)
    sha256 = write_bundle(
        out,
        manifest,
        features=bundle.features,
        train_step=None,
        params=bundle.params,
        vectors=bundle.vectors,
        private_key=private_key,
    )
    return Extension(Path(out), sha256, manifest, bundle.sha256, bundle.signed and private_key is None)


def _check_extensible(m: Manifest, old: str | Path) -> None:
    if method(m.method).trains:
        able = ", ".join(name for name, rule in METHODS.items() if not rule.trains)
        raise BundleError(
            f"{old} cannot be extended: {m.method} trains a step that is made for {m.classes} classes",
            expected=f"a bundle of {able}",
            got=m.method,
            hint="exporting it anew, for a fleet of its own",
        )
    if not m.extractor:
        raise BundleError(f"{old} cannot be extended", expected="the extractor in its manifest", got="none")


def _check_added(added: Sequence[str], m: Manifest) -> None:
    for number, name in enumerate(added):
        if not name or name in (*m.labels, *added[:number]):
            got = f"{name}, which is class {m.labels.index(name)}" if name in m.labels else f"{name or 'no name'} again"
            raise UsageError("--classes", expected="classes that the bundle does not have", got=got)
    check_names((*m.labels, *added))
    if m.classes + len(added) > 65_535:
        raise UsageError("--classes", expected="65535 classes at most", got=m.classes + len(added))

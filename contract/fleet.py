"""Whether devices with different bundles can be one fleet.

FedProto's devices may have different backbones (its model-heterogeneous setting): all that they share is the space of
prototypes. What must agree is what the aggregator merges and what comes back: the method, the classes and their order,
the feature width, what the method says must agree (how contributions are weighted, say), and state tensors that it
shares. The backbone, the image size, the batch and the settings of local training are each device's own. A round over
the bundle's extractor is not possible, since sums of features only add up over one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from contract.bundle import Bundle
from contract.errors import BundleError
from contract.methods import closing_method, method

__all__ = ["check_fleet"]


def check_fleet(bundles: Sequence[tuple[Path, Bundle]]) -> None:
    """Refuse bundles that cannot be one fleet; the first says what the others must be.

    Raises:
        BundleError: naming the bundle and what differs.
    """
    _, first = bundles[0]
    seen = {first.sha256}
    for path, bundle in bundles[1:]:
        for what, expected, got in _agreements(first, bundle):
            if expected != got:
                raise BundleError(
                    f"{path}: another {what} than the fleet's first bundle",
                    expected=expected,
                    got=got,
                    hint="exporting it anew",
                )
        for name in method(first.manifest.method).shared_state:
            mine, theirs = first.params.get(name), bundle.params.get(name)
            if mine is None or theirs is None or not np.array_equal(mine, theirs):
                raise BundleError(
                    f"{path}: other {name}", expected="the first bundle's", got="others", hint="one --seed"
                )
        if bundle.sha256 in seen:
            raise BundleError(f"{path}", expected="a bundle that was not given yet", got="the same one again")
        seen.add(bundle.sha256)


def _agreements(first: Bundle, other: Bundle) -> list[tuple[str, object, object]]:
    one, two = first.manifest, other.manifest
    found = [
        ("method", one.method, two.method),
        ("number of classes", one.classes, two.classes),
        ("list of classes", ", ".join(one.labels), ", ".join(two.labels)),
        ("feature width", one.features, two.features),
    ]
    for rule in (method(one.method), closing_method()):
        mine, theirs = (rule.agreement(rule.settled_in(m.hyper)) for m in (one, two))
        found += [(what, mine[what], theirs[what]) for what in mine]
    return found

"""All the ways in which a device can answer now, from what it has trained and what the fleet gave it.

- `Method.answers` gives a method's ways over the device's own features.
- `Method.shared_answers` of each method that trains nothing gives its ways over the features that all devices share.

This module joins both. It is used for testing after a round (`device.py`) and for photos (`predictor.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.contract.heads.answers import Answer
from protofleet.contract.methods import METHODS, Local, closing_method, method
from protofleet.contract.methods.base import Extractor as ExtractorName
from protofleet.contract.wire.global_state import GlobalState

__all__ = ["Answering", "known_answers", "usual_way"]


@dataclass(frozen=True, eq=False)
class Answering:
    """A way of answering, and whose features it takes: those of the device's own `local` weights, or the `bundle`'s."""

    answer: Answer
    extractor: ExtractorName


def known_answers(manifest: Manifest, local: Local, state: GlobalState | None) -> dict[str, Answering]:
    """Every way there is, by name: the method's own first, then the shared ones, methods in alphabetical order.

    Raises:
        WireError: when the global state is not of this fleet.
    """
    state = None if state is None else state.filled()
    own = method(manifest.method).answers(local, state)
    known = {way: Answering(answer, "local") for way, answer in own.items()}
    if state is None:
        return known
    for shared in METHODS.values():
        if not shared.trains:
            hyper = shared.resolved_in(manifest.hyper)
            answers = shared.shared_answers(state, manifest.classes, manifest.features, hyper)
            known |= {way: Answering(answer, "bundle") for way, answer in answers.items()}
    return known


def usual_way(ways: Collection[str], own: str, *, trained: bool) -> str | None:
    """Which of these ways a device answers by where nobody asks for another; None where there is none.

    Args:
        own: the name of the bundle's method.
        trained: whether the device has trained.
    """
    own_method = method(own)
    shared = [own_method, closing_method(), *METHODS.values()]
    over_bundle = [entry.way for entry in shared if not entry.trains]
    order = [own_method.way, *over_bundle] if trained else [*over_bundle, own_method.way, "head"]
    return next((way for way in order if way in ways), None)

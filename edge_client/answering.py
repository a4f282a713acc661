"""All the ways in which a device can answer now, from what it has trained and what the fleet gave it.

A method says which ways it has from a device's own features (`Method.answers`), and each method that trains nothing
which ways its results give over the features that all devices share (`Method.shared_answers`). Both together are here,
for testing after a round (`device.py`) and for photos (`predictor.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from contract.answers import Answer
from contract.bundle import Manifest
from contract.methods import METHODS, Local, closing_method, method
from contract.methods.base import Extractor as ExtractorName
from contract.state import GlobalState

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
    found = {way: Answering(answer, "local") for way, answer in own.items()}
    if state is None:
        return found
    for shared in METHODS.values():
        if not shared.trains:
            hyper = shared.settled_in(manifest.hyper)
            answers = shared.shared_answers(state, manifest.classes, manifest.features, hyper)
            found |= {way: Answering(answer, "bundle") for way, answer in answers.items()}
    return found


def usual_way(ways: Collection[str], own: str, *, trained: bool) -> str | None:
    """Which of these ways a device answers by where nobody asks for another; None where there is none.

    Args:
        own: the name of the bundle's method.
        trained: whether the device has trained.
    """
    found = method(own)
    shared = [found, closing_method(), *METHODS.values()]
    over_bundle = [each.way for each in shared if not each.trains]
    order = [found.way, *over_bundle] if trained else [*over_bundle, found.way, "head"]
    return next((way for way in order if way in ways), None)

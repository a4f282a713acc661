"""A device's caution: a global state that cannot be true is not trained on.

The aggregator refuses what is implausible, but a device has nothing but a broker's word for where a state came from,
and a state may stay retained for months. So before a round the device compares the prototypes with its own class means:
one that is `FOREIGN` times as long as the longest of its own, or longer than any network's features are, or soft
predictions that are no probabilities, make the whole state refused. The device then goes on with the last state that
was good; with none, after a restart, alone. It takes the next good one as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from contract.methods import Method, Value
from contract.plausible import LARGEST_NORM, improbable, largest_norm
from contract.state import GlobalState

__all__ = ["FOREIGN", "Caution", "Judged"]

FOREIGN = 100.0  # an untrained backbone's features are up to some ten times shorter than a trained one's


@dataclass(frozen=True, eq=False)
class Judged:
    """What to go on with.

    Attributes:
        state: the one that was given, or the last good one, or None.
        refused: why the given one is not it, in one line; empty otherwise.
    """

    state: GlobalState | None
    refused: str = ""


class Caution:
    """Judges global states and remembers the last good one.

    Args:
        found: the bundle's method.
        hyper: its settled hyper-parameters.

    Attributes:
        good: the last good one.
    """

    def __init__(self, found: Method, hyper: Mapping[str, Value]) -> None:
        noise = found.mechanism(hyper)
        noised = noise is not None and bool(noise.soft_slack(np.ones(1, np.int64)).any())
        self._probabilities = [kind for kind, width in found.global_rows.items() if width == "classes" and not noised]
        self.good: GlobalState | None = None

    def judge(self, state: GlobalState | None, own_norm: Callable[[], float]) -> Judged:
        """`state` if it is plausible, else what to go on with.

        Args:
            own_norm: gives the norm of the longest of the device's own class means; asked only when it matters.
        """
        if state is None:
            return Judged(None)
        reason = self.doubt(state, own_norm)
        if not reason:
            self.good = state
            return Judged(state)
        good = self.good if self.good is not None and self.good.run == state.run else None
        instead = "going on alone" if good is None else f"going on with version {good.version}"
        return Judged(good, f"global version {state.version} refused: {reason}; {instead}")

    def doubt(self, state: GlobalState, own_norm: Callable[[], float]) -> str:
        """Why `state` cannot be true; empty where nothing speaks against it."""
        if state.prototypes is not None and len(state.prototypes.rows):
            longest = largest_norm(state.prototypes.rows)
            own = own_norm()
            limit = min(LARGEST_NORM, FOREIGN * own) if own > 0 else LARGEST_NORM
            if not longest <= limit:
                return f"a prototype of norm {longest:.3g}, at most {limit:.3g} beside own class means of {own:.3g}"
        for kind in self._probabilities:
            rows = state.rows.get(kind)
            wrong = np.zeros(0, bool) if rows is None else improbable(rows.rows, np.zeros(len(rows.rows)))
            if rows is not None and wrong.any():
                return f"{kind} predictions of class {int(rows.classes[int(wrong.argmax())])} are no probabilities"
        return ""

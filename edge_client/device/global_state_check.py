"""A device's caution: it does not train on a global state that cannot be true.

The aggregator refuses what is implausible. But a device cannot know where a state came from, except by the broker's
word, and a broker may retain a state for months. So before each round the device checks the state against its own
samples. It refuses the whole state if one of these holds:

- a prototype is more than `FOREIGN` times as long as the longest of the device's own class means;
- a prototype is longer than any network's features are;
- soft predictions are no probabilities.

The device then goes on with the last good state of the run. After a restart it may have none: then it goes on alone.
It takes the next good state as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from protofleet.contract.methods import Method, Value
from protofleet.contract.sums.plausibility import LARGEST_NORM, improbable, largest_norm
from protofleet.contract.wire.global_state import GlobalState

__all__ = ["FOREIGN", "GlobalStateCheck", "Judged"]

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


class GlobalStateCheck:
    """Judges global states and remembers the last good one.

    Args:
        method: the bundle's method.
        hyper: its resolved hyper-parameters.

    Attributes:
        good: the last good one.
    """

    def __init__(self, method: Method, hyper: Mapping[str, Value]) -> None:
        noise = method.mechanism(hyper)
        noised = noise is not None and bool(noise.soft_slack(np.ones(1, np.int64)).any())
        self._probabilities = [kind for kind, width in method.global_rows.items() if width == "classes" and not noised]
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

"""How far a device's newest photos differ from its earlier ones, as the device reports it: three numbers of its status.

A device measures them over the photos that came since its last measurement (`edge_client/device/drift_watch.py`). There
are never fewer than `LEAST`, so no single photo is reported. The reference is the device's own: the class means of its
earlier photos, in the features of the bundle's initial weights. These never change, so figures of different years can
be compared.

- `samples`: the number of photos;
- `distance`: the mean squared distance to the nearest of these means, in units of the usual distance of the photos. It
  is about 1 where nothing has changed, and at most `FARTHEST`, because a larger distance counts as that;
- `unlike`: the share of photos that are more than twice the usual distance away. `predict` calls such photos *unknown*.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

__all__ = ["FARTHEST", "LEAST", "WORDS", "Drift", "read_drift"]

LEAST = 20
FARTHEST = 10.0
WORDS = {"distance": "distance to earlier photos", "unlike": "share unlike earlier photos"}
_PREFIX = "drift_"


@dataclass(frozen=True)
class Drift:
    """What one device said at one time; see this file's beginning."""

    samples: int
    unlike: float
    distance: float

    def metrics(self) -> dict[str, float]:
        """The same as a status carries it: three entries."""
        return {_PREFIX + name: float(value) for name, value in asdict(self).items()}


def read_drift(metrics: Mapping[str, float], *, max_samples: int) -> Drift | None:
    """The drift in a status; None where there is none, or where its numbers cannot be true."""
    samples, unlike, distance = (metrics.get(_PREFIX + name, math.nan) for name in ("samples", "unlike", "distance"))
    if not (samples.is_integer() and LEAST <= samples <= max_samples):
        return None
    if not (0.0 <= unlike <= 1.0 and 0.0 <= distance <= FARTHEST):  # NaN is not
        return None
    return Drift(int(samples), unlike, distance)

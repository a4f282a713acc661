"""How far a device's newest photos differ from its earlier ones, as the device reports it: four numbers of its status.

A device measures them over the photos that came since its last measurement (`edge_client/device/drift_watch.py`). There
are never fewer than `LEAST`, so no single photo is reported. The reference is the device's own: the class means of its
earlier photos, in the features of the bundle's initial weights. These never change, so figures of different years can
be compared.

- `samples`: the number of photos;
- `distance`: the mean squared distance to the nearest of these means, in units of the usual distance of the photos. It
  is about 1 where nothing has changed, and at most `FARTHEST`, because a larger distance counts as that;
- `unlike`: the share of photos that are more than twice the usual distance away. `predict` calls such photos *unknown*;
- `moved`: how far the class means of the new photos are from those of the earlier ones, as a multiple of what chance
  alone makes of it. It is about 1 where nothing has changed, and at most `MOST_MOVED`. Photos have labels, so it finds
  changes that leave each photo near *some* class mean. None where no class has earlier and new photos.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

__all__ = ["FARTHEST", "LEAST", "MOST_MOVED", "WORDS", "Drift", "read_drift"]

LEAST = 20
FARTHEST = 10.0
MOST_MOVED = 1_000.0
WORDS = {
    "distance": "distance to earlier photos",
    "unlike": "share unlike earlier photos",
    "moved": "class means apart from those of earlier photos",
}
_PREFIX = "drift_"


@dataclass(frozen=True)
class Drift:
    """What one device said at one time; see this file's beginning."""

    samples: int
    unlike: float
    distance: float
    moved: float | None = None

    def metrics(self) -> dict[str, float]:
        """The same as a status carries it: four entries at most."""
        return {_PREFIX + name: float(value) for name, value in asdict(self).items() if value is not None}


def read_drift(metrics: Mapping[str, float], *, max_samples: int) -> Drift | None:
    """The drift in a status; None where there is none, or where its numbers cannot be true."""
    samples, unlike, distance = (metrics.get(_PREFIX + name, math.nan) for name in ("samples", "unlike", "distance"))
    if not (samples.is_integer() and LEAST <= samples <= max_samples):
        return None
    if not (0.0 <= unlike <= 1.0 and 0.0 <= distance <= FARTHEST):  # NaN is not
        return None
    moved = metrics.get(_PREFIX + "moved")
    if moved is not None and not 0.0 <= moved <= MOST_MOVED:
        return None
    return Drift(int(samples), unlike, distance, moved)

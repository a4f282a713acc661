"""The accuracy of a device's answers, as the device reports it to the fleet: figures among the metrics of its status.

1. After a round, a device measures itself on photos that it never trained on (`edge_client/device/evaluation.py`).
2. It puts the figures into its next birth.
3. The aggregator reads them from there. The figures name their run and their round, because a birth is retained and may
   be heard again much later.

Every share is a fraction, 0 to 1:

- `all_classes`: of all test photos, the share that the round's own way of answering names right;
- `own_classes`: the same for the test photos of classes that the device trains on;
- `shipped`: of all test photos, the share that the bundle as shipped names right: by the nearest class mean of the
  device's own training photos under the bundle's initial weights. Nobody has trained for it;
- `alone`: of all test photos, the share that the device names right by itself, without the fleet's state;
- `among_own`, `alone_among_own`: of the test photos of classes that the device trains on, the share that the round's
  own way and the device alone name right, when both choose among those classes only. So both do the same task. The
  bundle as shipped names no other classes anyway (`shipped_among_own`).

The counts beside them:

- `samples`: all test photos;
- `own_samples`: the test photos of classes that the device trains on;
- `own`: the number of those classes;
- `classes`: the number of classes that the round's own way can name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["COUNTS", "SHARES", "Accuracy", "read_accuracy"]

SHARES = ("all_classes", "own_classes", "shipped", "alone", "among_own", "alone_among_own")
COUNTS = ("own_samples", "classes", "own")  # beside `samples`
_MOST_CLASSES = 65_535  # of a bundle
_PREFIX = "accuracy_"


@dataclass(frozen=True)
class Accuracy:
    """What one device measured after one round.

    Attributes:
        samples: how many test photos.
        the others: see this file's beginning; None where there is no such figure.
    """

    samples: int
    all_classes: float
    own_classes: float | None = None
    shipped: float | None = None
    alone: float | None = None
    among_own: float | None = None
    alone_among_own: float | None = None
    own_samples: int | None = None
    classes: int | None = None
    own: int | None = None

    @property
    def shipped_among_own(self) -> float | None:
        """The share of `shipped` among the test photos of own classes. It names no photo of other classes right."""
        return self.shipped * self.samples / self.own_samples if self.shipped is not None and self.own_samples else None

    def facts(self) -> dict[str, int | float | None]:
        """The same by name, for JSON."""
        return asdict(self)

    def metrics(self, run: bytes, round: int) -> dict[str, float]:
        """The figures as a status carries them: at most twelve entries."""
        figures = {"run": float(int.from_bytes(run, "big")), "round": float(round)}
        figures |= {name: float(value) for name, value in self.facts().items() if value is not None}
        return {_PREFIX + name: value for name, value in figures.items()}


def read_accuracy(metrics: Mapping[str, float], run: bytes, *, max_samples: int) -> tuple[int, Accuracy] | None:
    """The round and its figures in a status; None where the status has no valid figures of this run.

    A status may hold any numbers. A share outside 0 to 1, or more photos than a device may have, make the whole report
    invalid.
    """
    figures = {name.removeprefix(_PREFIX): value for name, value in metrics.items() if name.startswith(_PREFIX)}
    if figures.get("run") != float(int.from_bytes(run, "big")):
        return None
    counts = [figures.get(name, math.nan) for name in ("round", "samples")]
    if not all(count.is_integer() and 1 <= count < 2**32 for count in counts) or counts[1] > max_samples:
        return None
    shares: dict[str, Any] = {name: figures[name] for name in SHARES if name in figures}
    if "all_classes" not in shares or not all(0.0 <= share <= 1.0 for share in shares.values()):
        return None
    given_counts = {name: figures[name] for name in COUNTS if name in figures}
    most = {"own_samples": counts[1], "classes": _MOST_CLASSES, "own": _MOST_CLASSES}
    if not all(count.is_integer() and 0 <= count <= most[name] for name, count in given_counts.items()):
        return None
    whole_counts: dict[str, Any] = {name: int(count) for name, count in given_counts.items()}
    return int(counts[0]), Accuracy(samples=int(counts[1]), **shares, **whole_counts)

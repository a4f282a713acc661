"""How good a device's answers are, as it tells the fleet: a few figures among the metrics of its status message.

A device measures itself after a round, on photos that it never trained on (`edge_client/evaluate.py`), and puts the
figures under `NAMES` into its next birth; the aggregator takes them out again. They name the run and the round they
are of, since a birth is retained and may be heard again long after. Every share is a fraction, 0 to 1.

- `all_classes`: of all test photos, how many the round's own way of answering names right;
- `own_classes`: the same among the test photos of classes that the device trains on;
- `shipped`: of all test photos, how many the bundle as shipped names right: the nearest of the class means that the
  device's own training photos have under the bundle's initial weights. Nobody has trained for it;
- `alone`: of all test photos, how many the device names right by what it holds itself, without the fleet's state;
- `among_own`, `alone_among_own`: of the test photos of classes that the device trains on, how many the round's own way
  and the device alone name right when both choose among those classes only, which is one and the same task. The bundle
  as shipped names no other classes anyway (`shipped_among_own`).

Beside them stand counts: `samples`, all test photos, and `own_samples`, those of classes that the device trains on;
`own`, how many such classes there are, and `classes`, how many the round's own way can name.
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
        """What `shipped` is of the test photos of own classes: it names none of the others right."""
        return self.shipped * self.samples / self.own_samples if self.shipped is not None and self.own_samples else None

    def facts(self) -> dict[str, int | float | None]:
        """The same by name, for JSON."""
        return asdict(self)

    def metrics(self, run: bytes, round: int) -> dict[str, float]:
        """The figures as a status carries them: at most twelve entries."""
        found = {"run": float(int.from_bytes(run, "big")), "round": float(round)}
        found |= {name: float(value) for name, value in self.facts().items() if value is not None}
        return {_PREFIX + name: value for name, value in found.items()}


def read_accuracy(metrics: Mapping[str, float], run: bytes, *, max_samples: int) -> tuple[int, Accuracy] | None:
    """The round, and what the status says of it; None where it says nothing of this run, or nothing that can be true.

    Whoever writes a status may write anything: a share that is none, or more photos than a device may have, make the
    whole report nothing.
    """
    given = {name.removeprefix(_PREFIX): value for name, value in metrics.items() if name.startswith(_PREFIX)}
    if given.get("run") != float(int.from_bytes(run, "big")):
        return None
    counts = [given.get(name, math.nan) for name in ("round", "samples")]
    if not all(count.is_integer() and 1 <= count < 2**32 for count in counts) or counts[1] > max_samples:
        return None
    shares: dict[str, Any] = {name: given[name] for name in SHARES if name in given}
    if "all_classes" not in shares or not all(0.0 <= share <= 1.0 for share in shares.values()):
        return None
    further = {name: given[name] for name in COUNTS if name in given}
    most = {"own_samples": counts[1], "classes": _MOST_CLASSES, "own": _MOST_CLASSES}
    if not all(count.is_integer() and 0 <= count <= most[name] for name, count in further.items()):
        return None
    told: dict[str, Any] = {name: int(count) for name, count in further.items()}
    return int(counts[0]), Accuracy(samples=int(counts[1]), **shares, **told)

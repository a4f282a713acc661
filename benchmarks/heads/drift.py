"""How often the rule of `aggregator/monitoring/drift.py` suspects a device without cause, and how often it finds one
with cause.

    python -m benchmarks.heads.drift --devices 1000

Synthetic devices send 64 reports each. A report is of 20 photos, or of 20 to 400, whose squared distances, 1 in the
mean, follow one of three laws: a sum of 50 squares (what features of a class look like), exponential, and lognormal
(σ = 1, where one photo in fifty is five times as far as usual). Printed as JSON, for each law: suspicions for each
report that could raise one, and, of the devices whose photos become 1.5, 2 and 3 times as far, how many are suspected
after two and after six such reports.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import numpy as np

from protofleet.aggregator.monitoring.drift import BEFORE, departure
from protofleet.contract.drift import FARTHEST, Drift

REPORTS = 64
Law = Callable[[np.random.Generator, int], np.ndarray]
LAWS: dict[str, tuple[int, Law]] = {  # the most photos of a report, and their squared distances
    "squares, 20 photos": (20, lambda rng, n: rng.chisquare(50, n) / 50),
    "exponential, 20 to 400 photos": (400, lambda rng, n: rng.exponential(1.0, n)),
    "lognormal, 20 photos": (20, lambda rng, n: rng.lognormal(-0.5, 1.0, n)),
}


def told(rng: np.random.Generator, law: str, times: float = 1.0) -> Drift:
    """A report whose photos are so many times as far as usual."""
    most, photos = LAWS[law]
    count = int(rng.integers(20, most + 1))
    far = np.minimum(times * photos(rng, count), FARTHEST)
    return Drift(count, float((far > 2.0).mean()), float(far.mean()))


def false_alarms(rng: np.random.Generator, law: str, devices: int, reports: int = REPORTS) -> float:
    """Suspicions for each report that could raise one."""
    alarms = 0
    for _ in range(devices):
        history = [told(rng, law) for _ in range(reports)]
        alarms += sum(departure(history[:last]) is not None for last in range(BEFORE + 2, reports + 1))
    return alarms / (devices * (reports - BEFORE - 1))


def found(rng: np.random.Generator, law: str, devices: int, times: float, after: int) -> float:
    """The share of devices that are suspected within `after` reports of photos so many times as far."""
    hits = 0
    for _ in range(devices):
        history = [told(rng, law) for _ in range(30)]
        later = [told(rng, law, times) for _ in range(after)]
        hits += any(departure([*history, *later[:last]]) is not None for last in range(2, after + 1))
    return hits / devices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1000)
    devices, rng = parser.parse_args().devices, np.random.default_rng(0)
    for law in LAWS:
        row: dict[str, object] = {"law": law, "false_alarms_per_report": round(false_alarms(rng, law, devices), 5)}
        for times in (1.5, 2.0, 3.0):
            row[f"found_at_{times:g}_times"] = [round(found(rng, law, devices, times, after), 3) for after in (2, 6)]
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

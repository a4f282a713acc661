"""How often a class is suspected without cause where sums stand, and how often it is with cause.

    python -m benchmarks.heads.class_drift --fleets 20

Unit features of the shipped Fashion-MNIST training photos under the shipped bundle's network. A fleet has ten devices;
each begins with 40 photos of each class, drawn with replacement, and gets 20 to 100 more at a time, of one class after
another. What the aggregator computes of its sums (`aggregator/monitoring/class_drift.py`) is judged by the rule of
`aggregator/monitoring/drift.py`. Printed as JSON: suspicions, and the reports that could raise one; and after 30
reports of a class, how many classes are suspected within 2 and 6 reports more whose photos are half as bright, shifted
by three pixels, or every third of another class.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protofleet.aggregator.monitoring.class_drift import moved
from protofleet.aggregator.monitoring.drift import BEFORE, KEPT, departure
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.drift import Drift
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods.ncm import UnitMeans
from protofleet.edge_client.training.compiled_graphs import CompiledGraphs
from protofleet.lab.data.datasets import load_dataset

BUNDLE = Path(__file__).parents[2] / "lab" / "demo" / "shipped" / "fleet.bundle"
DEVICES, REPORTS = 10, 64
Features = NDArray[np.float64]


class Photos:
    """Unit features of each class's photos, as they are and changed."""

    def __init__(self) -> None:
        bundle = read_bundle(BUNDLE)
        extract = CompiledGraphs(bundle).shared_extractor().features
        data = load_dataset("fashion_mnist_subset").train
        x, self.y = data.x, data.y
        self.classes = bundle.manifest.classes
        kinds = {"as they are": x, "half as bright": x // 2, "shifted by 3 pixels": np.roll(x, 3, axis=2)}
        self.features = {name: unit_rows(extract(kind).astype(np.float64)) for name, kind in kinds.items()}

    def draw(self, rng: np.random.Generator, label: int, count: int, kind: str) -> Features:
        """Features of so many photos of a class, (count, D)."""
        plain = self.features.get(kind, self.features["as they are"])
        found = plain[rng.choice(np.flatnonzero(self.y == label), count)]
        if kind == "a third of another class":
            other = rng.choice(np.flatnonzero(self.y == (label + 1) % self.classes), count)
            found = np.where((rng.random(count) < 1 / 3)[:, None], plain[other], found)
        return np.asarray(found)


def told(rng: np.random.Generator, photos: Photos, label: int, kinds: list[str]) -> list[Drift]:
    """What a class's reports say, one for each kind of photos; devices take turns."""
    held, said = {}, []
    for at, kind in enumerate(kinds):
        device = at % DEVICES
        had = held.get(device)
        if had is None:
            first = photos.draw(rng, label, 40, "as they are")
            had = UnitMeans.of(first, np.full(40, label), photos.classes)
        count = int(rng.integers(20, 101))
        came = photos.draw(rng, label, count, kind)
        held[device] = had.merge(UnitMeans.of(came, np.full(count, label), photos.classes))
        (found,) = moved(had, held[device])
        said.append(Drift(found.samples, 0.0, found.distance))
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleets", type=int, default=20)
    fleets, photos, rng = parser.parse_args().fleets, Photos(), np.random.default_rng(0)
    alarms = judged = 0
    for _ in range(fleets):
        for label in range(photos.classes):
            said = told(rng, photos, label, ["as they are"] * REPORTS)
            found = [departure(said[max(0, last - KEPT) : last]) for last in range(BEFORE + 2, REPORTS + 1)]
            alarms, judged = alarms + sum(each is not None for each in found), judged + len(found)
    print(json.dumps({"false_alarms": alarms, "reports": judged}), flush=True)
    for kind in ("half as bright", "shifted by 3 pixels", "a third of another class"):
        hits = {2: 0, 6: 0}
        for _ in range(fleets):
            for label in range(photos.classes):
                said = told(rng, photos, label, ["as they are"] * 30 + [kind] * 6)
                for after in hits:
                    hits[after] += any(departure(said[: 30 + last]) is not None for last in range(2, after + 1))
        row = {f"found_after_{after}": round(n / (fleets * photos.classes), 3) for after, n in hits.items()}
        print(json.dumps({"photos": kind, **row}), flush=True)


if __name__ == "__main__":
    main()

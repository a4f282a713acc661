"""A simulated day of a fleet whose sums stand, beside retraining from scratch every hour.

    python -m benchmarks.server.standing_day

The shipped bundle's network makes features of the shipped Fashion-MNIST photos. Forty devices get photos and lose some
through the day, hold back what is too little of a class (`edge_client/standing/sample_choice.py`), and send FFC's sums
to the real coordinator over its real store, on a simulated clock. Messages come twice, overtake each other, or are
lost and sent again; the aggregator is started anew, without a word, six times; devices withdraw, are forgotten, and
admitted again.

Every hour: whether the integers are those of all that stands, added up from the devices' own books; how far the head is
from one solved in float64 of the features of exactly those photos, by the same ridge, relative to its largest number;
and the accuracy of both on the test photos.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protofleet.aggregator.coordinators.kinds import standing_sums
from protofleet.aggregator.merging.exact_sums import ExactSum
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.operator_orders import give
from protofleet.contract.bundle.bundle_file import Bundle, extractor_of, read_bundle
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import method
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Contribution
from protofleet.edge_client.standing.sample_choice import choose
from protofleet.edge_client.training.compiled_graphs import CompiledGraphs
from protofleet.lab.data.datasets import load_dataset
from tests.support.pooled_head import solve_head

BUNDLE = Path(__file__).parents[2] / "lab" / "demo" / "shipped" / "fleet.bundle"
RIDGE, LEAST, EVERY_S = 0.01, 3, 600.0

Features = NDArray[np.float64]


@dataclass
class Simulated:
    """One device: its photos, by row, what it sent last, and its generation."""

    name: str
    rows: list[int] = field(default_factory=list)
    sent: list[int] | None = None
    generation: int = 0
    out: bool = False


class Day:
    """The fleet, its store, and a clock."""

    def __init__(self, folder: Path, bundle: Bundle, features: Features, labels: NDArray[np.int64], seed: int) -> None:
        self.path, self.bundle, self.z, self.y = folder / "s.sqlite", bundle, features, labels
        self.rng = np.random.default_rng(seed)
        self.devices = [Simulated(f"device-{index:02d}") for index in range(40)]
        self.free = list(self.rng.permutation(len(labels)))
        self.old: list[tuple[str, bytes]] = []  # what may come once more
        self.counts = dict.fromkeys(("committed", "duplicate", "late", "rejected", "restarts", "orders"), 0)
        self.start(0.0)

    def start(self, now: float) -> None:
        """A process of the aggregator; the one before is just gone."""
        if hasattr(self, "store"):
            self.store.close()
            self.counts["restarts"] += 1
        settings = Settings(method="ffc", standing=True, every=EVERY_S, ridge=RIDGE, min_samples=LEAST)
        self.store = DurableStore(self.path, self.bundle.sha256, "day")
        self.core = standing_sums(self.store, self.bundle.manifest, self.bundle.sha256, settings, now=now)

    def five_minutes(self, now: float) -> None:
        for device in self.rng.choice(self.devices, 4, replace=False):
            self.photos(device)
            self.send(device, now)
        if self.old and self.rng.random() < 0.7:  # something comes again, in whatever order
            self.take([self.old[self.rng.integers(len(self.old))]], now)
        if self.rng.random() < 0.1:
            self.take_out(self.rng.choice(self.devices), now)
        self.advance(now)

    def photos(self, device: Simulated) -> None:
        """Some come, now and then some go."""
        if not device.out:
            device.rows += [self.free.pop() for _ in range(min(int(self.rng.integers(0, 9)), len(self.free)))]
        if device.rows and self.rng.random() < 0.2:
            gone = set(self.rng.choice(device.rows, min(4, len(device.rows)), replace=False).tolist())
            device.rows = [row for row in device.rows if row not in gone]
            self.free = [*gone, *self.free]

    def send(self, device: Simulated, now: float) -> None:
        key = lambda row: b"%016d%02d" % (row, self.y[row])  # noqa: E731
        sent = None if device.sent is None else [key(row) for row in device.sent]
        choice = choose([key(row) for row in device.rows], sent, LEAST)
        if choice.rows is None or device.out:
            return
        device.generation += 1
        rows = [row for row, chosen in zip(device.rows, choice.rows, strict=True) if chosen]
        payload = encode(Contribution.of(self.gram(rows), standing="present", **self.key(device)), "f64")
        lost = self.rng.random() < 0.1  # then the next one, or its repetition, must do
        self.old = [*self.old[-20:], (device.name, payload)]
        if not lost:
            self.take([(device.name, payload)] * int(self.rng.integers(1, 3)), now)
        device.sent = rows
        if lost:
            self.take([(device.name, payload)], now)

    def take_out(self, device: Simulated, now: float) -> None:
        """It withdraws, or is forgotten; one that is out is admitted again."""
        self.counts["orders"] += 1
        if device.out:
            give(self.path, "admit", device.name, "operator")
            device.out = False
            return
        device.generation, device.out, device.sent = device.generation + 1, True, None
        if self.rng.random() < 0.5:
            self.take([(device.name, encode(Contribution.withdrawal(**self.key(device))))], now)
        elif device.name in self.core.standing.generations:
            give(self.path, "forget", device.name, "operator")

    def key(self, device: Simulated) -> dict[str, object]:
        extractor = extractor_of(self.bundle.manifest, self.bundle.sha256, method("ffc"))
        named = {"run": self.core.parts.run, "round": device.generation, "method": "ffc"}
        return {**named, "bundle": self.bundle.sha256, "extractor": extractor}

    def take(self, batch: list[tuple[str, bytes]], now: float) -> None:
        for decision in self.core.take(batch, now):
            self.counts[decision.outcome] += 1

    def advance(self, now: float) -> None:
        while self.core.advance(now, now) is not None:
            pass

    def gram(self, rows: list[int]) -> FeatureGram:
        return FeatureGram.of(self.z[rows], self.y[rows], self.bundle.manifest.classes)

    def standing_rows(self) -> list[list[int]]:
        return [device.sent for device in self.devices if device.sent and not device.out]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hours", type=int, default=24)
    options = parser.parse_args()
    bundle, data = read_bundle(BUNDLE), load_dataset("fashion_mnist_subset")
    extract = CompiledGraphs(bundle).shared_extractor().features
    z, z_test = (unit_rows(extract(part.x).astype(np.float64)) for part in (data.train, data.test))
    print("hour  devices  photos  exact  head off by  accuracy  retrained")
    with tempfile.TemporaryDirectory() as folder:
        day = Day(Path(folder), bundle, z, data.train.y, options.seed)
        worst = 0.0
        for minute in range(5, 60 * options.hours + 1, 5):
            day.five_minutes(60.0 * minute)
            if minute % 240 == 125:
                day.start(60.0 * minute)
            if minute % 60:
                continue
            day.advance(60.0 * minute + EVERY_S)
            rows = day.standing_rows()
            total = ExactSum.zero(FeatureGram, bundle.manifest.classes, bundle.manifest.features)
            for each in rows:
                total = total.add(ExactSum.of(day.gram(each)))
            exact = total.equal(day.core.standing.total)
            head, present = day.core.state.head.dense(bundle.manifest.classes, bundle.manifest.features)
            anew = solve_head(day.gram([row for each in rows for row in each]), RIDGE)
            off = float(np.abs(head - anew).max() / np.abs(anew).max())
            worst = max(worst, off)
            scores = [np.where(present, z_test @ weights.T, -np.inf) for weights in (head, anew)]
            right = [float((each.argmax(axis=1) == data.test.y).mean()) for each in scores]
            print(
                f"{minute // 60:4}  {len(rows):7}  {sum(map(len, rows)):6,}  {'yes' if exact else 'NO':>5}  {off:11.1e}"
                f"  {right[0]:8.1%}  {right[1]:9.1%}",
                flush=True,
            )
            assert exact
        day.store.close()
    print(", ".join(f"{count} {name}" for name, count in day.counts.items()) + f"; head off by {worst:.1e} at most")


if __name__ == "__main__":
    main()

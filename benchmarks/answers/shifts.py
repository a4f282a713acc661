"""Which changes of real photos a device's drift reports show, and how often they show one that is none.

    python -m benchmarks.answers.shifts --signs DIR --cifar DIR [--devices 40] [--seeds 3] [--markdown FILE]

`--signs` is a folder per class of photos of hands (sign language digits), `--cifar` CIFAR-10 in the Hub's parquet
layout. Features are those of the shipped extractor (`protofleet-photos`). A device begins with `FIRST` photos of an own
mix of classes (Dirichlet, 0.5), makes `BEFORE` + `MORE` reports of 20 or 80 new photos, and then two of photos that
have changed. Photos are drawn with replacement. What a device measures is `edge_client/device/drift_watch.py`'s
`Reference`, what is suspected is by the rule of `aggregator/monitoring/drift.py`.

Printed, as a mean over seeds: of so many devices how many are suspected by each figure, and by any; and over long
histories without a change, suspicions for each report that could raise one: of single photos, and of bursts of 1 to 10
frames of the same photo.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from benchmarks.heads.pretrained_fleet import enlarged
from protofleet.advice.frozen_fleet import features_of
from protofleet.aggregator.monitoring.drift import BEFORE, departure
from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.bundle.shipped_extractor import photos_bundle
from protofleet.contract.drift import Drift
from protofleet.contract.heads.sphere import unit_rows
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.data.load import load_data
from protofleet.edge_client.device.drift_watch import Reference
from protofleet.edge_client.device.unknown import USUAL_THRESHOLD
from protofleet.export.bundles.fleet_bundle import fleet_bundle
from protofleet.lab.data.datasets import load_dataset, take

CLASSES, FIRST, MORE, PHOTOS, LONG = 10, 60, 8, 2_500, 64
FIGURES = ("distance", "unlike", "moved")
Photo = NDArray[np.uint8]
Shift = Callable[[Photo, np.random.Generator], NDArray[np.floating] | Photo]


def rain(x: Photo, rng: np.random.Generator) -> Photo:
    """Two hundred bright streaks, three pixels by one and ten long."""
    wet = x.astype(np.float64)
    for row, column in zip(rng.integers(0, len(x) - 10, 200), rng.integers(0, x.shape[1], 200), strict=True):
        wet[row : row + 10, column] = 0.5 * wet[row : row + 10, column] + 110
    return np.clip(wet, 0, 255).astype(np.uint8)


def half_size(x: Photo, rng: np.random.Generator) -> Photo:
    small = np.asarray(Image.fromarray(x).resize((x.shape[1] // 2, x.shape[0] // 2)))
    far = np.full_like(x, int(x.mean()))
    top, left = len(x) // 4, x.shape[1] // 4
    far[top : top + len(small), left : left + small.shape[1]] = small
    return far


SHIFTS: Mapping[str, Shift] = {
    "rain": rain,
    "noise": lambda x, rng: x + rng.normal(0.0, 25.0, x.shape),
    "blur": lambda x, rng: np.asarray(Image.fromarray(x).filter(ImageFilter.GaussianBlur(2))),
    "night": lambda x, rng: 0.2 * x + rng.normal(0.0, 6.0, x.shape),
    "half size": half_size,
    "rotated": lambda x, rng: np.asarray(Image.fromarray(x).rotate(30, Image.Resampling.BILINEAR)),
    "moved": lambda x, rng: np.roll(x, (len(x) // 5, x.shape[1] // 5), (0, 1)),
    "inverted": lambda x, rng: 255.0 - x,
}


def shifted(x: Photo, shift: Shift, seed: int) -> Photo:
    """All photos (N, H, W, 3) under a shift."""
    rng = np.random.default_rng(seed)
    return np.stack([np.clip(shift(photo, rng), 0, 255).astype(np.uint8) for photo in x])


class Camera:
    """One device: draws photos of its mix of classes, and reports on them."""

    def __init__(
        self, z: NDArray[np.float64], labels: NDArray[np.int64], rng: np.random.Generator, *, bursts: bool = False
    ) -> None:
        self._bursts = bursts
        self._z, self._labels, self._rng = z, labels, rng
        share = np.maximum(rng.dirichlet([0.5] * CLASSES), 1e-9)
        weight = share[labels] / np.bincount(labels, minlength=CLASSES)[labels]
        self._weight = weight / weight.sum()
        self._reference = Reference(CLASSES, z.shape[1])
        first = self.drawn(FIRST)
        self._reference.add(z[first], labels[first])
        self.history: list[Drift] = []

    def drawn(self, count: int) -> NDArray[np.int64]:
        """Rows of new photos; in bursts the same one several times."""
        rows = self._rng.choice(len(self._labels), count, p=self._weight)
        if not self._bursts:
            return rows
        times = self._rng.integers(1, 11, count)
        return np.repeat(rows, times)[:count]

    def report(self, rows: NDArray[np.int64], z: NDArray[np.float64] | None = None, *, swapped: bool = False) -> None:
        """Measure new photos, which then are earlier ones.

        Args:
            z: their features in place of the usual ones: (N, D) of all photos.
            swapped: whether photos of another class have the name of the device's most frequent one.
        """
        features, labels = (self._z if z is None else z)[rows], self._labels[rows]
        if swapped:
            most = np.bincount(labels, minlength=CLASSES).argmax()
            others = np.flatnonzero(self._labels == (most + 1) % CLASSES)
            features = features.copy()
            features[labels == most] = self._z[self._rng.choice(others, int((labels == most).sum()))]
        newer = Reference(CLASSES, features.shape[1])
        newer.add(features, labels)
        far, moved = self._reference.distances(features), self._reference.moved(newer)
        self.history.append(Drift(len(rows), float((far > USUAL_THRESHOLD).mean()), float(far.mean()), moved))
        self._reference.add(features, labels)

    def suspected(self) -> dict[str, bool]:
        """By figure whether the rule suspects the device by it alone; `any` by all of them."""
        found = {}
        for figure in FIGURES:
            others = {name: 0.0 if name != "moved" else None for name in FIGURES if name != figure}
            alone = [Drift(**{"samples": r.samples, **others, figure: getattr(r, figure)}) for r in self.history]
            found[figure] = departure(alone) is not None
        return {**found, "any": departure(self.history) is not None}


def measured(
    z: NDArray[np.float64],
    other: NDArray[np.float64] | None,
    labels: NDArray[np.int64],
    count: int,
    devices: int,
    seed: int,
) -> dict[str, int]:
    """How many devices are suspected after two reports of a shift; None as `other` swaps a class."""
    hits = dict.fromkeys((*FIGURES, "any"), 0)
    for number in range(devices):
        camera = Camera(z, labels, np.random.default_rng((seed, number)))
        for _ in range(BEFORE + MORE):
            camera.report(camera.drawn(count))
        for _ in range(2):
            camera.report(camera.drawn(count), other, swapped=other is None)
        for figure, found in camera.suspected().items():
            hits[figure] += found
    return hits


def false_alarms(
    z: NDArray[np.float64], labels: NDArray[np.int64], count: int, devices: int, seed: int, *, bursts: bool
) -> tuple[int, int]:
    """Suspicions without a change, and reports that could raise one."""
    alarms = 0
    for number in range(devices):
        camera = Camera(z, labels, np.random.default_rng((seed, number, 1)), bursts=bursts)
        for _ in range(LONG):
            camera.report(camera.drawn(count))
        whole = camera.history
        alarms += sum(departure(whole[:last]) is not None for last in range(BEFORE + 2, LONG + 1))
    return alarms, devices * (LONG - BEFORE - 1)


def main() -> None:
    """Measure both data sets, print two tables."""
    options = _options()
    lines = ["| photos | change | photos a report | distance | unlike | moved | any |", f"|{' --- |' * 7}"]
    alarms = ["| photos | photos a report | stream | suspicions | reports | per report |", f"|{' --- |' * 6}"]
    with tempfile.TemporaryDirectory() as folder:
        fleet_bundle(read_bundle(photos_bundle()), [str(n) for n in range(CLASSES)], Path(folder) / "b.bundle")
        bundle = read_bundle(Path(folder) / "b.bundle")
        for name, photos in _photos(bundle, options):
            z = _unit(bundle, photos.x)
            for count in (20, 80):
                for bursts in (False, True):
                    found = [
                        false_alarms(z, photos.y, count, options.devices, seed, bursts=bursts)
                        for seed in range(options.seeds)
                    ]
                    false, possible = (sum(column) for column in zip(*found, strict=True))
                    stream = "bursts" if bursts else "single photos"
                    alarms.append(f"| {name} | {count} | {stream} | {false} | {possible:,} | {false / possible:.5f} |")
            for change in (*SHIFTS, "one class replaced"):
                other = _unit(bundle, shifted(photos.x, SHIFTS[change], 0)) if change in SHIFTS else None
                for count in (20, 80):
                    hits = [measured(z, other, photos.y, count, options.devices, seed) for seed in range(options.seeds)]
                    cells = [f"{np.mean([hit[figure] for hit in hits]):.1f}" for figure in (*FIGURES, "any")]
                    lines.append(f"| {name} | {change} | {count} | {' | '.join(cells)} |")
                print(f"{name}, {change}", file=sys.stderr, flush=True)
    printed = [f"Of {options.devices} devices suspected, mean of {options.seeds} seeds:", "", *lines, "", *alarms]
    print("\n".join(printed))
    if options.markdown:
        Path(options.markdown).write_text("\n".join(printed) + "\n", encoding="utf-8")


def _unit(bundle: Bundle, x: Photo) -> NDArray[np.float64]:
    features = features_of(bundle, LocalData(x, np.zeros(len(x), np.int64)), 2).x
    return np.asarray(unit_rows(features.astype(np.float64)), dtype=np.float64)


def _photos(bundle: Bundle, options: argparse.Namespace) -> Iterator[tuple[str, LocalData]]:
    yield "sign_digits", load_data(options.signs, bundle.manifest, purpose="train")
    train, rng = load_dataset(options.cifar).train, np.random.default_rng(0)
    yield "CIFAR-10", enlarged(take(train, np.sort(rng.permutation(len(train))[:PHOTOS])), 128)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signs", required=True)
    parser.add_argument("--cifar", required=True)
    parser.add_argument("--devices", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--markdown", help="write the tables to this file, too")
    return parser.parse_args()


if __name__ == "__main__":
    main()

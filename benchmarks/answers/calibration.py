"""How true probabilities are, and what a device's own class shares add to its answers.

    python -m benchmarks.answers.calibration --signs DIR --cifar DIR --fashion DIR [--seeds 5] [--markdown FILE]

`--signs` is a folder per class of photos of hands (sign language digits), `--cifar` and `--fashion` are CIFAR-10 and
Fashion-MNIST in the Hub's parquet layout, of whose training parts 6,000 photos are drawn. Features are those of the
shipped extractor (`protofleet-photos`). For each seed, photos are dealt to `DEVICES` devices: evenly, or by a Dirichlet
distribution over classes. Of each device's photos `HELD` are held out, and as many test. Then, for each method:

1. One round runs as in the field (`protofleet/advice/frozen_fleet.py`).
2. Devices make reports of their held-out photos, an aggregator's table pools them, and devices count in bins at what it
   chose (`edge_client/device/calibration.py`, `aggregator/monitoring/calibration.py`).
3. Devices answer about their test photos, in random order, as `Predictor` does.

The baselines: the fleet's head without class shares, and softmax over its scores without a temperature. Test photos
choose nothing.

Printed are means over devices and seeds, with the standard deviation over seeds: right answers by the fleet's head, and
what the shares add, on the average and to the device that gains least; the expected calibration error before and after;
how many photos a set of stated coverage 0.9 holds the right class of, and how large it is. A second table moves
devices: each answers about the photos of another one, and about a class that it never had.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.heads.pretrained_fleet import enlarged
from protofleet.advice.frozen_fleet import FrozenFleet, features_of
from protofleet.aggregator.monitoring.calibration import fleet_calibration
from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.bundle.shipped_extractor import photos_bundle
from protofleet.contract.bundle.uplink_bytes import Rung, rungs
from protofleet.contract.calibration import Bins, Calibration
from protofleet.contract.heads.answers import Answer
from protofleet.contract.wire.calibration_messages import AnnouncedCalibration
from protofleet.edge_client.answers.class_shares import ClassShares
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.data.load import load_data
from protofleet.edge_client.device.calibration import HeldOut
from protofleet.export.bundles.fleet_bundle import fleet_bundle
from protofleet.lab.data.datasets import load_dataset, take
from protofleet.lab.data.partition import Partition, partition

DEVICES, HELD, PHOTOS, COVERAGE = 20, 0.15, 6_000, 0.9
MIXES = {"Dir(0.1)": 0.1, "Dir(0.5)": 0.5, "even": 1e5}
WAYS = ("ncm", "fedcof groups=4", "ffc", "ffc discriminant")
NEW_SIGHTS, MOVED = 12, (10, 60)
Rows = NDArray[np.int64]
Scores = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Part:
    """A device's photos: rows of the features."""

    train: Rows
    held: Rows
    test: Rows


def parts_of(labels: Rows, alpha: float, seed: int) -> list[Part]:
    """Photos of each device, cut in three."""
    spec = Partition("dirichlet", DEVICES, alpha=alpha, min_classes=1, min_client_samples=20)
    dealt, rng = partition(labels, spec, seed=seed), np.random.default_rng(seed)
    found = []
    for rows in map(rng.permutation, dealt):
        count = int(HELD * len(rows))
        found.append(Part(rows[2 * count :], rows[:count], rows[count : 2 * count]))
    return found


@dataclass(frozen=True, eq=False)
class Fleet:
    """Devices of one method after a round, and what their reports made."""

    answer: Answer
    announced: AnnouncedCalibration
    held: list[HeldOut]

    def scores(self, features: NDArray[np.float32]) -> Scores:
        return self.answer.scores(features) / self.answer.scale


def fleet_of(bundle: Bundle, rung: Rung, photos: LocalData, parts: list[Part]) -> Fleet:
    """One round, the reports of all devices, and what the aggregator announces of them, twice."""
    shares = [LocalData(photos.x[part.train], photos.y[part.train]) for part in parts]
    everyone = FrozenFleet(bundle, shares, LocalData(photos.x[:1], photos.y[:1]))
    way, answer = next(iter(everyone.answers(rung).items()))
    held = []
    for share, part in zip(shares, parts, strict=True):
        scores = (answer.scores(photos.x[part.held]) / answer.scale).astype(np.float32)
        counts = np.bincount(share.y, minlength=bundle.manifest.classes)
        held.append(HeldOut(way, scores, photos.y[part.held], counts, version=1))
    announced = AnnouncedCalibration()
    for _ in range(2):
        reports = {str(n): report for n, each in enumerate(held) if (report := each.report(announced)) is not None}
        announced = fleet_calibration(reports, announced)
    return Fleet(answer, announced, held)


def answered(fleet: Fleet, device: int, scores: Scores, strength: float | None = None) -> Scores:
    """Log probabilities (N, C) of photos in order, as a device answers about them."""
    plain = fleet.announced.calibration
    plain = Calibration(plain.temperature, plain.strength if strength is None else strength)
    if not plain.strength:
        return plain.log_probabilities(scores)
    seen = ClassShares(fleet.held[device].counts)
    return plain.log_probabilities(
        scores, seen.follow(np.exp(Calibration(plain.temperature).log_probabilities(scores)))
    )


def error_of(found: list[tuple[Scores, Rows]]) -> float:
    bins = [Bins.of(scores, labels) for scores, labels in found if len(labels)]
    return sum(bins[1:], bins[0]).error


def measured(fleet: Fleet, photos: LocalData, parts: list[Part], seed: int) -> dict[str, float]:
    """The figures of one fleet: see this file's beginning."""
    rng, gains, plain_right, raw, after = np.random.default_rng(seed), [], [], [], []
    bins = fleet.announced.bins
    least = 0.0 if bins is None else bins.least_in_set(COVERAGE)
    covered, sizes = [], []
    for device, part in enumerate(parts):
        rows = rng.permutation(part.test)
        if len(rows) < 5:
            continue
        labels, plain = photos.y[rows], fleet.answer.scores(photos.x[rows])
        scores = plain / fleet.answer.scale
        found = answered(fleet, device, scores)
        raw.append((Calibration().log_probabilities(plain), labels))
        after.append((found, labels))
        plain_right.append(float((plain.argmax(axis=1) == labels).mean()))
        gains.append(float((found.argmax(axis=1) == labels).mean()) - plain_right[-1])
        members = np.exp(found) >= least
        members[np.arange(len(rows)), found.argmax(axis=1)] = True
        covered.extend(members[np.arange(len(rows)), labels])
        sizes.extend(members.sum(axis=1))
    return {
        "fleet": 100 * float(np.mean(plain_right)),
        "gain": 100 * float(np.mean(gains)),
        "least gain": 100 * min(gains),
        "strength": fleet.announced.strength,
        "raw error": error_of(raw),
        "error": error_of(after),
        "covered": 100 * float(np.mean(covered)),
        "size": float(np.mean(sizes)),
    }


def moved(fleet: Fleet, photos: LocalData, parts: list[Part], seed: int) -> dict[str, list[float]]:
    """Devices in another one's place, and with a class that is new to them: by figure, what the shares add, in points.

    `fixed` are shares that never change: those of the device's own labels.
    """
    rng, found = np.random.default_rng(seed), defaultdict(list)
    strength, temperature = fleet.announced.strength or 1.0, fleet.announced.temperature
    trained = np.concatenate([part.train for part in parts])
    for device, part in enumerate(parts):
        other = parts[(device + 7) % len(parts)]
        rows = rng.permutation(np.concatenate([other.test, other.held]))
        labels, scores = photos.y[rows], fleet.scores(photos.x[rows])
        plain = scores.argmax(axis=1) == labels
        right = answered(fleet, device, scores, strength).argmax(axis=1) == labels
        held = fleet.held[device]
        fixed = Calibration(temperature, strength).log_probabilities(scores, held.log_shares).argmax(axis=1) == labels
        for name, span in (("moved, first 10", slice(0, 10)), ("moved, 11 to 60", slice(10, 60))):
            if len(rows) >= MOVED[1]:
                found[name].append(100 * float(right[span].mean() - plain[span].mean()))
                found[f"{name}, fixed"].append(100 * float(fixed[span].mean() - plain[span].mean()))
        strange = np.flatnonzero(held.counts == 0)
        if len(strange) and len(part.test) >= 5:
            new = rng.permutation(np.setdiff1d(np.flatnonzero(photos.y == rng.choice(strange)), trained))[:NEW_SIGHTS]
            usual = rng.choice(part.test, 2 * len(new))
            mixed = np.stack([usual[::2], usual[1::2], new], axis=1).ravel()  # every third is of the new class
            scores = fleet.scores(photos.x[mixed])
            right = answered(fleet, device, scores, strength).argmax(axis=1) == photos.y[mixed]
            plain = scores.argmax(axis=1) == photos.y[mixed]
            for name, span in (("new class, sights 1 to 4", slice(0, 12)), ("new class, sights 5 on", slice(12, None))):
                if len(new) == NEW_SIGHTS:
                    found[name].append(100 * float(right[span][2::3].mean() - plain[span][2::3].mean()))
    return found


def main() -> None:
    """Measure all data sets, print two tables."""
    options = _options()
    first: dict[tuple[str, str, str], list[dict[str, float]]] = defaultdict(list)
    second: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as folder:
        fleet_bundle(read_bundle(photos_bundle()), [str(n) for n in range(10)], Path(folder) / "b.bundle")
        bundle = read_bundle(Path(folder) / "b.bundle")
        ways = [rung for rung in rungs(bundle.manifest) if rung.name in WAYS]
        for name, photos in photo_features(bundle, options):
            print(f"{name}: {len(photos):,} photos", file=sys.stderr, flush=True)
            for mix, alpha in MIXES.items():
                for seed in range(options.seeds):
                    parts = parts_of(photos.y, alpha, seed)
                    for rung in ways:
                        fleet = fleet_of(bundle, rung, photos, parts)
                        first[name, mix, rung.name].append(measured(fleet, photos, parts, seed))
                        for figure, values in moved(fleet, photos, parts, seed).items() if mix == "Dir(0.1)" else ():
                            second[name, rung.name][figure].append(float(np.mean(values)))
    lines = [*_first(first), "", *_second(second)]
    print("\n".join(lines))
    if options.markdown:
        Path(options.markdown).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _first(found: dict[tuple[str, str, str], list[dict[str, float]]]) -> Iterator[str]:
    yield (
        "| photos | classes of a device | way | fleet's head, % right | own shares add | device that gains least "
        "| strength | calibration error: softmax | calibrated | sets of 0.9 hold, % | classes in a set |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for (name, mix, way), rows in found.items():
        mean = {figure: float(np.mean([row[figure] for row in rows])) for figure in rows[0]}
        spread = float(np.std([row["gain"] for row in rows], ddof=1)) if len(rows) > 1 else 0.0
        yield (
            f"| {name} | {mix} | {way} | {mean['fleet']:.1f} | {mean['gain']:+.1f} ± {spread:.1f} "
            f"| {mean['least gain']:+.1f} | {mean['strength']:.2f} | {mean['raw error']:.2f} | {mean['error']:.3f} "
            f"| {mean['covered']:.1f} | {mean['size']:.1f} |"
        )


def _second(found: dict[tuple[str, str], dict[str, list[float]]]) -> Iterator[str]:
    figures = sorted({figure for rows in found.values() for figure in rows})
    yield f"| photos, Dir(0.1) | way | {' | '.join(figures)} |"
    yield f"| --- | --- |{' --- |' * len(figures)}"
    for (name, way), rows in found.items():
        cells = [f"{np.mean(rows[figure]):+.1f}" if rows.get(figure) else "–" for figure in figures]
        yield f"| {name} | {way} | {' | '.join(cells)} |"


def photo_features(bundle: Bundle, options: argparse.Namespace) -> Iterator[tuple[str, LocalData]]:
    yield "sign_digits", features_of(bundle, load_data(options.signs, bundle.manifest, purpose="train"), 2)
    for name, path in (("CIFAR-10", options.cifar), ("Fashion-MNIST", options.fashion)):
        train, rng = load_dataset(path).train, np.random.default_rng(0)
        some = take(train, np.sort(rng.permutation(len(train))[:PHOTOS]))
        if some.x.shape[-1] == 1:
            some = LocalData(np.repeat(some.x, 3, axis=-1), some.y)
        yield name, features_of(bundle, enlarged(some, 128), 2)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("signs", "cifar", "fashion"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--markdown", help="write the tables to this file, too")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""What `protofleet suggest` is worth: right answers after as many names as random choice gets.

    python -m benchmarks.answers.labelling --signs DIR --cifar DIR [--seeds 10] [--markdown FILE]

`--signs` is a folder per class of photos of hands (sign language digits), `--cifar` CIFAR-10 in the Hub's parquet
layout. Features are those of the shipped extractor (`protofleet-photos`). For each seed a third of the photos tests,
and 1,000 photos of the others come without a name:

- `balanced`: as the data has them;
- `skewed`: classes by a Dirichlet distribution of 0.3;
- `bursts`: skewed, and each photo is a burst of 1 to 39 frames: moved by up to 4 pixels, brighter or darker by up to
  10 %, with noise.

A person then names 50 of them, ten at a time: those that are suggested, or random ones. A cold start has no names, a
warm one 50 random ones. The head that is unsure is the nearest class mean. Then each head (`ffc` with `form=ridge`) is
made of all named photos, and answers about the test photos, whose classes are even. What is printed is the paired
difference to random choice in points, and its 95 % interval over seeds (Student's t). Test photos choose nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.heads.pretrained_fleet import enlarged
from protofleet.advice.frozen_fleet import FrozenFleet, features_of
from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.bundle.shipped_extractor import photos_bundle
from protofleet.contract.bundle.uplink_bytes import Rung, rungs
from protofleet.contract.heads.answers import Answer
from protofleet.contract.heads.sphere import unit_rows
from protofleet.edge_client.answers.suggestions import suggested, uncertainty_of
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.data.load import load_data
from protofleet.export.bundles.fleet_bundle import fleet_bundle
from protofleet.lab.data.datasets import load_dataset, take

STREAM, NAMED, AT_ONCE, CLASSES, PHOTOS = 1_000, 50, 10, 10, 6_000
WAYS = ("ncm", "fedcof groups=4", "ffc", "ffc discriminant")
STREAMS = ("balanced", "skewed", "bursts")
T_95 = {9: 2.262, 19: 2.093, 4: 2.776, 2: 4.303, 1: 12.706}  # Student's t, by degrees of freedom
Rows = NDArray[np.int64]


def drawn(kind: str, labels: Rows, rng: np.random.Generator) -> Rows:
    """Rows of a stream; those of a burst follow each other."""
    if kind == "balanced":
        return rng.permutation(len(labels))[:STREAM]
    share = rng.dirichlet([0.3] * CLASSES)
    weight = share[labels] / np.bincount(labels, minlength=CLASSES)[labels]
    if kind == "skewed":
        return rng.choice(len(labels), STREAM, replace=False, p=weight / weight.sum())
    rows: list[int] = []
    while len(rows) < STREAM:
        rows += [int(rng.choice(len(labels), p=weight / weight.sum()))] * int(rng.integers(1, 40))
    return np.array(rows[:STREAM])


def frames(x: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Each photo as another frame of a moving camera."""
    moved = np.empty_like(x)
    for row, photo in enumerate(x):
        shift = rng.integers(-4, 5, 2)
        light = rng.uniform(0.9, 1.1)
        noise = rng.normal(0.0, 3.0, photo.shape)
        moved[row] = np.clip(np.roll(photo, shift, (0, 1)) * light + noise, 0, 255).astype(np.uint8)
    return moved


def answer_of(bundle: Bundle, rung: Rung, named: LocalData) -> Answer:
    """The head of some named photos, as a fleet of one device gets it."""
    return next(iter(FrozenFleet(bundle, [named], named).answers(rung).values()))


def chosen(bundle: Bundle, ncm: Rung, photos: LocalData, start: Rows, seed: int) -> Rows:
    """The rows that have a name at last, by suggestion, ten at a time."""
    z = np.asarray(unit_rows(photos.x.astype(np.float64)), np.float32)
    named = [int(row) for row in start]
    for turn in range(NAMED // AT_ONCE):
        left = np.setdiff1d(np.arange(len(photos)), named)
        unsure = np.ones(len(left))
        if named:
            answer = answer_of(bundle, ncm, LocalData(photos.x[named], photos.y[named]))
            unsure = uncertainty_of(answer.scores(photos.x[left]), answer.scale)
        found = suggested(z[left], unsure, z[named], AT_ONCE, seed=1_000 * seed + turn)
        named += [int(left[one.row]) for one in found]
    return np.array(named)


def one(
    bundle: Bundle, ways: list[Rung], features: LocalData, images: LocalData, kind: str, seed: int
) -> Iterator[tuple[str, str, float]]:
    """Of one stream: start, way, and how many points suggestions are ahead of random choice."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(features))
    test, rest = order[: len(order) // 3], order[len(order) // 3 :]
    rows = rest[drawn(kind, features.y[rest], rng)]
    photos = take(features, rows)
    if kind == "bursts":
        photos = features_of(bundle, LocalData(frames(images.x[rows], rng), images.y[rows]), 2)
    ncm = next(rung for rung in ways if rung.name == "ncm")
    for name, start in (("cold", 0), ("warm", NAMED)):
        first = rng.choice(len(photos), start, replace=False)
        others = np.setdiff1d(np.arange(len(photos)), first)
        by_chance = np.concatenate([first, rng.choice(others, NAMED, replace=False)])
        by_choice = chosen(bundle, ncm, photos, first, seed)
        for rung in ways:
            right = [
                float((answer_of(bundle, rung, take(photos, named))(features.x[test]) == features.y[test]).mean())
                for named in (by_choice, by_chance)
            ]
            yield name, rung.name, 100 * (right[0] - right[1])


def main() -> None:
    """Measure both data sets, print one table."""
    options = _options()
    found: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        fleet_bundle(read_bundle(photos_bundle()), [str(n) for n in range(CLASSES)], Path(folder) / "b.bundle")
        bundle = read_bundle(Path(folder) / "b.bundle")
        ways = [_published(rung) for rung in rungs(bundle.manifest) if rung.name in WAYS]
        for name, images in photos_of(bundle, options):
            features = features_of(bundle, images, 2)
            for kind in STREAMS:
                for seed in range(options.seeds):
                    for start, way, points in one(bundle, ways, features, images, kind, seed):
                        found[name, kind, start, way].append(points)
                print(f"{name}, {kind}", file=sys.stderr, flush=True)
    lines = list(_table(found, options.seeds))
    print("\n".join(lines))
    if options.markdown:
        Path(options.markdown).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _table(found: dict[tuple[str, str, str, str], list[float]], seeds: int) -> Iterator[str]:
    yield f"| photos | stream | start | {' | '.join(WAYS)} |"
    yield f"| --- | --- | --- |{' --- |' * len(WAYS)}"
    for name, kind, start in dict.fromkeys(key[:3] for key in found):
        cells = []
        for way in WAYS:
            points = np.array(found[name, kind, start, way])
            half = T_95.get(seeds - 1, 2.0) * float(points.std(ddof=1)) / seeds**0.5 if seeds > 1 else 0.0
            cells.append(f"{points.mean():+.1f} ± {half:.1f}")
        yield f"| {name} | {kind} | {start} | {' | '.join(cells)} |"


def _published(rung: Rung) -> Rung:
    """FFC's head as eq. 12 has it, whatever the counts are (docs/decisions/261)."""
    return replace(rung, hyper={**rung.hyper, "form": "ridge"}) if rung.name == "ffc" else rung


def photos_of(bundle: Bundle, options: argparse.Namespace) -> Iterator[tuple[str, LocalData]]:
    """Those of `options.signs` and `options.cifar`, as far as they are given."""
    if options.signs:
        yield "sign_digits", load_data(options.signs, bundle.manifest, purpose="train")
    if not options.cifar:
        return
    train, rng = load_dataset(options.cifar).train, np.random.default_rng(0)
    yield "CIFAR-10", enlarged(take(train, np.sort(rng.permutation(len(train))[:PHOTOS])), 128)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signs", required=True)
    parser.add_argument("--cifar", required=True)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--markdown", help="write the table to this file, too")
    return parser.parse_args()


if __name__ == "__main__":
    main()

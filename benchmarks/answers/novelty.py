"""How well `unknown` works on photos: hidden classes, and pictures of another kind, with the shipped extractor.

    python -m benchmarks.answers.novelty --signs DIR --cifar DIR --fashion DIR [--draws 4] [--markdown FILE]

`--signs` is a folder per class of photos of hands (sign language digits), `--cifar` and `--fashion` are CIFAR-10 and
Fashion-MNIST in the Hub's parquet layout. For each draw two classes are hidden. Of photos of the others 60 % make a
head; the rest are known photos. Pictures of another kind are of another data set. For each way of answering:

- AUROC of novelty, known photos against those of the hidden classes, and against another kind: by the largest score
  (what the product takes), 1 − the largest probability, the energy, the distance to the nearest class mean in units of
  its spread, the distance to the fifth nearest training photo, and Mahalanobis by FFC's sums. No device has the last
  two: the first keeps photos, and for the other nobody is sent the sums.
- With the limit of a device that has `HELD` held-out photos, as a mean over 20 drawings: how many known photos are
  lost, and how many of both kinds are found.

Means over draws.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.answers.calibration import WAYS, photo_features
from benchmarks.heads.unknown import auroc
from protofleet.advice.frozen_fleet import FrozenFleet
from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.bundle.shipped_extractor import photos_bundle
from protofleet.contract.bundle.uplink_bytes import Rung, rungs
from protofleet.contract.heads.answers import Answer, softmax
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.sums.statistics import ClassMeans, FeatureGram
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.device.calibration import HeldOut
from protofleet.edge_client.device.unknown import CentreNovelty, LargestScoreNovelty
from protofleet.export.bundles.fleet_bundle import fleet_bundle

HELD, LIMITS, OTHERS = 40, 20, 1_500
Rows = NDArray[np.floating]
Measure = Callable[[Rows], NDArray[np.float64]]


def measures(answer: Answer, train: LocalData, classes: int) -> dict[str, Measure]:
    """Every measure, from the photos (N, D) that made the head."""
    z = np.asarray(unit_rows(train.x.astype(np.float64)))
    present = np.unique(train.y)
    means = ClassMeans.of(z, train.y, classes).means[present]
    gram = FeatureGram.of(z, train.y, classes)
    within = (gram.matrix - (means * gram.counts[present, None]).T @ means) / len(z)
    inverse = np.linalg.inv(within + 1e-2 * np.trace(within) / len(within) * np.eye(len(within)))
    turned = means @ inverse

    def mahalanobis(rows: Rows) -> NDArray[np.float64]:
        u = np.asarray(unit_rows(rows.astype(np.float64)))
        own = np.einsum("nd,nd->n", u @ inverse, u)
        return (own[:, None] - 2 * u @ turned.T + np.einsum("cd,cd->c", turned, means)).min(axis=1)

    def nearest(rows: Rows) -> NDArray[np.float64]:
        near = np.asarray(unit_rows(rows.astype(np.float64))) @ z.T
        return -np.partition(near, -5, axis=1)[:, -5]

    def energy(rows: Rows) -> NDArray[np.float64]:
        scores = answer.scores(rows) / answer.scale  # type: ignore[arg-type]
        top = scores.max(axis=1)
        return np.asarray(-top - np.log(np.exp(scores - top[:, None]).sum(axis=1)))

    return {
        "largest score": LargestScoreNovelty(answer).of,  # type: ignore[dict-item]
        "1 − probability": lambda rows: 1 - softmax(answer.scores(rows) / answer.scale).max(axis=1),  # type: ignore[arg-type]
        "energy": energy,
        "nearest mean / spread": CentreNovelty(means, 1 - (means**2).sum(axis=1), unit=True).of,  # type: ignore[dict-item]
        "fifth nearest photo": nearest,
        "Mahalanobis": mahalanobis,
    }


def draw(
    bundle: Bundle, rung: Rung, photos: LocalData, other: Rows, seed: int
) -> tuple[dict[str, list[float]], list[float]]:
    """AUROC by measure (hidden, another kind); known photos lost, and found of both, in per cent."""
    rng = np.random.default_rng(seed)
    hidden = rng.choice(10, 2, replace=False)
    rows = rng.permutation(np.flatnonzero(~np.isin(photos.y, hidden)))
    cut = int(0.6 * len(rows))
    train, known = (LocalData(photos.x[part], photos.y[part]) for part in (rows[:cut], rows[cut:]))
    way, answer = next(iter(FrozenFleet(bundle, [train], known).answers(rung).items()))
    new = photos.x[np.isin(photos.y, hidden)]
    areas = {}
    for name, of in measures(answer, train, 10).items():
        usual = of(known.x)
        areas[name] = [auroc(usual, of(new)), auroc(usual, of(other))]
    usual, found = LargestScoreNovelty(answer).of(known.x), []
    strange = [LargestScoreNovelty(answer).of(each) for each in (new, other)]
    scores = (answer.scores(known.x) / answer.scale).astype(np.float32)
    for _ in range(LIMITS):
        held = rng.choice(len(known), HELD, replace=False)
        limit = HeldOut(way, scores[held], known.y[held], np.ones(10, np.int64), version=1).known().limit
        assert limit is not None
        rest = np.setdiff1d(np.arange(len(known)), held)
        found.append([100 * float((novelty > limit).mean()) for novelty in (usual[rest], *strange)])
    return areas, list(np.mean(found, axis=0))


def main() -> None:
    """Measure all data sets, print two tables."""
    options = _options()
    areas: dict[tuple[str, str], dict[str, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
    limits: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        fleet_bundle(read_bundle(photos_bundle()), [str(n) for n in range(10)], Path(folder) / "b.bundle")
        bundle = read_bundle(Path(folder) / "b.bundle")
        ways = [rung for rung in rungs(bundle.manifest) if rung.name in WAYS]
        sets = dict(photo_features(bundle, options))
        for (name, photos), other in zip(sets.items(), [*list(sets.values())[1:], sets["sign_digits"]], strict=True):
            for rung in ways:
                for seed in range(options.draws):
                    found, shares = draw(bundle, rung, photos, other.x[:OTHERS], seed)
                    for measure, pair in found.items():
                        areas[name, rung.name][measure].append(pair)
                    limits[name, rung.name].append(shares)
            print(name, file=sys.stderr, flush=True)
    lines = [*_areas(areas), "", *_limits(limits)]
    print("\n".join(lines))
    if options.markdown:
        Path(options.markdown).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _areas(found: dict[tuple[str, str], dict[str, list[list[float]]]]) -> Iterator[str]:
    names = list(next(iter(found.values())))
    yield f"| photos | way | {' | '.join(names)} |"
    yield f"| --- | --- |{' --- |' * len(names)}"
    for (photos, way), rows in found.items():
        cells = [" / ".join(f"{area:.2f}" for area in np.mean(rows[name], axis=0)) for name in names]
        yield f"| {photos} | {way} | {' | '.join(cells)} |"


def _limits(found: dict[tuple[str, str], list[list[float]]]) -> Iterator[str]:
    yield "| photos | way | known photos lost, % | hidden classes found, % | another kind found, % |"
    yield "| --- | --- | --- | --- | --- |"
    for (photos, way), rows in found.items():
        yield f"| {photos} | {way} | {' | '.join(f'{share:.1f}' for share in np.mean(rows, axis=0))} |"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("signs", "cifar", "fashion"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--markdown", help="write the tables to this file, too")
    return parser.parse_args()


if __name__ == "__main__":
    main()

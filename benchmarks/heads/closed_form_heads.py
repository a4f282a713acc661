"""Heads that need sums only, on frozen features: accuracy by number of samples, and by the bytes a device sends.

    python -m benchmarks.heads.closed_form_heads [--seeds 3] [--json FILE]
    python -m benchmarks.heads.closed_form_heads --data DIR_OF_CIFAR10 --cache DIR [--image-px 128]
                                           [--only bytes|samples]

Without `--data` the features are those of the images that ship with the package; with it, those of a pretrained
EfficientNet-Lite0, which are kept under `--cache` (`benchmarks/heads/frozen_features.py`).

1. By samples: for N from D/8 to 8 D, as far as there are images, test accuracy of FFC's head with a ridge of 1e-6
   (none), with the fixed one, with the one chosen from the sums (auto), with the one that leaving out each of five
   buckets of devices chooses, and with the best of the grid; of the nearest class mean; of the linear discriminant from
   FFC's sums, with its ridge chosen from the sums and with the best of the grid.
2. By bytes, N = 4,000 (with `--data`): class means alone, FedCOF's discriminant for 5 and 50 devices of 1, 2, 4, 8
   groups a class, FFC on features projected to 256 columns, FFC. Class means as f32, sums as f64.
3. The same with unequal classes (each half as frequent as the one before the last), tried on equal ones.

Nothing is chosen on test images, except in the columns and brackets marked "best", which are there to compare with.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.heads.frozen_features import Features, Frozen, Labels, pretrained, shipped
from protofleet.contract.heads.covariance import MeanSpread, WithinClass, random_groups, within_gram
from protofleet.contract.heads.discriminant import (
    choose_ridge_within,
    discriminant_head,
    nearest_mean_head,
    within_ridge_head,
    without_bias,
)
from protofleet.contract.heads.ridge import FIXED, choose_ridge
from protofleet.contract.heads.spectrum import RIDGES, Spectrum
from protofleet.contract.heads.sphere import projection
from protofleet.contract.sums.statistics import FeatureGram

SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0, 4 / 3, 2.0, 4.0, 8.0)  # N / D
LEFT_OUT_AT = (1 / 4, 1.0, 4.0)  # N / D at which buckets are left out: five decompositions each
NEAR_NONE = 1e-6  # what stands for the paper's ridge of 0
BUCKETS, SAMPLES, PROJECTED = 5, 4_000, 256

Right = Callable[[Features], float]


def by_samples(frozen: Frozen, seed: int) -> list[dict[str, Any]]:
    """A row for each N."""
    rows = []
    for share in SHARES:
        n = round(share * frozen.width)
        if n <= len(frozen.fit[1]):
            z, y = _drawn(frozen, np.random.default_rng([seed, n]).permutation(len(frozen.fit[1]))[:n])
            found = {**_ffc(frozen, z, y, buckets=share in LEFT_OUT_AT), **_within(frozen, _gram(frozen, z, y))}
            rows.append({"features": frozen.name, "width": frozen.width, "samples": n, "found": found})
            print(f"{frozen.name}, N = {n:,}", flush=True)
    return rows


def by_bytes(frozen: Frozen, seed: int, unequal: bool) -> dict[str, dict[str, float]]:
    """By what is sent: accuracies, and `bytes` a device."""
    rng = np.random.default_rng([seed, SAMPLES])
    z, y = _drawn(frozen, _unequal(frozen, rng) if unequal else rng.permutation(len(frozen.fit[1]))[:SAMPLES])
    width, classes = frozen.width, frozen.classes
    sums = 8.0 * (width * (width + 1) // 2 + width * classes)
    rows = {"FFC": {**_ffc(frozen, z, y), **_within(frozen, _gram(frozen, z, y)), "bytes": sums}}
    matrix = projection(width, PROJECTED, 0)
    narrow = Frozen(frozen.name, (z @ matrix, y), (frozen.test[0] @ matrix, frozen.test[1]))
    rows[f"FFC, {PROJECTED} columns"] = {
        **_ffc(narrow, *narrow.fit),
        **_within(narrow, _gram(narrow, *narrow.fit)),
        "bytes": 8.0 * (PROJECTED * (PROJECTED + 1) // 2 + PROJECTED * classes),
    }
    for devices in (5, 50):
        for groups in (1, 2, 4, 8):
            spread = MeanSpread.of(*_means(z, y, classes, devices, groups, rng), classes)
            found = {**_within(frozen, spread.within), "bytes": 4.0 * width * classes * groups}
            rows[f"means, {devices} devices, {groups} groups"] = found
    print(f"by bytes, {'unequal' if unequal else 'equal'} classes, seed {seed}", flush=True)
    return rows


def _ffc(frozen: Frozen, z: Features, y: Labels, buckets: bool = False) -> dict[str, float]:
    gram = FeatureGram.of(z, y, frozen.classes)
    start = time.perf_counter()
    spectrum = Spectrum.of(gram.matrix)
    chosen = choose_ridge(spectrum, gram.cross, gram.counts).ridge
    took = time.perf_counter() - start
    right = {float(r): _right(frozen, spectrum.solve(gram.cross, r)) for r in (*RIDGES, FIXED, NEAR_NONE)}
    found = {"auto": right[chosen], "fixed": right[FIXED], "none": right[NEAR_NONE], "best": max(right.values())}
    found |= {"ridge": chosen, "s": took}
    return {**found, "left out": right[_left_out(frozen, z, y)]} if buckets else found


def _left_out(frozen: Frozen, z: Features, y: Labels) -> float:
    """The ridge whose heads have the least squared error on each bucket of devices, made of the other buckets' sums."""
    parts = [FeatureGram.of(z[i::BUCKETS], y[i::BUCKETS], frozen.classes) for i in range(BUCKETS)]
    errors = np.zeros(len(RIDGES))
    for left, part in enumerate(parts):
        others = FeatureGram.zero(frozen.classes, frozen.width)
        for other in parts[:left] + parts[left + 1 :]:
            others = others.merge(other)
        spectrum, own = Spectrum.of(others.matrix), part.matrix
        for i, ridge in enumerate(RIDGES):
            head = spectrum.solve(others.cross, ridge)
            errors[i] += part.counts.sum() - 2 * (head * part.cross).sum() + ((head @ own) * head).sum()
    return float(RIDGES[errors.argmin()])


def _within(frozen: Frozen, within: WithinClass) -> dict[str, float]:
    """Of class means and a covariance: the nearest mean, the discriminant and its kin."""
    chosen, means = choose_ridge_within(within).ridge, within.means
    head = discriminant_head(within, chosen)
    nearest = nearest_mean_head(within)
    all_heads = [within.spectrum.solve(means, float(r)) for r in RIDGES]
    return {
        "nearest": _right(frozen, nearest.weights, nearest.bias),
        "discriminant": _right(frozen, head.weights, head.bias),
        "no bias": _right(frozen, without_bias(head, within)),
        "ridge form": _right(frozen, within_ridge_head(within, chosen).weights),
        "discriminant best": max(_right(frozen, w, -0.5 * (w * means).sum(1)) for w in all_heads),
        "discriminant ridge": chosen,
    }


def _gram(frozen: Frozen, z: Features, y: Labels) -> WithinClass:
    gram = FeatureGram.of(z, y, frozen.classes)
    return within_gram(gram.matrix, gram.cross, gram.counts)


def _means(
    z: Features, y: Labels, classes: int, devices: int, groups: int, rng: np.random.Generator
) -> tuple[Features, Labels, Labels]:
    """What the devices send: means (G, D), counts and classes (G,), of groups of two samples or more."""
    sent = []
    for mine in np.array_split(rng.permutation(len(y)), devices):
        into = random_groups(y[mine], groups, 2, rng)
        for label in range(classes):
            for group in range(groups):
                rows = z[mine][(y[mine] == label) & (into == group)]
                if len(rows) >= 2:
                    sent.append((rows.mean(axis=0), len(rows), label))
    means, counts, labels = zip(*sent, strict=True)
    return np.array(means), np.array(counts), np.array(labels)


def _unequal(frozen: Frozen, rng: np.random.Generator) -> NDArray[np.int64]:
    """SAMPLES rows or a few fewer; class c comes √2^−c times as often as class 0."""
    shares = np.sqrt(0.5) ** np.arange(frozen.classes)
    labels = frozen.fit[1]
    wanted = SAMPLES * shares / shares.sum()
    return np.concatenate(
        [rng.permutation(np.flatnonzero(labels == c))[: int(wanted[c])] for c in range(frozen.classes)]
    )


def _drawn(frozen: Frozen, rows: NDArray[np.int64]) -> tuple[Features, Labels]:
    return frozen.fit[0][rows], frozen.fit[1][rows]


def _right(frozen: Frozen, weights: Features, bias: Features | float = 0.0) -> float:
    z, y = frozen.test
    return float(((z @ weights.T + bias).argmax(axis=1) == y).mean())


def _cell(values: list[float]) -> str:
    return f"{100 * np.mean(values):.1f} ± {100 * np.std(values):.1f}"


def _print_samples(runs: list[list[dict[str, Any]]]) -> None:
    columns = ("none", "fixed", "auto", "left out", "best", "nearest", "discriminant", "discriminant best")
    print(f"\ntest accuracy, %, mean ± deviation over {len(runs)} seeds")
    print("| features | D | N | " + " | ".join(columns) + " | ridge, auto | s |")
    for same in zip(*runs, strict=True):
        found = [row["found"] for row in same]
        cells = [_cell([f[c] for f in found]) if c in found[0] else "" for c in columns]
        ridge, took = (float(np.exp(np.mean([np.log(f[key]) for f in found]))) for key in ("ridge", "s"))
        start = f"| {same[0]['features']} | {same[0]['width']:,} | {same[0]['samples']:,} | "
        print(start + " | ".join(cells) + f" | {ridge:.2g} | {took:.1f} |")


def _print_bytes(runs: list[dict[str, dict[str, float]]], words: str) -> None:
    columns = ("nearest", "auto", "best", "discriminant", "discriminant best", "no bias", "ridge form")
    print(f"\n{words}: test accuracy, %, N = {SAMPLES:,}, mean ± deviation over {len(runs)} seeds")
    print("| sent | kB a device | " + " | ".join(columns) + " |")
    for name in runs[0]:
        found = [run[name] for run in runs]
        cells = [_cell([f[c] for f in found]) if c in found[0] else "" for c in columns]
        print(f"| {name} | {found[0]['bytes'] / 1000:,.0f} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", metavar="DIR", help="CIFAR-10 in the Hub's parquet layout")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="where EfficientNet's features are kept")
    parser.add_argument("--image-px", type=int, default=128)
    parser.add_argument("--only", choices=("bytes", "samples"), help="with --data: one of the tables")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.data and options.cache is None:
        parser.error("--data needs --cache: features take minutes to compute")
    content: dict[str, Any] = {"schema": "protofleet.benchmark.heads/1"}
    if options.data:
        frozen = pretrained(options.data, options.image_px, options.cache)
        if options.only != "samples":
            for words, unequal in (("equal classes", False), ("unequal classes", True)):
                content[words] = [by_bytes(frozen, seed, unequal) for seed in range(options.seeds)]
                _print_bytes(content[words], words)
        if options.only != "bytes":
            content["samples"] = [by_samples(frozen, seed) for seed in range(options.seeds)]
    else:
        content["samples"] = [[r for f in shipped(seed) for r in by_samples(f, seed)] for seed in range(options.seeds)]
    if "samples" in content:
        _print_samples(content["samples"])
    if options.json:
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()

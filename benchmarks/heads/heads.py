"""Heads from the same frozen features, by what a device sends: bytes beside accuracy.

    python -m benchmarks.heads.heads [--data DIR_OF_CIFAR10 --cache DIR] [--seeds 3] [--on test|validation]
                               [--json FILE] [--markdown FILE] [--svg FILE]
    python -m benchmarks.heads.heads --few [--data DIR --cache DIR] [--seeds 3]

Features are those of the images that ship with the package (2,000 on the devices), and with `--data` those of a
pretrained EfficientNet-Lite0 of CIFAR-10 (4,000), kept under `--cache` (`benchmarks/heads/frozen_features.py`).
Samples are dealt at random to 5 devices, and to 50 for FedCOF, whose covariance is that of its devices' means;
everything else is the same for any number of devices. Every rung is the deployed method, its messages encoded as on
the wire (`lab/engine/frozen_heads.py`). Once with classes as they come, once unequal: class c comes √2^−c times as
often as the first.

Accuracy is told twice: with every class counting alike, and with classes as frequent as on the devices. Nothing is
chosen on the images that are asked about. `--on validation` asks about training images that no device has, and only the
rungs of FFC: it is what the default form was chosen by.

`--few` asks about the same images what heads of 2 to 12 samples a class answer, EfficientNet's features projected to
256 columns: the nearest mean, the discriminant with a ridge that is chosen however few there are, and FFC's ridge head.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.heads.frozen_features import Frozen, pretrained, shipped
from protofleet.contract.heads.covariance import within_gram
from protofleet.contract.heads.discriminant import LinearHead, choose_ridge_within, discriminant_head, nearest_mean_head
from protofleet.contract.heads.sphere import projection, unit_rows
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.hw_profiles.charts.marks import standalone
from protofleet.hw_profiles.charts.scatter import Mark, scatter
from protofleet.lab.engine.frozen_heads import RUNGS, Features, Measured, ladder
from tests.support.pooled_head import solve_head

FEW, MANY = 5, 50  # devices
EACH, DRAWS = (2, 3, 4, 5, 8, 12), 3  # samples a class, on the average; fleets for each seed
CASES = ("as they come", "unequal")


def cases(frozen: Frozen, seed: int, on: str) -> dict[str, list[dict[str, Any]]]:
    """Both cases for one kind of features: a row for each rung."""
    samples = 4_000 if len(frozen.fit[1]) > 10_000 else 2_000
    rng = np.random.default_rng([seed, samples])
    order = rng.permutation(len(frozen.fit[1]))
    aside, rest = order[:1_000], order[1_000:]
    asked = _features(frozen, aside) if on == "validation" else Features(*frozen.test)
    found = {}
    for case in CASES:
        rows = rest[:samples] if case == CASES[0] else _unequal(frozen.fit[1], rest, samples)
        counts = np.bincount(frozen.fit[1][rows], minlength=frozen.classes)
        wanted = [rung for rung in RUNGS if on == "test" or rung.method == "ffc"]
        few = ladder(_dealt(frozen, rows, FEW), asked, frozen.classes, wanted, seed=seed)
        spread = [rung for rung in wanted if rung.method == "fedcof"]
        many = ladder(_dealt(frozen, rows, MANY), asked, frozen.classes, spread, seed=seed)
        found[case] = [_row(each, counts, FEW) for each in few] + [_row(each, counts, MANY) for each in many]
        print(f"{frozen.name}, {case}, seed {seed}", flush=True)
    return found


def few(frozen: Frozen, seed: int) -> list[list[float]]:
    """Accuracy on validation images, for each of `EACH`: nearest mean, discriminant, ridge."""
    rng = np.random.default_rng([seed, 1])
    order = rng.permutation(len(frozen.fit[1]))
    z, y = frozen.fit
    if frozen.width > 1_024:
        z = np.asarray(unit_rows(z @ projection(frozen.width, 256, 0)))
    asked, found = order[:1_000], []
    for each in EACH:
        right = []
        for _ in range(DRAWS):
            rows = rng.choice(order[1_000:], each * frozen.classes, replace=False)
            gram = FeatureGram.of(z[rows], y[rows], frozen.classes)
            within = within_gram(gram.matrix, gram.cross, gram.counts)
            chosen = discriminant_head(within, choose_ridge_within(within, few=0).ridge)
            heads = (nearest_mean_head(within), chosen, LinearHead(solve_head(gram, "auto"), np.zeros(frozen.classes)))
            right.append([float((head.scores(z[asked]).argmax(axis=1) == y[asked]).mean()) for head in heads])
        found.append(list(np.mean(right, axis=0)))
    return found


def _print_few(found: dict[str, list[list[list[float]]]]) -> None:
    print("| features | samples a class | nearest mean | discriminant | ridge |\n| --- | ---: | ---: | ---: | ---: |")
    for name, runs in found.items():
        for each, values in zip(EACH, 100 * np.mean(runs, axis=0), strict=True):
            print(f"| {name} | {each} | " + " | ".join(f"{value:.1f}" for value in values) + " |")


def _row(each: Measured, counts: NDArray[np.int64], devices: int) -> dict[str, Any]:
    return {
        "head": each.rung.title + (f", {devices} devices" if each.rung.method == "fedcof" else ""),
        "bytes": each.uplink_bytes,
        "alike": each.balanced,
        "as frequent": float(np.nansum(each.of_class * counts) / counts.sum()),
        "told": each.told,
    }


def _features(frozen: Frozen, rows: NDArray[np.int64]) -> Features:
    return Features(frozen.fit[0][rows], frozen.fit[1][rows])


def _dealt(frozen: Frozen, rows: NDArray[np.int64], devices: int) -> list[Features]:
    return [_features(frozen, mine) for mine in np.array_split(rows, devices)]


def _unequal(labels: NDArray[np.int64], rows: NDArray[np.int64], samples: int) -> NDArray[np.int64]:
    """Of `rows`, at most `samples`, in their order; class c √2^−c times as often as class 0."""
    classes = int(labels.max()) + 1
    shares = np.sqrt(0.5) ** np.arange(classes)
    wanted = samples * shares / shares.sum()
    taken = [rows[labels[rows] == c][: int(wanted[c])] for c in range(classes)]
    return rows[np.isin(rows, np.concatenate(taken))]


def _table(name: str, case: str, runs: Sequence[list[dict[str, Any]]]) -> list[str]:
    lines = [f"| {name}, classes {case} | kB a device | classes alike | as frequent as on devices | chosen |"]
    lines.append("| --- | ---: | ---: | ---: | --- |")
    for same in zip(*runs, strict=True):
        alike, frequent = (100 * np.array([row[key] for row in same]) for key in ("alike", "as frequent"))
        cells = [f"{values.mean():.1f} ± {values.std():.1f}" for values in (alike, frequent)]
        size = np.mean([row["bytes"] for row in same]) / 1000
        lines.append(f"| {same[0]['head']} | {size:,.0f} | {' | '.join(cells)} | {same[0]['told']} |")
    return lines


def _chart(name: str, runs: Sequence[list[dict[str, Any]]]) -> str:
    kinds = {"nearest": "local", "FedCOF": "fed", "FFC": "ffc"}
    marks = []
    for same in zip(*runs, strict=True):
        title, kind = same[0]["head"], next(kinds[word] for word in kinds if same[0]["head"].startswith(word))
        sent, right = (float(np.mean([row[key] for row in same])) for key in ("bytes", "alike"))
        marks.append(Mark(title, kind, sent, right))
    return standalone(scatter(marks, f"accuracy against bytes from one device, {name}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", metavar="DIR", help="CIFAR-10 in the Hub's parquet layout")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="where EfficientNet's features are kept")
    parser.add_argument("--image-px", type=int, default=128)
    parser.add_argument("--on", choices=("test", "validation"), default="test")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--svg", type=Path, help="a chart of the first kind of features, classes as they come")
    parser.add_argument("--few", action="store_true", help="few samples a class, instead")
    options = parser.parse_args()
    if options.data and options.cache is None:
        parser.error("--data needs --cache: features take minutes to compute")
    found: dict[str, dict[str, list[list[dict[str, Any]]]]] = {}
    scarce: dict[str, list[list[list[float]]]] = {}
    for seed in range(options.seeds):
        wide = [pretrained(options.data, options.image_px, options.cache)] if options.data else []
        for frozen in [*wide, *shipped(seed)]:
            if options.few:
                scarce.setdefault(frozen.name, []).append(few(frozen, seed))
                continue
            for case, rows in cases(frozen, seed, options.on).items():
                found.setdefault(frozen.name, {}).setdefault(case, []).append(rows)
    if options.few:
        _print_few(scarce)
        return
    tables = [_table(name, case, runs) for name, by_case in found.items() for case, runs in by_case.items()]
    words = "\n\n".join("\n".join(table) for table in tables) + "\n"
    print(f"accuracy, %, on {options.on} images, mean ± deviation over {options.seeds} seeds\n\n{words}")
    if options.json:
        content = {"schema": "protofleet.benchmark.frozen-heads/1", "on": options.on, "found": found}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(_page(options, words))
    if options.svg:
        name, by_case = next(iter(found.items()))
        options.svg.write_text(_chart(name, by_case[CASES[0]]))


def _page(options: argparse.Namespace, words: str) -> str:
    asked = " --data DIR --cache DIR" if options.data else ""
    command = f"python -m benchmarks.heads.heads{asked} --seeds {options.seeds} --on {options.on}"
    return (
        "# Heads from the same frozen features, by what a device sends\n\n"
        f"Written by `{command}`, whose first lines say what is done. Accuracy in %, on {options.on} images, "
        f"mean ± deviation over {options.seeds} seeds; what was chosen is that of the first seed.\n\n{words}"
    )


if __name__ == "__main__":
    main()

"""Photos that are there twice: which ridge is chosen from the sums, and what it costs.

    python -m benchmarks.heads.copies [--seeds 2] [--features 1] [--cache DIR] [--copies 0 0.01 0.2] [--kinds exact
        frame]
    python -m benchmarks.heads.copies --advise [--seeds 5]
    python -m benchmarks.heads.copies --data DIR --cache DIR [--input-px 100] [--on test] [--short] [--shares 0.125 0.5
        1 2]
    python -m benchmarks.heads.copies --data DIR DIR ... --cache DIR --input-px 100 --a-class 10 [--on test] [--short]

Without `--data` the features are those of the images that ship with the package
(`benchmarks/heads/frozen_features.py`): 0 a trained `small_cnn`, 1 random ReLU of pixels, 2 untrained convolutions.
With it, EfficientNet-Lite0's of any data set of the lab, at 96 px, kept under `--cache`. N photos are dealt to five
devices, N from D / 8 to 8 D as far as there are photos, and 0, 0.1, 1, 5 and 20 % of them are added again: exactly;
with noise of 0.1, 1 and 5 % of a feature's length; ten times each with noise of 1 %; or as the next frame of a camera,
moved by up to 2 % of its width, 3 % lighter or darker, with noise of 2 grey levels in 255, through the network again.
A copy lies on the device of its photo (`within`), or on the next (`between`).

FFC's ridge head and discriminant and FedCOF's discriminant are made of the merged statistics of the deployed methods,
for each ridge of the grid. Told is how many points of accuracy each rule is behind the best ridge of the grid, which is
chosen on the photos that are asked about and stands there to compare with: the least estimated error (`least`), the
first local minimum seen from large ridges (`first`), the least with no ridge below 0.1 up to N = 1.5 D (`floor`), both
(`first, floor`), and what is deployed (`chosen`, df at most N / 3 + 2 C; `contract/heads/spectrum.py`). `--on
validation` asks about training photos that no device has; the rule was set there, and on what ships.

Several data sets are one, with the classes of each: many classes of few photos (`--a-class`), each of which counts
alike in the accuracy. `--columns` projects features at random, so that N comes near D with few photos of each class.
`--short` prints the least error and what is chosen alone, and names each case more than a point behind.

`--advise` asks `protofleet advise` about 400 photos that ship, of 100 of which there are five more frames (light ± 3 %,
noise of 2 grey levels): what it promises with copies on one side, as it does, and on both; and what 1,000 test images
give.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from benchmarks.heads.frozen_features import Frozen, Labels, efficientnet, shipped
from protofleet.advice.advice import Plan, advise
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.heads.covariance import MeanSpread, WithinClass, within_gram
from protofleet.contract.heads.discriminant import choose_ridge_within
from protofleet.contract.heads.ridge import choose_ridge
from protofleet.contract.heads.spectrum import RIDGES, Spectrum
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.data.load import hold_back, load_data
from protofleet.lab import data as lab_data
from protofleet.lab.data.datasets import load_dataset
from protofleet.lab.demo.shipped import BUNDLE
from protofleet.lab.engine.frozen_heads import Features, Rung, merge

DEVICES, ASIDE, FRAMES, IMAGE_PX = 5, 2_500, 2_048, 96
MOST, MOST_OF_EACH = (13_000, 3_000), (1_000, 500)  # photos to learn from and to ask about; of each of several sets
FASHION = Path(lab_data.__file__).parent / "fashion_mnist"
SHARES = (1 / 8, 1 / 2, 1.0, 2.0, 4.0, 8.0)  # N / D
COPIES = (0.0, 0.001, 0.01, 0.05, 0.2)
NOISE = {"exact": 0.0, "0.1 %": 0.001, "1 %": 0.01, "5 %": 0.05, "ten times": 0.01}
KINDS = (*NOISE, "frame")
WAYS = ("ncm", "ffc", "ffc discriminant")
RULES = ("least", "first", "floor", "first, floor", "chosen")
FLOOR, FLOORED = 0.1, 1.5

Rows = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Photos:
    """Features of photos to learn from and to ask about; of the first of `fit`, the next frame of a camera, too."""

    name: str
    fit: tuple[Rows, Labels]
    asked: tuple[Rows, Labels]
    frames: Rows

    @property
    def weights(self) -> Rows:
        """(N,) of the photos that are asked about: every class counts alike where there are several data sets."""
        y = self.asked[1]
        each = np.ones(len(y)) if "+" not in self.name else 1 / np.bincount(y)[y]
        return np.asarray(each / each.sum())

    @property
    def width(self) -> int:
        return self.fit[0].shape[1]

    @property
    def classes(self) -> int:
        return int(self.fit[1].max()) + 1


@dataclass(frozen=True, eq=False)
class Curve:
    """Of one head: the estimated error, degrees of freedom and accuracy in points of each ridge; what is chosen."""

    error: Rows
    freedom: Rows
    accuracy: Rows
    chosen: int
    is_limited: bool


def drawn(photos: Photos, count: int, seed: int) -> NDArray[np.int64]:
    """`count` rows of what there is to learn from, of up to half of which there are frames."""
    rng = np.random.default_rng([seed, count])
    few = min(len(photos.frames), count // 2)
    rest = len(photos.frames) + rng.permutation(len(photos.fit[1]) - len(photos.frames))
    return np.concatenate([rng.permutation(len(photos.frames))[:few], rest[: count - few]])


def drawn_of_each(photos: Photos, number: int, seed: int) -> NDArray[np.int64]:
    """`number` rows of every class."""
    rng, y = np.random.default_rng([seed, number]), photos.fit[1]
    rows = [rng.permutation(np.flatnonzero(y == label))[:number] for label in range(photos.classes)]
    return rng.permutation(np.concatenate(rows))


def cases(
    photos: Photos, rows: NDArray[np.int64], seed: int, shares_of_copies: Sequence[float], wanted: Sequence[str] | None
) -> Iterator[tuple[float, str, str, dict[str, Curve]]]:
    """(share of copies, their kind, where they lie, a curve of each head)."""
    count = len(rows)
    kinds = [kind for kind in KINDS if kind in (wanted or KINDS) and (kind != "frame" or len(photos.frames))]
    for copies in shares_of_copies:
        for kind in kinds if copies else ("none",):
            z, y, source = _with_copies(photos, rows, copies, kind, np.random.default_rng([seed, count, 1]))
            heads: dict[str, Curve] = {}
            for where in ("within", "between") if copies else ("within",):
                device = source % DEVICES
                device[count:] = (device[count:] + (where == "between")) % DEVICES
                heads |= _heads(photos, z, y, device, seed, only_fedcof=bool(heads))
                yield copies, kind, where, dict(heads)


def _with_copies(
    photos: Photos, rows: NDArray[np.int64], copies: float, kind: str, rng: np.random.Generator
) -> tuple[Rows, Labels, NDArray[np.int64]]:
    """Features, labels, and the place of each one's photo among `rows`; copies come last."""
    z, y = photos.fit[0][rows], photos.fit[1][rows]
    more = max(1, round(copies * len(rows))) if copies else 0
    if kind == "frame":
        source = rng.permutation(np.flatnonzero(rows < len(photos.frames)))[:more]
        new = photos.frames[rows[source]]
    else:
        drawn = rng.permutation(len(rows))
        source = np.repeat(drawn, 10)[:more] if kind == "ten times" else drawn[:more]
        new = _unit(z[source] + NOISE.get(kind, 0.0) * _unit(rng.normal(size=(more, z.shape[1]))))
    places = np.concatenate([np.arange(len(rows)), source])
    return np.concatenate([z, new]), np.concatenate([y, y[source]]), places


def _heads(
    photos: Photos, z: Rows, y: Labels, device: NDArray[np.int64], seed: int, only_fedcof: bool
) -> dict[str, Curve]:
    """FFC's sums are the same wherever a copy lies."""
    shares = [Features(z[device == one], y[device == one]) for one in range(DEVICES)]
    spread, _ = merge(Rung("", "fedcof"), shares, photos.classes, photos.width, seed=seed)
    assert isinstance(spread, MeanSpread)
    found = {"FedCOF": _discriminant(photos, spread.within)}
    if not only_fedcof:
        gram, _ = merge(Rung("", "ffc"), shares, photos.classes, photos.width)
        assert isinstance(gram, FeatureGram)
        found |= {"FFC, ridge": _ridge(photos, gram)}
        found |= {"FFC, discriminant": _discriminant(photos, within_gram(gram.matrix, gram.cross, gram.counts))}
    return found


def _ridge(photos: Photos, gram: FeatureGram) -> Curve:
    spectrum = Spectrum.of(gram.matrix)
    choice = choose_ridge(spectrum, gram.cross, gram.counts)
    right = _right(photos, _solved(spectrum, gram.cross), np.zeros(1))
    place = int(np.searchsorted(RIDGES, choice.ridge))
    return Curve(choice.criterion, choice.freedom, right, place, choice.is_limited)


def _discriminant(photos: Photos, within: WithinClass) -> Curve:
    """Of `discriminant_head` for every ridge; classes of which nobody has a photo are never the answer."""
    choice = choose_ridge_within(within)
    weights = _solved(within.spectrum, within.means)
    bias = np.where(within.present, -0.5 * (weights * within.means).sum(axis=2), -np.inf)
    place = int(np.searchsorted(RIDGES, min(choice.ridge, RIDGES[-1])))
    return Curve(choice.error, choice.freedom, _right(photos, weights, bias), place, choice.is_limited)


def _solved(spectrum: Spectrum, rows: Rows) -> Rows:
    """(R, C, D): `spectrum.solve` for every ridge at once, a tenth of the time."""
    inverse = 1 / (spectrum.values + spectrum.penalties(RIDGES))
    return np.asarray((spectrum.rotated(rows) * inverse[:, None]) @ spectrum.vectors.T)


def behind(curve: Curve, samples: int, width: int) -> dict[str, float]:
    """Points behind the best ridge, by rule."""
    floored = np.where((samples <= FLOORED * width) & (RIDGES < FLOOR * (1 - 1e-9)), np.inf, curve.error)
    places = (_least(curve.error), _first(curve.error), _least(floored), _first(floored), curve.chosen)
    return {rule: float(curve.accuracy.max() - curve.accuracy[p]) for rule, p in zip(RULES, places, strict=True)}


def _least(error: Rows) -> int:
    return int(np.flatnonzero(error <= error.min() * (1 + 1e-9))[-1])


def _first(error: Rows) -> int:
    place = len(error) - 1
    while place > 0 and error[place - 1] <= error[place]:
        place -= 1
    return place + _least(error[place:]) if np.isfinite(error[place]) else _least(error)


def _right(photos: Photos, weights: Rows, bias: Rows) -> Rows:
    """(R,) accuracy in points of heads (R, C, D) with bias (R, C), or (1,)."""
    z, y = photos.asked
    scores = (z @ weights.reshape(-1, photos.width).T).reshape(len(z), *weights.shape[:2]) + bias
    return np.asarray(100 * (photos.weights @ (scores.argmax(axis=2) == y[:, None])))


def _unit(rows: NDArray[np.floating]) -> Rows:
    return np.asarray(unit_rows(rows.astype(np.float64)))


# ── features ────────────────────────────────────────────────────────────────────────────────────────────────────────


def next_frames(x: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """What a camera that hardly moves sees next, of photos (N, H, W, c)."""
    out, most = np.empty_like(x), max(1, round(0.02 * x.shape[1]))
    for number, image in enumerate(x):
        moved = np.roll(image.astype(np.float32), tuple(rng.integers(-most, most + 1, 2)), (0, 1))
        out[number] = np.clip(np.rint(moved * rng.uniform(0.97, 1.03) + rng.normal(0, 2.0, moved.shape)), 0, 255)
    return out


def _pretrained(directory: str, input_px: int | None, cache: Path, on: str, most: tuple[int, int] = MOST) -> Photos:
    """Args: most: photos to learn from, and to ask about."""
    path = cache / f"copies-{Path(directory).name}{'' if most == MOST else f'-{most[0]}'}.npz"
    if not path.exists():
        shape = None if input_px is None else (input_px, input_px, 3)
        rng, data = np.random.default_rng(0), load_dataset(directory, shape)
        parts = [(part.x, part.y, rng.permutation(len(part))) for part in (data.train, data.test)]
        (x, y, order), (test_x, test_y, test_order) = parts
        order, test_order = order[: most[0]], test_order[: most[1]]
        frames = min(FRAMES, len(order) // 4)
        made = {
            "frames": efficientnet(next_frames(x[order[:frames]], rng), IMAGE_PX),
            "fit": efficientnet(x[order], IMAGE_PX),
            "test": efficientnet(test_x[test_order], IMAGE_PX),
        }
        cache.mkdir(parents=True, exist_ok=True)
        np.savez(path, fit_y=y[order], test_y=test_y[test_order], **made)
    with np.load(path) as kept:
        fit, asked = ((_unit(kept[part]), kept[f"{part}_y"].astype(np.int64)) for part in ("fit", "test"))
        frames_of = _unit(kept["frames"])
    if on == "validation":
        aside = min(ASIDE, len(fit[1]) // 5)
        fit, asked = (fit[0][:-aside], fit[1][:-aside]), (fit[0][-aside:], fit[1][-aside:])
    return Photos(f"EfficientNet-Lite0, {Path(directory).name}", fit, asked, frames_of)


def _side_by_side(directories: Sequence[str], input_px: int | None, cache: Path, on: str) -> Photos:
    """Some photos of several data sets, their classes one after another; those of which there are frames come first."""
    every = [_pretrained(one, input_px, cache, on, MOST_OF_EACH) for one in directories]
    starts = np.cumsum([0, *(one.classes for one in every)])
    seen = [len(one.frames) for one in every]
    fit = [(one.fit[0], one.fit[1] + start) for one, start in zip(every, starts, strict=False)]
    parts = [(z[:n], y[:n]) for (z, y), n in zip(fit, seen, strict=True)]
    parts += [(z[n:], y[n:]) for (z, y), n in zip(fit, seen, strict=True)]
    asked = [(one.asked[0], one.asked[1] + start) for one, start in zip(every, starts, strict=False)]
    joined = [(np.concatenate([z for z, _ in each]), np.concatenate([y for _, y in each])) for each in (parts, asked)]
    name = "EfficientNet-Lite0, " + " + ".join(Path(one).name for one in directories)
    return Photos(name, joined[0], joined[1], np.concatenate([one.frames for one in every]))


def _projected(photos: Photos, columns: int) -> Photos:
    """On so many random directions, orthogonal to each other."""
    onto = np.linalg.qr(np.random.default_rng(0).normal(size=(photos.width, columns)))[0]
    (z, y), (asked, asked_y), frames = photos.fit, photos.asked, photos.frames
    return Photos(photos.name, (_unit(z @ onto), y), (_unit(asked @ onto), asked_y), _unit(frames @ onto))


def _shipped(number: int, cache: Path | None) -> Photos:
    path = None if cache is None else cache / f"copies-shipped-{number}.npz"
    if path is not None and path.exists():
        with np.load(path) as kept:
            found = Frozen(str(kept["name"]), (kept["fit"], kept["fit_y"]), (kept["test"], kept["test_y"]))
    else:
        found = shipped(0, number + 1)[number]
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            (fit, fit_y), (test, test_y) = found.fit, found.test
            np.savez(path, name=found.name, fit=fit, fit_y=fit_y, test=test, test_y=test_y)
    return Photos(found.name, found.fit, found.test, found.fit[0][:0])


# ── what advise promises ────────────────────────────────────────────────────────────────────────────────────────────


def promises(seeds: int) -> None:
    """A line for each way of `WAYS`: mean over seeds, and over the promises' standard errors."""
    bundle = read_bundle(BUNDLE)
    every = load_data(FASHION / "train.parquet", bundle.manifest)
    others = load_data(FASHION / "test.parquet", bundle.manifest, purpose="test")
    found: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for seed in range(seeds):
        rows, again = np.random.default_rng(seed).permutation(len(every))[:400], np.repeat(np.arange(100), 5)
        rng = np.random.default_rng(1)
        light = rng.uniform(0.97, 1.03, (len(again), 1, 1, 1))
        first = every.x[rows]
        frames = np.clip(np.rint(first[again] * light + rng.normal(0, 2.0, first[again].shape)), 0, 255)
        x, y = np.concatenate([first, frames.astype(np.uint8)]), every.y[rows][np.r_[np.arange(400), again]]
        order = np.random.default_rng(1).permutation(len(y))
        learn, held = hold_back(LocalData(x[order], y[order]), share=0.2)
        one_side, independent = (advise(bundle, (learn, asked), Plan()) for asked in (held, others))
        with patch("protofleet.advice.advice.near_copies", lambda parts: np.arange(sum(map(len, parts)))):
            both_sides = advise(bundle, (learn, held), Plan())
        for ways in zip(one_side.ways, both_sides.ways, independent.ways, strict=True):
            found[ways[0].name].append((*(100 * way.accuracy for way in ways), 100 * ways[0].error))
    print("| way | promised, copies on one side | promised, copies on both | 1,000 test images |")
    print("| --- | ---: | ---: | ---: |")
    for name, each in found.items():
        if name in WAYS:
            one, both, test, error = np.mean(each, axis=0)
            print(f"| {name} | {one:.1f} (a run's standard error {error:.1f}) | {both:.1f} | {test:.1f} |")


# ── what is printed ─────────────────────────────────────────────────────────────────────────────────────────────────


def _print(photos: Photos, found: dict[tuple[str, str, int], list[tuple[str, Curve, int]]]) -> None:
    for head in ("FFC, ridge", "FFC, discriminant", "FedCOF"):
        print(f"\n{photos.name}, D = {photos.width:,}, {head}: most points behind the best ridge (mean)")
        print("| N | copies | best ridge | " + " | ".join(RULES) + " | doubted |")
        print("| ---: | --- | ---: | " + "---: | " * len(RULES) + "---: |")
        for (name, copies, count), curves in found.items():
            if name == head:
                lost = [behind(curve, samples, photos.width) for _, curve, samples in curves]
                cells = [f"{max(one[r] for one in lost):.1f} ({np.mean([one[r] for one in lost]):.1f})" for r in RULES]
                best, doubted = (np.mean([f(c) for _, c, _ in curves]) for f in (_best, lambda c: c.is_limited))
                print(f"| {count:,} | {copies} | {best:.1f} | " + " | ".join(cells) + f" | {100 * doubted:.0f} % |")


def _print_short(photos: Photos, found: dict[tuple[str, str, int], list[tuple[str, Curve, int]]]) -> None:
    """A row for each number of photos and share of copies, then every case more than a point behind."""
    heads, (old, new) = ("FFC, ridge", "FFC, discriminant", "FedCOF"), ("least", "chosen")
    print(f"\n{photos.name}, D = {photos.width:,}: best ridge, % / least error / chosen, most points behind (mean)")
    print("| N | copies | " + " | ".join(heads) + " |\n| ---: | --- |" + " ---: |" * len(heads))
    for count, copies in dict.fromkeys((count, copies) for _, copies, count in found):
        cells = []
        for head in heads:
            curves = found[head, copies, count]
            lost = [behind(curve, samples, photos.width) for _, curve, samples in curves]
            chosen, best = [one[new] for one in lost], np.mean([_best(curve) for _, curve, _ in curves])
            most = max(one[old] for one in lost)
            cells.append(f"{best:.1f} / {most:.1f} / **{max(chosen):.1f}** ({np.mean(chosen):.1f})")
        print(f"| {count:,} | {copies} | " + " | ".join(cells) + " |")
    for (head, copies, count), curves in found.items():
        for case, curve, samples in curves:
            if (lost := behind(curve, samples, photos.width))["chosen"] > 1:
                best, used = int(np.flatnonzero(curve.accuracy == curve.accuracy.max())[-1]), curve.chosen
                print(
                    f"{head}, N = {count:,}, {copies} {case}: {lost['chosen']:.1f} behind; ridge {RIDGES[used]:.2g} "
                    f"(df {curve.freedom[used]:.0f}), the best {RIDGES[best]:.2g} (df {curve.freedom[best]:.0f})"
                )


def _best(curve: Curve) -> float:
    return float(curve.accuracy.max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", metavar="DIR", help="a data set of the lab, or several side by side")
    parser.add_argument("--input-px", type=int, help="of its images, where they are not all of one small size")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="where features are kept")
    parser.add_argument("--on", choices=("validation", "test"), default="validation")
    parser.add_argument("--features", type=int, choices=(0, 1, 2), default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="N / D")
    parser.add_argument("--a-class", type=int, nargs="+", metavar="N", help="photos of each class, instead of --shares")
    parser.add_argument("--columns", type=int, metavar="N", help="features projected at random on so many columns")
    parser.add_argument("--short", action="store_true", help="one table: the least error and what is chosen")
    parser.add_argument("--copies", type=float, nargs="+", default=COPIES, help="shares of N")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="of copies; all of them by default")
    parser.add_argument("--advise", action="store_true", help="what advise promises of photos in bursts")
    options = parser.parse_args()
    if options.advise:
        promises(options.seeds)
        return
    if options.data and options.cache is None:
        parser.error("--data needs --cache: features take minutes to compute")
    if options.data and len(options.data) > 1:
        photos = _side_by_side(options.data, options.input_px, options.cache, options.on)
    elif options.data:
        photos = _pretrained(options.data[0], options.input_px, options.cache, options.on)
    else:
        photos = _shipped(options.features, options.cache)
    photos = photos if options.columns is None else _projected(photos, options.columns)
    sizes = options.a_class or [round(share * photos.width) for share in options.shares]
    draw = drawn_of_each if options.a_class else drawn
    if options.a_class and max(sizes) > (least := np.bincount(photos.fit[1]).min()):
        parser.error(f"--a-class, expected at most {least} photos, the smallest class's, got {max(sizes)}")
    found: dict[tuple[str, str, int], list[tuple[str, Curve, int]]] = defaultdict(list)
    for size in sizes:
        if size > len(photos.fit[1]):
            continue
        for seed in range(options.seeds):
            rows = draw(photos, size, seed)
            collect(found, photos, rows, seed, options.copies, options.kinds)
        print(f"N = {len(rows):,}", flush=True)
    (_print_short if options.short else _print)(photos, found)


def collect(
    found: dict[tuple[str, str, int], list[tuple[str, Curve, int]]],
    photos: Photos,
    rows: NDArray[np.int64],
    seed: int,
    shares_of_copies: Sequence[float],
    kinds: Sequence[str] | None,
) -> None:
    """Add the curves of every case of these rows; FFC's are the same wherever a copy lies."""
    for copies, kind, where, heads in cases(photos, rows, seed, shares_of_copies, kinds):
        more = max(1, round(copies * len(rows))) if copies else 0
        for head, curve in heads.items():
            if head == "FedCOF" or where == "within":
                case = f"{kind}, {where}, seed {seed}" if copies else f"seed {seed}"
                found[head, f"{100 * copies:g} %", len(rows)].append((case, curve, len(rows) + more))


if __name__ == "__main__":
    main()

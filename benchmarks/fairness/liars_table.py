"""Accuracy with none, one, two or three liars of ten, by lie and rule, and who was named: every table by one command.

    python -m benchmarks.fairness.liars_table [--data DIR] [--cache DIR] [--out results/liars.md]
    python -m benchmarks.fairness.liars_table --part frozen      and so on: one of the tables alone; the others stay as
        they were

- frozen   NCM and FFC over frozen features, one round (`benchmarks/fairness/liars.py`): iid, Dir(0.5), Dir(0.1)
- vouched  the same where few share classes, or most devices lie, beside two devices of the operator's own with half of
           `OWN` photos each: none, one or both of them are vouched for (`aggregate --vouch`). They send in every case
- trained  FedProto, five rounds, liars in the last (`benchmarks/fairness/liars_trained.py`): iid and Dir(0.5).
  `--data`: 15,000
           photos of all of Fashion-MNIST, otherwise the 6,000 of the shipped subset; `--samples` for fewer
- issue    FedProto, one device of five that lies from round 2 on (`benchmarks/fairness/one_liar.py`)

"as it is" merges whatever comes; "bounds" refuses what cannot be, leaves rows out that are too long, and caps weights;
"ours" is what `aggregate` does unless told otherwise: bounds, and who contradicts the others is left out. Cells are
mean ± deviation over seeds, in percent. "named": liars that were refused or left out by "ours", of how many, and honest
devices; in brackets who was suspected and no more. No number in the product was chosen on these photos.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.fairness import liars_trained, one_liar
from benchmarks.fairness.liars import LIES, SPREADS, SQUARES, Fleet, Guard, Lie, Named, round_of, show, statistic
from benchmarks.heads.frozen_features import trained
from protofleet.contract.methods import method as method_of
from protofleet.contract.sums.merge_rules import RULES, Rule

Row = dict[str, Any]
FROZEN, TRAINED = ("iid", "Dir(0.5)", "Dir(0.1)"), ("iid", "Dir(0.5)")
FEW = {"Dir(0.1)": (3, 6), "one class": (3, 6), "iid": (6,)}
COLUMNS: Sequence[tuple[Rule, Guard]] = [
    *((rule, "as it is") for rule in RULES), ("mean", "bounds"), *((rule, "ours") for rule in RULES)
]  # fmt: skip


def frozen(seeds: int, cache: Path | None) -> Iterator[Row]:
    kinds = [trained(seed, cache) for seed in range(seeds)]
    for spread in FROZEN:
        fleets = [Fleet.of(kind, SPREADS[spread], seed) for seed, kind in enumerate(kinds)]
        for name in ("ncm", "ffc"):
            means = method_of(name).statistic.is_class_means()
            columns = [each for each in COLUMNS if means or each[0] == "mean"]
            lies = {"none": Lie()} | dict(LIES) | ({} if means else dict(SQUARES))
            for label, liars in [("none", 0), *((lie, n) for lie in lies if lie != "none" for n in (1, 2, 3))]:
                row: Row = {"table": f"{name}, {spread}", "lie": label, "liars": liars, "accuracy": {}}
                named = Named()
                for fleet in fleets:
                    sent, guilty = fleet.sent(name, lies[label], liars), set(fleet.order[:liars])
                    honest = {d: s for d, s in sent.items() if d not in guilty}
                    for rule, guard in columns:
                        right, out, doubted = round_of(name, sent, fleet.test, rule=rule, guard=guard)
                        row["accuracy"].setdefault(f"{rule}, {guard}", []).append(right)
                    named.add(out, doubted, guilty)
                    right = round_of(name, honest, fleet.test, guard="as it is")[0]
                    row["accuracy"].setdefault("mean without them", []).append(right)
                yield row | {"named": named.words()}


def vouched(seeds: int, cache: Path | None) -> Iterator[Row]:
    kinds = [trained(seed, cache) for seed in range(seeds)]
    for spread, numbers in FEW.items():
        fleets = [Fleet.of(kind, SPREADS[spread], seed) for seed, kind in enumerate(kinds)]
        for name in ("ncm", "ffc"):
            for label, liars in [("none", 0), *((lie, n) for lie in ("label flip", "colluding") for n in numbers)]:
                row: Row = {"table": "two more of the operator's own", "lie": f"{name}, {spread}, {label}",
                            "liars": liars, "accuracy": {}, "named": ""}  # fmt: skip
                by_column = {"none vouched for": (), "one": ("own-0",), "two": ("own-0", "own-1")}
                told = {column: Named() for column in by_column}
                for fleet in fleets:
                    halves = zip(*(np.array_split(part, 2) for part in fleet.own), strict=True)
                    own = {f"own-{at}": statistic(name, half, 10) for at, half in enumerate(halves)}
                    sent = fleet.sent(name, LIES.get(label, Lie()), liars) | own
                    guilty = set(fleet.order[:liars])
                    honest = {d: s for d, s in sent.items() if d not in guilty}
                    for column, sure in by_column.items():
                        right, out, doubted = round_of(name, sent, fleet.test, vouched=sure)
                        row["accuracy"].setdefault(column, []).append(right)
                        told[column].add(out, doubted, guilty)
                    for column, made in (("without them", honest), ("its own alone", own)):
                        right = round_of(name, made, fleet.test, guard="as it is")[0]
                        row["accuracy"].setdefault(column, []).append(right)
                yield row | {"named": "; ".join(f"{column}: {each.words()}" for column, each in told.items())}


def fedproto(seeds: int, rounds: int, samples: int, data: str) -> Iterator[Row]:
    for spread in TRAINED:
        rows: dict[tuple[str, int], Row] = {}
        found: dict[tuple[str, int], Named] = {}
        with TemporaryDirectory() as folder:
            made = liars_trained.fleets(SPREADS[spread], seeds, rounds, samples, data, Path(folder))
            for seed, fleet in enumerate(made):
                alone = fleet.alone()
                for key in [("none", 0), *((lie, n) for lie in fleet.lies for n in (1, 2, 3))]:
                    given = fleet.with_liars(*key) if key[1] else fleet.sent
                    blank: Row = {"table": f"fedproto, {spread}", "lie": key[0], "liars": key[1], "accuracy": {}}
                    row, guilty = rows.setdefault(key, blank), set(fleet.liars[: key[1]])
                    for rule, guard in COLUMNS:
                        state, out, doubted = fleet.merged(given, rule, guard)
                        row["accuracy"].setdefault(f"{rule}, {guard}", []).append(fleet.accuracy(state))
                    found.setdefault(key, Named()).add(out, doubted, guilty)
                    state, _, _ = fleet.merged({d: s for d, s in given.items() if d not in guilty}, "mean", "as it is")
                    row["accuracy"].setdefault("mean without them", []).append(fleet.accuracy(state))
                    row["accuracy"].setdefault("alone", []).append(alone)
                print(f"fedproto, {spread}: seed {seed} done", flush=True)
        for key, row in rows.items():
            yield row | {"named": found[key].words()}


def issue(rounds: int, samples: int) -> Iterator[Row]:
    with TemporaryDirectory() as folder:
        fleet = one_liar.prepare(samples, Path(folder))
        for lie, by_column, stopped in one_liar.by_rule(fleet, rounds):
            accuracy = {column: [right] for column, right in by_column.items()}
            yield {"table": "fedproto, one of five from round 2 on", "lie": lie, "liars": int(lie != "nobody lies"),
                   "accuracy": accuracy, "named": stopped or "nobody"}  # fmt: skip


def markdown(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """Every part's tables, each with the command that made it."""
    lines = [
        "# What liars do, by rule, and who is named", "",
        "Written by `python -m benchmarks.fairness.liars_table`, whose "
             "first lines say what is done. Accuracy in %, mean ± deviation over seeds.", ""]  # fmt: skip
    for part in parts.values():
        lines += [f"`{part['command']}`", ""]
        for title in dict.fromkeys(row["table"] for row in part["rows"]):
            rows = [row for row in part["rows"] if row["table"] == title]
            columns = list(rows[0]["accuracy"])
            lines += [f"| {title}: lie | liars | {' | '.join(columns)} | named |"]
            lines += ["| --- |" + " ---: |" * (len(columns) + 1) + " --- |"]
            for row in rows:
                cells = " | ".join(show(row["accuracy"][column]) for column in columns)
                lines += [f"| {row['lie']} | {row['liars']} | {cells} | {row['named']} |"]
            lines += [""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("frozen", "vouched", "trained", "issue"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--data", default="")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results/liars.md"))
    options = parser.parse_args()
    told = f"--seeds {options.seeds} --rounds {options.rounds}" + (" --data DIR" if options.data else "")
    told += f" --samples {options.samples}" if options.samples else ""
    kept = options.out.with_suffix(".json")
    for name in [options.part] if options.part else ["frozen", "vouched", "trained", "issue"]:
        samples = options.samples or (15_000 if options.data else 0)
        rows = {
            "frozen": lambda: frozen(options.seeds, options.cache),
            "vouched": lambda: vouched(options.seeds, options.cache),
            "trained": lambda: fedproto(options.seeds, options.rounds, samples, options.data),  # noqa: B023
            "issue": lambda: issue(options.rounds, 1_500),
        }[name]()
        made: dict[str, Any] = {
            "command": f"python -m benchmarks.fairness.liars_table --part {name} {told}",
            "rows": [],
        }
        for row in rows:
            made["rows"].append(row)
            print(row["table"], row["lie"], row["liars"], row["named"], flush=True)
        parts = json.loads(kept.read_text())["parts"] if kept.exists() else {}
        content = {"schema": "protofleet.benchmark.liars/2", "parts": parts | {name: made}}
        kept.write_text(json.dumps(content, indent=1) + "\n")
        options.out.write_text(markdown(content["parts"]))
    print(options.out.read_text())


if __name__ == "__main__":
    main()

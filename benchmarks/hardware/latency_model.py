"""How well the latency model predicts models it has not seen, beside a plain roofline, row for row.

Leaves each model out in turn, then each architecture family, fits on the rest, and predicts what was left out. The
roofline gets one fitted efficiency for each setting; the last columns are the data sheet's roofline as it is. The rows
are a CSV of published times that does not ship with Protofleet; what was fitted on them does.

Then how often 80 % intervals hold, of all rows and of every group: each architecture family is left out, everything
is fitted and calibrated on the rest (where each family is left out again), and its rows are predicted. Where a runtime
on a device or a whole device is left out, the widths are those that the other runtimes or devices ask for.

    python -m benchmarks.hardware.latency_model --rows device_latency.csv [--json results/hardware-latency.json]
                                       [--markdown results/hardware-latency.md]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from protofleet.hw_profiles.devices.schema import load_devices
from protofleet.hw_profiles.latency.cross_validation import coverage_table, error_table, nested
from protofleet.hw_profiles.latency.fit import cross_validate, print_checks
from protofleet.hw_profiles.latency.published_rows import read_own_rows, read_rows

ROOT = Path(__file__).resolve().parents[2]
TARGET_MEDIAN, TARGET_P90 = 0.15, 0.40
TARGET_INSIDE = (0.75, 0.85)
_COVERED = {
    "by model": "a network whose family is known",
    "by runtime": "a runtime on a device",
    "by device": "a device",
}


def main() -> None:
    """Print the tables, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    devices = load_devices()
    rows, left_out = read_rows(args.rows, devices)
    every = rows + read_own_rows(ROOT / "hw_profiles" / "latency" / "own_rows.json")
    checks = cross_validate(every, devices)
    covered = {"an architecture family (nested)": coverage_table(nested(every, devices))}
    for name, title in _COVERED.items():
        covered[title] = coverage_table(checks[name])
    tables = {name: error_table(found) for name, found in checks.items()}
    console = Console(width=150)
    for name, found in checks.items():
        print_checks(console, f"Left out {name}", found)
    print(f"{len(rows)} published rows used; left out: {dict(left_out)}")
    for name, table in tables.items():
        line = table["all published"]
        met = line["ours_median"] <= TARGET_MEDIAN and line["ours_p90"] <= TARGET_P90
        print(
            f"left out {name}: median {100 * line['ours_median']:.1f} % (target {100 * TARGET_MEDIAN:.0f} %), 90th "
            f"percentile {100 * line['ours_p90']:.1f} % (target {100 * TARGET_P90:.0f} %): {'met' if met else 'missed'}"
        )
    for name, table in covered.items():
        share, failed = _inside(table), [group for group, row in table.items() if row["fails"]]
        low, high = (100 * end for end in TARGET_INSIDE)
        verdict = "met" if low <= 100 * share <= high else "missed"
        print(
            f"left out {name}: {100 * share:.1f} % of {table['all']['rows']:.0f} rows inside their 80 % interval "
            f"(target {low:.0f} to {high:.0f} %): {verdict}; groups that fail: {', '.join(failed) or 'none'}"
        )
    if args.json:
        result = {"schema": 1, "rows": len(rows), "left_out": dict(left_out), "checks": tables, "coverage": covered}
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.markdown:
        args.markdown.write_text(_markdown(tables) + "\n" + _coverage_markdown(covered), encoding="utf-8")


def _markdown(tables: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    lines = [
        "# The latency model on models it has not seen",
        "",
        "Made by `python -m benchmarks.hardware.latency_model`.",
        "",
    ]
    for name, table in tables.items():
        lines += [
            f"## Left out {name}",
            "",
            "| | rows | median | p90 | roofline median | p90 |",
            "| --- |" + " ---: |" * 5,
        ]
        lines += [_line(group, row) for group, row in table.items()] + [""]
    return "\n".join(lines)


def _inside(table: Mapping[str, Mapping[str, float]]) -> float:
    return table["all"]["inside"] / table["all"]["rows"]


def _coverage_markdown(covered: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """One table for each kind of left-out rows: inside, rows, p of a binomial test of 80 %, width."""
    lines = [
        "## How often 80 % intervals hold",
        "",
        "By what was left out. A group fails where a binomial test at 1 % rejects 80 %, be it too few or too many. "
        "Rows of one group are not independent: what is misjudged of a board is misjudged in all its rows.",
        "",
    ]
    for name, table in covered.items():
        lines += [
            f"### Left out: {name}",
            "",
            "| | rows | inside | share | p | high over low, median | |",
            "| --- |" + " ---: |" * 5 + " --- |",
        ]
        for group, row in table.items():
            verdict = "" if not row["fails"] else "too few" if row["inside"] < 0.8 * row["rows"] else "too many"
            lines.append(
                f"| {group} | {row['rows']:.0f} | {row['inside']:.0f} | {100 * row['inside'] / row['rows']:.0f} % | "
                f"{row['p']:.3f} | {row['high_over_low']:.2f} | {verdict} |"
            )
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def _line(group: str, row: Mapping[str, Any]) -> str:
    cells = [row[f"{who}_{what}"] for who in ("ours", "roofline") for what in ("median", "p90")]
    return f"| {group} | {row['rows']:.0f} | " + " | ".join(f"{100 * cell:.1f} %" for cell in cells) + " |"


if __name__ == "__main__":
    main()

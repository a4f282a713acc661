"""Fit the latency model to published rows and write `coefficients.json`:  python -m protofleet.hw_profiles.latency.fit
--rows CSV

In order: read the rows, leave models out in turn and print how well they are predicted (`cross_validation`), fit on
all rows, and write every setting that can be asked for: those with rows, and for each board the runtimes it has none
for. What is written says from which rows it came, how many were left out and why, and what the checks gave.
See docs/hardware.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from protofleet.contract.errors import ProtofleetError
from protofleet.hw_profiles.devices.schema import Device, load_devices
from protofleet.hw_profiles.latency.cross_validation import (
    LeftOut,
    by_model,
    error_table,
    leave_out,
    with_halves,
)
from protofleet.hw_profiles.latency.hierarchical_fit import LEVELS, NOISE, Fitted, fit_rows, kind_of
from protofleet.hw_profiles.latency.intervals import CASES, Case, calibrate, left_out_with
from protofleet.hw_profiles.latency.operator_classes import CLASSES, MACS
from protofleet.hw_profiles.latency.precisions import ON_PROCESSORS
from protofleet.hw_profiles.latency.published_rows import (
    ANY_DEVICE,
    ANY_X86,
    TRAINING_RUNTIME,
    Row,
    Setting,
    read_own_rows,
    read_rows,
)

__all__ = ["coefficient_table", "cross_validate", "main"]

_CPU_RUNTIMES = ("ncnn", "tflite", "onnxruntime")
_OWN_ROWS = Path(__file__).with_name("own_rows.json")
_GPU_RUNTIMES = ("tensorrt", "ncnn-vulkan")
_FEWEST_ROWS = 8  # fewer say little of a median


def cross_validate(rows: Sequence[Row], devices: Mapping[str, Device]) -> dict[str, list[LeftOut]]:
    """Every row predicted without its model, its whole family, its runtime on its device, its device: `by model`,
    `by family`, `by runtime`, `by device`. All have the intervals of other groups' left-out rows."""
    checks = {f"by {case}": _left_out(rows, devices, left_out_with(case)) for case in CASES}
    by_case = {f"by {case}": with_halves(checks[f"by {case}"], case) for case in CASES}
    return {"by model": with_halves(_left_out(rows, devices, by_model), known=checks["by family"]), **by_case}


def _left_out(rows: Sequence[Row], devices: Mapping[str, Device], together: Callable[[Row], str]) -> list[LeftOut]:
    return [one for group in leave_out(rows, devices, together) for one in group]


def coefficient_table(
    rows: Sequence[Row],
    devices: Mapping[str, Device],
    checks: Mapping[str, Sequence[LeftOut]],
    provenance: Mapping[str, object],
) -> dict[str, object]:
    """What `coefficients.json` holds: a plain table, ready for JSON."""
    fitted = fit_rows(rows, devices)
    count = Counter(row.setting for row in rows)
    settings = list(dict.fromkeys([*sorted(count), *_askable(devices)]))
    return {
        "schema": 2,
        "provenance": dict(provenance),
        "levels": {level.name: level.sd for level in LEVELS},
        "noise": NOISE,
        "intervals": {case: calibrate(checks[f"by {case}"], case).as_json() for case in CASES},
        "errors": {case: _errors(checks[f"by {case}"], case) for case in CASES},
        "sizes": _sizes(rows),
        "kinds": _kinds(rows),
        "checks": {name: _rounded(error_table(left_out)) for name, left_out in checks.items()},
        "classes": CLASSES,
        "fits": [_entry(fitted, setting, count[setting]) for setting in settings],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m protofleet.hw_profiles.latency.fit", description=__doc__)
    parser.add_argument("--rows", required=True, type=Path, help="the CSV of published rows")
    parser.add_argument(
        "--own-rows", type=Path, default=_OWN_ROWS, help="what benchmarks/hardware/host_latency.py measured"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("coefficients.json"))
    parser.add_argument("--devices-file", action="append", default=[], type=Path)
    args = parser.parse_args(argv)
    console = Console(width=140)  # the table of checks is wide
    try:
        devices = load_devices(args.devices_file)
        rows, left_out = read_rows(args.rows, devices)
        own = read_own_rows(args.own_rows)
    except ProtofleetError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    provenance = {
        "rows_sha256": hashlib.sha256(args.rows.read_bytes()).hexdigest(),
        "rows_used": len(rows),
        "own_rows_used": len(own),
        "rows_left_out": dict(left_out),
        "sources": dict(Counter(_publisher(row.source) for row in rows) + Counter(row.source for row in own)),
        "made_by": "python -m protofleet.hw_profiles.latency.fit",
    }
    rows = rows + own
    checks = cross_validate(rows, devices)
    for name, predictions in checks.items():
        print_checks(console, f"Predicted without its rows, left out {name}", predictions)
    table = coefficient_table(rows, devices, checks, provenance)
    args.out.write_text(_json(table), encoding="utf-8")
    console.print(f"{len(rows)} rows, {len(table['fits'])} settings -> {args.out}")  # type: ignore[arg-type]
    return 0


def print_checks(console: Console, title: str, left_out: Sequence[LeftOut]) -> None:
    """The table of errors: median and 90th percentile, ours beside the rooflines."""
    table = Table(title=title, title_justify="left")
    for heading in (
        "",
        "rows",
        "ours median",
        "p90",
        "inside 80 %",
        "roofline median",
        "p90",
        "data sheet median",
        "p90",
    ):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, row in error_table(left_out).items():
        cells = [row[f"{model}_{what}"] for model in ("ours", "roofline", "datasheet") for what in ("median", "p90")]
        shown = [f"{100 * value:.1f} %" for value in cells]
        table.add_row(name, f"{row['rows']:.0f}", *shown[:2], f"{100 * row['inside_80']:.0f} %", *shown[2:])
    console.print(table)


def _errors(left_out: Sequence[LeftOut], case: Case) -> dict[str, dict[str, float]]:
    """Median and 90th percentile of the error of left-out rows: of all (""), by `runtime`, and by `runtime, device`.

    Where a runtime is left out on its only device, none of its rows are left: then no line is its own.
    """
    groups: dict[str, list[float]] = {}
    devices: dict[str, set[str]] = {}
    for one in left_out:
        devices.setdefault(one.row.setting.runtime, set()).add(one.row.setting.device)
    for one in left_out:
        setting = one.row.setting
        names = [""]
        if case == "family":
            names += [setting.runtime, f"{setting.runtime}, {setting.device}"]
        elif len(devices[setting.runtime]) > 1:
            names.append(setting.runtime)
        for name in names:
            groups.setdefault(name, []).append(one.error)
    return {
        name: {
            "rows": len(found),
            "median": round(float(np.median(found)), 4),
            "p90": round(float(np.quantile(found, 0.9)), 4),
        }
        for name, found in sorted(groups.items())
        if len(found) >= _FEWEST_ROWS or not name
    }


def _sizes(rows: Sequence[Row]) -> dict[str, list[float]]:
    """The fewest and the most multiply-accumulates of the rows by `runtime` and by `runtime, device`."""
    sizes: dict[str, list[float]] = {}
    for row in rows:
        macs = float(row.demand[MACS].sum())
        for name in (row.setting.runtime, f"{row.setting.runtime}, {row.setting.device}"):
            low, high = sizes.get(name, [macs, macs])
            sizes[name] = [min(low, macs), max(high, macs)]
    return dict(sorted(sizes.items()))


def _kinds(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The kinds of processor that have rows, by `runtime` and by `precision`."""
    kinds: dict[str, set[str]] = {}
    for row in rows:
        for name in (row.setting.runtime, row.setting.precision):
            kinds.setdefault(name, set()).add(kind_of(row.setting))
    return {name: sorted(found) for name, found in sorted(kinds.items())}


def _askable(devices: Mapping[str, Device]) -> list[Setting]:
    """Settings that a user may ask for although nobody has published them."""
    settings = []
    boards = [d for d in devices.values() if d.name != "host"]
    for name in (*(d.name for d in boards), ANY_DEVICE, ANY_X86):
        device = devices.get(name)
        for threads in ("1", "all"):
            if device is None or device.cpu is not None:
                with_fp16 = device is None or (device.cpu is not None and device.cpu.fp16_macs_per_cycle is not None)
                for precision in (name for name in ON_PROCESSORS if with_fp16 or name != "fp16"):
                    settings += [Setting(name, "cpu", r, precision, threads) for r in _CPU_RUNTIMES]  # type: ignore[arg-type]
                settings.append(Setting(name, "cpu", TRAINING_RUNTIME, "fp32", threads))  # type: ignore[arg-type]
        if (device is None and name != ANY_X86) or (device is not None and device.gpu is not None):
            for precision in ON_PROCESSORS:
                settings.append(Setting(name, "gpu", "tensorrt", precision, "all"))  # type: ignore[arg-type]
            settings.append(Setting(name, "gpu", "ncnn-vulkan", "fp16", "all"))
    return settings


def _entry(fitted: Fitted, setting: Setting, rows: int) -> dict[str, object]:
    covariance = fitted.covariance(setting)[np.triu_indices(len(CLASSES))]
    return {
        "device": setting.device,
        "processor": setting.processor,
        "runtime": setting.runtime,
        "precision": setting.precision,
        "threads": setting.threads,
        "variant": setting.variant,
        "rows": rows,
        "offsets": [round(float(v), 4) for v in fitted.offsets(setting)],
        "covariance": [float(f"{v:.3g}") for v in covariance],
    }


def _rounded(table: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {name: {key: round(value, 4) for key, value in row.items()} for name, row in table.items()}


def _publisher(source: str) -> str:
    """The publisher's part of a row's source: `Tencent/ncnn benchmark`, `mlcommons/inference_results_v2.0 open`."""
    parts = source.replace("huggingface ", "").replace("HF ", "").split()
    return (
        parts[0] if parts[0].count("/") < 1 or len(parts) < 2 else f"{parts[0]} {parts[1].split('@')[0].split('/')[0]}"
    )


def _json(table: Mapping[str, object]) -> str:
    """One fit a line, so that a change of the coefficients can be read as a change."""
    fits = ",\n".join("  " + json.dumps(entry) for entry in table["fits"])  # type: ignore[attr-defined]
    head = json.dumps({key: value for key, value in table.items() if key != "fits"}, indent=1)
    return head[:-2] + ',\n "fits": [\n' + fits + "\n ]\n}\n"


if __name__ == "__main__":
    sys.exit(main())

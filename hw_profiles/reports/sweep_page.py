"""A sweep as one page to look around in: charts over a photo's time, filters, the arrays that no other beats.

The page is whole without its script: charts and the front of each method. `sweep.js`, which is in the page itself,
hides what a filter leaves out, finds the front of what is left, tells a point's figures on hover and click, and keeps
all of it in the address, so that a view can be linked to. Every text it shows is made here.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protofleet.hw_profiles.charts.fronts import Design, Measure, fronts
from protofleet.hw_profiles.reports.page import Table, render_page
from protofleet.hw_profiles.units import digits, nice_bytes, percent, size, time_text

__all__ = ["MOST_DRAWN", "sweep_page"]

MOST_DRAWN = 4_000  # points; beyond them some of those that others beat are left out of the page
_TEMPLATE = Path(__file__).with_name("sweep.html.j2")
_COLUMNS = (
    "array", "precision", "dataflow", "batch", "clock", "on-chip memory", "DDR", "a photo", "energy", "memory", "DSP",
    "LUT", "flip-flops", "block RAM", "of the chip",
)  # fmt: skip
_AXES = {
    "rows": "rows", "cols": "columns", "dataflow": "dataflow", "precision": "precision", "sram_bytes": "on-chip memory",
    "bandwidth_gb_s": "GB/s", "mhz": "MHz", "batch": "batch",
}  # fmt: skip
_TIME = Measure("a photo's time, logarithmic", time_text)
_UP = {
    "photo_mj": Measure("a photo's energy, logarithmic", lambda mj: f"{mj:g} mJ"),
    "memory_bytes": Measure("memory, logarithmic", nice_bytes),
    "chip_share": Measure("largest share of anything on the chip, logarithmic", lambda share: percent(share, 0)),
}
_TITLES = {"photo_mj": "Energy", "memory_bytes": "Memory", "chip_share": "Share of the chip"}


def sweep_page(report: Mapping[str, Any], target: str, options: Sequence[str] = ()) -> str:
    """A self-contained HTML document of one sweep.

    Args:
        target: what was costed, as the command line has it: in the commands that the page shows.
        options: words of that line that hold for every point: `--devices-file`, `--side`, `--depthwise`.

    Raises:
        UsageError: jinja2 is not installed.
    """
    points = _drawn(report["points"])
    common = (target, "--device", report["device"]["name"], *options)
    methods = list(dict.fromkeys(point["method"] for point in points))
    axes = {name: list(dict.fromkeys(_axis_text(name, p) for p in points if not p["published"])) for name in _AXES}
    view = {
        "r": report,
        "methods": methods,
        "tiles": _tiles(report),
        "filters": [(name, words, axes[name]) for name, words in _AXES.items() if len(axes[name]) > 1],
        "charts_of": list(_TITLES.values()),
        "fronts": [_front_table(points, method) for method in methods],
        "columns": _COLUMNS,
        "left_out": [f"{each['reason']}: {each['count']:,}, first {each['first']}" for each in report["refused"]],
        "undrawn": len(report["points"]) - len(points),
        "energies": _energies(report["energy"]),
        "data": [_data(point, common, report) for point in points],
    }
    charts = {method: [_chart(points, method, each) for each in _UP] for method in methods}
    return render_page(_TEMPLATE, view, charts=charts)


def _drawn(points: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """All of them, or the fronts, what is published, and evenly some of the rest."""
    kept = [n for n, p in enumerate(points) if p["front"] or p["published"]]
    rest = [n for n, p in enumerate(points) if not (p["front"] or p["published"])]
    every = max(1, -(-len(rest) // max(1, MOST_DRAWN - len(kept))))
    return [points[n] for n in sorted((*kept, *rest[::every]))]


def _axis_text(name: str, point: Mapping[str, Any]) -> str:
    value = point[name]
    if name == "sram_bytes":
        return size(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cells(point: Mapping[str, Any]) -> tuple[str, ...]:
    def count(value: float | None) -> str:
        return "unknown" if value is None else f"{value:,.0f}"

    name = f"{point['rows']}x{point['cols']}" + (" SphereFed's" if point["published"] else "")
    low, high = (digits(point[k]) for k in ("photo_mj_low", "photo_mj_high"))
    return (
        name, point["precision"], point["dataflow"], str(point["batch"]), f"{point['mhz']:g} MHz",
        size(point["sram_bytes"]), f"{point['bandwidth_gb_s']:g} GB/s", time_text(point["photo_ms"]),
        f"{low} to {high} mJ", size(point["memory_bytes"]), count(point["dsp_slices"]), count(point["luts"]),
        count(point["flip_flops"]), count(point["block_rams"]), percent(point["chip_share"], 0),
    )  # fmt: skip


def _front_table(points: Sequence[Mapping[str, Any]], method: str) -> Table:
    front = sorted((p for p in points if p["method"] == method and p["front"]), key=lambda p: p["photo_ms"])
    return Table(f"arrays that no other beats, {method}", _COLUMNS, [_cells(p) for p in front], left=(0, 1, 2))


def _chart(points: Sequence[Mapping[str, Any]], method: str, up: str) -> str:
    several = len({p["batch"] for p in points if p["method"] == method}) > 1
    names = {p["batch"]: f"SphereFed's, batch {p['batch']}" if several else "SphereFed's array" for p in points}
    designs = [
        Design(n, p["photo_ms"], p[up], _says(p), p["front"], names[p["batch"]] if p["published"] else "")
        for n, p in enumerate(points)
        if p["method"] == method
    ]
    return fronts(designs, _TIME, _UP[up], f"{_TITLES[up]} over a photo's time, {method}")


def _says(point: Mapping[str, Any]) -> str:
    return ", ".join(text for text in _cells(point) if text != "unknown")


def _data(point: Mapping[str, Any], common: Sequence[str], report: Mapping[str, Any]) -> dict[str, Any]:
    """What the script has of a point: its method and axes as texts, what is to be small, its cells, its command."""
    return {
        "method": point["method"],
        "axes": {name: _axis_text(name, point) for name in _AXES},
        "small": [point[name] for name in report["objectives"]],
        "cells": _cells(point),
        "command": "" if point["published"] else _command(point, common, report["subject"]["classes"]),
        "published": point["published"],
    }


def _command(point: Mapping[str, Any], common: Sequence[str], classes: int) -> str:
    """The line that costs this array alone, and writes it in Verilog where it is of integers."""
    words = ["protofleet", "cost", *common, "--classes", classes, "--batch", point["batch"]]
    for name in ("rows", "cols", "dataflow", "precision", "mhz"):
        words += [f"--{name}", f"{point[name]:g}" if isinstance(point[name], float) else point[name]]
    words += ["--sram", point["sram_bytes"], "--bandwidth", f"{point['bandwidth_gb_s']:g}"]
    words += ["--rtl", "array/"] if point["precision"] == "int8" else []
    return shlex.join(map(str, words))


def _tiles(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    points = [p for p in report["points"] if not p["published"]]
    left_out = sum(each["count"] for each in report["refused"])
    tiles = [
        (f"{len(points):,}", "arrays and tasks that can be"),
        (f"{sum(p['front'] for p in points):,}", "that no other beats"),
        (f"{left_out:,}", "left out"),
    ]
    for method in dict.fromkeys(p["method"] for p in points):
        fastest = min((p for p in points if p["method"] == method), key=lambda p: p["photo_ms"])
        name = f"{fastest['rows']}x{fastest['cols']} {fastest['precision']}"
        tiles.append((time_text(fastest["photo_ms"]), f"a photo of {method}, fastest: {name} (simulated)"))
    return tiles


def _energies(energy: Mapping[str, Any]) -> Table:
    rows = [
        (name, f"{each['multiply_pj']:g}", f"{each['accumulate_pj']:g}", f"{each['add_pj']:g}", each["words"])
        for name, each in energy["operations"].items()
    ]
    headers = ("format", "multiplication, pJ", "onto the sum, pJ", "addition, pJ", "as published")
    return Table("picojoules of each operation", headers, rows, wide=(4,))

"""The cost report as one page a hardware engineer would pass on: draws what `cost_report` returns, nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from protofleet.hw_profiles.charts.bars import Bar, bars
from protofleet.hw_profiles.memory.liveness import batch_text
from protofleet.hw_profiles.reports.page import Table, render_page, shade
from protofleet.hw_profiles.units import size, time_text

__all__ = ["cost_page"]

_TEMPLATE = Path(__file__).with_name("cost.html.j2")
_PHASE = {
    "forward": "forward",
    "input_gradient": "input gradient",
    "weight_gradient": "weight gradient",
    "update": "update",
    "statistic": "statistic",
}
_MEMORY_PARTS = ("weights", "optimizer", "gradients", "activations", "workspace")
_METHOD_COLUMNS = (
    "method", "classifier", "step", "round", "DDR per step", "memory", "up per round", "time saved", "memory saved",
    "uplink saved",
)  # fmt: skip
_LAYER_COLUMNS = (
    "layer", "kind", "phase", "bound by", "cycles", "% of all", "array", "special unit", "DDR", "stalled", "cells used",
    "MMAC", "SRAM reads", "DDR bytes", "products M x N x K",
)  # fmt: skip
# columns of the layers' table
_SHADED = {4: "cycles", 6: "array_cycles", 7: "vector_cycles", 8: "dram_cycles", 9: "stall_cycles"}


def cost_page(report: Mapping[str, Any]) -> str:
    """A self-contained HTML document of one cost report.

    Raises:
        UsageError: jinja2 is not installed.
    """
    fits = report["memory"]["largest_batch"]
    view = {
        "r": report,
        "tiles": _tiles(report),
        "methods": _methods(report["methods"]),
        "capacity": size(report["memory"]["capacity_bytes"]),
        "largest": {use: batch_text(fits[use]) for use in ("training", "inference")},
        "claims": _claims(report["claims"]),
        **_layers(report),
        **_step_graph(report["step_graph"]),
    }
    charts = {
        "phases": _phase_chart(report["methods"]),
        "memory": _memory_chart(report),
        "calibration": _calibration_chart(report["calibration"]),
    }
    return render_page(_TEMPLATE, view, charts=charts)


def _tiles(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    inference, memory = report["inference"], report["memory"]
    tiles = [
        (time_text(inference["latency_ms"]), f"forward pass, batch {report['subject']['batch']} (simulated)"),
        (f"{100 * inference['utilisation']:.1f} %", "use of the cells, forward (simulated)"),
        (size(inference["memory"]["peak_bytes"]), "memory, forward (predicted)"),
    ]
    for row in report["methods"][:1]:
        tiles += [
            (time_text(row["step_ms"]), f"training step, {row['method']} (simulated)"),
            (time_text(1e3 * row["round_s"]), f"round of {row['steps']:,} steps (simulated)"),
            (size(row["memory"]["peak_bytes"]), "memory, training step (predicted)"),
        ]
    caption = f"largest training batch in {size(memory['capacity_bytes'])} (predicted)"
    return [*tiles, (batch_text(memory["largest_batch"]["training"]), caption)]


def _phase_chart(methods: Sequence[Mapping[str, Any]]) -> str:
    values = [
        Bar(
            f"{row['method']} ({row['head']})",
            {_PHASE[p]: ms for p, ms in row["phases_ms"].items()},
            time_text(row["step_ms"]) + (f"  ({row['saved_percent']['latency']:+.2f} % saved)" if i else ""),
        )
        for i, row in enumerate(methods)
    ]
    return bars(values, unit="ms", title="one step")


def _memory_chart(report: Mapping[str, Any]) -> str:
    rows = [("inference", report["inference"]["memory"]), *((r["method"], r["memory"]) for r in report["methods"])]
    values = [
        Bar(name, {p: memory[f"{p}_bytes"] / 1e6 for p in _MEMORY_PARTS}, size(memory["peak_bytes"]))
        for name, memory in rows
    ]
    return bars(values, unit="MB", title="peak at the worst moment")


def _calibration_chart(rows: Sequence[Mapping[str, Any]]) -> str:
    values = [
        Bar(
            row["method"].upper(),
            {"forward pass": row["forward_ms"], "statistic": row["statistic_ms"], "server": row["server_ms"]},
            f"{time_text(row['total_ms'])}, {size(row['uplink_bytes'])} up",
        )
        for row in rows
    ]
    return bars(values, unit="ms", title="client and server")


def _methods(methods: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        (
            row["method"], row["head"], time_text(row["step_ms"]), time_text(1e3 * row["round_s"]),
            size(row["dram_bytes"]), size(row["memory"]["peak_bytes"]), size(row["uplink_bytes"]),
            *(f"{row['saved_percent'][k]:.2f} %" for k in ("latency", "memory", "uplink")),
        )
        for row in methods
    ]  # fmt: skip
    return Table("methods", _METHOD_COLUMNS, rows, left=(0, 1))


def _claims(claims: Sequence[Mapping[str, Any]]) -> list[tuple[str, Table]]:
    """Each claim, with its percentage in the paper, and every reading of it."""
    tables = []
    for (claim, most), rows in groupby(claims, key=lambda row: (row["claim_text"], row["paper_percent"])):
        readings = [(row["assumption"], f"{row['percent']:.2f} %", row["kind"]) for row in rows]
        table = Table(claim, ("read as", "this model", "kind"), readings, wide=(0,), tags=(2,))
        tables.append((f"{claim}: up to {most} % in the paper", table))
    return tables


def _layers(report: Mapping[str, Any]) -> dict[str, Any]:
    """The twelve longest layers, and all of them by phase: (heading, table)."""
    layers = report["layers"]
    total = sum(layer["cycles"] for layer in layers) or 1
    cells = report["array"]["rows"] * report["array"]["cols"]
    worst = max((layer["cycles"] for layer in layers), default=1)

    def table(name: str, chosen: Sequence[Mapping[str, Any]]) -> Table:
        rows = [_layer_row(layer, total, cells) for layer in chosen]
        shades = [
            [shade(layer[_SHADED[i]], worst) if i in _SHADED else 0.0 for i in range(len(_LAYER_COLUMNS))]
            for layer in chosen
        ]
        return Table(name, _LAYER_COLUMNS, rows, left=(0, 1, 2, 3), wide=(14,), shades=shades, tight=True)

    by_phase = []
    for phase, title in _PHASE.items():
        chosen = [layer for layer in layers if layer["phase"] == phase]
        if chosen:
            share = 100 * sum(layer["cycles"] for layer in chosen) / total
            heading = f"{title}: {len(chosen)} layers, {share:.1f} % of the cycles"
            by_phase.append((heading, table(f"layers, {title}", chosen)))
    longest = sorted(layers, key=lambda layer: -layer["cycles"])[:12]
    return {"longest": table("the twelve longest layers", longest), "by_phase": by_phase}


def _layer_row(layer: Mapping[str, Any], total: int, cells: int) -> tuple[str, ...]:
    products = " + ".join(
        f"{p['m']}x{p['n']}x{p['k']}" + (f" ({p['count']} times)" if p["count"] > 1 else "")
        for p in layer["products"][:4]
    )
    use = layer["macs"] / (cells * layer["array_cycles"]) if layer["array_cycles"] else 0.0
    return (
        layer["name"], layer["kind"], _PHASE[layer["phase"]], layer["bound"], f"{layer['cycles']:,}",
        f"{100 * layer['cycles'] / total:.2f}", f"{layer['array_cycles']:,}", f"{layer['vector_cycles']:,}",
        f"{layer['dram_cycles']:,}", f"{layer['stall_cycles']:,}", f"{100 * use:.1f} %" if use else "",
        f"{layer['macs'] / 1e6:,.2f}", f"{layer['sram_reads']:,}", f"{layer['dram_bytes']:,}", products,
    )  # fmt: skip


def _step_graph(graph: Mapping[str, Any] | None) -> dict[str, Any]:
    """The bundle's own training graph, where there is one."""
    if graph is None:
        return {"step_graph": None, "step_peak": ""}
    rows = [(_PHASE[p], f"{graph['macs'][p]:,}", f"{graph['vector_ops'][p]:,}") for p in graph["macs"]]
    headers = ("phase", "multiply-accumulates", "vector operations")
    return {
        "step_graph": Table("the bundle's own training graph", headers, rows),
        "step_peak": size(graph["memory"]["peak_bytes"]),
    }

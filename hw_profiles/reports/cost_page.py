"""The cost report as one page a hardware engineer would pass on: draws what `cost_report` returns, nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hw_profiles.memory.liveness import batch_text
from hw_profiles.reports.page import Bar, bars, details, facts, heat, notes, page, section, table, tag

__all__ = ["cost_page", "size", "time_text"]

_PHASE = {
    "forward": "forward",
    "input_gradient": "input gradient",
    "weight_gradient": "weight gradient",
    "update": "update",
    "statistic": "statistic",
}
_HEAD = {"trained": "trained", "frozen": "frozen", "skipped": "skipped"}
_LAYER_COLUMNS = (
    "layer", "kind", "phase", "bound by", "cycles", "% of all", "array", "special unit", "DDR", "cells used", "MMAC",
    "SRAM reads", "DDR bytes", "products M x N x K",
)  # fmt: skip


def size(nbytes: float) -> str:
    """Bytes for people: 1,234 B, 12.3 kB, 1.23 MB (powers of 1000)."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}" if nbytes < 100 * scale else f"{nbytes / scale:,.0f} {unit}"
    return f"{nbytes:,.0f} B"


def time_text(milliseconds: float) -> str:
    """A duration for people."""
    if milliseconds >= 60_000:
        return f"{milliseconds / 60_000:.3g} min"
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:.3g} s"
    return f"{milliseconds:.3g} ms"


def cost_page(report: Mapping[str, Any]) -> str:
    """A self-contained HTML document of one cost report."""
    subject, array = report["subject"], report["array"]
    lead = (
        f"{subject['source']}, {subject['classes']} classes, batch {subject['batch']}, on {report['device']}: "
        f"{array['rows']}x{array['cols']} cells at {array['mhz']:g} MHz, {array['precision']}, dataflow "
        f"{array['dataflow']}, "
        f"depthwise {array['depthwise']}."
    )
    sections = [
        _summary(report),
        _phases(report),
        _methods(report),
        _memory(report),
        _calibration(report),
        _claims(report),
    ]
    sections += [_layers(report), _small_print(report)]
    return page(
        f"Training cost of {subject['name']}", lead, [s for s in sections if s], "Protofleet cost report, schema 1"
    )


def _summary(report: Mapping[str, Any]) -> str:
    inference, fits = report["inference"], report["memory"]["largest_batch"]
    boxes = [
        (time_text(inference["latency_ms"]), f"forward pass, batch {report['subject']['batch']} (simulated)"),
        (f"{100 * inference['utilisation']:.1f} %", "use of the cells, forward (simulated)"),
        (size(inference["memory"]["peak_bytes"]), "memory, forward (predicted)"),
    ]
    for row in report["methods"][:1]:
        boxes += [
            (time_text(row["step_ms"]), f"training step, {row['method']} (simulated)"),
            (time_text(1e3 * row["round_s"]), f"round of {row['steps']:,} steps (simulated)"),
            (size(row["memory"]["peak_bytes"]), "memory, training step (predicted)"),
        ]
    boxes.append(
        (
            batch_text(fits["training"]),
            f"largest training batch in {size(report['memory']['capacity_bytes'])} (predicted)",
        )
    )
    unknown = report["subject"]["unmodelled"]
    warning = notes([f"not modelled, and not in any figure but their bytes: {', '.join(unknown)}"]) if unknown else ""
    return section("At a glance", facts(boxes), warning)


def _phases(report: Mapping[str, Any]) -> str:
    if not report["methods"]:
        return ""
    values = [
        Bar(
            f"{row['method']} ({_HEAD[row['head']]})",
            {_PHASE[p]: ms for p, ms in row["phases_ms"].items()},
            f"{time_text(row['step_ms'])}  ({row['saved_percent']['latency']:+.2f} % saved)"
            if i
            else time_text(row["step_ms"]),
        )
        for i, row in enumerate(report["methods"])
    ]
    lead = "Each bar is one training step, by phase. The classifier is what differs: trained, frozen, or skipped."
    return section(
        "Where a training step's time goes", tag("simulated"), bars(values, unit="ms", title="one step"), lead=lead
    )


def _methods(report: Mapping[str, Any]) -> str:
    if not report["methods"]:
        return ""
    headers = [
        "method",
        "classifier",
        "step",
        "round",
        "DDR per step",
        "memory",
        "up per round",
        "time saved",
        "memory saved",
        "uplink saved",
    ]
    rows = [
        [
            row["method"], _HEAD[row["head"]], time_text(row["step_ms"]), time_text(1e3 * row["round_s"]),
            size(row["dram_bytes"]), size(row["memory"]["peak_bytes"]), size(row["uplink_bytes"]),
            *(f"{row['saved_percent'][k]:.2f} %" for k in ("latency", "memory", "uplink")),
        ]
        for row in report["methods"]
    ]  # fmt: skip
    lead = (
        "Savings are against fedavg, which sends its weights; every other method's message is counted as it is encoded."
    )
    return section("Methods", table(headers, rows, left=(0, 1)), lead=lead)


def _memory(report: Mapping[str, Any]) -> str:
    parts = ("weights", "optimizer", "gradients", "activations", "workspace")
    rows = [("inference", report["inference"]["memory"]), *((r["method"], r["memory"]) for r in report["methods"])]
    values = [
        Bar(name, {p: memory[f"{p}_bytes"] / 1e6 for p in parts}, size(memory["peak_bytes"])) for name, memory in rows
    ]
    fits = report["memory"]["largest_batch"]
    capacity = size(report["memory"]["capacity_bytes"])
    largest = {use: batch_text(fits[use]) for use in ("training", "inference")}
    text = f"Largest batch in {capacity}: {largest['training']} in training, {largest['inference']} in inference."
    blocks = [tag("predicted"), bars(values, unit="MB", title="peak at the worst moment")]
    return section("Memory", *blocks, lead=text)


def _calibration(report: Mapping[str, Any]) -> str:
    if not report["calibration"]:
        return ""
    values = [
        Bar(
            row["method"].upper(),
            {"forward pass": row["forward_ms"], "statistic": row["statistic_ms"], "server": row["server_ms"]},
            f"{time_text(row['total_ms'])}, {size(row['uplink_bytes'])} up",
        )
        for row in report["calibration"]
    ]
    *ours, base = report["calibration"]
    saved = [f"{row['method'].upper()} takes {row['saved_percent']:.2f} % less time" for row in ours]
    lead = f"One client over its local samples, and the server: than {base['method'].upper()}, {', '.join(saved)} here."
    return section(
        "Calibrating the classifier", tag("simulated"), bars(values, unit="ms", title="client and server"), lead=lead
    )


def _claims(report: Mapping[str, Any]) -> str:
    if not report["claims"]:
        return ""
    rows, last = [], ""
    for row in report["claims"]:
        first = row["claim_text"] != last
        last = row["claim_text"]
        paper = f"up to {row['paper_percent']} %" if first else ""
        rows.append(
            [row["claim_text"] if first else "", paper, row["assumption"], f"{row['percent']:.2f} %", row["kind"]]
        )
    lead = (
        "SphereFed's paper gives three percentages without their batch size, dataflow or base. Each is computed here "
        "under "
        "several readings; none was used to adjust the model."
    )
    headers = ["claim", "paper", "read as", "this model", "kind"]
    return section("The paper's claims", table(headers, rows, left=(0, 2, 4), wide=(0, 2)), lead=lead)


def _layers(report: Mapping[str, Any]) -> str:
    layers = report["layers"]
    total = sum(layer["cycles"] for layer in layers) or 1
    worst = max((layer["cycles"] for layer in layers), default=1)
    cells = report["array"]["rows"] * report["array"]["cols"]
    blocks = []
    for phase, title in _PHASE.items():
        chosen = [layer for layer in layers if layer["phase"] == phase]
        if not chosen:
            continue
        rows = [_layer_row(layer, total, cells) for layer in chosen]
        shade = [_layer_shade(layer, worst) for layer in chosen]
        share = 100 * sum(layer["cycles"] for layer in chosen) / total
        inner = table(_LAYER_COLUMNS, rows, left=(0, 1, 2, 3), wide=(13,), shade=shade, tight=True)
        blocks.append(details(f"{title}: {len(chosen)} layers, {share:.1f} % of the cycles", inner))
    lead = "One step of fedavg; the darker, the more cycles. A layer takes the longest of array, special unit and DDR."
    if not report["methods"]:
        lead = (
            "The forward pass; the darker, the more cycles. A layer takes the longest of array, special unit and DDR."
        )
    hottest = sorted(layers, key=lambda layer: -layer["cycles"])[:12]
    top = table(
        _LAYER_COLUMNS,
        [_layer_row(layer, total, cells) for layer in hottest],
        left=(0, 1, 2, 3),
        wide=(13,),
        shade=[_layer_shade(layer, worst) for layer in hottest],
        tight=True,
    )
    return section("Layers", tag("simulated"), "<h3>The twelve longest</h3>", top, *blocks, lead=lead)


def _layer_row(layer: Mapping[str, Any], total: int, cells: int) -> list[str]:
    products = " + ".join(
        f"{p['m']}x{p['n']}x{p['k']}" + (f" ({p['count']} times)" if p["count"] > 1 else "")
        for p in layer["products"][:4]
    )
    use = layer["macs"] / (cells * layer["array_cycles"]) if layer["array_cycles"] else 0.0
    return [
        layer["name"], layer["kind"], _PHASE[layer["phase"]], layer["bound"], f"{layer['cycles']:,}",
        f"{100 * layer['cycles'] / total:.2f}", f"{layer['array_cycles']:,}", f"{layer['vector_cycles']:,}",
        f"{layer['dram_cycles']:,}", f"{100 * use:.1f} %" if use else "", f"{layer['macs'] / 1e6:,.2f}",
        f"{layer['sram_reads']:,}", f"{layer['dram_bytes']:,}", products,
    ]  # fmt: skip


def _layer_shade(layer: Mapping[str, Any], worst: int) -> Sequence[str]:
    columns = [""] * len(_LAYER_COLUMNS)
    for index, key in ((4, "cycles"), (6, "array_cycles"), (7, "vector_cycles"), (8, "dram_cycles")):
        columns[index] = heat(layer[key], worst)
    return columns


def _small_print(report: Mapping[str, Any]) -> str:
    blocks = [notes(report["assumptions"])]
    graph = report["step_graph"]
    if graph:
        rows = [[_PHASE[p], f"{graph['macs'][p]:,}", f"{graph['vector_ops'][p]:,}"] for p in graph["macs"]]
        peak = size(graph["memory"]["peak_bytes"])
        blocks += [
            f"<h3>The bundle's own training graph, batch {graph['batch']}</h3>",
            table(["phase", "multiply-accumulates", "vector operations"], rows),
            notes([f"counted node by node in train_step.onnx; peak of its tensors {peak} (predicted)"]),
        ]
    return section("What this rests on", *blocks)

"""The profile report as one self-contained page: a fleet side by side, then where the time goes on each device.

In order: what was profiled; the fleet table (latency, energy, memory, does it fit, uplink); latency as bars with their
intervals; a training step by phase; memory; measured beside predicted; every runtime and precision that can be
predicted; the heat table of layers by device; a roofline for each device; assumptions and sources. See
docs/hardware.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protofleet.hw_profiles.charts.bars import Bar, Interval, bars, intervals
from protofleet.hw_profiles.charts.scatter import Point, roofline
from protofleet.hw_profiles.reports.page import Table, render_page, shade
from protofleet.hw_profiles.reports.which_board import fits_text, short_title
from protofleet.hw_profiles.units import digits, size, time_text

__all__ = ["profile_page"]

_TEMPLATE = Path(__file__).with_name("profile.html.j2")
_LAYERS_SHOWN, _LONGEST = 60, 12
_Device = Mapping[str, Any]


def profile_page(report: Mapping[str, Any]) -> str:
    """The page, from what `profile_report` returns.

    Raises:
        UsageError: jinja2 is not installed.
    """
    devices = report["devices"]
    training = [device for device in devices if device["training_step"]]
    layers = _layers(devices, _LAYERS_SHOWN)
    view = {
        "r": report,
        "tiles": _tiles(report),
        "fleet": _fleet(devices),
        "ladder": _ladder(report["uplink"]),
        "untrained": len(training) < len(devices) and bool(report["subject"]["training_step_macs"]),
        "training": _training(training),
        "training_basis": _training_basis(training),
        "memory": _memory(devices),
        "measured": _measured(report),
        "operators": _operators(report["operators"]),
        "entries": [(f"{d['title']}: {len(d['inference'])} entries", _entries(d)) for d in devices],
        "longest": _layers(devices, _LONGEST),
        "layers": layers,
        "layers_left_out": len({layer["name"] for device in devices for layer in device["layers"]}) - len(layers.rows),
        "sources": [(d["title"], _sources(d)) for d in devices],
    }
    charts = {
        "latency": _latency_chart(devices),
        "phases": _phase_chart(training),
        "rooflines": [chart for chart in map(_roofline, devices) if chart],
    }
    return render_page(_TEMPLATE, view, charts=charts)


def _tiles(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    subject, uplink = report["subject"], report["uplink"]
    tiles = [
        (f"{subject['parameters']:,}", "parameters"),
        (f"{subject['inference_macs'] / 1e6:,.1f} M", f"multiply-accumulates, batch {subject['batch']}"),
    ]
    if subject["training_step_macs"]:
        caption = f"multiply-accumulates of a training step, batch {subject['training_batch']}"
        tiles.append((f"{subject['training_step_macs'] / 1e6:,.0f} M", caption))
    if uplink["method"] != uplink["closing_method"]:
        tiles.append((size(uplink["contribution_bytes"]), f"up per round ({uplink['statistic']})"))
    closing = f"{uplink['closing_method'].upper()} ({uplink['closing_statistic']})"
    tiles.append((size(uplink["closing_bytes"]), f"up once, for {closing}"))
    tiles.append((size(uplink["fedavg_bytes"]), "FedAvg would send"))
    return tiles


def _ladder(uplink: Mapping[str, Any]) -> Table:
    """The ways that train nothing, few bytes first; what no message can hold is left out."""
    rungs = [rung for rung in uplink["without_training"] if rung["bytes"] is not None]
    shares = [rung["bytes"] / uplink["fedavg_bytes"] if uplink["fedavg_bytes"] else None for rung in rungs]
    rows = [
        (rung["way"], size(rung["bytes"]), "–" if share is None else f"{share:.2%}", rung["sends"])
        for rung, share in zip(rungs, shares, strict=True)
    ]
    return Table("ways without training", ("way", "once", "of a FedAvg round", "a device sends"), rows, wide=(3,))


def _fleet(devices: Sequence[_Device]) -> Table:
    headers = (
        "device", "inference", "80 % interval", "kind", "ground", "energy", "training step", "step's kind", "round",
        "fits in memory",
    )  # fmt: skip
    rows = []
    for device in devices:
        main, step, memory = device["inference"][0], device["training_step"], device["memory"]
        spent = main["energy"]
        rows.append(
            (
                short_title(device),
                time_text(main["latency_ms"]),
                _interval(main),
                main["kind"],
                main["support"] or "–",
                f"{digits(spent['low_mj'])} – {digits(spent['high_mj'])} mJ" if spent else "not known",
                time_text(step["latency_ms"]) if step else "–",
                step["kind"] if step else "",
                time_text(step["round_s"] * 1e3) if step else "–",
                fits_text(memory),
            )
        )
    return Table("the fleet", headers, rows, left=(0, 4, 9), tags=(3, 7))


def _latency_chart(devices: Sequence[_Device]) -> str:
    """Predictions with whiskers; a simulated figure has none."""
    values = []
    for device in devices:
        entry = device["inference"][0]
        predicted = entry["kind"] == "predicted"
        note = f"{time_text(entry['latency_ms'])}  {entry['runtime'] if predicted else 'systolic'} {entry['precision']}"
        kind = "1" if predicted else "3"
        values.append(Interval(short_title(device), kind, entry["latency_ms"], entry["low_ms"], entry["high_ms"], note))
    return intervals(values, "latency of inference by device")


def _phase_chart(training: Sequence[_Device]) -> str:
    values = []
    for device in training:
        step = device["training_step"]
        shares = {phase.replace("_", " "): 100 * ms / step["latency_ms"] for phase, ms in step["phases_ms"].items()}
        values.append(Bar(short_title(device), shares, f"{time_text(step['latency_ms'])} ({step['kind']})"))
    return bars(values, unit="% of the step")


def _training(training: Sequence[_Device]) -> Table:
    rows = [
        (
            short_title(device),
            time_text(step["latency_ms"]),
            _interval(step),
            step["kind"],
            f"{step['round_steps']:,}",
            _ground(step),
        )
        for device, step in ((device, device["training_step"]) for device in training)
    ]
    headers = ("device", "step", "80 % interval", "kind", "steps in a round", "ground, and the model's error")
    return Table("a training step", headers, rows, wide=(5,), tags=(3,))


def _training_basis(training: Sequence[_Device]) -> str:
    steps = (device["training_step"] for device in training)
    return next((step["basis"] for step in steps if step["kind"] == "predicted"), "no CPU in this report")


def _memory(devices: Sequence[_Device]) -> Table:
    rows = [
        (
            short_title(device),
            size(memory["inference_peak_bytes"]),
            *(
                size(memory[f"{what}_peak_bytes"]) if memory[f"{what}_peak_bytes"] else "–"
                for what in ("training", "closing")
            ),
            size(memory["process_bytes"]),
            size(memory["peak_bytes_at_most"]),
            size(memory["usable_bytes"]),
            _largest(memory),
            memory["kind"],
        )
        for device, memory in ((device, device["memory"]) for device in devices)
    ]
    headers = (
        "device", "inference", "training", "closing round", "of it our process and data", "at most", "usable",
        "largest training batch", "kind",
    )  # fmt: skip
    return Table("memory", headers, rows, tags=(8,))


def _measured(report: Mapping[str, Any]) -> Table:
    rows = [
        (
            line["phase"].replace("_", " "),
            str(line["threads"]),
            str(line["batch"]),
            time_text(line["median_ms"]),
            time_text(line["p99_ms"]),
            time_text(line["cpu_ms"]) if line.get("cpu_ms") is not None else "–",
            "measured",
            time_text(line["predicted_ms"]) if line["predicted_ms"] else "–",
            _interval(line) if line["predicted_ms"] else "",
            {True: "inside", False: "outside", None: ""}[line.get("inside")],
            size(line["peak_rss_bytes"]),
            time_text(line["load_ms"]),
            _conditions(line),
        )
        for line in report["comparison"]
    ]
    headers = (
        "what", "threads", "batch", "median", "p99", "processor", "kind", "predicted", "80 % interval", "it is",
        "peak memory", "load", "conditions",
    )  # fmt: skip
    return Table("measured beside predicted", headers, rows, wide=(12,), tags=(6,), tight=True)


def _operators(lines: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        (
            line["op"],
            str(line["nodes"]),
            *("–" if line[what] is None else time_text(line[what]) for what in ("measured_ms", "predicted_ms")),
        )
        for line in lines
    ]
    return Table("operators of an inference", ("operator", "nodes", "measured", "predicted"), rows)


def _entries(device: _Device) -> Table:
    rows = [
        (
            f"{entry['runtime']} {entry['variant']}".strip(),
            entry["precision"],
            {"1": "1", "all": "all cores"}.get(entry["threads"], "–"),
            time_text(entry["latency_ms"]),
            _interval(entry),
            entry["kind"],
            f"{digits(entry['energy']['mj'])} mJ" if entry["energy"] else "–",
            entry["basis"],
            _ground(entry),
        )
        for entry in device["inference"]
    ]
    headers = (
        "runtime", "precision", "threads", "latency", "80 % interval", "kind", "energy", "rests on",
        "ground, and the model's error",
    )  # fmt: skip
    return Table(f"runtimes of {short_title(device)}", headers, rows, wide=(7, 8), tags=(5,))


def _layers(devices: Sequence[_Device], most: int) -> Table:
    """Layers as rows, in the network's order, devices as columns: those with the largest share of any device's time.

    A layer that is fused on one device and not on another shows as 0 there.
    """
    order: dict[str, tuple[str, int]] = {}
    for device in devices:
        for layer in device["layers"]:
            order.setdefault(layer["name"], (layer["op"], layer["macs"]))
    times = [{layer["name"]: layer["ms"] for layer in device["layers"]} for device in devices]
    worst = [max(column.values(), default=0.0) for column in times]
    share = {n: max(c.get(n, 0.0) / (sum(c.values()) or 1.0) for c in times) for n in order}
    kept = set(sorted(order, key=lambda n: -share[n])[:most])
    rows, shades = [], []
    for name, (op, macs) in order.items():
        if name in kept:
            mine = [column.get(name, 0.0) for column in times]
            rows.append((name, op, f"{macs / 1e6:,.2f}" if macs else "", *map(_microseconds, mine)))
            shades.append((0.0, 0.0, 0.0, *(shade(ms, w) for ms, w in zip(mine, worst, strict=True))))
    headers = ("layer", "op", "M MACs", *(_column(device["name"]) for device in devices))
    name = "layers by device" if most == _LAYERS_SHOWN else "the longest layers by device"
    return Table(name, headers, rows, left=(0, 1), shades=shades, tight=True)


def _roofline(device: _Device) -> str:
    roof = device["roofline"]
    points = [Point(p["name"], p["macs_per_byte"], p["gmacs"]) for p in roof["points"] if p["gmacs"] > 0]
    title = f"{short_title(device)}: {device['inference'][0]['precision']}"
    return roofline(points, roof["peak_gmacs"], roof["memory_gb_s"], title)


def _sources(device: _Device) -> Table:
    return Table(f"sources of {short_title(device)}", ("figure", "source"), list(device["sources"].items()), wide=(1,))


def _largest(memory: Mapping[str, Any]) -> str:
    largest = memory["largest_training_batch"]
    if largest is None:
        return "–"
    return f"{largest:,}" if largest < memory["largest_training_batch_limit"] else f"{largest:,} or more"


def _interval(entry: Mapping[str, Any]) -> str:
    if entry["low_ms"] is None:
        return "–"
    return f"{time_text(entry['low_ms'])} – {time_text(entry['high_ms'])}"


def _ground(entry: Mapping[str, Any]) -> str:
    """The support with its reasons, and the model's error where it knows as little."""
    if entry["support"] is None:
        return "–"
    reasons = f" ({'; '.join(entry['support_reasons'])})" if entry["support_reasons"] else ""
    return f"{entry['support']}{reasons}; {entry['error']['text']}"


def _conditions(line: Mapping[str, Any]) -> str:
    before, after = line["temperature_c"]
    known = before is not None and after is not None
    warmth = f"{before:.0f} to {after:.0f} °C" if known else "temperature not told"
    throttling = {True: "throttled", False: "not throttled", None: "throttling not told"}[line["throttled"]]
    load = {True: "UNDER LOAD", False: "no load", None: "load not told"}[line.get("under_load")]
    if line.get("other_processors") is not None:
        load += f" (others took {line['other_processors']:.2f} processors)"
    return f"{warmth}, {throttling}, {load}"


def _microseconds(ms: float) -> str:
    return f"{ms * 1e3:,.3g}" if ms < 1 else f"{ms * 1e3:,.0f}"


def _column(name: str) -> str:
    """A device's name short enough for a column."""
    return name.replace("raspberry-pi-", "pi ").replace("jetson-", "").replace("fpga-", "")

"""The profile report as one self-contained page: a fleet side by side, then where the time goes on each device.

In order: what was profiled; the fleet table (latency, energy, memory, does it fit, uplink); latency as bars with their
intervals; a training step by phase; measured beside predicted; every runtime and precision that can be predicted; the
heat table of layers by device; a roofline for each device; assumptions and sources. See docs/hardware.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import floor, log10
from typing import Any

from hw_profiles.reports.cost_page import size, time_text
from hw_profiles.reports.page import PALETTE, Bar, bars, details, facts, heat, notes, page, section, table, tag

__all__ = ["profile_page"]

_LAYERS_SHOWN = 60


def profile_page(report: Mapping[str, Any]) -> str:
    """The page, from what `profile_report` returns."""
    subject = report["subject"]
    devices = report["devices"]
    height, width, channels = subject["input_shape"]
    lead = (
        f"{subject['method']} with head {subject['head']}, {height}x{width}x{channels} input, {subject['classes']} "
        f"classes, {subject['features']} features. Every figure says whether it was measured, simulated or predicted."
    )
    sections = [
        facts(_facts(report)),
        _fleet(report),
        section("Latency of inference", _interval_chart(devices), lead=_LATENCY_LEAD),
        _training(devices),
        _memory(devices),
        _measured(report),
        section("Every runtime and precision", *(_entries(device) for device in devices)),
        section("Where the time goes, layer by layer", _heat_table(devices), lead=_HEAT_LEAD),
        section("Rooflines", *(_roofline(device) for device in devices), lead=_ROOFLINE_LEAD),
        section("Assumptions", notes(report["assumptions"])),
        section("Sources of the device figures", *(_sources(device) for device in devices)),
    ]
    footer = f"protofleet profile, report schema {report['schema']}, bundle {subject['bundle_sha256'][:12]}"
    return page(f"{subject['backbone']} on {len(devices)} device{'s' * (len(devices) != 1)}", lead, sections, footer)


_LATENCY_LEAD = (
    "One inference at the report's batch. The bar is the prediction, the whisker its 80 % interval; a simulated figure "
    "has none. The scale is logarithmic."
)
_HEAT_LEAD = (
    "Microseconds of each layer of the main inference entry, a device a column; the colour is its share of that "
    "device's time."
)
_ROOFLINE_LEAD = (
    "Each dot is a product of the graph: how many multiply-accumulates it does for each byte it moves, and how fast. "
    "The line is the data sheet's roof. Winograd does fewer multiplications than are counted, so dots may lie above it."
)


def _facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    subject, uplink = report["subject"], report["uplink"]
    found = [
        (f"{subject['parameters']:,}", "parameters"),
        (f"{subject['inference_macs'] / 1e6:,.1f} M", f"multiply-accumulates, batch {subject['batch']}"),
    ]
    if subject["training_step_macs"]:
        caption = f"multiply-accumulates of a training step, batch {subject['training_batch']}"
        found.append((f"{subject['training_step_macs'] / 1e6:,.0f} M", caption))
    if uplink["method"] != uplink["closing_method"]:
        found.append((size(uplink["contribution_bytes"]), f"up per round ({uplink['statistic']})"))
    closing = f"{uplink['closing_method'].upper()} ({uplink['closing_statistic']})"
    found.append((size(uplink["closing_bytes"]), f"up once, for {closing}"))
    found.append((size(uplink["fedavg_bytes"]), "FedAvg would send"))
    return found


def _fleet(report: Mapping[str, Any]) -> str:
    headers = (
        "device", "inference", "80 % interval", "", "energy", "training step", "", "round", "fits in memory",
    )  # fmt: skip
    rows = []
    for device in report["devices"]:
        main, step, memory = device["inference"][0], device["training_step"], device["memory"]
        spent = main["energy"]
        rows.append(
            (
                _short(device),
                time_text(main["latency_ms"]),
                _interval(main),
                tag(main["kind"]),
                f"{spent['low_mj']:,.3g} – {spent['high_mj']:,.3g} mJ" if spent else "not known",
                time_text(step["latency_ms"]) if step else "–",
                tag(step["kind"]) if step else "",
                time_text(step["round_s"] * 1e3) if step else "–",
                _fits(memory),
            )
        )
    lead = f"Main runtime of each device; a round is {report['samples']:,} local samples."
    if any(device["training_step"] is None for device in report["devices"]) and report["subject"]["training_step_macs"]:
        lead += " No training where a device's file says nothing of its CPU."
    return section("The fleet", table(headers, rows, left=(0, 8)), lead=lead)


def _memory(devices: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            _short(device),
            size(memory["inference_peak_bytes"]),
            *(
                size(memory[f"{what}_peak_bytes"]) if memory[f"{what}_peak_bytes"] else "–"
                for what in ("training", "closing")
            ),
            size(memory["process_bytes"]),
            size(memory["peak_bytes_at_most"]),
            size(memory["usable_bytes"]),
            _largest(memory),
            tag(memory["kind"]),
        )
        for device, memory in ((device, device["memory"]) for device in devices)
    ]
    headers = (
        "device", "inference", "training", "closing round", "of it our process and data", "at most", "usable",
        "largest training batch", "",
    )  # fmt: skip
    lead = (
        "Central estimates of our client's peak by what it does, its samples included, at the bundle's own batch; what "
        "fits is decided by the upper bound, at most. On an array: what lives at once."
    )
    return section("Memory", table(headers, rows), lead=lead)


def _short(device: Mapping[str, Any]) -> str:
    """The title up to its first comma, without the maker."""
    return str(device["title"]).split(",")[0].removeprefix("NVIDIA ")


def _fits(memory: Mapping[str, Any]) -> str:
    beyond = ", extrapolated" if memory["extrapolated"] else ""
    if memory["fits"]:
        return "yes" + beyond
    if not memory["inference_fits"]:
        return "no" + beyond
    return ("all but the closing round" if memory["training_fits"] else "inference only") + beyond


def _largest(memory: Mapping[str, Any]) -> str:
    largest = memory["largest_training_batch"]
    if largest is None:
        return "–"
    return f"{largest:,}" if largest < memory["largest_training_batch_limit"] else f"{largest:,} or more"


def _interval(entry: Mapping[str, Any]) -> str:
    if entry["low_ms"] is None:
        return "–"
    return f"{time_text(entry['low_ms'])} – {time_text(entry['high_ms'])}"


def _interval_chart(devices: Sequence[Mapping[str, Any]]) -> str:
    """Predictions with whiskers on a logarithmic scale."""
    entries = [device["inference"][0] for device in devices]
    lows = [entry["low_ms"] or entry["latency_ms"] for entry in entries]
    highs = [entry["high_ms"] or entry["latency_ms"] for entry in entries]
    first, last = floor(log10(min(lows))), floor(log10(max(highs))) + 1
    left, right, step, top, width = 290, 150, 30, 24, 1040

    def x(ms: float) -> float:
        return left + (log10(ms) - first) / (last - first) * (width - left - right)

    height = top + step * len(entries) + 8
    out = []
    for power in range(first, last + 1):
        at = x(10.0**power)
        out.append(f'<line x1="{at:.1f}" y1="{top - 4}" x2="{at:.1f}" y2="{height - 6}" stroke="#dde4ea"/>')
        out.append(
            f'<text x="{at:.1f}" y="14" text-anchor="middle" class="soft">{escape(time_text(10.0**power))}</text>'
        )
    for row, (device, entry, low, high) in enumerate(zip(devices, entries, lows, highs, strict=True)):
        y, colour = top + row * step, PALETTE[0] if entry["kind"] == "predicted" else PALETTE[2]
        end = x(entry["latency_ms"])
        label = escape(_short(device))
        out.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{label}</text>')
        out.append(f'<rect x="{left}" y="{y + 4}" width="{max(1.0, end - left):.1f}" height="15" fill="{colour}"/>')
        if high > low:
            out.append(
                f'<path d="M{x(low):.1f} {y + 7}v9m0 -4.5H{x(high):.1f}m0 -4.5v9" stroke="#1b2733" stroke-width="1.4" '
                'fill="none"/>'
            )
        words = entry["runtime"] if entry["kind"] == "predicted" else "systolic"
        text = f"{time_text(entry['latency_ms'])}  {words} {entry['precision']}"
        out.append(f'<text x="{max(end, x(high)) + 8:.1f}" y="{y + 16}">{escape(text)}</text>')
    return _svg(width, height, "latency of inference by device", out)


def _training(devices: Sequence[Mapping[str, Any]]) -> str:
    steps = [(device, device["training_step"]) for device in devices if device["training_step"]]
    if not steps:
        return ""
    values = [
        Bar(
            _short(device)[:32],
            {phase.replace("_", " "): 100 * ms / step["latency_ms"] for phase, ms in step["phases_ms"].items()},
            f"{time_text(step['latency_ms'])} ({step['kind']})",
        )
        for device, step in steps
    ]
    batch = steps[0][1]["batch"]
    lead = (
        f"One step of batch {batch}: the share of each phase, the whole step at the bar's end. On an array it is "
        "derived layer by layer from the forward graph, as `protofleet cost` does. On CPUs it is the bundle's own "
        "training graph, predicted for ONNX Runtime in fp32: "
        + next((step["basis"] for _, step in steps if step["kind"] == "predicted"), "no CPU in this report")
        + "."
    )
    rows = [
        (_short(device), time_text(step["latency_ms"]), _interval(step), tag(step["kind"]), f"{step['round_steps']:,}")
        for device, step in steps
    ]
    headers = ("device", "step", "80 % interval", "", "steps in a round")
    return section("A training step by phase", bars(values, unit="% of the step"), table(headers, rows), lead=lead)


def _measured(report: Mapping[str, Any]) -> str:
    if not report["measured"]:
        return ""
    rows = []
    for line in report["comparison"]:
        predicted = time_text(line["predicted_ms"]) if line["predicted_ms"] else "–"
        rows.append(
            (
                line["phase"].replace("_", " "),
                str(line["threads"]),
                str(line["batch"]),
                f"{time_text(line['median_ms'])}",
                time_text(line["p99_ms"]),
                tag("measured"),
                predicted,
                _interval(line) if line["predicted_ms"] else "",
                {True: "inside", False: "outside", None: ""}[line.get("inside")],
                size(line["peak_rss_bytes"]),
                time_text(line["load_ms"]),
                _conditions(line),
            )
        )
    headers = (
        "what", "threads", "batch", "median", "p99", "", "predicted", "80 % interval", "", "peak memory", "load",
        "conditions",
    )  # fmt: skip
    host = report["measured"]["host"]
    versions = ", ".join(f"{name} {value}" for name, value in host["versions"].items())
    lead = f"On {host['board']} ({host['cpu']}, {host['cores']} cores), {versions}."
    return section("Measured beside predicted", table(headers, rows, wide=(11,), tight=True), lead=lead)


def _conditions(line: Mapping[str, Any]) -> str:
    before, after = line["temperature_c"]
    heat_text = (
        f"{before:.0f} to {after:.0f} °C" if before is not None and after is not None else "temperature not told"
    )
    held = {True: "throttled", False: "not throttled", None: "throttling not told"}[line["throttled"]]
    return f"{heat_text}, {held}"


def _entries(device: Mapping[str, Any]) -> str:
    rows = [
        (
            f"{entry['runtime']} {entry['variant']}".strip(),
            entry["precision"],
            {"1": "1", "all": "all cores"}.get(entry["threads"], "–"),
            time_text(entry["latency_ms"]),
            _interval(entry),
            tag(entry["kind"]),
            f"{entry['energy']['mj']:,.3g} mJ" if entry["energy"] else "–",
            entry["basis"],
        )
        for entry in device["inference"]
    ]
    headers = ("runtime", "precision", "threads", "latency", "80 % interval", "", "energy", "rests on")
    return details(f"{device['title']}: {len(rows)} entries", table(headers, rows, wide=(7,)))


def _heat_table(devices: Sequence[Mapping[str, Any]]) -> str:
    """Layers as rows, devices as columns. A layer that is fused on one device and not on another shows as 0 there."""
    order: dict[str, tuple[str, int]] = {}
    for device in devices:
        for layer in device["layers"]:
            order.setdefault(layer["name"], (layer["op"], layer["macs"]))
    times = [{layer["name"]: layer["ms"] for layer in device["layers"]} for device in devices]
    worst = [max(column.values(), default=0.0) for column in times]
    share = {n: max(c.get(n, 0.0) / (sum(c.values()) or 1.0) for c in times) for n in order}
    kept = set(sorted(order, key=lambda n: -share[n])[:_LAYERS_SHOWN])
    rows, shade = [], []
    for name, (op, macs) in order.items():
        if name not in kept:
            continue
        rows.append(
            (
                name,
                op,
                f"{macs / 1e6:,.2f}" if macs else "",
                *(_microseconds(column.get(name, 0.0)) for column in times),
            )
        )
        shade.append(("", "", "", *(heat(c.get(name, 0.0), w) for c, w in zip(times, worst, strict=True))))
    headers = ("layer", "op", "M MACs", *(_column(device["name"]) for device in devices))
    left_out = len(order) - len(rows)
    text = (
        f"{left_out} layers that take the least time everywhere are not shown; the JSON has them." if left_out else ""
    )
    return table(headers, rows, left=(0, 1), shade=shade, tight=True) + (notes([text]) if text else "")


def _microseconds(ms: float) -> str:
    return f"{ms * 1e3:,.3g}" if ms < 1 else f"{ms * 1e3:,.0f}"


def _column(name: str) -> str:
    """A device's name short enough for a column."""
    return name.replace("raspberry-pi-", "pi ").replace("jetson-", "").replace("fpga-", "")


def _roofline(device: Mapping[str, Any]) -> str:
    """Speed over intensity, both logarithmic, with the data sheet's roof."""
    roof = device["roofline"]
    points = [point for point in roof["points"] if point["gmacs"] > 0]
    peak, slope = roof["peak_gmacs"], roof["memory_gb_s"]
    if not points:
        return ""
    xs = [p["macs_per_byte"] for p in points] + [peak / slope]
    ys = [p["gmacs"] for p in points] + [peak]
    x0, x1, y0, y1 = floor(log10(min(xs))), floor(log10(max(xs))) + 1, floor(log10(min(ys))), floor(log10(max(ys))) + 1
    width, height, left, bottom, top = 520, 300, 62, 40, 30

    def at(mx: float, my: float) -> tuple[float, float]:
        px = left + (log10(mx) - x0) / (x1 - x0) * (width - left - 14)
        py = height - bottom - (log10(my) - y0) / (y1 - y0) * (height - bottom - top)
        return px, py

    out = [f'<text x="0" y="14">{escape(_short(device))}: {escape(device["inference"][0]["precision"])}</text>']
    for power in range(x0, x1 + 1):
        px, _ = at(10.0**power, 10.0**y0)
        out.append(f'<line x1="{px:.1f}" y1="{top}" x2="{px:.1f}" y2="{height - bottom}" stroke="#e9eef2"/>')
        out.append(
            f'<text x="{px:.1f}" y="{height - bottom + 16}" text-anchor="middle" class="soft">{10.0**power:g}</text>'
        )
    for power in range(y0, y1 + 1):
        _, py = at(10.0**x0, 10.0**power)
        out.append(f'<line x1="{left}" y1="{py:.1f}" x2="{width - 14}" y2="{py:.1f}" stroke="#e9eef2"/>')
        out.append(f'<text x="{left - 6}" y="{py + 4:.1f}" text-anchor="end" class="soft">{10.0**power:g}</text>')
    start = max(10.0**x0, 10.0**y0 / slope)
    corner, end = at(peak / slope, peak), at(10.0**x1, peak)
    foot = at(start, start * slope)
    path = f"M{foot[0]:.1f} {foot[1]:.1f}L{corner[0]:.1f} {corner[1]:.1f}L{end[0]:.1f} {end[1]:.1f}"
    out.append(f'<path d="{path}" stroke="{PALETTE[5]}" stroke-width="2" fill="none"/>')
    for point in points:
        px, py = at(point["macs_per_byte"], point["gmacs"])
        words = f"{point['name']}: {point['gmacs']:,.3g} G/s at {point['macs_per_byte']:,.3g} per byte"
        out.append(
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.4" fill="{PALETTE[0]}" fill-opacity="0.55">'
            f"<title>{escape(words)}</title></circle>"
        )
    out.append(f'<text x="{left}" y="{height - 6}" class="soft">multiply-accumulates per byte; up: G per second</text>')
    return f'<div style="display:inline-block">{_svg(width, height, "roofline of " + device["name"], out)}</div>'


def _sources(device: Mapping[str, Any]) -> str:
    rows = [(name, source) for name, source in device["sources"].items()]
    return details(device["title"], table(("figure", "source"), rows, wide=(1,)))


def _svg(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )

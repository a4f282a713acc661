"""The demo's report: from `summary.json` to one HTML file that needs nothing else.

`render_report` is a pure function of the summary, so a report can be made again from an old summary. The page is
`report.html.j2` over the reports' base. It loads no script, font or image from outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protofleet.contract.methods import method
from protofleet.hw_profiles.charts.bars import byte_bars
from protofleet.hw_profiles.charts.curves import Line, curves
from protofleet.hw_profiles.charts.grids import heatmap, holdings
from protofleet.hw_profiles.charts.strips import Row, strips
from protofleet.hw_profiles.reports.page import render_page

__all__ = ["render_report"]

_TEMPLATE = Path(__file__).with_name("report.html.j2")
_WAYS = (
    ("public_alone", "local", "public alone"),
    ("local_only", "local", "device alone"),
    ("federated", "fed", "federated"),
    ("closing", "ffc", "FFC"),
)


def render_report(summary: Mapping[str, Any]) -> str:
    """The HTML page of a demo's summary (schema `protofleet.demo/4`).

    Raises:
        UsageError: jinja2 is not installed.
    """
    row = method(summary["method"])
    best = "federated" if row.global_rows and not row.closes_runs else "closing"
    everything = summary["accuracy"]["all_classes"]
    known = [way for way in ("local_only", "public_alone") if everything[way] is not None]
    before = max(known, key=lambda way: everything[way])
    view = {
        "s": summary,
        "ways": [(key, kind, _label(key, label, summary)) for key, kind, label in _ways(summary)],
        "method": row,
        "trained": _trains(summary),
        "calibrated": _calibrated(summary),
        "reliable": bool(_bins(summary)),
        "best": best,
        "fleet": row.title if best == "federated" else "FFC",
        "won": everything[best] > everything[before],
        "before": before,
        "held": max(sum(count > 0 for count in device["samples_per_class"]) for device in summary["devices"]),
        "has_public": "public_alone" in known,
        "known": [label for label in summary["labels"] if label not in summary["new_labels"]],
        "closing": row.closes_runs,
        "sent": row.sends,
    }
    return render_page(_TEMPLATE, view, charts=_charts(summary))


def _charts(s: Mapping[str, Any]) -> dict[str, str]:
    names, labels = [device["id"] for device in s["devices"]], s["labels"]
    charts = {
        "strips": strips(_strip_rows(s)),
        "holdings": holdings(names, [device["samples_per_class"] for device in s["devices"]], labels),
        "bytes": byte_bars(_byte_rows(s)),
    }
    if _bins(s):
        ticks = [f"{10 * place}–{10 * place + 10} %" for place in range(10)]
        charts["reliability"] = curves(_reliability(s), ticks, "right answers by stated probability", axis="stated")
    if _trains(s):
        ticks = [str(number) for number in range(1, s["rounds"] + 1)]
        charts["own_curve"] = curves(_lines(s, "own_classes"), ticks, "accuracy on own classes over rounds")
        charts["all_curve"] = curves(_lines(s, "all_classes"), ticks, "accuracy on all classes over rounds")
    for key, kind, label in (way for way in _ways(s) if way[0] in s["confusion"]):
        charts[f"confusion_{key}"] = heatmap(s["confusion"][key], labels, kind, f"confusion of {label}")
    return charts


def _strip_rows(s: Mapping[str, Any]) -> list[Row]:
    rows, everything = [], s["accuracy"]["all_classes"]
    new = "On classes that are new" if everything["public_alone"] is not None else "On classes that a device lacks"
    for part, heading in (("new_classes", new), ("all_classes", "On all classes")):
        section = heading
        for key, kind, label in _ways(s):
            points = [device["accuracy"][part][key] for device in s["devices"]]
            # FFC's head and extractor are the same everywhere: on all classes, five equal dots would say nothing.
            shown = points if len(set(points)) > 1 else ()
            rows.append(Row(_label(key, label, s), kind, s["accuracy"][part][key], shown, section))
            section = ""
    if _calibrated(s):
        rows.append(Row("pooled ridge", "pooled", everything["pooled_ridge"]))
    return rows


def _lines(s: Mapping[str, Any], part: str) -> list[Line]:
    lines = [
        Line(device["id"], "fed", [one[part]["federated"] for one in device["curve"]], faint=True)
        for device in s["devices"]
    ]
    for key, kind, label in _WAYS[1:3]:
        lines.append(Line(_label(key, label, s), kind, [one[part][key] for one in s["curves"]], dashed=kind == "local"))
    if _calibrated(s):
        lines.append(Line("FFC", "ffc", [s["accuracy"][part]["closing"]], first=s["rounds"] - 1))
    return lines


def _bins(s: Mapping[str, Any]) -> list[Mapping[str, float]]:
    """Held-out photos by the probability of the answer; none where too few devices said so."""
    calibration = s.get("calibration") or {}
    return calibration.get("bins") or []


def _reliability(s: Mapping[str, Any]) -> list[Line]:
    """The share of right answers in each bin, beside the mean probability that was stated; a gap where no photo is."""
    bins = _bins(s)
    return [
        Line("as stated", "local", [b["expected"] / b["photos"] if b["photos"] else None for b in bins], dashed=True),
        Line("right", "fed", [b["right"] / b["photos"] if b["photos"] else None for b in bins]),
    ]


def _byte_rows(s: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    rows: list[tuple[str, str, float]] = []
    if not method(s["method"]).closes_runs:
        rows.append((f"{method(s['method']).title} round", "fed", s["uplink_bytes_per_device_round"]))
    if _calibrated(s):
        rows.append(("FFC round, once", "ffc", s["closing_uplink_bytes_per_device"]))
    rows.append(("FedAvg round", "local", s["fedavg_bytes_per_device_round"]))
    return rows


def _ways(s: Mapping[str, Any]) -> Sequence[tuple[str, str, str]]:
    public = s["accuracy"]["all_classes"]["public_alone"] is not None
    available = {"public_alone": public, "federated": not method(s["method"]).closes_runs, "closing": _calibrated(s)}
    return [way for way in _WAYS if available.get(way[0], True)]


def _label(key: str, label: str, s: Mapping[str, Any]) -> str:
    return method(s["method"]).title if key == "federated" else label


def _trains(s: Mapping[str, Any]) -> bool:
    return method(s["method"]).trains


def _calibrated(s: Mapping[str, Any]) -> bool:
    """Whether there was an FFC round. There is none where devices have different backbones."""
    return s["closing_vs_pooled_ridge"] is not None

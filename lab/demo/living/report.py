"""The living demo's page: from its `summary.json` to one HTML file that needs nothing else.

`render_living` is a pure function of the summary. The page is `living.html.j2` over the reports' base, as every page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protofleet.hw_profiles.charts.curves import Event, Line, curves
from protofleet.hw_profiles.charts.timeline import Stretch, Track, timeline
from protofleet.hw_profiles.reports.page import Table, render_page
from protofleet.hw_profiles.units import percent, thousands

__all__ = ["render_living"]

_TEMPLATE = Path(__file__).with_name("living.html.j2")
_TOLD = (1, 5, 10, 15, 16, 20, 21, 25, 30)  # days of the table


def render_living(summary: Mapping[str, Any]) -> str:
    """The HTML page of a living demo's summary (schema `protofleet.living/1`).

    Raises:
        UsageError: jinja2 is not installed.
    """
    days, grown = summary["days"], _grown(summary)
    by_day = {day["day"]: day for day in days}
    forgotten = summary["forgotten"]["device"]
    left = next(device["leaves"] for device in summary["devices"] if device["id"] == forgotten)
    view = {
        "s": summary,
        "first": days[0],
        "last": days[-1],
        "grown": grown,
        "before": by_day[grown - 1],
        "marked": [happening for happening in summary["happenings"] if happening["number"] is not None],
        "unmarked": [happening for happening in summary["happenings"] if happening["number"] is None],
        "table": _table(summary),
        "left": left,
        "kept": by_day[left - 1],
        "without": by_day[left],
        "kills": sum("killed" in happening["what"] for happening in summary["happenings"]),
        "sums": sum(device["sums"] for device in summary["devices"]),
        "holds": {device["id"]: ", ".join(device["holds"]) for device in summary["devices"]},
    }
    charts = {"right": _right(summary), "new": _new(summary), "there": _there(summary)}
    return render_page(_TEMPLATE, view, charts=charts)


def _grown(summary: Mapping[str, Any]) -> int:
    return int(next(happening["day"] for happening in summary["happenings"] if happening["what"] == "class added"))


def _right(summary: Mapping[str, Any]) -> str:
    days = summary["days"]
    lines = [Line(name, "fed", _over(days, name, "right"), faint=True) for name in _names(summary)]
    lines += [
        Line("all pooled", "pooled", [day["pooled"]["right"] for day in days], dashed=True),
        Line("device alone", "local", [day["alone"]["right"] for day in days], dashed=True),
        Line("the fleet", "fed", [day["fleet"]["right"] for day in days]),
    ]
    events = [
        Event(happening["day"] - 1, str(happening["number"]), f"day {happening['day']}: {happening['words']}")
        for happening in summary["happenings"]
        if happening["number"] is not None
    ]
    return curves(lines, _ticks(days), "right on all test images, day by day", axis="day", events=events)


def _new(summary: Mapping[str, Any]) -> str:
    days, start = summary["days"], _grown(summary) - 5
    part = days[start:]
    lines = [Line(name, "ffc", _over(part, name, "new"), faint=True) for name in _names(summary)]
    lines += [
        Line("all pooled", "pooled", [day["pooled"]["new"] for day in part], dashed=True),
        Line("device alone", "local", [day["alone"]["new"] for day in part], dashed=True),
        Line("the fleet", "ffc", [day["fleet"]["new"] for day in part]),
    ]
    events = [
        Event(happening["day"] - 1 - start, str(happening["number"]), f"day {happening['day']}: {happening['words']}")
        for happening in summary["happenings"]
        if happening["number"] is not None and happening["day"] > start
    ]
    return curves(lines, _ticks(part), f"right on {summary['new_label']}, day by day", axis="day", events=events)


def _there(summary: Mapping[str, Any]) -> str:
    last = len(summary["days"])
    tracks = []
    for device in summary["devices"]:
        killed = [
            (happening["day"], f"{device['id']} is killed and started again")
            for happening in summary["happenings"]
            if (happening["what"], happening["device"]) == ("device killed", device["id"])
        ]
        bars = [
            Stretch(first, end, kind, f"{device['id']} is awake on day {first}" + (f" to {end}" if end > first else ""))
            for kind, days in _awake(device, _grown(summary)).items()
            for first, end in _runs(days)
        ]
        tracks.append(Track(device["id"], device["joins"], (device["leaves"] or last + 1) - 1, bars, killed))
    return timeline(tracks, 1, last, "which device is awake on which day", axis="day")


def _awake(device: Mapping[str, Any], grown: int) -> dict[str, list[int]]:
    """The days on which it is awake, by the colour of the list of classes that it has then."""
    return {
        "fed": [day for day in device["awake"] if day < grown],
        "ffc": [day for day in device["awake"] if day >= grown],
    }


def _runs(days: Sequence[int]) -> list[tuple[int, int]]:
    """Days that follow one another, together: first and last."""
    runs: list[tuple[int, int]] = []
    for day in days:
        if runs and runs[-1][1] == day - 1:
            runs[-1] = (runs[-1][0], day)
        else:
            runs.append((day, day))
    return runs


def _table(summary: Mapping[str, Any]) -> Table:
    """Some days in figures: right on all, and on the new class."""
    rows = []
    for day in (day for day in summary["days"] if day["day"] in _TOLD):
        rows.append(
            (
                f"{day['day']}",
                thousands(sum(day["photos"].values())),
                f"{len(day['awake'])} of {len(day['photos'])}",
                *(percent(day[way]["right"]) for way in ("fleet", "pooled", "alone")),
                *(percent(day[way]["new"], 0) for way in ("fleet", "pooled")),
            )
        )
    headers = ("day", "photos", "awake", "the fleet", "all pooled", "device alone")
    new = summary["new_label"]
    return Table("some days in figures", (*headers, f"{new}: the fleet", f"{new}: all pooled"), rows)


def _over(days: Sequence[Mapping[str, Any]], device: str, part: str) -> list[float | None]:
    return [day["devices"][device][part] if device in day["devices"] else None for day in days]


def _names(summary: Mapping[str, Any]) -> list[str]:
    return [device["id"] for device in summary["devices"]]


def _ticks(days: Sequence[Mapping[str, Any]]) -> list[str]:
    return [str(day["day"]) for day in days]

"""The plan as one self-contained page: the sentence, the choices, what is taken group by group, then every alternative,
the bytes, the figures with their sources, and the assumptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protofleet.hw_profiles.charts.bars import Bar, bars
from protofleet.hw_profiles.plan import wording
from protofleet.hw_profiles.plan.wording import bounds, ranged
from protofleet.hw_profiles.reports.page import Table, render_page
from protofleet.hw_profiles.units import size

__all__ = ["plan_page"]

_TEMPLATE = Path(__file__).with_name("plan.html.j2")


def plan_page(report: Mapping[str, Any]) -> str:
    """The page, from what `plan_report` returns.

    Raises:
        UsageError: jinja2 is not installed.
    """
    shown = report["taken"] or 0
    view = {
        "r": report,
        "tiles": _tiles(report, report["choices"][shown]),
        "choices": _choices(report),
        "why": [f"{_name(one)}: {'; '.join(one['why'])}" for one in report["choices"] if one["why"]],
        "shown": _name(report["choices"][shown]),
        "rounds": _rounds(report["choices"][shown]["groups"], "rounds, joules and battery of one device"),
        "money": _money(report["choices"][shown]["groups"], "the bill of each group"),
        "alternatives": [
            (_name(one), _rounds(every, f"alternatives: {_name(one)}"), _money(every, f"their bills: {_name(one)}"))
            for one, every in zip(report["choices"], map(_flat, report["alternatives"]), strict=True)
        ],
        "grounds": _grounds(report),
        "traffic": _traffic(report),
        "figures": _figures(report["figures"]),
    }
    return render_page(_TEMPLATE, view, charts={"money": _money_chart(report)})


def _name(choice: Mapping[str, Any]) -> str:
    return f"{choice['way']}, {choice['rounds_a_day']:g} a day"


def _flat(groups: Sequence[Sequence[Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    return [bill for group in groups for bill in group]


def _tiles(report: Mapping[str, Any], choice: Mapping[str, Any]) -> list[tuple[str, str]]:
    currency = report["fleet"]["currency"]
    tiles = [(f"{report['fleet']['devices']:,}", "devices")]
    if choice["money_a_month"] is not None:
        within = bounds(choice["money_a_month"], wording.money)
        tiles.append((f"{wording.money(choice['money_a_month']['value'])} {currency}", f"a month, {within}"))
    tiles.append((wording.megabytes(choice["megabytes_a_month"]["value"]), "on the wire a month"))
    if choice["finish_h"] is not None:
        within = bounds(choice["finish_h"], wording.hours)
        tiles.append((wording.hours(choice["finish_h"]["value"]), f"until the last round ends, {within}"))
    for group in choice["groups"]:
        if group["battery_days"] is not None:
            within = bounds(group["battery_days"], wording.days)
            tiles.append((wording.days(group["battery_days"]["value"]), f"battery of {group['group']}, {within}"))
    return tiles


def _choices(report: Mapping[str, Any]) -> Table:
    currency = report["fleet"]["currency"]
    rows = [
        (
            _name(one),
            one["meets"],
            ranged(one["accuracy"], wording.share) if one["accuracy"] else "–",
            ranged(one["finish_h"], wording.hours, wording.NO_GROUND),
            ranged(one["money_a_month"], wording.money),
            ranged(one["megabytes_a_month"], wording.megabytes),
            ", ".join(f"{g['count']} {g['board']} on {g['radio']}" for g in one["groups"]),
        )
        for one in report["choices"]
    ]
    headers = ("way", "meets the goal", "accuracy", "ends after", f"{currency} a month", "wire a month", "with")
    return Table("choices", headers, rows, left=(0, 1), wide=(6,))


def _rounds(groups: Sequence[Mapping[str, Any]], name: str) -> Table:
    rows = [
        (
            f"{one['group']}: {one['count']} {one['board']}",
            one["radio"],
            one["support"],
            "yes" if one["fits_memory"] else "NO",
            ranged(one["round_s"], wording.seconds, wording.NO_GROUND),
            ranged(one["joules_a_round"], wording.joules),
            ranged(one["joules_a_day"], wording.joules),
            ranged(one["battery_days"], wording.days) if one["battery_days"] else "–",
        )
        for one in groups
    ]
    headers = ("devices", "radio", "ground", "fits", "a round", "joules a round", "joules a day", "battery")
    return Table(name, headers, rows, left=(0, 1, 2, 3))


def _money(groups: Sequence[Mapping[str, Any]], name: str) -> Table:
    parts = ("money_data", "money_electricity", "money_boards", "money_a_month")
    rows = [
        (
            f"{one['group']}: {one['count']} {one['board']}",
            one["radio"],
            ranged(one["megabytes_a_month"], wording.megabytes),
            *(ranged(one[part], wording.money) for part in parts),
        )
        for one in groups
    ]
    headers = ("devices", "radio", "wire a month", "data", "electricity", "boards", "together")
    return Table(name, headers, rows, left=(0, 1))


def _grounds(report: Mapping[str, Any]) -> list[str]:
    """A line for each board's round that is not interpolated, and for each gap."""
    lines = {}
    for groups in report["alternatives"]:
        for one in _flat(groups):
            if one["support_reasons"]:
                error = f" The model's error: {one['error']}" if one["error"] else ""
                lines[f"{one['board']}: {one['support']}: {'; '.join(one['support_reasons'])}.{error}"] = None
            for gap in one["gaps"]:
                lines[f"{one['board']}: {gap}"] = None
    return list(lines)


def _traffic(report: Mapping[str, Any]) -> Table:
    rows = []
    for choice in report["choices"]:
        one = choice["groups"][0]
        moved = [one[f"bytes_a_{period}"][direction] for period in ("round", "day") for direction in ("up", "down")]
        encoded = (size(choice["contribution_bytes"]), size(choice["state_bytes"]))
        rows.append((_name(choice), *encoded, *(ranged(figure, size) for figure in moved)))
    headers = ("way", "contribution", "state", "round up", "round down", "day up", "day down")
    return Table("bytes of one device", headers, rows)


def _figures(figures: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        (one["figure"], ranged(one, wording.number), "yours" if one["yours"] else "default", one["source"])
        for one in figures
    ]
    return Table("figures", ("figure", "value", "whose", "source"), rows, left=(0, 2), wide=(3,))


def _money_chart(report: Mapping[str, Any]) -> str:
    values = []
    for choice in report["choices"][:12]:
        if choice["money_a_month"] is None:
            continue
        parts = {
            name: sum(group[f"money_{name}"]["value"] for group in choice["groups"])
            for name in ("data", "electricity", "boards")
        }
        note = f"{wording.money(choice['money_a_month']['value'])}, meets: {choice['meets']}"
        values.append(Bar(_name(choice), parts, note))
    return bars(values, unit=f"{report['fleet']['currency']} a month")

"""Horizontal bars: parts of a whole, intervals, and bytes. Name and figure stand above their bar, which has the whole
width, so that long names stay readable on a phone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from protofleet.hw_profiles.charts.marks import LETTER, WIDTH, Span, line, powers, rect, svg, text, tip, truncate
from protofleet.hw_profiles.units import nice_bytes, time_text

__all__ = ["Bar", "Interval", "bars", "byte_bars", "intervals"]

_STEP = 43  # from one bar to the next
_THICK = 16


@dataclass(frozen=True)
class Bar:
    """One bar: its label, its parts by series name, and what is written at its end."""

    label: str
    parts: Mapping[str, float]
    note: str = ""


@dataclass(frozen=True)
class Interval:
    """A duration in milliseconds and where it may lie; `low_ms` is None where nothing is known of that.

    Attributes:
        kind: the colour's name.
    """

    label: str
    kind: str
    ms: float
    low_ms: float | None
    high_ms: float | None
    note: str


def bars(values: Sequence[Bar], *, unit: str, title: str = "") -> str:
    """Stacked bars on one scale that starts at 0, with a legend of the series and the total or note above each bar."""
    series = list(dict.fromkeys(name for bar in values for name in bar.parts))
    most = max((sum(bar.parts.values()) for bar in values), default=0.0) or 1.0
    parts = [text(0, 12, f"{title} ({unit})" if title else unit, "t-axis")]
    keys, y = _legend(series, 18) if len(series) > 1 else ([], 22.0)
    parts += keys
    for bar in values:
        note = bar.note or f"{sum(bar.parts.values()):,.4g}"
        parts += _heading(y, bar.label, note)
        x = 0.0
        for index, name in enumerate(series):
            share = bar.parts.get(name, 0.0) / most
            if share > 0:
                says = f"{bar.label}, {name}: {bar.parts[name]:,.4g} {unit}"
                parts.append(rect(x, y + 21, share * WIDTH, _THICK, f"c-{index % 6 + 1}", says, round_px=0))
                x += share * WIDTH
        y += _STEP
    return svg(parts, y, title or "bar chart")


def intervals(values: Sequence[Interval], title: str) -> str:
    """Durations on a logarithmic axis, each with a whisker from low to high where that is known."""
    ends = [ms for value in values for ms in (value.low_ms, value.ms, value.high_ms) if ms]
    axis = Span(*powers(ends), 0, WIDTH, log=True)
    bottom = 20 + _STEP * len(values)
    parts = _power_axis(axis, 20, bottom, time_text)
    for row, value in enumerate(values):
        y = 20 + row * _STEP
        parts += _heading(y, value.label, value.note)
        says = f"{value.label}: {value.note}"
        if value.low_ms and value.high_ms:
            says += f", from {time_text(value.low_ms)} to {time_text(value.high_ms)}"
        parts.append(rect(0, y + 21, max(axis.at(value.ms), 2), _THICK, f"c-{value.kind}", says))
        if value.low_ms and value.high_ms:
            low, high, middle = axis.at(value.low_ms), axis.at(value.high_ms), y + 21 + _THICK / 2
            path = f"M{low:.1f} {middle - 4.5}v9m0 -4.5H{high:.1f}m0 -4.5v9"
            parts.append(f'<path class="whisker" d="{path}">{tip(says)}</path>')
    return svg(parts, bottom + 2, title)


def byte_bars(rows: Sequence[tuple[str, str, float]]) -> str:
    """Bytes on a logarithmic axis: (label, kind, bytes)."""
    values = [max(value, 1.0) for _, _, value in rows]
    axis = Span(*powers([*values, 100.0, 1000.0]), 0, WIDTH - 40, log=True)
    bottom = 20 + _STEP * len(rows)
    parts = _power_axis(axis, 20, bottom, nice_bytes)
    for row, (label, kind, value) in enumerate(rows):
        y = 20 + row * _STEP
        parts += _heading(y, label, nice_bytes(value), f"t-value f-{kind}")
        says = f"{label}: {value:,.0f} bytes"
        parts.append(rect(0, y + 21, max(axis.at(max(value, 1.0)), 2), _THICK, f"c-{kind}", says))
    parts.append(text(0, bottom + 18, "bytes from one device in one round, logarithmic axis", "t-axis"))
    return svg(parts, bottom + 24, "bytes up per device and round")


def _heading(y: float, label: str, note: str, style: str = "t-value") -> list[str]:
    """A bar's name and, at the right end, its figure."""
    letters = max(8, int((WIDTH - LETTER * len(note)) / LETTER) - 1)
    return [text(0, y + 15, truncate(label, letters), "t-label"), text(WIDTH, y + 15, note, style, "end")]


def _legend(series: Sequence[str], y: float) -> tuple[list[str], float]:
    """A square and a name for each series, in as many lines as they take; and where the bars begin."""
    parts, x = [], 0.0
    for index, name in enumerate(truncate(label, 48) for label in series):
        wide = 26 + LETTER * len(name)
        if x and x + wide > WIDTH:
            x, y = 0.0, y + 20
        parts.append(f'<rect class="c-{index % 6 + 1}" x="{x:.1f}" y="{y + 5:.1f}" width="11" height="11" rx="2"/>')
        parts.append(text(x + 16, y + 15, name, "t-axis"))
        x += wide
    return parts, y + 24


def _power_axis(axis: Span, top: float, bottom: float, write: Callable[[float], str]) -> list[str]:
    """Lines at each power of ten, named above."""
    parts = []
    for power in range(int(axis.low), int(axis.high) + 1):
        x = axis.at(10.0**power)
        anchor = "start" if x < 20 else "end" if x > WIDTH - 20 else "middle"
        parts += [line(x, top, x, bottom), text(x, 12, write(10.0**power), "t-axis", anchor)]
    return parts

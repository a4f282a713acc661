"""Lines over rounds, each named at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from protofleet.hw_profiles.charts.marks import (
    LETTER,
    WIDTH,
    Span,
    dot,
    line,
    percent_span,
    percent_ticks,
    svg,
    text,
    truncate,
)
from protofleet.hw_profiles.units import percent

__all__ = ["Event", "Line", "curves"]

_LETTERS = 26  # of a line's name, at most


@dataclass(frozen=True)
class Line:
    """One line of a chart over rounds: values[i] belongs to x = i + `first`; None is a gap. `band` is how far the
    shaded band goes to either side of each value; none when empty."""

    label: str
    kind: str
    values: Sequence[float | None]
    first: int = 0
    faint: bool = False
    dashed: bool = False
    band: Sequence[float] = ()


@dataclass(frozen=True)
class Event:
    """Something that happened at x: a line with a number or a letter above it, which says what it was."""

    x: int
    mark: str
    says: str


def curves(
    lines: Sequence[Line], rounds: Sequence[str], title: str, *, axis: str = "after round", events: Sequence[Event] = ()
) -> str:
    """Accuracy over rounds, or over what `axis` names; `rounds` names the values of the x axis, the first being x = 0.
    Marks of events stand side by side where they are far enough apart: two x of thirty."""
    beside = max([96.0, *(14 + LETTER * min(len(curve.label), _LETTERS) for curve in lines if not curve.faint)])
    left, right, top, bottom = 44, WIDTH - beside, 54 if events else 28, 262
    up = percent_span([v for curve in lines for v in _reach(curve)], bottom, top)
    along = Span(0, max(len(rounds) - 1, 1), left, right)
    parts = [text(0, 10, "accuracy", "t-axis")]
    for y, label in percent_ticks(up):
        parts += [line(left, y, right, y), text(left - 8, y + 4, label, "t-axis", "end")]
    parts += [text(along.at(i), bottom + 20, rounds[i], "t-axis", "middle") for i in _named(rounds, right - left)]
    parts.append(text((left + right) / 2, bottom + 40, axis, "t-axis", "middle"))
    for event in events:
        x = along.at(event.x)
        parts += [line(x, 44, x, bottom, "event"), dot(x, 34, 8 + len(event.mark), "c-event", event.says)]
        parts.append(text(x, 38.5, event.mark, "t-cell on", "middle"))
    ends: list[tuple[float, Line]] = []
    parts += [_band(curve, along, up) for curve in lines if curve.band]
    for curve in sorted(lines, key=lambda curve: not curve.faint):
        points = [(along.at(curve.first + i), up.at(v), v) for i, v in enumerate(curve.values) if v is not None]
        parts += _polyline(curve, points)
        if points and not curve.faint:
            ends.append((points[-1][1], curve))
    for y, curve in _apart(ends, 15):
        parts.append(text(right + 10, y + 4, truncate(curve.label, _LETTERS), f"t-line f-{curve.kind}"))
    return svg(parts, bottom + 48, title)


def _reach(curve: Line) -> list[float]:
    """The values of a line, and the edges of its band between 0 and 1."""
    sides = curve.band or [0.0] * len(curve.values)
    pairs = [(v, side) for v, side in zip(curve.values, sides, strict=True) if v is not None]
    return [min(max(v + sign * side, 0.0), 1.0) for v, side in pairs for sign in ((-1, 1) if side else (0,))]


def _band(curve: Line, along: Span, up: Span) -> str:
    places = [
        (curve.first + i, v, side)
        for i, (v, side) in enumerate(zip(curve.values, curve.band, strict=True))
        if v is not None
    ]
    above = [(along.at(x), up.at(min(v + side, 1.0))) for x, v, side in places]
    below = [(along.at(x), up.at(max(v - side, 0.0))) for x, v, side in places]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*above, *reversed(below)])
    return f'<polygon class="f-{curve.kind}" fill-opacity=".13" points="{path}"/>'


def _named(rounds: Sequence[str], space: float) -> range:
    """The rounds whose names have room below the axis: evenly, from the first."""
    widest = LETTER * max((len(name) for name in rounds), default=1) + 8
    return range(0, len(rounds), max(1, math.ceil(widest * len(rounds) / space)))


def _polyline(curve: Line, points: Sequence[tuple[float, float, float]]) -> list[str]:
    style = f"curve s-{curve.kind}" + (" faint" if curve.faint else "") + (" dashed" if curve.dashed else "")
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
    radius = 4 if len(points) <= 20 else 1.6
    dots = [dot(x, y, radius, f"c-{curve.kind}", f"{curve.label}: {percent(v)}") for x, y, v in points]
    return [f'<polyline class="{style}" points="{path}"/>', *([] if curve.faint else dots)]


def _apart(ends: Sequence[tuple[float, Line]], gap: float) -> list[tuple[float, Line]]:
    """End labels from top to bottom, pushed down where they would overlap."""
    placed: list[tuple[float, Line]] = []
    for y, curve in sorted(ends, key=lambda end: end[0]):
        placed.append((max(y, placed[-1][0] + gap) if placed else y, curve))
    return placed

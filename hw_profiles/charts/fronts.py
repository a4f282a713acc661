"""Many designs under logarithmic axes, by two of the things that are to be small; those that nothing beats stand out.

Each mark has `data-n`, the design's number, by which a page's script hides and shows it. A published design is a
diamond with its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protofleet.hw_profiles.charts.marks import LETTER, WIDTH, Span, line, powers, svg, text, tip

__all__ = ["Design", "Measure", "fronts"]


@dataclass(frozen=True)
class Design:
    """One design.

    Attributes:
        number: its place in the page's data.
        x, y: positive.
        says: on hover.
        front: whether nothing beats it.
        name: of a published design, else empty.
    """

    number: int
    x: float
    y: float
    says: str
    front: bool = False
    name: str = ""


@dataclass(frozen=True)
class Measure:
    """An axis: in words, and how a power of ten is written."""

    words: str
    write: Callable[[float], str]


def fronts(designs: Sequence[Design], along: Measure, up: Measure, title: str) -> str:
    """The chart: what is beaten first, then the front, then what is published."""
    left, right, top, bottom = 74, WIDTH - 14, 30, 300
    across = Span(*powers([d.x for d in designs]), left, right, log=True)
    high = Span(*powers([d.y for d in designs]), bottom, top, log=True)
    parts = [text(0, 10, up.words, "t-axis")]
    for power in range(int(high.low), int(high.high) + 1):
        y = high.at(10.0**power)
        parts += [line(left, y, right, y), text(left - 8, y + 4, up.write(10.0**power), "t-axis", "end")]
    for power in range(int(across.low), int(across.high) + 1):
        x = across.at(10.0**power)
        anchor = "end" if power == int(across.high) else "middle"
        parts += [line(x, top, x, bottom), text(x, bottom + 20, along.write(10.0**power), "t-axis", anchor)]
    plain = sorted((d for d in designs if not d.name), key=lambda d: d.front)
    parts += [_mark(d, across.at(d.x), high.at(d.y)) for d in plain]
    named = [d for d in designs if d.name]
    parts += [_named(d, across.at(d.x), high.at(d.y), above=n % 2 == 0) for n, d in enumerate(named)]
    parts.append(text(0, bottom + 42, along.words, "t-axis"))
    return svg(parts, bottom + 50, title)


def _mark(design: Design, x: float, y: float) -> str:
    style, says = ("design front", tip(design.says)) if design.front else ("design", "")
    return f'<circle class="{style}" data-n="{design.number}" cx="{x:.1f}" cy="{y:.1f}" r="3.4">{says}</circle>'


def _named(design: Design, x: float, y: float, *, above: bool) -> str:
    corners = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in ((0, -7), (7, 0), (0, 7), (-7, 0)))
    fits = x + 12 + LETTER * len(design.name) < WIDTH
    place = (x + (11 if fits else -11), y - 8 if above else y + 18)
    label = text(*place, design.name, "t-line f-published", "start" if fits else "end")
    says, shape = tip(design.says), f'<polygon points="{corners}"/>'
    return f'<g data-n="{design.number}" class="published">{says}{shape}{label}</g>'

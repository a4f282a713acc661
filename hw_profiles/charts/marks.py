"""What every chart is made of: the frame, letters, dots and bars with what they say, scales and ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from protofleet.hw_profiles.units import percent

__all__ = [
    "LETTER", "STYLE", "WIDTH", "Span", "dot", "line", "percent_span", "percent_ticks", "powers", "rect", "slanted",
    "standalone", "svg", "text", "tip", "truncate",
]  # fmt: skip

WIDTH = 440  # user units: about 350 px of a phone, so that letters of 13 are read there
LETTER = 7.8  # a letter of a label, at most, on average
STYLE = Path(__file__).with_name("style.css")
_NAMESPACE = 'xmlns="http://www.w3.org/2000/svg"'


class Span:
    """A stretch of an axis: values from `low` to `high` lie from `start` to `end`, linear or by their logarithm."""

    def __init__(self, low: float, high: float, start: float, end: float, *, log: bool = False) -> None:
        self.low, self.high, self.start, self.end, self.log = low, high, start, end, log

    def at(self, value: float) -> float:
        """Where a value lies, in user units; on a logarithmic axis `low` and `high` are powers of ten."""
        place = math.log10(value) if self.log else value
        return self.start + (place - self.low) / (self.high - self.low) * (self.end - self.start)


def powers(values: Sequence[float], *, room: float = 0.0) -> tuple[int, int]:
    """The powers of ten around positive values, with at least so much room above the largest."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + room)
    return low, max(high, low + 1)


def percent_span(values: Sequence[float], start: float, end: float) -> Span:
    """Fractions, widened to whole steps of 5 %, at least 10 % wide, within 0 and 1."""
    low = max(math.floor(min(values, default=0.0) * 20 - 0.2) / 20, 0.0)
    high = min(math.ceil(max(values, default=1.0) * 20 + 0.2) / 20, 1.0)
    return Span(low, high, start, end) if high - low >= 0.1 else Span(max(high - 0.1, 0.0), max(high, 0.1), start, end)


def percent_ticks(span: Span) -> list[tuple[float, str]]:
    """At most seven round fractions of the span: where they lie, and in words."""
    step = next(s for s in (0.05, 0.1, 0.2, 0.25) if (span.high - span.low) / s <= 6)
    first, last = math.ceil(span.low / step - 1e-9), math.floor(span.high / step + 1e-9)
    return [(span.at(n * step), percent(n * step, 0)) for n in range(first, last + 1)]


def svg(parts: Sequence[str], height: float, label: str) -> str:
    """The whole chart. `label` is what a screen reader says of it."""
    frame = f'viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}" {_NAMESPACE}'
    return f"<svg {frame}>{''.join(parts)}</svg>"


def standalone(chart: str) -> str:
    """A chart as a file of its own: with a margin, a size, and the style that a page would give it."""
    start, rest = chart.split(">", 1)
    height = int(start.split(f'viewBox="0 0 {WIDTH} ', 1)[1].split('"', 1)[0])
    width, tall = WIDTH + 20, height + 24
    frame = f'viewBox="-10 -14 {width} {tall}" width="{width * 1.4:.0f}" height="{tall * 1.4:.0f}"'
    style = f"<style>\n{STYLE.read_text(encoding='utf-8')}</style>"
    return start.replace(f'viewBox="0 0 {WIDTH} {height}"', frame) + ">" + style + rest + "\n"


def text(x: float, y: float, content: str, style: str, anchor: str = "start") -> str:
    """A line of letters; `anchor` is start, middle or end."""
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def slanted(x: float, y: float, content: str) -> str:
    """A column's name, going up to the right, as far as there is room."""
    letters = min(12, int((WIDTH + 8 - x) / (0.75 * LETTER)))
    place = f'x="{x:.1f}" y="{y:.1f}" transform="rotate(-42 {x:.1f} {y:.1f})"'
    return f'<text class="t-label" {place}>{escape(truncate(content, letters))}</text>'


def line(x1: float, y1: float, x2: float, y2: float, style: str = "grid") -> str:
    """A straight line."""
    return f'<line class="{style}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def dot(x: float, y: float, radius: float, style: str, says: str) -> str:
    """A circle that says what it is."""
    return f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">{tip(says)}</circle>'


def rect(x: float, y: float, width: float, height: float, style: str, says: str, *, round_px: int = 2) -> str:
    """A rectangle that says what it is."""
    size = f'width="{width:.1f}" height="{height:.1f}" rx="{round_px}"'
    return f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" {size}>{tip(says)}</rect>'


def tip(says: str) -> str:
    """What a mark says on hover, and to a screen reader."""
    return f"<title>{escape(says)}</title>"


def truncate(name: str, letters: int) -> str:
    """A name in at most so many letters."""
    return name if len(name) <= letters else name[: letters - 1] + "…"

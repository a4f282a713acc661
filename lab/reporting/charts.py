"""The report's charts as SVG text: no script, no network, colours from the page's CSS variables.

Each function takes plain numbers and returns one `<svg>` with a viewBox about 520 units wide, so that two stand side
by side on a screen and one fills a phone. Colours are CSS classes (`c-local`, `c-fed`, `c-ffc`, `c-pooled`) that the
page defines for light and dark; shades of a heatmap are opacities of one colour, so they follow too. Every mark that
carries a number also has a `<title>`, which browsers show on hover and screen readers read. `standalone` gives a
chart colours of its own, for a file that stands alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Line", "Mark", "Row", "byte_bars", "curves", "heatmap", "holdings", "scatter", "standalone", "strips"]

WIDTH = 520
_LETTER = 7.8  # a letter of a label, at most, on average


@dataclass(frozen=True)
class Row:
    """One row of a strip plot.

    Attributes:
        kind: the colour's name: local, fed, ffc or pooled.
        mean: fraction.
        points: one fraction per device; empty for a single model.
        section: a heading that stands above the row, where a new part begins.
    """

    label: str
    kind: str
    mean: float
    points: Sequence[float] = ()
    section: str = ""


@dataclass(frozen=True)
class Line:
    """One line of a chart over rounds: values[i] belongs to x = i + `first`; None is a gap."""

    label: str
    kind: str
    values: Sequence[float | None]
    first: int = 0
    faint: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class Mark:
    """One point of a scatter plot: bytes (0: nothing is sent) and a fraction."""

    label: str
    kind: str
    size_bytes: float
    value: float


def strips(rows: Sequence[Row]) -> str:
    """Accuracy as dots: one row each, a faint dot per device, a large one for the mean. Cut axis, hence no bars."""
    values = [v for row in rows for v in (row.mean, *row.points)]
    low, high = _range(values)
    left, right, step, head = 116, WIDTH - 58, 32, 30
    tops, y = [], 8
    for row in rows:
        y += head if row.section else 0
        tops.append(y)
        y += step
    parts = _x_axis(low, high, left, right, 14, y)
    for row, top in zip(rows, tops, strict=True):
        middle = top + step / 2
        if row.section:
            parts.append(_text(0, top - 5, row.section, "t-section"))
        parts.append(f'<line class="rail" x1="{left}" x2="{right}" y1="{middle}" y2="{middle}"/>')
        parts.append(_text(left - 12, middle + 4.5, row.label, "t-label", "end"))
        for number, value in enumerate(row.points, start=1):
            x = _scale(value, low, high, left, right)
            parts.append(_dot(x, middle, 4.5, f"c-{row.kind} faint", f"device {number}: {_percent(value)}"))
        x = _scale(row.mean, low, high, left, right)
        parts.append(_dot(x, middle, 8, f"c-{row.kind} ring", f"{row.label}: {_percent(row.mean)}"))
        parts.append(_text(right + 14, middle + 5, _percent(row.mean), f"t-value f-{row.kind}"))
    return _svg(parts, y + 30, "accuracy by way of answering")


def curves(lines: Sequence[Line], rounds: Sequence[str], title: str) -> str:
    """Accuracy over rounds; `rounds` names the ticks of the x axis, the first being x = 0."""
    low, high = _range([v for line in lines for v in line.values if v is not None])
    beside = max([96.0, *(14 + _LETTER * len(line.label) for line in lines if not line.faint)])
    left, right, top, bottom = 44, WIDTH - beside, 28, 262
    parts = [_text(0, 10, "accuracy", "t-axis")]
    for tick in _ticks(low, high):
        y = _scale(tick, low, high, bottom, top)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(left - 8, y + 4, f"{tick * 100:.0f} %", "t-axis", "end"))
    for index, name in enumerate(rounds):
        x = _scale(index, 0, max(len(rounds) - 1, 1), left, right)
        parts.append(_text(x, bottom + 20, name, "t-axis", "middle"))
    parts.append(_text((left + right) / 2, bottom + 40, "after round", "t-axis", "middle"))
    ends: list[tuple[float, Line]] = []
    for line in sorted(lines, key=lambda each: not each.faint):
        points = [
            (_scale(line.first + i, 0, max(len(rounds) - 1, 1), left, right), _scale(v, low, high, bottom, top), v)
            for i, v in enumerate(line.values)
            if v is not None
        ]
        parts += _polyline(line, points)
        if points and not line.faint:
            ends.append((points[-1][1], line))
    for y, line in _apart(ends, 15):
        parts.append(_text(right + 10, y + 4, line.label, f"t-line f-{line.kind}"))
    return _svg(parts, bottom + 48, title)


def heatmap(counts: Sequence[Sequence[int]], labels: Sequence[str], kind: str, title: str) -> str:
    """A confusion matrix, each row in percent of its own sum: rows true, columns answered."""
    classes, left, top = len(labels), 92, 84
    cell = (WIDTH - left - 40) / classes
    small = "t-cell" if classes <= 12 else "t-none"
    parts = []
    for row, name in enumerate(labels):
        total = max(sum(counts[row]), 1)
        y = top + row * cell * 0.8
        parts.append(_text(left - 8, y + cell * 0.4 + 4, _short(name), "t-label", "end"))
        for column, count in enumerate(counts[row]):
            share, x = count / total, left + column * cell
            tip = f"{labels[row]} answered as {labels[column]}: {_percent(share)}"
            parts.append(
                f'<rect class="c-{kind} cell" x="{x:.1f}" y="{y:.1f}" width="{cell - 2:.1f}" '
                f'height="{cell * 0.8 - 2:.1f}" rx="3" style="fill-opacity:{0.05 + 0.95 * share**0.7:.3f}">'
                f"<title>{escape(tip)}</title></rect>"
            )
            if share >= 0.005:
                tone = " on" if share > 0.5 else ""
                parts.append(_text(x + cell / 2 - 1, y + cell * 0.4 + 4, f"{share * 100:.0f}", small + tone, "middle"))
    for column, name in enumerate(labels):
        x = left + column * cell + cell / 2
        parts.append(
            f'<text class="t-label" x="{x:.1f}" y="{top - 8}" transform="rotate(-42 {x:.1f} {top - 8})">'
            f"{escape(_short(name))}</text>"
        )
    bottom = top + classes * cell * 0.8
    parts.append(_text(left, bottom + 18, "rows: what it is; columns: what was answered; % of the row", "t-axis"))
    return _svg(parts, bottom + 28, title)


def holdings(names: Sequence[str], counts: Sequence[Sequence[int]], labels: Sequence[str]) -> str:
    """Who holds what: one row per device, one column per class, a square whose area is the number of samples."""
    classes, left, top, row_height = len(labels), 92, 84, 42
    right = WIDTH - 58
    column = (right - left) / classes
    most = max((n for row in counts for n in row), default=1) or 1
    largest = min(column, row_height) - 4
    parts: list[str] = []
    for index, name in enumerate(labels):
        x = left + index * column + column / 2
        parts.append(
            f'<text class="t-label" x="{x:.1f}" y="{top - 8}" transform="rotate(-42 {x:.1f} {top - 8})">'
            f"{escape(_short(name))}</text>"
        )
    for row, (device, held) in enumerate(zip(names, counts, strict=True)):
        middle = top + row * row_height + row_height / 2
        parts.append(f'<line class="rail" x1="{left}" x2="{right}" y1="{middle}" y2="{middle}"/>')
        parts.append(_text(left - 12, middle + 4, device, "t-label", "end"))
        for index, count in enumerate(held):
            x, side = left + index * column + column / 2, max(largest * math.sqrt(count / most), 3)
            tip = f"{device}: {count} of {labels[index]}"
            if not count:
                parts.append(_text(x, middle + 4, "none", "t-absent", "middle"))
                continue
            parts.append(
                f'<rect class="c-fed" x="{x - side / 2:.1f}" y="{middle - side / 2:.1f}" width="{side:.1f}" '
                f'height="{side:.1f}" rx="2"><title>{escape(tip)}</title></rect>'
            )
            roomy = side >= 24
            place = middle + 4 if roomy else middle + side / 2 + 11
            parts.append(_text(x, place, str(count), "t-cell on" if roomy else "t-cell", "middle"))
        parts.append(_text(WIDTH, middle + 4, f"{sum(held):,}".replace(",", " "), "t-value", "end"))
    bottom = top + len(names) * row_height
    parts.append(_text(WIDTH, bottom + 16, "samples", "t-axis", "end"))
    return _svg(parts, bottom + 24, "samples of each class on each device")


def byte_bars(rows: Sequence[tuple[str, str, float]]) -> str:
    """Bytes on a logarithmic axis: (label, kind, bytes)."""
    values = [max(value, 1.0) for _, _, value in rows]
    low, high = min(2, math.floor(math.log10(min(values)))), max(math.ceil(math.log10(max(values))), 3)
    left, right, step, top = 128, WIDTH - 74, 44, 10
    bottom = top + step * len(rows)
    parts = []
    for power in range(low, high + 1):
        x = _scale(power, low, high, left, right)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(_text(x, bottom + 18, nice_bytes(10**power), "t-axis", "middle"))
    for index, (label, kind, value) in enumerate(rows):
        y, x = top + index * step + 8, _scale(math.log10(max(value, 1)), low, high, left, right)
        parts.append(_text(left - 12, y + 18, label, "t-label", "end"))
        parts.append(
            f'<rect class="c-{kind}" x="{left}" y="{y}" width="{max(x - left, 2):.1f}" height="26" rx="4">'
            f"<title>{escape(label)}: {value:,.0f} bytes</title></rect>"
        )
        parts.append(_text(x + 10, y + 18, nice_bytes(value), f"t-value f-{kind}"))
    parts.append(_text(left, bottom + 38, "bytes from one device in one round, logarithmic axis", "t-axis"))
    return _svg(parts, bottom + 46, "bytes up per device and round")


def scatter(marks: Sequence[Mark], title: str) -> str:
    """Accuracy over bytes on a logarithmic axis; what sends nothing stands at the left edge."""
    sizes = [math.log10(mark.size_bytes) for mark in marks if mark.size_bytes >= 1]
    first, last = math.floor(min(sizes, default=3.0)), math.ceil(max(sizes, default=6.0) + 0.2)
    low, high = _range([mark.value for mark in marks])
    left, right, top, bottom = 104, WIDTH - 96, 28, 300
    parts = [_text(0, 10, "accuracy", "t-axis"), _text(left - 48, bottom + 20, "none", "t-axis", "middle")]
    for tick in _ticks(low, high):
        y = _scale(tick, low, high, bottom, top)
        parts.append(f'<line class="grid" x1="44" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(36, y + 4, f"{tick * 100:.0f} %", "t-axis", "end"))
    for power in range(first, last + 1):
        x = _scale(power, first, last, left, right)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(_text(x, bottom + 20, nice_bytes(10.0**power), "t-axis", "middle"))
    points = [
        (
            left - 48 if mark.size_bytes < 1 else _scale(math.log10(mark.size_bytes), first, last, left, right),
            _scale(mark.value, low, high, bottom, top),
        )
        for mark in marks
    ]
    rails, dots, labels, taken = [], [], [], [_Box(x - 7, y - 7, x + 7, y + 7) for x, y in points]
    for mark, (x, y) in sorted(zip(marks, points, strict=True), key=lambda each: each[1][1]):
        # On the side where the label stays nearer to its point: the right one, unless that is crowded.
        sides = [(_free(taken, mark.label, x, y, side), side) for side in (1, -1)]
        sides = [option for option in sides if option[0].left > left] or sides[:1]
        box, side = min(sides, key=lambda option: (option[0].top - y > 12, option[0].top))
        taken.append(box)
        if box.top > y:
            rails.append(f'<path class="rail" d="M{x:.1f} {y:.1f}L{x + side * 9:.1f} {box.middle:.1f}"/>')
        tip = f"{mark.label}: {_percent(mark.value)}, {nice_bytes(mark.size_bytes)}"
        dots.append(_dot(x, y, 6, f"c-{mark.kind} ring", tip))
        anchor = "start" if side > 0 else "end"
        labels.append(_text(x + side * 10, box.middle + 4, mark.label, f"t-line f-{mark.kind}", anchor))
    parts += [*rails, *dots, *labels]
    parts.append(_text(44, bottom + 42, "bytes from one client over the whole run, logarithmic axis", "t-axis"))
    return _svg(parts, bottom + 50, title)


@dataclass(frozen=True)
class _Box:
    """What a mark covers."""

    left: float
    top: float
    right: float
    bottom: float

    @property
    def middle(self) -> float:
        return (self.top + self.bottom) / 2

    def meets(self, other: _Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def _free(taken: Sequence[_Box], label: str, x: float, y: float, side: int) -> _Box:
    """Where a label beside (x, y), or below that, covers nothing that is there."""
    near, far = sorted((x + side * 9, x + side * (9 + _LETTER * len(label))))
    height = y
    while any(_Box(near, height - 7, far, height + 7).meets(box) for box in taken):
        height += 2
    return _Box(near, height - 7, far, height + 7)


_STYLE = """<style>
svg { --paper: #ffffff; --ink: #1b1f24; --soft: #5d646d; --rule: #e4e2da; --local: #868d96; --fed: #2463c9;
 --ffc: #d4621b; --pooled: #16181c; font-family: system-ui, sans-serif; background: var(--paper); }
@media (prefers-color-scheme: dark) { svg { --paper: #14171b; --ink: #eceef0; --soft: #9aa3ad; --rule: #2f353d;
 --local: #a2abb5; --fed: #6ea2f5; --ffc: #f08f4f; --pooled: #f1f2f4; } }
.t-axis { font-size: 12.5px; fill: var(--soft); } .t-line { font-size: 13px; font-weight: 600; }
.grid { stroke: var(--rule); } .rail { stroke: var(--soft); stroke-width: 0.8; }
polyline { fill: none; stroke-width: 2.2; } polyline.dashed { stroke-dasharray: 6 5; }
.c-local, .f-local { fill: var(--local); } .c-fed, .f-fed { fill: var(--fed); }
.c-ffc, .f-ffc { fill: var(--ffc); } .c-pooled, .f-pooled { fill: var(--pooled); }
.s-local { stroke: var(--local); } .s-fed { stroke: var(--fed); } .s-ffc { stroke: var(--ffc); }
.s-pooled { stroke: var(--pooled); } .ring { stroke: var(--paper); stroke-width: 2; }
</style>"""


def standalone(svg: str) -> str:
    """A chart as a file of its own: with a margin, and the colours that the report's page would give it."""
    start, rest = svg.split(">", 1)
    _, _, width, height = start.split('viewBox="', 1)[1].split('"', 1)[0].split()
    box = f'viewBox="-10 -14 {int(width) + 20} {int(float(height)) + 24}"'
    return start.replace(f'viewBox="0 0 {width} {height}"', box) + ">" + _STYLE + rest + "\n"


def nice_bytes(value: float) -> str:
    """Bytes for a reader: 5.2 kB, 1.7 MB; decimal units."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            scaled = value / size
            return f"{scaled:.0f} {unit}" if scaled >= 100 or scaled == int(scaled) else f"{scaled:.1f} {unit}"
    return f"{value:.0f} B"


# ── marks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _svg(parts: Sequence[str], height: float, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, content: str, style: str, anchor: str = "start") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def _dot(x: float, y: float, radius: float, style: str, tip: str) -> str:
    return f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"><title>{escape(tip)}</title></circle>'


def _polyline(line: Line, points: Sequence[tuple[float, float, float]]) -> list[str]:
    style = f"s-{line.kind}" + (" faint" if line.faint else "") + (" dashed" if line.dashed else "")
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
    radius = 4 if len(points) <= 20 else 1.6
    marks = (
        []
        if line.faint
        else [_dot(x, y, radius, f"c-{line.kind}", f"{line.label}: {_percent(v)}") for x, y, v in points]
    )
    return [f'<polyline class="{style}" points="{path}"/>', *marks]


def _x_axis(low: float, high: float, left: float, right: float, top: float, bottom: float) -> list[str]:
    parts = []
    for tick in _ticks(low, high):
        x = _scale(tick, low, high, left, right)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(_text(x, bottom + 18, f"{tick * 100:.0f} %", "t-axis", "middle"))
    return parts


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The values' range, widened to whole steps of 5 %, at least 10 % wide, within 0 and 1."""
    low = max(math.floor(min(values, default=0.0) * 20 - 0.2) / 20, 0.0)
    high = min(math.ceil(max(values, default=1.0) * 20 + 0.2) / 20, 1.0)
    return (low, high) if high - low >= 0.1 else (max(high - 0.1, 0.0), max(high, 0.1))


def _ticks(low: float, high: float) -> list[float]:
    step = next(s for s in (0.05, 0.1, 0.2, 0.25) if (high - low) / s <= 6)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _scale(value: float, low: float, high: float, start: float, end: float) -> float:
    return start + (value - low) / (high - low) * (end - start)


def _apart(ends: Sequence[tuple[float, Line]], gap: float) -> list[tuple[float, Line]]:
    """End labels from top to bottom, pushed down where they would overlap."""
    placed: list[tuple[float, Line]] = []
    for y, line in sorted(ends, key=lambda end: end[0]):
        placed.append((max(y, placed[-1][0] + gap) if placed else y, line))
    return placed


def _percent(fraction: float) -> str:
    return f"{fraction * 100:.1f} %"


def _short(name: str, limit: int = 12) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"

"""Points under logarithmic axes: accuracy against what it costs, with a name for each, and products under a roof."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protofleet.hw_profiles.charts.marks import (
    LETTER,
    WIDTH,
    Span,
    dot,
    line,
    percent_span,
    percent_ticks,
    powers,
    svg,
    text,
    truncate,
)
from protofleet.hw_profiles.units import nice_bytes, nice_joules, percent

__all__ = ["BYTES", "JOULES", "Axis", "Mark", "Point", "roofline", "scatter"]


@dataclass(frozen=True)
class Mark:
    """One point of a scatter plot: what it costs (0: nothing) and a fraction."""

    label: str
    kind: str
    cost: float
    value: float


@dataclass(frozen=True)
class Point:
    """One product of a graph: multiply-accumulates for each byte it moves, and giga-multiply-accumulates a second."""

    name: str
    macs_per_byte: float
    gmacs: float


@dataclass(frozen=True)
class Axis:
    """What points cost: in words, how a figure is written, the least that counts, and a stretch where none does."""

    words: str
    write: Callable[[float], str]
    least: float
    usual: tuple[float, float]


BYTES = Axis("bytes from one client over the whole run, logarithmic axis", nice_bytes, 1.0, (1e3, 1e6))
JOULES = Axis("joules of one device over the whole run, logarithmic axis", nice_joules, 1e-9, (1.0, 1e3))


def scatter(marks: Sequence[Mark], title: str, axis: Axis = BYTES) -> str:
    """Accuracy over bytes, or over joules, on a logarithmic axis; what costs nothing stands at the left edge."""
    left, right, top, bottom = 106, WIDTH - 70, 28, 330
    paid = [mark.cost for mark in marks if mark.cost >= axis.least] or axis.usual
    along = Span(*powers(paid, room=0.2), left, right, log=True)
    up = percent_span([mark.value for mark in marks], bottom, top)
    parts = [text(0, 10, "accuracy", "t-axis")]
    if any(mark.cost < axis.least for mark in marks):
        parts.append(text(left - 46, bottom + 20, "none", "t-axis", "middle"))
    for y, label in percent_ticks(up):
        parts += [line(44, y, right, y), text(36, y + 4, label, "t-axis", "end")]
    for power in range(int(along.low), int(along.high) + 1):
        x = along.at(10.0**power)
        parts += [line(x, top, x, bottom), text(x, bottom + 20, axis.write(10.0**power), "t-axis", "middle")]
    points = [(left - 46 if mark.cost < axis.least else along.at(mark.cost), up.at(mark.value), mark) for mark in marks]
    parts += _named_points(points, left, axis)
    parts.append(text(0, bottom + 42, axis.words, "t-axis"))
    return svg(parts, bottom + 50, title)


def roofline(points: Sequence[Point], peak_gmacs: float, memory_gb_s: float, title: str) -> str:
    """Speed over intensity, both logarithmic, with the data sheet's roof; "" where there is no product."""
    if not points:
        return ""
    left, right, top, bottom = 56, WIDTH - 14, 26, 250
    along = Span(
        *powers([*(p.macs_per_byte for p in points), peak_gmacs / memory_gb_s], room=0.05), left, right, log=True
    )
    up = Span(*powers([*(p.gmacs for p in points), peak_gmacs], room=0.05), bottom, top, log=True)
    parts = [text(0, 12, title, "t-section")]
    for power in range(int(along.low), int(along.high) + 1):
        x = along.at(10.0**power)
        parts += [line(x, top, x, bottom), text(x, bottom + 18, f"{10.0**power:g}", "t-axis", "middle")]
    for power in range(int(up.low), int(up.high) + 1):
        y = up.at(10.0**power)
        parts += [line(left, y, right, y), text(left - 6, y + 4, f"{10.0**power:g}", "t-axis", "end")]
    start = max(10.0**along.low, 10.0**up.low / memory_gb_s)
    corners = [(start, start * memory_gb_s), (peak_gmacs / memory_gb_s, peak_gmacs), (10.0**along.high, peak_gmacs)]
    path = " ".join(f"{along.at(x):.1f},{up.at(y):.1f}" for x, y in corners)
    parts.append(f'<polyline class="roof" points="{path}"/>')
    for point in points:
        says = f"{point.name}: {point.gmacs:,.3g} G/s at {point.macs_per_byte:,.3g} per byte"
        parts.append(dot(along.at(point.macs_per_byte), up.at(point.gmacs), 3.6, "c-1 thin", says))
    parts.append(text(0, bottom + 40, "multiply-accumulates per byte; up: G per second", "t-axis"))
    return svg(parts, bottom + 46, f"roofline of {title}")


def _named_points(points: Sequence[tuple[float, float, Mark]], left: float, axis: Axis) -> list[str]:
    """Dots with names that cover nothing: on the side where the name stays nearer to its point."""
    rails, dots, labels = [], [], []
    taken = [_Box(x - 7, y - 7, x + 7, y + 7) for x, y, _ in points]
    for x, y, mark in sorted(points, key=lambda point: point[1]):
        label, sides = mark.label, [(_free(taken, mark.label, x, y, side), side) for side in (1, -1)]
        fitting = [(box, side) for box, side in sides if (box.right <= WIDTH if side > 0 else box.left > left)]
        if not fitting:
            label, side = truncate(label, 18), 1 if x < WIDTH / 2 else -1
            fitting = [(_free(taken, label, x, y, side), side)]
        box, side = min(fitting, key=lambda option: (option[0].top - y > 12, option[0].top))
        taken.append(box)
        if box.top > y:
            rails.append(line(x, y, x + side * 9, box.middle, "lead"))
        says = f"{mark.label}: {percent(mark.value)}, {axis.write(mark.cost)}"
        dots.append(dot(x, y, 6, f"c-{mark.kind} ring", says))
        anchor = "start" if side > 0 else "end"
        labels.append(text(x + side * 10, box.middle + 4, label, f"t-line f-{mark.kind}", anchor))
    return [*rails, *dots, *labels]


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
    near, far = sorted((x + side * 9, x + side * (9 + LETTER * len(label))))
    height = y
    while any(_Box(near, height - 7, far, height + 7).meets(box) for box in taken):
        height += 2
    return _Box(near, height - 7, far, height + 7)

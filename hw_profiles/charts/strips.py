"""Accuracies side by side: a faint dot for each device, a large one for their mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protofleet.hw_profiles.charts.marks import WIDTH, dot, line, percent_span, percent_ticks, svg, text, truncate
from protofleet.hw_profiles.units import percent

__all__ = ["Row", "strips"]


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


def strips(rows: Sequence[Row]) -> str:
    """Accuracy as dots, one row each. The axis is cut, hence no bars."""
    left, right, step, head = 104, WIDTH - 62, 32, 30
    tops, y = [], 8
    for row in rows:
        y += head if row.section else 0
        tops.append(y)
        y += step
    along = percent_span([v for row in rows for v in (row.mean, *row.points)], left, right)
    parts = []
    for x, label in percent_ticks(along):
        parts += [line(x, 14, x, y), text(x, y + 18, label, "t-axis", "middle")]
    for row, top in zip(rows, tops, strict=True):
        middle = top + step / 2
        if row.section:
            parts.append(text(0, top - 5, row.section, "t-section"))
        parts.append(line(left, middle, right, middle, "rail"))
        parts.append(text(left - 12, middle + 4.5, truncate(row.label, 13), "t-label", "end"))
        for number, value in enumerate(row.points, start=1):
            parts.append(dot(along.at(value), middle, 4.5, f"c-{row.kind} faint", f"device {number}: {percent(value)}"))
        parts.append(dot(along.at(row.mean), middle, 8, f"c-{row.kind} ring", f"{row.label}: {percent(row.mean)}"))
        parts.append(text(right + 12, middle + 5, percent(row.mean), f"t-value f-{row.kind}"))
    return svg(parts, y + 30, "accuracy by way of answering")

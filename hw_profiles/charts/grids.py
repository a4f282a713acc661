"""Rows by columns: a confusion matrix, and who holds how many samples of each class."""

from __future__ import annotations

import math
from collections.abc import Sequence

from protofleet.hw_profiles.charts.marks import WIDTH, line, rect, slanted, svg, text, tip, truncate
from protofleet.hw_profiles.units import percent

__all__ = ["heatmap", "holdings"]

_LEFT, _TOP = 92, 84
_WORD_WIDE = 48  # a column with room for "none" and some air
_MOST_WORDS = 12  # classes beyond which a cell has no room for its figure


def heatmap(counts: Sequence[Sequence[int]], labels: Sequence[str], kind: str, title: str) -> str:
    """A confusion matrix, each row in percent of its own sum: rows true, columns answered."""
    classes = len(labels)
    wide = (WIDTH - _LEFT - 40) / classes
    tall = wide * 0.85
    parts = [slanted(_LEFT + (i + 0.5) * wide, _TOP - 8, name) for i, name in enumerate(labels)]
    for row, name in enumerate(labels):
        total, y = max(sum(counts[row]), 1), _TOP + row * tall
        parts.append(text(_LEFT - 8, y + tall / 2 + 4, truncate(name, 11), "t-label", "end"))
        for column, count in enumerate(counts[row]):
            share, x = count / total, _LEFT + column * wide
            says = tip(f"{name} answered as {labels[column]}: {percent(share)}")
            shade = f'style="fill-opacity:{0.05 + 0.95 * share**0.7:.3f}"'
            place = f'x="{x:.1f}" y="{y:.1f}" width="{wide - 2:.1f}" height="{tall - 2:.1f}" rx="3"'
            parts.append(f'<rect class="c-{kind} cell" {place} {shade}>{says}</rect>')
            if share >= 0.005 and classes <= _MOST_WORDS:
                style = "t-cell on" if share > 0.5 else "t-cell"
                parts.append(text(x + wide / 2 - 1, y + tall / 2 + 4, f"{share * 100:.0f}", style, "middle"))
    bottom = _TOP + classes * tall
    parts.append(text(0, bottom + 18, "rows: what it is; columns: what was answered; % of the row", "t-axis"))
    return svg(parts, bottom + 28, title)


def holdings(names: Sequence[str], counts: Sequence[Sequence[int]], labels: Sequence[str]) -> str:
    """Who holds what: one row per device, one column per class, a square whose area is the number of samples."""
    left, right, tall = 78, WIDTH - 46, 44
    wide = (right - left) / len(labels)
    absent = "none" if wide >= _WORD_WIDE else "–"
    most = max((n for row in counts for n in row), default=1) or 1
    parts = [slanted(left + (i + 0.5) * wide, _TOP - 8, name) for i, name in enumerate(labels)]
    for row, (device, class_counts) in enumerate(zip(names, counts, strict=True)):
        middle = _TOP + row * tall + tall / 2
        parts.append(line(left, middle, right, middle, "rail"))
        parts.append(text(left - 10, middle + 4, truncate(device, 9), "t-label", "end"))
        for index, count in enumerate(class_counts):
            x, side = left + (index + 0.5) * wide, max((min(wide, tall) - 4) * math.sqrt(count / most), 3)
            parts += _square(x, middle, side, count, f"{device}: {count} of {labels[index]}", absent)
        parts.append(text(WIDTH, middle + 4, f"{sum(class_counts):,}".replace(",", " "), "t-value", "end"))
    bottom = _TOP + len(names) * tall
    parts.append(text(WIDTH, bottom + 16, "samples", "t-axis", "end"))
    return svg(parts, bottom + 24, "samples of each class on each device")


def _square(x: float, y: float, side: float, count: int, says: str, absent: str) -> list[str]:
    """A number of samples as an area, the number in it or below; `absent` where there are none."""
    if not count:
        return [text(x, y + 4, absent, "t-absent", "middle")]
    inside = side >= 8 * len(str(count))
    figure = text(x, y + 4 if inside else y + side / 2 + 12, str(count), "t-cell on" if inside else "t-cell", "middle")
    return [rect(x - side / 2, y - side / 2, side, side, "c-fed", says), figure]

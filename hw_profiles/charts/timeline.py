"""Who is there when: a row for each member, a thin line while it belongs, a bar while it is active."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protofleet.hw_profiles.charts.marks import LETTER, WIDTH, Span, line, rect, svg, text, tip, truncate

__all__ = ["Stretch", "Track", "timeline"]

_LETTERS = 9


@dataclass(frozen=True)
class Stretch:
    """From one moment through another, both of them whole; `kind` is the colour's name, `says` what it means."""

    first: int
    last: int
    kind: str
    says: str


@dataclass(frozen=True)
class Track:
    """One row.

    Attributes:
        first, last: as long as it belongs.
        stretches: while it is active.
        crosses: moments of which something is to be said, and what.
    """

    label: str
    first: int
    last: int
    stretches: Sequence[Stretch] = ()
    crosses: Sequence[tuple[int, str]] = ()


def timeline(tracks: Sequence[Track], first: int, last: int, title: str, *, axis: str) -> str:
    """Moments `first` … `last`, each as wide as the others."""
    left, right, step, top = 14 + LETTER * _LETTERS, WIDTH - 8, 30, 10
    along = Span(first - 0.5, last + 0.5, left, right)
    parts, bottom = [], top + step * len(tracks)
    for moment in sorted({first, *range(5 * (first // 5 + 1), last + 1, 5)}):
        parts += [line(along.at(moment), top, along.at(moment), bottom)]
        parts.append(text(along.at(moment), bottom + 16, str(moment), "t-axis", "middle"))
    parts.append(text((left + right) / 2, bottom + 34, axis, "t-axis", "middle"))
    for row, track in enumerate(tracks):
        middle = top + step * (row + 0.5)
        parts.append(text(left - 12, middle + 4.5, truncate(track.label, _LETTERS), "t-label", "end"))
        parts.append(line(along.at(track.first - 0.4), middle, along.at(track.last + 0.4), middle, "rail"))
        for bar in track.stretches:
            x, end = along.at(bar.first - 0.4), along.at(bar.last + 0.4)
            parts.append(rect(x, middle - 7, end - x, 14, f"c-{bar.kind}", bar.says, round_px=4))
        for moment, says in track.crosses:
            parts.append(_cross(along.at(moment), middle, says))
    return svg(parts, bottom + 42, title)


def _cross(x: float, y: float, says: str) -> str:
    return (
        f'<g class="cross">{tip(says)}{line(x - 4, y - 4, x + 4, y + 4, "")}{line(x - 4, y + 4, x + 4, y - 4, "")}</g>'
    )

"""How the plan's figures are written, in the terminal and on the page: three digits, bounds beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from protofleet.hw_profiles.units import nice_joules, size, time_text

__all__ = [
    "NOT_KNOWN",
    "NO_GROUND",
    "bounds",
    "days",
    "hours",
    "joules",
    "megabytes",
    "money",
    "number",
    "ranged",
    "seconds",
    "share",
]

NO_GROUND, NOT_KNOWN = "no ground", "not known"
_Figure = Mapping[str, float] | None


def ranged(figure: _Figure, written: Callable[[float], str], missing: str = NOT_KNOWN) -> str:
    """A figure with its bounds, which are left out where they read the same; `missing` where there is none."""
    if figure is None:
        return missing
    value, low, high = (written(figure[name]) for name in ("value", "low", "high"))
    return value if low == value == high else f"{value} ({low} – {high})"


def bounds(figure: _Figure, written: Callable[[float], str]) -> str:
    """The bounds alone."""
    return NOT_KNOWN if figure is None else f"{written(figure['low'])} – {written(figure['high'])}"


def number(value: float) -> str:
    """A figure as it stands in a file."""
    return f"{value:,.4g}"


def money(value: float) -> str:
    """Two digits behind the point, as on a bill."""
    return f"{value:,.2f}"


def seconds(value: float) -> str:
    """A duration from seconds."""
    return time_text(value * 1e3)


def joules(value: float) -> str:
    """Energy to three digits."""
    return nice_joules(value)


def megabytes(value: float) -> str:
    """Bytes, from megabytes."""
    return size(value * 1e6)


def hours(value: float) -> str:
    """Hours to three digits; minutes and seconds below one."""
    return f"{value:.3g} h" if value >= 1 else time_text(value * 3.6e6)


def days(value: float) -> str:
    """Days to three digits; hours below two."""
    return f"{value:,.3g} days" if value >= 2 else f"{24 * value:.3g} h"


def share(value: float) -> str:
    """An accuracy."""
    return f"{100 * value:.1f} %"

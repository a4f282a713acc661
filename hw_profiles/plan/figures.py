"""A figure of a fleet file: `{ value = 0.02, low = 0.01, high = 0.08, source = "my contract" }`.

`value` and `source` are needed; without `low` and `high` the figure is taken as exact. Each table's figures have their
ranges and units here, so that a wrong unit is one line and not a bill: beyond the range a figure is refused; beyond
what is usual, or far from a default's, it is doubted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from protofleet.contract.errors import UsageError, near_names
from protofleet.contract.printable import as_written
from protofleet.hw_profiles.ranges import Range

__all__ = [
    "ACCURACY", "BATTERY", "BOARD", "PRICES", "RADIO", "Figures", "Limits", "check_keys", "doubts", "parse_figure",
    "parse_figures", "unusual",
]  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """The range of a figure, ends included.

    Attributes:
        usual: beyond it a figure is taken, and the plan asks whether its unit is right; None where there is no usual.
        unit: the figure's, and how another that is often written is turned into it.
    """

    low: float
    high: float
    usual: tuple[float, float] | None = None
    unit: str = ""


_RATE = Limits(1e-5, 1e4, (1e-4, 1000), "Mbit/s: kbit/s / 1,000")
_WATTS = Limits(0, 100, (0, 10), "W: mW / 1,000")
_SECONDS = Limits(0, 600, (0, 60), "seconds: ms / 1,000")
_PRICE = Limits(0, 1e9)  # in any currency: a board of 18 dollars is 300,000 rupiah, a server some millions
RADIO: Mapping[str, Limits] = {
    "up_mbit_s": _RATE,
    "down_mbit_s": _RATE,
    "up_w": _WATTS,
    "down_w": _WATTS,
    "wake_s": _SECONDS,
    "wake_w": _WATTS,
    "tail_s": _SECONDS,
    "tail_w": _WATTS,
    "idle_w": _WATTS,
    "price_mb": Limits(0, 1000, (0, 1), "for a megabyte: a price for a gigabyte / 1,000"),
    "price_month": _PRICE,
}
PRICES: Mapping[str, Limits] = {
    "electricity_kwh": Limits(0, 1e5, (0.01, 2), "for a kilowatt-hour, in units, not in cents"),
    "board_months": Limits(1, 600, (6, 180), "months: years x 12"),
}
BOARD: Mapping[str, Limits] = {
    "price": _PRICE,
    "idle_w": Limits(0.0001, 1000, unit="W: mW / 1,000"),
    "asleep_w": Limits(0, 1000, unit="W: mW / 1,000"),
}
BATTERY = Limits(0.001, 1e5, (0.1, 200), "watt-hours: mAh x V / 1,000, so that 20,000 mAh at 3.7 V are 74")
_APART = 100.0  # times a default's figure, either way
ACCURACY = Limits(0, 1)


@dataclass(frozen=True)
class Figures:
    """Figures by name, each with its source; `given` names those of the user."""

    values: Mapping[str, Range] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    given: frozenset[str] = frozenset()

    def get(self, name: str, default: float = 0.0) -> Range:
        """The figure, or an exact `default`."""
        return self.values.get(name, Range(default, default, default))

    def replaced_by(self, own: Figures) -> Figures:
        """These with another's in their place, figure by figure."""
        return Figures({**self.values, **own.values}, {**self.sources, **own.sources}, self.given | own.given)


def parse_figures(table: object, limits: Mapping[str, Limits], where: str, *, given: bool) -> Figures:
    """Every figure of one table.

    Args:
        given: whether the user wrote them.

    Raises:
        UsageError: an unknown name, no source, or out of range.
    """
    checked = check_keys(table, limits, where)
    values, sources = {}, {}
    for name, written in checked.items():
        values[name], sources[name] = parse_figure(written, limits[name], f"{where}.{name}")
    return Figures(values, sources, frozenset(values) if given else frozenset())


def unusual(value: Range, limits: Limits, where: str) -> Iterator[str]:
    """A line where a figure that was taken is beyond what is usual of its kind."""
    if limits.usual is not None and not limits.usual[0] <= value.value <= limits.usual[1]:
        low, high = limits.usual
        yield f"{where} = {value.value:,.6g} is unusual: {low:g} to {high:g} is; is it in {limits.unit}?"


def doubts(own: Figures, defaults: Figures, limits: Mapping[str, Limits], where: str) -> Iterator[str]:
    """A line for each of the user's figures whose unit may be wrong."""
    for name in sorted(own.given):
        value, default = own.values[name], defaults.values.get(name)
        found = list(unusual(value, limits[name], f"{where}.{name}"))
        if not found and default is not None and default.value > 0 and value.value > 0:
            times = max(value.value / default.value, default.value / value.value)
            if times >= _APART:
                apart = f"{value.value:,.6g} is {times:,.0f} times apart from the default {default.value:g}"
                found = [f"{where}.{name} = {apart}; is it in {limits[name].unit}?"]
        yield from found


def parse_figure(written: object, limits: Limits, where: str) -> tuple[Range, str]:
    """One figure and its source.

    Raises:
        UsageError: another form, no source, out of range, or bounds that are not around the value.
    """
    if not isinstance(written, dict) or not {"value", "source"} <= set(written) <= {"value", "low", "high", "source"}:
        raise UsageError(
            where, expected='{ value = …, source = "…" }, with low and high where known', got=as_written(written)
        )
    source = written["source"]
    if not isinstance(source, str) or not source.strip():
        raise UsageError(where, expected="a source in words", got=as_written(source))
    if ("low" in written) != ("high" in written):
        raise UsageError(where, expected="low and high together", got="one of them")
    value, low, high = (written.get(name, written["value"]) for name in ("value", "low", "high"))
    for number in (value, low, high):
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not limits.low <= number <= limits.high:
            expected = f"a number from {limits.low:g} to {limits.high:g}"
            raise UsageError(where, expected=expected, got=as_written(number), hint=limits.unit)
    if not low <= value <= high:
        raise UsageError(where, expected="low ≤ value ≤ high", got=f"{low:g}, {value:g}, {high:g}")
    return Range(float(value), float(low), float(high)), source


def check_keys(table: object, known: Mapping[str, Any] | tuple[str, ...], where: str) -> dict[str, Any]:
    """The table, if it is one of known names.

    Raises:
        UsageError: it is none, or has another name in it.
    """
    if not isinstance(table, dict):
        raise UsageError(where, expected="a table", got=as_written(table))
    for key in table:
        if key not in known:
            raise UsageError(f"{where}: {key}", expected="a known name", got=key, hint=near_names(key, known))
    return table

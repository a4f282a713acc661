"""Tests the latency model on models that it has not seen, beside a plain roofline, row for row.

Each model (or, stricter, each architecture family) is left out in turn. Everything is fitted on the rest, and the rows
left out are predicted. The roofline is fitted, too: its peak rates are scaled by one efficiency per setting, on the
same rows. The targets (docs/figures.md): median at most 15 %, 90th percentile at most 40 %.

Intervals are tried on rows that neither the fit nor the widths have seen: `with_halves` takes the widths of a row from
the left-out rows of other groups, `nested` fits and calibrates everything without the group that it then predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from protofleet.hw_profiles.devices.schema import Device
from protofleet.hw_profiles.latency.datasheet import device_rates
from protofleet.hw_profiles.latency.hierarchical_fit import NOISE, fit_rows, nominal_of
from protofleet.hw_profiles.latency.intervals import Case, binomial_p, calibrate, left_out_with, scored
from protofleet.hw_profiles.latency.operator_classes import CLASSES, MACS
from protofleet.hw_profiles.latency.published_rows import OWN_DEVICE, Row, family

__all__ = [
    "LeftOut",
    "by_family",
    "by_model",
    "coverage_table",
    "error_table",
    "group_of",
    "leave_out",
    "nested",
    "with_halves",
]

_REJECTED = 0.01  # a group's intervals fail where a binomial test at this level rejects 80 %
_TRAFFIC = [CLASSES.index(c) for c in ("traffic", "pool", "elementwise")]


@dataclass(frozen=True)
class LeftOut:
    """A row that was predicted without its model.

    Attributes:
        ms: predicted milliseconds.
        sd: predicted standard deviation of the logarithm.
        roofline_ms: the plain roofline with one fitted efficiency per setting.
        datasheet_ms: the plain roofline at the data sheet's peaks.
        half: half the width of the 80 % interval, in natural logarithms; 0 until there are widths for it.
    """

    row: Row
    ms: float
    sd: float
    roofline_ms: float
    datasheet_ms: float
    half: float = 0.0

    @property
    def error(self) -> float:
        """|predicted / published - 1|."""
        return abs(self.ms / self.row.ms - 1)


def by_model(row: Row) -> str:
    """Left out together: every row of one model at one input size."""
    return row.model


def by_family(row: Row) -> str:
    """Left out together: every width and input size of one architecture."""
    return family(row.model)


def leave_out(
    rows: Sequence[Row], devices: Mapping[str, Device], together: Callable[[Row], str]
) -> Iterator[list[LeftOut]]:
    """Predict each group of rows from all others. Yields one list for each group."""
    for name in sorted({together(row) for row in rows}):
        kept = [row for row in rows if together(row) != name]
        fitted = fit_rows(kept, devices)
        efficiency = _roofline_efficiencies(kept, devices)
        left_out = []
        for row in (row for row in rows if together(row) == name):
            nominal = nominal_of(row.setting, devices[row.setting.device], row.clock_ghz)
            parts = row.demand * np.exp(nominal + fitted.offsets(row.setting))
            share = parts / parts.sum()
            sd = float(np.sqrt(share @ fitted.covariance(row.setting) @ share + NOISE**2))
            plain = _roofline_ms(row, devices)
            scale = efficiency.get(row.setting, efficiency[None])
            left_out.append(LeftOut(row, float(parts.sum()), sd, plain * scale, plain))
        yield left_out


def with_halves(
    left_out: Sequence[LeftOut], case: Case = "family", known: Sequence[LeftOut] | None = None
) -> list[LeftOut]:
    """The same rows with their intervals, each by widths that saw no row of its own group.

    Args:
        case: what groups the rows.
        known: the left-out rows that the widths are learned from; None for `left_out` itself.
    """
    together = left_out_with(case)
    found = []
    for name in sorted({together(one.row) for one in left_out}):
        others = [one for one in known or left_out if together(one.row) != name]
        widths = calibrate(others or left_out, case)
        mine = [one for one in left_out if together(one.row) == name]
        found += [replace(one, half=widths.half(one.row.setting, one.sd)) for one in mine]
    return found


def nested(rows: Sequence[Row], devices: Mapping[str, Device], case: Case = "family") -> list[LeftOut]:
    """Every group left out in turn: fit, left-out errors and widths from all other rows, then its rows predicted."""
    together = left_out_with(case)
    found = []
    for group in leave_out(rows, devices, together):
        name = together(group[0].row)
        others = [row for row in rows if together(row) != name]
        widths = calibrate([one for inner in leave_out(others, devices, together) for one in inner], case)
        found += [replace(one, half=widths.half(one.row.setting, one.sd)) for one in group]
    return found


def coverage_table(left_out: Sequence[LeftOut]) -> dict[str, dict[str, float]]:
    """How many rows lie inside their 80 % interval: of all, by runtime, by device and by family.

    `p` is that of a binomial test of 80 %; a group with `p` below 1 % fails.
    """
    groups: dict[str, list[LeftOut]] = {"all": list(left_out)}
    for kind, name_of in (
        ("runtime", lambda row: row.setting.runtime),
        ("device", lambda row: row.setting.device),
        ("family", lambda row: family(row.model)),
    ):
        for one in sorted(left_out, key=lambda one, name_of=name_of: name_of(one.row)):  # type: ignore[misc]
            groups.setdefault(f"{kind} {name_of(one.row)}", []).append(one)
    table = {}
    for name, members in groups.items():
        inside = sum(scored(one) <= one.half for one in members)
        p = binomial_p(inside, len(members))
        ratio = float(np.median([np.exp(2 * one.half) for one in members]))
        table[name] = {"rows": float(len(members)), "inside": float(inside), "p": p, "high_over_low": ratio}
        table[name]["fails"] = float(p < _REJECTED)
    return table


def error_table(left_out: Sequence[LeftOut]) -> dict[str, dict[str, float]]:
    """Rows, median and 90th percentile of the error by group of settings, ours and both rooflines', and how many rows
    lie inside their intervals (`with_halves`).

    The line `all published` leaves out what we measured ourselves.
    """
    groups: dict[str, list[LeftOut]] = {"all published": [one for one in left_out if not _own(one)]}
    for one in left_out:
        groups.setdefault(group_of(one.row), []).append(one)
    return {
        name: _summary(members) for name, members in sorted(groups.items(), key=lambda item: item[0] != "all published")
    }


def _own(one: LeftOut) -> bool:
    return one.row.setting.device == OWN_DEVICE


def group_of(row: Row) -> str:
    """The line of the table that a row belongs to."""
    setting = row.setting
    return f"{setting.runtime} {setting.precision}"


def _summary(members: Sequence[LeftOut]) -> dict[str, float]:
    ours = [one.error for one in members]
    roofline = [abs(one.roofline_ms / one.row.ms - 1) for one in members]
    sheet = [abs(one.datasheet_ms / one.row.ms - 1) for one in members]
    inside = [scored(one) <= one.half for one in members]
    figures = {"rows": float(len(members)), "inside_80": float(np.mean(inside))}
    for name, errors in (("ours", ours), ("roofline", roofline), ("datasheet", sheet)):
        figures[f"{name}_median"] = float(np.median(errors))
        figures[f"{name}_p90"] = float(np.quantile(errors, 0.9))
    return figures


def _roofline_ms(row: Row, devices: Mapping[str, Device]) -> float:
    setting = row.setting
    rates = device_rates(devices[setting.device], setting.processor, setting.precision, setting.threads, row.clock_ghz)
    compute_ms = row.demand[MACS].sum() / rates.macs
    memory_ms = row.demand[_TRAFFIC].sum() * rates.element_bytes / rates.bytes
    return float(max(compute_ms, memory_ms))


def _roofline_efficiencies(rows: Sequence[Row], devices: Mapping[str, Device]) -> dict[object, float]:
    """Median of published over roofline time by setting; under None that of all rows."""
    ratios: dict[object, list[float]] = {}
    for row in rows:
        ratio = row.ms / _roofline_ms(row, devices)
        ratios.setdefault(row.setting, []).append(ratio)
        ratios.setdefault(None, []).append(ratio)
    return {key: float(np.median(values)) for key, values in ratios.items()}

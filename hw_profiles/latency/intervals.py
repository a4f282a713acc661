"""How wide the interval of a prediction is, by how wrong predictions of its kind were on rows that were left out.

A prediction rests on one of three grounds, and each has a check that leaves out what the prediction lacks (`CASES`):

    family    the setting has rows, of other networks       an architecture family is left out
    runtime   the device has rows, but not of this runtime  all rows of a runtime on a device are left out
    device    the device has no row                         all rows of a device are left out

The interval is conformal. The expected size of a row's error is learned, in natural logarithms: for an unseen family
from the model's own standard deviation, the runtime and the device (ridge regression), else it is that deviation. The
80 % quantile of error over expected size, each row's size learned without what was left out with it, is the factor by
which an interval is wider than expected. Where a whole runtime or device is left out, its rows err together, so that
each of these weighs the same there, however many rows it has.

`cross_validation` says how it does on rows it was not calibrated on; docs/decisions/270 tells what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import comb, exp, log
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from protofleet.hw_profiles.latency.published_rows import Row, Setting, family

__all__ = ["CASES", "Case", "Widths", "binomial_p", "calibrate", "left_out_with", "scored"]

Case = Literal["family", "runtime", "device"]
CASES: tuple[Case, ...] = ("family", "runtime", "device")
COVERAGE = 0.8
_SMALLEST = 0.02  # added to an error before its logarithm is taken: no prediction is good to 2 %
_TYPICAL_SD = 0.1
_RIDGE = 3.0  # rows of prior against the effect of one runtime or one device


class _LeftOut(Protocol):
    """A row that was predicted without what it was left out with."""

    @property
    def row(self) -> Row: ...
    @property
    def ms(self) -> float: ...
    @property
    def sd(self) -> float: ...


@dataclass(frozen=True)
class Widths:
    """What one case's rows taught: log half width = factor · exp(base + slope · log(sd / 0.1) + effects)."""

    base: float
    slope: float
    runtimes: Mapping[str, float]
    devices: Mapping[str, float]
    factor: float = 1.0

    def half(self, setting: Setting, sd: float) -> float:
        """Half the width of the 80 % interval, in natural logarithms; what was not seen has no effect of its own."""
        effects = self.runtimes.get(setting.runtime, 0.0) + self.devices.get(setting.device, 0.0)
        return self.factor * exp(self.base + self.slope * log(sd / _TYPICAL_SD) + effects)

    def as_json(self) -> dict[str, object]:
        """The plain table for `coefficients.json`."""
        return asdict(self)


def left_out_with(case: Case) -> Callable[[Row], str]:
    """What a row is left out together with in a case's check."""
    return {
        "family": lambda row: family(row.model),
        "runtime": lambda row: f"{row.setting.device}, {row.setting.runtime}",
        "device": lambda row: row.setting.device,
    }[case]


def scored(one: _LeftOut) -> float:
    """The error of a left-out row: |log(predicted / published)|."""
    return abs(log(one.ms / one.row.ms))


def calibrate(left_out: Sequence[_LeftOut], case: Case) -> Widths:
    """Learn the widths of one case from its left-out rows."""
    together = left_out_with(case)
    groups = [together(one.row) for one in left_out]
    scores = np.zeros(len(left_out))
    for name in set(groups):
        others = [one for one, group in zip(left_out, groups, strict=True) if group != name]
        widths = _expected(others or left_out, case)
        for index, one in enumerate(left_out):
            if groups[index] == name:
                scores[index] = scored(one) / widths.half(one.row.setting, one.sd)
    sizes = {name: groups.count(name) for name in set(groups)}
    weights = np.array([1.0 if case == "family" else 1.0 / sizes[name] for name in groups])
    expected = _expected(left_out, case)
    factor = _quantile(scores, weights)
    return Widths(expected.base, expected.slope, expected.runtimes, expected.devices, factor)


def binomial_p(inside: int, rows: int, rate: float = COVERAGE) -> float:
    """The two-sided p-value of `inside` of `rows` if each were inside with probability `rate`."""
    chances = [comb(rows, k) * rate**k * (1 - rate) ** (rows - k) for k in range(rows + 1)]
    return min(1.0, sum(chance for chance in chances if chance <= chances[inside] * (1 + 1e-9)))


def _expected(left_out: Sequence[_LeftOut], case: Case) -> Widths:
    """The expected size of an error: of an unseen family by ridge regression of its logarithm. Few runtimes and devices
    can be left out: there it is the model's own standard deviation."""
    if case != "family":
        return Widths(round(log(_TYPICAL_SD), 4), 1.0, {}, {})
    settings = [one.row.setting for one in left_out]
    runtimes, devices = sorted({s.runtime for s in settings}), sorted({s.device for s in settings})
    columns = [[1.0] * len(settings), [log(one.sd / _TYPICAL_SD) for one in left_out]]
    columns += [[float(s.runtime == name) for s in settings] for name in runtimes]
    columns += [[float(s.device == name) for s in settings] for name in devices]
    x = np.array(columns).T  # (n, 2 + runtimes + devices)
    y = np.log([scored(one) + _SMALLEST for one in left_out])
    penalty = np.array([1e-9, 1.0, *[_RIDGE] * (len(runtimes) + len(devices))])
    found = [round(float(v), 4) for v in np.linalg.solve(x.T @ x + np.diag(penalty), x.T @ y)]
    cut = 2 + len(runtimes)
    by_runtime, by_device = dict(zip(runtimes, found[2:cut], strict=True)), dict(zip(devices, found[cut:], strict=True))
    return Widths(found[0], found[1], by_runtime, by_device)


def _quantile(scores: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    """The smallest score that 80 % of the weight does not exceed."""
    order = np.argsort(scores)
    reached = np.cumsum(weights[order]) / weights.sum()
    index = min(int(np.searchsorted(reached, COVERAGE - 1e-12)), len(scores) - 1)
    return round(float(scores[order][index]), 4)

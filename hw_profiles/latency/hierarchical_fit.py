"""How far each operator class departs from its data sheet, learned from few rows by sharing between devices.

The time of row i is predicted as  t_i = Σ_k demand_ik · exp(nominal_ik + offset_k(setting_i)).  An offset is a sum of
effects, from what all processors share down to what one setting has for itself (`LEVELS`), each with a Gaussian prior
around zero: a board with six rows cannot fit fifteen numbers, but it can shift what its runtime does elsewhere. The
rows' logarithms get Gaussian noise, and the most probable effects are found by Gauss-Newton in the space of the rows
(a few hundred) instead of the effects (some two thousand). The same algebra gives the covariance of every setting's
offsets, also of settings without a row, and so an interval for every prediction.

Standard deviations are natural logarithms (0.1 ≈ 10 %) and were set from what the levels mean, not searched on the
rows that are left out; docs/decisions/056 tells what was tried.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protofleet.hw_profiles.devices.schema import Device
from protofleet.hw_profiles.latency.datasheet import device_rates, log_cost_ms
from protofleet.hw_profiles.latency.operator_classes import CLASSES
from protofleet.hw_profiles.latency.published_rows import ANY_X86, OWN_DEVICE, Row, Setting

__all__ = ["LEVELS", "NOISE", "Fitted", "Level", "fit_rows", "kind_of", "nominal_of"]

_Array = NDArray[np.float64]
_Evaluate = Callable[[_Array], tuple[_Array, _Array, float]]  # effects -> shares, residual, cost
NOISE = 0.07  # a published time differs from another one of the same thing by about this much
_K = len(CLASSES)
_STEPS = 30


@dataclass(frozen=True)
class Level:
    """One kind of effect: who shares it, whether each class has its own, and how large it may be."""

    name: str
    sd: float
    shared_by: Callable[[Setting], Hashable]
    per_class: bool = True


def kind_of(setting: Setting) -> str:
    """Processors that are alike: Arm CPUs, GPUs, and x86 CPUs, whose vectors are four times as wide."""
    return "x86" if setting.device in (OWN_DEVICE, ANY_X86) else setting.processor


LEVELS = (
    Level("class", 0.5, kind_of),
    Level("precision", 0.3, lambda s: (kind_of(s), s.precision)),
    Level("runtime", 0.3, lambda s: s.runtime),
    Level("runtime and precision", 0.2, lambda s: (s.runtime, s.precision)),
    Level("device", 0.2, lambda s: (s.processor, s.device, s.threads)),
    Level("setting", 0.15, lambda s: s),
    Level("speed of runtime", 0.4, lambda s: (s.runtime, s.precision), per_class=False),
    Level("speed of device", 0.4, lambda s: (s.processor, s.device, s.threads), per_class=False),
    Level("speed of setting", 0.1, lambda s: s, per_class=False),
)


def nominal_of(setting: Setting, device: Device, clock_ghz: float | None = None) -> NDArray[np.float64]:
    """Log milliseconds per unit of each class by the data sheet: (K,)."""
    rates = device_rates(device, setting.processor, setting.precision, setting.threads, clock_ghz)
    return log_cost_ms(rates, setting.processor)


@dataclass(frozen=True, eq=False)
class Fitted:
    """The most probable effects given some rows, kept in the space of those rows.

    Attributes:
        settings: (n) of the rows.
        shares: (n, K) each class's share of each predicted time.
        weights: (n,) so that a setting's offsets are Cov(offsets, rows) @ weights.
        precision: (n, n) inverse covariance of the rows' logarithms.
    """

    settings: tuple[Setting, ...]
    shares: NDArray[np.float64]
    weights: NDArray[np.float64]
    precision: NDArray[np.float64]

    def offsets(self, setting: Setting) -> NDArray[np.float64]:
        """(K,) departure from the data sheet, in natural logarithms."""
        return self._with_rows(setting) @ self.weights

    def covariance(self, setting: Setting) -> NDArray[np.float64]:
        """(K, K) uncertainty of `offsets`."""
        common = self._with_rows(setting)  # (K, n)
        return _prior_covariance(setting, setting) - common @ self.precision @ common.T

    def _with_rows(self, setting: Setting) -> NDArray[np.float64]:
        """Prior covariance of a setting's offsets with the rows' logarithms: (K, n)."""
        return np.stack(
            [
                _prior_covariance(setting, other) @ share
                for other, share in zip(self.settings, self.shares, strict=True)
            ],
            axis=1,
        )


def fit_rows(rows: Sequence[Row], devices: Mapping[str, Device], noise: float = NOISE) -> Fitted:
    """Find the most probable effects by damped Gauss-Newton.

    Args:
        rows: at least one.
        devices: by name, for the data sheets.
        noise: standard deviation of the logarithm of a published time.
    """
    settings = tuple(row.setting for row in rows)
    demands = np.array([row.demand for row in rows])  # (n, K)
    target = np.log([row.ms for row in rows])
    start = np.array([nominal_of(row.setting, devices[row.setting.device], row.clock_ghz) for row in rows])
    effects, sd = _effects(settings)
    ids = np.array([effects[s] for s in settings])  # (n, K, levels)
    variance, phi = sd**2, np.zeros(len(sd))

    def evaluate(phi: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
        parts = demands * np.exp(start + phi[ids].sum(axis=-1))  # (n, K)
        total = parts.sum(axis=1)
        residual = np.log(total) - target
        return parts / total[:, None], residual, float((residual**2).sum() / noise**2 + (phi**2 / variance).sum())

    shares, residual, cost = evaluate(phi)
    for _ in range(_STEPS):
        jacobian = _jacobian(shares, ids, len(sd))
        spread = (jacobian * variance) @ jacobian.T + noise**2 * np.eye(len(rows))
        goal = variance * (jacobian.T @ np.linalg.solve(spread, jacobian @ phi - residual))
        phi, shares, residual, gain = _damped(phi, goal, cost, evaluate, (shares, residual))
        cost -= gain
        if gain < 1e-4 * cost + 1e-6:
            break
    jacobian = _jacobian(shares, ids, len(sd))
    precision = np.linalg.inv((jacobian * variance) @ jacobian.T + noise**2 * np.eye(len(rows)))
    return Fitted(settings, shares, precision @ (jacobian @ phi - residual), precision)


def _damped(
    phi: _Array, goal: _Array, cost: float, evaluate: _Evaluate, now: tuple[_Array, _Array]
) -> tuple[_Array, _Array, _Array, float]:
    """The longest of ever shorter steps towards `goal` that lowers the cost: (phi, shares, residual, gain)."""
    length = 1.0
    while length > 1e-4:
        candidate = phi + length * (goal - phi)
        shares, residual, new_cost = evaluate(candidate)
        if new_cost < cost:
            return candidate, shares, residual, cost - new_cost
        length /= 2
    return phi, *now, 0.0


def _jacobian(shares: NDArray[np.float64], ids: NDArray[np.int64], width: int) -> NDArray[np.float64]:
    """Derivatives of the rows' log times after every effect: (n, effects)."""
    jacobian = np.zeros((len(shares), width))
    rows = np.arange(len(shares))[:, None]
    for level in range(ids.shape[2]):
        np.add.at(jacobian, (rows, ids[:, :, level]), shares)
    return jacobian


def _effects(settings: Sequence[Setting]) -> tuple[dict[Setting, NDArray[np.int64]], NDArray[np.float64]]:
    """Each setting's effects as numbers (K, levels), and the prior standard deviation of every effect."""
    numbers: dict[Hashable, int] = {}
    sd: list[float] = []

    def number(level: Level, setting: Setting, k: int) -> int:
        key = (level.name, level.shared_by(setting), k if level.per_class else -1)
        if key not in numbers:
            numbers[key] = len(sd)
            sd.append(level.sd)
        return numbers[key]

    table = {
        s: np.array([[number(level, s, k) for level in LEVELS] for k in range(_K)]) for s in dict.fromkeys(settings)
    }
    return table, np.array(sd)


def _prior_covariance(one: Setting, other: Setting) -> NDArray[np.float64]:
    """Prior covariance of two settings' offsets: (K, K). Classes share the effects that are not per class."""
    own = sum(level.sd**2 for level in LEVELS if level.per_class and level.shared_by(one) == level.shared_by(other))
    all_classes = sum(
        level.sd**2 for level in LEVELS if not level.per_class and level.shared_by(one) == level.shared_by(other)
    )
    return own * np.eye(_K) + all_classes * np.ones((_K, _K))

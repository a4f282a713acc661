"""Fits what one unit of each amount costs on one board, from the measured graphs of the suite.

    ms of a graph  =  Σ amount · cost,    cost = datasheet's cost · exp(departure)

Costs are positive, so that more work never takes less time. The departures are the most likely ones of a small
hierarchical model in natural logarithms: of each amount, of its group (arithmetic, memory, starting), and the noise of
a graph. Where nothing was measured a cost is the data sheet's; a few graphs move whole groups, all of them each amount.
Found by Levenberg and Marquardt's steps; the curvature at the end is what the interval takes of the costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protofleet.hw_profiles.calibration.amounts import AMOUNTS, MULTIPLY

__all__ = ["Costs", "datasheet_costs", "fit_costs"]

_NOISE = 0.08  # of one graph, in natural logarithms, beside what the model cannot follow
_WHOLE = 0.35  # of the noise of a whole network or step: each counts as eight small graphs
_FLOOR_MS = 2e-3  # that a clock and a call add to the doubt of a small graph
_SD_GROUP, _SD_AMOUNT = 1.0, 0.8
_STEPS = 60
_STARTING = ("run", "launch", "view", "launch near", "launch far", "divided", "code near", "code far")
_ARITHMETIC = (*MULTIPLY, "edges")
# What one unit takes by the data sheet: multiply-accumulates at half the peak rate, elements of 4 bytes at half the
# memory's or of a cache of 8 times its rate, runs and starts in cycles. Not searched.
_CYCLES = {
    "run": 20_000.0, "launch": 3_000.0, "view": 1_500.0, "launch near": 1_000.0, "launch far": 5_000.0,
    "divided": 10_000.0, "code near": 2_000.0, "code far": 10_000.0, "pieces": 200.0, "window rows": 20.0,
    "runs two": 20.0, "runs cut": 10.0, "runs padded": 20.0, "runs joined": 20.0, "runs repeated": 20.0,
    "runs turn": 10.0, "runs turned rows": 20.0, "runs reduce": 20.0, "runs norm": 20.0,
}  # fmt: skip
_PER_MAC = {"edges": 2.0, "first": 3.0, "depthwise": 3.0, "narrow groups": 3.0}
_PER_ELEMENT = {"slow": 4.0, "gates": 2.0, "softmax": 6.0, "turn": 2.0}
_CACHE = 8.0


@dataclass(frozen=True, eq=False)
class Costs:
    """Milliseconds of one unit: `log_ms` (K,) and their `covariance` (K, K), in natural logarithms.

    Attributes:
        noise: of a graph beside its fit, natural logarithm.
        graphs: how many were measured.
    """

    log_ms: NDArray[np.float64]
    covariance: NDArray[np.float64]
    noise: float
    graphs: int


def datasheet_costs(clock_ghz: float, macs_per_cycle: float, memory_gb_s: float) -> NDArray[np.float64]:
    """Natural logarithm of the milliseconds of one unit by the data sheet: (K,). One core."""
    cycle_ms = 1e-6 / clock_ghz
    mac_ms, element_ms = 2 * cycle_ms / macs_per_cycle, 2 * 4e-6 / memory_gb_s
    costs = []
    for name in AMOUNTS:
        if name in _CYCLES:
            costs.append(_CYCLES[name] * cycle_ms)
        elif name in _ARITHMETIC:
            costs.append(_PER_MAC.get(name, 1.0) * mac_ms)
        elif name in ("near", "far"):
            costs.append(element_ms / (4 if name == "near" else 1))
        else:
            costs.append(_PER_ELEMENT.get(name, 1.0) * element_ms / _CACHE)
    return np.log(costs)


def fit_costs(
    amounts: NDArray[np.float64], ms: NDArray[np.float64], prior: NDArray[np.float64], whole: NDArray[np.bool_]
) -> Costs:
    """The costs of one board.

    Args:
        amounts: (n, K) of the graphs; n may be 0.
        ms: (n,) measured.
        prior: (K,) as `datasheet_costs`.
        whole: (n,) which are whole networks or steps. They say most of what is asked of a fit, and count for more.
    """
    covariance = _prior_covariance()
    precision = np.linalg.inv(covariance)
    if not len(ms):
        return Costs(prior, covariance, _NOISE, 0)
    noise = np.full(len(ms), _NOISE)
    theta, damping = prior.copy(), 1e-3
    for _ in range(3):  # the noise is what the fit leaves
        theta, hessian = _most_likely(theta, amounts, ms, prior, precision, noise, damping)
        residual = np.log(ms) - np.log(amounts @ np.exp(theta))
        scale = max(_NOISE / 2, float(np.quantile(np.abs(residual), 0.68)))
        doubt = _FLOOR_MS / ms
        robust = 1.0 + np.minimum(3.0, np.maximum(0.0, np.abs(residual) / scale - 2.0))  # what is far off weighs less
        noise = np.sqrt(scale**2 + doubt**2) * robust * np.where(whole, _WHOLE, 1.0)
    return Costs(theta, np.linalg.inv(hessian), scale, len(ms))


def _most_likely(
    theta: NDArray[np.float64], amounts: NDArray[np.float64], ms: NDArray[np.float64], prior: NDArray[np.float64],
    precision: NDArray[np.float64], noise: NDArray[np.float64], damping: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:  # fmt: skip
    log_ms = np.log(ms)

    def loss(at: NDArray[np.float64]) -> float:
        off = (log_ms - np.log(amounts @ np.exp(at))) / noise
        return float(off @ off + (at - prior) @ precision @ (at - prior))

    best = loss(theta)
    hessian = precision
    for _ in range(_STEPS):
        parts = amounts * np.exp(theta)
        total = parts.sum(axis=1)
        slope = parts / total[:, None] / noise[:, None]
        off = (log_ms - np.log(total)) / noise
        hessian = slope.T @ slope + precision
        step_to = slope.T @ off - precision @ (theta - prior)
        while True:
            step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), step_to)
            tried = theta + np.clip(step, -2, 2)
            now = loss(tried)
            if now < best or damping > 1e6:
                break
            damping *= 4
        if damping > 1e6:
            break
        gained, best, theta, damping = best - now, now, tried, max(1e-6, damping / 4)
        if gained < 1e-6 * best:
            break
    return theta, hessian


def _prior_covariance() -> NDArray[np.float64]:
    groups = ["starting" if n in _STARTING else "arithmetic" if n in _ARITHMETIC else "memory" for n in AMOUNTS]
    same = np.array([[one == other for other in groups] for one in groups], float)
    return _SD_GROUP**2 * same + _SD_AMOUNT**2 * np.eye(len(AMOUNTS))

"""From measured graphs to what a device file says: the fits of both parts for each number of threads, and their errors.

A fit's error is that of graphs that it had not seen: every graph is predicted by a fit of nine tenths of the others.
The interval is what holds 8 of 10 of the whole networks, or steps, among them (conformal prediction), by a fit that saw
none of these: a network that is asked of a file is no relative of the suite's, as those are of each other (decision
297). A board that had no time for five of them takes all graphs, by the fits of nine tenths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

import numpy as np
from numpy.typing import NDArray

from protofleet.hw_profiles.calibration.amounts import AMOUNTS
from protofleet.hw_profiles.calibration.fit import fit_costs
from protofleet.hw_profiles.calibration.suite import PARTS, Part, cases
from protofleet.hw_profiles.devices.calibrated import BoardFit

__all__ = ["fit_board", "fit_part", "half_width", "left_out_errors", "whole_errors"]

_FOLDS = 10
_COVERAGE = 0.8
_FEWEST_WHOLE = 5


def fit_board(ms: Mapping[int, Sequence[float]], prior: NDArray[np.float64]) -> tuple[BoardFit, ...]:
    """The fits of a board.

    Args:
        ms: by number of threads, of every graph in the order of `cases`; infinite for one that was not measured.
        prior: of the data sheet.
    """
    fits = []
    for threads, times in sorted(ms.items()):
        for part in PARTS:
            rows = [index for index, case in enumerate(cases()) if case.part == part and times[index] < np.inf]
            amounts = np.array([cases()[index].amounts for index in rows])
            whole = np.array([cases()[index].whole for index in rows], bool)
            fits.append(fit_part(part, threads, amounts, np.array(times)[rows], prior, whole))
    return tuple(fits)


def fit_part(
    part: Part, threads: int, amounts: NDArray[np.float64], ms: NDArray[np.float64], prior: NDArray[np.float64],
    whole: NDArray[np.bool_],
) -> BoardFit:  # fmt: skip
    """One fit with the errors of graphs that were left out; `whole` says which are networks or steps."""
    costs = fit_costs(amounts, ms, prior, whole)
    errors = np.abs(left_out_errors(amounts, ms, prior, whole))
    apart = errors if whole.sum() < _FEWEST_WHOLE else np.abs(whole_errors(amounts, ms, prior, whole))
    relative = np.expm1(errors)
    named = dict(zip(AMOUNTS, (float(value) for value in np.exp(costs.log_ms) * 1e6), strict=True))
    return BoardFit(
        part, threads, len(ms), float(np.median(relative)), float(np.quantile(relative, 0.9)),
        half_width(apart), named,
    )  # fmt: skip


def half_width(errors: NDArray[np.float64]) -> float:
    """Of the 80 % interval, in natural logarithms: the k-th smallest error, k = ⌈0.8 (n + 1)⌉, of n left-out graphs."""
    return float(np.sort(errors)[min(len(errors), ceil(_COVERAGE * (len(errors) + 1))) - 1])


def whole_errors(
    amounts: NDArray[np.float64], ms: NDArray[np.float64], prior: NDArray[np.float64], whole: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """log(predicted / measured) of every whole network or step, by a fit of the small graphs alone."""
    costs = fit_costs(amounts[~whole], ms[~whole], prior, whole[~whole])
    return np.log(amounts[whole] @ np.exp(costs.log_ms)) - np.log(ms[whole])


def left_out_errors(
    amounts: NDArray[np.float64], ms: NDArray[np.float64], prior: NDArray[np.float64], whole: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """log(predicted / measured) of every graph, by a fit that did not see it: (n,)."""
    errors = np.zeros(len(ms))
    for fold in range(_FOLDS):
        out = np.arange(len(ms)) % _FOLDS == fold
        costs = fit_costs(amounts[~out], ms[~out], prior, whole[~out])
        errors[out] = np.log(amounts[out] @ np.exp(costs.log_ms)) - np.log(ms[out])
    return errors

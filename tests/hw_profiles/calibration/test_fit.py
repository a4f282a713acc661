"""The fit of one board: planted costs are found, more work never takes less time, few graphs move whole groups."""

from __future__ import annotations

from math import log

import numpy as np
import pytest
from numpy.typing import NDArray

from protofleet.hw_profiles.calibration.amounts import AMOUNTS
from protofleet.hw_profiles.calibration.fit import datasheet_costs, fit_costs
from protofleet.hw_profiles.calibration.fit_board import fit_board, fit_part, half_width, left_out_errors
from protofleet.hw_profiles.calibration.suite import Part, cases

PRIOR = datasheet_costs(2.0, 16.0, 20.0)


def _part(part: str) -> NDArray[np.float64]:
    return np.array([case.amounts for case in cases() if case.part == part])


def _whole(part: str) -> NDArray[np.bool_]:
    return np.array([case.whole for case in cases() if case.part == part], bool)


def _board(seed: int, sd: float = 0.5) -> NDArray[np.float64]:
    """Costs of a board that departs from its data sheet."""
    return np.exp(PRIOR + 0.7 + np.random.default_rng(seed).normal(0, sd, len(AMOUNTS)))


def test_planted_costs_predict_graphs_that_were_left_out() -> None:
    for part in ("inference", "training"):
        amounts = _part(part)
        noise = np.exp(np.random.default_rng(1).normal(0, 0.05, len(amounts)))
        errors = np.abs(left_out_errors(amounts, amounts @ _board(0) * noise, PRIOR, _whole(part)))
        sheet = np.abs(np.log(amounts @ np.exp(PRIOR) / (amounts @ _board(0))))
        assert np.median(errors) < 0.08
        assert np.quantile(errors, 0.9) < 0.25
        assert np.median(sheet) > 0.4


def test_without_a_graph_the_data_sheet_stands_and_five_move_it() -> None:
    amounts, real = _part("inference"), _board(2, sd=0.1)
    assert np.array_equal(fit_costs(np.zeros((0, len(AMOUNTS))), np.zeros(0), PRIOR, np.zeros(0, bool)).log_ms, PRIOR)
    few = list(range(3, len(amounts), len(amounts) // 5))
    ms = amounts @ real

    def error(costs: NDArray[np.float64]) -> float:
        return float(np.median(np.abs(np.log(amounts @ np.exp(costs) / ms))))

    assert error(fit_costs(amounts[few], ms[few], PRIOR, _whole("inference")[few]).log_ms) < error(PRIOR) / 3


def test_more_work_never_takes_less_time() -> None:
    amounts = _part("training")
    ms = amounts @ _board(3) * np.exp(np.random.default_rng(4).normal(0, 0.3, len(amounts)))
    costs = np.exp(fit_costs(amounts, ms, PRIOR, _whole("training")).log_ms)
    assert np.all(costs > 0)
    more = amounts + np.random.default_rng(5).uniform(0, 1, amounts.shape) * amounts
    assert np.all(more @ costs >= amounts @ costs)


def test_a_graph_that_was_disturbed_moves_little() -> None:
    amounts, real = _part("training"), _board(6)
    ms = amounts @ real
    disturbed = ms.copy()
    disturbed[::20] *= 5
    rest = [index for index in range(len(ms)) if index % 20]
    costs = np.exp(fit_costs(amounts, disturbed, PRIOR, _whole("training")).log_ms)
    errors = np.abs(np.log(amounts @ costs / ms))[rest]
    assert np.median(errors) < 0.1


def test_what_whole_graphs_say_counts_for_more() -> None:
    """Where they contradict the small ones, more than by their number."""
    amounts, whole = _part("training"), _whole("training")
    ms = amounts @ _board(8) * np.where(whole, 1.3, 1.0)

    def lean(said: NDArray[np.bool_]) -> float:
        costs = np.exp(fit_costs(amounts, ms, PRIOR, said).log_ms)
        return float(np.median(np.log(amounts @ costs / ms)[whole]))

    assert lean(np.zeros(len(ms), bool)) < lean(whole) < 0


def test_a_board_has_a_fit_for_each_part_and_number_of_threads() -> None:
    ms = np.array([float(case.amounts @ _board(7)) for case in cases()])
    fits = fit_board({1: list(ms), 2: list(ms / 1.6)}, PRIOR)
    assert [(fit.part, fit.threads) for fit in fits] == [
        ("inference", 1), ("training", 1), ("inference", 2), ("training", 2),
    ]  # fmt: skip
    for fit in fits:
        assert set(fit.costs_ns) == set(AMOUNTS)
        assert fit.median < fit.p90
        assert 0 < fit.half_width < 0.3


def test_the_interval_holds_8_of_10() -> None:
    assert half_width(np.linspace(1.0, 0.1, 10)) == 0.9  # the ninth of ten: 8 of 10 of any more
    assert half_width(np.array([0.1, 0.5, 0.2, 0.3, 0.4])) == 0.5


@pytest.mark.parametrize("part", ["inference", "training"])
def test_what_the_suites_networks_have_in_common_does_not_narrow_the_interval(part: Part) -> None:
    """All of them take 1.3 times what small graphs say. Nine tenths of them tell that of the last tenth; of a network
    that is none of them nobody can."""
    amounts, whole = _part(part), _whole(part)
    ms = amounts @ _board(0) * np.where(whole, 1.3, 1.0)
    fit = fit_part(part, 1, amounts, ms, PRIOR, whole)
    by_tenths = np.abs(left_out_errors(amounts, ms, PRIOR, whole))[whole]
    assert half_width(by_tenths) < 0.9 * log(1.3)
    assert fit.half_width > 0.95 * log(1.3)
    few = whole & (np.cumsum(whole) <= 4)  # a board that had no time for five takes all graphs that were left out
    kept = few | ~whole
    all_graphs = half_width(np.abs(left_out_errors(amounts[kept], ms[kept], PRIOR, few[kept])))
    assert fit_part(part, 1, amounts[kept], ms[kept], PRIOR, few[kept]).half_width == all_graphs

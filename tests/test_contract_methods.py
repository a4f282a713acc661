"""The methods table holds together: every row complete, every default allowed and sourced."""

from __future__ import annotations

import pytest

from contract.errors import MethodError
from contract.methods import METHODS, method

SETTINGS = [(row.name, name) for row in METHODS.values() for name in row.hyper]


@pytest.mark.parametrize("row", METHODS.values(), ids=lambda row: row.name)
def test_a_row_tells_one_consistent_data_flow(row):
    assert METHODS[row.name] is row
    assert row.heads
    assert row.source
    assert (row.statistic == "participation") == (row.rule is None) == (row.global_state is None)
    if row.statistic == "feature-gram":
        assert row.extractor == "bundle"  # Gram sums are only meaningful over one shared extractor
    if row.objective is None:
        assert row.heads == ("none",)


@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_a_default_is_allowed_and_says_where_it_comes_from(name, setting):
    hyper = METHODS[name].hyper[setting]
    assert hyper.check(setting, hyper.default) == hyper.default
    assert hyper.source


def test_settling_fills_in_defaults_and_takes_text_from_a_command_line():
    settled = method("fedproto").settle({"lr": "0.5", "epochs": "3", "distance": "l1"})
    assert settled["lr"] == 0.5
    assert settled["epochs"] == 3
    assert settled["distance"] == "l1"
    assert settled["momentum"] == METHODS["fedproto"].hyper["momentum"].default
    assert set(settled) == set(METHODS["fedproto"].hyper)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lr": "fast"}, "expected a float, got fast"),
        ({"lr": -1}, "lr, expected 1e-09 to 100, got -1"),
        ({"lr": float("nan")}, "lr, expected"),
        ({"lambda": "inf"}, "lambda, expected"),
        ({"epochs": 1.5}, "epochs, expected a int"),
        ({"epochs": 0}, "epochs, expected 1 to 10000"),
        ({"distance": "l3"}, "one of squared, l2, l1"),
        ({"lamda": 1.0}, "no hyper-parameter 'lamda', try one of lambda"),
    ],
)
def test_a_setting_that_is_unknown_or_out_of_range_is_refused_by_name(given, words):
    with pytest.raises(MethodError, match=words):
        method("fedproto").settle(given)


def test_an_unknown_method_is_refused_with_the_nearest():
    with pytest.raises(MethodError, match="got fedprotto, try one of fedproto"):
        method("fedprotto")


def test_the_table_cannot_be_changed_by_accident():
    with pytest.raises(TypeError):
        METHODS["mine"] = METHODS["ffc"]  # type: ignore[index]
    with pytest.raises(TypeError):
        METHODS["ffc"].hyper["ridge"] = METHODS["ffc"].hyper["ridge"]  # type: ignore[index]

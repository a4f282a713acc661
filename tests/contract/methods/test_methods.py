"""The methods hold together: each says all its facts, every default allowed and sourced."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from protofleet.contract.errors import MethodError
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import METHODS, Head, closing_method, method, runs_on
from protofleet.contract.methods.base import LossTerm
from protofleet.contract.sums.merge_rules import Weighting
from protofleet.contract.sums.statistics import FeatureGram, Participation, Statistic
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import ClassRows

SETTINGS = [(row.name, name) for row in METHODS.values() for name in row.hyper]


@pytest.mark.parametrize("found", METHODS.values(), ids=METHODS)
def test_a_method_says_all_its_facts(found):
    assert METHODS[found.name] is found is method(found.name)
    for fact in ("name", "title", "source", "summary", "sends", "inference", "way", "privacy"):
        assert getattr(found, fact).strip()
    assert found.name == found.name.lower()
    assert len(found.name) <= 32
    assert found.heads
    assert set(found.heads) <= set(get_args(Head))
    assert set(found.loss) <= set(get_args(LossTerm))
    assert found.weighting in get_args(Weighting)
    assert set(found.resolve(found.first_run)) == set(found.hyper)
    assert found.rounds >= 1


@pytest.mark.parametrize("found", METHODS.values(), ids=METHODS)
def test_a_method_tells_one_consistent_data_flow(found):
    assert found.trains == (found.objective is not None) == bool(found.loss)
    assert found.trains or found.heads == ("none",)
    assert issubclass(found.statistic, Statistic)
    assert (found.statistic is Participation) == (not found.global_rows)  # what is merged comes back, and else nothing
    if found.statistic.has_triangle():
        assert found.extractor == "bundle"  # Gram sums are only meaningful over one shared extractor
    if found.weighting != "count" or "aggregation" in found.hyper:
        assert found.statistic.is_class_means()  # only rows of means can be weighted in another way
    assert found.weighting_of(found.resolve({})) == found.weighting
    if "noise" in found.hyper:
        assert found.mechanism(found.resolve({"noise": 1.0})) is not None
    assert (found.mechanism(found.resolve({})) is None) == found.statistic.COUNTED  # counts that noise hides, or none
    assert found.statistic.COUNTED or not found.stands  # a new sum would be a new release


@pytest.mark.parametrize("found", METHODS.values(), ids=METHODS)
def test_what_a_method_says_comes_back_is_what_comes_back(found):
    """Of a class that somebody held, in rows of the width it says; a class that nobody held keeps what it had."""
    hyper, classes, width = found.resolve({}), 3, 4
    held = np.array([2, 0, 5])
    zero = found.statistic.zero(classes, found.row_width(hyper, width))
    counts = np.zeros(len(zero.counts), np.int64)
    counts[:: found.statistic.GROUPS] = held  # one group of each class
    arrays = [np.ones_like(a) * (counts > 0)[:, None] if a.ndim == 2 else np.ones_like(a) for a in zero.arrays()]
    sent = zero if found.statistic is Participation else zero.build(arrays, counts)
    merged = found.merge(lambda: [sent], "mean", hyper)
    assert isinstance(merged, found.merged)
    widths = found.row_kinds(hyper, classes, width)
    first = found.next_rows({}, merged, hyper)
    assert {kind: rows.rows.shape[1] for kind, rows in first.items()} == widths
    assert all(rows.classes.tolist() == [0, 2] for rows in first.values())
    before = {kind: ClassRows(np.array([1], np.uint16), np.full((1, width), 7.0)) for kind, width in widths.items()}
    after = found.next_rows(before, merged, hyper)
    if found.solves != "none":
        return  # a head is made anew
    for kind, rows in after.items():
        assert rows.classes.tolist() == [0, 1, 2]
        np.testing.assert_array_equal(rows.rows[1], before[kind].rows[0])


@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_a_default_is_allowed_and_says_where_it_comes_from(name, setting):
    hyper = METHODS[name].hyper[setting]
    assert hyper.check(setting, hyper.default) == hyper.default
    assert hyper.source


@pytest.mark.parametrize("name", [name for name, found in METHODS.items() if found.unit_features and not found.trains])
def test_answers_over_unit_features_are_the_same_for_features_of_any_length(name):
    found, rng = METHODS[name], np.random.default_rng(0)
    z, groups = rng.normal(size=(12, 4)), found.statistic.GROUPS
    y = np.arange(12) % 3 * groups + np.arange(12) % groups // 2
    if found.statistic.COUNTED:
        statistic = found.statistic.of(unit_rows(z), y, 3 * groups)
    else:
        zero = found.statistic.zero(3, 4)
        statistic = zero.build([rng.normal(size=each.shape) for each in zero.arrays()], np.ones(3, np.int64))
    hyper = found.resolve({})
    rows = found.next_rows({}, found.merge(lambda: [statistic], "mean", hyper), hyper)
    (answer,) = found.shared_answers(GlobalState(bytes(4), 1, 1, rows), 3, 4, hyper).values()
    np.testing.assert_allclose(answer.scores(5 * z), answer.scores(z), rtol=1e-9)


def test_projected_features_are_worth_comparing_where_that_halves_them():
    for width, narrow in ((511, {0}), (512, {0, 256}), (1280, {0, 256})):
        assert {each["project"] for each in method("ffc").variants(width)} == narrow


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("ffc", {"ridge": "auto", "form": "auto", "project": 0}),
        ("fedcof", {"ridge": "auto", "groups": 4}),
        ("ffc-dp", {"noise_multiplier": 3.731, "gram_share": 0.2, "count_share": 0.05, "ridge": "auto", "project": 0}),
        ("ncm-dp", {"noise_multiplier": 3.731, "count_share": 0.05}),
        ("fedproto", {"distance": "squared", "reading": "sample", "aggregation": "count", "pu_weight": 0.0}),
        ("fedpr", {"distance": "squared", "lambda": 1.0}),
    ],
)
def test_who_sets_nothing_gets_what_docs_and_figures_are_about(name, defaults):
    settled = method(name).resolve({})
    assert {setting: settled[setting] for setting in defaults} == defaults


def test_settling_fills_in_defaults_and_takes_text_from_a_command_line():
    settled = method("fedproto").resolve({"lr": "0.5", "epochs": "3", "distance": "l1"})
    assert settled["lr"] == 0.5
    assert settled["epochs"] == 3
    assert settled["distance"] == "l1"
    assert settled["momentum"] == METHODS["fedproto"].hyper["momentum"].default
    assert set(settled) == set(METHODS["fedproto"].hyper)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lr": "fast"}, "expected a number, got fast"),
        ({"lr": -1}, "lr, expected 1e-09 to 100, got -1"),
        ({"lr": float("nan")}, "lr, expected"),
        ({"lambda": "inf"}, "lambda, expected"),
        ({"epochs": 1.5}, "epochs, expected a whole number"),
        ({"epochs": 0}, "epochs, expected 1 to 10000"),
        ({"distance": "l3"}, "one of squared, l2, l1"),
        ({"lamda": 1.0}, "no hyper-parameter 'lamda', try one of lambda"),
    ],
)
def test_a_setting_that_is_unknown_or_out_of_range_is_refused_by_name(given, words):
    with pytest.raises(MethodError, match=words):
        method("fedproto").resolve(given)


def test_an_unknown_method_is_refused_with_the_nearest():
    with pytest.raises(MethodError, match="got fedprotto, try one of fedproto"):
        method("fedprotto")


def test_the_table_cannot_be_changed_by_accident():
    with pytest.raises(TypeError):
        METHODS["mine"] = METHODS["ffc"]  # type: ignore[index]
    with pytest.raises(TypeError):
        METHODS["ffc"].hyper["ridge"] = METHODS["ffc"].hyper["ridge"]  # type: ignore[index]


def test_one_method_closes_runs_of_the_others():
    assert closing_method() is METHODS["ffc"]
    assert [found.name for found in METHODS.values() if found.closes_runs] == ["ffc"]
    assert closing_method().statistic is FeatureGram


@pytest.mark.parametrize("name", METHODS)
def test_a_bundle_serves_rounds_of_its_own_method_and_of_those_that_train_nothing(name):
    frozen = ("fedcof", "ffc", "ffc-dp", "ncm", "ncm-dp")
    assert runs_on(name) == (name, *(other for other in frozen if other != name))


def test_settings_of_another_method_are_left_out_and_its_own_defaults_taken():
    of_spherefed = method("spherefed").resolve({"ridge": 0.2, "project": 8})
    assert method("ffc").resolved_in(of_spherefed) == {
        "ridge": 0.2,
        "form": "auto",
        "project": 8,
        "project_seed": 0,
    }
    assert method("ffc").resolved_in(method("fedproto").resolve({})) == method("ffc").resolve({})
    assert method("ffc").row_width(method("ffc").resolved_in(of_spherefed), 64) == 8
    assert method("ffc").row_width(method("ffc").resolve({}), 64) == 64
    assert method("ffc").preparation(method("ffc").resolved_in(of_spherefed)) == {"project": 8, "project_seed": 0}
    assert method("ffc").preparation(method("ffc").resolve({})) == {}


@pytest.mark.parametrize("name", ["ffc", "spherefed"])
def test_a_projection_wider_than_the_features_is_refused(name):
    method(name).check(method(name).resolve({"project": 4}), 3, 4)
    with pytest.raises(MethodError, match="project, expected at most D = 4, got 5"):
        method(name).check(method(name).resolve({"project": 5}), 3, 4)

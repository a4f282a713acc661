"""Metrics beyond accuracy: each against a plain loop, gathered in parts or at once, and read from a run's records."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from scipy import stats

from protofleet.lab.engine.deployed import RoundRecord
from protofleet.lab.engine.tally import Tally, calibration_error
from protofleet.lab.paper_tables.metrics import METRICS, metrics_of, per_class_of
from protofleet.lab.paper_tables.more_tables import metrics_table, seeds_table
from protofleet.lab.paper_tables.seeds import half_interval, paired
from protofleet.lab.reporting.console import gain_line
from tests.lab.paper_tables.test_results import _cell, _sheet


def _error_by_hand(logits: np.ndarray, truth: np.ndarray) -> float:
    total = 0.0
    for low in np.arange(15) / 15:
        inside, right = [], []
        for row, y in zip(logits, truth, strict=True):
            p = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
            if low <= p.max() < low + 1 / 15 or (p.max() == 1.0 and low == 14 / 15):
                inside.append(p.max())
                right.append(float(p.argmax() == y))
        if inside:
            total += len(inside) / len(truth) * abs(np.mean(right) - np.mean(inside))
    return total


def test_the_calibration_error_is_that_of_a_loop_over_bins() -> None:
    rng = np.random.default_rng(0)
    logits, truth = rng.normal(size=(200, 4)) * 2, rng.integers(0, 4, 200)
    assert calibration_error(logits, truth) == pytest.approx(_error_by_hand(logits, truth), abs=1e-12)
    assert calibration_error(np.eye(3) * 1e3, [0, 1, 2]) == pytest.approx(0.0, abs=1e-12)
    assert calibration_error(np.eye(3) * 1e3, [1, 2, 0]) == pytest.approx(1.0)


def test_a_tally_adds_up_in_parts() -> None:
    rng = np.random.default_rng(1)
    answers = [(rng.integers(0, 5, n), rng.integers(0, high, n)) for n, high in ((30, 5), (12, 3), (7, 5))]
    whole, parts = Tally(), Tally()
    for found, truth in answers:
        whole.add("all_classes", "head", found, truth)
        (other := Tally()).add("all_classes", "head", found, truth)
        parts.extend(other)
    every, truth = (np.concatenate(each) for each in zip(*answers, strict=True))
    expected = [float((every == truth)[truth == j].mean()) for j in range(5)]
    for tally in (whole, parts):
        assert tally.per_class()["all_classes/head"] == pytest.approx(expected)
        assert tally.clients()["all_classes/head"] == [float((a == y).mean()) for a, y in answers]
    assert Tally().per_class() == {}


RECORDS = [
    {"round": 1, "method": "average", "uplink_bytes": 100.0, "participants": 2, "all_classes": {"head": 0.5}},
    {
        "round": 2,
        "method": "average",
        "uplink_bytes": 300.0,
        "participants": 4,
        "all_classes": {"head": 0.7},
        "clients": {"all_classes/head": [0.9, 0.8, 0.4, 0.7]},
        "per_class": {"all_classes/head": [0.9, None, 0.2]},
        "calibration": {"all_classes/head": 0.05},
    },
]


def test_metrics_of_a_run() -> None:
    found = metrics_of(RECORDS, "all_classes/head", {1: 0.5, 2: 0.7}, 4, 0.6)
    assert set(found) == set(METRICS)
    assert (found["worst client"], found["worst class"], found["calibration error"]) == (0.4, 0.2, 0.05)
    assert found["10th percentile"] == pytest.approx(0.4 + 0.3 * 0.3)  # 0.3 of the way from the first to the second
    assert found["std over clients"] == pytest.approx(np.std([0.9, 0.8, 0.4, 0.7]))
    assert found["Jain"] == pytest.approx(2.8**2 / (4 * (0.81 + 0.64 + 0.16 + 0.49)))
    assert (found["rounds to target"], found["bytes to target"]) == (2.0, 100.0 * 2 / 4 + 300.0)
    assert "rounds to target" not in metrics_of(RECORDS, "all_classes/head", {1: 0.5, 2: 0.7}, 4, 0.8)
    assert metrics_of(RECORDS[:1], "all_classes/head", {1: 0.5}, 4, None) == {}
    assert per_class_of(RECORDS, "all_classes/head") == [0.9, None, 0.2]


def test_intervals_and_paired_tests_are_students() -> None:
    ours, theirs = [0.9, 0.8, 0.85, 0.7], [0.85, 0.7, 0.8, 0.72]
    low, high = stats.t.interval(0.95, 3, loc=np.mean(ours), scale=stats.sem(ours))
    assert half_interval(ours) == pytest.approx((high - low) / 2)
    assert half_interval([0.5]) is None
    found = paired(ours, [0, 1, 2, 3], [*reversed(theirs), 0.1], [3, 2, 1, 0, 9])
    assert found.pairs == 4
    assert found.mean == pytest.approx(np.mean(np.subtract(ours, theirs)))
    assert found.p == pytest.approx(stats.ttest_rel(ours, theirs).pvalue)
    assert paired(ours, [0, 1, 2, 3], theirs, [7, 8, 9, 0]) is None
    assert paired([0.5, 0.5], [0, 1], [0.5, 0.5], [0, 1]).p == 1.0


def test_a_page_tells_what_lies_behind_its_accuracies() -> None:
    told = {"values": [0.5, 0.6], "seeds": [0, 1]}
    base = _cell("base", 0.55, **told)
    cell = _cell("near", 0.65, values=[0.6, 0.7], seeds=[0, 1], metrics={"Jain": 0.98765, "bytes to target": 2000.0})
    sheet = msgspec.structs.replace(_sheet(base, cell), against="base", target=60.0)
    assert "| near | IID | 65.00 ± 63.53 | +10.00 ± 0.00 | – | 2 |" in seeds_table(sheet)
    assert "| base | IID | 55.00 ± 63.53 |  |  |  |" in seeds_table(sheet)
    assert metrics_table(sheet)[-1] == "| near | IID | 0.988 | 2 kB |"
    assert "The target is 60 %." in "\n".join(metrics_table(sheet))
    assert metrics_table(_sheet(base)) == []
    assert seeds_table(_sheet(_cell("base", 0.5, values=[0.5]))) == []


def test_the_last_line_of_a_run_compares_one_task_with_itself() -> None:
    """Each way when it was first measured and at the end, not one way with another; of a single round nothing."""
    first = RoundRecord(1, "fedproto", 2, None, 0.0, all_classes={"head": 0.205, "prototype": 0.3})
    unmeasured = RoundRecord(2, "fedproto", 2, None, 0.0)
    last = RoundRecord(3, "ffc", 2, None, 0.0, all_classes={"head": 0.374, "linear": 0.694})
    told = "right on test images of all classes: head 37.4% after round 3 (20.5% after round 1); "
    told += "prototype 30.0% after round 1; linear 69.4% after round 3"
    assert gain_line([first, unmeasured, last]) == told
    assert gain_line([last]) == gain_line([unmeasured, unmeasured]) == gain_line([]) == ""

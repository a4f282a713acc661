"""The simulated month of benchmarks/living/month.py: that its books find what is lost or doubled, and a tiny month,
whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from aggregator_samples import CLASSES, WIDTH, gram
from commands import ROOT

from benchmarks.living import books as living_books
from benchmarks.living import check as living_check
from benchmarks.living import plan as living_plan
from protofleet.aggregator.merging.exact_sums import ExactSum
from protofleet.contract.sums.statistics import FeatureGram


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("days", "devices"), [(3, 6), (30, 200)])
def test_a_month_has_all_that_it_promises(days: int, devices: int, seed: int) -> None:
    made = living_plan.plan(days, devices, np.random.default_rng(seed), Path("d"), Path("b"), 10)
    assert made.events == sorted(made.events)
    assert all(1 <= event.at < days + 1 for event in made.events)
    assert {event.who for event in made.events if event.what == "kill"} == set(living_plan.KILLS)
    of = {what: [event for event in made.events if event.what == what] for what in ("forget", "withdraw", "admit")}
    assert len({event.who for event in of["forget"]}) == 2
    assert not {event.who for event in of["forget"]} & {event.who for event in of["withdraw"]}
    for admitted in of["admit"]:
        assert any(event.who == admitted.who and event.at < admitted.at for event in of["forget"] + of["withdraw"])
    there = {book.name: book for book in made.books}
    assert len(there) == devices
    for event in of["forget"] + of["withdraw"]:
        assert (there[event.who].joins, there[event.who].leaves > days) == (1, True)
    assert 2 <= made.extends <= days
    assert made.copied
    assert all(made.extends <= day <= days for day in made.copied.values())
    assert made.books[0].whole
    assert made.books[0].name not in made.copied


def test_the_same_seed_is_the_same_month() -> None:
    one, again, other = (
        living_plan.plan(30, 50, np.random.default_rng(seed), Path("d"), Path("b"), 10) for seed in (1, 1, 2)
    )
    assert one == again
    assert one != other


def sent(newest: int, **more: tuple[bytes | None, int, str | None]) -> living_books.Sent:
    return living_books.Sent(newest, {(int(number[1:]), "ffc"): made for number, made in more.items()})


@pytest.mark.parametrize(
    ("generation", "payload", "journal", "words"),
    [
        (2, b"two", sent(2, g1=(b"one", 3, "committed"), g2=(b"two", 3, "committed")), ""),
        (1, b"one", sent(2, g1=(b"one", 3, "committed"), g2=(b"two", 3, None)), ""),  # the second is on its way
        (1, b"one", sent(2, g1=(None, 3, "late"), g2=(b"two", 3, None)), ""),  # no receipt, and a newer one is made
        (2, None, sent(2, g2=(b"w", 1, "committed")), ""),  # withdrawn
        (1, b"one", sent(2, g1=(b"one", 3, "committed"), g2=(b"two", 3, "committed")), "lost: generation 2"),
        (0, None, sent(1, g1=(b"one", 3, "duplicate")), "lost: generation 1"),
        (2, b"one", sent(2, g1=(b"one", 3, "committed"), g2=(b"two", 3, "committed")), "doubled: generation 2"),
        (1, b"more", sent(1, g1=(None, 3, "late")), "doubled: generation 1"),
        (3, b"two", sent(2, g2=(b"two", 3, "committed")), "doubled: the store has generation 3"),
    ],
)
def test_what_a_store_may_hold_of_a_device(
    generation: int, payload: bytes | None, journal: living_books.Sent, words: str
) -> None:
    _, wrong = living_check.of_device(generation, payload, journal)
    assert bool(wrong) == bool(words)
    assert not words or wrong[0].startswith(words)


def test_the_naive_integers_are_those_of_the_canonical_sums() -> None:
    grams = [gram(seed) for seed in range(5)]
    total = ExactSum.zero(FeatureGram, CLASSES, WIDTH)
    for each in grams:
        total = total.add(ExactSum.of(each))
    naive = [np.sum(arrays, axis=0) for arrays in zip(*map(living_books.integers, grams), strict=True)]
    again = total.statistic(FeatureGram, WIDTH)
    *arrays, counts = naive
    for ours, theirs in zip(arrays, again.arrays(), strict=True):
        np.testing.assert_array_equal(ours / living_books.UNIT, theirs)
    np.testing.assert_array_equal(counts, again.counts)
    assert not living_books.alike(living_books.integers(grams[0]), living_books.integers(grams[1]))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["ffc", "ncm"])
def test_a_tiny_month(tmp_path: Path, method: str) -> None:
    command = [sys.executable, "-m", "benchmarks.living.month", "--days", "3", "--devices", "6"]
    told = ["--day-seconds", "8", "--method", method, "--keep", str(tmp_path / "month"), "--json", str(tmp_path / "j")]
    done = subprocess.run([*command, *told], cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "j").read_text())
    assert (found["faults"], [day["exact"] for day in found["by_day"]]) == ([], [True] * 3)
    assert set(found["killed"]) == set(living_plan.KILLS)
    assert "SIGSEGV" in found["rollout"]["bad_board"]
    assert found["rollout"]["counts"]["healthy"] > 0
    assert found["orders"] == {"forget": 2, "withdraw": 1, "admit": 1}

"""The soak of benchmarks/living/soak.py: that its bounds find what they are for, and a short soak, whole."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from camera_samples import rtsp_server
from commands import ROOT

from benchmarks.living.soak_bounds import Bounds, Sample, Soak, broken, table

RING = 16 << 20
BOUNDS = Bounds(ring_bytes=RING)
FIRST = Sample(
    at_s=0.0, life=1, pictures=0, rss_kb=90_000, pss_kb=70_000, files=30, threads=7, ring_bytes=RING,
    journal_bytes=500_000, ledger_bytes=50_000, log_bytes=4 << 20, state_bytes=RING + 600_000,
)  # fmt: skip
ENDLESS = float("inf")


def soak(**rising: float) -> Soak:
    """Flat for 1,000 samples of 10 pictures each, but for what rises from the first to the last by so much."""
    samples = []
    for row in range(1000):
        now = {name: getattr(FIRST, name) + round(more * row / 999) for name, more in rising.items()}
        samples.append(replace(FIRST, at_s=2.0 * row, pictures=10 * row, **now))
    return Soak(
        seconds=2000.0, pictures=10_000, samples=samples, back_s={"stream cut": [2.0, 9.0]}, ends=[], labels=90,
        labels_lost=0, taps=100, refused=8, unanswered=2, events=2000, images=9000, rounds=30, late_rounds=2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (soak(), ""),
        (soak(rss_kb=900, pss_kb=9000), ""),
        (soak(rss_kb=1500), "memory: 15"),
        (soak(rss_kb=8000), "memory: 90,"),
        (soak(ring_bytes=4096), "ring: 16,781,312 bytes"),
        (soak(files=9), "files: 32 at most first, 39 last"),
        (soak(threads=9), "threads: 9"),
        (soak(journal_bytes=2_000_000), ""),
        (soak(journal_bytes=20_000_000), "journal: 20,5"),
        (soak(log_bytes=5 << 20), "log: 9,"),
        (soak(ledger_bytes=1_000_000), "ledger: 100,1"),
        (replace(soak(), ends=[1]), "the client ended by itself: 1"),
        (replace(soak(), labels_lost=1), "labels: 1 of 90 lost"),
        (replace(soak(), labels=0), "labels: none"),
        (replace(soak(), late_rounds=0), "rounds: none"),
        (replace(soak(), back_s={"disk full": [3.0, ENDLESS]}), "disk full: inf s"),
        (replace(soak(), samples=soak().samples[:5]), "too few samples"),
    ],
)
def test_each_bound_finds_what_it_is_for(given: Soak, what: str) -> None:
    lines = broken(given, BOUNDS)
    assert any(line.startswith(what) for line in lines) if what else not lines
    assert Soak.read(given.json()) == given
    assert "labels confirmed, lost" in table(given, BOUNDS)


def test_what_grows_until_the_ring_is_full_is_no_leak() -> None:
    before = [
        replace(FIRST, pictures=10 * row - 3000, ring_bytes=RING * row // 300, rss_kb=60_000 + 100 * row)
        for row in range(300)
    ]
    flat = soak()
    assert not broken(replace(flat, samples=[*before, *flat.samples]), BOUNDS)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system does not tell what a process has")
def test_each_cause_of_growth_is_measured_alone() -> None:
    command = [sys.executable, "-m", "benchmarks.living.soak_causes"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    begins = ["a session that keeps, ", "a session that gives back, ", "journal", "32 visitors "]
    lines = done.stdout.splitlines()
    assert [line for line, begin in zip(lines, begins, strict=True) if not line.startswith(begin)] == [], done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_soak_is_whole(tmp_path: Path) -> None:
    """All of its troubles once in three minutes; memory is not judged, since the ring is never full."""
    why = "a soak needs root" if os.geteuid() else "" if shutil.which("mosquitto") else "no mosquitto"
    if why:
        pytest.fail(why) if os.environ.get("PROTOFLEET_CI") else pytest.skip(why)
    with rtsp_server():  # skips where there is none
        pass
    command = [sys.executable, "-m", "benchmarks.living.soak", "--minutes", "3", "--tap", "2", "--json"]
    done = subprocess.run([*command, tmp_path / "soak.json"], cwd=ROOT, capture_output=True, text=True)
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["pictures"] > 200, done.stdout + done.stderr
    assert (found["ends"], found["labels_lost"]) == ([], 0), done.stdout
    assert found["labels"] > 5
    assert found["late_rounds"] > 0
    assert max(one["ring_bytes"] for one in found["samples"]) <= RING
    troubles = {"stream cut", "stream cut for a moment", "broker away", "disk full", "disk full while a round comes"}
    assert set(found["back_s"]) == troubles
    assert all(back < 120.0 for each in found["back_s"].values() for back in each)

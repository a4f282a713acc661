"""Workers, leader, PostgreSQL and broker killed once each, a leader stopped: nothing is lost, doubled or hung."""

from __future__ import annotations

import subprocess
import sys

import pytest
from brokers import require_mosquitto
from commands import ROOT
from postgres_server import need_postgres

pytestmark = pytest.mark.slow


def killed(*more: str) -> str:
    """What is said of one kill of each kind."""
    need_postgres()
    require_mosquitto()
    command = [sys.executable, "benchmarks/worker_kills.py", "--runs", "5", "--devices", "5", *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 hung" in done.stdout
    return done.stdout


def test_whatever_is_killed_the_sums_are_those_of_one_aggregator() -> None:
    said = killed()
    assert "0 doubled, 0 other bytes" in said
    assert "0 lost, 0 rejected, 0 sums unlike one aggregator's" in said


def test_whatever_is_killed_sums_that_stand_are_those_of_one_aggregator() -> None:
    said = killed("--standing")
    assert "5 totals compared, 0 unlike one aggregator's" in said
    assert "0 lost, 0 other bytes, 0 rejected, 0 overtaken" in said

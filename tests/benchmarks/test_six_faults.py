"""The drill of six faults, looked at through Chromium (`benchmarks/living/six_faults.py --check`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from browser import chromium

from benchmarks.living.faulty_fleet import FAULTS, needs
from benchmarks.living.six_faults import CAUSES
from protofleet.aggregator.overview.fleet_state import _REASONS

ROOT = Path(__file__).parents[2]


def test_each_fault_has_a_cause_that_the_page_knows() -> None:
    assert set(CAUSES) == set(FAULTS)
    assert set(CAUSES.values()) <= set(_REASONS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_page_names_each_of_six_faults_and_recovers(tmp_path: Path) -> None:
    if why := needs():
        pytest.fail(why) if os.environ.get("PROTOFLEET_CI") else pytest.skip(why)
    with chromium():  # skips where there is none
        pass
    assert shutil.which("mount")
    command = [sys.executable, "-m", "benchmarks.living.six_faults", "--check", "--json", tmp_path / "found.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert {each["fault"] for each in found["faults"]} == set(FAULTS)
    assert all(each["says"].startswith(f"{each['device']}: ") for each in found["faults"])

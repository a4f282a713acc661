"""A measurement while other processes are busy is refused, or marked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protofleet.cli import main
from protofleet.hw_profiles.devices.load import BUSY, Load, Watch, check_idle
from protofleet.hw_profiles.devices.measure import best_run, read_measurement

MakeBundle = Callable[..., Path]


@pytest.fixture
def busy() -> Iterator[None]:
    """As many processes that do nothing but count as there are processors."""
    count = len(os.sched_getaffinity(0))
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    time.sleep(0.3)
    yield
    for process in running:
        process.kill()
        process.wait()


@pytest.mark.usefixtures("busy")
def test_a_busy_machine_is_refused_and_a_result_is_marked(
    mnist_like_bundle: MakeBundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, out, page = str(mnist_like_bundle()), tmp_path / "m.json", tmp_path / "m.html"
    args = ["profile", bundle, "--measure", "--seconds", "0.3", "--threads", "1", "--json", str(out)]
    assert main(args) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --measure, expected other processes that take at most 0.2 of a processor, got ")
    assert "--under-load" in error
    assert error.count("\n") == 1
    assert not out.exists()

    assert main([*args, "--under-load", "--samples", "70", "--html", str(page)]) == 0
    assert "measured under load, 2 of 2 runs: expected other processes to take at most 0.2" in capsys.readouterr().out
    record = read_measurement(out)
    for run in record["runs"]:
        assert run["under_load"] is True
        assert run["other_processors"] > BUSY
        assert run["cpu_ms"] > 0
    assert record["status_metrics"]["profile_inference_under_load"] == 1.0
    predicted = {line["phase"]: line["predicted_ms"] for line in json.loads(out.read_text())["comparison"]}
    assert record["status_metrics"]["profile_inference_predicted_ms"] == predicted["inference"] > 0
    assert record["status_metrics"]["profile_train_step_predicted_ms"] == predicted["training_step"] > 0
    memory = json.loads(out.read_text())["devices"][0]["memory"]
    told = {name: value for name, value in record["status_metrics"].items() if name.startswith("profile_memory_")}
    assert told == {
        "profile_memory_predicted_bytes": memory["peak_bytes"],
        "profile_memory_at_most_bytes": memory["peak_bytes_at_most"],
        "profile_memory_samples": 70,
    }
    assert 20e6 < told["profile_memory_predicted_bytes"] < told["profile_memory_at_most_bytes"]
    assert "UNDER LOAD" in page.read_text()


def test_our_own_work_is_not_others() -> None:
    watch, until = Watch(), time.process_time() + 0.3
    while time.process_time() < until:
        pass
    load = watch.load()
    assert load.own_s >= 0.3
    assert load.others is not None
    assert load.others < len(os.sched_getaffinity(0))
    assert Load(1.0, BUSY + 0.1, 1.0).busy
    assert not Load(1.0, BUSY - 0.1, 1.0).busy
    assert Load(None, None, 1.0).busy is None


def test_a_system_that_tells_nothing_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protofleet.hw_profiles.devices.load._STAT", tmp_path / "none")
    check_idle(0.01)
    assert Watch().load().busy is None


def test_a_run_that_was_not_under_load_comes_first() -> None:
    runs = [
        {"phase": "inference", "median_ms": 3.0, "under_load": True},
        {"phase": "inference", "median_ms": 5.0, "under_load": False},
    ]
    assert best_run({"runs": runs}, "inference") == runs[1]
    assert best_run(json.loads(json.dumps({"runs": runs[:1]})), "inference") == runs[0]
    old = [{"phase": "inference", "median_ms": 4.0}]  # a record of before there was a watch
    assert best_run({"runs": old}, "inference") == old[0]

"""Checkpoints: an interrupted run goes on and gives what an uninterrupted one gives, bit for bit."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from commands import run
from lab_samples import shipped

from protofleet.contract.errors import StoreError, UsageError
from protofleet.lab.data.partition import Partition
from protofleet.lab.engine.checkpoint import Checkpoint
from protofleet.lab.engine.deployed import Course, RoundRecord
from protofleet.lab.engine.experiment import Experiment, run_experiment
from protofleet.lab.engine.run_averaging import Measures
from protofleet.lab.workers.engines import open_workers
from protofleet.lab.workers.workers import Workers


@pytest.fixture(autouse=True)
def _after_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protofleet.lab.engine.checkpoint._EVERY_S", 0)
    monkeypatch.setattr("protofleet.lab.engine.checkpoint._SHARE", 0)


def _experiment(method: str, **hyper: object) -> Experiment:
    return Experiment(
        method,
        "fashion_mnist_subset",
        Partition("dirichlet", 4, alpha=0.5, only=200),
        Course(rounds=4, calibrate=method not in ("fesem", "local"), fraction=0.8, evaluate_every=3),
        "fedproto_mnist",
        16,
        test_samples=80,
        local_test=0.2,
        measures=Measures(personal=("fit",)),
        hyper=hyper,
    )


def _run(
    experiment: Experiment,
    checkpoint: Checkpoint | None,
    stop_after: int | None = None,
    workers: Workers | None = None,
) -> list[RoundRecord]:
    shown: list[RoundRecord] = []

    def on_round(record: RoundRecord) -> None:
        shown.append(record)
        if len(shown) == stop_after:
            raise KeyboardInterrupt

    records = run_experiment(
        experiment,
        data=shipped(),
        on_round=on_round,
        on_device=lambda n, t: None,
        on_text=lambda text: None,
        checkpoint=checkpoint,
        workers=workers,
    )
    assert [record.as_json() for record in shown] == [record.as_json() for record in records]
    return records


@pytest.mark.parametrize("method", ["fedproto", "local", "fedavg"])
def test_a_run_that_was_stopped_goes_on_in_processes(tmp_path: Path, method: str) -> None:
    """Whoever takes a device's turn knows what the interrupted run had come to."""
    experiment, path = _experiment(method), tmp_path / "run.checkpoint"
    whole = [record.as_json() for record in _run(experiment, None)]
    with pytest.raises(KeyboardInterrupt):
        _run(experiment, Checkpoint(path, "it"), stop_after=2)
    with open_workers("processes", 2) as workers:
        resumed = _run(experiment, Checkpoint(path, "it"), workers=workers)
    assert [record.as_json() for record in resumed] == whole


@pytest.mark.parametrize(
    ("method", "hyper"),
    [
        ("fedproto", {}),
        pytest.param("fedhp", {}, marks=pytest.mark.slow),
        pytest.param("fedhkd", {"noise": 1.0}, marks=pytest.mark.slow),
        pytest.param("local", {}, marks=pytest.mark.slow),
        ("fedavg", {"base": "fedadam", "server_lr": 0.01}),
        ("fedper", {}),
        ("fednh", {}),
        ("fesem", {"clusters": 2}),
        ("fedpr-averaged", {}),
        ("fedhkd-averaged", {"noise": 1.0}),
        pytest.param("spherefed", {}, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_stopped_gives_what_a_whole_one_gives(tmp_path: Path, method: str, hyper: dict) -> None:
    experiment = _experiment(method, **hyper)
    whole = [record.as_json() for record in _run(experiment, None)]
    path = tmp_path / "run.checkpoint"
    with pytest.raises(KeyboardInterrupt):
        _run(experiment, Checkpoint(path, "it"), stop_after=2)
    assert path.exists()
    calls: list[int] = []
    resumed = run_experiment(
        experiment,
        data=shipped(),
        on_round=lambda record: None,
        on_device=lambda number, turn: calls.append(number),
        on_text=lambda text: None,
        checkpoint=Checkpoint(path, "it"),
    )
    assert [record.as_json() for record in resumed] == whole
    assert min(calls) == 3, "rounds that were kept must not be trained again"
    assert not path.exists()


def test_another_runs_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.checkpoint"
    with pytest.raises(KeyboardInterrupt):
        _run(_experiment("fedavg"), Checkpoint(path, "it"), stop_after=2)
    before = path.read_bytes()
    with pytest.raises(UsageError, match="expected a checkpoint of this very run, got one of other settings"):
        _run(_experiment("fedavg"), Checkpoint(path, "another"))
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04 torn"])
def test_what_is_no_checkpoint_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.checkpoint"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="expected a checkpoint of this very run"):
        Checkpoint(path, "it").read()


def test_a_file_that_would_run_something_is_not_read(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    torch.save({"schema": "protofleet.checkpoint/1", "key": Evil()}, tmp_path / "run.checkpoint")
    with pytest.raises(UsageError, match="expected a checkpoint"):
        Checkpoint(tmp_path / "run.checkpoint", "it").read()
    assert not (tmp_path / "ran").exists()


def _full(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_refuses_leaves_the_file_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.checkpoint"
    Checkpoint(path, "it").keep([], lambda: {"a": 1})
    monkeypatch.setattr("protofleet.contract.files.atomic_files.os.fsync", _full)
    with pytest.raises(StoreError, match=r"expected a file that can be written, got .*[Nn]o space left"):
        Checkpoint(path, "it").keep([], lambda: {"a": 2})
    kept = Checkpoint(path, "it").read()
    assert kept is not None
    assert kept.state == {"a": 1}


def test_writes_are_rare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protofleet.lab.engine.checkpoint._EVERY_S", 3600)
    checkpoint, calls = Checkpoint(tmp_path / "run.checkpoint", "it"), []
    for _ in range(5):
        checkpoint.keep([], lambda: calls.append(1) or {})
    assert not calls


def test_the_command_goes_on_after_a_kill(tmp_path: Path) -> None:
    """kill -9 in the middle, the same command again: the lines are those of one whole run."""
    arguments = ["lab", "run", "--jobs", "1", "--method", "fedavg", "--backbone", "fedproto_mnist", "--clients", "3"]
    arguments += ["--rounds", "15", "--samples", "120", "--evaluate-every", "15", "--batch", "16"]
    eager = (
        "from protofleet.lab.engine import checkpoint; checkpoint._EVERY_S = 0; from protofleet.cli import main; main()"
    )
    kept, cut, whole = (tmp_path / name for name in ("run.checkpoint", "cut.jsonl", "whole.jsonl"))
    assert run(*arguments, "--json", whole).returncode == 0
    more = ("--json", str(cut), "--checkpoint", str(kept))
    killed = subprocess.Popen([sys.executable, "-c", eager, *arguments, *more], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not kept.exists() and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL, "it was through before it could be killed"
    assert len(cut.read_text().splitlines()) < 16
    assert run(*arguments, *more).returncode == 0
    assert cut.read_text() == whole.read_text()
    assert not kept.exists()

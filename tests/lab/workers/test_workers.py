"""The lab on several processes: the same bits as on one, whoever is killed, and nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import lab_tasks
import numpy as np
import pytest
import torch
from lab_samples import shipped, small_directory

import protofleet
from protofleet.cli import main
from protofleet.contract.errors import DivergedError, UsageError, WorkerError
from protofleet.lab.algorithms import ALGORITHMS
from protofleet.lab.data.partition import Partition
from protofleet.lab.engine.deployed import Course, RoundRecord
from protofleet.lab.engine.experiment import Experiment, run_experiment
from protofleet.lab.engine.run_averaging import Measures
from protofleet.lab.paper_tables.config import read_table
from protofleet.lab.paper_tables.runner import Order, Progress, run_table
from protofleet.lab.workers.engines import open_workers
from protofleet.lab.workers.shared_arrays import Shared, pack, unpack
from protofleet.lab.workers.workers import OneProcess, Workers, in_order, limited_threads

HYPER = {"fedadam": {"server_lr": 0.01}, "fesem": {"clusters": 2}, "fedhkd-averaged": {"noise": 1.0}}
TABLE = """
title = "Three runs"
source = "nobody"
data = "fashion_mnist_subset"
metric = "all/head"
seeds = 3
columns = [{ name = "IID" }]
[settings]
method = "fedavg"
backbone = "fedproto_mnist"
batch = 16
rounds = 2
clients = 3
partition = "shots"
shots = 5
test_samples = 20
[[rows]]
name = "FedAvg"
"""


@pytest.fixture(scope="module")
def two() -> Iterator[Workers]:
    with open_workers("processes", 2) as workers:
        yield workers


def _experiment(method: str) -> Experiment:
    calibrated = method not in ("fesem", "local")
    return Experiment(
        method,
        "fashion_mnist_subset",
        Partition("dirichlet", 4, alpha=0.5, only=120),
        Course(rounds=2, calibrate=calibrated, fraction=0.8),
        "fedproto_mnist",
        16,
        test_samples=40,
        local_test=0.2,
        measures=Measures(personal=("fit", "head-sgd", "head-ffc") if method in ALGORITHMS else ("fit",)),
        hyper=HYPER.get(method, {}),
    )


def _records(method: str, workers: Workers) -> list[RoundRecord]:
    told: list[tuple[int, int]] = []
    records = run_experiment(
        _experiment(method),
        data=shipped(),
        on_round=lambda record: None,
        on_device=lambda number, turn: told.append((number, turn)),
        on_text=lambda text: None,
        workers=workers,
    )
    assert told == sorted(told), "progress goes forward"
    return records


_BY_DEFAULT = ("fedproto", "fedhkd-averaged", "fednh", "scaffold")
_SLOW = [name for name in ("fedhp", "fedhkd", "local", *ALGORITHMS) if name not in _BY_DEFAULT]


@pytest.mark.parametrize("method", [*_BY_DEFAULT, *(pytest.param(name, marks=pytest.mark.slow) for name in _SLOW)])
def test_two_processes_give_what_one_gives(method: str, two: Workers) -> None:
    alone = [record.as_json() for record in _records(method, OneProcess())]
    assert [record.as_json() for record in _records(method, two)] == alone


def test_results_come_in_the_items_order_and_as_they_are_done(two: Workers) -> None:
    with two.at_site(None) as at:
        assert next(place for place, _ in at.as_done(lab_tasks.slow_first, None, range(5))) != 0
        done: list[int] = []
        assert list(in_order(at, lab_tasks.slow_first, None, range(5), done.append)) == list(range(5))
        assert done == list(range(6))


def test_a_killed_workers_task_is_computed_again(two: Workers, tmp_path: Path) -> None:
    with two.at_site(tmp_path) as at:
        assert list(in_order(at, lab_tasks.die_once, None, range(9))) == [n * n for n in range(9)]
    assert (tmp_path / "died").exists()


@pytest.mark.slow
def test_workers_that_are_lost_now_and_then_end_nothing(two: Workers, tmp_path: Path) -> None:
    with two.at_site(tmp_path) as at:
        assert list(in_order(at, lab_tasks.die_now_and_then, None, range(9))) == list(range(9))


def test_a_task_that_kills_its_worker_each_time_is_one_line(two: Workers) -> None:
    with two.at_site(None) as at, pytest.raises(WorkerError, match=r"killed 3 times in a row, try fewer --jobs"):
        list(in_order(at, lab_tasks.die, None, range(3)))
    with two.at_site("they are there again") as at:
        assert list(in_order(at, lab_tasks.echo, 1, [2])) == [("they are there again", 1, 2)]


def test_what_a_task_raises_is_raised_here_for_the_first_item(two: Workers) -> None:
    with two.at_site(None) as at, pytest.raises(DivergedError, match="got 1, try a smaller lr"):
        list(in_order(at, lab_tasks.diverge, None, [0, 1]))


def test_what_cannot_be_sent_is_one_line(two: Workers) -> None:
    with pytest.raises(UsageError, match=r"--jobs above 1, expected a network .* try --jobs 1"), two.at_site(lambda: 0):
        pass


def test_data_is_in_memory_once(two: Workers) -> None:
    site = np.arange(16 << 20, dtype=np.float32)  # 64 MiB
    with two.at_site(site) as at:
        found = list(in_order(at, lab_tasks.private_bytes, None, range(4)))
    assert len({pid for pid, _, _ in found}) == 2
    assert {total for _, _, total in found} == {float(site.sum())}
    assert max(private for _, private, _ in found) < site.nbytes


def test_tensors_and_arrays_travel_as_they_are() -> None:
    value = {"t": torch.arange(6.0).reshape(2, 3), "p": torch.nn.Parameter(torch.ones(2)), "a": np.arange(3)}
    with Shared(value) as shared:
        for found in (shared.handle.load(), unpack(pack(value))):
            assert torch.equal(found["t"], value["t"])
            assert isinstance(found["p"], torch.nn.Parameter)
            found["a"] += 1  # its own, from now on
            assert found["a"].tolist() == [1, 2, 3]
        assert shared.handle.load()["a"].tolist() == [0, 1, 2]


def test_threads_are_as_before_afterwards() -> None:
    before = torch.get_num_threads()
    with limited_threads(3):
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == before


def _pids(folder: Path, many: int) -> list[int]:
    until = time.monotonic() + 60
    while len(found := [int(path.name) for path in folder.iterdir()]) < many:
        assert time.monotonic() < until
        time.sleep(0.02)
    return found


def _gone(pids: list[int]) -> bool:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.02)
    return False


def test_nobody_is_left_where_the_command_is_interrupted(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), open_workers("processes", 2) as workers, workers.at_site(tmp_path) as at:
        for _ in at.as_done(lab_tasks.sleep, None, range(2), on_wait=lambda: _stop(tmp_path)):
            pass
    assert _gone(_pids(tmp_path, 2))


def _stop(folder: Path) -> None:
    if len(list(folder.iterdir())) == 2:
        raise KeyboardInterrupt


def test_nobody_is_left_where_the_command_is_killed(tmp_path: Path) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[2] / "support")!r})
from pathlib import Path
import lab_tasks
from protofleet.lab.workers import processes
processes._LOADED = ["torch"]
from protofleet.lab.workers.engines import open_workers
with open_workers("processes", 2) as workers, workers.at_site(Path({str(tmp_path)!r})) as at:
    list(at.as_done(lab_tasks.sleep, None, range(2)))
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    pids = _pids(tmp_path, 2)
    parent.send_signal(signal.SIGKILL)
    assert parent.wait() == -signal.SIGKILL
    assert _gone(pids)


def _table(tmp_path: Path) -> Order:
    (path := tmp_path / "three.toml").write_text(TABLE)
    return Order(read_table(str(path))[1], tmp_path / "one", str(small_directory(tmp_path / "data", 20, 5)))


@pytest.mark.slow
def test_a_tables_runs_in_two_processes_are_those_of_one(tmp_path: Path, two: Workers) -> None:
    order = _table(tmp_path)
    quiet = Progress(lambda done, of, words: None, lambda words, record: None, lambda text: None)
    alone = run_table(order, quiet)
    told: list[tuple[str, int]] = []
    begun: list[str] = []
    progress = Progress(
        lambda done, of, words: begun.append(words),
        lambda words, record: told.append((words, record.round)),
        lambda text: None,
    )
    cells = run_table(replace(order, out=tmp_path / "two"), progress, two)
    assert [cell.values for cell in cells] == [cell.values for cell in alone]
    assert [cell.curve for cell in cells] == [cell.curve for cell in alone]
    assert sorted(told) == [(f"FedAvg, IID, seed {seed}", number) for seed in range(3) for number in (1, 2)]
    assert begun[0] == "FedAvg, IID, seed 0"


def test_a_lost_run_goes_on_from_its_checkpoint(tmp_path: Path, two: Workers) -> None:
    """kill -9 of a worker in the middle of its run: every round is told once, and the cells are the same."""
    order = _table(tmp_path)
    quiet = Progress(lambda done, of, words: None, lambda words, record: None, lambda text: None)
    alone = run_table(order, quiet)
    told: list[tuple[str, int]] = []

    def on_round(words: str, record: RoundRecord) -> None:
        if not told:
            for child in _children(os.getpid()):
                os.kill(child, signal.SIGKILL)
        told.append((words, record.round))

    progress = Progress(lambda done, of, words: None, on_round, lambda text: None)
    cells = run_table(replace(order, out=tmp_path / "two"), progress, two)
    assert [cell.values for cell in cells] == [cell.values for cell in alone]
    assert len(told) == len(set(told)) == 6


def _children(parent: int) -> list[int]:
    """The workers of this process: those that its fork server has forked."""
    found = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in found.splitlines()[1:]]
    servers = {pid for pid, above, args in rows if int(above) == parent and "forkserver" in args}
    return [int(pid) for pid, above, _ in rows if above in servers]


COMMAND = ["lab", "run", "--method", "fedavg", "--backbone", "fedproto_mnist", "--samples", "300", "--clients", "6"]


@pytest.mark.slow
def test_the_command_writes_the_same_with_two_processes(tmp_path: Path) -> None:
    for jobs in ("1", "2"):
        assert main([*COMMAND, "--rounds", "2", "--jobs", jobs, "--json", str(tmp_path / jobs), "--quiet"]) == 0
    assert (tmp_path / "1").read_text() == (tmp_path / "2").read_text()


@pytest.mark.slow
def test_a_call_from_a_program_gives_the_same_with_two_processes() -> None:
    found = [protofleet.simulate("fedavg", rounds=1, samples=200, backbone="fedproto_mnist", jobs=n) for n in (1, 2)]
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [1, 3, 6, 10, 15, 25])
def test_ctrl_c_at_any_moment_is_one_line_and_leaves_nobody(after_s: float) -> None:
    """To all of the terminal's processes, as a terminal sends it."""
    words = [sys.executable, "-m", "protofleet", *COMMAND, "--rounds", "9999", "--jobs", "2", "--quiet"]
    command = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True)
    time.sleep(after_s)
    os.killpg(command.pid, signal.SIGINT)
    said = command.communicate(timeout=60)[1]
    assert command.returncode == 130, said
    assert len(said.splitlines()) <= 1, said
    assert _gone(_session(command.pid))


def _session(leader: int) -> list[int]:
    found = subprocess.run(["ps", "-eo", "pid,sid"], capture_output=True, text=True, check=True).stdout
    return [int(pid) for pid, session in map(str.split, found.splitlines()[1:]) if int(session) == leader]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--engine", "threads"], "--engine, expected processes or ray, got threads"),
        (["--jobs", "0"], "--jobs, expected 1 or more, got 0"),
        (["--address", "127.0.0.1:1"], "--address, expected --engine ray beside it, got none"),
    ],
)
def test_wrong_options_are_one_line(options: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "run", "--method", "fedavg", *options]) == 2
    assert line in capsys.readouterr().err

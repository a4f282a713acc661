"""`protofleet demo` as a user runs it: real processes, a real broker, real images; and nothing left however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import one_error_line, run
from lab_samples import LABELS, small_directory
from page_checks import check_page

from contract.methods import METHODS
from lab.data.datasets import load_dataset
from lab.demo.report import render_report
from lab.demo.run import Demo

Ran = Callable[[str], tuple[dict[str, Any], str, str, Path]]


def _start(out: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "protofleet", "demo", "--out", str(out), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def _descendants(demo: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(demo.pid).children(recursive=True)


def _wait(holds: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def _gone(processes: list[psutil.Process]) -> bool:
    return not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)


Finished = tuple[Path, str, list[psutil.Process]]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_directory(tmp_path_factory.mktemp("data") / "small")


@pytest.fixture(scope="module")
def finished(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One whole demo, the processes it had, and what it printed."""
    return _finished(tmp_path_factory.mktemp("demo") / "out", "--clients", "3", "--rounds", "2", "--data", str(small))


def _finished(out: Path, *options: str) -> Finished:
    demo = _start(out, *options)
    seen: dict[int, psutil.Process] = {}
    try:
        while demo.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                seen |= {each.pid: each for each in _descendants(demo)}
            time.sleep(0.5)
        printed, errors = demo.communicate(timeout=60)
    finally:
        demo.kill()
    assert demo.returncode == 0, errors
    return out, printed, list(seen.values())


@pytest.fixture(scope="module")
def summary(finished: Finished) -> dict[str, Any]:
    return _summary(finished[0])


def _summary(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "summary.json").read_text(encoding="utf-8")))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_as_the_readme_starts_it_the_fleet_beats_its_devices(tmp_path: Path) -> None:
    """No option but the place: the shipped images, five devices, five rounds."""
    summary = _summary(_finished(tmp_path / "out")[0])
    assert (summary["dataset"], summary["method"]) == ("fashion_mnist_subset", "fedproto")
    assert (summary["clients"], summary["rounds"]) == (5, 5)
    assert summary["contributions"] == {"sent": 30, "committed": 30, "duplicates_refused": 0}
    over_all = summary["accuracy"]["all_classes"]
    assert over_all["local_only"] < min(over_all["federated"], over_all["ffc"])


def test_it_takes_the_shipped_images_by_default() -> None:
    assert set(load_dataset(Demo().data).labels) == set(LABELS)


def test_summary_has_the_keys_that_are_contract(summary: dict[str, Any]) -> None:
    assert summary["dataset"] == "small"
    assert (summary["method"], summary["clients"], summary["rounds"]) == ("fedproto", 3, 2)
    assert set(summary["accuracy"]["own_classes"]) == {"local_only", "federated", "ffc"}
    assert set(summary["accuracy"]["all_classes"]) == {"local_only", "federated", "ffc", "pooled_ridge"}
    for part in summary["accuracy"].values():
        assert all(0.3 < value <= 1.0 for value in part.values())
    for key in ("uplink_bytes_per_device_round", "fedavg_bytes_per_device_round", "device_peak_rss_bytes", "seconds"):
        assert summary[key] > 0


def test_everything_sent_was_committed_once(summary: dict[str, Any]) -> None:
    assert summary["contributions"] == {"sent": 9, "committed": 9, "duplicates_refused": 0}


def test_ffc_over_mqtt_is_the_pooled_solution(summary: dict[str, Any]) -> None:
    assert summary["ffc_vs_pooled_ridge"]["relative_error"] <= 1e-6
    assert summary["ffc_vs_pooled_ridge"]["identical_predictions"] is True
    assert summary["accuracy"]["all_classes"]["ffc"] == summary["accuracy"]["all_classes"]["pooled_ridge"]


def test_a_round_costs_less_than_a_hundredth_of_fedavg(summary: dict[str, Any]) -> None:
    assert summary["uplink_bytes_per_device_round"] <= 0.01 * summary["fedavg_bytes_per_device_round"]
    assert summary["message_overhead_bytes"] <= 60


def test_no_device_has_all_classes(summary: dict[str, Any]) -> None:
    assert all(min(device["samples_per_class"]) == 0 for device in summary["devices"])


def test_it_used_a_process_for_each_part_and_left_none(finished: Finished) -> None:
    out, _, processes = finished
    assert len(processes) >= 5  # broker, aggregator, three devices
    assert _gone(processes)
    assert {log.stem for log in (out / "logs").iterdir()} == {
        "broker",
        "aggregator",
        "device-1",
        "device-2",
        "device-3",
    }


def test_it_prints_one_table(finished: Finished) -> None:
    printed = finished[1]
    for words in ("local only", "FedProto", "FFC", "pooled ridge", "9 contributions sent, 9 committed", "report.html"):
        assert words in printed
    assert "Traceback" not in printed


def test_the_report_needs_nothing_from_outside(finished: Finished) -> None:
    page = (finished[0] / "report.html").read_text(encoding="utf-8")
    check_page(page)
    assert page.count("<svg") == 7


def test_the_report_escapes_what_a_data_set_calls_its_classes(summary: dict[str, Any]) -> None:
    hostile = {**summary, "labels": ["<script>alert(1)</script>", *summary["labels"][1:]], "dataset": "<img src=x>"}
    page = render_report(hostile)
    assert "<script" not in page
    assert "<img" not in page


# ── the other methods ───────────────────────────────────────────────────────────────────────────────────────────────


def _small_demo(small: Path, out: Path, *options: str) -> tuple[dict[str, Any], str, str]:
    """Two devices, a small network, few images: the summary, what was printed, and the page."""
    done = run("demo", "--out", out, "--clients", 2, "--data", small, "--backbone", "fedproto_mnist", *options)
    assert done.returncode == 0, done.stderr
    return _summary(out), done.stdout, (out / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def ran(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A small demo of one round by method: once for each, however many tests look at it."""

    @cache
    def of(name: str) -> tuple[dict[str, Any], str, str, Path]:
        out = tmp_path_factory.mktemp(name)
        return *_small_demo(small, out, "--method", name, "--rounds", "1"), out

    return of


@pytest.mark.parametrize(
    "name",
    ["fedhp", *(pytest.param(n, marks=pytest.mark.slow) for n in ("fedpr", "fedhkd")), "spherefed"],
)
def test_every_method_of_the_wire(name: str, ran: Ran) -> None:
    (found, printed, page, out), row = ran(name), METHODS[name]
    assert (found["dataset"], found["method"], found["rounds"]) == ("small", name, 1)
    assert found["contributions"] == {"sent": 4, "committed": 4, "duplicates_refused": 0}
    assert found["ffc_vs_pooled_ridge"]["identical_predictions"] is True
    assert row.title in printed
    assert f"{row.title} round" in page

    # `federated` is the method's own inference in its own round, and not FFC's.
    history = [json.loads(line) for line in (out / "devices/device-1/state/history.jsonl").open()]
    assert [line["method"] for line in history] == [name, "ffc"]
    way = row.way
    for part in ("own_classes", "all_classes"):
        device = found["devices"][0]["accuracy"][part]
        assert device["federated"] == history[0]["accuracy"][part][way]
        assert device["ffc"] == history[1]["accuracy"][part]["linear"]
    assert all(device["curve"][0]["loss"] > 0 for device in found["devices"])
    assert all(0.15 < value <= 1.0 for part in found["accuracy"].values() for value in part.values())


def test_spherefeds_rounds_cost_next_to_nothing_and_are_local_until_ffc(
    ran: Ran,
) -> None:
    found, printed, page, _ = ran("spherefed")
    assert found["uplink_bytes_per_device_round"] < 100
    for part in found["accuracy"].values():
        assert part["federated"] == part["local_only"]  # the same training on the same batches: nothing comes back
    assert 0.15 < found["other_answers"]["personal"]["own_classes"] <= 1.0
    assert "SphereFed, personal head" in printed
    assert "SphereFed, personal head" in page


def test_ffc_alone_only_calibrates(small: Path, tmp_path: Path) -> None:
    found, _, page = _small_demo(small, tmp_path, "--method", "ffc")
    assert (found["method"], found["rounds"]) == ("ffc", 1)
    assert found["contributions"]["sent"] == found["contributions"]["committed"] == 2
    assert found["ffc_vs_pooled_ridge"]["identical_predictions"] is True
    assert found["accuracy"]["all_classes"]["federated"] == found["accuracy"]["all_classes"]["ffc"]
    assert "round by round" not in page


def test_several_backbones_are_one_fleet_without_ffc(small: Path, tmp_path: Path) -> None:
    names = ["fedproto_mnist", "fedproto_mnist_18"]
    found, printed, page = _small_demo(small, tmp_path, "--rounds", "1", "--backbone", ",".join(names))
    assert [(each["name"], each["devices"]) for each in found["backbones"]] == [(names[0], 1), (names[1], 1)]
    assert {path.name for path in tmp_path.glob("*.bundle")} == {"fleet-1.bundle", "fleet-2.bundle"}
    ran = {json.loads((tmp_path / f"devices/device-{n}/client.json").read_text())["bundle"] for n in (1, 2)}
    assert ran == {each["bundle"] for each in found["backbones"]}
    assert found["contributions"] == {"sent": 2, "committed": 2, "duplicates_refused": 0}
    assert found["ffc_vs_pooled_ridge"] is None
    assert found["ffc_uplink_bytes_per_device"] is None
    assert found["accuracy"]["all_classes"]["pooled_ridge"] is None
    for part in found["accuracy"].values():
        assert part["ffc"] is None
        assert 0.15 < part["federated"] <= 1.0
    assert "pooled ridge" not in printed + page
    assert "FFC, linear head" not in printed


# ── ending badly ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def running(small: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A demo in the middle of its rounds."""
    few = ("--clients", "2", "--data", str(small), "--backbone", "fedproto_mnist")
    demo = _start(tmp_path, *few, "--rounds", "500")
    history = tmp_path / "devices" / "device-1" / "state" / "history.jsonl"
    try:
        _wait(lambda: history.exists() or demo.poll() is not None, 90, "no round was done")
        assert demo.poll() is None, demo.communicate()[1]
        yield demo, tmp_path
    finally:
        demo.kill()
        demo.communicate()


def test_ctrl_c_leaves_no_process_and_one_line(running: tuple[subprocess.Popen[str], Path]) -> None:
    demo, _ = running
    processes = _descendants(demo)
    assert len(processes) >= 4
    demo.send_signal(signal.SIGINT)
    _, errors = demo.communicate(timeout=20)
    assert demo.returncode == 130
    assert errors == "error: interrupted, every process it started is ended\n"
    assert _gone(processes)


def test_kill_9_of_the_demo_leaves_no_process(running: tuple[subprocess.Popen[str], Path]) -> None:
    demo, _ = running
    processes = _descendants(demo)
    demo.kill()
    _wait(lambda: _gone(processes), 10, "a process outlived the demo")


def test_a_device_that_dies_ends_the_demo_in_one_line(running: tuple[subprocess.Popen[str], Path]) -> None:
    demo, out = running
    processes = _descendants(demo)
    (device,) = [each for each in processes if "device-2" in each.cmdline()]
    device.kill()
    _, errors = demo.communicate(timeout=20)
    assert demo.returncode == 1
    assert errors.count("\n") == 1
    assert errors.startswith("error: device-2 ended early (SIGKILL)")
    assert str(out / "logs" / "device-2.log") in errors
    assert _gone(processes)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--clients", "0"), "error: --clients, expected 1 to 200, got 0"),
        (("--rounds", "0"), "error: --rounds, expected 1 to 10000, got 0"),
        (("--method", "fedprot"), "error: unknown method, expected a known method, got fedprot, try one of fedproto"),
        (
            ("--data", "./nowhere"),
            "error: no data at ./nowhere, expected a folder of images, a .csv, a .npz or parquet",
        ),
        (("--backbone", "small_cn"), "error: --backbone, expected a known backbone or module:callable, got small_cn"),
        (("--port", "70000"), "error: --port, expected 0 to 65535, got 70000"),
        (
            ("--backbone", "fedproto_mnist,small_cnn"),
            "error: --backbone, expected backbones of one feature width, got fedproto_mnist 50, small_cnn 128",
        ),
        (
            ("--method", "spherefed", "--backbone", "fedproto_mnist,fedproto_mnist_18"),
            "error: --backbone, expected one for all devices",
        ),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(options: tuple[str, ...], line: str, tmp_path: Path) -> None:
    done = run("demo", "--out", tmp_path / "out", *options)
    assert done.returncode == 2
    assert one_error_line(done).startswith(line)


def test_an_output_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("demo", "--out", tmp_path / "file" / "out")
    assert done.returncode == 2
    assert one_error_line(done).startswith("error: --out ")


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run("demo", "--out", tmp_path, "--port", taken.getsockname()[1])
    assert done.returncode == 2
    assert one_error_line(done).startswith("error: --port, expected a free port")

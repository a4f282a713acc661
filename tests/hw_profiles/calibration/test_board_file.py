"""A board's device file: written, read on any machine, predicted from; refused where it is not what was measured."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from protofleet.cli import main
from protofleet.commands import calibrate
from protofleet.commands.calibrate import Measured, device_text
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.errors import UsageError
from protofleet.hw_profiles.calibration import fit_board
from protofleet.hw_profiles.calibration.amounts import AMOUNTS, amounts_of
from protofleet.hw_profiles.calibration.fit import datasheet_costs
from protofleet.hw_profiles.calibration.suite import cases
from protofleet.hw_profiles.devices.calibrated import FORMAT, calibration_text, parse_calibration
from protofleet.hw_profiles.devices.load import Load
from protofleet.hw_profiles.devices.schema import parse_devices
from protofleet.hw_profiles.latency.predict import predict
from protofleet.hw_profiles.workload.constant_folding import fold_weights
from protofleet.hw_profiles.workload.from_onnx import bundle_workloads, read_workload

MakeBundle = Callable[..., Path]
COSTS_MS = np.exp(datasheet_costs(2.0, 16.0, 20.0) + np.random.default_rng(0).normal(0.7, 0.5, len(AMOUNTS)))


@pytest.fixture(scope="module")
def board_text() -> str:
    """A file of this machine, as if its costs were `COSTS_MS`, and two threads twice as fast."""
    ms = np.array([float(case.amounts @ COSTS_MS) for case in cases()])
    return device_text("a board", Measured({1: list(ms), 2: list(ms / 2)}, 0.1, False, 60.0, 50.0, 20.0))[0]


def test_a_board_that_is_too_slow_for_all_graphs_is_fitted_to_those_it_measured() -> None:
    ms = np.array([float(case.amounts @ COSTS_MS) for case in cases()])
    ms[np.arange(len(ms)) % 3 == 0] = np.inf
    text, _ = device_text("slow", Measured({1: list(ms)}, 0.1, False, 270.0, None, 20.0))
    calibration = parse_devices(text, "here")[0].calibration
    assert calibration is not None
    assert sum(fit.graphs for fit in calibration.fits) == np.isfinite(ms).sum()
    assert all(fit.median < 0.05 for fit in calibration.fits)


def test_the_time_is_kept_from_the_first_graph_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of threads has its share; a kind of graph that was never measured is refused, not guessed."""
    taken: list[int] = []
    clock = iter(np.arange(0.0, 1e6, 1.0))
    monkeypatch.setattr(calibrate.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(calibrate, "_graph_ms", lambda case, threads, filler: taken.append(threads) or 1.0)
    measured = calibrate.measure_suite([1, 2], lambda line: None)
    assert taken.count(1) == pytest.approx(calibrate._BUDGET_S / 2, abs=2)
    assert taken.count(2) == pytest.approx(calibrate._BUDGET_S / 2, abs=2)
    assert 0 < np.isinf(measured.ms[1]).sum() < len(cases())
    monkeypatch.setattr(calibrate, "_BUDGET_S", 4.0)
    with pytest.raises(UsageError, match=r"--calibrate, expected graphs of \d+ kinds measured in 4 s, got \d kinds"):
        calibrate.measure_suite([1], lambda line: None)


@pytest.fixture
def board(board_text: str, tmp_path: Path) -> Path:
    path = tmp_path / "board.toml"
    path.write_text(board_text, encoding="utf-8")
    return path


def test_what_is_written_is_read(board_text: str) -> None:
    device = parse_devices(board_text, "here")[0]
    assert device.name == "a board"
    assert device.calibration is not None
    table = tomllib.loads(calibration_text(device.calibration))["calibration"]
    assert parse_calibration(table, "again") == device.calibration


def test_a_bundle_is_predicted_from_the_file(mnist_like_bundle: MakeBundle, board_text: str) -> None:
    forward, step = bundle_workloads(read_bundle(mnist_like_bundle()))
    assert step is not None
    device = parse_devices(board_text, "here")[0]
    for workload, training in ((fold_weights(forward), False), (step, True)):
        entry = predict(workload, device, threads="1", forward=forward if training else None)
        real = float(amounts_of(workload, training=training) @ COSTS_MS)
        assert entry.ms == pytest.approx(real, rel=0.15)  # from graphs without noise, prior and all
        assert entry.low_ms < entry.ms < entry.high_ms
        assert entry.layers_ms.sum() == pytest.approx(entry.ms)
        assert "small graphs measured on" in entry.basis
        assert predict(workload, device, threads="all").ms == pytest.approx(entry.ms / 2, rel=0.1)
    assert predict(forward, device, runtime="tflite").rows == 0  # other runtimes: by the data sheet, as ever


def test_the_command_reads_the_file_and_its_interval(
    mnist_like_bundle: MakeBundle, board: Path, tmp_path: Path
) -> None:
    out = tmp_path / "r.json"
    assert (
        main(["profile", str(mnist_like_bundle()), "--device", str(board), "--threads", "1", "--json", str(out)]) == 0
    )
    report = json.loads(out.read_text())
    assert [device["name"] for device in report["devices"]] == ["a board"]
    entry = report["devices"][0]["inference"][0]
    assert entry["low_ms"] < entry["latency_ms"] < entry["high_ms"]
    assert "each graph left out" in entry["error"]["text"]
    assert report["devices"][0]["training_step"]["variant"] == "1 thread, calibrated"


def test_an_operator_that_was_not_measured_is_named(mnist_like_bundle: MakeBundle, board_text: str) -> None:
    forward, _ = bundle_workloads(read_bundle(mnist_like_bundle()))
    device = parse_devices(board_text, "here")[0]
    assert predict(forward, device).support.status == "interpolated"
    strange = replace(forward, layers=tuple(replace(x, op="Gru") if x.conv else x for x in forward.layers))
    support = predict(strange, device).support
    assert support.status == "no ground"
    assert "operators that were not measured (Gru)" in support.reasons[-1]


@pytest.mark.parametrize(("times", "status"), [(1, "interpolated"), (3, "extrapolated"), (40, "no ground")])
def test_what_is_larger_than_all_graphs_is_no_interpolation(board_text: str, times: int, status: str) -> None:
    """The suite's largest graph of inference has 673 M multiply-accumulates."""
    device = parse_devices(board_text, "here")[0]
    side = 56
    weights = {f"w{i}": (128, 128, 3, 3) for i in range(times)}  # 462 M each
    nodes = [
        helper.make_node("Conv", [f"c{i}" if i else "x", f"w{i}"], [f"c{i + 1}"], f"c{i}", pads=[1] * 4)
        for i in range(times)
    ]
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 128, side, side])],
        [helper.make_tensor_value_info(f"c{times}", TensorProto.FLOAT, None)],
        [helper.make_tensor(n, TensorProto.FLOAT, s, np.zeros(s, np.float32)) for n, s in weights.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    support = predict(read_workload(model, batch=1), device).support
    assert support.status == status
    assert ("graphs that were measured have up to 673 M" in " ".join(support.reasons)) == (status != "interpolated")


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (f"format = {FORMAT}", "format = 99", f"calibration.format, expected {FORMAT}, got 99"),
        ("threads = 2", "threads = 3", "expected the numbers that were measured, got another digest"),
        ('part = "training"', 'part = "inference"', "expected what profile --calibrate writes"),
        ("[calibration.operators]", "[calibration.other]", "expected what profile --calibrate writes"),
    ],
)
def test_a_file_that_is_not_what_was_written_is_refused(
    old: str, new: str, line: str, mnist_like_bundle: MakeBundle, board: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    board.write_text(board.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    assert main(["profile", str(mnist_like_bundle()), "--device", str(board)]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


def test_a_cost_that_was_edited_is_refused(board_text: str) -> None:
    lines = board_text.splitlines()
    place = next(index for index, line in enumerate(lines) if line.startswith('"pointwise"'))
    lines[place] = '"pointwise" = 0.001'
    with pytest.raises(UsageError, match="another digest"):
        parse_devices("\n".join(lines), "here")


def test_another_boards_file_is_not_laid_beside_what_is_measured_here(
    mnist_like_bundle: MakeBundle, board: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = parse_devices(board.read_text(encoding="utf-8"), "here")[0]
    assert device.calibration is not None
    there = replace(device.calibration, board="another board")
    head = board.read_text(encoding="utf-8").split("[calibration]")[0]
    board.write_text(head + calibration_text(there), encoding="utf-8")
    args = ["profile", str(mnist_like_bundle()), "--device", str(board)]
    assert main([*args, "--measure", "--under-load"]) == 2
    error = capsys.readouterr().err
    assert "expected a file that was calibrated on this board" in error
    assert "got one of another board" in error
    assert error.count("\n") == 1
    assert main(args) == 0  # to predict it needs no such board


def test_a_place_that_cannot_be_written_is_said_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--calibrate", str(tmp_path / "none" / "b.toml")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --calibrate {tmp_path / 'none' / 'b.toml'}, expected a file that can be written")
    assert error.count("\n") == 1


def test_a_busy_machine_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protofleet.hw_profiles.devices.load.Watch.load", lambda watch: Load(3.0, 1.5, 0.0))
    out = tmp_path / "b.toml"
    assert main(["profile", "--calibrate", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "error: --calibrate, expected other processes that take at most 0.2 of a processor, got 1.50"
    )
    assert not out.exists()


def test_the_command_measures_and_writes_a_file_that_it_reads(
    mnist_like_bundle: MakeBundle, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every tenth graph, which takes seconds and not minutes."""
    some = cases()[::10]
    monkeypatch.setattr(calibrate, "cases", lambda: some)
    monkeypatch.setattr(fit_board, "cases", lambda: some)
    out = tmp_path / "this-board.toml"
    assert main(["profile", "--calibrate", str(out), "--threads", "1", "--under-load"]) == 0
    shown = capsys.readouterr().out
    assert "median error" in shown
    device = parse_devices(out.read_text(encoding="utf-8"), "here")[0]
    assert device.name == "this-board"
    assert device.calibration is not None
    assert device.calibration.runtime.startswith("onnxruntime ")
    assert {fit.graphs for fit in device.calibration.fits} == {
        sum(c.part == p for c in some) for p in ("inference", "training")
    }
    assert main(["profile", str(mnist_like_bundle()), "--device", str(out)]) == 0

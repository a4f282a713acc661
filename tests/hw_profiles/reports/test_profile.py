"""`protofleet profile`: predicted for a fleet, measured here, read back; what is wrong is said in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from page_checks import check_page

from protofleet.cli import main
from protofleet.commands.profile import _extrapolations
from protofleet.contract.errors import DataError
from protofleet.contract.extras import install_command
from protofleet.hw_profiles.devices.load import BUSY
from protofleet.hw_profiles.devices.measure import operator_times, read_measurement, time_runs
from protofleet.hw_profiles.devices.schema import load_devices

ROOT = Path(__file__).parents[3]
MakeBundle = Callable[..., Path]
# A board on which `import onnx` and `import torch` fail, as after a plain `pip install protofleet`.
_BASE_INSTALL = """
import importlib.machinery as m
find = m.PathFinder.find_spec
blocked = ("onnx", "torch", "torchvision", "onnxscript", "jinja2", "plotly", "timm")
m.PathFinder.find_spec = classmethod(
    lambda cls, name, path=None, target=None: None if name.split(".")[0] in blocked else find(name, path, target)
)
"""


@pytest.fixture(scope="module")
def report(mnist_like_bundle: MakeBundle, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("profile")
    args = ["profile", str(mnist_like_bundle()), "--json", str(folder / "r.json"), "--html", str(folder / "r.html")]
    assert main(args) == 0
    found = json.loads((folder / "r.json").read_text())
    found["html"] = (folder / "r.html").read_text()
    return found


def test_every_figure_says_what_it_is(report: dict[str, Any]) -> None:
    assert report["schema"] == 1
    assert {device["name"] for device in report["devices"]} == set(load_devices()) - {"x86-server"}
    for device in report["devices"]:
        kind = "simulated" if device["processors"] == ["systolic"] else "predicted"
        for entry in [*device["inference"], *filter(None, [device["training_step"]])]:
            assert entry["kind"] == kind
            assert entry["latency_ms"] > 0
            assert entry["basis"]
            if kind == "simulated":
                assert entry["support"] is None
                continue
            assert 0 < entry["error"]["median"] < entry["error"]["p90"]
            assert entry["error"]["text"] in report["html"].replace("&#39;", "'") or entry is device["training_step"]
            assert bool(entry["support_reasons"]) is (entry["support"] != "interpolated")
            if entry["support"] == "no ground":
                assert entry["low_ms"] is entry["high_ms"] is entry["interval"] is None
            else:
                assert entry["low_ms"] < entry["latency_ms"] < entry["high_ms"]
        assert device["memory"]["kind"] == "predicted"
    assert report["uplink"]["kind"] == "measured"
    assert report["assumptions"]
    found = {entry["support"] for device in report["devices"] for entry in device["inference"]}
    assert {"extrapolated", "no ground"} <= found  # of a network as small as this one no runtime but ours has rows


def test_layers_and_phases_add_up(report: dict[str, Any]) -> None:
    for device in report["devices"]:
        main_entry, step = device["inference"][0], device["training_step"]
        assert sum(layer["ms"] for layer in device["layers"]) == pytest.approx(main_entry["latency_ms"], rel=1e-6)
        if step is not None:
            assert sum(step["phases_ms"].values()) == pytest.approx(step["latency_ms"], rel=1e-6)
            assert {"forward", "input_gradient", "weight_gradient", "update"} <= set(step["phases_ms"])
            assert step["latency_ms"] > main_entry["latency_ms"]
            assert step["round_s"] == pytest.approx(step["round_steps"] * step["latency_ms"] / 1e3)


def test_an_array_takes_as_long_as_protofleet_cost_says(
    report: dict[str, Any], mnist_like_bundle: MakeBundle, tmp_path: Path
) -> None:
    assert main(["cost", str(mnist_like_bundle()), "--json", str(tmp_path / "c.json")]) == 0
    cost = json.loads((tmp_path / "c.json").read_text())
    (board,) = [device for device in report["devices"] if device["name"] == cost["device"]]
    (step,) = [row["step_ms"] for row in cost["methods"] if row["method"] == "fedproto"]
    assert board["training_step"]["latency_ms"] == pytest.approx(step)


def test_the_uplink_is_the_encoded_message(report: dict[str, Any]) -> None:
    raw = 4 * report["subject"]["classes"] * report["subject"]["features"]
    assert raw < report["uplink"]["contribution_bytes"] <= raw + 120
    assert report["uplink"]["fedavg_bytes"] == 4 * report["subject"]["parameters"]


def test_the_page_is_self_contained(report: dict[str, Any]) -> None:
    html = report["html"]
    check_page(html)
    for heading in ("The fleet", "A training step by phase", "Memory", "layer by layer", "Rooflines", "Assumptions"):
        assert heading in html
    assert html.count("<svg") >= 2 + len(report["devices"])
    for kind in ("predicted", "simulated"):
        assert f'class="tag {kind}"' in html


def small_board(folder: Path, ram_bytes: int) -> Path:
    text = (ROOT / "hw_profiles" / "devices" / "raspberry-pi-zero-2w.toml").read_text()
    text = text.replace('"raspberry-pi-zero-2w"', '"tiny"').replace("value = 536870912", f"value = {ram_bytes}")
    (folder / "tiny.toml").write_text(text)
    return folder / "tiny.toml"


def test_a_small_board_does_not_fit(mnist_like_bundle: MakeBundle, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    args = ["profile", str(mnist_like_bundle()), "--devices", "tiny,raspberry-pi-4", "--json", str(out)]
    assert main([*args, "--devices-file", str(small_board(tmp_path, 220_000_000))]) == 0
    tiny, large = json.loads(out.read_text())["devices"]
    assert tiny["memory"]["training_fits"] is tiny["memory"]["fits"] is False
    assert large["memory"]["training_fits"] is large["memory"]["fits"] is True
    assert tiny["memory"]["largest_training_batch"] < large["memory"]["largest_training_batch"]


def test_what_fits_is_decided_by_the_upper_bound_of_all_that_the_device_does(
    mnist_like_bundle: MakeBundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At each edge of usable memory one thing less fits: first FFC's round (D = 1,024), then training, then nothing."""
    bundle, out = mnist_like_bundle(backbone="fedhp_mnist"), tmp_path / "r.json"

    def memory(usable: int | None) -> dict[str, Any]:
        args = ["profile", str(bundle), "--devices", "tiny", "--json", str(out)]
        base = 536_870_912 if usable is None else usable + reserved
        assert main([*args, "--devices-file", str(small_board(tmp_path, base))]) == 0
        return dict(json.loads(out.read_text())["devices"][0]["memory"])

    reserved = 0
    whole = memory(None)
    reserved = 536_870_912 - whole["usable_bytes"]
    assert (
        whole["peak_bytes"]
        == whole["closing_peak_bytes"]
        > whole["training_peak_bytes"]
        > whole["inference_peak_bytes"]
    )
    assert whole["peak_bytes_at_most"] > 1.1 * whole["peak_bytes"]
    margin = whole["peak_bytes_at_most"] / whole["peak_bytes"]
    capsys.readouterr()
    assert memory(whole["peak_bytes_at_most"])["fits"] is True
    assert " yes" in capsys.readouterr().out
    found = memory(whole["peak_bytes_at_most"] - 1)
    assert (found["fits"], found["training_fits"], found["inference_fits"]) == (False, True, True)
    assert "not FFC" in capsys.readouterr().out
    found = memory(int(margin * whole["training_peak_bytes"]) - 2)
    assert (found["training_fits"], found["inference_fits"]) == (False, True)
    assert found["largest_training_batch"] < 16
    assert "inference" in capsys.readouterr().out
    assert memory(int(margin * whole["inference_peak_bytes"]) - 2)["inference_fits"] is False
    assert " NO" in capsys.readouterr().out


def test_more_samples_take_more_memory(mnist_like_bundle: MakeBundle, tmp_path: Path) -> None:
    found = []
    for samples in ("1000", "100000"):
        args = ["profile", str(mnist_like_bundle()), "--devices", "raspberry-pi-4", "--samples", samples]
        assert main([*args, "--json", str(tmp_path / "r.json")]) == 0
        found.append(json.loads((tmp_path / "r.json").read_text())["devices"][0]["memory"]["inference_peak_bytes"])
    assert found[1] - found[0] >= 99_000 * 28 * 28


def test_our_runtime_comes_first_wherever_there_is_a_cpu(report: dict[str, Any]) -> None:
    """The client runs ONNX Runtime: what ncnn would take is for who brings ncnn."""
    for device in report["devices"]:
        if "cpu" in device["processors"]:
            assert (device["inference"][0]["runtime"], device["inference"][0]["precision"]) == ("onnxruntime", "fp32")
    (pi,) = [device for device in report["devices"] if device["name"] == "raspberry-pi-4"]
    assert {"ncnn", "tflite"} <= {entry["runtime"] for entry in pi["inference"]}


def test_a_page_of_predictions_is_refused_without_onnx(
    mnist_like_bundle: MakeBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "p.html"
    monkeypatch.setattr("protofleet.commands.profile._has_onnx", lambda: False)
    assert main(["profile", str(mnist_like_bundle()), "--measure", "--html", str(page)]) == 2
    assert "--html, expected the onnx package" in capsys.readouterr().err  # at once, before anything is measured
    assert not page.exists()


def test_measured_here_without_onnx_or_torch(mnist_like_bundle: MakeBundle, tmp_path: Path) -> None:
    bundle, out = mnist_like_bundle(), tmp_path / "m.json"
    (tmp_path / "sitecustomize.py").write_text(_BASE_INSTALL)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [
        sys.executable,
        "-m",
        "protofleet",
        "profile",
        str(bundle),
        "--measure",
        "--under-load",
        "--seconds",
        "0.2",
    ]
    done = subprocess.run(
        [*command, "--threads", "1,2", "--per-operator", "--json", str(out)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert install_command("export") in done.stdout
    record = read_measurement(out)
    assert [(run["phase"], run["threads"]) for run in record["runs"]] == [
        ("inference", 1), ("training_step", 1), ("inference", 2), ("training_step", 2),
    ]  # fmt: skip
    for run in record["runs"]:
        assert 0 < run["median_ms"] <= run["p99_ms"]
        assert run["peak_rss_bytes"] > run["rss_before_load_bytes"] > 10_000_000
        assert run["runs"] >= 10
        assert run["cpu_ms"] > 0
        assert run["load_average"] >= 0
        assert run["under_load"] is (run["other_processors"] > BUSY)
    traced = {row["op"]: row for row in record["operators"]["rows"]}  # by ONNX Runtime itself
    assert any("Conv" in op for op in traced)
    assert all(row["nodes"] >= 1 and row["ms"] >= 0 for row in traced.values())
    assert "operators of an inference" in done.stdout
    assert all(isinstance(value, float) for value in record["status_metrics"].values())
    fastest = min(run["median_ms"] for run in record["runs"] if run["phase"] == "training_step")
    assert record["status_metrics"]["profile_train_step_ms"] == fastest

    again = tmp_path / "again.json"
    page = tmp_path / "again.html"
    args = ["profile", str(bundle), "--measured", str(out), "--devices", "host", "--json", str(again)]
    assert main([*args, "--html", str(page)]) == 0
    beside = {row["op"]: row for row in json.loads(again.read_text())["operators"]}
    assert beside["Conv"]["measured_ms"] > 0
    assert beside["Conv"]["predicted_ms"] > 0
    assert "each kind of operator of an inference" in page.read_text().lower()
    compared = json.loads(again.read_text())["comparison"]
    assert len(compared) == 4
    assert all(line["kind"] == "measured" and line["device"] == "host" for line in compared)
    assert any(line["predicted_ms"] for line in compared)
    assert read_measurement(again) == record  # a report carries its measurement

    elsewhere = record | {"host": record["host"] | {"board": "Raspberry Pi 4 Model B Rev 1.4", "cpu": "Cortex-A72"}}
    out.write_text(json.dumps(elsewhere))
    for device, beside in (("host", None), ("host,raspberry-pi-4", "raspberry-pi-4")):
        assert main(["profile", str(bundle), "--measured", str(out), "--devices", device, "--json", str(again)]) == 0
        compared = json.loads(again.read_text())["comparison"]
        assert {line["device"] for line in compared} == {beside}
        assert any(line["predicted_ms"] for line in compared) is (beside is not None)


def test_operators_of_a_trace_are_added_up_by_run() -> None:
    def node(op: str, us: int) -> dict[str, Any]:
        return {"cat": "Node", "name": f"n_{op}_kernel_time", "dur": us, "args": {"op_name": op}}

    run = [node("Conv", 2_000), node("Conv", 3_000), node("Gemm", 1_000), {"cat": "Session", "name": "model_run"}]
    slow = [node("Conv", 900_000), node("Conv", 1), node("Gemm", 1), {"cat": "Session", "name": "model_run"}]
    fence = {"cat": "Node", "name": "n_Conv_fence_before", "dur": 7, "args": {"op_name": "Conv"}}
    rows = operator_times([*slow, *slow, *slow, *run, fence, *run])  # the first three warm up
    assert rows == [{"op": "Conv", "nodes": 2, "ms": 5.0}, {"op": "Gemm", "nodes": 1, "ms": 1.0}]
    assert operator_times([]) == []


def test_a_measurement_of_another_bundle_is_refused(
    mnist_like_bundle: MakeBundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m.json"
    assert (
        main(["profile", str(mnist_like_bundle()), "--measure", "--under-load", "--seconds", "0.1", "--json", str(out)])
        == 0
    )
    other = mnist_like_bundle(backbone="fedproto_mnist")
    assert main(["profile", str(other), "--measured", str(out), "--devices", "host"]) == 2
    assert "error: the measurement is of another bundle, expected sha256 " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--devices", "raspberry-pi-44"], "raspberry-pi-4"),
        (["--devices", "raspberry-pi-4", "--runtime", "tensorrt"], "ncnn"),
        (["--devices", "raspberry-pi-4", "--runtime", "tflite", "--precision", "fp16"], "fp32"),
        (["--precision", "fp64"], "fp16"),
        (["--batch", "0"], "positive"),
        (["--samples", "-1"], "positive"),
        (["--measured", "nowhere.json"], "nowhere.json"),
        (["--devices-file", "nowhere.toml"], "nowhere.toml"),
        (["--measure", "--threads", "two"], "--threads"),
        (["--per-operator"], "--measure"),
        (["--batch", "9" * 20], "4,096"),
        (["--samples", "9" * 20], "1,000,000,000"),
        (["--threads", "two"], "1 or all"),
        (["--threads", "3"], "1 or all"),
        (["--devices", " , "], "--list"),
        (["--measure", "--under-load", "--threads", "1,9999"], "processors here"),
        (["--measure", "--under-load", "--threads", "0,1"], "processors here"),
    ],
)
def test_bad_use_is_one_line(
    args: list[str], named: str, mnist_like_bundle: MakeBundle, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(mnist_like_bundle()), *args]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert named in error


def test_list_needs_no_bundle(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--list"]) == 0
    shown = capsys.readouterr().out
    assert "raspberry-pi-zero-2w" in shown
    assert main(["profile"]) == 2
    assert "--list" in capsys.readouterr().err


def test_time_runs_keeps_every_time() -> None:
    now, spent = [0.0], iter([0.5] * 3 + [0.010] * 98 + [0.100] * 5)

    def run() -> None:
        now[0] += next(spent)

    timing = time_runs(run, seconds=1.0, clock=lambda: now[0])
    assert timing.median_ms == pytest.approx(10.0)
    assert timing.p99_ms >= 10.0
    assert timing.runs >= 98


def test_a_device_that_is_named_twice_is_shown_once(mnist_like_bundle: MakeBundle, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    named = ["--devices", "raspberry-pi-4, raspberry-pi-4"]
    assert main(["profile", str(mnist_like_bundle()), *named, "--json", str(out)]) == 0
    assert [device["name"] for device in json.loads(out.read_text())["devices"]] == ["raspberry-pi-4"]


_RUN = {
    "phase": "inference", "threads": 1, "batch": 1, "median_ms": 1.0, "p99_ms": 2.0, "peak_rss_bytes": 5,
    "temperature_c": [None, 40.0], "throttled": None,
}  # fmt: skip
_RECORD = {
    "kind": "measured", "schema": 1, "bundle": {"sha256": "00"}, "host": {"board": "b", "cpu": "c"}, "runs": [_RUN],
    "operators": {"threads": 1, "batch": 1, "rows": [{"op": "Conv", "nodes": 1, "ms": 0.5}]},
}  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"host": None},
        {"host": {"board": ["b"], "cpu": "c"}},
        {"bundle": {}},
        {"runs": []},
        {"runs": {}},
        {"runs": [_RUN | {"phase": "dance"}]},
        {"runs": [_RUN | {"temperature_c": 40}]},
        {"runs": [_RUN | {"median_ms": float("nan")}]},
        {"operators": {"threads": 1, "batch": 1, "rows": None}},
        {"operators": {"threads": 1, "batch": 1, "rows": [{"op": "Conv", "nodes": 1, "ms": float("inf")}]}},
    ],
)
def test_a_record_that_was_edited_is_one_line(wrong: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps(_RECORD))
    assert read_measurement(path)["runs"]
    path.write_text(json.dumps(_RECORD | wrong))
    with pytest.raises(DataError, match=r"measurement .*m\.json"):
        read_measurement(path)


def test_a_line_of_memory_names_its_devices() -> None:
    devices = [{"name": name, "memory": {"extrapolated": ["graph"]}} for name in ("one", "other")]
    devices.append({"name": "third", "memory": {"extrapolated": []}})
    lines = list(_extrapolations(devices))
    assert lines == ["one, other: memory extrapolated, beyond all that was measured: graph"]


def test_a_foreign_measurement_is_refused(mnist_like_bundle: MakeBundle, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    for text in ("{}", "[]", "no json", '{"kind": "measured", "schema": 99}'):
        path.write_text(text)
        assert main(["profile", str(mnist_like_bundle()), "--measured", str(path)]) == 2

"""The accelerator's cost model, the rounds, the report and the command."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest
from page_checks import check_page

from protofleet.cli import main
from protofleet.contract.errors import UsageError
from protofleet.contract.methods import METHODS, method
from protofleet.contract.sums.statistics import ClassMeans, FeatureGram
from protofleet.hw_profiles.accelerator.paper_claims import readings
from protofleet.hw_profiles.accelerator.round_cost import Setting, calibration_cost, round_cost
from protofleet.hw_profiles.accelerator.scalesim_files import topology_rows, topology_text
from protofleet.hw_profiles.accelerator.simulate import Array, assumptions, simulate
from protofleet.hw_profiles.accelerator.systolic import gemm_cycles
from protofleet.hw_profiles.reports.cost_report import cost_report, step_cost
from protofleet.hw_profiles.reports.subject import load_subject
from protofleet.hw_profiles.reports.which_board import what_it_takes
from protofleet.hw_profiles.workload.baselines import ccvr, fedavg, published_ffc, published_spherefed
from protofleet.hw_profiles.workload.calibration_step import (
    method_calibration,
    ridge_solve,
    server_work,
    statistic_bytes,
    statistic_work,
)
from protofleet.hw_profiles.workload.from_onnx import read_workload
from protofleet.hw_profiles.workload.paper_networks import build_network
from protofleet.hw_profiles.workload.training_step import training_step

PHASES = ("forward", "input_gradient", "weight_gradient", "update", "statistic")


@pytest.fixture(scope="module")
def convnet():
    return read_workload(build_network("spherefed_convnet"), batch=4, name="spherefed_convnet")


def test_half_precision_halves_the_traffic_and_leaves_the_array_as_it_is(convnet):
    full, half = simulate(convnet, Array()), simulate(convnet, Array(precision="bf16"))
    assert half.dram_bytes == pytest.approx(full.dram_bytes / 2, rel=0.2)
    assert half.array_cycles == full.array_cycles


def test_the_report_says_that_the_chip_cannot_hold_the_cells():
    assert any("2,800" in line for line in assumptions(Array()))
    assert not any("2,800" in line for line in assumptions(Array(precision="bf16")))


@pytest.mark.parametrize(
    "wrong", [{"rows": 0}, {"mhz": -1.0}, {"mhz": float("inf")}, {"lanes": 0}, {"dram_bytes_per_s": 0.0}]
)
def test_an_absurd_accelerator_is_refused_by_name(wrong):
    with pytest.raises(UsageError, match=f"{next(iter(wrong))}, expected a positive number"):
        Array(**wrong)


def test_statistics_cost_the_products_they_are_made_of():
    assert statistic_work(FeatureGram.FIELDS, 500, 10, 64).macs == 500 * 64 * 64
    assert ccvr(500, 10, 64).device.macs == 500 * 64 * 64
    means = statistic_work(ClassMeans.FIELDS, 500, 10, 64)
    assert means.macs == 0
    assert sum(layer.vector_ops for layer in means.layers) == 500 * 64
    soft = statistic_work(method("fedhkd").statistic.FIELDS, 500, 10, 64)
    assert soft.macs == 500 * 64 * 10, "the head, for its answers to be summed"
    assert sum(layer.vector_ops for layer in soft.layers) == 500 * 64 + 500 * 10 * (8 + 1)
    assert statistic_work((), 500, 10, 64).layers == ()
    assert 8 * (64 * 65 // 2 + 640) < statistic_bytes(method("ffc"), 10, 64) < 8 * (64 * 65 // 2 + 640) + 150
    assert published_ffc(500, 10, 64).uplink_bytes == 8 * (64 * 65 // 2 + 640 + 10)
    assert ccvr(500, 10, 64).uplink_bytes == 8 * (10 * 64 * 65 // 2 + 640 + 10)


def test_a_calibration_is_prepared_as_the_method_says():
    """FFC puts features on the unit sphere and, where that is agreed, projects them; the published one has them so."""
    plain = method_calibration(method("ffc"), 500, 10, 64)
    ops = [sum(x.vector_ops for x in c.device.layers) for c in (plain, published_ffc(500, 10, 64))]
    assert ops[0] - ops[1] == 3 * 500 * 64
    assert method_calibration(method("ffc"), 500, 10, 64, normalised=True).device == published_ffc(500, 10, 64).device
    cut = method_calibration(method("ffc"), 500, 10, 64, hyper=method("ffc").resolve({"project": 16}))
    assert cut.device.macs == 500 * 64 * 16 + 500 * 16 * 16
    assert cut.uplink_bytes == statistic_bytes(method("ffc"), 10, 16)
    assert cut.server.macs < plain.server.macs


def test_what_no_message_can_hold_is_counted_and_not_encoded():
    assert statistic_bytes(method("ffc"), 1000, 50_000) == 8 * (50_000 * 50_001 // 2 + 1000 * 50_000)


def test_the_servers_factorisation_is_a_third_of_a_cube():
    work = ridge_solve(100, 1280)
    factor = next(layer for layer in work.layers if layer.name == "factor")
    assert factor.macs == pytest.approx(1280**3 / 6, rel=0.1)  # n³/3 operations are n³/6 multiply-accumulates
    solve = next(layer for layer in work.layers if layer.name == "solve")
    assert solve.macs == pytest.approx(1280**2 * 100, rel=0.1)
    assert server_work(method("ffc").solves, 100, 1280) == work
    assert server_work(method("fedproto").solves, 100, 1280).layers == ()


def test_ccvr_grows_with_the_classes_and_ffc_hardly_does(convnet):
    array, width = Array(depthwise="packed"), 1024
    cost = {
        (as_in, c): calibration_cost(convnet, as_in(5_000, c, width), array, 5_000)
        for as_in in (published_ffc, ccvr)
        for c in (10, 100)
    }
    assert cost[ccvr, 100].server_ms > 5 * cost[ccvr, 10].server_ms
    assert cost[published_ffc, 100].total_ms < 1.01 * cost[published_ffc, 10].total_ms
    assert cost[published_ffc, 100].forward_ms == cost[ccvr, 100].forward_ms


def test_a_round_is_its_steps(convnet):
    cost = round_cost(convnet, published_spherefed(convnet, 10), Array(), Setting(samples=10, epochs=2, batch=4))
    assert cost.steps == 6
    assert cost.round_s == pytest.approx(6 * cost.step_ms / 1e3)
    assert sum(cost.phase_ms().values()) == pytest.approx(cost.step_ms)


def test_the_memory_claim_is_the_heads_share_of_the_weights():
    """docs/hardware.md: 256,000 of 2,445,760; Table 14 has one 1x1 convolution of 1,024 weights more."""
    found = {
        r.assumption: r.percent
        for r in readings(lambda b: read_workload(build_network("spherefed_mobilenetv2"), batch=b), 200, Array())
    }
    assert found["the head's share of the weights of convolutions and products"] == pytest.approx(
        100 * 256_000 / (2_445_760 + 1_024), abs=0.01
    )
    latencies = [
        percent
        for text, percent in found.items()
        if text.endswith("batch 64") and "step" in text and "peak" not in text
    ]
    assert latencies
    assert max(latencies) < 0.28


def test_every_figure_of_the_report_says_what_kind_it_is(tmp_path):
    subject = load_subject("spherefed_convnet", classes=10, batch=2)
    report = cost_report(subject, Array(), device="fpga", setting=Setting(batch=2), capacity_bytes=1 << 30)
    report = json.loads(json.dumps(report))
    assert report["schema"] == 1
    blocks = [report["inference"], report["memory"], *report["methods"], *report["calibration"], *report["claims"]]
    assert {block["kind"] for block in blocks} <= {"measured", "simulated", "predicted", "arithmetic"}
    assert [row["method"] for row in report["methods"]] == ["fedavg", *(n for n, m in METHODS.items() if m.trains)]
    assert [row["method"] for row in report["calibration"]] == [
        *(n for n, m in METHODS.items() if not m.trains),
        "ccvr",
    ]
    assert report["methods"][0]["saved_percent"]["latency"] == 0
    total = sum(layer["cycles"] for layer in report["layers"])
    assert total / 100e3 == pytest.approx(report["methods"][0]["step_ms"], rel=1e-9)
    assert report["memory"]["largest_batch"]["training"] >= 2
    assert len(report["assumptions"]) > 8


def test_the_topology_holds_every_product_that_the_array_runs():
    subject = load_subject("spherefed_mobilenetv2", classes=10, batch=1)
    cost = step_cost(subject, Array())
    rows = list(csv.reader(io.StringIO(topology_text(topology_rows(cost.layers)))))
    assert rows[0][:4] == ["Layer", " M", " N", " K"]
    assert all(len(row) == 5 and row[4].strip() == "" for row in rows[1:]), (
        "SCALE-Sim drops what follows the last comma"
    )
    assert sum(gemm_cycles(*map(int, row[1:4])) for row in rows[1:]) == cost.array_cycles
    assert len({row[0] for row in rows[1:]}) == len(rows) - 1


def test_the_report_for_forward_and_backward_of_resnet18_is_instant():
    import time

    start_s = time.process_time()  # this process's alone, however busy the machine; it takes about 0.01 s
    forward = read_workload(build_network("spherefed_resnet18"), batch=64)
    simulate(training_step(forward, fedavg(forward, 100)), Array())
    assert time.process_time() - start_s < 1.0


def test_the_command_writes_json_a_page_and_a_topology(tmp_path, capsys):
    files = {name: tmp_path / f"cost.{name}" for name in ("json", "html", "csv")}
    command = [
        "cost",
        "spherefed_convnet",
        "--classes",
        "10",
        "--batch",
        "8",
        "--dataflow",
        "ws",
        "--depthwise",
        "packed",
    ]
    command += [
        "--rows",
        "16",
        "--mhz",
        "200",
        "--precision",
        "bf16",
        "--json",
        str(files["json"]),
        "--html",
        str(files["html"]),
    ]
    assert main([*command, "--scalesim-csv", str(files["csv"])]) == 0
    said = capsys.readouterr().out
    assert "16x64 at 200 MHz" in said
    assert "assumptions" in said
    report = json.loads(files["json"].read_text())
    assert report["array"]["rows"] == 16
    assert report["array"]["dataflow"] == "ws"
    assert report["buildable"] == ["bf16", "int8"]
    assert "cannot be built" not in report["sentence"]
    in_fp32 = report | {"array": report["array"] | {"precision": "fp32"}}
    assert what_it_takes(in_fp32).endswith(
        "too few multipliers for this array in fp32: it cannot be built so; "
        "--precision bf16 or int8 (inference only) can."
    )
    html = files["html"].read_text()
    check_page(html)
    assert "spherefed (frozen)" in html
    assert files["csv"].read_text().count("\n") > 20


def test_the_page_shows_each_layers_own_stalled_cycles(tmp_path):
    files = [tmp_path / "cost.json", tmp_path / "cost.html"]
    command = ["cost", "spherefed_convnet", "--classes", "10", "--batch", "8", "--precision", "bf16"]
    assert main([*command, "--json", str(files[0]), "--html", str(files[1])]) == 0
    layers = json.loads(files[0].read_text())["layers"]
    stalled = [layer["stall_cycles"] for layer in layers]
    for name in ("cycles", "array_cycles", "vector_cycles", "dram_cycles", "sram_reads", "dram_bytes"):
        assert stalled != [layer[name] for layer in layers], name
    assert len(set(stalled)) > 12
    by_phase = [layer for phase in PHASES for layer in layers if layer["phase"] == phase]
    longest = sorted(layers, key=lambda layer: -layer["cycles"])[:12]
    names, shown = _cells(files[1].read_text(), "stalled")
    assert names == [layer["name"] for layer in (*longest, *by_phase)]
    assert shown == [f"{layer['stall_cycles']:,}" for layer in (*longest, *by_phase)]


def _cells(html, column):
    """Of all tables with this column, under its heading: each row's first cell, and the cell of the column."""
    names, cells = [], []
    for table in re.findall(r"<table.*?</table>", html, re.DOTALL):
        rows = [
            re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)
        ]
        if column in rows[0]:
            names += [row[0] for row in rows[1:]]
            cells += [row[rows[0].index(column)] for row in rows[1:]]
    return names, cells


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["spherefed_convnet", "--device", "fpga-vc707"], "error: unknown device, expected a device of"),
        (["spherefed_convnet", "--device", "raspberry-pi-4"], "expected one with a systolic array, got cpu"),
        (["spherefed_conv"], "error: unknown backbone, expected a bundle file or a name, got spherefed_conv"),
        (["missing.bundle"], "error: cannot read bundle missing.bundle"),
        (["spherefed_convnet", "--dataflow", "rs"], "expected os, ws or is, got rs"),
        (["spherefed_convnet", "--depthwise", "x"], "expected per-channel or packed"),
        (["spherefed_convnet", "--precision", "fp8"], "error: precision, expected fp32, bf16 or int8, got fp8"),
        (["spherefed_vgg13", "--batch", "4096"], "does not fit fpga-vc707-32x64, expected at most"),
        (["spherefed_convnet", "--batch", "0"], "error: batch, expected a positive integer, got 0"),
        (["spherefed_convnet", "--side", "33"], "input side, expected a multiple of 32, got 33"),
        (["a.onnx", "--side", "64"], "error: --side, expected one of SphereFed's backbones by name, got a.onnx"),
        (["spherefed_convnet", "--samples", "0"], "error: --samples, expected a positive integer, got 0"),
        (["spherefed_convnet", "--rows", "0"], "error: --rows, expected a whole number from 1 to 4096, got 0"),
        (
            ["spherefed_convnet", "--cols", "100000"],
            "--cols, expected a whole number from 1 to 4096, got 100000",
        ),
        (["spherefed_convnet", "--mhz", "1e-9"], "error: --mhz, expected a number from 1 to 5000 MHz, got 1e-09"),
        (["spherefed_convnet", "--mhz", "nan"], "error: --mhz, expected a number from 1 to 5000 MHz, got nan"),
        (
            ["spherefed_convnet", "--bandwidth", "1e-12"],
            "--bandwidth, expected a number from 0.05 to 10000 GB/s, got 1e-12",
        ),
        (
            ["spherefed_convnet", "--rows", "256", "--cols", "256", "--mhz", "1000"],
            "error: 256 x 256 fp32 cells at 1000 MHz on fpga-vc707-32x64: DSP blocks, expected at most 2,800 on the "
            "chip, got 327,742",
        ),
        (
            ["spherefed_convnet", "--rows", "64", "--precision", "bf16"],
            "DSP blocks, expected at most 2,800 on the chip, got 4,158, try fewer --rows or --cols, or a",
        ),
        (["spherefed_convnet", "--mhz", "1000", "--rows", "8"], "clock, expected at most 543.77 MHz, its block RAM's"),
        (["spherefed_convnet", "--sram", "16MiB"], "on-chip memory, expected at most 4,746,240 bytes of block RAM"),
        (
            ["spherefed_convnet", "--bandwidth", "100"],
            "memory bandwidth, expected at most 12.8 GB/s, got 100",
        ),
        (
            ["spherefed_convnet", "--device", "fpga-kv260", "--rows", "64", "--cols", "32", "--precision", "int8"],
            "DSP blocks, expected at most 1,248 on the chip, got 2,110",
        ),
        (
            [
                "spherefed_convnet",
                "--rows",
                "4",
                "--cols",
                "1024",
                "--precision",
                "bf16",
                "--device",
                "fpga-artix7-200t",
            ],
            "DSP blocks, expected at most 740",
        ),
        (["spherefed_convnet", "--rtl", "d"], "the array in Verilog, expected --precision int8, got fp32"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(arguments, line, capsys):
    assert main(["cost", *arguments]) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1


def test_int8_gives_inference_only_and_says_why(capsys, tmp_path):
    out = tmp_path / "c.json"
    assert main(["cost", "spherefed_convnet", "--precision", "int8", "--batch", "1", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["methods"] == report["calibration"] == report["claims"] == []
    assert any("int8 covers inference only" in line for line in report["assumptions"])
    assert {layer["phase"] for layer in report["layers"]} == {"forward"}


def test_a_bundle_is_costed_as_it_is_and_its_own_training_graph_is_counted(mnist_like_bundle, tmp_path, capsys):
    out = tmp_path / "c.json"
    bundle = mnist_like_bundle(batch=1)  # of one image no convolution is in bilinear form: as many products as derived
    assert main(["cost", str(bundle), "--json", str(out), "--html", str(tmp_path / "c.html")]) == 0
    report = json.loads(out.read_text())
    subject, graph = report["subject"], report["step_graph"]
    assert subject["source"].startswith(f"bundle {bundle.name}, 28x28x1 input, method fedproto")
    assert subject["unmodelled"] == graph["unmodelled"] == {}
    fedproto = next(row for row in report["methods"] if row["method"] == "fedproto")
    assert graph["macs"] == fedproto["macs"]
    assert "own training graph" in (tmp_path / "c.html").read_text()


def test_a_transposed_weight_is_a_weight_and_takes_no_time(mnist_like_bundle, tmp_path):
    """small_cnn's head is 0.30 % of the weights that are multiplied; it read 6.40 % without the linear layer's."""
    bundle = mnist_like_bundle()
    assert main(["cost", str(bundle), "--json", str(tmp_path / "c.json")]) == 0
    report = json.loads((tmp_path / "c.json").read_text())
    assert report["claims"] == [], "of no network of the paper"
    subject = load_subject(str(bundle))
    shares = {row.assumption: row.percent for row in readings(subject.forward_at, subject.classes, Array())}
    assert shares["the head's share of the weights of convolutions and products"] == pytest.approx(0.30, abs=0.01)
    moves = [layer["name"] for layer in report["layers"] if layer["kind"] == "move" and layer["phase"] == "forward"]
    assert moves == ["input:Transpose"], "the images' channels, and nothing else"
    cycles = {layer["name"]: layer["cycles"] for layer in report["layers"] if layer["phase"] == "forward"}
    assert cycles["input:Transpose"] < 0.05 * sum(cycles.values())

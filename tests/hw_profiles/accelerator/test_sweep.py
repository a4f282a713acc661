"""A sweep's points are what `simulate` says of each array; its front is what a naive loop finds; the command."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protofleet.cli import main
from protofleet.contract.errors import UsageError
from protofleet.hw_profiles.accelerator.access_energy import OPERATIONS, access_pj, energies
from protofleet.hw_profiles.accelerator.chip import chip_of
from protofleet.hw_profiles.accelerator.pareto import pareto_front
from protofleet.hw_profiles.accelerator.simulate import array_of, simulate
from protofleet.hw_profiles.accelerator.sweep import PUBLISHED, Axes, Task, objectives, sweep
from protofleet.hw_profiles.devices.schema import load_devices
from protofleet.hw_profiles.memory.liveness import peak_memory
from protofleet.hw_profiles.reports.subject import load_subject
from protofleet.hw_profiles.reports.sweep_report import COLUMNS, sweep_csv, sweep_report, tasks_of

VC707 = load_devices()["fpga-vc707-32x64"]
AXES = Axes(
    rows=(8, 16),
    cols=(4, 32),
    dataflow=("os", "ws", "is"),
    precision=("int8", "bf16"),
    sram_bytes=(256 << 10, 1 << 20),
    dram_bytes_per_s=(0.8e9, 12.8e9),
    mhz=(100.0, 250.0),
    batch=(1, 8),
    method=("inference", "fedavg", "ncm"),
)


def _beats(a, b):
    return all(x <= y for x, y in zip(a, b, strict=True)) and any(x < y for x, y in zip(a, b, strict=True))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(*[st.sampled_from([0.0, 0.5, 1.0, 2.0, 1e9])] * 3), max_size=40))
def test_the_front_is_what_a_naive_loop_finds(rows):
    naive = [not any(_beats(other, row) for other in rows) for row in rows]
    assert pareto_front(rows).tolist() == naive


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(*[st.floats(0, 1e300)] * 4), min_size=1, max_size=60))
def test_the_front_of_any_numbers_holds_the_least_of_each_and_is_its_own_front(rows):
    front = pareto_front(rows)
    kept = [row for row, on_front in zip(rows, front, strict=True) if on_front]
    for column in range(4):
        assert min(row[column] for row in kept) == min(row[column] for row in rows)
    assert pareto_front(kept).all()
    for row, on_front in zip(rows, front, strict=True):
        assert on_front or any(_beats(other, row) for other in kept)


@pytest.fixture(scope="module")
def subject():
    return load_subject("spherefed_convnet", classes=10, batch=8)


@pytest.fixture(scope="module")
def found(subject):
    return sweep(AXES, chip_of(VC707), tasks_of(subject), base=array_of(VC707))


def test_every_point_is_what_simulate_says_of_its_array(found, subject):
    task_of = tasks_of(subject)
    assert len(found.points) > 500
    for point in (*found.points[::7], found.points[-1]):
        parts = task_of(point.method, point.batch).parts
        costs = [simulate(part, point.array) for part in parts]
        assert point.batch_ms == pytest.approx(sum(cost.latency_ms for cost in costs), rel=1e-12)
        assert point.dram_bytes == sum(cost.dram_bytes for cost in costs)
        assert point.memory_bytes >= max(
            peak_memory(part, float_bytes=point.array.float_bytes).peak_bytes for part in parts
        )


def test_energy_is_counted_access_by_access(found, subject):
    """One product on its own, by hand: 4.6 pJ a multiply-accumulate in fp32, and each operand's reads."""
    (part,) = tasks_of(subject)("inference", 1).parts
    point = next(p for p in found.points if p.method == "inference" and p.batch == 1 and p.array.precision == "bf16")
    array, cost = point.array, simulate(part, point.array)
    each = energies("bf16", 2, array.sram_bytes, array.rows, array.cols)
    placed = [p for layer in cost.layers for p in layer.placed]
    outputs = sum(p.m * p.n * p.count for p in placed)
    reads, writes = sum(p.sram_reads for p in placed), sum(p.sram_writes for p in placed)
    pj = sum(p.m * p.n * p.k * p.count for p in placed) * OPERATIONS["bf16"].mac_pj
    pj += sum(layer.layer.vector_ops for layer in cost.layers) * each.add_pj
    pj += reads * each.operand_pj + (2 * writes - outputs) * each.result_pj
    low, _, high = each.dram_pj
    assert point.photo_mj[0] == pytest.approx((pj + cost.dram_bytes * low) * 1e-9)
    assert point.photo_mj[2] == pytest.approx((pj + cost.dram_bytes * high) * 1e-9)


def test_energies_are_the_published_ones():
    assert OPERATIONS["fp32"].mac_pj == pytest.approx(4.6)
    assert OPERATIONS["int8"].mac_pj == pytest.approx(0.3)
    assert [access_pj(8, size << 10) for size in (8, 32, 1024)] == pytest.approx([10, 20, 100])
    assert access_pj(1, 8 << 10) == pytest.approx(10 / 8)
    assert access_pj(8, 2 << 10) == pytest.approx(5), "the square root of the size"
    sizes = [access_pj(4, 1 << power) for power in range(8, 24)]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(("rows", "cols", "result_pj"), [(4, 16, 2.5), (16, 4, 5.0)])
def test_energies_are_those_of_the_larger_operands_bank_and_of_a_columns_results(rows, cols, result_pj):
    """A third of 96 KiB each: 8 KiB in each of four banks, 2 KiB in each of sixteen."""
    each = energies("int8", 1, 96 << 10, rows, cols)
    assert each.operand_pj == pytest.approx(10 / 8)
    assert each.result_pj == pytest.approx(result_pj)


def test_fronts_are_within_one_method_and_hold_what_nothing_beats(found):
    points = [point for point in found.points if not point.published]
    for name in AXES.method:
        own = [point for point in points if point.method == name]
        for point in own[::5]:
            assert point.front == (not any(_beats(objectives(other), objectives(point)) for other in own))
        assert any(point.front for point in own)


def test_the_published_array_stands_beside_each_task_on_no_front(found):
    published = [point for point in found.points if point.published]
    assert [(p.method, p.batch) for p in published] == [(m, b) for m in AXES.method for b in AXES.batch]
    for point in published:
        assert (point.array.rows, point.array.cols, point.array.mhz, point.array.precision) == (32, 64, 100, "fp32")
        assert not point.front
        assert point.share > 1, "10,240 DSP blocks of 2,800"
    assert array_of(VC707) == PUBLISHED


def test_what_cannot_be_is_counted_by_reason(subject):
    axes = replace(AXES, rows=(8, 256), cols=(32,), mhz=(100.0, 1000.0), precision=("int8",), method=("fedavg", "ncm"))
    with pytest.raises(UsageError, match=r"cost sweep, expected an array that .* can hold, got nobody trains in int8"):
        sweep(axes, chip_of(VC707), tasks_of(subject), base=array_of(VC707))
    with pytest.raises(UsageError, match="got nobody sums features in int8"):
        sweep(replace(axes, method=("ncm",)), chip_of(VC707), tasks_of(subject), base=array_of(VC707))
    found = sweep(replace(axes, method=("inference",)), chip_of(VC707), tasks_of(subject), base=array_of(VC707))
    counted = {refused.reason: refused.count for refused in found.refused}
    assert counted == {"DSP blocks": axes.points // 4, "clock": axes.points // 8}
    assert len(found.points) - 2 + sum(counted.values()) == axes.points // 2
    assert found.refused[0].first.startswith("8 x 32 int8 at 1000 MHz") or found.refused[0].first.startswith("256 x 32")


def test_a_tasks_parts_follow_each_other(subject):
    task = tasks_of(subject)("ncm", 8)
    assert isinstance(task, Task)
    assert len(task.parts) == 2
    assert task.kept_bytes > 0
    with pytest.raises(UsageError, match="--method, expected inference, fedavg or a method, got fedavgg"):
        tasks_of(subject)("fedavgg", 8)


def test_two_thousand_points_of_mobilenetv2():
    many = replace(
        AXES, rows=(8, 16, 32), cols=(8, 16, 32), sram_bytes=(1 << 19, 1 << 20), precision=("bf16",), batch=(16,),
        mhz=(50.0, 100.0, 150.0, 200.0, 250.0), dram_bytes_per_s=(1.6e9, 3.2e9, 6.4e9, 12.8e9),
        method=("inference", "fedavg"),
    )  # fmt: skip
    assert many.points == 2_160
    found = sweep(many, chip_of(VC707), tasks_of(load_subject("spherefed_mobilenetv2")), base=array_of(VC707))
    assert len(found.points) == many.points + 2


def test_the_csv_has_every_point_and_its_front(found, subject):
    report = json.loads(json.dumps(sweep_report(subject, found)))
    rows = list(csv.DictReader(io.StringIO(sweep_csv(report))))
    assert len(rows) == len(found.points)
    assert tuple(rows[0]) == COLUMNS
    assert sum(row["front"] == "1" for row in rows) == sum(point.front for point in found.points)
    assert {row["published"] for row in rows} == {"0", "1"}
    assert all(row["luts"] == "" for row in rows if row["precision"] != "int8")
    first = found.points[0]
    assert float(rows[0]["photo_ms"]) == pytest.approx(first.photo_ms, rel=1e-5)
    assert int(rows[0]["luts"]) == first.takes.luts


def test_the_command_writes_csv_and_json(tmp_path, capsys):
    files = {kind: tmp_path / f"sweep.{kind}" for kind in ("csv", "json")}
    command = [
        "cost",
        "sweep",
        "spherefed_convnet",
        "--classes",
        "10",
        "--batch",
        "1,8",
        "--rows",
        "8,16",
        "--cols",
        "8",
    ]
    assert main([*command, "--mhz", "100", "--csv", str(files["csv"]), "--json", str(files["json"])]) == 0
    said = capsys.readouterr().out
    assert "that no other beats" in said
    assert "left out" in said
    assert "SphereFed's" in said
    report = json.loads(files["json"].read_text())
    assert report["schema"] == 1
    assert report["device"]["dsp_slices"] == 2_800
    assert "Horowitz" in report["energy"]["source"]
    assert len(report["points"]) == files["csv"].read_text().count("\n") - 1
    assert {point["batch"] for point in report["points"]} == {1, 8}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--rows", "256", "--cols", "256", "--mhz", "1000"], "expected an array that fpga-vc707-32x64 can hold, got"),
        (["--rows", "4096", "--cols", "4096"], "got DSP blocks: 4096 x 4096 int8 at 100 MHz: 16,777,278 where 2,800"),
        (["--rows", "8,x"], "error: --rows, expected whole numbers from 1 to 4096, with commas between, got x"),
        (["--mhz", "-1"], "error: --mhz, expected a number from 1 to 5000 MHz, got -1"),
        (["--mhz", "100,x"], "error: --mhz, expected numbers, with commas between, got x"),
        (["--mhz", "100,nan"], "error: --mhz, expected numbers, with commas between, got nan"),
        (["--mhz", "1e9"], "error: --mhz, expected a number from 1 to 5000 MHz, got 1e+09"),
        (["--bandwidth", "1e-12,3"], "error: --bandwidth, expected a number from 0.05 to 10000 GB/s, got 1e-12"),
        (["--sram", "1XB"], "error: --sram, expected a size from 1KiB, got 1XB"),
        (["--dataflow", "os,rs"], "error: --dataflow, expected os, ws or is, got rs"),
        (["--precision", "fp8"], "error: --precision, expected fp32, bf16 or int8, got fp8"),
        (["--method", "fedavgg"], "error: --method, expected inference, fedavg or a method, got fedavgg"),
        (["--device", "raspberry-pi-4"], "expected one with a systolic array, got cpu"),
        (["--rows", ",".join(map(str, range(1, 300))), "--cols", "1,2,3,4,5,6,7"], "expected at most 50,000 points"),
        (["--rowz", "8"], "error: unknown option, expected an option of protofleet cost sweep, got --rowz"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_two(arguments, line, capsys):
    assert main(["cost", "sweep", "spherefed_convnet", *arguments]) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1

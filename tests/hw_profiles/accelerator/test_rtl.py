"""The array in Verilog: its counts, as Verilator gave them, are the closed form's; what `cost --rtl` writes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from fractions import Fraction
from pathlib import Path

import pytest

from benchmarks.hardware.rtl import COUNTS, closed_form
from benchmarks.hardware.rtl_resources import counted, written
from protofleet.cli import main
from protofleet.hw_profiles.accelerator.rtl_files import (
    SIMULATE,
    SOURCES,
    RtlArray,
    product_files,
    random_product,
    synthesis,
    write_rtl,
)

RECORDED = json.loads(Path(__file__).with_name("rtl_counts.json").read_text())
verilator = pytest.mark.skipif(shutil.which("verilator") is None, reason="verilator is not installed")
yosys = pytest.mark.skipif(shutil.which("yosys") is None, reason="yosys is not installed")


@pytest.mark.parametrize("dataflow", ["os", "ws", "is"])
def test_recorded_counts_of_the_verilog_equal_the_closed_form(dataflow):
    rows = [row for row in RECORDED["rows"] if row["dataflow"] == dataflow]
    assert RECORDED["counts"] == list(COUNTS[:-1])
    assert len({tuple(row["shape"]) for row in rows}) >= 50
    assert {row["phase"] for row in rows} >= {"forward", "input_gradient", "weight_gradient", "drawn"}
    for row in rows:
        compute, busy, *others = row["counts"]
        assert [compute, *others] == closed_form(row["shape"], row["rows"], row["cols"], dataflow), row
        assert busy - compute == (row["rows"] + 1 if dataflow == "os" else 1), "the last fold's draining"


@verilator
@pytest.mark.parametrize("dataflow", ["os", "ws", "is"])
def test_what_the_command_writes_computes_what_numpy_does_in_the_cycles_that_its_readme_says(dataflow, tmp_path):
    out = tmp_path / "rtl"
    array = ["--rows", "3", "--cols", "2", "--dataflow", dataflow, "--precision", "int8", "--batch", "1"]
    assert main(["cost", "spherefed_convnet", *array, "--rtl", str(out)]) == 0
    readme = (out / "README.md").read_text()
    assert SIMULATE in readme
    subprocess.run(SIMULATE.replace("-O3", "-O0").split(), cwd=out, check=True, capture_output=True)
    said = subprocess.run(["./obj_dir/Vtestbench"], cwd=out, check=True, capture_output=True, text=True).stdout
    figures = dict(re.findall(r"(\w+) (\d+)", said))
    assert figures["wrong"] == "0"
    says = re.search(
        r"(\d+) compute cycles, (\d+) reads of the first operand, (\d+) of the second, (\d+) writes", readme
    )
    assert says is not None
    assert says.groups() == tuple(
        figures[c] for c in ("compute_cycles", "first_reads", "second_reads", "result_writes")
    )
    lines = (out / "expected.hex").read_text().splitlines()
    (out / "expected.hex").write_text("\n".join([f"{int(lines[0], 16) ^ 1:08x}", *lines[1:]]) + "\n")
    wrong = subprocess.run(["./obj_dir/Vtestbench"], cwd=out, check=False, capture_output=True, text=True)
    assert wrong.returncode != 0
    assert "wrong 1" in wrong.stdout


@yosys
@pytest.mark.parametrize(("dataflow", "rows", "cols", "rate"), [("os", 2, 3, 1), ("ws", 3, 2, 4), ("is", 1, 1, 3)])
def test_yosys_takes_what_is_written_and_finds_memories_with_one_port_each_way(dataflow, rows, cols, rate, tmp_path):
    array = RtlArray(rows, cols, dataflow, bytes_per_cycle=Fraction(rate))
    write_rtl(tmp_path, array)
    whole = synthesis(array, "xc7")
    assert f'    yosys -p "{whole}; stat"' in (tmp_path / "README.md").read_text()
    chosen = whole[: whole.index("; synth_xilinx")]
    script = f"{chosen}; hierarchy -check -top memory_system; proc; check -assert; "
    script += "flatten; opt_clean; memory -nomap; select -assert-count {} t:$mem_v2"
    script += "; select -assert-count {} t:$mem_v2 r:RD_PORTS=1 r:WR_PORTS=1 %i %i"
    copies = 2 if dataflow == "os" else 4  # of a column's results: two halves; in ws and is the array reads them, too
    banks = array.bus * (rows + (1 + copies) * cols)
    subprocess.run(["yosys", "-q", "-p", script.format(banks, banks)], cwd=tmp_path, check=True, capture_output=True)


def test_the_command_says_of_each_dataflow_what_it_takes_and_how_yosys_counts_it(tmp_path):
    """`is` has the hardware of ws, whose results' banks are there twice."""
    (os, _), (ws, of_ws), (same, of_is) = (
        written(4, 4, flow, Fraction(2), tmp_path / flow) for flow in ("os", "ws", "is")
    )
    assert (same, of_is) == (ws, of_ws)
    assert of_ws.endswith("synth_xilinx -family xc7 -flatten -noiopad -noclkbuf -top memory_system")
    for size in ("ROWS 4", "COLS 4", "STATIONARY 1", "BUS 2", "LEFT_HALF 512", "TOP_HALF 512", "RESULTS_HALF 128"):
        assert f" -set {size} " in of_ws
    assert ws[3] - os[3] == 2 * 4


@yosys
@pytest.mark.slow
@pytest.mark.parametrize("dataflow", ["os", "ws"])
def test_yosys_counts_of_the_commands_folder_what_its_readme_says(dataflow, tmp_path):
    said, script = written(2, 2, dataflow, Fraction(1), tmp_path)
    dsps, luts, flip_flops, halves = counted(script, tmp_path)
    assert said[0] == dsps
    assert said[1] == pytest.approx(luts, rel=0.1)
    assert said[2] == pytest.approx(flip_flops, rel=0.02)
    assert said[3] == halves


def test_the_command_writes_the_chosen_array(tmp_path):
    array = ["--rows", "16", "--cols", "8", "--dataflow", "is", "--precision", "int8", "--batch", "1"]
    assert main(["cost", "spherefed_convnet", *array, "--rtl", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        *SOURCES, "parameters.vh", "README.md", "first.hex", "second.hex", "expected.hex"
    }  # fmt: skip
    defined = dict(re.findall(r"`define (\w+) (\d+)", (tmp_path / "parameters.vh").read_text()))
    assert {name: defined[name] for name in ("ROWS", "COLS", "WIDTH", "KEPT")} == {
        "ROWS": "16", "COLS": "8", "WIDTH": "8", "KEPT": "2"
    }  # fmt: skip


def test_a_product_is_written_as_twos_complement():
    first, second = random_product(2, 3, 5, seed=1)
    texts = product_files(first, second)
    read = [int(line, 16) for line in texts["expected.hex"].splitlines()]
    assert [v - (1 << 32) if v >> 31 else v for v in read] == (first @ second).ravel().tolist()
    assert RtlArray(1, 1, "os").parameters(2, 3, 5).count("`define") == 24


def test_a_folder_that_cannot_be_is_one_line(tmp_path, capsys):
    (tmp_path / "other").write_bytes(b"other")
    line = ["cost", "spherefed_convnet", "--precision", "int8", "--batch", "1", "--rtl"]
    assert main([*line, str(tmp_path / "other" / "inside")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --rtl, expected a folder that can be written, got ")
    assert said.count("\n") == 1

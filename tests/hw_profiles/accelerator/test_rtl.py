"""The array in Verilog: its counts, as Verilator gave them, are the closed form's; what `cost --rtl` writes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.hardware.rtl import COUNTS, closed_form
from protofleet.cli import main
from protofleet.hw_profiles.accelerator.rtl_files import SIMULATE, SOURCES, RtlArray, product_files, random_product

RECORDED = json.loads(Path(__file__).with_name("rtl_counts.json").read_text())
verilator = pytest.mark.skipif(shutil.which("verilator") is None, reason="verilator is not installed")


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
    assert RtlArray(1, 1, "os").parameters(2, 3, 5).count("`define") == 23


def test_a_folder_that_cannot_be_is_one_line(tmp_path, capsys):
    (tmp_path / "other").write_bytes(b"other")
    line = ["cost", "spherefed_convnet", "--precision", "int8", "--batch", "1", "--rtl"]
    assert main([*line, str(tmp_path / "other" / "inside")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --rtl, expected a folder that can be written, got ")
    assert said.count("\n") == 1

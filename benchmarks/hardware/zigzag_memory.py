"""Set zigzag beside the array behind a DMA in Verilog, simulated by Verilator.

    python -m benchmarks.hardware.zigzag_memory [--zigzag-python PATH] [--closed-form] [--markdown F]

The 27 settings of `benchmarks.hardware.scalesim_memory`. zigzag 3.9.1 is told the same hardware: 4 x 6 cells, systolic
in both directions; a register for the number that stays in a cell; for each operand and for the results a buffer of
both halves, which gives each row or column a number a cycle; one DRAM port for all, both ways together. The dataflow is
given by the spatial mapping and by what has a register: os unrolls M and N, ws K and N, is K and M. Results have 32
bits on the chip and 8 in DRAM. The order of the loops is zigzag's choice, the fastest that it finds.

`--closed-form` simulates nothing: the counts are the model's, which the Verilog's equal in these 27 settings.
Five settings differ most in cycles; of these the parts are printed.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.hardware.rtl_memory import Setting, models
from benchmarks.hardware.scalesim import own_environment
from benchmarks.hardware.scalesim_memory import BUFFER_BYTES, COLS, ROWS, counted, settings

REQUIREMENTS = ("zigzag-dse==3.9.1", "six")  # which zigzag imports and does not ask for
_HELD = {"os": "O", "ws": "I2", "is": "I1"}  # what has a register in each cell
_UNROLLED = {"os": ("M", "N"), "ws": ("K", "N"), "is": ("K", "M")}  # over rows, over columns
_BANKS = {"os": (ROWS, COLS), "ws": (ROWS, COLS), "is": (COLS, ROWS)}  # of the first operand, of the second
_DRIVER = """
import json
from zigzag.api import get_hardware_performance_zigzag

rows = []
for i, (accelerator, mapping, workload) in enumerate(json.load(open("settings.json"))):
    json.dump(accelerator, open(f"accelerator{i}.yaml", "w"))
    json.dump(mapping, open(f"mapping{i}.yaml", "w"))
    found = get_hardware_performance_zigzag(
        workload, f"accelerator{i}.yaml", f"mapping{i}.yaml", opt="latency", dump_folder="out",
        loma_show_progress_bar=False,
    )
    cost = found[2][0][1][0][0]
    moved = {str(operand): levels[-1] for operand, levels in cost.memory_word_access.items()}
    rows.append({
        "cycles": cost.latency_total2, "computing": cost.ideal_temporal_cycle, "stalled": cost.stall_slack_comb,
        "first": cost.data_onloading_cycle, "last": cost.data_offloading_cycle, "skew": cost.systolic_drain_cycle,
        "moved": {name: str(access) for name, access in moved.items()},
        "loops": str(cost.temporal_mapping),
    })
json.dump(rows, open("rows.json", "w"))
"""


@dataclass(frozen=True)
class Row:
    """One setting: what the Verilog counted, and what zigzag says."""

    setting: Setting
    counts: list[int]
    theirs: dict[str, Any]

    @property
    def over(self) -> float:
        """The Verilog's cycles over zigzag's."""
        return self.counts[0] / float(self.theirs["cycles"])

    @property
    def their_bytes(self) -> dict[str, int]:
        """Bytes to and from DRAM by operand; zigzag counts words of the port's width, rounded down."""
        word = int(self.setting.array.bytes_per_cycle)
        return {name: word * sum(_numbers(said)) for name, said in self.theirs["moved"].items()}

    @property
    def bytes_over(self) -> float:
        """The Verilog's bytes over zigzag's."""
        return sum(self.counts[7:11]) / sum(self.their_bytes.values())


def main() -> int:
    """Run, print, store; 0 when the Verilog's counts are the model's."""
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        python = options.zigzag_python or own_environment(Path(folder), REQUIREMENTS)
        ours = _modelled() if options.closed_form else list(counted(Path(folder)))
        theirs = _zigzag([setting for setting, _ in ours], python, Path(folder))
        rows = [Row(*each, said) for each, said in zip(ours, theirs, strict=True)]
    page = _page(rows, options.closed_form)
    print(page)
    if options.markdown:
        Path(options.markdown).write_text(page)
    return 0 if all([row.counts] == models([row.setting]) for row in rows) else 1


def _modelled() -> list[tuple[Setting, list[int]]]:
    chosen = list(settings())
    return list(zip(chosen, models(chosen), strict=True))


def _zigzag(chosen: list[Setting], python: str, folder: Path) -> list[dict[str, Any]]:
    (folder / "driver.py").write_text(_DRIVER)
    told = [
        (_hardware(s.array.dataflow, int(s.array.bytes_per_cycle)), _mapping(s.array.dataflow), _product(s.shape))
        for s in chosen
    ]
    (folder / "settings.json").write_text(json.dumps(told))
    subprocess.run([python, "driver.py"], cwd=folder, check=True, capture_output=True)
    rows: list[dict[str, Any]] = json.loads((folder / "rows.json").read_text())
    return rows


def _hardware(dataflow: str, bytes_per_cycle: int) -> dict[str, Any]:
    """The accelerator as zigzag's file has it; sizes and widths are in bits."""
    held, (first, second) = _HELD[dataflow], _BANKS[dataflow]
    bits = 32 if held == "O" else 8
    both = ["D1", "D2"]
    return {
        "name": "array",
        "memories": {
            "cell": _memory(bits, {held: (bits, bits)}, []),
            "first": _memory(16 * BUFFER_BYTES, {"I1": (8 * first, 8 * first)}, both),
            "second": _memory(16 * BUFFER_BYTES, {"I2": (8 * second, 8 * second)}, both),
            "results": _memory(16 * BUFFER_BYTES, {"O": (32 * COLS, 32 * COLS)}, both),
            "dram": {
                **_memory(10**10, {}, both),
                "operands": ["I1", "I2", "O"],
                "ports": [_port("rw_port_1", 8 * bytes_per_cycle, [*_moves("I1"), *_moves("I2"), *_moves("O")])],
            },
        },
        "operational_array": {
            "unit_energy": 1.0,
            "unit_area": 1.0,
            "dimensions": both,
            "sizes": [ROWS, COLS],
            "systolic_dimensions": both,
        },
    }


def _memory(size: int, operands: dict[str, tuple[int, int]], served: list[str]) -> dict[str, Any]:
    """A memory with a port to read and one to write, of so many bits."""
    ports = []
    for operand, (read, write) in operands.items():
        reads, writes = ("tl", "th")[: 1 + (operand == "O")], ("fh", "fl")[: 1 + (operand == "O")]
        ports.append(_port("r_port_1", read, [f"{operand}, {each}" for each in reads]))
        ports.append(_port("w_port_1", write, [f"{operand}, {each}" for each in writes]))
    costs = {"r_cost": 1.0, "w_cost": 1.0, "area": 0.0, "latency": 1}
    return {"size": size, **costs, "operands": list(operands), "served_dimensions": served, "ports": ports}


def _port(name: str, bits: int, allocation: list[str]) -> dict[str, Any]:
    kind = {"r": "read", "w": "write", "rw": "read_write"}[name.split("_")[0]]
    return {"name": name, "type": kind, "bandwidth_min": 8, "bandwidth_max": bits, "allocation": allocation}


def _moves(operand: str) -> list[str]:
    return [f"{operand}, {each}" for each in ("fh", "tl", *(("fl", "th") if operand == "O" else ()))]


def _mapping(dataflow: str) -> list[dict[str, Any]]:
    down, across = _UNROLLED[dataflow]
    return [
        {
            "name": "default",
            "spatial_mapping": {"D1": [f"{down}, {ROWS}"], "D2": [f"{across}, {COLS}"]},
            "memory_operand_links": {"O": "O", "W": "I2", "I": "I1"},
        }
    ]


def _product(shape: tuple[int, int, int]) -> list[dict[str, Any]]:
    return [
        {
            "id": 0,
            "name": "product",
            "operator_type": "Gemm",
            "equation": "O[m][n]+=I[m][k]*W[k][n]",
            "loop_dims": ["M", "N", "K"],
            "loop_sizes": list(shape),
            "operand_precision": {"I": 8, "W": 8, "O": 32, "O_final": 8},
            "operand_source": {"I": 0, "W": 0},
        }
    ]


def _page(rows: list[Row], closed_form: bool) -> str:
    equal = sum([row.counts] == models([row.setting]) for row in rows)
    said = f"The Verilog's counts are the model's in {equal} of {len(rows)} settings."
    if closed_form:
        said = "Nothing was simulated here: the counts are the model's, which `benchmarks.hardware.scalesim_memory` "
        said += "holds beside the Verilog in these settings."
    command = "python -m benchmarks.hardware.zigzag_memory" + " --closed-form" * closed_form
    over, bytes_over = [row.over for row in rows], [row.bytes_over for row in rows]
    ranked = sorted(rows, key=lambda row: -abs(math.log(row.over)))
    head = [
        "| dataflow | M, N, K | bytes a cycle | cycles | zigzag | over it | bytes | zigzag | over it |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    return (
        f"# zigzag and the array behind a DMA in Verilog\n\n`{command}`, zigzag 3.9.1\n\n"
        f"{said} Its cycles over zigzag's: "
        f"{min(over):.2f} to {max(over):.2f}, {sorted(over)[len(over) // 2]:.2f} in the median; bytes: "
        f"{min(bytes_over):.2f} to {max(bytes_over):.2f}.\n\n"
        + "\n".join(head + [_line(row) for row in rows])
        + "\n\n## The five that differ most\n\n"
        + "\n".join(_parts(row) for row in ranked[:5])
        + "\n"
    )


def _line(row: Row) -> str:
    shape = ", ".join(map(str, row.setting.shape))
    array = row.setting.array
    return (
        f"| {array.dataflow} | {shape} | {array.bytes_per_cycle} | {row.counts[0]:,} | {row.theirs['cycles']:,.0f} "
        f"| {row.over:.2f} | {sum(row.counts[7:11]):,} | {sum(row.their_bytes.values()):,} | {row.bytes_over:.2f} |"
    )


def _parts(row: Row) -> str:
    (m, n, k), array, counts, said = row.setting.shape, row.setting.array, row.counts, row.theirs
    moved = row.their_bytes
    words = [
        f"- **{array.dataflow}, {m}, {n}, {k}, {array.bytes_per_cycle} bytes a cycle.**",
        f"Operands have {m * k:,} and {k * n:,} numbers, results {m * n:,}; {m * n * k / (ROWS * COLS):,.0f} cycles",
        "if every cell multiplied in each.",
        f"Verilog: {counts[1]:,} cycles computing in {counts[3]:,} folds, {counts[2]:,} stalled,",
        f"{counts[0] - counts[1] - counts[2]:,} after; {counts[7]:,}, {counts[8]:,} and {counts[9]:,} bytes,",
        f"{counts[10]:,} of partial sums.",
        f"zigzag: {said['computing']:,.0f} computing, {said['stalled']:,.0f} stalled, {said['first']:,.0f} before,",
        f"{said['skew']:,.0f} of skew, {said['last']:,.0f} after;",
        f"{moved['I']:,}, {moved['W']:,} and {moved['O']:,} bytes.",
    ]
    return " ".join(words)


def _numbers(said: str) -> list[int]:
    """The counts in zigzag's words for what a memory moves: `4WayDataMoving(rd ↑: 0, wr ↓: 0, …)`."""
    return [int(part.split(":")[1]) for part in said.split("(")[1].rstrip(")").split(",")]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--zigzag-python", help="interpreter of an environment that has zigzag-dse 3.9.1")
    parser.add_argument("--closed-form", action="store_true", help="the model's counts: simulate nothing")
    parser.add_argument("--markdown")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

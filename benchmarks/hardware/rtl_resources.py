"""Count what the array in Verilog takes of an FPGA, by synthesis with Yosys.

    python -m benchmarks.hardware.rtl_resources [--arrays 4x4,8x8] [--family xc7] [--markdown F]
    python -m benchmarks.hardware.rtl_resources --table hw_profiles/accelerator/rtl_resources.json [--jobs 2]

Each array (os; and the one of ws and is) is synthesised without its buffers, 8 bits into 32, and so is one cell of it.
Counted are DSP blocks, flip-flops (FDRE and its kind), look-up tables, and shift registers (SRL), which the skew at the
edges becomes.

`--table` writes the table that ships: whole accelerators (array, control, counters, buffers of 2,048 numbers a bank) of
`SIZES`, and single banks of a buffer. Rows that the file already has are kept, so that it goes on where it ended.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from protofleet.hw_profiles.accelerator.rtl_files import RtlArray, write_rtl

ARRAYS = {"os": "os", "ws": "stationary"}
KINDS = {"DSP48": "DSP", "FD": "flip-flops", "LUT": "LUT", "SRL": "SRL"}
READ = "read_verilog array_os.v array_stationary.v skew.v"
READ_ALL = "read_verilog accelerator.v array_os.v array_stationary.v bank.v skew.v"
FAMILIES = ("xc7", "xcup")
SIZES = ((2, 2), (4, 2), (2, 4), (4, 4), (8, 4), (4, 8), (8, 8), (16, 4), (4, 16), (16, 16))  # rows, cols
ADDRESS = 11  # bits: 2,048 numbers in a bank
BANKS = ((8, 9), (8, 11), (8, 12), (8, 13), (8, 15), (32, 9), (32, 11), (32, 12), (32, 14))  # bits, address bits


def main() -> int:
    """Synthesise, print, store."""
    options = _options()
    if shutil.which("yosys") is None:
        sys.exit("error: yosys, expected on PATH, got none: apt install yosys")
    if options.table:
        write_table(Path(options.table), options.jobs)
        return 0
    lines = [f"| array | dataflow | {' | '.join(KINDS.values())} |", f"| --- | --- |{' ---: |' * len(KINDS)}"]
    for dataflow, name in ARRAYS.items():
        words = "os" if dataflow == "os" else "ws, is"
        sizes = [tuple(int(side) for side in text.split("x")) for text in options.arrays.split(",")]
        tops = [("one cell", f"cell_{name}", "")]
        tops += [(f"{r}x{c}", f"array_{name}", f"chparam -set ROWS {r} -set COLS {c} array_{name};") for r, c in sizes]
        for title, top, parameters in tops:
            counts = resources(top, parameters, dataflow, options.family)
            lines.append(f"| {title} | {words} | {' | '.join(f'{counts[kind]:,}' for kind in KINDS.values())} |")
            print(lines[-1], flush=True)
    if options.markdown:
        command = f"python -m benchmarks.hardware.rtl_resources --arrays {options.arrays} --family {options.family}"
        version = _version()
        text = (
            f"# What the array in Verilog takes\n\n`{command}`, {version}\n\n"
            "Without buffers and control, 8 bits into 32. One cell stands alone: in an array, registers that nothing "
            "reads are left out, and registers beside a multiplier move into its DSP block.\n\n"
        )
        Path(options.markdown).write_text(text + "\n".join(lines) + "\n")
    return 0


def resources(top: str, parameters: str, dataflow: str, family: str) -> Counter[str]:
    """How many of each of `KINDS` a module takes."""
    cells = _synthesised(top, f"{READ}; {parameters}", dataflow, family)
    counts: Counter[str] = Counter()
    for cell, count in cells.items():
        counts.update({kind: count for start, kind in KINDS.items() if cell.startswith(start)})
    return counts


def _synthesised(top: str, read: str, dataflow: str, family: str) -> dict[str, int]:
    """Cells of the chip by type, as Yosys counts them."""
    with tempfile.TemporaryDirectory() as folder:
        write_rtl(Path(folder), RtlArray(8, 8, dataflow))
        synth = f"synth_xilinx -family {family} -flatten -noiopad -noclkbuf -top {top}"
        script = f"{read} {synth}; tee -o stat.json stat -json"
        subprocess.run(["yosys", "-q", "-p", script], cwd=folder, check=True, capture_output=True)
        cells = json.loads((Path(folder) / "stat.json").read_text())["design"]["num_cells_by_type"]
    return {str(cell): int(count) for cell, count in cells.items()}


def write_table(path: Path, jobs: int) -> None:
    """The table that ships: the smallest first, so that an end by hand leaves a table that serves."""
    table = json.loads(path.read_text()) if path.exists() else {"accelerators": [], "banks": []}
    have = {json.dumps(row[:-1]) for rows in (table["accelerators"], table["banks"]) for row in rows}
    whole = [[f, a, *size] for size in SIZES for f in FAMILIES for a in ARRAYS]
    parts = [[f, *size] for size in BANKS for f in FAMILIES]
    with ThreadPoolExecutor(jobs) as pool:
        for key, row in pool.map(_row, [k for k in (*parts, *whole) if json.dumps(k) not in have]):
            table[key].append(row)
            _store_table(path, table)
            print(*row, flush=True)


def _row(key: list[object]) -> tuple[str, list[object]]:
    if len(key) == 3:
        family, width, address = key
        chosen = f"{READ_ALL}; chparam -set WIDTH {width} -set ADDRESS {address} bank;"
        return "banks", [*key, _counted(_synthesised("bank", chosen, "os", str(family)))]
    family, array, rows, cols = key
    sizes = {"ROWS": rows, "COLS": cols, "STATIONARY": int(array != "os"), "ADDRESS": ADDRESS}
    chosen = f"{READ_ALL}; chparam {' '.join(f'-set {name} {value}' for name, value in sizes.items())} accelerator;"
    return "accelerators", [*key, _counted(_synthesised("accelerator", chosen, "os", str(family)))]


def _counted(cells: dict[str, int]) -> list[int]:
    """DSP blocks, look-up tables (with those that are shift registers), flip-flops, halves of block RAM."""
    starts = {"DSP48": (0, 1), "LUT": (1, 1), "SRL": (1, 1), "FD": (2, 1), "RAMB18": (3, 1), "RAMB36": (3, 2)}
    counts = [0, 0, 0, 0]
    for cell, count in cells.items():
        for start, (place, each) in starts.items():
            if cell.startswith(start):
                counts[place] += each * count
    return counts


def _store_table(path: Path, table: dict[str, list[list[object]]]) -> None:
    command = f"python -m benchmarks.hardware.rtl_resources --table {path}"
    head = f' "command": {json.dumps(command)},\n "yosys": {json.dumps(_version())},\n'
    head += ' "counts": ["dsp_slices", "luts", "flip_flops", "block_ram_halves"],\n'
    parts = [
        f' "{key}": [\n' + ",\n".join("  " + json.dumps(row) for row in sorted(table[key], key=str)) + "\n ]"
        for key in ("accelerators", "banks")
    ]
    path.write_text("{\n" + head + ",\n".join(parts) + "\n}\n")


def _version() -> str:
    return subprocess.run(["yosys", "-V"], check=True, capture_output=True, text=True).stdout.split(" (")[0]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arrays", default="4x4,8x8", help="rows x cols, with commas between")
    parser.add_argument("--family", default="xc7", help="of Yosys' synth_xilinx")
    parser.add_argument("--markdown")
    parser.add_argument("--table", help="write the table that ships to this file, and nothing else")
    parser.add_argument("--jobs", type=int, default=2, help="of --table: how many at a time")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

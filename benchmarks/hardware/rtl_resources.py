"""Count what the array in Verilog takes of an FPGA, by synthesis with Yosys.

    python -m benchmarks.hardware.rtl_resources [--arrays 4x4,8x8] [--family xc7] [--markdown F]
    python -m benchmarks.hardware.rtl_resources --table hw_profiles/accelerator/rtl_resources.json [--jobs 2]
    python -m benchmarks.hardware.rtl_resources --written [--arrays 2x2] [--bandwidths 1] [--markdown F]

Each array (os; and the one of ws and is) is synthesised without its buffers, 8 bits into 32, and so is one cell of it.
Counted are DSP blocks, flip-flops (FDRE and its kind), look-up tables, and shift registers (SRL), which the skew at the
edges becomes.

`--table` writes the table that ships: whole accelerators (array, control, counters, buffers of 2,048 numbers a bank) of
`SIZES`; arrays behind a DMA of one byte a cycle (`memory_system.v`: DMA, walkers, buffers of two halves) of `BEHIND`;
and single banks of a buffer. Rows that the file already has are kept, so that it goes on where it ended.

`--written` runs `protofleet cost --rtl` for each array, dataflow and bandwidth, in bytes a cycle, then the line for
Yosys that the README there has, in that folder, and sets its counts beside what the README says the array takes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

from protofleet.cli import main as protofleet
from protofleet.hw_profiles.accelerator.dataflows import DATAFLOWS
from protofleet.hw_profiles.accelerator.rtl_files import RtlArray, synthesis, write_rtl

ARRAYS = {"os": "os", "ws": "stationary"}
KINDS = {"DSP48": "DSP", "FD": "flip-flops", "LUT": "LUT", "SRL": "SRL"}
READ = "read_verilog array_os.v array_stationary.v skew.v"
READ_ALL = "read_verilog accelerator.v array_os.v array_stationary.v bank.v skew.v"
FAMILIES = ("xc7", "xcup")
SIZES = ((2, 2), (4, 2), (2, 4), (4, 4), (8, 4), (4, 8), (8, 8), (16, 4), (4, 16), (16, 16))  # rows, cols
HALF_BYTES = 2_048  # of a buffer behind a DMA
CHIP, CHIP_MHZ, CHIP_SRAM = "fpga-artix7-200t", 100, "12KiB"  # of `--written`
BEHIND = ((2, 2),)  # rows, cols of arrays behind a DMA: the smallest, so that what it takes more is the least
ADDRESS = 11  # bits: 2,048 numbers in a bank
PARTS = ("accelerators", "behind_dma", "banks")
BANKS = ((8, 9), (8, 11), (8, 12), (8, 13), (8, 15), (32, 9), (32, 11), (32, 12), (32, 14))  # bits, address bits


def main() -> int:
    """Synthesise, print, store."""
    options = _options()
    if shutil.which("yosys") is None:
        sys.exit("error: yosys, expected on PATH, got none: apt install yosys")
    if options.table:
        write_table(Path(options.table), options.jobs)
        return 0
    if options.written:
        return _write_written(options)
    lines = [f"| array | dataflow | {' | '.join(KINDS.values())} |", f"| --- | --- |{' ---: |' * len(KINDS)}"]
    for dataflow, name in ARRAYS.items():
        words = "os" if dataflow == "os" else "ws, is"
        sizes = _sizes(options)
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


def written(rows: int, cols: int, dataflow: str, rate: Fraction, folder: Path) -> tuple[list[int], str]:
    """Run `protofleet cost --rtl` into `folder`: what its README says the array takes, and its script for Yosys.

    An array takes DSP blocks, look-up tables, flip-flops, halves of block RAM.
    """
    line = ["cost", "spherefed_convnet", "--batch", "1", "--device", CHIP, "--precision", "int8", "--rtl", str(folder)]
    line += ["--rows", str(rows), "--cols", str(cols), "--dataflow", dataflow, "--sram", CHIP_SRAM]
    line += ["--mhz", str(CHIP_MHZ), "--bandwidth", str(float(rate * CHIP_MHZ / 1_000))]
    with contextlib.redirect_stdout(io.StringIO()):
        if protofleet(line) != 0:
            sys.exit(f"error: protofleet {shlex.join(line)}, expected an array that {CHIP} can hold")
    readme = (folder / "README.md").read_text()
    (takes,) = re.findall(r"it takes about (.*)\.$", readme, re.MULTILINE)
    (command,) = re.findall(r"^    (yosys .*)$", readme, re.MULTILINE)
    said = [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) of [\d,]+ ", takes)]
    return said, shlex.split(command)[-1].removesuffix("; stat")


def counted(script: str, folder: Path) -> list[int]:
    """DSP blocks, look-up tables, flip-flops, halves of block RAM, as Yosys counts them in a written folder."""
    return _counted(_cells(script, folder))


def _write_written(options: argparse.Namespace) -> int:
    lines = [
        "| array | dataflow | bytes a cycle | DSP blocks | look-up tables | flip-flops | halves of block RAM |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    settings = [
        (rows, cols, dataflow, Fraction(rate))
        for rows, cols in _sizes(options)
        for rate in options.bandwidths.split(",")
        for dataflow in DATAFLOWS
    ]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        folders = [Path(folder) / str(number) for number in range(len(settings))]
        told = [written(*setting, each) for setting, each in zip(settings, folders, strict=True)]
        running = {}  # `is` has the hardware of ws
        for (_, script), each in zip(told, folders, strict=True):
            if script not in running:
                running[script] = pool.submit(counted, script, each)
        for (rows, cols, dataflow, rate), (said, script) in zip(settings, told, strict=True):
            cells = (f"{a:,} / {b:,}" for a, b in zip(said, running[script].result(), strict=True))
            lines.append(f"| {rows}x{cols} | {dataflow} | {rate} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    if options.markdown:
        command = f"python -m benchmarks.hardware.rtl_resources --written --arrays {options.arrays}"
        text = (
            "# What `protofleet cost --rtl` writes, counted by Yosys\n\n"
            f"`{command} --bandwidths {options.bandwidths}`, {_version()}\n\n"
            f"`cost --rtl` says / Yosys counts, of `memory_system.v` with DMA and buffers on {CHIP}: {CHIP_SRAM} "
            "on the chip, 8 bits into 32. What is said has the DMA, walkers and ports of 2x2 cells and a bus of one "
            "byte, whatever the array.\n\n"
        )
        Path(options.markdown).write_text(text + "\n".join(lines) + "\n")
    return 0


def _sizes(options: argparse.Namespace) -> list[tuple[int, int]]:
    return [(int(r), int(c)) for r, c in (text.split("x") for text in options.arrays.split(","))]


def _synthesised(top: str, read: str, dataflow: str, family: str) -> dict[str, int]:
    """Cells of the chip by type, as Yosys counts them."""
    with tempfile.TemporaryDirectory() as folder:
        write_rtl(Path(folder), RtlArray(8, 8, dataflow))
        synth = f"synth_xilinx -family {family} -flatten -noiopad -noclkbuf -top {top}"
        return _cells(f"{read} {synth}", Path(folder))


def _cells(script: str, folder: Path) -> dict[str, int]:
    subprocess.run(["yosys", "-q", "-p", f"{script}; tee -o stat.json stat -json"], cwd=folder, check=True,
                   capture_output=True)  # fmt: skip
    cells = json.loads((folder / "stat.json").read_text())["design"]["num_cells_by_type"]
    return {str(cell): int(count) for cell, count in cells.items()}


def write_table(path: Path, jobs: int) -> None:
    """The table that ships: the smallest first, so that an end by hand leaves a table that serves."""
    table = {name: [] for name in PARTS} | (json.loads(path.read_text()) if path.exists() else {})
    have = {json.dumps([name, *row[:-1]]) for name in PARTS for row in table[name]}
    wanted = {
        "banks": [[f, *size] for size in BANKS for f in FAMILIES],
        "behind_dma": [[f, a, *size] for size in BEHIND for f in FAMILIES for a in ARRAYS],
        "accelerators": [[f, a, *size] for size in SIZES for f in FAMILIES for a in ARRAYS],
    }
    missing = [[name, *key] for name, keys in wanted.items() for key in keys if json.dumps([name, *key]) not in have]
    with ThreadPoolExecutor(jobs) as pool:
        for name, row in pool.map(_row, missing):
            table[name].append(row)
            _store_table(path, table)
            print(*row, flush=True)


def _row(key: list[object]) -> tuple[str, list[object]]:
    name, family, *rest = key
    if name == "behind_dma":
        dataflow, rows, cols = rest
        array = RtlArray(int(rows), int(cols), str(dataflow), 8, ADDRESS, Fraction(1), HALF_BYTES)  # type: ignore[call-overload]
        with tempfile.TemporaryDirectory() as folder:
            write_rtl(Path(folder), array)
            return str(name), [*key[1:], _counted(_cells(synthesis(array, str(family)), Path(folder)))]
    if name == "banks":
        top, sizes = "bank", {"WIDTH": rest[0], "ADDRESS": rest[1]}
    else:
        top = "accelerator"
        sizes = {"ROWS": rest[1], "COLS": rest[2], "STATIONARY": int(rest[0] != "os"), "ADDRESS": ADDRESS}
    chosen = f"{READ_ALL}; chparam {' '.join(f'-set {each} {value}' for each, value in sizes.items())} {top};"
    return str(name), [*key[1:], _counted(_synthesised(top, chosen, "os", str(family)))]


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
        for key in PARTS
    ]
    path.write_text("{\n" + head + ",\n".join(parts) + "\n}\n")


def _version() -> str:
    return subprocess.run(["yosys", "-V"], check=True, capture_output=True, text=True).stdout.split(" (")[0]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arrays", default="4x4,8x8", help="rows x cols, with commas between")
    parser.add_argument("--family", default="xc7", help="of Yosys' synth_xilinx")
    parser.add_argument("--markdown")
    parser.add_argument("--written", action="store_true", help="what `protofleet cost --rtl` writes, and says of it")
    parser.add_argument("--bandwidths", default="1", help="of --written: bytes a cycle, with commas between")
    parser.add_argument("--table", help="write the table that ships to this file, and nothing else")
    parser.add_argument("--jobs", type=int, default=2, help="of --table and --written: how many at a time")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

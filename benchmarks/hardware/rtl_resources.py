"""Count what the array in Verilog takes of an FPGA, by synthesis with Yosys.

    python -m benchmarks.hardware.rtl_resources [--arrays 4x4,8x8] [--family xc7] [--markdown F]

Each array (os; and the one of ws and is) is synthesised without its buffers, 8 bits into 32, and so is one cell of it.
Counted are DSP blocks, flip-flops (FDRE and its kind), look-up tables, and shift registers (SRL), which the skew at the
edges becomes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from protofleet.hw_profiles.accelerator.rtl_files import RtlArray, write_rtl

ARRAYS = {"os": "os", "ws": "stationary"}
KINDS = {"DSP48": "DSP", "FD": "flip-flops", "LUT": "LUT", "SRL": "SRL"}
READ = "read_verilog array_os.v array_stationary.v skew.v"


def main() -> int:
    """Synthesise, print, store."""
    options = _options()
    if shutil.which("yosys") is None:
        sys.exit("error: yosys, expected on PATH, got none: apt install yosys")
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
        said = subprocess.run(["yosys", "-V"], check=True, capture_output=True, text=True).stdout
        version = said.split(" (")[0]
        text = (
            f"# What the array in Verilog takes\n\n`{command}`, {version}\n\n"
            "Without buffers and control, 8 bits into 32. One cell stands alone: in an array, registers that nothing "
            "reads are left out, and registers beside a multiplier move into its DSP block.\n\n"
        )
        Path(options.markdown).write_text(text + "\n".join(lines) + "\n")
    return 0


def resources(top: str, parameters: str, dataflow: str, family: str) -> Counter[str]:
    """How many of each of `KINDS` a module takes."""
    with tempfile.TemporaryDirectory() as folder:
        write_rtl(Path(folder), RtlArray(8, 8, dataflow))
        synth = f"synth_xilinx -family {family} -flatten -noiopad -noclkbuf -top {top}"
        script = f"{READ}; {parameters} {synth}; tee -o stat.json stat -json"
        subprocess.run(["yosys", "-q", "-p", script], cwd=folder, check=True, capture_output=True)
        cells = json.loads((Path(folder) / "stat.json").read_text())["design"]["num_cells_by_type"]
    counts: Counter[str] = Counter()
    for cell, count in cells.items():
        counts.update({kind: count for start, kind in KINDS.items() if cell.startswith(start)})
    return counts


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arrays", default="4x4,8x8", help="rows x cols, with commas between")
    parser.add_argument("--family", default="xc7", help="of Yosys' synth_xilinx")
    parser.add_argument("--markdown")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

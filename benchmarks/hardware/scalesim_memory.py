"""Set SCALE-Sim's mode with a stated bandwidth beside the array behind a DMA in Verilog, simulated by Verilator.

    python -m benchmarks.hardware.scalesim_memory [--scalesim-python PATH] [--markdown F]

27 settings: three products, os, ws and is, three bandwidths, on 4 x 6 cells with half a buffer of 4,096 bytes for each
operand and the results, of one byte each. SCALE-Sim 3.0.0 runs with `InterfaceBandwidth = USER`; it has an interface of
this bandwidth for each operand and for the results, where the Verilog has one DMA for all. `at thrice` is therefore the
Verilog's model at three times the bandwidth. Five settings differ most in cycles; of these the parts are printed.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from benchmarks.hardware.rtl import Shape
from benchmarks.hardware.rtl_memory import Setting, compile_memory, models, simulated
from benchmarks.hardware.scalesim import DRIVER, config_text, own_environment, read_table
from protofleet.hw_profiles.accelerator.dataflows import DATAFLOWS
from protofleet.hw_profiles.accelerator.memory_system import timed
from protofleet.hw_profiles.accelerator.rtl_files import RtlArray
from protofleet.hw_profiles.accelerator.scalesim_files import topology_text

SHAPES: tuple[Shape, ...] = ((64, 48, 72), (8, 96, 128), (200, 12, 9))
BANDWIDTHS = (1, 4, 8)
ROWS, COLS, BUFFER_BYTES = 4, 6, 4_096
_THEIRS = ("Total Cycles (incl. prefetch)", "Total Cycles", "Stall Cycles")
_MOVED = ("DRAM IFMAP Reads", "DRAM Filter Reads", "DRAM OFMAP Writes")


def main() -> int:
    """Run, print, store; 0 when the Verilog's counts are the model's."""
    options = _options()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        python = options.scalesim_python or own_environment(Path(folder))
        theirs = {
            (dataflow, bandwidth): _scalesim(dataflow, bandwidth, python, Path(folder))
            for dataflow in DATAFLOWS
            for bandwidth in BANDWIDTHS
        }
        for setting, counts in counted(Path(folder)):
            array, place = setting.array, SHAPES.index(setting.shape)
            said = theirs[array.dataflow, int(array.bytes_per_cycle)][place]
            rows.append({"setting": setting, "counts": counts, "theirs": said})
    page = _page(rows)
    print(page)
    if options.markdown:
        Path(options.markdown).write_text(page)
    return 0 if all(map(_equal, rows)) else 1


def settings() -> Iterator[Setting]:
    """The 27 settings."""
    for dataflow in DATAFLOWS:
        for bandwidth in BANDWIDTHS:
            array = RtlArray(ROWS, COLS, dataflow, 8, 14, Fraction(bandwidth), BUFFER_BYTES, 1)
            yield from (Setting(array, "drawn", shape, (False, False)) for shape in SHAPES)


def counted(folder: Path) -> Iterator[tuple[Setting, list[int]]]:
    """The 27 settings and what the Verilog counts of each, compiled in `folder`."""
    for kind in ("os", "ws"):
        compile_memory(RtlArray(ROWS, COLS, kind, 8, 14, Fraction(max(BANDWIDTHS)), BUFFER_BYTES), folder / kind)
    for setting in settings():
        home = folder / ("os" if setting.array.dataflow == "os" else "ws")
        yield setting, simulated(setting, home, SHAPES.index(setting.shape))


def _scalesim(dataflow: str, bandwidth: int, python: str, folder: Path) -> list[dict[str, int]]:
    """SCALE-Sim's cycles and words moved of each product."""
    root = Path(tempfile.mkdtemp(dir=folder))
    config = config_text(ROWS, COLS, dataflow, sram_kb=2 * BUFFER_BYTES // 1024)
    config = config.replace("= CALC", "= USER").replace("\nBandwidth = 10\n", f"\nBandwidth = {bandwidth}\n")
    (root / "driver.py").write_text(DRIVER)
    (root / "run.cfg").write_text(config)
    (root / "run.csv").write_text(topology_text([(f"p{i}", *shape) for i, shape in enumerate(SHAPES)]))
    command = [python, "driver.py", "run.cfg", "run.csv", "out"]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    reports = next((root / "out").iterdir())
    tables = (read_table(reports / "COMPUTE_REPORT.csv"), read_table(reports / "DETAILED_ACCESS_REPORT.csv"))
    return [
        {name: int(float(({**c, **a})[name])) for name in (*_THEIRS, *_MOVED)} for c, a in zip(*tables, strict=True)
    ]


def _page(rows: list[dict[str, object]]) -> str:
    head = [
        "| dataflow | M, N, K | bytes a cycle | cycles | at thrice | SCALE-Sim | over it | bytes | SCALE-Sim | "
        "over it |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    ranked = sorted(rows, key=lambda row: -abs(math.log(_over(row))))
    equal = sum(map(_equal, rows))
    lines = [_line(row) for row in rows]
    return (
        "# SCALE-Sim's stated bandwidth and the array behind a DMA in Verilog\n\n"
        "`python -m benchmarks.hardware.scalesim_memory`\n\n"
        f"The Verilog's counts are the model's in {equal} of {len(rows)} settings. Its cycles over "
        f"SCALE-Sim's total with prefetch: {min(map(_over, rows)):.2f} to {max(map(_over, rows)):.2f}; bytes: "
        f"{min(map(_over_bytes, rows)):.2f} to {max(map(_over_bytes, rows)):.2f}.\n\n" + "\n".join(head + lines)
        + "\n\n## The five that differ most\n\n" + "\n".join(_parts(row) for row in ranked[:5]) + "\n"
    )  # fmt: skip


def _equal(row: dict[str, object]) -> bool:
    setting = row["setting"]
    assert isinstance(setting, Setting)
    return [row["counts"]] == models([setting])


def _over(row: dict[str, object]) -> float:
    return row["counts"][0] / row["theirs"][_THEIRS[0]]  # type: ignore[index]


def _over_bytes(row: dict[str, object]) -> float:
    return sum(row["counts"][7:11]) / sum(row["theirs"][name] for name in _MOVED)  # type: ignore[index]


def _line(row: dict[str, object]) -> str:
    setting, counts, theirs = row["setting"], row["counts"], row["theirs"]
    assert isinstance(setting, Setting)
    assert isinstance(counts, list)
    assert isinstance(theirs, dict)
    behind = setting.array.behind
    thrice = timed(*setting.shape, replace(behind, bytes_per_cycle=3 * behind.bytes_per_cycle)).cycles
    figures = (counts[0], thrice, theirs[_THEIRS[0]])
    moved = f"{sum(counts[7:11]):,} | {sum(theirs[name] for name in _MOVED):,}"
    cycles = " | ".join(f"{value:,}" for value in figures)
    shape = ", ".join(map(str, setting.shape))
    return (
        f"| {setting.array.dataflow} | {shape} | {behind.bytes_per_cycle} | {cycles} | {_over(row):.2f} | {moved} "
        f"| {_over_bytes(row):.2f} |"
    )


def _parts(row: dict[str, object]) -> str:
    setting, counts, theirs = row["setting"], row["counts"], row["theirs"]
    assert isinstance(setting, Setting)
    assert isinstance(counts, list)
    assert isinstance(theirs, dict)
    m, n, k = setting.shape
    words = [
        f"- **{setting.array.dataflow}, {m}, {n}, {k}, {setting.array.bytes_per_cycle} bytes a cycle.**",
        f"Operands have {m * k:,} and {k * n:,} numbers, results {m * n:,}.",
        f"Verilog: {counts[1]:,} cycles computing, {counts[2]:,} stalled, {counts[0] - counts[1] - counts[2]:,} after;",
        f"{counts[7]:,}, {counts[8]:,} and {counts[9]:,} bytes, {counts[10]:,} of partial sums.",
        f"SCALE-Sim: {theirs[_THEIRS[2]]:,} of {theirs[_THEIRS[1]]:,} cycles stalled,",
        f"{theirs[_THEIRS[0]] - theirs[_THEIRS[1]]:,} around them;",
        ", ".join(f"{theirs[x]:,}" for x in _MOVED) + " words.",
    ]
    return " ".join(words)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scalesim-python", help="interpreter of an environment that has scalesim 3.0.0")
    parser.add_argument("--markdown")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

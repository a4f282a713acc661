"""Check the model of memory against the array behind a DMA in Verilog, simulated by Verilator.

    python -m benchmarks.hardware.rtl_memory [--arrays 4x6] [--bandwidths 1/2,1,3/2,2,4,8] [--macs 300000]
        [--seed 0] [--json F] [--markdown F] [--recorded F]

Products are those of `benchmarks.hardware.rtl`, of at most `--macs` multiply-accumulates: forward, input gradient (the
second operand lies transposed in DRAM), weight gradient (the first does), and 24 drawn at random. Each is computed with
os, ws and is at each bandwidth, in bytes a cycle, with one of four sizes of buffers and results of 4 bytes or 1. The
result must be numpy's, and all counters the model's: cycles computing, stalled and in all, folds, reads and writes
on-chip, bytes of both operands, results and partial sums in DRAM. The exit code is 1 where one differs.
`tests/hw_profiles/accelerator/rtl_memory_counts.json` is written by `--json`.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from benchmarks.hardware.rtl import Shape, drawn_products, training_products
from protofleet.hw_profiles.accelerator.dataflows import DATAFLOWS
from protofleet.hw_profiles.accelerator.memory_system import Plan, Timed, plan, timed_all
from protofleet.hw_profiles.accelerator.rtl_files import (
    SIMULATE_MEMORY,
    RtlArray,
    memory_arguments,
    product_files,
    random_product,
    write_rtl,
)
from protofleet.hw_profiles.accelerator.systolic import sram_traffic

COUNTS = (
    "total_cycles", "compute_cycles", "stall_cycles", "folds", "first_reads", "second_reads", "result_writes",
    "first_words", "second_words", "result_words", "partial_words", "wrong",
)  # fmt: skip
BUFFERS = (256, 768, 4_096, 65_536)  # bytes of half a buffer
TRANSPOSED = {"weight_gradient": (True, False), "input_gradient": (False, True)}
_BUS = 8
_ADDRESS = 14


@dataclass(frozen=True)
class Setting:
    """One product on one array behind one DMA; `transposed` says how the operands lie in DRAM."""

    array: RtlArray
    phase: str
    shape: Shape
    transposed: tuple[bool, bool]


def models(settings: Sequence[Setting]) -> list[list[int]]:
    """`COUNTS` of each as the model says them; no result is wrong."""
    timed = timed_all([(*setting.shape, setting.array.behind) for setting in settings])
    return [_counts(setting, said) for setting, said in zip(settings, timed, strict=True)]


def _counts(setting: Setting, said: Timed) -> list[int]:
    array, shape = setting.array, setting.shape
    folds, _ = DATAFLOWS[array.dataflow].folds(*shape, array.rows, array.cols)
    on_chip = sram_traffic(*shape, rows=array.rows, cols=array.cols, dataflow=array.dataflow)
    cycles = (said.cycles, said.compute_cycles, said.stall_cycles)
    return [
        *cycles, folds, *on_chip, said.first_bytes, said.second_bytes, said.written_bytes, said.spilled_bytes, 0
    ]  # fmt: skip


def kind_of(chosen: Plan) -> str:
    """What a plan does, in words."""
    words = {
        "chunks": chosen.chunks > 1,
        "blocks of several tiles": chosen.block > 1,
        "left kept": chosen.keeps_left,
        "nothing kept": chosen.reloads,
        "results by chunk": chosen.spills,
    }
    return ", ".join(name for name, true in words.items() if true) or "one tile kept"


def main() -> int:
    """Run, print, store; 0 when all figures are equal."""
    options = _options()
    if options.recorded:
        rows = json.loads(Path(options.recorded).read_text())["rows"]
        print(_page(options, [recorded(row) for row in rows], [row[-1] for row in rows]))
        return 0
    if shutil.which("verilator") is None:
        sys.exit("error: verilator, expected on PATH, got none: apt install verilator")
    settings, counted = list(_settings(options)), []
    for key, group in _groups(settings).items():
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            compile_memory(RtlArray(*key, 8, _ADDRESS, Fraction(_BUS), max(BUFFERS)), Path(folder))
            found = [simulated(setting, Path(folder), seed) for seed, setting in enumerate(group)]
        counted += found
        wrong = [(s, said, c) for s, said, c in zip(group, models(group), found, strict=True) if said != c]
        for setting, said, counts in wrong:
            print("DIFFERENT", setting, plan(*setting.shape, setting.array.behind), said, counts)
        print(*key, f"{len(group) - len(wrong)} of {len(group)} equal, {time.perf_counter() - start:.0f} s", flush=True)
    ordered = [setting for group in _groups(settings).values() for setting in group]
    _store(options, ordered, counted)
    right = models(ordered) == counted
    print("all equal" if right else "NOT EQUAL")
    return 0 if right else 1


def recorded(row: Sequence[Any]) -> Setting:
    """A row of the stored file as the setting that was simulated; how operands lay, is left out."""
    rows, cols, dataflow, buffer_bytes, rate, result_bytes, phase, shape = row[:-1]
    array = RtlArray(rows, cols, dataflow, 8, _ADDRESS, Fraction(rate), buffer_bytes, result_bytes)
    return Setting(array, phase, tuple(shape), (False, False))


def compile_memory(array: RtlArray, folder: Path, *, quick: bool = False) -> None:
    """Compile the array behind its DMA in `folder`; `is` runs on the array of ws."""
    write_rtl(folder, array)
    command = SIMULATE_MEMORY.replace("-O3", "-O0 -CFLAGS -O0") if quick else SIMULATE_MEMORY
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)


def simulated(setting: Setting, folder: Path, seed: int) -> list[int]:
    """`COUNTS` of one setting, by the simulation in `folder`."""
    array, (m, n, k) = setting.array, setting.shape
    operands = random_product(m, n, k, array.width, seed)
    for name, text in product_files(*operands, array.width, setting.transposed).items():
        (folder / name).write_text(text)
    arguments = memory_arguments(m, n, k, array.behind)
    arguments |= {"turned": int(array.dataflow == "is")}
    arguments |= {name: int(lies) for name, lies in zip(("ta", "tb"), setting.transposed, strict=True)}
    command = ["./memory/Vmemory_testbench", *(f"+{name}={value}" for name, value in arguments.items())]
    said = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True).stdout.split()
    return [int(said[said.index(name) + 1]) for name in COUNTS]


def _settings(options: argparse.Namespace) -> Iterable[Setting]:
    products = training_products(options.macs) + drawn_products(options.seed)
    rng = random.Random(options.seed)
    for text in options.arrays.split(","):
        rows, cols = (int(side) for side in text.split("x"))
        for number, (phase, shape) in enumerate(products):
            drawn = (rng.random() < 0.5, rng.random() < 0.5)
            for place, dataflow in enumerate(DATAFLOWS):
                for turn, bandwidth in enumerate(options.bandwidths.split(",")):
                    buffer_bytes = BUFFERS[(number + place + turn) % len(BUFFERS)]
                    array = RtlArray(
                        rows,
                        cols,
                        dataflow,
                        address=_ADDRESS,
                        bytes_per_cycle=Fraction(bandwidth),
                        buffer_bytes=buffer_bytes,
                        result_bytes=(4, 1)[(number + turn) % 2],
                    )
                    yield Setting(
                        array, phase, shape, drawn if phase == "drawn" else TRANSPOSED.get(phase, (False,) * 2)
                    )


def _groups(settings: Iterable[Setting]) -> dict[tuple[int, int, str], list[Setting]]:
    """Those that one compiled simulation runs."""
    groups: dict[tuple[int, int, str], list[Setting]] = {}
    for each in settings:
        key = (each.array.rows, each.array.cols, "os" if each.array.dataflow == "os" else "ws")
        groups.setdefault(key, []).append(each)
    return groups


def _store(options: argparse.Namespace, settings: list[Setting], counted: list[list[int]]) -> None:
    if options.json:
        head = f' "counts": {json.dumps(COUNTS)},\n "command": {json.dumps(_command(options))},\n "rows": [\n'
        rows = ",\n".join("  " + json.dumps([*_row(s), c]) for s, c in zip(settings, counted, strict=True))
        Path(options.json).write_text("{\n" + head + rows + "\n ]\n}\n")
    if options.markdown:
        Path(options.markdown).write_text(_page(options, settings, counted))


def _row(setting: Setting) -> list[object]:
    a = setting.array
    return [
        a.rows,
        a.cols,
        a.dataflow,
        a.buffer_bytes,
        str(a.bytes_per_cycle),
        a.result_bytes,
        setting.phase,
        setting.shape,
    ]


def _page(options: argparse.Namespace, settings: list[Setting], counted: list[list[int]]) -> str:
    shapes = {(setting.phase, setting.shape) for setting in settings}
    phases = Counter(phase for phase, _ in shapes)
    kinds = Counter(
        ("os" if s.array.dataflow == "os" else "ws, is", kind_of(plan(*s.shape, s.array.behind))) for s in settings
    )
    groups: dict[tuple[str, str, str], list[tuple[Setting, list[int]]]] = {}
    for setting, counts in zip(settings, counted, strict=True):
        a = setting.array
        groups.setdefault((f"{a.rows}x{a.cols}", a.dataflow, str(a.bytes_per_cycle)), []).append((setting, counts))
    equal = sum(said == c for said, c in zip(models(settings), counted, strict=True))
    table = [
        "| array | dataflow | bytes a cycle | equal | cycles | computing | stalled | bytes in DRAM |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        *(_line(key, rows) for key, rows in groups.items()),
    ]
    plans = [f"| {flow} | {kind} | {count} |" for (flow, kind), count in sorted(kinds.items())]
    named = ", ".join(f"{count} {phase}" for phase, count in sorted(phases.items()))
    return "\n".join(
        [
            f"# The model of memory and the array behind a DMA in Verilog\n\n`{_command(options)}`\n",
            f"{len(shapes)} products: {named}. **{equal} of {len(settings)}** settings are equal in all of: result "
            "(numpy's), cycles computing, stalled and in all, folds, reads and writes on-chip, bytes of the first and "
            "second operand, of results and of partial sums in DRAM.\n",
            "`protofleet cost` counts every product of a network by this model.\n",
            *table,
            "\nWhat the plans of these settings do:\n\n| dataflow | plan | settings |\n| --- | --- | ---: |",
            *plans,
            "",
        ]
    )


def _line(key: tuple[str, str, str], rows: list[tuple[Setting, list[int]]]) -> str:
    equal = sum(said == c for said, (_, c) in zip(models([s for s, _ in rows]), rows, strict=True))
    sums = [sum(c[place] for _, c in rows) for place in (0, 1, 2)]
    figures = " | ".join(f"{value:,}" for value in (*sums, sum(sum(c[7:11]) for _, c in rows)))
    return f"| {' | '.join(key)} | {equal} of {len(rows)} | {figures} |"


def _command(options: argparse.Namespace) -> str:
    return (
        f"python -m benchmarks.hardware.rtl_memory --arrays {options.arrays} --bandwidths {options.bandwidths} "
        f"--macs {options.macs} --seed {options.seed}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arrays", default="4x6", help="rows x cols, with commas between")
    parser.add_argument("--bandwidths", default="1/2,1,3/2,2,4,8", help=f"bytes a cycle, at most {_BUS}")
    parser.add_argument("--macs", type=int, default=300_000, help="of a product, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    parser.add_argument("--markdown")
    parser.add_argument("--recorded", help="simulate nothing: the page of the counts that --json stored here")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

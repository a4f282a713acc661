"""Check the closed form of a systolic array against the array in Verilog, simulated by Verilator.

    python -m benchmarks.hardware.rtl [--arrays 8x8,4x16] [--macs 600000] [--seed 0] [--json F] [--markdown F]

Products are those of a training step at batch 1 of SphereFed's MobileNetV2 and ConvNet (forward, input gradient and
weight gradient) of at most `--macs` multiply-accumulates, and 24 drawn at random. Each is computed with os, ws and is.
Its result must be numpy's, and its cycles, folds, reads and writes on-chip must equal the closed form's; the exit code
is 1 where one does not. `tests/hw_profiles/accelerator/rtl_counts.json` is written by `--json`.
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
from pathlib import Path

from protofleet.hw_profiles.accelerator.dataflows import DATAFLOWS
from protofleet.hw_profiles.accelerator.rtl_files import SIMULATE, RtlArray, product_files, random_product, write_rtl
from protofleet.hw_profiles.accelerator.simulate import Array
from protofleet.hw_profiles.accelerator.systolic import gemm_cycles, sram_traffic
from protofleet.hw_profiles.reports.cost_report import step_cost
from protofleet.hw_profiles.reports.subject import load_subject

NETWORKS = ("spherefed_mobilenetv2", "spherefed_convnet")
COUNTS = ("compute_cycles", "busy_cycles", "folds", "first_reads", "second_reads", "result_writes", "wrong")
Shape = tuple[int, int, int]


def closed_form(shape: Shape, rows: int, cols: int, dataflow: str) -> list[int]:
    """What the model says of a product (M, N, K): cycles F*P, folds F, reads of both operands, writes."""
    size = {"rows": rows, "cols": cols, "dataflow": dataflow}
    folds, _ = DATAFLOWS[dataflow].folds(*shape, rows, cols)
    return [gemm_cycles(*shape, **size) + 1, folds, *sram_traffic(*shape, **size)]  # type: ignore[arg-type]


def main() -> int:
    """Run, print, store; 0 when all figures are equal."""
    options = _options()
    if shutil.which("verilator") is None:
        sys.exit("error: verilator, expected on PATH, got none: apt install verilator")
    shapes = training_products(options.macs) + drawn_products(options.seed)
    arrays = [tuple(int(side) for side in text.split("x")) for text in options.arrays.split(",")]
    measured, lines, right = [], [], True
    for rows, cols in arrays:
        for dataflow in DATAFLOWS:
            start = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                counted = simulated(RtlArray(rows, cols, dataflow), [shape for _, shape in shapes], Path(folder))
            ours = [closed_form(shape, rows, cols, dataflow) for _, shape in shapes]
            theirs = [[c[0], *c[2:6]] for c in counted]
            equal = sum(a == b and not c[-1] for a, b, c in zip(ours, theirs, counted, strict=True))
            right &= equal == len(shapes)
            cycles, after = sum(c[0] for c in counted), {c[1] - c[0] for c in counted}
            words = f"| {rows}x{cols} | {dataflow} | {equal} of {len(shapes)} | {cycles:,} | {max(after)} |"
            lines.append(words)
            print(words, f"{time.perf_counter() - start:.0f} s", flush=True)
            measured += [
                {"rows": rows, "cols": cols, "dataflow": dataflow, "phase": phase, "shape": shape, "counts": c[:-1]}
                for (phase, shape), c in zip(shapes, counted, strict=True)
            ]
            for (phase, shape), a, b, c in zip(shapes, ours, theirs, counted, strict=True):
                if a != b or c[-1]:
                    print(f"DIFFERENT {phase} {shape}: closed form {a}, Verilog {b}, wrong results {c[-1]}")
    _store(options, measured, lines)
    print("all equal" if right else "NOT EQUAL")
    return 0 if right else 1


def simulated(array: RtlArray, shapes: list[Shape], folder: Path) -> list[list[int]]:
    """`COUNTS` of each product (M, N, K), by one compiled simulation in `folder`."""
    write_rtl(folder, array)
    subprocess.run(SIMULATE.split(), cwd=folder, check=True, capture_output=True)
    counts = []
    for seed, (m, n, k) in enumerate(shapes):
        for name, text in product_files(*random_product(m, n, k, array.width, seed), array.width).items():
            (folder / name).write_text(text)
        command = ["./obj_dir/Vtestbench", f"+m={m}", f"+n={n}", f"+k={k}"]
        said = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True).stdout.split()
        counts.append([int(said[said.index(name) + 1]) for name in COUNTS])
    return counts


def training_products(most_macs: int) -> list[tuple[str, Shape]]:
    """Phase and (M, N, K) of each distinct product of a training step of `NETWORKS` of so many multiply-accumulates."""
    found: dict[Shape, str] = {}
    for name in NETWORKS:
        for cost in step_cost(load_subject(name, classes=10, batch=1), Array()).layers:
            for p in cost.placed:
                found.setdefault((p.m, p.n, p.k), cost.layer.phase)
    return [(phase, s) for s, phase in found.items() if s[0] * s[1] * s[2] <= most_macs]


def drawn_products(seed: int) -> list[tuple[str, Shape]]:
    """24 products with sides of 1 to 63, small ones more often."""
    rng = random.Random(seed)
    drawn = [tuple(int(2 ** rng.uniform(0, 6)) for _ in range(3)) for _ in range(24)]
    return [("drawn", (m, n, k)) for m, n, k in drawn]


def _store(options: argparse.Namespace, measured: list[dict[str, object]], lines: list[str]) -> None:
    if options.json:
        head = f' "counts": {json.dumps(COUNTS[:-1])},\n "command": {json.dumps(_command(options))},\n "rows": [\n'
        rows = ",\n".join("  " + json.dumps(row) for row in measured)
        Path(options.json).write_text("{\n" + head + rows + "\n ]\n}\n")
    if options.markdown:
        phases = sorted({str(row["phase"]) for row in measured})
        kinds = {p: len({str(r["shape"]) for r in measured if r["phase"] == p}) for p in phases}
        text = (
            f"# The closed form and the array in Verilog\n\n`{_command(options)}`\n\n"
            f"Products: {', '.join(f'{count} {phase}' for phase, count in kinds.items())}. "
            "Equal: the result is numpy's, and cycles, folds, reads of both operands and writes on-chip are the closed "
            "form's. Compute cycles are F·P, summed over the products. What follows them is the draining of the last "
            "fold, which the closed form leaves out.\n\n"
            "| array | dataflow | equal | compute cycles | cycles after them, at most |\n"
            "| --- | --- | ---: | ---: | ---: |\n" + "\n".join(lines) + "\n"
        )
        Path(options.markdown).write_text(text)


def _command(options: argparse.Namespace) -> str:
    return f"python -m benchmarks.hardware.rtl --arrays {options.arrays} --macs {options.macs} --seed {options.seed}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arrays", default="8x8,4x16", help="rows x cols, with commas between")
    parser.add_argument("--macs", type=int, default=600_000, help="of a product, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    parser.add_argument("--markdown")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

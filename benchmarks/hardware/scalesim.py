"""Check the systolic model against SCALE-Sim itself, and time both.

    python -m benchmarks.hardware.scalesim [--scalesim-python PATH] [--shapes 40] [--seed 0] [--json F]

SCALE-Sim 3.0.0 needs numpy < 2.4, so it runs in an environment of its own: the one whose interpreter is given, else a
new one, made in a temporary folder. Matrix products drawn at random, and every product of the forward pass of ResNet18
and MobileNetV2 (SphereFed Tables 15 and 14, 32x32, batch 1), are simulated with all three dataflows. Its compute cycles
and its reads of on-chip memory must equal ours, all of them; the exit code is 1 where they do not. Products of the
same size are given to SCALE-Sim once: a depthwise layer is hundreds of equal ones, and it simulates each anew.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import subprocess
import sys
import tempfile
import time
import venv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from protofleet.hw_profiles.accelerator.dataflows import DATAFLOWS
from protofleet.hw_profiles.accelerator.scalesim_files import topology_text
from protofleet.hw_profiles.accelerator.systolic import gemm_cycles, sram_traffic
from protofleet.hw_profiles.workload.from_onnx import read_workload
from protofleet.hw_profiles.workload.paper_networks import build_network

NETWORKS = ("spherefed_resnet18", "spherefed_mobilenetv2")
REQUIREMENTS = ("scalesim==3.0.0", "numpy<2.4")
DRIVER = """
import sys, time
from scalesim.scale_sim import scalesim
config, topology, out = sys.argv[1:]
start = time.perf_counter()
scalesim(save_disk_space=True, verbose=False, config=config, topology=topology, layout=topology,
         input_type_gemm=True).run_scale(top_path=out)
print("SECONDS", time.perf_counter() - start)
"""
Shape = tuple[int, int, int]

_CONFIG = """[general]
run_name = protofleet

[architecture_presets]
ArrayHeight = {rows}
ArrayWidth = {cols}
IfmapSramSzkB = {sram_kb}
FilterSramSzkB = {sram_kb}
OfmapSramSzkB = {sram_kb}
IfmapOffset = 0
FilterOffset = 10000000
OfmapOffset = 20000000
Dataflow = {dataflow}
Bandwidth = 10
ReadRequestBuffer = 64
WriteRequestBuffer = 64

[layout]
IfmapCustomLayout = False
IfmapSRAMBankBandwidth = 10
IfmapSRAMBankNum = 10
IfmapSRAMBankPort = 2
FilterCustomLayout = False
FilterSRAMBankBandwidth = 10
FilterSRAMBankNum = 10
FilterSRAMBankPort = 2

[sparsity]
SparsitySupport = false
SparseRep = ellpack_block
OptimizedMapping = false
BlockSize = 8
RandomNumberGeneratorSeed = 40

[run_presets]
InterfaceBandwidth = CALC
UseRamulatorTrace = False
"""


def config_text(rows: int, cols: int, dataflow: str, *, sram_kb: int = 1_545) -> str:
    """A SCALE-Sim configuration whose memory never stalls the array; a third of 37,080 Kb for each operand."""
    return _CONFIG.format(rows=rows, cols=cols, dataflow=dataflow, sram_kb=sram_kb)


def main() -> int:
    """Run, print, store; 0 when all figures are equal."""
    options = _options()
    results: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        python = options.scalesim_python or own_environment(Path(folder))
        rng = random.Random(options.seed)
        drawn = [tuple(int(2 ** rng.uniform(0, 9.5)) for _ in range(3)) for _ in range(options.shapes)]
        results += _compare("random shapes", Counter(drawn), python, folder, options)
        for name in NETWORKS if options.networks else ():
            results += _compare(name, _products(name), python, folder, options)
    equal = all(row["equal"] == row["shapes"] for row in results)
    report = {
        "schema": 1,
        "kind": "simulated",
        "against": "SCALE-Sim 3.0.0",
        "array": {"rows": options.rows, "cols": options.cols},
        "all_equal": equal,
        "results": results,
    }
    print("all equal" if equal else "NOT EQUAL")
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0 if equal else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scalesim-python", help="interpreter of an environment that has scalesim 3.0.0")
    parser.add_argument("--shapes", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--cols", type=int, default=64)
    parser.add_argument("--no-networks", dest="networks", action="store_false")
    parser.add_argument("--json")
    return parser.parse_args()


def own_environment(folder: Path, requirements: Sequence[str] = REQUIREMENTS) -> str:
    """The interpreter of a new environment with SCALE-Sim, or another peer, made in `folder`."""
    home = folder / "environment"
    print(f"making an environment with {' '.join(requirements)}", flush=True)
    venv.create(home, with_pip=True)
    python = str(home / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *requirements], check=True)
    return python


def _products(name: str) -> Counter[Shape]:
    """How often each product occurs in a forward pass, depthwise channels one by one."""
    workload = read_workload(build_network(name), batch=1, name=name)
    found: Counter[Shape] = Counter()
    for layer in workload.layers:
        for gemm in layer.gemms:
            found[gemm.m, gemm.n, gemm.k] += gemm.count
    return found


def _compare(
    name: str, shapes: Counter[Shape], python: str, folder: str, options: argparse.Namespace
) -> list[dict[str, object]]:
    rows = []
    for dataflow in DATAFLOWS:
        theirs, their_s = _simulate(list(shapes), dataflow, python, folder, options)
        size = {"rows": options.rows, "cols": options.cols, "dataflow": dataflow}
        start = time.perf_counter()
        ours = [(gemm_cycles(*s, **size), *sram_traffic(*s, **size)[:2]) for s in shapes]
        our_s = time.perf_counter() - start
        equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
        total = sum(count * cycles for count, (cycles, _, _) in zip(shapes.values(), ours, strict=True))
        row = {
            "name": name, "dataflow": dataflow, "shapes": len(shapes), "products": shapes.total(), "equal": equal,
            "cycles": total, "scalesim_s": round(their_s, 3), "ours_s": round(our_s, 6),
            "ratio": round(their_s / our_s),
            "differences": [[*s, a, b] for s, a, b in zip(shapes, ours, theirs, strict=True) if a != b][:10],
        }  # fmt: skip
        rows.append(row)
        print(
            f"{name:24} {dataflow}  {equal}/{len(shapes)} equal  {total:>12,} cycles  "
            f"SCALE-Sim {their_s:8.2f} s  ours {our_s * 1e3:7.3f} ms  {row['ratio']:>9,} times",
            flush=True,
        )
    return rows


def _simulate(
    shapes: list[Shape], dataflow: str, python: str, folder: str, options: argparse.Namespace
) -> tuple[list[tuple[int, int, int]], float]:
    """SCALE-Sim's compute cycles and reads of both operands for each shape, and its seconds without start-up."""
    root = Path(tempfile.mkdtemp(dir=folder))
    (root / "driver.py").write_text(DRIVER)
    (root / "run.cfg").write_text(config_text(options.rows, options.cols, dataflow))
    (root / "run.csv").write_text(topology_text([(f"p{i}", *shape) for i, shape in enumerate(shapes)]))
    command = [python, "driver.py", "run.cfg", "run.csv", "out"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: SCALE-Sim failed: {done.stderr.strip().splitlines()[-1] if done.stderr else 'no message'}")
    seconds = float(done.stdout.rsplit("SECONDS", 1)[1])
    reports = next((root / "out").iterdir())
    compute = read_table(reports / "COMPUTE_REPORT.csv")
    access = read_table(reports / "DETAILED_ACCESS_REPORT.csv")
    return [
        (int(float(c["Total Cycles"])), int(float(a["SRAM IFMAP Reads"])), int(float(a["SRAM Filter Reads"])))
        for c, a in zip(compute, access, strict=True)
    ], seconds


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of one of SCALE-Sim's reports."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file, skipinitialspace=True))


if __name__ == "__main__":
    sys.exit(main())

"""How many aarch64 instructions ONNX Runtime takes for one run of a graph, counted by QEMU. As root, on any processor.

    sudo scripts/arm64-check                                  # once: a userland for arm64 with our base install
    python -m benchmarks.device.step_forms --save graphs/
    sudo python -m benchmarks.device.arm_instructions graphs/*.onnx

Each graph is run once, and 1 + `--runs` times, in the emulated userland; of the difference, one run is printed.
Starting Python takes some million instructions more or less each time: small graphs want more runs.
Instructions are no time: they say nothing of caches, of memory or of how many a core does at once. They do say which of
two graphs asks more of the processor, and whether an operator is there at all; what is faster, a board measures itself.
It takes gcc, and Debian's qemu-user (its plugins are not in qemu-user-static).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

STEP = """
import sys, numpy as np, onnxruntime as o
options = o.SessionOptions()
options.intra_op_num_threads = options.inter_op_num_threads = 1
options.log_severity_level, options.enable_mem_pattern = 4, False
options.graph_optimization_level = o.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
session = o.InferenceSession(sys.argv[1], options)
random, feed = np.random.default_rng(0), {}
for each in session.get_inputs():
    kind = {"tensor(uint8)": np.uint8, "tensor(int64)": np.int64}.get(each.type, np.float32)
    above_zero = "var" in each.name or each.name == "sample_weight"
    values = np.ones(each.shape) if above_zero else random.random(each.shape) / 10
    feed[each.name] = np.asarray(values, dtype=kind)
for _ in range(int(sys.argv[2])):
    session.run(None, feed)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("graphs", nargs="+", type=Path)
    parser.add_argument("--root", type=Path, default=Path(os.environ.get("ARM64_ROOT", "/var/tmp/protofleet-arm64")))
    parser.add_argument(
        "--python", default=str(Path("/root", "protofleet", "bin", "python")), help="of that userland, with onnxruntime"
    )
    parser.add_argument("--cpu", default="cortex-a53", help="what QEMU plays: a Pi Zero 2 W's by default")
    parser.add_argument("--runs", type=int, default=1)
    options = parser.parse_args()
    prepare(options.root)
    for graph in options.graphs:
        shutil.copy(graph, options.root / "tmp" / "counted.onnx")
        few, many = (counted(options.root, options.python, options.cpu, runs) for runs in (1, 1 + options.runs))
        failed = next((each for each in (few, many) if isinstance(each, str)), None)
        said = failed or f"{(int(many) - int(few)) / options.runs / 1e6:10.1f} million"
        print(f"{graph.stem:40s} {said}", flush=True)
    return 0


def prepare(root: Path) -> None:
    """QEMU with its libraries, the plugin and the script, in the userland."""
    qemu = shutil.which("qemu-aarch64")
    if qemu is None:
        sys.exit("error: qemu-aarch64, expected it on PATH, got none, try apt install qemu-user")
    here = Path(__file__).parent
    plugin = root / "count_instructions.so"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", plugin, here / "count_instructions.c"], check=True)
    shutil.copy(qemu, root / "qemu-counting")
    linked = subprocess.run(["ldd", qemu], capture_output=True, text=True, check=True).stdout
    for library in re.findall(r"(/\S+) \(", linked):
        (root / library[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, root / library[1:])
    (root / "tmp" / "counted.py").write_text(STEP)


def counted(root: Path, python: str, cpu: str, runs: int) -> int | str:
    """Instructions of the whole process; or the last line of its error."""
    words = ["/qemu-counting", "-cpu", cpu, "-plugin", "/count_instructions.so", python]
    words += ["/tmp/counted.py", "/tmp/counted.onnx", str(runs)]
    done = subprocess.run(
        ["chroot", str(root), *words],
        capture_output=True,
        text=True,
        env={
            "ORT_DISABLE_TELEMETRY": "1",
            "HOME": "/root",
            "PYTHONHASHSEED": "0",
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        },
        check=False,
    )
    found = re.search(r"^instructions (\d+)$", done.stderr, re.MULTILINE)
    if done.returncode or found is None:
        return (done.stderr.strip().splitlines() or ["it said nothing"])[-2 if found else -1][:160]
    return int(found[1])


if __name__ == "__main__":
    sys.exit(main())

"""A training step on several threads: how long a thread that has nothing to do should look for work before it sleeps.

    python -m benchmarks.device.threads [--threads 2 4] [--wait 0 20 1000000] [--busy 1] [--json FILE]

The same step in sessions that differ by threads and by `SPIN_US` of `edge_client/training/onnx_session.py` (0: sleep
at once;
1000000: as long as a run goes on). They take turns, one step each; between two steps is a pause, in which a thread that
still spins would show as processor time. Prints medians of the wall and of the processor time of all threads, beside
those of one thread. With `--busy` as many processes compute beside, as a camera's program does on a board.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.device.train_step import CLASSES, TARGETS, device_step
from protofleet.contract.methods import method
from protofleet.edge_client.training import onnx_session
from protofleet.export.backbones.backbone import build_backbone
from protofleet.export.bundles.build import export_step, initial_state
from protofleet.export.modules.preprocess import Preprocess
from protofleet.export.steps.step import plan_step
from protofleet.export.verify.verify import random_images

_PAUSE_S = 0.01
_WARM_UP = 2  # turns that are not counted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--wait", type=int, nargs="+", default=[0, onnx_session.SPIN_US, 1_000_000], help="µs")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    neighbours = [multiprocessing.Process(target=_compute, daemon=True) for _ in range(options.busy)]
    for each in neighbours:
        each.start()
    try:
        rows = [row for case in TARGETS for row in measure(case, options.threads, options.wait, options.repeats)]
    finally:
        for each in neighbours:
            each.kill()
    if options.json:
        found = {"schema": "protofleet.threads/1", "busy": options.busy, "rows": rows}
        options.json.write_text(json.dumps(found, indent=1))
    return 0


def _compute() -> None:
    value = 0
    while True:
        value += 1


def measure(case: str, threads: list[int], waits: list[int], repeats: int) -> list[dict[str, object]]:
    """Wall and processor time of a step, in ms, for each number of threads and each wait."""
    backbone, size, batch, name = case.split(":")
    shape = tuple(int(n) for n in size.split("x"))
    entry = method(name)
    net, width = build_backbone(backbone, shape, None)
    plan = plan_step(net, entry, entry.resolve({}), entry.heads[0], CLASSES, width)
    graph = export_step(net, Preprocess((0.5,) * shape[2], (0.25,) * shape[2]), plan, int(batch), shape)
    state = initial_state(net, plan, 0)
    images = random_images(plan, int(batch), shape, int(batch), np.random.default_rng(0))
    runs = {}
    for count, wait in [(1, 0), *((count, wait) for count in threads for wait in waits)]:
        onnx_session.SPIN_US = wait
        runs[count, wait] = device_step(graph, plan, state, images, count)
    times: dict[tuple[int, int], list[tuple[float, float]]] = {key: [] for key in runs}
    for turn in range(repeats + _WARM_UP):
        for key, run in runs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            wall = time.perf_counter() - wall
            time.sleep(_PAUSE_S)
            if turn >= _WARM_UP:
                times[key].append((wall * 1e3, (time.process_time() - cpu) * 1e3))
    print(case)
    rows = []
    for (count, wait), measured in times.items():
        wall, cpu = (statistics.median(column) for column in zip(*measured, strict=True))
        rows.append({"case": case, "threads": count, "wait_us": wait, "wall_ms": wall, "cpu_ms": cpu})
        print(f"  {count} thread(s), {wait:7d} µs: {wall:7.1f} ms, {cpu:7.1f} ms of processor time", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())

"""Time our own client on this machine, one thread, and keep the times beside what the graphs ask for: the rows that the
latency model learns ONNX Runtime from (no publisher has rows of it on boards, and nobody of training steps).

Each backbone is exported to a bundle and run by the device's own code: inference of batch 1, and a training step. The
time is the thread's processor time, so that other work on the machine does not count; the median of many runs.

    python -m benchmarks.hardware.host_latency [--out hw_profiles/latency/own_rows.json] [--only NAME] [--seconds 2]

With `--recount` nothing is timed: the times in the file stay, and what the graphs ask for is counted anew, which is
needed whenever `hw_profiles` reads a graph differently.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from protofleet.commands.measure import load_inference, load_training
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.errors import ProtofleetError
from protofleet.edge_client.hardware.process_metrics import versions
from protofleet.export.bundles.build import build_bundle
from protofleet.hw_profiles.devices.host import cpu_name, detect_host
from protofleet.hw_profiles.devices.measure import time_runs
from protofleet.hw_profiles.latency.operator_classes import CLASSES, demand
from protofleet.hw_profiles.workload.constant_folding import fold_weights
from protofleet.hw_profiles.workload.from_onnx import bundle_workloads
from protofleet.hw_profiles.workload.model import Workload

ROOT = Path(__file__).resolve().parents[2]
# backbone, input, batch of the training step (0: inference only)
SUBJECTS = (
    ("small_cnn", (28, 28, 1), 16),
    ("small_cnn", (32, 32, 3), 32),
    ("fedproto_mnist", (28, 28, 1), 8),
    ("fedhp_cifar", (32, 32, 3), 32),
    ("spherefed_convnet", (32, 32, 3), 16),
    ("mobilenet_v2", (64, 64, 3), 16),
    ("mobilenet_v2", (224, 224, 3), 0),
    ("mobilenet_v3_small", (64, 64, 3), 16),
    ("mobilenet_v3_small", (224, 224, 3), 0),
    ("resnet18", (64, 64, 3), 16),
    ("resnet18", (224, 224, 3), 0),
    ("squeezenet1_1", (64, 64, 3), 16),
    ("squeezenet1_1", (224, 224, 3), 0),
    ("efficientnet_b0", (64, 64, 3), 8),
    ("efficientnet_b0", (224, 224, 3), 0),
    ("vgg13", (32, 32, 3), 16),
    ("vgg13", (224, 224, 3), 0),
)


def main() -> None:
    """Export, run, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "hw_profiles" / "latency" / "own_rows.json")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--recount", action="store_true", help="keep the times, count the demands anew")
    args = parser.parse_args()
    if args.recount:
        _recount(args.out, args.only)
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for backbone, shape, batch in SUBJECTS:
            if args.only in backbone:
                rows += _rows(backbone, shape, batch, Path(folder) / "one.bundle", args.seconds)
    host = {name: value for name, (value, _) in detect_host().items() if name.startswith("cpu.")}
    table = {
        "schema": 1,
        "kind": "measured",
        "cpu": cpu_name(),
        "host": host,
        "versions": versions(),
        "classes": CLASSES,
    }
    _write(args.out, table | {"rows": rows})
    print(f"{len(rows)} rows -> {args.out}")


def _workloads(backbone: str, shape: tuple[int, int, int], batch: int, path: Path) -> tuple[Workload, Workload | None]:
    """A bundle exported to `path`, as what a device computes in inference and in a training step."""
    labels = [str(label) for label in range(10)]
    name = "fedproto" if batch else "ffc"
    build_bundle(backbone=backbone, method_name=name, labels=labels, input_shape=shape, out=path, batch=batch or 1)
    forward, step = bundle_workloads(read_bundle(path), batch=1)
    return fold_weights(forward), step


def _demand(workload: Workload) -> list[float]:
    return [float(f"{a:.7g}") for a in demand(workload)]


def _recount(file: Path, only: str) -> None:
    """Each row's demand again, from bundles exported anew."""
    table = json.loads(file.read_text(encoding="utf-8"))
    found: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for backbone, shape, batch in (subject for subject in SUBJECTS if only in subject[0]):
            inference, step = _workloads(backbone, shape, batch, Path(folder) / "one.bundle")
            model = f"{backbone}|{shape[0]}x{shape[1]}"
            found["inference", model] = _demand(inference)
            if step is not None:
                found["training_step", model] = _demand(step)
    for row in table["rows"]:
        before = row["demand"]
        row["demand"] = found.get((row["phase"], row["model"]), before)
        if before != row["demand"]:
            print(f"{row['model']:24s} {row['phase']:14s} {sum(before):.4g} -> {sum(row['demand']):.4g}", flush=True)
    _write(file, table)


def _write(file: Path, table: dict[str, Any]) -> None:
    body = ",\n  ".join(json.dumps(row) for row in table.pop("rows"))
    file.write_text(json.dumps(table, indent=1)[:-2] + f',\n "rows": [\n  {body}\n ]\n}}\n', encoding="utf-8")


def _rows(backbone: str, shape: tuple[int, int, int], batch: int, path: Path, seconds: float) -> list[dict[str, Any]]:
    try:
        inference, step = _workloads(backbone, shape, batch, path)
    except ProtofleetError as error:
        print(f"{backbone} {shape}: left out: {error}", flush=True)
        return []
    found = [("inference", 1, inference, load_inference)] + (
        [("training_step", batch, step, load_training)] if step else []
    )
    rows = []
    for phase, size, workload, load in found:
        run = load(str(path), 1, size)  # one thread: computed in this thread, whose time is taken
        timing = time_runs(run, seconds=seconds, clock=time.thread_time)
        model = f"{backbone}|{shape[0]}x{shape[1]}"
        row = {"phase": phase, "model": model, "batch": size, "threads": 1, "ms": round(timing.median_ms, 4)}
        rows.append(row | {"runs": timing.runs, "demand": _demand(workload)})
        print(f"{model:24s} {phase:14s} B{size:<3d} {timing.median_ms:9.3f} ms ({timing.runs} runs)", flush=True)
    return rows


if __name__ == "__main__":
    main()

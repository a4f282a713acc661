"""One training step in each of its forms against eager torch: processor time, all in turn, in one run.

    python -m benchmarks.device.step_forms                                  # mobilenet_v2 and mobilenet_v3_small
    python -m benchmarks.device.step_forms --case mobilenet_v2:64x64x3:16:spherefed --threads 2 --repeats 20
    python -m benchmarks.device.step_forms --save graphs/                   # the graphs, for
        benchmarks/device/arm_instructions.py
    python -m benchmarks.device.step_forms --look graphs/mobilenet_v2-portable.onnx      # its memory, its operators'
        times

The forms: `whole`, no activation in runs of channels; `portable`, what a bundle's train_step.onnx is; `lanes16` or
`lanes8`, what `export --for-x86` adds, where this ONNX Runtime has the operators; `kernels`, what `export
--for-kernels` adds, where the wheel protofleet-kernels is installed. Beside them eager torch, and eager
torch with channels_last. What is printed is the processor time of the process (all threads), the fastest of the
repetitions, and its ratio to the faster of both torches; under load that is steadier than a clock on the wall.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.device.train_step import CLASSES, eager_step
from protofleet.contract.bundle.native_kernels import installed_kernels
from protofleet.contract.bundle.onnx_runtime import ort
from protofleet.contract.methods import method
from protofleet.export.backbones.backbone import build_backbone
from protofleet.export.bundles.build import export_step, initial_state
from protofleet.export.graphs.blocked_kernels import block_here
from protofleet.export.operators import channel_runs
from protofleet.export.steps.step import Preprocess, plan_step
from protofleet.export.verify.verify import random_images

CASES = ("mobilenet_v2:64x64x3:16:spherefed", "mobilenet_v3_small:64x64x3:16:spherefed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", help="backbone:HxWxc:batch:method; may be repeated")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", type=Path, help="write the graphs there and measure nothing")
    parser.add_argument(
        "--look", type=Path, help="a saved graph: what a process that runs it peaks at, and its operators"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.look:
        return look(options.look, options.repeats)
    torch.set_num_threads(options.threads)
    rows = []
    for case in options.case or CASES:
        graphs, peers = prepared(case)
        if options.save:
            options.save.mkdir(parents=True, exist_ok=True)
            for form, graph in graphs.items():
                (options.save / f"{case.split(':')[0]}-{form}.onnx").write_bytes(graph)
            continue
        steps = {form: device_step(graph, peers["feed"], options.threads) for form, graph in graphs.items()}
        fastest = measured({**steps, **peers["torch"]}, options.repeats)
        best = min(fastest[name] for name in peers["torch"])
        print(f"{case}, {options.threads} thread(s)")
        for name, ms in fastest.items():
            size = f"{len(graphs[name]) / 1e6:8.2f} MB" if name in graphs else ""
            print(f"  {name:14s} {ms:8.1f} ms  {ms / best:5.2f} of torch  {size}", flush=True)
        rows.append({"case": case, "threads": options.threads, "ms": fastest})
    if options.json:
        versions = {"onnxruntime": ort.__version__, "torch": torch.__version__}
        options.json.write_text(json.dumps({"schema": "protofleet.step-forms/1", **versions, "rows": rows}, indent=1))
    return 0


def look(path: Path, repeats: int) -> int:
    """Print a process's peak after three steps of a graph on made-up numbers, then each operator's time in one step."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.enable_mem_pattern = False
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    options.enable_profiling, options.profile_file_prefix = True, str(path.with_suffix(""))
    session = ort.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])
    random, feed = np.random.default_rng(0), {}
    for each in session.get_inputs():
        kind = {"tensor(uint8)": np.uint8, "tensor(int64)": np.int64}.get(each.type, np.float32)
        above_zero = "var" in each.name or each.name == "sample_weight"
        feed[each.name] = np.asarray(np.ones(each.shape) if above_zero else random.random(each.shape) / 10, dtype=kind)
    session.run(None, feed)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(repeats):
        session.run(None, feed)
    written = Path(session.end_profiling())
    events = [e for e in json.loads(written.read_text()) if e["name"].endswith("_kernel_time")]
    written.unlink()
    best: dict[tuple[str, str], float] = {}
    for event in events:
        key = (event["args"]["op_name"], event["name"])
        best[key] = min(best.get(key, float("inf")), event["dur"] / 1e3)
    print(f"{path.stem}: peak {(peak - before) / 1024:.0f} MiB above {before / 1024:.0f}, {len(best):,} nodes")
    total = sum(best.values())
    for kind in sorted({kind for kind, _ in best}, key=lambda k: -sum(v for (o, _), v in best.items() if o == k))[:12]:
        times = [ms for (operator, _), ms in best.items() if operator == kind]
        print(f"  {kind:22s} {sum(times):7.2f} ms  {sum(times) / total:5.0%}  {len(times):5d} nodes")
    return 0


def prepared(case: str) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The forms' graphs, and what they are fed and held against."""
    backbone, size, batch, name = case.split(":")
    shape = tuple(int(n) for n in size.split("x"))
    entry = method(name)
    net, width = build_backbone(backbone, shape, None)
    preprocess = Preprocess((0.5,) * shape[2], (0.25,) * shape[2])
    plan = plan_step(net, entry, entry.resolve({}), entry.heads[0], CLASSES, width)
    arguments = (net, preprocess, plan, int(batch), shape)
    limit, channel_runs.RUN_ELEMENTS = channel_runs.RUN_ELEMENTS, 1 << 40
    graphs = {"whole": export_step(*arguments)}
    channel_runs.RUN_ELEMENTS = limit
    graphs["portable"] = export_step(*arguments)
    block = block_here()
    if block is not None and int(batch) % block == 0:
        graphs[f"lanes{block}"] = export_step(*arguments, lanes=block)
    if installed_kernels() is not None:
        graphs["kernels"] = export_step(*arguments, kernels=True)
    state = initial_state(net, plan, 0)
    images = random_images(plan, int(batch), shape, int(batch), np.random.default_rng(0))
    feed = {"x": images.x, **images.inputs(), "lr": np.asarray(1e-4, dtype=np.float32), **state}
    orders = {"torch": torch.contiguous_format, "channels_last": torch.channels_last}
    peers = {name: eager_step(net, preprocess, plan, state, images, order) for name, order in orders.items()}
    return graphs, {"feed": feed, "torch": peers}


def device_step(graph: bytes, feed: dict[str, Any], threads: int) -> Callable[[], None]:
    """A step as a device runs it: its session's options, every tensor bound."""
    from protofleet.edge_client.training.onnx_session import open_session

    session, _ = open_session(graph, "train_step.onnx", threads=threads, training=True)
    binding = session.io_binding()  # type: ignore[attr-defined]
    for name in (each.name for each in session.get_inputs()):  # type: ignore[attr-defined]
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(feed[name])))
    for each in session.get_outputs():  # type: ignore[attr-defined]
        binding.bind_ortvalue_output(each.name, ort.OrtValue.ortvalue_from_shape_and_type(each.shape, np.float32))
    return lambda: session.run_with_iobinding(binding)  # type: ignore[attr-defined]


def measured(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Processor ms of the fastest step of each, all of them taking turns; the first two turns do not count."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 2):
        for name, step in steps.items():
            start = time.process_time()
            step()
            if turn >= 2:
                times[name].append((time.process_time() - start) * 1e3)
    return {name: min(values) for name, values in times.items()}


if __name__ == "__main__":
    sys.exit(main())

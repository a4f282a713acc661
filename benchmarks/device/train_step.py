"""One training step: the device's ONNX Runtime beside eager torch, paired, and beside what the machine can do at all.

    python -m benchmarks.device.train_step                      # the four targets, on one thread and on two
    python -m benchmarks.device.train_step --case vgg13:32x32x3:16:fedproto --repeats 30 --threads 1 --json out.json

All do the same: forward, objective, backward, SGD with the method's own momentum and weight decay, on the same
images. Eager torch comes twice, with activations as they are and channels last, both with its fused SGD; the ratio is
that to the faster of them. They take turns, one step each, so that whatever else the machine does falls on all; the
ratio is that of the medians, and that of the fastest steps is printed beside it. Parameters are bound, not copied, and
the session has the options that it has on a device.

The bound is what direct convolution takes at least: torch's own count of a step's floating-point operations, at the
speed of the best matrix product of this ONNX Runtime on this machine, measured in the same run.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from protofleet.contract.bundle.onnx_runtime import ort
from protofleet.contract.methods import method
from protofleet.edge_client.training.onnx_session import open_session
from protofleet.export.backbones.backbone import build_backbone
from protofleet.export.bundles.build import export_step, initial_state
from protofleet.export.graphs.graph_builder import Graph
from protofleet.export.objectives import Scene, find_objective
from protofleet.export.steps.optimizers import torch_optimizers
from protofleet.export.steps.step import Preprocess, StepPlan, plan_step, quiet
from protofleet.export.verify.verify import Images, random_images

CLASSES = 10
TARGETS = {  # backbone:input:batch:method → largest ratio wanted to the faster of torch's two
    "small_cnn:28x28x1:32:fedproto": 0.85,
    "resnet18:64x64x3:16:spherefed": 0.85,
    "mobilenet_v2:64x64x3:16:spherefed": 1.0,
    "mobilenet_v3_small:64x64x3:16:spherefed": 1.0,
}
_SIDE = 768  # of the square matrices whose product says how fast the machine is
_WARM_UP = 3  # turns that are not counted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", help="backbone:HxWxc:batch:method[:norm]; may be repeated")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--threads", type=int, action="append", help="1 and 2 by default; may be repeated")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for threads in options.threads or (1, 2):
        torch.set_num_threads(threads)
        speed = product_speed(threads)
        print(f"{threads} thread(s); products at {speed:.0f} GFLOP/s; medians in ms")
        heads = "".join(f" {head:>8s}" for head in ("ours", "eager", "ch. last", "ratio", "fastest", "bound", "share"))
        print(f"{'case':40s}{heads}")
        for case in options.case or TARGETS:
            row = measure(case, options.repeats, threads, speed)
            rows.append(row)
            keys = ("onnxruntime_ms", "torch_ms", "channels_last_ms", "ratio", "ratio_of_fastest", "bound_ms", "share")
            target = f"  <= {row['target']}" if row["target"] else ""
            print(f"{case:40s}" + "".join(f" {row[key]:8.2f}" for key in keys) + target, flush=True)
    if options.json:
        versions = {"onnxruntime": ort.__version__, "torch": torch.__version__, "machine": platform.processor()}
        options.json.write_text(json.dumps({"schema": "protofleet.train-step/2", **versions, "rows": rows}, indent=1))
    return 0


def product_speed(threads: int) -> float:
    """GFLOP/s of a large matrix product in ONNX Runtime, the best of some."""
    graph, shape = Graph("product"), (_SIDE, _SIDE)
    graph.output(
        graph.op("MatMul", *(graph.input(name, torch.float32, shape) for name in "ab")), "y", torch.float32, shape
    )
    session, _ = open_session(graph.to_bytes(), "product", threads=threads, training=True)
    feed = {name: np.ones(shape, np.float32) for name in "ab"}
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        session.run(["y"], feed)
        seconds.append(time.perf_counter() - start)
    return 2 * _SIDE**3 / min(seconds) / 1e9


def measure(case: str, repeats: int, threads: int, speed: float) -> dict[str, object]:
    """Times of all, in ms, and their ratios.

    Args:
        speed: of matrix products, in GFLOP/s.
    """
    backbone, size, batch, name, *norm = case.split(":")
    shape = tuple(int(n) for n in size.split("x"))
    entry = method(name)
    net, width = build_backbone(backbone, shape, norm[0] if norm else None)
    preprocess = Preprocess((0.5,) * shape[2], (0.25,) * shape[2])
    plan = plan_step(net, entry, entry.resolve({}), entry.heads[0], CLASSES, width)
    start = time.perf_counter()
    graph = export_step(net, preprocess, plan, int(batch), shape)
    export_s = time.perf_counter() - start
    state = initial_state(net, plan, 0)
    images = random_images(plan, int(batch), shape, int(batch), np.random.default_rng(0))
    runs = {
        "onnxruntime": device_step(graph, plan, state, images, threads),
        "torch": eager_step(net, preprocess, plan, state, images, torch.contiguous_format),
        "channels_last": eager_step(net, preprocess, plan, state, images, torch.channels_last),
    }
    with FlopCounterMode(display=False) as counter:
        runs["torch"]()
    bound = counter.get_total_flops() / speed / 1e6
    times: dict[str, list[float]] = {key: [] for key in runs}
    for turn in range(repeats + _WARM_UP):
        for key, run in runs.items():
            start = time.perf_counter()
            run()
            if turn >= _WARM_UP:
                times[key].append((time.perf_counter() - start) * 1e3)
    median = {key: statistics.median(values) for key, values in times.items()}
    fastest = {key: min(values) for key, values in times.items()}
    return {
        "case": case,
        "threads": threads,
        "export_s": export_s,
        **{f"{key}_ms": value for key, value in median.items()},
        "ratio": median["onnxruntime"] / min(median["torch"], median["channels_last"]),
        "ratio_of_fastest": fastest["onnxruntime"] / min(fastest["torch"], fastest["channels_last"]),
        "bound_ms": bound,
        "share": bound / fastest["onnxruntime"],
        "target": TARGETS.get(case),
    }


def device_step(
    graph: bytes, plan: StepPlan, state: dict[str, np.ndarray], images: Images, threads: int
) -> Callable[[], None]:
    """A step of the graph with every tensor bound."""
    session, _ = open_session(graph, "train_step.onnx", threads=threads, training=True)
    feed = {
        "x": images.x,
        **images.inputs(),
        "lr": np.asarray(1e-4, dtype=np.float32),
        **state,
    }
    binding = session.io_binding()
    for name, value in feed.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value)))
    for output in session.get_outputs():
        binding.bind_ortvalue_output(output.name, ort.OrtValue.ortvalue_from_shape_and_type(output.shape, np.float32))
    return lambda: session.run_with_iobinding(binding)


def eager_step(
    net: nn.Module,
    preprocess: Preprocess,
    plan: StepPlan,
    state: dict[str, np.ndarray],
    images: Images,
    order: torch.memory_format,
) -> Callable[[], None]:
    """The same step in eager torch, activations in that order."""
    net = quiet(copy.deepcopy(net)).to(memory_format=order)
    tensors = {n: torch.from_numpy(v.copy()) for n, v in state.items() if not n.startswith("backbone.")}
    trained = {f"backbone.{n}": p for n, p in net.named_parameters()}
    trained |= {n: nn.Parameter(tensors[n]) for n in plan.names("param") if n in tensors}
    optimizers = [
        torch.optim.SGD(each.param_groups, fused=True) if isinstance(each, torch.optim.SGD) else each
        for each in torch_optimizers(trained, plan.method, plan.hyper, 1e-4)
    ]
    objective = find_objective(str(plan.method.objective))
    given = {name: torch.from_numpy(value) for name, value in images.inputs().items()}
    x = torch.from_numpy(images.x)

    def run() -> None:
        loss = objective(
            Scene.of(net(preprocess(x).contiguous(memory_format=order)), given, {**tensors, **trained}), plan.hyper
        )
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()

    return run


if __name__ == "__main__":
    sys.exit(main())

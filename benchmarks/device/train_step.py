"""One training step: the device's ONNX Runtime beside eager torch, paired, and beside what the machine can do at all.

    python -m benchmarks.device.train_step                      # the four targets, on one thread and on two
    python -m benchmarks.device.train_step --case vgg13:32x32x3:16:fedproto --repeats 30 --threads 1 --json out.json

All do the same: forward, objective, backward, SGD with the method's own momentum and weight decay, on the same
images. Eager torch comes twice, with activations as they are and channels last, both with its fused SGD; the ratio is
that to the faster of them. They take turns, one step each, so that whatever else the machine does falls on all.
Parameters are bound, not copied, and the session has the options that it has on a device.

Where the wheel protofleet-kernels is installed, its form of the step (`export --for-kernels`) takes turns with them,
and its ratio stands beside that of the portable step.

Times are processor time of the process, all threads, each as the fastest of the repetitions; `by clock` is the ratio of
the medians on the clock. Two threads beside other work compare how either library waits, and not how it computes. So
beside more than a tenth of a core of other work the clock's ratio is not printed, and with two threads no ratio is.

The bound is what direct convolution takes at least: a step's floating-point operations, at the speed of the best matrix
product of this ONNX Runtime on this machine, measured in the same run.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
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

from protofleet.contract.bundle.native_kernels import installed_kernels
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
_QUIET = 0.1  # cores of other work
_COLUMNS = {  # of the table: heading and key of a row
    "ours": "onnxruntime_ms",
    "eager": "torch_ms",
    "ch. last": "channels_last_ms",
    "ratio": "ratio",
    "by clock": "ratio_by_clock",
    "kernels": "kernels_ms",
    "ratio k.": "kernels_ratio",
    "bound": "bound_ms",
    "share": "share",
    "others": "other_cores",
}


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
        print(f"{threads} thread(s); products at {speed:.0f} GFLOP/s; the fastest steps in ms of processor time")
        print(f"{'case':40s}" + "".join(f" {head:>8s}" for head in _COLUMNS))
        for case in options.case or TARGETS:
            row = measure(case, options.repeats, threads, speed)
            rows.append(row)
            target = f"  <= {row['target']}" if row["target"] else ""
            print(f"{case:40s}" + "".join(_cell(row.get(key)) for key in _COLUMNS.values()) + target, flush=True)
    if options.json:
        versions = {"onnxruntime": ort.__version__, "torch": torch.__version__, "machine": platform.processor()}
        options.json.write_text(json.dumps({"schema": "protofleet.train-step/3", **versions, "rows": rows}, indent=1))
    return 0


def _cell(value: object) -> str:
    return f" {value:8.2f}" if isinstance(value, float) else f" {'–':>8s}"


def product_speed(threads: int) -> float:
    """GFLOP of a large matrix product in ONNX Runtime for each second of processor time, the best of some."""
    graph, shape = Graph("product"), (_SIDE, _SIDE)
    graph.output(
        graph.op("MatMul", *(graph.input(name, torch.float32, shape) for name in "ab")), "y", torch.float32, shape
    )
    session, _ = open_session(graph.to_bytes(), "product", threads=threads, training=True)
    feed = {name: np.ones(shape, np.float32) for name in "ab"}
    seconds = []
    for _ in range(20):
        start = time.process_time()
        session.run(["y"], feed)
        seconds.append(time.process_time() - start)
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
    if installed_kernels() is not None:
        form = export_step(net, preprocess, plan, int(batch), shape, kernels=True)
        runs["kernels"] = device_step(form, plan, state, images, threads)
    bound = operations(runs["torch"]) / speed / 1e6
    clock: dict[str, list[float]] = {key: [] for key in runs}
    busy: dict[str, list[float]] = {key: [] for key in runs}
    others = OtherWork()
    for turn in range(repeats + _WARM_UP):
        for key, run in runs.items():
            start, start_busy = time.perf_counter(), time.process_time()
            run()
            if turn >= _WARM_UP:
                clock[key].append((time.perf_counter() - start) * 1e3)
                busy[key].append((time.process_time() - start_busy) * 1e3)
    cores = others.cores()
    fastest = {key: min(values) for key, values in busy.items()}
    median = {key: statistics.median(values) for key, values in clock.items()}
    quiet_here = cores <= _QUIET
    return {
        "case": case,
        "threads": threads,
        "export_s": export_s,
        **{f"{key}_ms": value for key, value in fastest.items()},
        **{f"{key}_median_clock_ms": value for key, value in median.items()},
        "ratio": _to_the_faster(fastest, "onnxruntime") if quiet_here or threads == 1 else None,
        "ratio_by_clock": _to_the_faster(median, "onnxruntime") if quiet_here else None,
        "kernels_ratio": _to_the_faster(fastest, "kernels") if quiet_here or threads == 1 else None,
        "bound_ms": bound,
        "share": bound / fastest["onnxruntime"],
        "other_cores": cores,
        "target": TARGETS.get(case),
    }


def _to_the_faster(ms: dict[str, float], which: str) -> float | None:
    return ms[which] / min(ms["torch"], ms["channels_last"]) if which in ms else None


class OtherWork:
    """The cores that other processes of this machine use from here on, where the system counts them (Linux)."""

    def __init__(self) -> None:
        self._start = time.perf_counter(), self._busy_s() - time.process_time()

    def cores(self) -> float:
        """Their mean until now; 0 where the system does not say."""
        started, before = self._start
        others = self._busy_s() - time.process_time() - before
        return max(0.0, others) / max(time.perf_counter() - started, 1e-9) if self._busy_s() else 0.0

    @staticmethod
    def _busy_s() -> float:
        try:
            first = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0].split()
        except OSError:
            return 0.0
        user, nice, system, _idle, _waiting, irq, softirq = map(int, first[1:8])
        return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def operations(run: Callable[[], None]) -> int:
    """The floating-point operations of a step in torch: of its products, forward and backward."""
    counted = {torch.ops.aten.convolution_backward: _both_gradients}  # torch's own count there forgets the groups
    with FlopCounterMode(display=False, custom_mapping=counted) as counter:
        run()
    return int(counter.get_total_flops())


def _both_gradients(gradient: list[int], x: list[int], weight: list[int], *rest: object, **_: object) -> int:
    """Each gradient that is asked for takes as many operations as the forward product.

    Args:
        gradient: shape of the output's gradient (B, O, H, W); `x` (B, C, h, w), weight (O, C / groups, k, k).
        rest: ends with which gradients are asked for: the input's, the weight's, the bias's.
    """
    asked = next(flags for flags in reversed(rest) if isinstance(flags, list) and len(flags) == 3)
    return 2 * math.prod(gradient) * math.prod(weight[1:]) * sum(bool(flag) for flag in asked[:2])


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

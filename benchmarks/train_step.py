"""One training step on one thread: stock ONNX Runtime against eager torch, paired.

    python benchmarks/train_step.py                      # the three targets of the README's Figures
    python benchmarks/train_step.py --case vgg13:32x32x3:16:fedproto --repeats 30 --json out.json

Both do the same: forward, objective, backward, SGD with the method's own momentum and weight decay, on the same
images. They take turns, one step each, so that whatever else the machine does falls on both; the ratio is that of
the medians, and the fastest steps are printed beside it. Parameters are bound, not copied, as on a device.
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

from contract.methods import method
from contract.runtime import ort
from export.backbones import build_backbone
from export.build import export_step, initial_state
from export.objectives import Scene, find_objective
from export.optimizers import torch_optimizers
from export.step import Preprocess, StepPlan, plan_step, quiet
from export.verify import Images, random_images

CLASSES = 10
TARGETS = {  # backbone:input:batch:method → largest ratio wanted
    "small_cnn:28x28x1:32:fedproto": 0.9,
    "resnet18:64x64x3:16:spherefed": 1.1,
    "mobilenet_v2:64x64x3:16:spherefed": 1.3,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", help="backbone:HxWxc:batch:method[:norm]; may be repeated")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"{'case':42s} {'export s':>8s} {'onnxruntime ms':>15s} {'torch ms':>9s} {'ratio':>6s} {'of fastest':>10s}")
    for case in options.case or TARGETS:
        row = measure(case, options.repeats)
        rows.append(row)
        target = f"<= {row['target']}" if row["target"] else ""
        print(
            f"{case:42s} {row['export_s']:8.1f} {row['onnxruntime_ms']:15.2f} {row['torch_ms']:9.2f} "
            f"{row['ratio']:6.2f} {row['ratio_of_fastest']:10.2f}  {target}",
            flush=True,
        )
    if options.json:
        versions = {"onnxruntime": ort.__version__, "torch": torch.__version__, "machine": platform.processor()}
        options.json.write_text(json.dumps({"schema": "protofleet.train-step/1", **versions, "rows": rows}, indent=1))
    return 0


def measure(case: str, repeats: int) -> dict[str, object]:
    """Times of both, in ms, and their ratios."""
    backbone, size, batch, name, *norm = case.split(":")
    shape = tuple(int(n) for n in size.split("x"))
    entry = method(name)
    net, width = build_backbone(backbone, shape, norm[0] if norm else None)
    preprocess = Preprocess((0.5,) * shape[2], (0.25,) * shape[2])
    plan = plan_step(net, entry, entry.settle({}), entry.heads[0], CLASSES, width)
    start = time.perf_counter()
    graph = export_step(net, preprocess, plan, int(batch), shape)
    export_s = time.perf_counter() - start
    state = initial_state(net, plan, 0)
    images = random_images(plan, int(batch), shape, int(batch), np.random.default_rng(0))
    runs = {
        "onnxruntime": device_step(graph, plan, state, images),
        "torch": eager_step(net, preprocess, plan, state, images),
    }
    times: dict[str, list[float]] = {key: [] for key in runs}
    for turn in range(repeats + 3):
        for key, run in runs.items():
            start = time.perf_counter()
            run()
            if turn >= 3:
                times[key].append((time.perf_counter() - start) * 1e3)
    median = {key: statistics.median(values) for key, values in times.items()}
    return {
        "case": case,
        "export_s": export_s,
        "onnxruntime_ms": median["onnxruntime"],
        "torch_ms": median["torch"],
        "ratio": median["onnxruntime"] / median["torch"],
        "ratio_of_fastest": min(times["onnxruntime"]) / min(times["torch"]),
        "target": TARGETS.get(case),
    }


def device_step(graph: bytes, plan: StepPlan, state: dict, images: Images) -> Callable[[], None]:
    """A step of the graph with every tensor bound."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
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
    net: nn.Module, preprocess: Preprocess, plan: StepPlan, state: dict, images: Images
) -> Callable[[], None]:
    """The same step in eager torch."""
    net = quiet(copy.deepcopy(net))
    tensors = {n: torch.from_numpy(v.copy()) for n, v in state.items() if not n.startswith("backbone.")}
    trained = {f"backbone.{n}": p for n, p in net.named_parameters()}
    trained |= {n: nn.Parameter(tensors[n]) for n in plan.names("param") if n in tensors}
    optimizers = torch_optimizers(trained, plan.method, plan.hyper, 1e-4)
    objective = find_objective(str(plan.method.objective))
    given = {name: torch.from_numpy(value) for name, value in images.inputs().items()}
    x = torch.from_numpy(images.x)

    def run() -> None:
        loss = objective(Scene.of(net(preprocess(x)), given, {**tensors, **trained}), plan.hyper)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()

    return run


if __name__ == "__main__":
    sys.exit(main())

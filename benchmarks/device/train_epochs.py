"""Training over epochs: the step with bilinear convolutions, the step without, and eager torch, from the same start.

    python -m benchmarks.device.train_epochs                    # three seeds of the small CNN on the shipped images
    python -m benchmarks.device.train_epochs --seeds 5 --epochs 10

What has another rounding at each step ends at other weights; what counts is that losses and accuracies are of the same
size. Every run sees the same batches. Accuracy is on the test images, after each run's last epoch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from protofleet.contract.methods import method
from protofleet.edge_client.training.onnx_session import open_session
from protofleet.export.backbones.backbone import build_backbone
from protofleet.export.backbones.weights import put_tensors
from protofleet.export.bundles.build import export_step, initial_state
from protofleet.export.graphs.bilinear import Bilinear
from protofleet.export.steps.step import Preprocess, StepPlan, plan_step
from protofleet.export.verify.verify import EagerStep, Images, run_step
from protofleet.lab.data.datasets import load_dataset

BATCH, SHAPE, CLASSES, RATE = 32, (28, 28, 1), 10, 0.05
State = dict[str, NDArray[np.float32]]
Step = Callable[[State, Images], State]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--train", type=int, default=4000, help="images")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = load_dataset("fashion_mnist_subset")
    entry = method("fedproto")
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        net, width = build_backbone("small_cnn", SHAPE, None)
        plan = plan_step(net, entry, entry.resolve({}), "local", CLASSES, width)
        preprocess = Preprocess((0.5,), (0.25,))
        for name, step in _steps(net, preprocess, plan).items():
            state, losses = initial_state(net, plan, seed), []
            for images in _batches(data.train.x[: options.train], data.train.y, plan, options.epochs, seed):
                after = step(state, images)
                losses.append(float(after.pop("loss")))
                state = {**state, **after}
            last = statistics.mean(losses[-(len(losses) // options.epochs) :])
            right = _accuracy(net, preprocess, plan, state, data.test.x, data.test.y)
            found.setdefault(name, []).append((last, right))
            print(f"seed {seed} {name:9s} loss of the last epoch {last:.4f}, accuracy {100 * right:.2f} %", flush=True)
    for name, results in found.items():
        loss, right = (statistics.mean(column) for column in zip(*results, strict=True))
        print(f"mean   {name:9s} loss of the last epoch {loss:.4f}, accuracy {100 * right:.2f} %")
    return 0


def _steps(net: nn.Module, preprocess: Preprocess, plan: StepPlan) -> dict[str, Step]:
    eager = EagerStep(net, preprocess, plan, torch.float32)
    steps: dict[str, Step] = {"torch": lambda state, images: eager.run(state, images, RATE)}
    for name, pays in (("direct", False), ("bilinear", True)):
        wanted = property(lambda form, pays=pays: pays and form.inputs > 1)
        with patch.object(Bilinear, "pays", wanted):
            graph = export_step(net, preprocess, plan, BATCH, SHAPE)
        session, _ = open_session(graph, name, training=True)
        steps[name] = lambda state, images, session=session: run_step(session, plan, state, images, RATE)  # type: ignore[misc]
    return steps


def _batches(x: NDArray[np.uint8], y: NDArray[np.int64], plan: StepPlan, epochs: int, seed: int) -> Iterator[Images]:
    draw = np.random.default_rng(seed)
    nothing = np.zeros((CLASSES, plan.features), np.float32)
    for _ in range(epochs):
        order = draw.permutation(len(x))
        for start in range(0, len(x) - BATCH + 1, BATCH):
            rows = order[start : start + BATCH]
            yield Images(x[rows], y[rows], nothing, np.zeros(CLASSES, np.float32), np.ones(BATCH, bool), {})


def _accuracy(
    net: nn.Module, preprocess: Preprocess, plan: StepPlan, state: State, x: NDArray[np.uint8], y: NDArray[np.int64]
) -> float:
    trained = EagerStep(net, preprocess, plan, torch.float32).net
    own = {n: torch.from_numpy(v) for n, v in state.items()}
    put_tensors(trained, {n.removeprefix("backbone."): t for n, t in own.items() if n.startswith("backbone.")})
    with torch.no_grad():
        features = torch.cat([trained(preprocess(torch.from_numpy(part))) for part in np.array_split(x, 20)])
        scores = features @ own["head.weight"].T + own["head.bias"]
    return float((scores.argmax(1).numpy() == y).mean())


if __name__ == "__main__":
    sys.exit(main())

"""3×3 convolutions of stride 1, layer by layer: the direct forms beside the bilinear one, and which is taken.

    python -m benchmarks.device.convolutions
    python -m benchmarks.device.convolutions --layer 64:64:16x16:16 --repeats 40

A layer is inputs:outputs:plane:batch, forward and both gradients in one graph, with the options of a device's training
session on one thread. Times are of the thread, the fastest of the repeats, in turns; so other work on the machine
matters little. The error is that of the worst of the three results, of the largest number in the float64 result.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from protofleet.edge_client.training.onnx_session import open_session
from protofleet.export.graphs.bilinear import Bilinear
from protofleet.export.graphs.graph_builder import Graph
from protofleet.export.operators.trace import record, to_onnx

LAYERS = (
    "1:32:28x28:32",
    "3:64:32x32:16",
    "16:16:32x32:16",
    "16:32:16x16:16",
    "32:32:16x16:16",
    "32:64:14x14:32",
    "64:64:16x16:16",
    "128:128:8x8:16",
    "256:256:4x4:16",
    "256:256:4x4:32",
    "512:512:2x2:8",
    "512:512:2x2:32",
    "512:512:7x7:4",
    "128:128:8x8:1",
    "64:64:56x56:1",
)
RESULTS = ("y", "dx", "dw")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layer", action="append", help="inputs:outputs:HxW:batch; may be repeated")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    print(
        f"{'layer':20s} {'direct ms':>9s} {'bilinear':>9s} {'ratio':>6s} {'taken':>8s} {'error, direct':>13s} bilinear"
    )
    for layer in options.layer or LAYERS:
        inputs, outputs, plane, batch = layer.split(":")
        height, width = (int(n) for n in plane.split("x"))
        form = Bilinear(int(batch), int(inputs), int(outputs), (height, width))
        ours = "bilinear" if form.pays else "direct"
        graphs = {}
        for name, pays in (("direct", False), ("bilinear", True)):
            with _forced(pays):
                graphs[name] = _graph(form)
        given = _tensors(form)
        times, errors = _measure(graphs, given, options.repeats)
        ratio = times["bilinear"] / times["direct"]
        print(
            f"{layer:20s} {times['direct']:9.2f} {times['bilinear']:9.2f} {ratio:6.2f} {ours:>8s} "
            f"{errors['direct']:13.1e} {errors['bilinear']:8.1e}",
            flush=True,
        )
    return 0


@contextmanager
def _forced(pays: bool) -> Iterator[None]:
    """The choice taken out of the hands of the cost rule."""
    with patch.object(Bilinear, "pays", property(lambda form: pays)):
        yield


def _layer(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (x, w)]
    y = F.conv2d(leaves[0], leaves[1], padding=1)
    return (y.detach(), *torch.autograd.grad((y * g).sum(), leaves))


def _tensors(form: Bilinear) -> list[Tensor]:
    """x, w and the gradient of y."""
    draw, plane = torch.Generator().manual_seed(0), form.plane
    w = torch.randn(form.outputs, form.inputs, 3, 3, generator=draw) / (9 * form.inputs) ** 0.5
    x, g = (torch.randn(form.batch, channels, *plane, generator=draw) for channels in (form.inputs, form.outputs))
    return [x, w, g]


def _graph(form: Bilinear) -> bytes:
    graph, tensors = Graph("layer"), _tensors(form)
    names = [graph.input(name, t.dtype, t.shape) for name, t in zip("xwg", tensors, strict=True)]
    return to_onnx(record(_layer, tensors), graph, names, RESULTS)


def _measure(
    graphs: dict[str, bytes], tensors: list[Tensor], repeats: int
) -> tuple[dict[str, float], dict[str, float]]:
    """The fastest of each, in ms of the thread, and how far each is from float64."""
    feed = {name: t.numpy() for name, t in zip("xwg", tensors, strict=True)}
    exact = [t.numpy() for t in _layer(*(t.double() for t in tensors))]
    runs: dict[str, Callable[[], list[NDArray[np.float32]]]] = {}
    for name, graph in graphs.items():
        session, _ = open_session(graph, name, training=True)
        runs[name] = lambda session=session: session.run(list(RESULTS), feed)  # type: ignore[misc]
    times = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.thread_time()
            run()
            times[name] = min(times[name], (time.thread_time() - start) * 1e3)
    errors = {
        name: max(float(np.abs(got - want).max() / np.abs(want).max()) for got, want in zip(run(), exact, strict=True))
        for name, run in runs.items()
    }
    return times, errors


if __name__ == "__main__":
    sys.exit(main())

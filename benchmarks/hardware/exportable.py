"""Which of torchvision's classification families can be exported: their features, and a training step of theirs.

    python -m benchmarks.hardware.exportable              the table of results/backbones.md
    python -m benchmarks.hardware.exportable swin_t vit   only those whose name contains one of the words

The smallest member of each family, cut at its last linear layer, at a small image where it allows one. *Features* names
who wrote the graph, our own table or torch's exporter; both are verified against torch. *Training step* is FedProto's,
at a batch of 4 (2 for large images), verified against torch in float64; or the operator that has no translation.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import onnx
import torch
from torch import nn

from protofleet.contract.errors import ExportError
from protofleet.contract.methods import method
from protofleet.export.backbones import vision
from protofleet.export.backbones.libraries import cut_at_features
from protofleet.export.bundles.build import export_step, initial_state
from protofleet.export.bundles.features import export_features
from protofleet.export.bundles.torch_exporter import PRODUCER
from protofleet.export.steps.step import Preprocess, StepPlan, plan_step
from protofleet.export.verify.verify import verify_features, verify_step

_CLASSES = 5
# family: side of the image, further arguments of the builder
FAMILIES: dict[str, tuple[int, dict[str, object]]] = {
    "alexnet": (64, {}),
    "convnext_tiny": (32, {}),
    "densenet121": (32, {}),
    "efficientnet_b0": (64, {}),
    "efficientnet_v2_s": (64, {}),
    "googlenet": (64, {"aux_logits": False, "init_weights": False}),
    "inception_v3": (75, {"aux_logits": False, "init_weights": False}),
    "maxvit_t": (224, {}),
    "mnasnet0_5": (64, {}),
    "mobilenet_v2": (64, {}),
    "mobilenet_v3_small": (64, {}),
    "regnet_x_400mf": (64, {}),
    "resnet18": (64, {}),
    "resnext50_32x4d": (64, {}),
    "shufflenet_v2_x0_5": (64, {}),
    "squeezenet1_1": (64, {}),
    "swin_t": (64, {}),
    "swin_v2_t": (64, {}),
    "vgg11_bn": (32, {}),
    "vit_b_16": (32, {"image_size": 32}),
    "wide_resnet50_2": (64, {}),
}


def main() -> None:
    """Print one line of the table for each family."""
    words = sys.argv[1:]
    print("| family | features | training step |\n| --- | --- | --- |", flush=True)
    for name, (side, arguments) in FAMILIES.items():
        if not words or any(word in name for word in words):
            start = time.perf_counter()
            print(f"| {name} | {' | '.join(_row(name, side, arguments))} |", flush=True)
            print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)


def _row(name: str, side: int, arguments: dict[str, object]) -> tuple[str, str]:
    net = cut_at_features(getattr(vision.models(), name)(weights=None, **arguments))
    width = net.eval()(torch.zeros(1, 3, side, side)).shape[1]
    shape, preprocess, row = (side, side, 3), Preprocess((0.5,) * 3, (0.25,) * 3), method("fedproto")
    plan = plan_step(net, row, row.resolve({}), "local", _CLASSES, width)
    return (
        _outcome(lambda: _features(net, preprocess, plan, shape)),
        _outcome(lambda: _step(net, preprocess, plan, shape)),
    )


def _outcome(attempt: Callable[[], str]) -> str:
    try:
        return attempt()
    except ExportError as error:
        return f"no: {error.message}, {error.got}"


def _features(net: nn.Module, preprocess: Preprocess, plan: StepPlan, shape: tuple[int, int, int]) -> str:
    graph = export_features(net, preprocess, plan.state, shape, unit=False)
    writer = "torch's exporter" if onnx.load_from_string(graph).producer_name == PRODUCER else "our table"
    found = verify_features(graph, net, preprocess, initial_state(net, plan, 0), input_shape=shape, unit=False)
    return f"{writer}, within {found.error:.0e}"


def _step(net: nn.Module, preprocess: Preprocess, plan: StepPlan, shape: tuple[int, int, int]) -> str:
    batch = 2 if shape[0] > 100 else 4
    graph = export_step(net, preprocess, plan, batch, shape)
    found = verify_step(
        graph, net, preprocess, plan, initial_state(net, plan, 0), batch=batch, input_shape=shape, steps=2
    )
    return f"yes, within {found.error:.0e} (torch's own rounding {found.torch_error:.0e})"


if __name__ == "__main__":
    main()

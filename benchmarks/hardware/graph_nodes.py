"""How many nodes the graphs of large networks have, and how long ONNX Runtime takes to open as many as a bundle may.

    python -m benchmarks.hardware.graph_nodes                          65,536 additions: seconds of a core to open them
    python -m benchmarks.hardware.graph_nodes densenet121 densenet201  nodes of features.onnx and of FedProto's
        train_step.onnx

The second needs torchvision, and minutes for a network of 200 layers. `contract/bundle/graph_checks.py` has the limit.
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise

import onnx
import torch
from onnx import TensorProto, helper

from protofleet.contract.bundle.graph_checks import MAX_NODES, check_graph
from protofleet.contract.bundle.onnx_runtime import ort
from protofleet.contract.methods import method
from protofleet.export.backbones import vision
from protofleet.export.backbones.libraries import cut_at_features
from protofleet.export.bundles.build import export_step
from protofleet.export.bundles.features import export_features
from protofleet.export.steps.step import Preprocess, plan_step

_SHAPE, _CLASSES, _BATCH = (32, 32, 3), 5, 4


def main() -> None:
    names = sys.argv[1:]
    if not names:
        print(f"{MAX_NODES:,} additions: {opening_s(MAX_NODES):.1f} s of a core, ONNX Runtime {ort.__version__}")
    for name in names:
        features, step = nodes_of(name)
        print(f"{name}: {features:,} nodes in features.onnx, {step:,} in train_step.onnx", flush=True)


def opening_s(nodes: int) -> float:
    """Processor time in seconds, of one thread, to open x + x + … with so many nodes."""
    named = [f"x{place}" for place in range(nodes + 1)]
    made = [helper.make_node("Add", [before, "x0"], [after]) for before, after in pairwise(named)]
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, (1,))] for name in (named[0], named[-1])]
    graph = helper.make_graph(made, "additions", *ends)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()
    check_graph(model, "additions", {})
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    start = time.process_time()
    ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return time.process_time() - start


def nodes_of(name: str) -> tuple[int, int]:
    """Of features.onnx and train_step.onnx of one of torchvision's networks, cut at its last linear layer."""
    net = cut_at_features(getattr(vision.models(), name)(weights=None)).eval()
    width = net(torch.zeros(1, _SHAPE[2], *_SHAPE[:2])).shape[1]
    preprocess, row = Preprocess((0.5,) * 3, (0.25,) * 3), method("fedproto")
    plan = plan_step(net, row, row.resolve({}), "local", _CLASSES, width)
    features = export_features(net, preprocess, plan.state, _SHAPE, unit=False)
    step = export_step(net, preprocess, plan, _BATCH, _SHAPE)
    counted = [len(onnx.load_from_string(graph).graph.node) for graph in (features, step)]
    return counted[0], counted[1]


if __name__ == "__main__":
    main()

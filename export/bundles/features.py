"""`features.onnx`: uint8 images of any number to features, with weights that the device supplies.

    x u8 (batch, H, W, c)  →  z f32 (batch, D)

- It runs in inference mode: running statistics, no dropout.
- Each weight is an initializer whose bytes are not in the file but in `params.safetensors`. A device gives its own
  trained weights to ONNX Runtime when it creates a session. The runtime then packs and fuses them like any constant.
  See docs/bundle.md.
- Protofleet's own translation comes first. Where it lacks an operator, torch's exporter writes the graph
  (export/bundles/torch_exporter.py). So everything that `torch.onnx.export` can export has features.

If only the tail of the network is trained (export/steps/cut.py), the same graph also exists in two parts, by
Protofleet's own translation:

    trunk.onnx   x u8 (batch, H, W, c)  →  a0 f32 (batch, …), a1, …
    tail.onnx    a0, a1, …              →  z f32 (batch, D)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from protofleet.contract.bundle.bundle_file import StateTensor
from protofleet.contract.errors import ExportError
from protofleet.export.bundles.torch_exporter import features_by_torch
from protofleet.export.graphs.graph_builder import ANY, Graph
from protofleet.export.objectives import unit_features
from protofleet.export.operators.trace import record, to_onnx
from protofleet.export.steps.cut import Cut, Part
from protofleet.export.steps.step import Preprocess

__all__ = ["export_features", "export_halves"]

Shapes = Mapping[str, tuple[int, ...]]


def export_features(
    backbone: nn.Module,
    preprocess: Preprocess,
    state: Sequence[StateTensor],
    input_shape: tuple[int, int, int],
    *,
    unit: bool,
) -> bytes:
    """The bytes of features.onnx.

    Args:
        state: the backbone's state tensors, named `backbone.…`.
        input_shape: (H, W, c).
        unit: whether z is put on the unit sphere.

    Raises:
        ExportError: when neither our table nor torch can export the backbone.
    """
    shapes = {t.name: t.shape for t in state if t.name.startswith("backbone.")}
    net = copy.deepcopy(backbone).eval()
    try:
        return _by_our_table(net, preprocess, shapes, input_shape, unit=unit)
    except ExportError:  # an operator without a translation: torch's exporter may know it
        return features_by_torch(net, preprocess, shapes, input_shape, unit=unit)


def _by_our_table(
    net: nn.Module, preprocess: Preprocess, shapes: Shapes, input_shape: tuple[int, int, int], *, unit: bool
) -> bytes:
    def features(x: Tensor, *weights: Tensor) -> tuple[Tensor]:
        tensors = {n.removeprefix("backbone."): w for n, w in zip(shapes, weights, strict=True)}
        z = functional_call(net, tensors, (preprocess(x),))
        return (unit_features(z) if unit else z,)

    with FakeTensorMode(), torch.no_grad():
        x = torch.empty((ANY, *input_shape), dtype=torch.uint8)
        example = [x, *(torch.empty(shape) for shape in shapes.values())]
    graph = Graph("features", any_batch=True)
    graph.input("x", torch.uint8, x.shape)
    for name, shape in shapes.items():
        graph.weight(name, shape)
    return to_onnx(record(features, example), graph, ["x", *shapes], ["z"])


def export_halves(cut: Cut, *, unit: bool) -> tuple[bytes, bytes]:
    """The bytes of trunk.onnx and tail.onnx.

    Raises:
        ExportError: for an operator that our table lacks.
    """
    trunk, tail = cut.parts(ANY, unit=unit)
    activations = [activation.name for activation in cut.activations]
    with FakeTensorMode(), torch.no_grad():
        images = torch.empty((ANY, *cut.input_shape), dtype=torch.uint8)
        crossing = [torch.empty(shape) for shape in trunk.shapes]
    sizes = {name: tuple(tensor.shape) for name, tensor in cut.net.state_dict().items()}
    first = _half("trunk", trunk, {"x": images}, activations, sizes)
    return first, _half("tail", tail, dict(zip(activations, crossing, strict=True)), ["z"], sizes)


def _half(
    name: str, part: Part, inputs: Mapping[str, Tensor], outputs: list[str], sizes: Mapping[str, tuple[int, ...]]
) -> bytes:
    graph = Graph(name, any_batch=True)
    for tensor_name, tensor in inputs.items():
        graph.input(tensor_name, tensor.dtype, tensor.shape)
    with FakeTensorMode(), torch.no_grad():
        weights = {f"backbone.{tensor_name}": torch.empty(sizes[tensor_name]) for tensor_name in part.weights}
    for tensor_name, tensor in weights.items():
        graph.weight(tensor_name, tensor.shape)
    example = [*inputs.values(), *weights.values()]
    return to_onnx(record(part.module, example), graph, [*inputs, *weights], outputs)

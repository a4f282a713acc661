"""`features.onnx`: uint8 images of any number to features, with weights that the device supplies.

    x u8 (batch, H, W, c)  →  z f32 (batch, D)

Inference mode: running statistics, no dropout. Each weight is an initializer whose bytes are not in the file but in
`params.safetensors`; a device hands its own trained weights to ONNX Runtime at session creation, which then packs and
fuses them as it does any constant. DESIGN section 3.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from contract.bundle import StateTensor
from export.graph import ANY, Graph
from export.objectives import unit_features
from export.step import Preprocess
from export.trace import record, to_onnx

__all__ = ["export_features"]


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
        ExportError: for an operator without translation.
    """
    net = copy.deepcopy(backbone).eval()
    names = [t.name for t in state if t.name.startswith("backbone.")]

    def features(x: Tensor, *weights: Tensor) -> tuple[Tensor]:
        tensors = {n.removeprefix("backbone."): w for n, w in zip(names, weights, strict=True)}
        z = functional_call(net, tensors, (preprocess(x),))
        return (unit_features(z) if unit else z,)

    shapes = {t.name: t.shape for t in state}
    with FakeTensorMode(), torch.no_grad():
        x = torch.empty((ANY, *input_shape), dtype=torch.uint8)
        example = [x, *(torch.empty(shapes[n]) for n in names)]
    graph = Graph("features", any_batch=True)
    graph.input("x", torch.uint8, x.shape)
    for name in names:
        graph.weight(name, shapes[name])
    return to_onnx(record(features, example), graph, ["x", *names], ["z"])

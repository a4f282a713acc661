"""The demand of a network on a CPU or GPU, by operator class. The latency model multiplies with these numbers.

A runtime does not execute an ONNX graph as it is written. It folds normalisation and activations into the convolution
before them, picks Winograd for dense 3 x 3 windows of stride 1, and unrolls other windows into patches. Every launch
costs time. So each layer of a `Workload` is put into classes by what a runtime makes of it:

    pointwise      multiply-accumulates of 1 x 1 convolutions and matrix products
    winograd       … of dense 3 x 3 convolutions of stride 1 with 16 or more input channels
    tiles          elements that Winograd transforms: inputs and outputs of those
    window         … of every other dense or grouped convolution
    patches        elements unrolled for those: output positions times window times channels
    depthwise3     … of depthwise convolutions up to 3 x 3
    depthwise5     … of larger ones
    dense          … of products with one row per sample (classifiers, squeeze-and-excite)
    traffic        elements that all of the above read and write, weights included
    pool           elements that poolings read and write
    exponential    elements through sigmoid, tanh, exp, softmax (swish counts here)
    piecewise      elements through hard-swish, hard-sigmoid
    elementwise    elements that unfused additions, products, norms, reductions and copies read and write
    launches       operations started
    squeeze        half the number of convolutions on a 1 x 1 image: the latency of squeeze-and-excite

Why classes and not one roofline: docs/decisions/056. Nothing here knows a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from protofleet.hw_profiles.workload.fusion import fused_layers
from protofleet.hw_profiles.workload.model import Layer, Workload

__all__ = ["CLASSES", "MACS", "LayerDemand", "demand", "layer_demands"]

CLASSES = (
    "pointwise", "winograd", "tiles", "window", "patches", "depthwise3", "depthwise5", "dense", "traffic", "pool",
    "exponential", "piecewise", "elementwise", "launches", "squeeze",
)  # fmt: skip
MACS = [CLASSES.index(c) for c in ("pointwise", "winograd", "window", "depthwise3", "depthwise5", "dense")]
_EXPONENTIAL = frozenset(
    ("Sigmoid", "Tanh", "Exp", "Log", "Pow", "Erf", "Softplus", "Softmax", "LogSoftmax", "Gelu", "Swish", "Mish")
)
_PIECEWISE = frozenset(("HardSwish", "HardSigmoid", "Elu", "Selu", "Celu", "LeakyRelu", "PRelu"))
_MIN_WINOGRAD_CHANNELS = 16


@dataclass(frozen=True)
class LayerDemand:
    """One layer and its share: `amounts` (K,) float64 in the order of `CLASSES`; all zero when it is fused or free."""

    layer: Layer
    amounts: NDArray[np.float64]


def demand(workload: Workload) -> NDArray[np.float64]:
    """The demand of the whole workload: (K,) float64 in the order of `CLASSES`."""
    total = np.zeros(len(CLASSES))
    for demanded in layer_demands(workload):
        total += demanded.amounts
    return total


def layer_demands(workload: Workload) -> list[LayerDemand]:
    """The demand of each layer, in execution order."""
    fused = fused_layers(workload)
    demands = []
    for layer in workload.layers:
        amounts: Mapping[str, float] = {} if layer.name in fused else _amounts(layer, workload)
        demands.append(LayerDemand(layer, np.array([amounts.get(name, 0.0) for name in CLASSES])))
    return demands


def _amounts(layer: Layer, workload: Workload) -> dict[str, float]:
    if layer.kind == "view":
        return {}
    moved = workload.elements(layer.reads) + workload.elements(layer.writes)
    if layer.gemms:
        return {**_product(layer), "traffic": moved, "launches": 1.0}
    if layer.kind == "pool" or layer.op.startswith("GlobalAverage"):
        return {"pool": moved, "launches": 1.0}
    written = workload.elements(layer.writes)
    if layer.op in _EXPONENTIAL:
        return {"exponential": written, "launches": 1.0}
    if layer.op in _PIECEWISE:
        return {"piecewise": written, "launches": 1.0}
    return {"elementwise": moved, "launches": 1.0}


def _product(layer: Layer) -> dict[str, float]:
    macs = float(layer.macs)
    shape = layer.conv
    if shape is None:
        rows = max(gemm.m for gemm in layer.gemms)
        return {"dense": macs} if rows <= _DENSE_ROWS else {"pointwise": macs}
    window = prod(shape.kernel)
    if layer.kind == "depthwise":
        return {"depthwise3" if max(shape.kernel) <= 3 else "depthwise5": macs}
    if shape.out_height * shape.out_width == 1:
        return {"dense": macs, "squeeze": 0.5}
    if window == 1 and shape.groups == 1:
        return {"pointwise": macs}
    if _winograd(layer):
        inputs = shape.batch * shape.height * shape.width * shape.c_in
        outputs = shape.batch * shape.out_height * shape.out_width * shape.c_out
        return {"winograd": macs, "tiles": float(inputs + outputs)}
    positions = shape.batch * shape.out_height * shape.out_width
    return {"window": macs, "patches": float(positions * window * shape.c_in)}


_DENSE_ROWS = 4  # a product with fewer rows than a vector has lanes is bound by reading its weights


def _winograd(layer: Layer) -> bool:
    shape = layer.conv
    return (
        shape is not None
        and shape.kernel == (3, 3)
        and shape.stride == (1, 1)
        and shape.dilation == (1, 1)
        and shape.groups == 1
        and shape.c_in >= _MIN_WINOGRAD_CHANNELS
    )

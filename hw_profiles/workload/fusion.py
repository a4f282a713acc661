"""Which layers a runtime makes part of the product before them: normalisation, activations, sums."""

from __future__ import annotations

from collections.abc import Mapping

from protofleet.hw_profiles.workload.model import Layer, Workload

__all__ = ["fused_layers"]

_FUSED = frozenset(("Relu", "Clip", "BatchNormalization", "Add", "Sub", "Mul", "Div", "Cast"))
_PRODUCTS = frozenset(("conv", "pointwise", "depthwise", "grouped", "linear"))


def fused_layers(workload: Workload) -> frozenset[str]:
    """Names of the layers that run as part of the product before them."""
    makers = {name: layer for layer in workload.layers for name in layer.writes}
    absorbed: set[str] = set()
    for layer in workload.layers:
        if _is_fused(layer, workload, makers, absorbed):
            absorbed.add(layer.name)
    return frozenset(absorbed)


def _is_fused(layer: Layer, workload: Workload, makers: Mapping[str, Layer], absorbed: set[str]) -> bool:
    """Whether it only scales, shifts or clips what one product (or what was already fused into it) has just made.

    Also the product of a gate and its own input, `x * sigmoid(x)`: runtimes have swish and hard-swish as one kernel.
    """
    if layer.op not in _FUSED:
        return False
    if layer.op == "Mul":
        gates = [makers[n] for n in layer.reads if n in makers and makers[n].op in ("Sigmoid", "HardSigmoid")]
        if any(set(gate.reads) <= set(layer.reads) for gate in gates):
            return True
    activations = [n for n in layer.reads if workload.tensors[n].role == "activation"]
    sources = [makers[n] for n in activations if n in makers]
    if len(activations) != 1 or len(sources) != 1:
        return False
    source = sources[0]
    clips_sum = source.op == "Add" and layer.op in ("Relu", "Clip")
    return source.kind in _PRODUCTS or source.name in absorbed or clips_sum

"""A features graph whose weights are stored as float16, and computed with as float32.

    weight float16 (params.safetensors)  →  Cast  →  float32, as before

Half the bytes on the way to a device and on its disk. ONNX Runtime casts once, when a session is made, and folds the
cast weights like any constants: a run takes the same time as before, and the same memory.

Tensors of one dimension (biases, scales, running statistics) stay float32. They are few, and a variance may be smaller
than float16 can tell.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from protofleet.contract.errors import ExportError

__all__ = ["halved", "rounded"]

Weights = Mapping[str, NDArray[np.floating]]


def rounded(weights: Weights) -> dict[str, NDArray[np.floating]]:
    """The weights as they are stored: float16 where a tensor has several dimensions, others as they are.

    Raises:
        ExportError: a weight is larger than a float16 can be.
    """
    with np.errstate(over="ignore"):
        stored = {name: value.astype(np.float16) if value.ndim > 1 else value for name, value in weights.items()}
    for name, value in stored.items():
        if not np.isfinite(value).all():
            got = f"{np.abs(weights[name]).max():g} in {name}"
            raise ExportError("--half-weights", expected="weights up to 65,504", got=got, hint="leaving it out")
    return stored


def halved(graph: bytes, stored: Weights) -> bytes:
    """The graph over weights that `rounded` gave: each float16 initializer is cast before its first use."""
    model = onnx.ModelProto.FromString(graph)
    half = {name for name, value in stored.items() if value.dtype == np.float16}
    casts = []
    for tensor in model.graph.initializer:
        if tensor.name in half:
            tensor.data_type = TensorProto.FLOAT16
            whole = f"{tensor.name}.float32"
            casts.append(helper.make_node("Cast", [tensor.name], [whole], f"cast.{tensor.name}", to=TensorProto.FLOAT))
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            if name in half:
                node.input[place] = f"{name}.float32"
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model.SerializeToString(deterministic=True)

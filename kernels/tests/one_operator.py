"""One operator of the wheel in a session of its own, and the order in which it holds activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
import protofleet_kernels
from numpy.typing import NDArray
from onnx import TensorProto, helper

LANES = 16
DOMAIN = "protofleet.kernels"


def session(kind: str, given: Sequence[bool], outputs: int, attributes: Mapping[str, Any], threads: int = 1):
    """A session of one node; an input that is not given is left out."""
    names = [f"i{n}" if there else "" for n, there in enumerate(given)]
    results = [f"o{n}" for n in range(outputs)]
    node = helper.make_node(kind, names, results, domain=DOMAIN, **attributes)
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in names if n]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in results]
    graph = helper.make_graph([node], "one", inputs, ends)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(str(protofleet_kernels.library()))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(
    kind: str,
    inputs: Sequence[NDArray[np.float32] | None],
    outputs: int,
    sizes: Sequence[int],
    threads: int = 1,
    **attributes: Any,
) -> list[NDArray[np.float32]]:
    """What one operator gives."""
    given = [value is not None for value in inputs]
    opened = session(kind, given, outputs, {"sizes": list(sizes), **attributes}, threads)
    feed = {f"i{n}": np.ascontiguousarray(v, np.float32) for n, v in enumerate(inputs) if v is not None}
    return opened.run(None, feed)


def blocks(x: NDArray[np.floating]) -> NDArray[np.floating]:
    """(N, C, H, W) → (N, C/16, H, W, 16), filled up with zeros."""
    n, c, h, w = x.shape
    count = -(-c // LANES)
    filled = np.zeros((n, count * LANES, h, w), x.dtype)
    filled[:, :c] = x
    return np.ascontiguousarray(filled.reshape(n, count, LANES, h, w).transpose(0, 1, 3, 4, 2))


def planes(x: NDArray[np.floating], channels: int) -> NDArray[np.floating]:
    """The inverse of `blocks`."""
    n, count, h, w, _ = x.shape
    return x.transpose(0, 1, 4, 2, 3).reshape(n, count * LANES, h, w)[:, :channels]

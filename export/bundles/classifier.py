"""One plain ONNX classifier: preprocessing, backbone, head and labels in a file that any runtime opens.

It has two parts. The first is the bundle's features graph with the weights inside (`precision.features_fp32`); it takes
uint8 images and normalises them itself. The second is what a `LinearAnswer` computes, in float32:

    z → z / max(‖z‖, 1e-12)   where the way of answering takes unit features
      → z P                   where it projects them
      → scores = z Wᵀ + w     (N, C); a class that is never answered has the lowest float32
      → class = arg max       (N,) int64

All operators are of the standard ONNX domain. The model's metadata has the labels, as a JSON list, and the origin of
the numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.errors import ExportError
from protofleet.contract.heads.answers import Answer, LinearAnswer
from protofleet.export.graphs.precision import features_fp32

__all__ = ["LABELS_KEY", "classifier"]

LABELS_KEY = "labels"
_FEATURES = "z"
_LOWEST = np.finfo(np.float32).min


def classifier(bundle: Bundle, answer: Answer, about: Mapping[str, str]) -> bytes:
    """The graph of a bundle, whose `params` are the weights to take, and a way of answering: x → scores, class.

    Args:
        about: further metadata, by name.

    Raises:
        ExportError: the way of answering is not linear in the features.
    """
    if not isinstance(answer, LinearAnswer):
        raise ExportError(
            "one ONNX file",
            expected="a way of answering over protofleet.contract.heads.answers.LinearAnswer",
            got=type(answer).__name__,
        )
    model = features_fp32(bundle)
    tail = _Tail(model.graph)
    z = _FEATURES
    if answer.unit:
        norm = tail.node("ReduceL2", z, tail.constant("axes", np.array([1])), keepdims=1)
        z = tail.node("Div", z, tail.node("Max", norm, tail.constant("least", np.float32(1e-12))))
    if answer.project is not None:
        z = tail.node("MatMul", z, tail.constant("project", answer.project.astype(np.float32)))
    bias = np.zeros(len(answer.weight)) if answer.bias is None else answer.bias
    weight = tail.constant("weight", answer.weight.astype(np.float32))
    lowest = tail.constant("bias", np.maximum(bias, _LOWEST).astype(np.float32))
    tail.node("Gemm", z, weight, lowest, output="scores", transB=1)
    tail.node("ArgMax", "scores", output="class", axis=1, keepdims=0)
    _set_outputs(model.graph, len(answer.weight))
    helper.set_model_props(model, {LABELS_KEY: _json(bundle.manifest.labels), **about})
    onnx.checker.check_model(model)
    return model.SerializeToString(deterministic=True)


class _Tail:
    """Nodes that are added behind a graph, with names of their own."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph, self._count = graph, 0

    def constant(self, name: str, value: NDArray[np.generic] | np.generic) -> str:
        self._graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(value), f"answer.{name}"))
        return f"answer.{name}"

    def node(self, kind: str, *inputs: str, output: str | None = None, **attributes: int) -> str:
        self._count += 1
        name = output or f"answer.{self._count}"
        self._graph.node.append(helper.make_node(kind, list(inputs), [name], f"answer.{kind}", **attributes))
        return name


def _set_outputs(graph: onnx.GraphProto, classes: int) -> None:
    samples = graph.output[0].type.tensor_type.shape.dim[0].dim_param or "N"
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("scores", TensorProto.FLOAT, [samples, classes]))
    graph.output.append(helper.make_tensor_value_info("class", TensorProto.INT64, [samples]))


def _json(labels: Sequence[str]) -> str:
    return json.dumps(list(labels), ensure_ascii=True)

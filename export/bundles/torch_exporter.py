"""`features.onnx` by torch's own exporter, for backbones with an operator that Protofleet's table lacks.

Protofleet's translation (export/operators/translation.py) comes first: it is quicker, and the same table makes the
training step. Where it has no entry, `torch.onnx.export(dynamo=True)` writes the features graph. This module then gives
the graph the form that every `features.onnx` has:

- weights outside, under the names of the state tensors;
- standard operators only;
- a batch of any size;
- nothing of this machine in it.

`export/verify/verify.py` checks whether the graph is right, as always.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import onnx
import torch
from onnx import helper
from torch import Tensor, nn

from protofleet.contract.errors import ExportError
from protofleet.export.graphs.graph_builder import IR_VERSION, OPSET, external
from protofleet.export.modules.preprocess import Preprocess
from protofleet.export.objectives import unit_features

__all__ = ["PRODUCER", "features_by_torch"]

PRODUCER = "protofleet by torch.onnx"  # what the graph says wrote it
_LOGGERS = ("torch.onnx", "torch.export", "torch._dynamo", "onnxscript", "onnx_ir")


def features_by_torch(
    backbone: nn.Module,
    preprocess: Preprocess,
    shapes: Mapping[str, Sequence[int]],
    input_shape: tuple[int, int, int],
    *,
    unit: bool,
) -> bytes:
    """The bytes of the features graph, in the form of `protofleet.export.bundles.features.export_features`.

    Args:
        shapes: of the backbone's state tensors, by name.
        input_shape: (H, W, c).

    Raises:
        ExportError: when torch cannot export it either.
    """
    images = torch.zeros((2, *input_shape), dtype=torch.uint8)
    try:
        with _silence():
            program = torch.onnx.export(
                _Features(backbone, preprocess, unit).eval(),
                (images,),
                dynamo=True,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                input_names=["x"],
                output_names=["z"],
                opset_version=OPSET,
                optimize=False,  # it would bake weights into constants
                verbose=False,
            )
        assert program is not None
        model = program.model_proto
    except Exception as error:  # torch's exporter has a dozen kinds
        raise ExportError(
            "torch.onnx.export cannot export the backbone's features",
            expected="a module that it can",
            got=_cause(error),
            hint="torch.onnx.export(module, images, dynamo=True) on it in python, for the full report",
        ) from None
    return _plain(model, shapes).SerializeToString(deterministic=True)


class _Features(nn.Module):
    """Images to features; its weights are named as the state tensors are, `backbone.…`."""

    def __init__(self, backbone: nn.Module, preprocess: Preprocess, unit: bool) -> None:
        super().__init__()
        self.backbone, self.preprocess, self._unit = copy.deepcopy(backbone), preprocess, unit

    def forward(self, x: Tensor) -> Tensor:
        """x (B, H, W, c) uint8 → (B, D). The arithmetic is Preprocess's, whose operator torch's exporter knows not."""
        mean, std = self.preprocess.mean, self.preprocess.std
        planes = ((x.to(torch.float32) / 255.0 - mean) / std).permute(0, 3, 1, 2)
        z = self.backbone(planes)
        return unit_features(z) if self._unit else z


def _plain(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> onnx.ModelProto:
    """The graph without the exporter's own names, traces and weights."""
    domains = {node.domain for node in model.graph.node} - {"", "ai.onnx"}
    if domains or model.functions:
        raise ExportError(
            "torch.onnx.export wrote operators that are not standard", expected="ONNX's own", got=sorted(domains)
        )
    graph = model.graph
    for number, node in enumerate(graph.node):
        node.name, node.doc_string = f"{node.op_type}_{number}", ""
        del node.metadata_props[:]
    initializers = [
        external(tensor.name, tensor.dims) if tensor.name in shapes else tensor for tensor in graph.initializer
    ]
    ends = []
    for value, name in ((graph.input[0], "x"), (graph.output[0], "z")):
        extents = ["batch", *(extent.dim_value for extent in value.type.tensor_type.shape.dim[1:])]
        ends.append(helper.make_tensor_value_info(name, value.type.tensor_type.elem_type, extents))
    clean = helper.make_graph(list(graph.node), "features", [ends[0]], [ends[1]], initializers)
    whole = helper.make_model(clean, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    whole.producer_name = PRODUCER
    return whole


@contextmanager
def _silence() -> Iterator[None]:
    """torch's exporter warns about itself; what fails is raised."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _cause(error: BaseException) -> BaseException | str:
    """The first error in the exporter's chain of errors. The message of the last one is a page long."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"

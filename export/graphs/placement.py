"""The places of a graph's external weights in `params.safetensors`.

ONNX's external data is a file name, an offset and a length. A safetensors file is a length, a JSON header and the bytes
of the tensors. With offset and length in the graph, any runtime that finds both files in one folder can open the graph
by its path alone. A device does not use them: it supplies its own weights. The offsets follow from the names and shapes
of the tensors, so weights that were trained further lie where the first ones lay.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto

from protofleet.contract.bundle.graph_checks import weight_places
from protofleet.export.graphs.graph_builder import WEIGHTS_FILE

__all__ = ["place_weights", "weight_names"]


def place_weights(graph: bytes, params: bytes) -> bytes:
    """The graph with offset and length of each external initializer in the safetensors file of these bytes.

    Raises:
        KeyError: when a weight is not in the file.
    """
    places = weight_places(params)
    model = onnx.ModelProto.FromString(graph)
    for tensor in model.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            place = places[tensor.name]
            del tensor.external_data[:]
            entries = {"location": WEIGHTS_FILE, "offset": place.offset, "length": place.length_bytes}
            for key, value in entries.items():
                tensor.external_data.add(key=key, value=str(value))
    return model.SerializeToString(deterministic=True)


def weight_names(graph: bytes) -> set[str]:
    """The names of the graph's external initializers."""
    initializers = onnx.ModelProto.FromString(graph).graph.initializer
    return {tensor.name for tensor in initializers if tensor.data_location == TensorProto.EXTERNAL}

"""The features graph at another precision, whole, for a runtime that is not ours: int8 for a CPU, fp16 for a GPU.

    features.onnx + params  →  one ONNX file with its weights inside  →  int8 (static quantisation) or fp16

int8 follows ONNX Runtime's own recipe: fold what folds, run calibration images through the graph to see each
activation's range, insert QuantizeLinear and DequantizeLinear around the operators that have integer kernels, weights
per output channel. Before that, biases are corrected for what the weights lose (export/graphs/bias_correction.py).
fp16 converts weights and activations and keeps x and z as they were. Both come from packages that ship with ONNX
Runtime. The result is inference only: a device trains in fp32. See docs/hardware.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.bundle.onnx_runtime import ort_part
from protofleet.contract.errors import DataError
from protofleet.export.graphs.bias_correction import keep_means

__all__ = ["features_fp16", "features_fp32", "features_int8"]

_quantization = ort_part("quantization")
_shape_inference = ort_part("quantization.shape_inference")
_float16 = ort_part("transformers.float16")

_CALIBRATION_BATCH = 32
# What stays in fp32: taking a uint8 image apart is exact there and costs little.
_INTEGER_OPERATORS = ["Conv", "MatMul", "Gemm", "Add", "Mul", "MaxPool", "AveragePool", "GlobalAveragePool", "Concat"]
# The end of the product before them: its integers end where the activation does, so nothing is left of the node.
_INTEGER_OPERATORS += ["Clip", "Relu"]


def features_fp32(bundle: Bundle) -> onnx.ModelProto:
    """features.onnx with the bundle's weights inside."""
    model = onnx.load_from_string(bundle.features)
    for index, tensor in enumerate(model.graph.initializer):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            value = np.ascontiguousarray(bundle.params[tensor.name])
            model.graph.initializer[index].CopyFrom(numpy_helper.from_array(value, tensor.name))
    return model


def features_fp16(bundle: Bundle) -> onnx.ModelProto:
    """features.onnx in fp16: weights and activations; x stays uint8, z float32."""
    return _float16.convert_float_to_float16(features_fp32(bundle), keep_io_types=True)


def features_int8(bundle: Bundle, images: NDArray[np.uint8]) -> onnx.ModelProto:
    """features.onnx with int8 weights and activations, their ranges taken from images.

    Args:
        images: (N, H, W, c) uint8, at least one, like those the device will see.

    Raises:
        DataError: no images, or of another shape than the bundle's.
    """
    shape = bundle.manifest.input_shape
    if images.ndim != 4 or not len(images) or images.shape[1:] != shape:
        raise DataError("calibration images", expected=f"(N, {', '.join(map(str, shape))})", got=images.shape)
    with tempfile.TemporaryDirectory() as folder:
        whole, folded, out = (Path(folder) / name for name in ("whole.onnx", "folded.onnx", "int8.onnx"))
        onnx.save(features_fp32(bundle), whole)
        _shape_inference.quant_pre_process(whole, folded, skip_symbolic_shape=True)
        exact = onnx.load(folded)
        keep_means(exact, _batches(images))
        onnx.save(exact, folded)
        _quantization.quantize_static(
            folded,
            out,
            _Images(images),
            quant_format=_quantization.QuantFormat.QDQ,
            op_types_to_quantize=_INTEGER_OPERATORS,
            per_channel=True,
            activation_type=_quantization.QuantType.QUInt8,
            weight_type=_quantization.QuantType.QInt8,
            # x is uint8 already and its conversion to float must stay; without this the normalisation is quantised too
            nodes_to_exclude=_before_first_product(exact),
        )
        return onnx.load(out)


def _before_first_product(model: onnx.ModelProto) -> list[str]:
    """The names of the nodes that prepare the image: everything before the first convolution or matrix product."""
    names = []
    for node in model.graph.node:
        if node.op_type in ("Conv", "MatMul", "Gemm"):
            break
        names.append(node.name)
    return names


def _batches(images: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    return iter(images[start : start + _CALIBRATION_BATCH] for start in range(0, len(images), _CALIBRATION_BATCH))


class _Images(_quantization.CalibrationDataReader):
    """Hands images to the calibrator, a batch at a time."""

    def __init__(self, images: NDArray[np.uint8]) -> None:
        self._batches = _batches(images)

    def get_next(self) -> dict[str, NDArray[np.uint8]] | None:
        """The next batch, or None after the last."""
        batch = next(self._batches, None)
        return None if batch is None else {"x": np.ascontiguousarray(batch)}

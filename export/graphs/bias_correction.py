"""Biases that give each channel of a convolution its mean back, which rounding of the weights has moved.

    W in int8 = W − E        →  the mean of output channel o is off by  Σ E[o, c, i, j] · mean of input channel c
    b[o] + that sum          →  it is not

Each weight's rounding is small, but a channel's add up the same way for every photo: inputs after a ReLU are all of one
sign, and a depthwise product has nine weights only. The means are those of the float network over calibration images.
From Nagel, van Baalen, Blankevoort, Welling, Data-Free Quantization Through Weight Equalization and Bias Correction,
ICCV 2019, section 4.2, with measured means in the place of those that follow from a normalisation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from protofleet.contract.bundle.onnx_runtime import ort

__all__ = ["keep_means", "rounding_errors"]

_LARGEST = 127  # of an int8 weight, which is symmetric about 0
_MEAN = "protofleet_mean_of_"


def keep_means(model: onnx.ModelProto, batches: Iterable[NDArray[np.uint8]]) -> None:
    """Correct the bias of each convolution of a float model, in place, for weights that will be int8 by channel.

    Args:
        model: its weights inside, normalisations folded; its input is `x`. A convolution without a bias gets one.
        batches: (N, H, W, c) uint8 images.
    """
    weights = {each.name: each for each in model.graph.initializer}
    planes = {name for name, each in weights.items() if len(each.dims) == 4}  # (O, C / groups, kh, kw)
    convolutions = [node for node in model.graph.node if node.op_type == "Conv" and node.input[1] in planes]
    means = _channel_means(model, {node.input[0] for node in convolutions}, batches)
    for node in convolutions:
        errors = rounding_errors(numpy_helper.to_array(weights[node.input[1]]))
        shift = _shift(errors, means[node.input[0]])
        if len(node.input) > 2 and node.input[2] in weights:
            shift += numpy_helper.to_array(weights[node.input[2]])
        elif len(node.input) > 2 and node.input[2]:
            continue  # a bias that is computed
        name = f"{node.output[0]}_corrected_bias"  # its own: two convolutions may share one
        model.graph.initializer.append(numpy_helper.from_array(shift.astype(np.float32), name))
        del node.input[2:]
        node.input.append(name)
    used = {name for node in model.graph.node for name in node.input}
    for tensor in [each for each in model.graph.initializer if each.name not in used]:
        model.graph.initializer.remove(tensor)


def rounding_errors(weights: NDArray[np.float32]) -> NDArray[np.float64]:
    """What int8 takes from weights (O, …), one scale for each output channel."""
    exact = weights.astype(np.float64)
    largest = np.abs(exact).max(axis=tuple(range(1, exact.ndim)), keepdims=True)
    scale = np.where(largest > 0, largest / _LARGEST, 1.0)
    return exact - np.round(exact / scale) * scale


def _shift(errors: NDArray[np.float64], mean: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each output channel's mean, (O,), by errors (O, C / groups, kh, kw) over inputs of that mean (C,)."""
    groups = len(mean) // errors.shape[1]
    by_group = errors.sum(axis=(2, 3)).reshape(groups, -1, errors.shape[1])
    return np.einsum("goc,gc->go", by_group, mean.reshape(groups, -1)).reshape(-1)


def _channel_means(
    model: onnx.ModelProto, names: set[str], batches: Iterable[NDArray[np.uint8]]
) -> Mapping[str, NDArray[np.float64]]:
    """The mean of each channel (C,) of tensors (N, C, H, W) over all images."""
    seen, wanted = onnx.ModelProto(), sorted(names)
    seen.CopyFrom(model)
    seen.graph.initializer.append(numpy_helper.from_array(np.array([0, 2, 3], np.int64), f"{_MEAN}axes"))
    for name in wanted:
        seen.graph.node.append(helper.make_node("ReduceMean", [name, f"{_MEAN}axes"], [_MEAN + name], keepdims=0))
        seen.graph.output.append(helper.make_tensor_value_info(_MEAN + name, onnx.TensorProto.FLOAT, None))
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(seen.SerializeToString(), options, providers=["CPUExecutionProvider"])
    sums, count = dict.fromkeys(wanted, np.zeros(())), 0
    for images in batches:
        found = session.run([_MEAN + name for name in wanted], {"x": np.ascontiguousarray(images)})
        for name, mean in zip(wanted, found, strict=True):
            sums[name] = sums[name] + mean.astype(np.float64) * len(images)
        count += len(images)
    return {name: total / count for name, total in sums.items()}

"""Corrected biases: each channel's mean is what it was before its weights were rounded, in whatever groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.edge_client.training.onnx_session import open_session
from protofleet.export.bundles.build import build_bundle
from protofleet.export.graphs import precision
from protofleet.export.graphs.bias_correction import keep_means, rounding_errors
from protofleet.export.graphs.precision import features_fp32, features_int8

CHANNELS = 4
IMAGES = np.random.default_rng(0).integers(0, 256, (12, 5, 6, CHANNELS), dtype=np.uint8)


def _convolution(groups: int, bias: NDArray[np.float32] | None) -> onnx.ModelProto:
    """Images to a product of one pixel each, whose weights all round the same way."""
    weights = _rounded_up((8, CHANNELS // groups, 1, 1))
    nodes = [
        helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["f"], ["t"], perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["t", "w"] + ["b"] * (bias is not None), ["z"], group=groups),
    ]
    held = [numpy_helper.from_array(weights, "w")]
    held += [numpy_helper.from_array(bias, "b")] if bias is not None else []
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, ["n", 5, 6, CHANNELS])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
        held,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _rounded_up(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """In steps of each channel's int8: 127 once, and else a whole number and 0.6."""
    rows = np.random.default_rng(1).integers(-60, 60, shape) + 0.6
    rows.reshape(shape[0], -1)[:, 0] = 127
    return (rows * np.linspace(0.001, 0.01, shape[0]).reshape(-1, *[1] * (len(shape) - 1))).astype(np.float32)


def _means(model: onnx.ModelProto) -> NDArray[np.float32]:
    session, _ = open_session(model.SerializeToString(), "g")
    return session.run(["z"], {"x": IMAGES})[0].mean(axis=(0, 2, 3))


@pytest.mark.parametrize("bias", [None, np.arange(8, dtype=np.float32)])
@pytest.mark.parametrize("groups", [1, 2])
def test_rounded_weights_with_a_corrected_bias_keep_each_channels_mean(
    groups: int, bias: NDArray[np.float32] | None
) -> None:
    whole, corrected, rounded = (_convolution(groups, bias) for _ in range(3))
    keep_means(corrected, [IMAGES[:5], IMAGES[5:]])  # batches of unlike size
    for model in (corrected, rounded):
        tensor = next(each for each in model.graph.initializer if each.name == "w")
        weights = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array((weights - rounding_errors(weights)).astype(np.float32), "w"))
    before = _means(whole)
    np.testing.assert_allclose(_means(corrected), before, rtol=1e-5, atol=1e-3)
    assert np.abs(_means(rounded) - before).max() > 0.1
    assert {each.name for each in corrected.graph.initializer} == {"w", "z_corrected_bias"}


def test_what_int8_takes_is_less_than_half_a_step_of_each_channel() -> None:
    weights = (
        np.random.default_rng(0).normal(size=(6, 3, 3, 3)).astype(np.float32)
        * np.logspace(-3, 3, 6)[:, None, None, None]
    )
    weights[2] = 0
    errors = rounding_errors(weights)
    step = np.abs(weights).max(axis=(1, 2, 3)) / 127
    assert (np.abs(errors).max(axis=(1, 2, 3)) <= step / 2 * (1 + 1e-6)).all()
    assert np.isfinite(errors).all()
    assert np.abs(errors).max() > 0


def test_features_in_int8_are_nearer_to_floats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (32, 32, 3)
    path = tmp_path / "b.bundle"
    build_bundle(backbone="mobilenet_v2", method_name="ffc", labels=["a", "b"], input_shape=shape, out=path)
    bundle, params = read_bundle(path), {}
    for name, value in bundle.params.items():
        planes = _rounded_up(value.shape) if value.ndim == 4 else value
        params[name] = planes * (value.std() / planes.std()) if value.ndim == 4 else value
    bundle = replace(bundle, params=params)
    images = np.random.default_rng(0).integers(0, 256, (32, *shape), dtype=np.uint8)
    corrected = _error(bundle, images)
    monkeypatch.setattr(precision, "keep_means", lambda model, batches: None)
    assert corrected < 0.7 * _error(bundle, images)


def _error(bundle: Bundle, images: NDArray[np.uint8]) -> float:
    exact, integer = (_features(model, images) for model in (features_fp32(bundle), features_int8(bundle, images)))
    return float(np.abs(integer - exact).mean())


def _features(model: onnx.ModelProto, images: NDArray[np.uint8]) -> NDArray[np.float32]:
    session, _ = open_session(model.SerializeToString(), "graph")
    return session.run(["z"], {"x": images})[0]

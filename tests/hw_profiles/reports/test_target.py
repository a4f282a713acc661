"""`protofleet export --target`: the graph that suits a device, what it takes there, what it costs in accuracy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from edge_samples import FASHION, fashion

from protofleet.cli import main
from protofleet.commands.export import choose_precision, write_for
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.bundle.onnx_runtime import ort
from protofleet.contract.errors import DataError, UsageError
from protofleet.edge_client.training.extractor import Extractor
from protofleet.edge_client.training.onnx_session import open_session
from protofleet.export.bundles.build import build_bundle
from protofleet.export.graphs.precision import features_fp16, features_fp32, features_int8
from protofleet.hw_profiles.devices.schema import load_devices

DEVICES = load_devices()
MakeBundle = Callable[..., Path]


@pytest.fixture
def bundle_path(mnist_like_bundle: MakeBundle, tmp_path: Path) -> Path:
    path = tmp_path / "b.bundle"
    path.write_bytes(mnist_like_bundle().read_bytes())
    return path


def _features(model: onnx.ModelProto, images: np.ndarray) -> np.ndarray:
    session, _ = open_session(model.SerializeToString(), "graph")
    return session.run(["z"], {"x": images})[0]


def test_each_precision_keeps_the_features(bundle_path: Path) -> None:
    bundle = read_bundle(bundle_path)
    images = fashion(bundle, 64, tuple(range(10))).x
    z = Extractor(bundle, bundle.params).features(images)
    scale = np.abs(z).max()
    assert np.allclose(_features(features_fp32(bundle), images), z, atol=1e-5 * scale)
    assert 0 < np.abs(_features(features_fp16(bundle), images) - z).max() < 0.01 * scale
    int8 = features_int8(bundle, images)
    assert 0 < np.abs(_features(int8, images) - z).mean() < 0.05 * scale
    assert {"QuantizeLinear", "DequantizeLinear"} <= {node.op_type for node in int8.graph.node}
    sizes = [len(m.SerializeToString()) for m in (features_fp32(bundle), features_fp16(bundle), int8)]
    assert sizes[0] > 1.9 * sizes[1] > 1.9 * 1.9 * sizes[2]


@pytest.mark.parametrize("backbone", ["mobilenet_v2", "resnet18"])
def test_nothing_leaves_the_integers_between_two_products(backbone: str, tmp_path: Path) -> None:
    """A ReLU or ReLU6 is the end of the product before it: its node is gone, and so are the pairs around it."""
    shape = (32, 32, 3)
    path = tmp_path / "b.bundle"
    build_bundle(backbone=backbone, method_name="ffc", labels=["a", "b"], input_shape=shape, out=path)
    images = np.random.default_rng(0).integers(0, 256, (32, *shape), dtype=np.uint8)
    bundle = read_bundle(path)
    int8 = features_int8(bundle, images)
    options, out = ort.SessionOptions(), tmp_path / "optimised.onnx"
    options.log_severity_level, options.optimized_model_filepath = 4, str(out)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    ort.InferenceSession(int8.SerializeToString(), options, providers=["CPUExecutionProvider"])
    kinds = [node.op_type for node in onnx.load(out).graph.node]
    assert kinds.count("QLinearConv") == {"mobilenet_v2": 52, "resnet18": 20}[backbone]
    assert kinds.count("DequantizeLinear") == 1
    assert not {"Relu", "Conv"} & {*kinds}
    z, whole = _features(int8, images), Extractor(bundle, bundle.params).features(images)
    cosine = (z * whole).sum(axis=1) / (np.linalg.norm(z, axis=1) * np.linalg.norm(whole, axis=1))
    assert cosine.mean() > {"mobilenet_v2": 0.98, "resnet18": 0.999}[backbone]


def test_a_cpu_takes_int8_a_gpu_fp16_an_array_its_products(bundle_path: Path) -> None:
    data = FASHION / "test.parquet"
    made = {name: write_for(bundle_path, DEVICES[name], choose_precision(DEVICES[name], None), data)
            for name in ("raspberry-pi-4", "jetson-nano", "fpga-vc707-32x64")}  # fmt: skip
    assert [fit.precision for fit in made.values()] == ["int8", "fp16", "fp32"]
    for fit in made.values():
        assert fit.path is not None
        assert fit.path.stat().st_size > 100
    for name in ("raspberry-pi-4", "jetson-nano"):
        fit = made[name]
        assert fit.accuracy is not None
        assert fit.accuracy_fp32 is not None
        assert fit.accuracy_fp32 > 0.5  # an untrained network's features still tell clothes apart
        assert abs(fit.accuracy - fit.accuracy_fp32) < 0.05
        assert any("predicted" in line and "fp32" in line for line in fit.lines)
    table = made["fpga-vc707-32x64"].path.read_text().splitlines()  # type: ignore[union-attr]
    assert table[0] == "Layer, M, N, K,"
    assert len(table) > 10
    assert any("simulated" in line for line in made["fpga-vc707-32x64"].lines)


def test_int8_needs_images(bundle_path: Path) -> None:
    with pytest.raises(DataError, match="calibrate"):
        write_for(bundle_path, DEVICES["raspberry-pi-4"], "int8", None)
    with pytest.raises(DataError, match="28"):
        features_int8(read_bundle(bundle_path), np.zeros((4, 32, 32, 1), np.uint8))
    with pytest.raises(UsageError, match="int8"):
        choose_precision(DEVICES["raspberry-pi-4"], "int4")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--target", "raspbery-pi-4"], "raspberry-pi-4"),
        (["--target", "raspberry-pi-4"], "--data"),
        (["--precision", "int8"], "--target"),
        (["--target", "jetson-nano", "--precision", "int4"], "int8"),
    ],
)
def test_bad_targets_are_refused_before_the_export(
    options: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "b.bundle"
    plain = ["export", "--backbone", "small_cnn", "--method", "fedproto", "--classes", "10", "--input", "28x28x1"]
    assert main([*plain, "--out", str(out), *options]) == 2
    assert named in capsys.readouterr().err
    assert not out.exists()

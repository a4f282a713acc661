"""A features graph that is given as an ONNX file becomes a bundle of a method that trains nothing."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.errors import ExportError, UsageError
from protofleet.edge_client.training.extractor import Extractor
from protofleet.export.bundles import onnx_features
from protofleet.export.bundles.build import build_bundle

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)


class Net(nn.Module):
    """Planes first or last; features (B, 6) or (B, 6, 1, 1)."""

    def __init__(self, *, last: bool, flat: bool) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self._last, self._flat = last, flat

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.permute(0, 3, 1, 2) if self._last else x
        z = torch.relu(self.norm(self.conv(x))).mean((2, 3), keepdim=True)
        return z.flatten(1) if self._flat else z


def _file(path: Path, *, last: bool = False, flat: bool = True, batch: bool = True, opset: int = 18) -> nn.Module:
    torch.manual_seed(1)
    net = Net(last=last, flat=flat).eval()
    x = torch.zeros((1, 9, 8, 3) if last else (1, 3, 9, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        axes = {"x": {0: "n"}} if batch else None
        torch.onnx.export(net, (x,), str(path), input_names=["x"], dynamic_axes=axes, opset_version=opset, dynamo=False)
    return net


def _build(tmp_path: Path, **options):
    given = {"method_name": "ffc", "labels": ["a", "b"], "mean": MEAN, "std": STD, **options}
    return build_bundle(backbone=f"onnx:{tmp_path / 'f.onnx'}", out=tmp_path / "x.bundle", **given)


@pytest.mark.parametrize(("last", "flat", "batch"), [(False, True, True), (True, False, True), (False, False, False)])
@pytest.mark.parametrize("name", ["ncm", "fedcof", "ffc"])
def test_the_device_computes_what_torch_did(tmp_path: Path, name: str, last: bool, flat: bool, batch: bool):
    net = _file(tmp_path / "f.onnx", last=last, flat=flat, batch=batch)
    _build(tmp_path, method_name=name)
    bundle = read_bundle(tmp_path / "x.bundle")
    x = np.random.default_rng(0).integers(0, 256, (7, 9, 8, 3), dtype=np.uint8)
    images = torch.from_numpy(((x / 255.0 - MEAN) / STD).astype(np.float32))
    with torch.no_grad():
        z = net(images if last else images.permute(0, 3, 1, 2)).flatten(1).double()
    z = (nn.functional.normalize(z) if b"ReduceL2" in bundle.features else z).numpy()
    np.testing.assert_allclose(Extractor(bundle, bundle.params).features(x), z, rtol=1e-5, atol=1e-6)
    m = bundle.manifest
    assert (m.features, m.input_shape, m.trainable) == (6, (9, 8, 3), False)
    assert m.mean == MEAN
    digest = hashlib.sha256((tmp_path / "f.onnx").read_bytes()).hexdigest()
    assert m.provenance == f"loaded from f.onnx; sha256 {digest}"
    assert any(value.size == 6 * 3 * 9 for value in bundle.params.values())  # the weights are the bundle's, by name


def test_another_opset_becomes_ours(tmp_path: Path):
    _file(tmp_path / "f.onnx", opset=13)
    _build(tmp_path)
    assert onnx.ModelProto.FromString(read_bundle(tmp_path / "x.bundle").features).opset_import[0].version == 20


def test_a_graph_that_is_not_the_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _file(tmp_path / "f.onnx")
    wrapped = onnx_features._wrapped
    monkeypatch.setattr(onnx_features, "_wrapped", lambda *given: wrapped(*given[:4], (0.41, 0.5, 0.6), *given[5:]))
    with pytest.raises(ExportError, match=r"features\.onnx disagrees"):
        _build(tmp_path)
    assert not (tmp_path / "x.bundle").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method_name": "fedproto"}, "--method fedproto, expected one that trains nothing"),
        ({"weights": "pretrained"}, "the file's own weights"),
        ({"mean": None}, "--mean and --std, expected those of x / 255"),
        ({"input_shape": (8, 8, 3)}, "--input, expected f.onnx's own, 9x8x3"),
        ({"std": (0.5, 0.5)}, "--std, expected 3 numbers"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path: Path, options: dict, message: str):
    _file(tmp_path / "f.onnx")
    with pytest.raises(UsageError, match=message.replace(".", r"\.")) as caught:
        _build(tmp_path, **options)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_features_are_refused(tmp_path: Path):
    with pytest.raises(ExportError, match="expected an ONNX model"):
        _build(tmp_path)  # not there
    (tmp_path / "f.onnx").write_bytes(b"no model")
    with pytest.raises(ExportError, match="expected an ONNX model"):
        _build(tmp_path)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("x", "z")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["z"])], "g", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), tmp_path / "f.onnx")
    with pytest.raises(ExportError, match="float32 images"):
        _build(tmp_path)


def _two_ends(path: Path, output: list, node: onnx.NodeProto, kind: int = TensorProto.FLOAT) -> None:
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, "h", "w"])
    ends = [helper.make_tensor_value_info(name, kind, ["n", None]) for name in output]
    graph = helper.make_graph([node], "g", [given], ends)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)


@pytest.mark.parametrize(
    ("output", "node", "kind", "message"),
    [
        ([], ("Flatten", {}), TensorProto.FLOAT, "expected an output, the features, got none"),
        (["z"], ("Shape", {}), TensorProto.INT64, "ONNX Runtime cannot"),
        (["z"], ("DepthToSpace", {"blocksize": 2}), TensorProto.FLOAT, "ONNX Runtime cannot"),
    ],
)
def test_what_onnx_runtime_refuses_is_one_line(tmp_path: Path, output: list, node: tuple, kind: int, message: str):
    _two_ends(tmp_path / "f.onnx", output, helper.make_node(node[0], ["x"], ["z"], **node[1]), kind)
    with pytest.raises(ExportError, match=message) as caught:
        _build(tmp_path, input_shape=(8, 8, 3))
    assert "\n" not in str(caught.value)


def test_a_file_that_never_ends_is_not_read(tmp_path: Path):
    (tmp_path / "f.onnx").symlink_to("/dev/zero")
    with pytest.raises(ExportError, match="got no regular file"):
        _build(tmp_path)

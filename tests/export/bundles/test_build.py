"""The bundle as a whole: reproducible bytes, a manifest that tells the truth, and the command that makes it."""

from __future__ import annotations

import gc
import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from export_samples import session
from onnx.reference import ReferenceEvaluator
from safetensors.torch import save_file

from protofleet import cli
from protofleet.contract.bundle.bundle_file import STEP_INPUTS, Bundle, read_bundle
from protofleet.contract.bundle.onnx_runtime import ort
from protofleet.contract.errors import ExportError, MethodError, UsageError
from protofleet.contract.heads.sphere import orthonormal_frame
from protofleet.edge_client.training.extractor import Extractor
from protofleet.export.backbones.backbone import build_backbone
from protofleet.export.bundles.build import build_bundle

BASE = {
    "backbone": "small_cnn",
    "method_name": "fedproto",
    "labels": ["a", "b", "c"],
    "input_shape": (12, 12, 1),
    "batch": 4,
}


def _build(path: Path, **changes) -> Bundle:
    build_bundle(**{**BASE, **changes}, out=path)
    return read_bundle(path)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return _build(tmp_path_factory.mktemp("bundle") / "a.bundle")


def test_an_export_takes_one_thread_and_leaves_torch_and_the_collector_as_they_were(tmp_path: Path):
    before, seen = torch.get_num_threads(), set[int]()
    torch.set_num_threads(2)
    thresholds = gc.get_threshold()
    try:
        build_bundle(**BASE, out=tmp_path / "a.bundle", progress=lambda _: seen.add(torch.get_num_threads()))
        assert (seen, torch.get_num_threads(), gc.get_threshold()) == ({1}, 2, thresholds)
    finally:
        torch.set_num_threads(before)


def test_same_arguments_same_bytes_even_in_another_process(tmp_path: Path):
    here = tmp_path / "here.bundle"
    build_bundle(**BASE, out=here)
    there = tmp_path / "elsewhere" / "there.bundle"
    there.parent.mkdir()
    code = f"from protofleet.export.bundles.build import build_bundle; build_bundle(**{BASE!r}, out={str(there)!r})"
    root = Path(cli.__file__).parent.parent
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r}); {code}"], check=True, cwd=tmp_path
    )
    assert here.read_bytes() == there.read_bytes()


def test_another_seed_other_weights_same_graphs(bundle: Bundle, tmp_path: Path):
    other = _build(tmp_path / "b.bundle", seed=1)
    assert other.features == bundle.features
    assert other.train_step == bundle.train_step
    assert not np.array_equal(other.params["backbone.0.weight"], bundle.params["backbone.0.weight"])


def test_manifest_tells_the_truth(bundle: Bundle):
    m = bundle.manifest
    assert (m.backbone, m.method, m.head, m.labels, m.batch) == ("small_cnn", "fedproto", "local", ("a", "b", "c"), 4)
    assert (m.input_shape, m.features, m.mean, m.std) == ((12, 12, 1), 128, (0.5,), (0.5,))
    assert m.provenance == "initialised from seed 0"
    net, _ = build_backbone("small_cnn", (12, 12, 1))
    assert m.parameter_count == sum(p.numel() for p in net.parameters()) + 128 * 3 + 3
    assert m.names("optimizer") == tuple(f"momentum.{n}" for n in m.names("param"))
    assert set(bundle.params) == set(m.names("param", "buffer", "frozen"))
    running = session(bundle.train_step)
    assert [i.name for i in running.get_inputs()] == [*STEP_INPUTS, *(t.name for t in m.state)]
    assert {tuple(i.shape) for i in running.get_inputs() if i.name == "backbone.0.weight"} == {(32, 1, 3, 3)}


def test_nothing_of_this_machine_is_in_the_bundle(bundle: Bundle):
    for graph in (bundle.features, bundle.train_step):
        model = onnx.ModelProto.FromString(graph)
        assert not model.metadata_props
        assert not model.doc_string
        assert {n.domain for n in model.graph.node} == {""}
        assert not re.search(rb"/(home|root|tmp|usr|work|Users)/|\.py\b|torch", graph)


@pytest.mark.parametrize(
    ("changes", "roles"),
    [
        ({"head": "frozen"}, {"head.weight": "frozen"}),
        ({"hyper": {"momentum": 0.0}}, {"head.weight": "param", "head.bias": "param"}),
        ({"method_name": "spherefed"}, {"head.weight": "frozen"}),
        ({"norm": "batch"}, {"backbone.1.running_var": "buffer"}),
    ],
)
def test_roles_follow_method_head_and_norm(tmp_path: Path, changes: dict, roles: dict):
    made = _build(tmp_path / "x.bundle", **changes)
    found = {t.name: t.role for t in made.manifest.state}
    assert roles.items() <= found.items()
    assert any(r == "optimizer" for r in found.values()) == ("hyper" not in changes)
    if roles.get("head.weight") == "frozen":
        assert "head.bias" not in found
        np.testing.assert_allclose(made.params["head.weight"], orthonormal_frame(3, 128, 0), rtol=1e-6)


def test_ffc_has_no_step_and_unit_features(tmp_path: Path):
    made = _build(tmp_path / "x.bundle", method_name="ffc")
    assert made.train_step is None
    assert made.manifest.head == "none"
    assert not made.manifest.trainable
    assert b"ReduceL2" in made.features


def test_given_weights_are_the_bundles(tmp_path: Path):
    net, _ = build_backbone("small_cnn", (12, 12, 1), seed=7)
    save_file({**net.state_dict(), "fc.bias": torch.ones(1)}, tmp_path / "w.safetensors")
    lines: list[str] = []
    made = build_bundle(**BASE, out=tmp_path / "x.bundle", weights=tmp_path / "w.safetensors", progress=lines.append)
    read = read_bundle(tmp_path / "x.bundle")
    np.testing.assert_array_equal(read.params["backbone.0.weight"], net.state_dict()["0.weight"].numpy())
    assert made.ignored == ("fc.bias",)
    digest = hashlib.sha256((tmp_path / "w.safetensors").read_bytes()).hexdigest()
    assert read.manifest.provenance == f"loaded from w.safetensors; sha256 {digest}"
    assert made.sha256 == read.sha256
    assert len(lines) == len(made.seconds) == 5


def test_a_bundle_that_disagrees_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from protofleet.export.operators.translation import TABLE

    monkeypatch.setitem(TABLE, torch.ops.aten.threshold_backward.default, lambda e, out, grad, *_: grad)
    with pytest.raises(ExportError, match="disagrees with torch"):
        build_bundle(**BASE, out=tmp_path / "x.bundle")
    monkeypatch.setitem(TABLE, torch.ops.aten.relu.default, lambda e, out, a: a)
    with pytest.raises(ExportError, match=r"features\.onnx disagrees with torch"):
        build_bundle(**{**BASE, "method_name": "ffc"}, out=tmp_path / "x.bundle")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"method_name": "fedprot"}, MethodError, "try one of fedproto"),
        ({"head": "none"}, UsageError, "--head, expected local or frozen for fedproto, got none"),
        ({"hyper": {"momentun": 0.1}}, MethodError, "momentum"),
        ({"hyper": {"lr": "fast"}}, MethodError, "lr, expected a number, got fast"),
        ({"labels": ["a"]}, UsageError, "at least 2 classes"),
        ({"labels": ["a", "a"]}, UsageError, "names that differ"),
        ({"batch": 0}, UsageError, "--batch"),
        ({"mean": (0.1, 0.2)}, UsageError, "--mean, expected 1 numbers"),
        ({"std": (0.0,)}, UsageError, "--std, expected numbers above 0"),
        ({"head": "frozen", "labels": [str(i) for i in range(200)]}, MethodError, "between 1 and 128 classes"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path: Path, changes: dict, error: type[Exception], message: str):
    with pytest.raises(error, match=message) as caught:
        build_bundle(**{**BASE, **changes}, out=tmp_path / "x.bundle")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def _command(*options: str) -> int:
    return cli.main(["export", *options])


def test_the_command_writes_a_bundle_and_sums_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "fleet.bundle"
    options = ["--backbone", "fedproto_mnist", "--method", "fedproto", "--classes", "cat,dog", "--input", "28x28x1"]
    more = ["--batch", "4", "--set", "lambda=0.1", "--set", "lr=0.02", "--mean", "0.1", "--bundle-version", "3"]
    assert _command(*options, *more, "--out", str(out)) == 0
    manifest = read_bundle(out).manifest
    assert manifest.labels == ("cat", "dog")
    assert (manifest.hyper["lambda"], manifest.hyper["lr"]) == (0.1, 0.02)
    assert (manifest.mean, manifest.version, manifest.batch) == ((0.1,), 3, 4)
    said = capsys.readouterr().err
    for word in ("exporting train_step.onnx", "running both in ONNX Runtime", "D = 50", "worst relative difference"):
        assert word in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--backbone": "small_cn"}, "try one of small_cnn"),
        ({"--classes": "1"}, "--classes, expected 2 to 65535 classes"),
        ({"--classes": "cat"}, "--classes, expected a number, or names"),
        ({"--input": "28x28"}, "--input, expected HxWxc, got 28x28"),
        ({"--input": "0x28x1"}, "--input, expected HxWxc"),
        ({"--head": "lokal"}, "--head, expected local, frozen or none, got lokal"),
        ({"--norm": "layer"}, "--norm, expected batch or group, got layer"),
        ({"--set": "lr"}, "--set, expected key=value"),
        ({"--mean": "x"}, "--mean, expected numbers"),
        ({"--out": "/nowhere/at/all/x.bundle"}, "--out, expected an existing directory"),
        ({"--out": "."}, "--out, expected a file"),
        ({"--sign": "absent.key"}, "--sign absent.key, expected a key file"),
        ({"--seed": "-1"}, "--seed, expected 0 or more"),
        ({"--batch": "many"}, "--batch"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(tmp_path, monkeypatch, capsys, changes, message):
    monkeypatch.chdir(tmp_path)
    options = {
        "--backbone": "small_cnn",
        "--method": "fedproto",
        "--classes": "3",
        "--input": "12x12x1",
        "--out": "x.bundle",
    }
    flat = [part for pair in {**options, **changes}.items() for part in pair]
    assert _command(*flat, "--quiet") == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def _unzipped(path: Path, folder: Path) -> Path:
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
    return folder


def test_a_foreign_runtime_finds_the_weights_beside_the_graph(tmp_path: Path):
    """By its path alone, with what `params.safetensors` holds; the device's own way gives the same features."""
    whole = _build(tmp_path / "a.bundle", backbone="resnet18", input_shape=(32, 32, 3), method_name="ffc")
    folder = _unzipped(tmp_path / "a.bundle", tmp_path / "open")
    x = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    device = Extractor(whole, whole.params).features(x)
    by_path = ort.InferenceSession(folder / "features.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(by_path.run(["z"], {"x": x})[0], device, rtol=1e-5, atol=1e-5 * np.abs(device).max())
    loaded = onnx.load(folder / "features.onnx")  # reads external data beside it
    onnx.checker.check_model(folder / "features.onnx")
    for tensor in loaded.graph.initializer:
        if tensor.name in whole.params:
            np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), whole.params[tensor.name])
    reference = ReferenceEvaluator(loaded).run(["z"], {"x": x[:1]})[0]
    np.testing.assert_allclose(reference, device[:1], rtol=1e-3, atol=1e-4 * np.abs(device).max())


def test_every_external_weight_lies_within_the_file(bundle: Bundle, tmp_path: Path):
    _build(tmp_path / "a.bundle")
    size = (_unzipped(tmp_path / "a.bundle", tmp_path / "open") / "params.safetensors").stat().st_size
    names = set()
    for graph in (bundle.features, bundle.train_step or b""):
        for tensor in onnx.ModelProto.FromString(graph).graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                place = {entry.key: entry.value for entry in tensor.external_data}
                assert place["location"] == "params.safetensors"
                assert int(place["length"]) == 4 * int(np.prod(tensor.dims))
                assert int(place["offset"]) + int(place["length"]) <= size
                names.add(tensor.name)
    assert names == {name for name in bundle.params if name.startswith("backbone.")}


OWN = """
import torch
import torchvision
from torch import nn

class Idle(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.unused = nn.Conv2d(3, 4, 3), nn.Linear(4, 4)
    def forward(self, x):
        return self.conv(x).mean((2, 3))

class Versioned(Idle):
    # asks, as MNASNet does, which version of the file its weights come from
    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        if metadata.get("version") is None:
            raise ValueError("version should be set to 1 or 2 instead of None")
        super()._load_from_state_dict(state, prefix, metadata, *rest)

def mnasnet():
    net = torchvision.models.mnasnet0_5()
    net.classifier = nn.Identity()
    return net

def vit():
    net = torchvision.models.VisionTransformer(
        image_size=16, patch_size=8, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=16)
    net.heads = nn.Identity()
    return net

def swin():
    net = torchvision.models.SwinTransformer([2, 2], 8, [2], [2], [4, 4])
    net.head = nn.Identity()
    return net
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_nets_for_build.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return "own_nets_for_build"


@pytest.mark.parametrize(
    ("name", "method_name", "side"),
    [
        ("mnasnet", "ffc", 32),
        ("Versioned", "fedproto", 8),
        ("vit", "fedproto", 16),
        ("vit", "ffc", 16),
        ("swin", "ffc", 16),
        ("Idle", "fedhkd", 8),
    ],
)
def test_a_users_own_network_becomes_a_bundle(own: str, tmp_path: Path, name: str, method_name: str, side: int):
    """And the device's runtime takes it; a parameter that the features do not come through is left behind."""
    found = _build(
        tmp_path / "own.bundle", backbone=f"{own}:{name}", input_shape=(side, side, 3), method_name=method_name
    )
    x = np.random.default_rng(0).integers(0, 256, (4, side, side, 3), dtype=np.uint8)
    z = Extractor(found, found.params).features(x)
    assert z.shape == (4, found.manifest.features)
    assert found.manifest.trainable == (method_name != "ffc")
    assert not any("unused" in tensor.name for tensor in found.manifest.state)


def test_a_module_that_imports_torchvision_works_from_the_command(own: str, tmp_path: Path):
    """In a process of its own, where nobody has imported torchvision before."""
    command = f"export --backbone {own}:vit --method ffc --classes 3 --input 16x16x3 --out own.bundle --quiet".split()
    done = subprocess.run([sys.executable, "-m", "protofleet", *command], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("backbone", "size", "message"),
    [
        ("{own}:vit", "24x24x3", r"does not take images of 24x24x3.* got .*height.*try another --input"),
        ("{own}:nothing", "16x16x3", r"cannot be imported and called.* got AttributeError"),
        ("nowhere:net", "16x16x3", r"cannot be imported and called.* got ModuleNotFoundError"),
        (":", "16x16x3", r"--backbone, expected a known backbone or module:callable, got :"),
    ],
)
def test_a_wrong_backbone_is_one_line(own: str, capsys, backbone: str, size: str, message: str):
    options = ["--method", "ffc", "--classes", "3", "--input", size, "--out", "own.bundle", "--quiet"]
    code = cli.main(["export", "--backbone", backbone.format(own=own), *options])
    error = capsys.readouterr().err
    assert code == 2
    assert re.fullmatch(rf"error: .*{message}.*\n", error), error

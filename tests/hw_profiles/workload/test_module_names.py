"""Names of layers are modules of the network, whoever exported it; a plain ONNX file is costed."""

from __future__ import annotations

import json

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from protofleet.cli import main
from protofleet.hw_profiles.reports.subject import load_subject
from protofleet.hw_profiles.workload.module_names import module_names


class _Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.relu = nn.Conv2d(width, width, 3, padding=1), nn.ReLU()

    def forward(self, x):
        return self.relu(self.conv1(x)) + x


class _Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.layer1 = nn.Sequential(_Block(8), _Block(8))
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        return self.fc(torch.flatten(nn.functional.adaptive_avg_pool2d(self.layer1(self.stem(x)), 1), 1))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A network of modules as torch's exporter by traces writes it, at batch 1."""
    path = tmp_path_factory.mktemp("onnx") / "network.onnx"
    torch.onnx.export(_Network().eval(), (torch.zeros(1, 3, 16, 16),), str(path), dynamo=False)
    return path


def test_layers_of_a_plain_file_are_named_after_its_modules(plain):
    forward = load_subject(str(plain), batch=3).forward_at(3)
    names = [layer.name for layer in forward.layers]
    assert {"stem.0", "stem.2", "layer1.0.conv1", "layer1.0.relu", "layer1.1.conv1", "layer1.1", "fc"} <= set(names)
    assert len(set(names)) == len(names)
    convolutions = [layer.macs for layer in forward.layers if layer.op == "Conv"]
    assert convolutions == [3 * 14 * 14 * 8 * 9 * 3, *[3 * 14 * 14 * 8 * 9 * 8] * 2], "at batch 3, where the file has 1"


def test_a_constant_that_torch_shares_is_nobodys_name():
    """Its exporter keeps one of equal tensors: a bias of zeros is that of every convolution that had one."""
    nodes = [
        helper.make_node("Identity", ["fc.bias"], ["onnx::Conv_9"], "Identity_0"),
        helper.make_node("Conv", ["x", "onnx::Conv_8", "onnx::Conv_9"], ["y"], "/features/features.0/Conv"),
        helper.make_node("Gemm", ["y", "fc.weight", "fc.bias"], ["z"], "/fc/Gemm"),
    ]
    weights = ("fc.weight", "fc.bias", "onnx::Conv_8")
    assert module_names(nodes, weights, ("x", "y", "z"))[1:] == ["features.0", "fc"]


def test_scopes_of_torchs_other_exporter_are_read():
    entry = onnx.StringStringEntryProto(
        key="pkg.torch.onnx.name_scopes", value="['', 'layer1', 'layer1.0.relu', 'relu_1']"
    )
    node = helper.make_node("Relu", ["a"], ["b"], "node_relu_1")
    node.metadata_props.append(entry)
    assert module_names([node], set(), {"a", "b"}) == ["layer1.0.relu"]
    node.metadata_props[0].value = "[no list"
    assert module_names([node], set(), {"a", "b"}) == ["input:Relu"]


def test_names_go_through_casts_and_none_comes_twice():
    nodes = [
        helper.make_node("Cast", ["net.conv.weight"], ["w"], "Cast_0", to=TensorProto.FLOAT),
        helper.make_node("Conv", ["x", "w"], ["a"], "Conv_1"),
        helper.make_node("Relu", ["a"], ["b"], "Relu_2"),
        helper.make_node("Conv", ["b", "w"], ["c"], "Conv_3"),
        helper.make_node("Relu", ["c"], ["d"], "Relu_4"),
        helper.make_node("Add", ["d", "e"], ["f"], "shortcut"),
        helper.make_node("MatMul", ["f", "w0"], ["g"], "MatMul_6"),
    ]
    names = module_names(nodes, {"net.conv.weight", "w0"}, set("xabcdfg"))
    assert names == [
        "net.conv:Cast", "net.conv", "net.conv:Relu", "net.conv:Conv", "net.conv:Relu#2", "shortcut", "w0"
    ]  # fmt: skip


def test_no_report_names_a_layer_by_its_number(mnist_like_bundle, tmp_path, capsys):
    out = tmp_path / "c.json"
    for target in (mnist_like_bundle(), "spherefed_mobilenetv2"):
        assert main(["cost", str(target), "--batch", "1", "--json", str(out)]) == 0
        names = [layer["name"] for layer in json.loads(out.read_text())["layers"]]
        assert not [
            name for name in names if name.split(":")[0].rsplit("_", 1)[0] in ("Conv", "Gemm", "MatMul", "Relu")
        ]


def test_a_plain_file_is_costed_and_swept_without_the_papers_claims(plain, tmp_path, capsys):
    out = tmp_path / "c.json"
    assert main(["cost", str(plain), "--classes", "5", "--batch", "2", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["subject"]["name"] == "network"
    assert report["subject"]["features"] == 5
    assert report["methods"]
    assert report["claims"] == []
    assert main(["cost", "sweep", str(plain), "--batch", "2", "--rows", "8", "--cols", "8", "--json", str(out)]) == 0
    assert {point["method"] for point in json.loads(out.read_text())["points"]} == {"inference", "fedavg"}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (None, "error: cannot read {}, expected an ONNX file, got No such file or directory"),
        (b"no graph", "error: "),
    ],
)
def test_a_file_that_is_none_is_one_line(text, line, tmp_path, capsys):
    path = tmp_path / "other.onnx"
    if text is not None:
        path.write_bytes(text)
    assert main(["cost", str(path)]) != 0
    said = capsys.readouterr().err
    assert said.startswith(line.format(path))
    assert said.count("\n") == 1


def test_a_batch_that_is_written_into_the_graph_is_refused(tmp_path, capsys):
    shape = helper.make_tensor("shape", TensorProto.INT64, (2,), (1, 12))
    x, z = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", (1, 3, 2, 2)), ("z", (1, 12))))
    graph = helper.make_graph([helper.make_node("Reshape", ["x", "shape"], ["z"])], "g", [x], [z], [shape])
    path = tmp_path / "fixed.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]).SerializeToString())
    assert main(["cost", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "fixed.onnx" in said

"""The backbones that the SphereFed paper costs, as ONNX graphs without weights: Tables 11, 12, 14 and 15.

Written as graphs, so that they are read by `graph` like any bundle. Where the tables as printed do not fit together,
the reading that gives the printed feature width is taken: ConvNet needs padding 1 to flatten to 1024 numbers at 32x32;
VGG13's last pool must reduce to 1x1 for its 512; MobileNetV2 and ResNet18 have the usual residual connections, which
the tables leave out (where a shortcut changes shape, ResNet18 has a 1x1 convolution, MobileNetV2 none). At 64x64
(TinyImageNet) the tables' TIN_S = 2 applies. Norms are group norms, as in the paper but for MobileNetV2 on CIFAR-100.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from onnx import ModelProto, NodeProto, TensorProto, helper

from protofleet.contract.errors import UsageError
from protofleet.contract.names import named

__all__ = ["NETWORKS", "build_network"]

_OPSET, _IR_VERSION = 21, 10
_GROUPS = 8
# MobileNetV2, Table 14: expansion, output channels, repeats, stride of the first (0: TIN_S)
_MOBILENET_V2 = (
    (1, 16, 1, 1),
    (6, 24, 2, 0),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def build_network(name: str, *, side: int = 32) -> ModelProto:
    """The named backbone, x f32 (batch, 3, side, side) → z f32 (batch, D), weights declared but not stored.

    Raises:
        UsageError: for an unknown name, or a side other than a positive multiple of 32.
    """
    build = named(NETWORKS, name, "unknown backbone", "a bundle file or a name")
    if side < 32 or side % 32:
        raise UsageError(f"{name}: input side", expected="a multiple of 32", got=side)
    net = _Net(side)
    build(net, 2 if side >= 64 else 1)
    return net.model(name)


class _Net:
    """A chain of nodes under construction: the current value, its channels and its side."""

    def __init__(self, side: int) -> None:
        self.nodes: list[NodeProto] = []
        self.weights: list[TensorProto] = []
        self.value, self.channels, self.side, self.input_side = "x", 3, side, side
        self.block, self.convolutions = "", 0

    def node(self, op: str, *inputs: str, **attributes: Any) -> None:
        output = f"v{len(self.nodes)}"
        self.nodes.append(
            helper.make_node(op, [*(inputs or (self.value,))], [output], f"{op}_{len(self.nodes)}", **attributes)
        )
        self.value = output

    def inside(self, block: str) -> None:
        """What follows belongs to this module: `blocks.3`."""
        self.block, self.convolutions = f"{block}." if block else "", 0

    def weight(self, name: str, *shape: int) -> str:
        tensor = TensorProto(name=f"{self.block}{name}", data_type=TensorProto.FLOAT, dims=shape)
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="params.safetensors")
        self.weights.append(tensor)
        return tensor.name

    def conv(self, out: int, kernel: int = 3, stride: int = 1, groups: int = 1, relu: bool = True) -> None:
        """Convolution without bias, norm and, unless told otherwise, ReLU."""
        self.convolutions += 1
        conv, norm = (f"{kind}{self.convolutions}" for kind in ("conv", "norm"))
        pad, weight = kernel // 2, self.weight(f"{conv}.weight", out, self.channels // groups, kernel, kernel)
        self.node(
            "Conv", self.value, weight, strides=[stride] * 2, pads=[pad] * 4, kernel_shape=[kernel] * 2, group=groups
        )
        self.channels, self.side = out, -(-self.side // stride)
        scale, bias = self.weight(f"{norm}.weight", out), self.weight(f"{norm}.bias", out)
        self.node("GroupNormalization", self.value, scale, bias, num_groups=_GROUPS)
        if relu:
            self.node("Relu")

    def pool(self, op: str, kernel: int) -> None:
        self.node(op, kernel_shape=[kernel] * 2, strides=[kernel] * 2)
        self.side //= kernel

    def model(self, name: str) -> ModelProto:
        self.node("Flatten")
        self.nodes[-1].output[0] = "z"
        width = self.channels * self.side * self.side
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, self.input_side, self.input_side])
        z = helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", width])
        graph = helper.make_graph(self.nodes, name, [x], [z], self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION)


def _convnet(net: _Net, tin: int) -> None:
    """Table 11."""
    for out, stride in ((32, 1), (64, 2), (64, 2), (64, 1), (128, 2), (128, 1), (256, 2)):
        net.conv(out, stride=stride)


def _vgg13(net: _Net, tin: int) -> None:
    """Table 12."""
    for out in (64, 128, 256, 512):
        net.conv(out)
        net.conv(out)
        net.pool("MaxPool", 2)
    net.conv(512)
    net.conv(512)
    net.pool("MaxPool", net.side)


def _mobilenet_v2(net: _Net, tin: int) -> None:
    """Table 14."""
    net.inside("stem")
    net.conv(32)
    blocks = 0
    for expansion, out, repeats, first in _MOBILENET_V2:
        for repeat in range(repeats):
            net.inside(f"blocks.{blocks}")
            blocks += 1
            stride = (first or tin) if repeat == 0 else 1
            start, channels = net.value, net.channels
            net.conv(channels * expansion, kernel=1)
            net.conv(net.channels, stride=stride, groups=net.channels)
            net.conv(out, kernel=1, relu=repeat > 0 or stride != 1 or channels != out)
            if stride == 1 and channels == out:
                net.node("Add", start, net.value)
    net.inside("last")
    net.conv(1280, kernel=1)
    net.pool("AveragePool", net.side)


def _resnet18(net: _Net, tin: int) -> None:
    """Table 15."""
    net.inside("stem")
    net.conv(64)
    for stage, (out, first) in enumerate(((64, tin), (128, 2), (256, 2), (512, 2))):
        for block, stride in enumerate((first, 1)):
            net.inside(f"stages.{stage}.{block}")
            start, channels, side = net.value, net.channels, net.side
            net.conv(out, stride=stride)
            net.conv(out, relu=False)
            body, net.value = net.value, start
            if stride != 1 or channels != out:
                net.channels, net.side = channels, side
                net.conv(out, kernel=1, stride=stride, relu=False)
            net.node("Add", body, net.value)
            net.node("Relu")
    net.pool("AveragePool", net.side)


NETWORKS: Mapping[str, Callable[[_Net, int], None]] = {
    "spherefed_convnet": _convnet,
    "spherefed_mobilenetv2": _mobilenet_v2,
    "spherefed_resnet18": _resnet18,
    "spherefed_vgg13": _vgg13,
}

"""The suite's graphs of inference: small networks, each a first convolution, one kind of block some times over, a mean.

The blocks are those of convolutional networks. How wide they are, their kernel, stride and groups, and the size of the
picture come from a design that fills what networks have. A block is measured where it stands, between others, since a
runtime keeps activations in a layout of its own from one convolution to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from protofleet.hw_profiles.calibration.design import Point
from protofleet.hw_profiles.calibration.graph_bytes import SmallGraph

__all__ = ["INFERENCE_KINDS", "inference_graph"]


@dataclass
class _Net:
    """A network under construction: the activation `at` of `channels` on `side` x `side` places."""

    graph: SmallGraph
    at: str
    channels: int
    side: int

    def conv(
        self, out: int, kernel: int = 1, stride: int = 1, groups: int = 1, act: str = "Relu", norm: bool = True
    ) -> None:
        pad = kernel // 2
        window = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4, "group": groups}
        weight = self.graph.weight((out, self.channels // groups, kernel, kernel))
        inputs = (self.at, weight) if norm else (self.at, weight, self.graph.filled((out,), 0.1))
        self.at, self.channels = self.graph.add("Conv", *inputs, dilations=[1, 1], **window), out
        self.side = (self.side + 2 * pad - kernel) // stride + 1
        if norm:
            self.norm()
        self.act(act)

    def norm(self) -> None:
        numbers = [self.graph.filled((self.channels,), value) for value in (1.0, 0.1, 0.0, 1.0)]
        self.at = self.graph.add("BatchNormalization", self.at, *numbers, epsilon=1e-5)

    def act(self, name: str) -> None:
        if name == "Clip":
            limits = (self.graph.filled((), 0.0), self.graph.filled((), 6.0))
            self.at = self.graph.add("Clip", self.at, *limits)
        elif name == "silu":
            self.at = self.graph.add("Mul", self.at, self.graph.add("Sigmoid", self.at))
        elif name:
            self.at = self.graph.add(name, self.at)

    def add(self, other: str) -> None:
        self.at = self.graph.add("Add", self.at, other)

    def reshape(self, name: str, *shape: int) -> str:
        return self.graph.add("Reshape", name, self.graph.ints(shape))

    def pool(self, op: str, kernel: int, stride: int) -> None:
        pad = (kernel - 1) // 2
        self.at = self.graph.add(op, self.at, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[pad] * 4)
        self.side = (self.side + 2 * pad - kernel) // stride + 1

    def squeeze(self, inner: int, gate: str, act: str = "Relu") -> None:
        """Squeeze-and-excite."""
        whole, channels, side = self.at, self.channels, self.side
        self.at, self.side = self.graph.add("ReduceMean", self.at, self.graph.ints([2, 3]), keepdims=1), 1
        self.conv(inner, act=act, norm=False)
        self.conv(channels, act=gate, norm=False)
        self.at, self.side = self.graph.add("Mul", whole, self.at), side


def _pointwise(net: _Net, point: Point) -> None:
    wide = point.size(16, 1024, 8)
    for out in (wide, net.channels, wide):
        net.conv(out, act=point.of("Relu", "Clip") if out == wide else "")


def _window(net: _Net, point: Point) -> None:
    out, kernel = point.size(16, 256, 8), point.of(3, 3, 3, 5, 7)
    stride = point.of(1, 1, 2)
    net.conv(out, kernel, stride)
    net.conv(out, kernel if kernel == 3 else 3)


def _basic(net: _Net, point: Point) -> None:
    for _ in range(2):
        before = net.at
        net.conv(net.channels, 3)
        net.conv(net.channels, 3, act="")
        net.add(before)
        net.act("Relu")


def _bottleneck(net: _Net, point: Point) -> None:
    wide, width = net.channels, point.of(0, 8, 16, 32)
    inner = max(16, net.channels // point.of(1, 2, 4) // 16 * 16)
    groups = 1 if not width or inner % width else inner // width
    for stride in (point.of(1, 2), 1):
        before, other = net.at, stride > 1
        net.conv(inner)
        net.conv(inner, 3, stride, groups)
        net.conv(wide, act="")
        if not other:
            net.add(before)
        net.act("Relu")


def _inverted(net: _Net, point: Point) -> None:
    ratio, kernel, stride = point.of(2, 4, 6), point.of(3, 3, 5), point.of(1, 1, 2)
    act, squeezed = point.of("Clip", "Relu", "HardSwish", "silu"), point.of(False, False, True)
    narrow, inner = net.channels, net.channels * ratio
    for step in (stride, 1):
        before = net.at
        net.conv(inner, act=act)
        net.conv(inner, kernel, step, inner, act=act)
        if squeezed:
            net.squeeze(max(8, inner // 4 // 8 * 8), "Sigmoid" if act == "silu" else "HardSigmoid")
        net.conv(narrow, act="")
        if step == 1:
            net.add(before)


def _depthwise(net: _Net, point: Point) -> None:
    kernel, stride = point.of(3, 5, 3, 7), point.of(1, 2)
    for step in (stride, 1, 1):
        net.conv(net.channels, kernel, step, net.channels, act="Clip")


def _fire(net: _Net, point: Point) -> None:
    inner = point.size(16, 96, 8)
    half = point.size(32, 256, 8)
    for _ in range(2):
        net.conv(inner, norm=False)
        squeezed, side = net.at, net.side
        net.conv(half, norm=False)
        left = net.at
        net.at, net.channels, net.side = squeezed, inner, side
        net.conv(half, 3, norm=False)
        net.at, net.channels = net.graph.add("Concat", left, net.at, axis=1), 2 * half
    net.pool("MaxPool", 3, 2)


def _dense(net: _Net, point: Point) -> None:
    growth, inner = point.of(16, 32, 48), point.of(64, 128)
    for _ in range(3):
        before, channels = net.at, net.channels
        net.norm()
        net.act("Relu")
        net.conv(inner)
        net.conv(growth, 3, act="", norm=False)
        net.at, net.channels = net.graph.add("Concat", before, net.at, axis=1), channels + growth
    net.pool("AveragePool", 2, 2)


def _shuffle(net: _Net, point: Point) -> None:
    half, side = net.channels // 2, net.side
    for _ in range(2):
        left, right = net.graph.split("Split", net.at, outputs=2, axis=1, num_outputs=2)
        net.at, net.channels = right, half
        net.conv(half)
        net.conv(half, 3, 1, half, act="")
        net.conv(half)
        joined = net.graph.add("Concat", left, net.at, axis=1)
        rows = net.reshape(joined, 1, 2, half, side, side)
        net.at = net.reshape(net.graph.add("Transpose", rows, perm=[0, 2, 1, 3, 4]), 1, 2 * half, side, side)
        net.channels = 2 * half


def _grouped(net: _Net, point: Point) -> None:
    width = point.of(8, 16, 24, 32)
    net.conv(max(2, net.channels // width) * width)
    for stride in (point.of(1, 2), 1):
        net.conv(net.channels, 3, stride, net.channels // width)


def _normalised(net: _Net, point: Point) -> None:
    groups = point.of(1, 4, 8)
    for _ in range(2):
        net.conv(net.channels, 3, act="", norm=False)
        rows = net.reshape(net.at, 1, groups, -1)
        numbers = [net.graph.filled((groups,), value) for value in (1.0, 0.0)]
        rows = net.graph.add("InstanceNormalization", rows, *numbers, epsilon=1e-5)
        net.at = net.reshape(rows, 1, net.channels, net.side, net.side)
        for op, value in (("Mul", 1.0), ("Add", 0.1)):
            net.at = net.graph.add(op, net.at, net.graph.filled((net.channels, 1, 1), value))
        net.act("Relu")
    net.pool("MaxPool", 2, 2)


def _plain(net: _Net, point: Point) -> None:
    """Convolutions and poolings without normalisation, and layers of products behind."""
    out = point.size(16, 128, 8)
    net.conv(out, point.of(3, 5), norm=False)
    net.pool("MaxPool", 2, 2)
    net.conv(2 * out, 3, norm=False)
    net.pool(point.of("MaxPool", "AveragePool"), 2, 2)


def _first(net: _Net, point: Point) -> None:
    net.pool("MaxPool", 3, 2)


_WIDEST = {"basic": 256, "clip": 320, "swish": 320, "silu": 320}  # so that 20 MB of weights hold all


def _network(net: _Net, point: Point) -> None:
    """Stages of one family of blocks, wider and smaller from one to the next: weights that a core's cache loses."""
    family = point.of("basic", "bottleneck", "grouped", "clip", "swish", "silu", "dense", "shuffle", "fire")
    depth, ratio, kernel = point.of(2, 3, 4), point.of(3, 4, 6), point.of(3, 3, 5)
    for stage in range(3):
        if stage:
            wider = min(_WIDEST.get(family, 640), 2 * net.channels)
            net.conv(max(16, net.channels // 32 * 16) if family == "dense" else wider)
            net.pool("MaxPool", 2, 2)
        for _ in range(depth):
            _stage_block(net, family, ratio, kernel)


def _stage_block(net: _Net, family: str, ratio: int, kernel: int) -> None:
    before, channels, side = net.at, net.channels, net.side
    if family == "dense":
        net.norm()
        net.act("Relu")
        net.conv(128)
        net.conv(32, 3, act="", norm=False)
        net.at, net.channels = net.graph.add("Concat", before, net.at, axis=1), channels + 32
        return
    if family == "fire":
        net.conv(max(16, channels // 4), norm=False)
        squeezed, inner = net.at, net.channels
        net.conv(channels // 2, norm=False)
        left = net.at
        net.at, net.channels = squeezed, inner
        net.conv(channels // 2, 3, norm=False)
        net.at, net.channels = net.graph.add("Concat", left, net.at, axis=1), channels
        return
    if family == "shuffle":
        half = channels // 2
        left, net.at = net.graph.split("Split", before, outputs=2, axis=1, num_outputs=2)
        net.channels = half
        net.conv(half)
        net.conv(half, 3, 1, half, act="")
        net.conv(half)
        rows = net.reshape(net.graph.add("Concat", left, net.at, axis=1), 1, 2, half, side, side)
        net.at = net.reshape(net.graph.add("Transpose", rows, perm=[0, 2, 1, 3, 4]), 1, channels, side, side)
        net.channels = channels
        return
    if family == "basic":
        net.conv(channels, 3)
        net.conv(channels, 3, act="")
    elif family in ("bottleneck", "grouped"):
        net.conv(max(16, channels // 2))
        net.conv(net.channels, 3, 1, 1 if family == "bottleneck" else net.channels // 16)
        net.conv(channels, act="")
    else:
        act = {"clip": "Clip", "swish": "HardSwish", "silu": "silu"}[family]
        net.conv(channels * ratio, act=act)
        net.conv(net.channels, kernel, 1, net.channels, act=act)
        if family != "clip":
            net.squeeze(max(8, channels // 4 * ratio // 8 * 8), "Sigmoid" if act == "silu" else "HardSigmoid")
        net.conv(channels, act="")
    net.add(before)
    if family in ("basic", "bottleneck", "grouped"):
        net.act("Relu")


# kind: the block, number of graphs, channels, sides of the picture
_Block = Callable[[_Net, Point], None]
INFERENCE_KINDS: dict[str, tuple[_Block, int, tuple[int, int], tuple[int, int]]] = {
    "pointwise": (_pointwise, 14, (16, 512), (4, 56)),
    "window": (_window, 14, (8, 256), (6, 64)),
    "basic": (_basic, 8, (16, 512), (4, 56)),
    "bottleneck": (_bottleneck, 12, (32, 1024), (4, 32)),
    "inverted": (_inverted, 22, (16, 192), (4, 112)),
    "depthwise": (_depthwise, 10, (16, 768), (4, 112)),
    "fire": (_fire, 6, (32, 256), (7, 48)),
    "dense": (_dense, 6, (32, 512), (4, 32)),
    "shuffle": (_shuffle, 6, (32, 464), (4, 32)),
    "grouped": (_grouped, 10, (32, 512), (4, 48)),
    "normalised": (_normalised, 6, (16, 128), (8, 48)),
    "plain": (_plain, 6, (8, 64), (12, 64)),
    "first": (_first, 6, (16, 96), (16, 112)),
    "network": (_network, 12, (32, 160), (12, 64)),
}
_LARGEST_MACS = 100e6  # of a block's largest layer, about: five minutes are for a small board, too
_LARGEST_ACTIVATION = 500_000
_WINDOWS = ("window", "basic", "normalised", "plain")  # whose layers are k x k


def inference_graph(kind: str, index: int) -> SmallGraph:
    """The `index`-th graph of a kind. Its input is one photo, (1, H, W, 3) bytes, as a bundle's."""
    block, _, channels, sides = INFERENCE_KINDS[kind]
    point = Point(list(INFERENCE_KINDS).index(kind), index)
    width, side = point.size(*channels, 16), point.size(*sides)
    taps = 9 if kind in _WINDOWS else 1
    while side > sides[0] and (
        taps * width * width * side * side > _LARGEST_MACS or width * side * side > _LARGEST_ACTIVATION
    ):
        side = max(sides[0], side * 3 // 4)
    stride = 2 if kind in ("first", "plain") or width >= 64 else 1
    graph = SmallGraph(index)
    photo = graph.input((1, side * stride, side * stride, 3), bytes_=True)
    planes = graph.add("Cast", graph.add("Transpose", photo, perm=[0, 3, 1, 2]), to=1)
    numbers = [graph.filled((3,), value) for value in (2.0, 0.0, 127.0, 16000.0)]
    net = _Net(graph, graph.add("BatchNormalization", planes, *numbers, epsilon=0.0), 3, side * stride)
    net.conv(width, (3, 3, 5, 7)[index % 4], stride)
    block(net, point)
    mean = graph.add("ReduceMean", net.at, graph.ints([2, 3]), keepdims=0)
    if kind == "plain":
        out = 64 * (1 + index % 4)
        weight, bias = graph.weight((out, net.channels)), graph.filled((out,), 0.1)
        mean, net.channels = graph.add("Gemm", mean, weight, bias, transB=1), out
    graph.output(mean, (1, net.channels))
    return graph

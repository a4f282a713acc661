"""What one ONNX node computes: its kind, its matrix products, its vector operations.

A convolution is a product of M = B*OH*OW by N = C_out over K = kh*kw*C_in; a grouped one is `groups` such products; a
matrix product is itself. Everything else is counted in scalar operations per element of its output (or of its input,
where it reduces). An operator that is in no table below is `unmodelled`: it is kept and named, never free.
See docs/hardware.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
from onnx import NodeProto, helper

from protofleet.hw_profiles.workload.model import ConvShape, Gemm, Kind, Tensor

__all__ = ["Work", "conv_work", "describe"]


@dataclass(frozen=True)
class Work:
    """What `describe` finds out about a node."""

    kind: Kind
    gemms: tuple[Gemm, ...] = ()
    vector_ops: int = 0
    conv: ConvShape | None = None


# Scalar operations per output element. A transcendental function counts 4: a table look-up and its interpolation.
_ELEMENTWISE: Mapping[str, int] = {
    **dict.fromkeys(
        [
            "Add",
            "Sub",
            "Mul",
            "Div",
            "Relu",
            "Neg",
            "Abs",
            "Max",
            "Min",
            "Equal",
            "Greater",
            "GreaterOrEqual",
            "Less",
            "LessOrEqual",
            "Where",
            "Cast",
            "CastLike",
            "Not",
            "And",
            "Or",
            "Xor",
            "Sign",
            "Floor",
            "Ceil",
            "Round",
            "Clip",
            "Reciprocal",
            "Mod",
            "IsNaN",
            "IsInf",
            "BitShift",
            "PRelu",
            "LeakyRelu",
            "ThresholdedRelu",
            "Sum",
            "Mean",
        ],
        1,
    ),
    **dict.fromkeys(["HardSigmoid", "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"], 2),
    **dict.fromkeys(["HardSwish", "Sqrt", "Softsign", "Celu", "Elu", "Selu"], 3),
    **dict.fromkeys(["Sigmoid", "Tanh", "Exp", "Log", "Pow", "Erf", "Softplus", "Sin", "Cos"], 4),
    **dict.fromkeys(["Gelu", "Mish", "Swish", "QuickGelu"], 6),
}
# Per input element: statistics (2 for mean and spread) and the affine step (2), where the statistics are taken live.
_NORM: Mapping[str, int] = {
    "BatchNormalization": 2,
    "InstanceNormalization": 5,
    "GroupNormalization": 5,
    "LayerNormalization": 5,
    "SimplifiedLayerNormalization": 4,
    "RMSNormalization": 4,
    "LpNormalization": 3,
    "MeanVarianceNormalization": 4,
    "LRN": 8,
}
_SOFTMAX: Mapping[str, int] = {"Softmax": 7, "LogSoftmax": 7, "SoftmaxCrossEntropyLoss": 8}
_REDUCE: Mapping[str, int] = {
    **dict.fromkeys(
        ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ArgMax", "ArgMin", "CumSum"], 1
    ),
    **dict.fromkeys(["ReduceL2", "ReduceL1", "ReduceSumSquare", "ReduceLogSum"], 2),
    **dict.fromkeys(["ReduceLogSumExp", "TopK"], 5),
}
_POOL = frozenset(
    ["MaxPool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool", "QLinearAveragePool"]
)
_MOVE = frozenset(
    [
        "Transpose",
        "Concat",
        "Split",
        "Slice",
        "Gather",
        "GatherElements",
        "GatherND",
        "Scatter",
        "ScatterElements",
        "ScatterND",
        "Pad",
        "Expand",
        "Tile",
        "OneHot",
        "DepthToSpace",
        "SpaceToDepth",
        "Resize",
        "Upsample",
        "Trilu",
        "Range",
        "ConstantOfShape",
        "EyeLike",
        "ReverseSequence",
        "NonZero",
        "Compress",
        "Col2Im",
    ]
)
_VIEW = frozenset(["Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout"])


def describe(node: NodeProto, tensors: Mapping[str, Tensor], constants: Mapping[str, object], data: set[str]) -> Work:
    """What `node` computes. `data` names the tensors that depend on the input and not only on weights."""
    op, shape = node.op_type, _shapes(node, tensors)
    if node.domain not in ("", "ai.onnx"):
        return Work("unmodelled", vector_ops=shape.out_elements)
    if op in _GEMMS:
        return _GEMMS[op](node, tensors, data)
    if op in _VIEW:
        return Work("view")
    if op in _MOVE:
        return Work("move")
    if op in _ELEMENTWISE:
        return Work("elementwise", vector_ops=_ELEMENTWISE[op] * shape.out_elements)
    for table, kind in ((_NORM, "norm"), (_SOFTMAX, "softmax"), (_REDUCE, "reduce")):
        if op in table:
            return Work(kind, vector_ops=table[op] * shape.in_elements)  # type: ignore[arg-type]
    if op in _POOL:
        return Work("pool", vector_ops=_pool_ops(node, shape))
    return Work("unmodelled", vector_ops=shape.out_elements)


def conv_work(conv: ConvShape) -> Work:
    """The products of a convolution (ONNX `Conv`), and its kind."""
    kh, kw = conv.kernel
    m, n, k = (
        conv.batch * conv.out_height * conv.out_width,
        conv.c_out // conv.groups,
        kh * kw * conv.c_in // conv.groups,
    )
    gemm = Gemm(m, n, k, conv.groups, "k" if conv.groups > 1 else "")
    return Work(_conv_kind(conv), (gemm,), conv=conv)


@dataclass(frozen=True)
class _Shapes:
    in_elements: int
    out_elements: int


def _shapes(node: NodeProto, tensors: Mapping[str, Tensor]) -> _Shapes:
    first = next((tensors[n].elements for n in node.input if n in tensors), 0)
    return _Shapes(first, sum(tensors[n].elements for n in node.output if n in tensors))


def _attributes(node: NodeProto) -> dict[str, object]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def _conv_kind(conv: ConvShape) -> Kind:
    if conv.groups == 1:
        return "pointwise" if conv.kernel == (1, 1) else "conv"
    return "depthwise" if conv.groups == conv.c_in else "grouped"


def _window(node: NodeProto, x: tuple[int, ...], w: tuple[int, ...], y: tuple[int, ...], c_out: int) -> ConvShape:
    """The window of a 1-D or 2-D convolution; 1-D is 2-D of height 1."""
    given = _attributes(node)
    rank = len(x) - 2

    def ints(name: str, default: list[int]) -> list[int]:
        return [int(v) for v in given.get(name, default)]  # type: ignore[attr-defined]

    pads = ints("pads", [0] * 2 * rank)
    fill = [1] * (2 - rank)
    kernel, stride = fill + list(w[2:]), fill + ints("strides", [1] * rank)
    dilation = fill + ints("dilations", [1] * rank)
    zero = [0] * (2 - rank)
    sides = zero + pads[:rank] + zero + pads[rank:]
    height, width = fill + list(x[2:])
    out_h, out_w = fill + list(y[2:])
    if given.get("auto_pad", b"NOTSET") in (b"SAME_UPPER", b"SAME_LOWER"):
        need_h = max(0, (out_h - 1) * stride[0] + dilation[0] * (kernel[0] - 1) + 1 - height)
        need_w = max(0, (out_w - 1) * stride[1] + dilation[1] * (kernel[1] - 1) + 1 - width)
        sides = [need_h // 2, need_w // 2, need_h - need_h // 2, need_w - need_w // 2]
    groups = int(given.get("group", 1))  # type: ignore[call-overload]
    return ConvShape(
        x[0], height, width, x[1], c_out, (kernel[0], kernel[1]), (stride[0], stride[1]),
        (sides[0], sides[1], sides[2], sides[3]), (dilation[0], dilation[1]), groups, out_h, out_w,
    )  # fmt: skip


def _conv(node: NodeProto, tensors: Mapping[str, Tensor], data: set[str]) -> Work:
    weight = 3 if node.op_type == "QLinearConv" else 1
    x, w, y = (tensors[n].shape for n in (node.input[0], node.input[weight], node.output[0]))
    if len(x) > 4:
        return Work("unmodelled", vector_ops=prod(y))
    work = conv_work(_window(node, x, w, y, w[0]))
    bias = prod(y) if len(node.input) == 3 and node.op_type == "Conv" else 0
    return Work(work.kind, work.gemms, bias, work.conv)


def _conv_transpose(node: NodeProto, tensors: Mapping[str, Tensor], data: set[str]) -> Work:
    x, w, _y = (tensors[n].shape for n in (node.input[0], node.input[1], node.output[0]))
    groups = int(_attributes(node).get("group", 1))  # type: ignore[call-overload]
    taps = prod(w[2:])
    gemm = Gemm(x[0] * prod(x[2:]), taps * w[1], x[1] // groups, groups, "k" if groups > 1 else "")
    kind: Kind = "conv" if groups == 1 else "depthwise" if groups == x[1] else "grouped"
    return Work(kind, (gemm,), taps * gemm.m * w[1] * groups)  # the overlapping products are added up


def _matmul(node: NodeProto, tensors: Mapping[str, Tensor], data: set[str]) -> Work:
    second = 3 if node.op_type == "QLinearMatMul" else 1
    a, b, _y = (tensors[n].shape for n in (node.input[0], node.input[second], node.output[0]))
    n = b[-1] if len(b) > 1 else 1
    if len(b) <= 2:  # one matrix on the right: the left one's batch dimensions are rows
        return Work("linear", (Gemm(max(1, prod(a[:-1])), n, a[-1]),))
    count = prod(np.broadcast_shapes(a[:-2], b[:-2])) if len(a) > 1 else prod(b[:-2])
    return Work("linear", (Gemm(a[-2] if len(a) > 1 else 1, n, a[-1], count),))


def _gemm(node: NodeProto, tensors: Mapping[str, Tensor], data: set[str]) -> Work:
    a, y = tensors[node.input[0]].shape, tensors[node.output[0]].shape
    k = a[0] if _attributes(node).get("transA", 0) else a[1]
    return Work("linear", (Gemm(y[0], y[1], k),), prod(y) if len(node.input) == 3 else 0)


def _einsum(node: NodeProto, tensors: Mapping[str, Tensor], data: set[str]) -> Work:
    """Two-operand einsum: letters in both and in the output are `count`, summed letters k, the others m and n."""
    out = sum(tensors[n].elements for n in node.output if n in tensors)
    equation = bytes(_attributes(node)["equation"]).decode().replace(" ", "")  # type: ignore[call-overload]
    left, _, result = equation.partition("->")
    terms = left.split(",")
    if len(terms) != 2 or not result or "." in equation:
        return Work("unmodelled", vector_ops=out)
    size = dict(zip(terms[0], tensors[node.input[0]].shape, strict=True))
    size |= dict(zip(terms[1], tensors[node.input[1]].shape, strict=True))
    a, b, y = set(terms[0]), set(terms[1]), set(result)

    def over(letters: set[str]) -> int:
        return prod(size[letter] for letter in letters)

    if not (a & b) - y:  # nothing is summed between them: an outer or elementwise product
        return Work("elementwise", vector_ops=over(a | b))
    return Work("linear", (Gemm(over(a - b), over(b - a), over((a & b) - y), over(a & b & y)),))


_GEMMS: Mapping[str, Callable[[NodeProto, Mapping[str, Tensor], set[str]], Work]] = {
    "Conv": _conv,
    "ConvInteger": _conv,
    "QLinearConv": _conv,
    "ConvTranspose": _conv_transpose,
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "QLinearMatMul": _matmul,
    "Gemm": _gemm,
    "Einsum": _einsum,
}


def _pool_ops(node: NodeProto, shape: _Shapes) -> int:
    """Every window element is compared or added once."""
    if node.op_type.startswith("Global"):
        return shape.in_elements
    window = _attributes(node).get("kernel_shape", [1])
    return shape.out_elements * prod(int(v) for v in window)  # type: ignore[attr-defined, misc]

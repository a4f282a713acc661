"""The suite's graphs of training: the operators of which our exporter makes a step, in its shapes.

A step has no kernel of its own for gradients: convolutions and their gradients are products (of rows of channels, of
taps, of a bilinear form, of bands), between copies that bring numbers where the product wants them; normalisation is
products with a vector and passes over rows; an update is a few passes over a vector. Weights are inputs, as in a step.
What an operator does not read from another is an input of its own, so that no operator can be left out or put together
with another.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from protofleet.hw_profiles.calibration.design import Point
from protofleet.hw_profiles.calibration.graph_bytes import SmallGraph

__all__ = ["TRAINING_KINDS", "training_graph"]

_Maker = Callable[[SmallGraph, Point], None]
_LARGEST_MACS = 60e6
_LARGEST = 1 << 20  # elements


def _places(point: Point) -> int:
    """Samples times places of a picture: what networks have."""
    return point.of(8, 16, 32) * point.of(2, 3, 4, 6, 7, 8, 8, 12, 14, 16, 16, 24, 28, 32, 32) ** 2


def _product(graph: SmallGraph, point: Point) -> None:
    """A product with one side long, as of a 1 x 1 convolution's channels and places, or of taps."""
    m, k, n = point.size(8, 512), point.size(8, 1024), _places(point)
    form = point.of("plain", "plain", "transB", "transA", "batched")
    while m * k * n > _LARGEST_MACS:
        n = max(16, n // 2)
        k = max(8, k * 3 // 4)
    for _ in range(2):
        if form == "batched":
            one, other = graph.input((m, k)), graph.input((1, k, n))
            graph.output(graph.add("MatMul", one, other), (1, m, n))
            continue
        one = graph.input((k, m) if form == "transA" else (m, k))
        other = graph.input((n, k) if form == "transB" else (k, n))
        flags = {} if form == "plain" else {form: 1}
        graph.output(graph.add("Gemm", one, other, **flags), (m, n))


def _band(graph: SmallGraph, point: Point) -> None:
    """A product of few terms and a wide result: bands of a window, of each channel."""
    m, k, n = point.size(16, 256, 8), point.of(3, 9, 9, 25), point.of(64, 256, 256, 1024, 4096)
    for _ in range(2):
        graph.output(graph.add("MatMul", graph.input((m, k)), graph.weight((k, n))), (m, n))


def _gradient(graph: SmallGraph, point: Point) -> None:
    """A product over many places, of which little comes out: a weight gradient, (m, places) by (n, places)."""
    m, n, places = point.size(8, 512, 8), point.size(8, 512, 8), _places(point)
    while m * n * places > _LARGEST_MACS:
        places = max(32, places // 2)
        n = max(8, n * 3 // 4)
    for _ in range(2):
        one, other = graph.input((m, places)), graph.input((n, places))
        graph.output(graph.add("Gemm", one, other, transB=1), (m, n))


def _tall(graph: SmallGraph, point: Point) -> None:
    """A product with a constant of a few rows, of thousands of small pieces: a bilinear form, or bands."""
    rows, k, n = point.size(512, 16384, 8), point.size(8, 40), point.size(8, 40)
    turned = point.of(0, 1)
    for _ in range(3):
        if turned:  # (k, rows) by (k, n)
            graph.output(graph.add("Gemm", graph.input((k, rows)), graph.weight((k, n)), transA=1), (rows, n))
        else:
            graph.output(graph.add("Gemm", graph.input((rows, k)), graph.weight((n, k)), transB=1), (rows, n))


def _many(graph: SmallGraph, point: Point) -> None:
    """Many small products at once: of each channel's window, or of each piece of a bilinear form."""
    count, m = point.size(9, 512), point.size(4, 256)
    k, n = point.of(4, 9, 16, 32, 64, 128, 256), point.of(4, 8, 16, 32, 64, 128, 256)
    while count * m * k * n > _LARGEST_MACS or count * max(m * k, k * n, m * n) > _LARGEST:
        count = max(1, count // 2)
        if count < 16:
            m, k, n = max(4, m // 2), max(4, k // 2), max(4, n // 2)
    for _ in range(2):
        one, other = graph.input((count, m, k)), graph.input((count, k, n))
        graph.output(graph.add("MatMul", one, other), (count, m, n))


def _pieces(graph: SmallGraph, point: Point) -> None:
    """Hundreds of very small products: of each channel's window of a few numbers."""
    count, m = point.size(128, 1536, 8), point.of(4, 8, 16)
    k, n = point.of(4, 8, 16), point.of(4, 8, 16)
    for _ in range(2):
        one, other = graph.input((count, m, k)), graph.input((count, k, n))
        graph.output(graph.add("MatMul", one, other), (count, m, n))


def _vector(graph: SmallGraph, point: Point) -> None:
    """A product with a vector: a sum over each row."""
    rows, length = point.size(8, 1536, 8), _places(point)
    while rows * length > _LARGEST:
        length //= 2
    for _ in range(3):
        graph.output(graph.add("MatMul", graph.input((1, rows, length)), graph.input((length, 1))), (1, rows, 1))


def _outer(graph: SmallGraph, point: Point) -> None:
    rows, inner, length = point.size(8, 1024), point.of(1, 8, 16), point.size(1, 64)
    for _ in range(4):
        one, other = graph.input((rows, inner)), graph.input((inner, length))
        graph.output(graph.add("MatMul", one, other), (rows, length))


def _rows(point: Point) -> tuple[int, int]:
    """Channels and places of an activation, (1, C, B·H·W)."""
    channels, places = point.size(8, 1024, 8), _places(point)
    while channels * places > _LARGEST:
        channels = max(8, channels // 2)
        places //= 1 if channels > 8 else 2
    return channels, places


def _binary(graph: SmallGraph, point: Point) -> None:
    channels, places = _rows(point)
    op = point.of("Add", "Mul", "Sub", "Div")
    for _ in range(3):
        one, other = graph.input((1, channels, places)), graph.input((1, channels, places))
        graph.output(graph.add(op, one, other), (1, channels, places))


def _chain(graph: SmallGraph, point: Point) -> None:
    """Passes over one activation, each of which finds in the cache what the one before it wrote."""
    channels, places = _rows(point)
    at, other = graph.input((1, channels, places)), graph.input((1, channels, places))
    for index in range(4):
        at = graph.add(("Mul", "Add")[index % 2], at, other)
        at = graph.add("Relu" if index % 2 else "HardSigmoid", at)
    graph.output(at, (1, channels, places))


def _broadcast(graph: SmallGraph, point: Point) -> None:
    channels, places = _rows(point)
    small = point.of((1, channels, 1), (1, channels, 1), (1, 1, places), ())
    op = point.of("Mul", "Sub", "Add")
    for _ in range(3):
        graph.output(graph.add(op, graph.input((1, channels, places)), graph.input(small)), (1, channels, places))


def _update(graph: SmallGraph, point: Point) -> None:
    """A step of momentum and weight decay over the numbers of a layer."""
    numbers, rate = point.size(64, 600_000), graph.input(())
    for _ in range(2):
        weight, gradient, kept = (graph.input((numbers,)) for _ in range(3))
        kept = graph.add("Add", graph.add("Mul", kept, graph.filled((), 0.9)), gradient)
        graph.output(kept, (numbers,))
        graph.output(graph.add("Sub", weight, graph.add("Mul", rate, kept)), (numbers,))


def _unary(graph: SmallGraph, point: Point) -> None:
    shape = (1, *_rows(point))
    op = point.of("HardSigmoid", "Relu", "Clip", "Neg")
    limits = [graph.filled((), 0.0), graph.filled((), 6.0)] if op == "Clip" else []
    for _ in range(3):
        graph.output(graph.add(op, graph.input(shape), *limits), shape)


def _slow_unary(graph: SmallGraph, point: Point) -> None:
    shape = (1, *_rows(point))
    op = point.of("Sigmoid", "Sigmoid", "Exp", "Sqrt", "Reciprocal")
    for _ in range(2):
        graph.output(graph.add(op, graph.input(shape)), shape)


def _scale(graph: SmallGraph, point: Point) -> None:
    """A factor and a summand for each channel, as batch normalisation has them."""
    channels, places = _rows(point)
    for _ in range(3):
        numbers = [graph.input((channels,)) for _ in range(2)] + [graph.filled((channels,), v) for v in (0.0, 1.0)]
        at = graph.add("BatchNormalization", graph.input((1, channels, places)), *numbers, epsilon=0.0)
        graph.output(at, (1, channels, places))


def _turn(graph: SmallGraph, point: Point) -> None:
    """Copies in another order: of samples and channels, of taps, of a matrix."""
    batch, side, channels = point.of(8, 16, 32), point.size(2, 32), point.size(8, 512, 8)
    while batch * side * side * channels > _LARGEST:
        side = max(1, side // 2)
        channels = max(8, channels * 3 // 4)
    shape, order = {
        "channels": ((batch, channels, side, side), (1, 0, 2, 3)),
        "taps": ((channels, 9, batch, side * side), (0, 2, 1, 3)),
        "form": ((side, channels, 3, side, 4), (0, 2, 1, 3, 4)),
        "matrix": ((channels, side * side * batch), (1, 0)),
        "each": ((batch, channels, side * side), (0, 2, 1)),
        "pairs": ((2, channels * side * side), (1, 0)),
        "photos": ((batch, side * 2, side * 2, 3), (0, 3, 1, 2)),
    }[point.of("channels", "channels", "taps", "form", "matrix", "each", "pairs", "photos")]
    while prod(shape) > _LARGEST:
        shape = (max(1, shape[0] // 2), *shape[1:])
    after = tuple(shape[axis] for axis in order)
    for _ in range(2):
        graph.output(graph.add("Transpose", graph.input(shape), perm=list(order)), after)


def _planes(point: Point) -> tuple[int, int, int]:
    """Channels, samples, side: of an activation (C, B, H, W)."""
    channels, batch = point.size(3, 512), point.of(8, 16)
    side = point.of(2, 3, 4, 7, 8, 8, 14, 15, 16, 16, 28, 32)
    while channels * batch * side * side > _LARGEST:
        side = max(2, side // 2)
        channels = max(3, channels // 2)
    return channels, batch, side


def _pad(graph: SmallGraph, point: Point) -> None:
    channels, batch, side = _planes(point)
    top, left, bottom, right = point.of((1, 1, 1, 1), (1, 0, 1, 0), (0, 1, 0, -1), (-1, 0, -1, 0))
    side = max(4, side)
    pads = graph.ints([0, 0, top, left, 0, 0, bottom, right])
    after = (channels, batch, side + top + bottom, side + left + right)
    for _ in range(2):
        graph.output(graph.add("Pad", graph.input((channels, batch, side, side)), pads), after)


def _taps(graph: SmallGraph, point: Point) -> None:
    """A window's taps, cut and put one after another."""
    channels, batch, side = _planes(point)
    channels = max(3, channels // 4)
    kernel, stride = point.of(2, 3, 3), point.of(1, 1, 2)
    wide = (side - 1) * stride + kernel
    x, cuts = graph.input((channels, batch, wide, wide)), []
    for top in range(kernel):
        for left in range(kernel):
            last = (side - 1) * stride + 1
            ends = [graph.ints([top, left]), graph.ints([top + last, left + last])]
            cut = graph.add("Slice", x, *ends, graph.ints([2, 3]), graph.ints([stride, stride]))
            cuts.append(graph.add("Reshape", cut, graph.ints([channels, 1, batch * side * side])))
    graph.output(graph.add("Concat", *cuts, axis=1), (channels, kernel * kernel, batch * side * side))


def _parts(graph: SmallGraph, point: Point) -> None:
    """Vectors and planes put together and cut again."""
    parts, length = point.of(2, 3, 4), point.size(16, 512, 8)
    inner = point.of(1, 1, 16, 256)
    shape = (length, inner) if inner > 1 else (length,)
    for _ in range(2):
        joined = graph.add("Concat", *(graph.input(shape) for _ in range(parts)), axis=0)
        once = graph.add("HardSigmoid", joined)
        for part in graph.split("Split", once, outputs=parts, axis=0, num_outputs=parts):
            graph.output(part, shape)


def _columns(graph: SmallGraph, point: Point) -> None:
    """Split and Concat at the end of rows, in short runs."""
    rows, parts, run = point.size(64, 8192), point.of(2, 3), point.size(4, 48)
    shape = (rows, run)
    joined = graph.add("Concat", *(graph.input(shape) for _ in range(parts)), axis=1)
    for part in graph.split("Split", graph.input((rows, run * parts)), outputs=parts, axis=1, num_outputs=parts):
        graph.output(part, shape)
    graph.output(joined, (rows, run * parts))


def _expand(graph: SmallGraph, point: Point) -> None:
    channels, batch, side = _planes(point)
    shape = (channels, batch, side, side)
    for _ in range(2):
        small = graph.input((channels, batch, 1, 1))
        graph.output(graph.add("Expand", small, graph.ints(shape)), shape)


def _reduce(graph: SmallGraph, point: Point) -> None:
    channels, batch, side = _planes(point)
    op, axis = point.of("ReduceSum", "ReduceSum", "ReduceMean"), point.of(2, 2, 1, 0)
    shape = [channels, batch, side * side]
    for _ in range(2):
        at = graph.add(op, graph.input(shape), graph.ints([axis]), keepdims=0)
        graph.output(at, [size for index, size in enumerate(shape) if index != axis])


def _sum(graph: SmallGraph, point: Point) -> None:
    channels, batch, side = _planes(point)
    shape, parts = (channels, batch, side, side), point.of(2, 3, 4)
    for _ in range(2):
        graph.output(graph.add("Sum", *(graph.input(shape) for _ in range(parts))), shape)


def _pool(graph: SmallGraph, point: Point) -> None:
    channels, batch, side = _planes(point)
    kernel = point.of(2, 2, 3)
    side = max(4, side)
    after = (side + 2 * (kernel == 3) - kernel) // 2 + 1
    window = {"kernel_shape": [kernel] * 2, "strides": [2, 2], "pads": [int(kernel == 3)] * 4}
    for _ in range(2):
        at = graph.add("MaxPool", graph.input((batch, channels, side, side)), **window)
        graph.output(at, (batch, channels, after, after))


def _conv(graph: SmallGraph, point: Point) -> None:
    """A convolution whose kernel is an input, and its input gradient."""
    batch, inner, out = point.of(8, 16), point.of(3, 16, 32, 64, 96), point.size(16, 128, 8)
    kernel, stride, side = point.of(3, 3, 5), point.of(1, 2), point.size(6, 40, 2)
    while batch * inner * out * kernel**2 * side**2 > _LARGEST_MACS * 2 and side > 4:
        side = max(4, side // 2)
    pad, after = kernel // 2, (side + 2 * (kernel // 2) - kernel) // stride + 1
    window = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4}
    weight = graph.input((out, inner, kernel, kernel))
    at = graph.add("Conv", graph.input((batch, inner, side, side)), weight, **window)
    graph.output(at, (batch, out, after, after))
    if inner > 3:
        at, back = graph.input((batch, out, after, after)), (after - 1) * stride - 2 * pad + kernel
        graph.output(graph.add("ConvTranspose", at, weight, **window), (batch, inner, back, back))


def _small(graph: SmallGraph, point: Point) -> None:
    """Operators on a few numbers between passes over many: what starting one takes where caches hold something else."""
    kind, numbers = point.of("view", "vector", "view"), point.size(8, 512, 8)
    large, other = graph.input((1, 32, 4096)), graph.input((1, 32, 4096))
    for index in range(8):
        large = graph.add(("Mul", "Add")[index % 2], large, other)
        for _ in range(6):
            at = graph.input((numbers,))
            if kind == "vector":
                at = graph.add("Mul", graph.add("Sub", at, graph.input((numbers,))), graph.input(()))
            else:
                for shape in ((numbers, 1), (1, numbers)):
                    at = graph.add("Reshape", graph.add("HardSigmoid", at), graph.ints(shape))
            graph.output(graph.add("Reshape", graph.add("Relu", at), graph.ints((1, 1, numbers))), (1, 1, numbers))
    graph.output(large, (1, 32, 4096))


def _loss(graph: SmallGraph, point: Point) -> None:
    batch, classes = point.of(8, 16, 32), point.size(4, 128)
    at = graph.add("LogSoftmax", graph.input((batch, classes)), axis=1)
    graph.output(graph.add("Exp", at), (batch, classes))


def _step(graph: SmallGraph, point: Point) -> None:
    """A step of some layers: forward, back through all of them, and the update. What forward made is read late."""
    channels, batch, side, depth = point.size(16, 128, 16), point.of(8, 16), point.of(8, 12, 16, 24), point.of(4, 6, 8)
    windows = point.of(False, True) and channels <= 64
    places = batch * side * side
    while channels * places > _LARGEST // 2:
        places //= 2
        batch //= 2
    ones = graph.filled((places, 1), 1.0 / places)
    rate, epsilon, momentum = graph.input(()), graph.filled((), 1e-5), graph.filled((), 0.9)
    at, shape, kept = graph.input((channels, places)), (channels, batch, side, side), []
    for layer in range(depth):
        tapped = windows and layer % 2 == 1
        read = _taps_of(graph, at, shape) if tapped else at
        weight = graph.input((channels, channels * (9 if tapped else 1)))
        made = graph.add("MatMul", weight, read)
        centred = graph.add("Sub", made, graph.add("MatMul", made, ones))
        spread = graph.add("MatMul", graph.add("Mul", centred, centred), ones)
        scale = graph.add("Reciprocal", graph.add("Sqrt", graph.add("Add", spread, epsilon)))
        normal = graph.add("Mul", centred, scale)
        at = graph.add("Relu", normal)
        kept.append((tapped, read, weight, scale, normal))
    back = graph.add("Mul", at, graph.input((channels, places)))
    for tapped, read, weight, scale, normal in reversed(kept):
        back = graph.add("Mul", back, graph.add("HardSigmoid", normal))
        slope = graph.add("MatMul", graph.add("Mul", back, normal), ones)
        back = graph.add("Sub", back, graph.add("MatMul", back, ones))
        back = graph.add("Mul", graph.add("Sub", back, graph.add("Mul", normal, slope)), scale)
        gradient = graph.add("Gemm", back, read, transB=1)
        numbers = (channels, channels * (9 if tapped else 1))
        moved = graph.add("Add", graph.add("Mul", graph.input(numbers), momentum), gradient)
        graph.output(moved, numbers)
        graph.output(graph.add("Sub", weight, graph.add("Mul", rate, moved)), numbers)
        back = graph.add("Gemm", weight, back, transA=1)
        if tapped:
            back = _sum_of_taps(graph, back, shape)
    graph.output(back, (channels, places))


def _taps_of(graph: SmallGraph, at: str, shape: tuple[int, int, int, int]) -> str:
    """(C, places) as (9 C, places): a 3 x 3 window's taps."""
    channels, batch, side, _ = shape
    planes = graph.add("Reshape", at, graph.ints(shape))
    wide, cuts = graph.add("Pad", planes, graph.ints([0, 0, 1, 1, 0, 0, 1, 1])), []
    for tap in range(9):
        top, left = divmod(tap, 3)
        ends = (graph.ints([top, left]), graph.ints([top + side, left + side]))
        cut = graph.add("Slice", wide, *ends, graph.ints([2, 3]))
        cuts.append(graph.add("Reshape", cut, graph.ints([channels, 1, batch * side * side])))
    return graph.add("Reshape", graph.add("Concat", *cuts, axis=1), graph.ints([9 * channels, batch * side * side]))


def _sum_of_taps(graph: SmallGraph, at: str, shape: tuple[int, int, int, int]) -> str:
    """Back again: (9 C, places) as (C, places), each tap where it came from."""
    channels, batch, side, _ = shape
    taps = graph.add("Reshape", at, graph.ints([channels, 9, batch * side * side]))
    parts = []
    for tap, one in enumerate(graph.split("Split", taps, outputs=9, axis=1, num_outputs=9)):
        top, left = divmod(tap, 3)
        planes = graph.add("Reshape", one, graph.ints(shape))
        parts.append(graph.add("Pad", planes, graph.ints([0, 0, top, left, 0, 0, 2 - top, 2 - left])))
    axes, ends = graph.ints([2, 3]), (graph.ints([1, 1]), graph.ints([1 + side, 1 + side]))
    cut = graph.add("Slice", graph.add("Sum", *parts), *ends, axes)
    return graph.add("Reshape", cut, graph.ints([channels, batch * side * side]))


TRAINING_KINDS: dict[str, tuple[_Maker, int]] = {
    "product": (_product, 13), "band": (_band, 4), "gradient": (_gradient, 8), "tall": (_tall, 6), "many": (_many, 9),
    "vector": (_vector, 5), "outer": (_outer, 3), "binary": (_binary, 6), "chain": (_chain, 6),
    "broadcast": (_broadcast, 7), "update": (_update, 5), "unary": (_unary, 5), "slow unary": (_slow_unary, 4),
    "scale": (_scale, 5), "turn": (_turn, 12), "pad": (_pad, 5), "taps": (_taps, 8), "parts": (_parts, 3),
    "columns": (_columns, 4), "expand": (_expand, 4), "reduce": (_reduce, 6), "sum": (_sum, 3), "pool": (_pool, 5),
    "conv": (_conv, 7), "small": (_small, 5), "loss": (_loss, 2), "step": (_step, 12), "pieces": (_pieces, 6),
}  # fmt: skip


def training_graph(kind: str, index: int) -> SmallGraph:
    """The `index`-th graph of a kind; all that it reads is an input."""
    graph = SmallGraph(index)
    TRAINING_KINDS[kind][0](graph, Point(list(TRAINING_KINDS).index(kind), index))
    return graph

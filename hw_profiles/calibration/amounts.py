"""What a graph asks of ONNX Runtime on a CPU, in amounts that each cost so many nanoseconds on a board.

    run, launch, view       calls of a session; operators started; those that only look at bytes in another shape
    launch near, far        … of whose own things a core's cache, or one that is shared, has lost what it had a run ago
    divided                 operators that are large enough for more than one thread: they wait for each other
    code near, far          operators whose instructions were lost since the last one of their kind
    pointwise, window, …    multiply-accumulates of convolutions by kind, as the blocks of channels make them up
    edges                   … of one column of a convolution's picture: small pictures fill vectors badly
    window rows             rows of a picture that a convolution by channel or group begins
    gemm, gemm left, right, made   multiply-accumulates of products, and what they read and write
    columns                 numbers of windows that lie side by side for a product
    packed                  numbers of a constant second operand, which a runtime has laid out in blocks
    pieces, vector          products of a batch; numbers read by products with a vector
    pass, two, slow, …      elements that unary, binary, exponential and other operators work through
    runs …                  how often they begin anew (`workload.spans`)
    near, far               elements that were last touched some 1 and 24 MB ago (`workload.reuse`): in a network that
                            runs again and again, all weights of a run and little else
    reorder                 elements between convolutions, which keep channels in blocks, and what does not

In inference a runtime makes normalisation and activation part of the product before them: there they cost `fused`
elements. In training it does not. Nothing here knows a device.
"""

from __future__ import annotations

from math import ceil, log2, prod

import numpy as np
from numpy.typing import NDArray

from protofleet.hw_profiles.workload.fusion import fused_layers
from protofleet.hw_profiles.workload.model import ConvShape, Layer, Workload
from protofleet.hw_profiles.workload.reuse import Touch, constant_layers, copied_view, touches

__all__ = ["AMOUNTS", "MULTIPLY", "amounts_of", "is_step", "layer_amounts"]

AMOUNTS = (
    "run", "launch", "view", "launch near", "launch far", "divided", "code near", "code far",
    "pointwise", "window", "first", "depthwise", "grouped", "narrow groups", "edges", "window rows",
    "conv in", "conv out", "weights",
    "gemm", "gemm left", "gemm right", "gemm made", "packed", "columns", "pieces", "vector",
    "pass", "two", "slow", "gates", "fused", "norm", "pool", "reduce", "turn", "turned rows", "softmax",
    "cut", "padded", "joined", "repeated", "gathered",
    "runs two", "runs cut", "runs padded", "runs joined", "runs repeated", "runs turn", "runs turned rows",
    "runs reduce", "runs norm",
    "near", "far", "reorder",
)  # fmt: skip
MULTIPLY = ("pointwise", "window", "first", "depthwise", "grouped", "narrow groups", "gemm")  # multiply-accumulates
_INDEX = {name: index for index, name in enumerate(AMOUNTS)}
_BLOCK = 16  # channels that a vector holds, of the widest processors
_FEW_INPUTS = 8  # a first convolution reads planes as they are
_NEAR, _FAR = 1 << 20, 24 << 20  # bytes: what a core's own cache holds, and what one that is shared does
_PAIRWISE = ("Sum", "Max", "Min", "Mean")  # of many, a runtime adds one after another to what it has
_WINDOWS = ("Conv", "ConvTranspose")
_DIVIDED_MACS, _DIVIDED = 1 << 16, 1 << 14  # multiply-accumulates and elements beyond which an operator is divided
_OWN = ("node", "code")  # touches of the runtime's own
_SLOW = frozenset(("Sigmoid", "Tanh", "Exp", "Log", "Pow", "Erf", "Softplus", "Sqrt", "Reciprocal", "Div"))
_GATES = frozenset(("HardSwish", "HardSigmoid", "Elu", "Selu", "Celu", "LeakyRelu", "PRelu", "Gelu", "Mish"))
_TURNS = frozenset(("Transpose", "DepthToSpace", "SpaceToDepth"))
_MOVES = {
    "Slice": "cut", "Split": "joined", "Concat": "joined", "Pad": "padded", "Expand": "repeated", "Tile": "repeated",
}  # fmt: skip
_STAYS_BLOCKED = frozenset(
    ("Relu", "Clip", "Sigmoid", "HardSigmoid", "HardSwish", "Add", "Mul", "BatchNormalization", "Concat", "Tanh")
)


def is_step(workload: Workload) -> bool:
    """Whether it is a training step, whose layers have phases."""
    return any(layer.phase not in ("forward", "statistic") for layer in workload.layers)


def amounts_of(workload: Workload, *, training: bool, between: float = 0.0) -> NDArray[np.float64]:
    """Of one run of the whole graph: (K,) float64 in the order of `AMOUNTS`.

    Args:
        between: bytes of something else that are touched between two runs.
    """
    return np.sum(layer_amounts(workload, training=training, between=between), axis=0)


def layer_amounts(workload: Workload, *, training: bool, between: float = 0.0) -> list[NDArray[np.float64]]:
    """Of each layer, in execution order; the call is counted with the first."""
    fused = frozenset() if training else fused_layers(workload)
    rows = _training(workload) if training else _inference(workload, fused)
    for row, touched in zip(rows, touches(workload, between=between, inside=fused), strict=True):
        numbers = [touch for touch in touched if touch.kind not in _OWN]
        row[_INDEX["near"]], row[_INDEX["far"]] = _beyond(numbers, _NEAR), _beyond(numbers, _FAR)
        for name, kind in (("launch", "node"), ("code", "code")):
            own = [touch for touch in touched if touch.kind == kind]
            row[_INDEX[f"{name} near"]], row[_INDEX[f"{name} far"]] = _beyond(own, _NEAR), _beyond(own, _FAR)
    rows[0][_INDEX["run"]] = 1.0
    return rows


def _beyond(touched: list[Touch], size: int) -> float:
    """Elements that a cache of a size has lost; between 0.7 and 1.4 times the size, a part of them."""
    return sum(t.elements * min(1.0, max(0.0, log2(max(1.0, t.distance) / size) + 0.5)) for t in touched)


def _training(workload: Workload) -> list[NDArray[np.float64]]:
    fixed = constant_layers(workload)
    rows = []
    for layer in workload.layers:
        if layer.name in fixed:
            rows.append(_row({}))
        elif layer.op in _WINDOWS:
            rows.append(_row({"launch": 1.0, "divided": _divided(layer, workload)} | _window_products(layer, workload)))
        else:
            rows.append(_row(_plain(layer, workload)))
    return rows


def _inference(workload: Workload, fused: frozenset[str]) -> list[NDArray[np.float64]]:
    blocked: set[str] = set()
    rows = []
    for layer in workload.layers:
        inside = layer.name in fused
        found = {"fused": float(_written(layer, workload))} if inside else _plain(layer, workload)
        found["reorder"] = _reordered(layer, workload, blocked)
        rows.append(_row(found))
    return rows


def _row(found: dict[str, float]) -> NDArray[np.float64]:
    row = np.zeros(len(AMOUNTS))
    for name, amount in found.items():
        row[_INDEX[name]] = amount
    return row


def _reordered(layer: Layer, workload: Workload, blocked: set[str]) -> float:
    """Elements that this layer reads in the other layout; what it writes is noted in `blocked`."""
    data = [name for name in layer.reads if workload.tensors[name].role not in ("parameter", "frozen", "buffer")]
    shape = layer.conv
    if shape is not None and layer.op == "Conv":
        wants = min(shape.c_in, shape.c_out) >= _FEW_INPUTS and not _narrow(shape)
        if wants or (shape.c_in < _FEW_INPUTS and shape.c_out >= _FEW_INPUTS):
            blocked.update(layer.writes)
    else:
        pool = layer.kind == "pool"
        wants = pool or (layer.op in _STAYS_BLOCKED and bool(data) and all(name in blocked for name in data))
        if wants and all(name in blocked for name in data):
            blocked.update(layer.writes)
        if pool:
            wants = all(name in blocked for name in data)
        if layer.kind == "view":
            return 0.0
    wrong = [name for name in data if (name in blocked) is not wants and len(workload.tensors[name].shape) == 4]
    if shape is not None and shape.c_in < _FEW_INPUTS:
        wrong = []
    return float(workload.elements(wrong))


def _plain(layer: Layer, workload: Workload) -> dict[str, float]:
    """What one operator that is run by itself asks for."""
    if layer.kind == "view":
        copied = float(_written(layer, workload)) if copied_view(layer, workload) else 0.0
        return {"view": 1.0, "joined": copied}
    written, read = _written(layer, workload), workload.elements(layer.reads)
    found = {"launch": 1.0, "divided": _divided(layer, workload)}
    if layer.op == "ConvTranspose":
        return found | _window_products(layer, workload)
    if layer.conv is not None:
        return found | _conv(layer, layer.conv, workload)
    if layer.gemms:
        return found | _products(layer)
    return found | _pass(layer, workload, float(written), float(read))


def _conv(layer: Layer, shape: ConvShape, workload: Workload) -> dict[str, float]:
    window, batch = prod(shape.kernel), shape.batch
    places = batch * shape.out_height * shape.out_width
    out, weights = _blocks(shape.c_out), shape.c_out * shape.c_in // shape.groups * window
    found = {
        "conv in": float(batch * shape.c_in * shape.height * shape.width),
        "conv out": float(places * shape.c_out),
        "weights": float(weights),
    }
    columns = max(1, shape.out_width)
    if layer.kind == "depthwise":
        macs = float(places * out * window)
        rows = float(batch * out * shape.out_height)
        return found | {"depthwise": macs, "window rows": rows, "edges": macs / columns}
    if layer.kind == "grouped":
        if _narrow(shape):
            return found | {"narrow groups": float(layer.macs), "pieces": float(shape.groups * batch)}
        return found | {"grouped": float(layer.macs), "edges": layer.macs / columns}
    macs = float(places * out * (shape.c_in // shape.groups) * window)
    kind = "first" if shape.c_in < _FEW_INPUTS else "pointwise" if window == 1 else "window"
    return found | {kind: macs, "edges": macs / columns}


def _window_products(layer: Layer, workload: Workload) -> dict[str, float]:
    """A convolution whose kernel changes from run to run: for each photo and group a product, and its columns.

    The columns of all windows lie side by side before the product, or after it, when what it made is summed up.
    """
    (batch, channels, *places), (_, _, *kernel) = (workload.tensors[name].shape for name in layer.reads[:2])
    made = workload.tensors[layer.writes[0]].shape
    taps = prod(kernel)
    if layer.op == "ConvTranspose":
        m, k, n = made[1] * taps, channels, prod(places)
        right, columns = k * n, m * n
    else:
        m, k, n = made[1], channels * taps, prod(made[2:])
        right = columns = k * n
    groups = max(1, round(m * k * n * batch / max(1, layer.macs)))
    return {
        "gemm": float(batch * m * k * _blocks(n)) / groups,
        "gemm left": float(batch * m * k) / groups,
        "gemm right": float(batch * right),
        "gemm made": float(batch * m * n),
        "columns": float(batch * columns) if taps > 1 else 0.0,
        "pieces": float(batch * groups),
    }


def _narrow(shape: ConvShape) -> bool:
    """Whether its groups are no whole blocks of channels."""
    return shape.groups > 1 and shape.groups != shape.c_in and (shape.c_in // shape.groups) % _BLOCK > 0


def _blocks(channels: int) -> int:
    return ceil(channels / _BLOCK) * _BLOCK


def _products(layer: Layer) -> dict[str, float]:
    found = dict.fromkeys(("gemm", "gemm left", "gemm right", "gemm made", "packed", "pieces", "vector"), 0.0)
    for gemm in layer.gemms:
        count = gemm.count
        if layer.packed:  # a vector, too, in a block of its own
            found["gemm"] += count * gemm.m * gemm.k * _blocks(gemm.n)
            found["gemm left"] += count * gemm.m * gemm.k
            found["packed"] += count * gemm.k * _blocks(gemm.n)
            found["gemm made"] += count * gemm.m * gemm.n
        elif gemm.n == 1 or gemm.m == 1:
            found["vector"] += count * gemm.k * gemm.m * gemm.n
            found["gemm made"] += count * gemm.m * gemm.n
        else:
            found["gemm"] += count * gemm.m * gemm.k * _blocks(gemm.n)
            found["gemm left"] += count * gemm.m * gemm.k
            found["gemm right"] += count * gemm.k * gemm.n
            found["gemm made"] += count * gemm.m * gemm.n
        found["pieces"] += count if count > 1 else 0
    return found


def _pass(layer: Layer, workload: Workload, written: float, read: float) -> dict[str, float]:
    moved, span = written + read, float(layer.span or max(1, written))
    if layer.op in _PAIRWISE and len(layer.reads) > 1:
        moved = 3 * (len(layer.reads) - 1) * written
    runs = max(written, read) / span
    if layer.kind == "pool":
        return {"pool": float(layer.vector_ops) + moved}
    if layer.kind == "softmax":
        return {"softmax": moved}
    if layer.kind == "norm":
        return {"norm": moved, "runs norm": runs}
    if layer.kind == "reduce":
        return {"reduce": moved, "runs reduce": runs}
    if layer.op in _TURNS:
        if layer.span > 1:
            return {"turned rows": written, "runs turned rows": runs}
        return {"turn": written, "runs turn": written / max(1, workload.tensors[layer.writes[0]].shape[-1])}
    if layer.kind == "move":
        kind = _MOVES.get(layer.op, "gathered")
        return {kind: written} if kind == "gathered" else {kind: written, f"runs {kind}": written / span}
    if layer.op in _SLOW:
        return {"slow": written, "runs two": written / span}
    if layer.op in _GATES:
        return {"gates": written}
    if len(layer.reads) > 1:
        return {"two": moved, "runs two": written / span}
    return {"pass": moved}


def _divided(layer: Layer, workload: Workload) -> float:
    """1 for an operator that a runtime divides among its threads."""
    if layer.macs:
        return float(layer.macs > _DIVIDED_MACS)
    if layer.kind == "elementwise":
        return float(_written(layer, workload) > _DIVIDED)
    return float(layer.kind in ("pool", "reduce", "softmax") or (layer.op == "Transpose" and layer.span == 1))


def _written(layer: Layer, workload: Workload) -> int:
    return workload.elements(layer.writes)

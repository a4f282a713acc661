"""`onnx:FILE`: a network that is given as an ONNX file of features, for methods that train nothing.

    images of the file's size (N, c, H, W) or (N, H, W, c), float32  →  features (N, D) or (N, D, 1, 1)

There is no torch module, so no training step can be derived. The graph of the file stays as it is, with these changes:

- before it comes the preprocessing of every bundle;
- after it comes the unit sphere, if the method wants it;
- its float32 weights go where a backbone's weights are (`params.safetensors`);
- the batch may have any size, and the opset is Protofleet's.

Then the result is compared with the file itself, image by image. The allowed difference follows from the file alone: it
is the change that ONNX Runtime's own optimisations make in the file's result (export/verify/agreement.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, compose, helper, numpy_helper, version_converter

from protofleet.contract.bundle.onnx_runtime import ORT_ERRORS, ort
from protofleet.contract.errors import ExportError, UsageError
from protofleet.contract.heads.sphere import unit_rows
from protofleet.export.backbones.backbone_names import PREFIX
from protofleet.export.graphs.graph_builder import IR_VERSION, OPSET, external
from protofleet.export.modules.preprocess import check_statistics
from protofleet.export.verify.agreement import Agreement, distances, worst_agreement

__all__ = ["OnnxFeatures", "read_onnx", "verify_onnx"]

_NAMES = "backbone."
_LEAST = 16  # numbers in a weight; what is smaller (limits, axes) stays in the graph
Shape = tuple[int, int, int]
Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class OnnxFeatures:
    """The graph of an ONNX file in the form of a bundle's features graph.

    Attributes:
        graph: features.onnx, its weights external: x uint8 (N, H, W, c) → z float32 (N, D).
        weights: by name, float32.
        width: D.
        input_shape: (H, W, c).
        mean, std: of x / 255, per channel.
        planes: whether the file takes (N, c, H, W).
        fixed: the number of images that the file takes at once; 0 for any.
    """

    graph: bytes
    weights: Mapping[str, Float32]
    width: int
    input_shape: Shape
    mean: tuple[float, ...]
    std: tuple[float, ...]
    planes: bool
    fixed: int


def read_onnx(
    path: Path, input_shape: Shape | None, mean: tuple[float, ...], std: tuple[float, ...], *, unit: bool
) -> OnnxFeatures:
    """A features graph from a file.

    Args:
        input_shape: (H, W, c); None is what the file says.
        mean, std: of x / 255, per channel or one for all, as the network was trained with.
        unit: whether features are put on the unit sphere.

    Raises:
        UsageError: when the file leaves the size open, or has another.
        ExportError: when it is no ONNX model of features, or has operators that are not ONNX's own.
    """
    model = _loaded(path)
    images = [value for value in model.graph.input if value.name not in {t.name for t in model.graph.initializer}]
    if len(images) != 1:
        raise ExportError(f"--backbone {PREFIX}{path}", expected="one input, the images", got=f"{len(images)} inputs")
    if not model.graph.output:
        raise ExportError(f"--backbone {PREFIX}{path}", expected="an output, the features", got="none")
    extents = [d.dim_value if d.HasField("dim_value") else 0 for d in images[0].type.tensor_type.shape.dim]
    kind = images[0].type.tensor_type.elem_type
    if len(extents) != 4 or kind != TensorProto.FLOAT:
        subject = f"--backbone {PREFIX}{path}: {images[0].name}"
        got = f"{TensorProto.DataType.Name(kind)} with extents {extents}"
        raise ExportError(subject, expected="float32 images (N, c, H, W)", got=got)
    shape, planes = _size(path, extents, input_shape)
    mean, std = check_statistics(mean, std, shape[2])
    graph, weights = _wrapped(model, images[0].name, shape, planes, mean, std, unit)
    session = _session(graph, weights)
    z = _run(session, np.zeros((2, *shape), np.uint8))
    if z.ndim != 2 or len(z) != 2:
        raise ExportError(f"--backbone {PREFIX}{path}", expected="features (N, D)", got=z.shape, hint="a cut there")
    return OnnxFeatures(graph, weights, z.shape[1], shape, mean, std, planes, extents[0])


def verify_onnx(network: OnnxFeatures, path: Path, *, unit: bool, seed: int = 0) -> Agreement:
    """Run the features graph beside the file itself on one image and on five.

    Raises:
        ExportError: when they disagree.
    """
    session, rng = _session(network.graph, network.weights), np.random.default_rng(seed)
    mean, std = (np.array(values, np.float32) for values in (network.mean, network.std))
    exact, usual = (_plain_session(path, optimised) for optimised in (False, True))

    def alone(session: ort.InferenceSession, x: NDArray[np.uint8]) -> NDArray[np.floating]:
        scaled = ((x.astype(np.float32) / np.float32(255) - mean) / std).astype(np.float32)
        images = scaled.transpose(0, 3, 1, 2) if network.planes else scaled
        count = network.fixed or 1
        rows = [_run(session, np.repeat(image[None], count, axis=0)).reshape(count, -1)[0] for image in images]
        return np.asarray(unit_rows(np.stack(rows).astype(np.float64))) if unit else np.stack(rows)

    def attempt(count: int) -> list[Agreement]:
        x = rng.integers(0, 256, (count, *network.input_shape), dtype=np.uint8)
        return distances({"z": _run(session, x)}, {"z": alone(exact, x)}, {"z": alone(usual, x)}, {})

    return max((worst_agreement(lambda n=n: attempt(n), "features.onnx") for n in (1, 5)), key=lambda a: a.error)


def _loaded(path: Path) -> onnx.ModelProto:
    """The model of a file, in Protofleet's opset; checked."""
    if path.exists() and not path.is_file():  # a device may never end, and a pipe never begin
        raise ExportError(f"--backbone {PREFIX}{path}", expected="an ONNX model", got="no regular file")
    try:
        model = onnx.load(path)
        onnx.checker.check_model(model)
        model = version_converter.convert_version(model, OPSET)
    except Exception as error:  # a stranger's file may raise anything
        raise ExportError(
            f"--backbone {PREFIX}{path}", expected="an ONNX model", got=f"{type(error).__name__}: {error}"
        ) from None
    odd = sorted({node.domain for node in model.graph.node} - {"", "ai.onnx"})
    if odd or model.functions:
        raise ExportError(f"--backbone {PREFIX}{path}", expected="ONNX's own operators", got=odd or "functions")
    return model


def _size(path: Path, extents: list[int], input_shape: Shape | None) -> tuple[Shape, bool]:
    """(H, W, c), and whether channels come before height and width; an extent of 0 is one that the file leaves open."""
    planes = not (extents[3] in (1, 3) and extents[1] not in (1, 3))
    own = (extents[2], extents[3], extents[1]) if planes else (extents[1], extents[2], extents[3])
    shape = input_shape or own
    if not all(shape):
        raise UsageError("--input", expected="HxWxc, since the file leaves it open", got="none")
    if any(declared not in (0, chosen) for declared, chosen in zip(own, shape, strict=True)):
        raise UsageError("--input", expected=f"{path.name}'s own, " + "x".join(map(str, own)), got=shape)
    return shape, planes


def _wrapped(
    model: onnx.ModelProto,
    image_input: str,
    shape: Shape,
    planes: bool,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    unit: bool,
) -> tuple[bytes, dict[str, Float32]]:
    """The file's graph between preprocessing and features, and its weights."""
    inner = compose.add_prefix(model, _NAMES).graph
    initializers, weights = [], dict[str, Float32]()
    for tensor in inner.initializer:
        if tensor.data_type == TensorProto.FLOAT and int(np.prod(tensor.dims)) >= _LEAST:
            weights[tensor.name] = np.ascontiguousarray(numpy_helper.to_array(tensor))
            initializers.append(external(tensor.name, tensor.dims))
        else:
            initializers.append(tensor)
    scale = {"whole": [255.0], "mean": mean, "std": std}
    initializers += [numpy_helper.from_array(np.array(v, np.float32), f"pixel.{n}") for n, v in scale.items()]
    initializers += [numpy_helper.from_array(np.array([1e-12], np.float32), "norm.floor")] if unit else []
    initializers += [numpy_helper.from_array(np.array([1], np.int64), "norm.axes")] if unit else []
    last = "pixel.scaled" if planes else _NAMES + image_input
    before = [
        helper.make_node("Cast", ["x"], ["pixel.float"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["pixel.float", "pixel.whole"], ["pixel.share"]),
        helper.make_node("Sub", ["pixel.share", "pixel.mean"], ["pixel.centred"]),
        helper.make_node("Div", ["pixel.centred", "pixel.std"], [last]),
    ]
    if planes:
        before.append(helper.make_node("Transpose", [last], [_NAMES + image_input], perm=[0, 3, 1, 2]))
    after = [helper.make_node("Flatten", [inner.output[0].name], ["features" if unit else "z"], axis=1)]
    if unit:
        after += [
            helper.make_node("ReduceL2", ["features", "norm.axes"], ["norm.length"], keepdims=1),
            helper.make_node("Max", ["norm.length", "norm.floor"], ["norm.divisor"]),
            helper.make_node("Div", ["features", "norm.divisor"], ["z"]),
        ]
    nodes = [*before, *inner.node, *after]
    for number, node in enumerate(nodes):
        node.name, node.doc_string = f"{node.op_type}_{number}", ""
        del node.metadata_props[:]
    ends = (
        helper.make_tensor_value_info("x", TensorProto.UINT8, ["batch", *shape]),
        helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", None]),
    )
    graph = helper.make_graph(nodes, "features", ends[:1], ends[1:], initializers)
    wrapped = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    return wrapped.SerializeToString(deterministic=True), weights


def _session(graph: bytes, weights: Mapping[str, Float32]) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_external_initializers(
        list(weights), [ort.OrtValue.ortvalue_from_numpy(value) for value in weights.values()]
    )
    return _opened(graph, options)


def _plain_session(path: Path, optimised: bool) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimised else level.ORT_DISABLE_ALL
    return _opened(str(path), options)


def _opened(graph: bytes | str, options: ort.SessionOptions) -> ort.InferenceSession:
    try:
        return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except ORT_ERRORS as error:
        raise ExportError("ONNX Runtime cannot load the graph", expected="a valid graph", got=error) from None


def _run(session: ort.InferenceSession, x: NDArray) -> Float32:
    try:
        return session.run(None, {session.get_inputs()[0].name: x})[0]
    except ORT_ERRORS as error:
        hint = "exporting it with a batch of any size"
        raise ExportError("ONNX Runtime cannot run the graph", expected="any batch", got=error, hint=hint) from None

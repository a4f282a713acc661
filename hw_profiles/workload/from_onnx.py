"""A workload from a real ONNX graph: every node becomes a layer with its products, operations and bytes.

1. Set the batch where it is symbolic.
2. Infer every shape. A graph that stays dynamic is refused.
3. Separate tensors that depend on the data from those that depend only on weights.
4. Turn each node into a `Layer` (`operators.describe`), named after its module (`module_names`). A transpose that the
   product after it takes in (`constant_folding`) is only a view.
5. For a training step (inputs `x, y, …, lr, state…`, outputs `loss, <name>.next…`), divide the nodes into forward,
   input gradient, weight gradient and update (`phases`).

Weights may lie outside the file: only their shapes are read. See docs/hardware.md, and docs/bundle.md for a bundle's
graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.errors import BundleError, UsageError
from protofleet.hw_profiles.workload.constant_folding import free_transposes
from protofleet.hw_profiles.workload.model import ConvShape, Gemm, Kind, Layer, Phase, Role, Tensor, Workload
from protofleet.hw_profiles.workload.module_names import module_names
from protofleet.hw_profiles.workload.operators import Work, describe
from protofleet.hw_profiles.workload.phases import phase_of_nodes
from protofleet.hw_profiles.workload.spans import span_of

__all__ = [
    "ConvShape",
    "Gemm",
    "Kind",
    "Layer",
    "Phase",
    "Tensor",
    "Workload",
    "any_batch",
    "bundle_halves",
    "bundle_workloads",
    "read_workload",
]

_ROLES: Mapping[str, Role] = {
    "param": "parameter",
    "frozen": "frozen",
    "trunk": "frozen",
    "buffer": "buffer",
    "optimizer": "optimizer",
}
_KEEP_SHAPE = frozenset(("GroupNormalization", "MeanVarianceNormalization", "RMSNormalization", "Swish"))
_INLINE_BYTES = 1 << 16  # constants up to this size are read for their values (shapes, axes, pads)


def bundle_workloads(bundle: Bundle, *, batch: int | None = None) -> tuple[Workload, Workload | None]:
    """The inference graph at `batch` (default 1) and the training step at the bundle's own batch, where it has one.

    Raises:
        BundleError: when a graph cannot be read or keeps a dynamic shape.
    """
    roles = _roles(bundle)
    features = read_workload(bundle.features, name=bundle.manifest.backbone, batch=batch or 1, roles=roles)
    if bundle.train_step is None:
        return features, None
    step = read_workload(
        bundle.train_step, name=f"{bundle.manifest.backbone} step", roles=roles, step_inputs=bundle.manifest.step_inputs
    )
    return features, step


def bundle_halves(bundle: Bundle, *, batch: int = 1) -> tuple[Workload, Workload] | None:
    """The frozen trunk and the trained tail at `batch`; None where all of the network is trained.

    Raises:
        BundleError: as `bundle_workloads`.
    """
    if bundle.trunk is None or bundle.tail is None:
        return None
    name, roles = bundle.manifest.backbone, _roles(bundle)
    trunk = read_workload(bundle.trunk, name=f"{name} trunk", batch=batch, roles=roles)
    return trunk, read_workload(bundle.tail, name=f"{name} tail", batch=batch, roles=roles)


def _roles(bundle: Bundle) -> dict[str, Role]:
    return {tensor.name: _ROLES[tensor.role] for tensor in bundle.manifest.state}


def read_workload(
    source: bytes | ModelProto,
    *,
    name: str = "graph",
    batch: int | None = None,
    roles: Mapping[str, Role] | None = None,
    step_inputs: Sequence[str] | None = None,
) -> Workload:
    """A `Workload` from an ONNX model.

    Args:
        source: the serialized model or the proto; external data is not needed.
        batch: B, put in place of the first dimension where it is symbolic. None: every shape must be static.
        roles: of the tensors that are state, by name; every other initializer is then a constant. None: a float
            initializer of two or more elements is taken for a parameter.
        step_inputs: of a bundle's training step, the inputs that are not state; its nodes are told apart by phase. None
            for an inference graph.

    Raises:
        BundleError: not an ONNX graph, or a shape stays unknown (the tensor is named).
    """
    model = _parse(source, name)
    if batch is not None:
        _fix_batch(model, batch, name)
    shapes = _infer(model, name)
    graph = model.graph
    given = dict(roles or {})
    if step_inputs is not None:
        given |= {i.name: given.get(i.name, "parameter") for i in graph.input if i.name not in step_inputs}
    constants = _constants(model)
    known = {n: r for n, r in given.items() if n in shapes}
    if step_inputs is not None:
        known |= {o.name: "next" for o in model.graph.output if o.name.endswith(".next")}
    role_of = _role_table(known, graph, constants, guess=roles is None)
    tensors = {n: _tensor(n, *shapes[n], role_of.get(n, "activation")) for n in shapes}
    data = _data_dependent(graph.node, {i.name for i in graph.input} - set(known) - {t.name for t in graph.initializer})
    phases = phase_of_nodes(graph.node, [o.name for o in graph.output], data) if step_inputs is not None else None
    free = free_transposes(graph.node, {o.name for o in graph.output}, {n: len(t.shape) for n, t in tensors.items()})
    weights = {n for n, role in role_of.items() if role in ("parameter", "frozen", "buffer")}
    names = module_names(graph.node, weights, data)
    varies = _data_dependent(graph.node, {i.name for i in graph.input} - {t.name for t in graph.initializer})
    layers = [
        _layer(
            names[index], node, tensors, constants, data, varies, "forward" if phases is None else phases[index],
            index in free,
        )
        for index, node in enumerate(graph.node)
    ]  # fmt: skip
    size = batch or next((t.shape[0] for t in tensors.values() if t.role == "input" and t.shape), 1)
    outputs = tuple(o.name for o in graph.output)
    return Workload(name, size, tuple(layer for layer in layers if layer is not None), tensors, outputs)


def any_batch(source: bytes, name: str) -> ModelProto:
    """A graph whose batch is fixed, with a symbolic one: the first dimension of every input that is no weight.

    Raises:
        BundleError: not an ONNX graph.
    """
    model = _parse(source, name)
    weights = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.input:
        if value.name not in weights and value.type.tensor_type.shape.dim:
            value.type.tensor_type.shape.dim[0].dim_param = "batch"
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    del model.graph.value_info[:]
    return model


def _parse(source: bytes | ModelProto, name: str) -> ModelProto:
    model = ModelProto()
    if isinstance(source, ModelProto):
        model.CopyFrom(source)
        return model
    try:
        model.ParseFromString(source)
    except DecodeError as error:
        raise BundleError(f"{name} is not an ONNX graph", expected="a serialized ModelProto", got=error) from None
    if not model.graph.node:
        raise BundleError(f"{name} is not an ONNX graph", expected="a serialized ModelProto", got="no nodes")
    return model


def _fix_batch(model: ModelProto, batch: int, name: str) -> None:
    if batch < 1:
        raise UsageError("batch", expected="a positive integer", got=batch)
    graph = model.graph
    initializers = {tensor.name for tensor in graph.initializer}
    symbols = set()
    for value in graph.input:
        dims = value.type.tensor_type.shape.dim
        if value.name not in initializers and dims and not dims[0].HasField("dim_value"):
            symbols.add(dims[0].dim_param)
            dims[0].dim_value = batch
    for value in [*graph.output, *graph.value_info]:
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_param") and dim.dim_param in symbols:
                dim.dim_value = batch


def _infer(model: ModelProto, name: str) -> dict[str, tuple[tuple[int, ...], int]]:
    plain = ModelProto()
    plain.CopyFrom(model)
    known_domains = {entry.domain for entry in plain.opset_import}
    for domain in sorted({node.domain for node in plain.graph.node} - known_domains - {"ai.onnx"}):
        plain.opset_import.append(helper.make_opsetid(domain, 1))
    for node in plain.graph.node:
        if node.op_type in _KEEP_SHAPE and node.domain in ("", "ai.onnx"):  # functions, which inference leaves out
            node.op_type = "Identity"
            del node.input[1:], node.output[1:], node.attribute[:]
    try:
        inferred = onnx.shape_inference.infer_shapes(plain, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        raise BundleError(f"{name}: shapes cannot be inferred", got=error) from None
    graph = inferred.graph
    shapes = {t.name: (tuple(t.dims), t.data_type) for t in graph.initializer}
    for value in [*graph.input, *graph.value_info, *graph.output]:
        kind = value.type.tensor_type
        if kind.HasField("shape") and all(dim.HasField("dim_value") for dim in kind.shape.dim):
            shapes.setdefault(value.name, (tuple(dim.dim_value for dim in kind.shape.dim), kind.elem_type))
    for node in graph.node:
        for output in node.output:
            if output and output not in shapes and node.op_type not in ("Shape", "Size", "Constant"):
                raise BundleError(
                    f"{name}: the shape of {output} ({node.op_type}) is not known",
                    expected="static shapes but for the batch",
                    got="a size that depends on the input, or an unknown operator before it",
                    hint="exporting with a fixed input size",
                )
    return shapes


def _tensor(name: str, shape: tuple[int, ...], dtype: int, role: Role) -> Tensor:
    floating = dtype in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
    bits = helper.tensor_dtype_to_np_dtype(dtype).itemsize * 8 if dtype else 32
    return Tensor(name, shape, role, 16 if dtype == TensorProto.BFLOAT16 else bits, floating)


def _role_table(
    known: Mapping[str, Role], graph: onnx.GraphProto, constants: Mapping[str, object], *, guess: bool
) -> dict[str, Role]:
    """Roles of all named tensors but the activations; what the caller knows comes first."""
    floats = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT8, TensorProto.BFLOAT16)
    table: dict[str, Role] = {value.name: "input" for value in graph.input}
    table |= dict.fromkeys(constants, "constant")
    for tensor in graph.initializer:
        weights = guess and tensor.data_type in floats and prod(tensor.dims) > 1
        table[tensor.name] = "parameter" if weights else "constant"
    return table | dict(known)


def _constants(model: ModelProto) -> dict[str, object]:
    """Values of the small inline constants, by name: shapes, axes, pads."""
    values: dict[str, object] = {}
    for tensor in model.graph.initializer:
        inline = tensor.data_location != TensorProto.EXTERNAL and prod(tensor.dims) * 8 <= _INLINE_BYTES
        if inline:
            values[tensor.name] = numpy_helper.to_array(tensor)
    for node in model.graph.node:
        if node.op_type == "Constant":
            values[node.output[0]] = next((helper.get_attribute_value(a) for a in node.attribute), None)
    return values


def _data_dependent(nodes: Iterable[NodeProto], sources: set[str]) -> set[str]:
    """Names of the tensors that change with the input data, not only with the weights."""
    data = set(sources)
    for node in nodes:
        if node.op_type != "Shape" and any(name in data for name in node.input):
            data.update(node.output)
    return data


def _layer(
    name: str,
    node: NodeProto,
    tensors: Mapping[str, Tensor],
    constants: Mapping[str, object],
    data: set[str],
    varies: set[str],
    phase: Phase,
    free: bool,
) -> Layer | None:
    if node.op_type in ("Constant", "Shape", "Size"):
        return None
    reads = tuple(dict.fromkeys(n for n in node.input if n in tensors and tensors[n].role != "constant"))
    writes = tuple(n for n in node.output if n in tensors)
    work = Work("view") if free else describe(node, tensors, constants, data)
    return Layer(
        name=name,
        op=node.op_type,
        kind=work.kind,
        phase=phase,
        reads=reads,
        writes=writes,
        gemms=work.gemms,
        vector_ops=work.vector_ops,
        conv=work.conv,
        weights=tuple(n for n in reads if tensors[n].role in ("parameter", "frozen")),
        node=node.name,
        span=span_of(node, tensors, constants),
        packed=bool(work.gemms) and _is_packed(node, tensors, varies),
    )


def _is_packed(node: NodeProto, tensors: Mapping[str, Tensor], varies: set[str]) -> bool:
    second = node.input[1] if node.op_type in ("MatMul", "Gemm") else ""
    return second in tensors and second not in varies and len(tensors[second].shape) == 2

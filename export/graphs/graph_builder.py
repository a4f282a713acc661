"""A small builder of plain ONNX graphs: nodes in order, shared constants, one file of reproducible bytes.

Guarantees:

- The same operation on the same inputs is emitted once; the second call returns the first result. So a forward and a
  backward formula may both ask for `x − mean`, and the graph computes it once.
- Names are numbered in the order of emission. So the same trace gives the same bytes.
- Nothing of this machine (paths, stack traces, tool versions) enters the file.
- Only operators of the standard ONNX domain are used, except those of export/graphs/blocked_kernels.py and
  export/operators/kernel_nodes.py, in forms of their own.

See docs/bundle.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from protofleet.contract.bundle.graph_checks import WEIGHTS_MEMBER

__all__ = ["ANY", "IR_VERSION", "ONNX_TYPE", "OPSET", "WEIGHTS_FILE", "Graph", "external"]

OPSET = 20
IR_VERSION = 10
WEIGHTS_FILE = WEIGHTS_MEMBER
ANY = 1_000_003  # a prime that no layer has as an extent: the batch size of a trace for every batch size

ONNX_TYPE = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.int64: TensorProto.INT64,
    torch.int32: TensorProto.INT32,
    torch.uint8: TensorProto.UINT8,
    torch.bool: TensorProto.BOOL,
}


def external(name: str, shape: Sequence[int]) -> TensorProto:
    """A float32 initializer whose bytes are in `WEIGHTS_FILE`; where in it, export/graphs/placement.py says."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=list(shape))
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=WEIGHTS_FILE)
    return tensor


class Graph:
    """An ONNX graph under construction. Tensors are known by their names (str)."""

    def __init__(self, name: str, *, any_batch: bool = False, lanes: int | None = None, kernels: bool = False) -> None:
        """Start a graph.

        Args:
            any_batch: `ANY` as a leading extent stands for a batch of any size.
            lanes: rows of activations are in lanes of so many samples, for the operators of
                export/graphs/blocked_kernels.py.
            kernels: activations are in blocks of channels, for the operators of export/operators/kernel_nodes.py.
        """
        self._name = name
        self.any_batch, self.lanes, self.kernels = any_batch, lanes, kernels
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._initializers: list[TensorProto] = []
        self._results_of: dict[tuple[Any, ...], tuple[str, ...]] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._reshaped_from: dict[str, str] = {}
        self._own_names: set[str] = set()
        self._published: dict[str, str] = {}
        self._products: dict[str, tuple[str, str, tuple[int, int], dict[str, int]]] = {}
        self._told: dict[str, tuple[int, ...]] = {}
        self._repeated: dict[str, str] = {}

    def input(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> str:
        """Declare the next graph input."""
        self._inputs.append(helper.make_tensor_value_info(name, ONNX_TYPE[dtype], self._public(shape)))
        return name

    def weight(self, name: str, shape: Sequence[int]) -> str:
        """Declare a float32 initializer whose bytes are kept outside the graph, under the same name."""
        self._initializers.append(external(name, shape))
        return name

    def output(self, tensor: str, name: str, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """Declare the next graph output: `tensor`, under the public name `name`."""
        if tensor in self._own_names and tensor not in self._published:
            self._published[tensor] = name
        else:  # an input, a constant or a tensor that is published already
            self._nodes.append(helper.make_node("Identity", [tensor], [name], name=f"output_{name}"))
        self._outputs.append(helper.make_tensor_value_info(name, ONNX_TYPE[dtype], self._public(shape)))

    def constant(self, value: NDArray[Any] | float | int, dtype: Any = None) -> str:
        """A constant, stored once however often it is asked for."""
        array = np.ascontiguousarray(np.asarray(value, dtype=dtype)).reshape(np.shape(value))
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = f"const_{len(self._constants)}"
            self._initializers.append(numpy_helper.from_array(array, name))
            self._constants[key] = name
        return self._constants[key]

    def ints(self, values: Sequence[int]) -> str:
        """A 1-D int64 constant: shapes, axes, starts and ends."""
        return self.constant(np.asarray(list(values), dtype=np.int64))

    def scalar(self, value: float, dtype: torch.dtype = torch.float32) -> str:
        """A 0-D constant of that type."""
        return self.constant(helper.tensor_dtype_to_np_dtype(ONNX_TYPE[dtype]).type(value))

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Emit one node with one output and return its name."""
        return self.ops(kind, *inputs, outputs=1, **attributes)[0]

    def ops(self, kind: str, *inputs: str, outputs: int, **attributes: Any) -> tuple[str, ...]:
        """Emit one node with several outputs; an identical earlier node is reused."""
        key = (kind, inputs, outputs, repr(sorted(attributes.items())))
        if key not in self._results_of:
            number = len(self._nodes)
            names = tuple(f"{kind}_{number}" + (f"_{i}" if i else "") for i in range(outputs))
            self._nodes.append(helper.make_node(kind, list(inputs), list(names), name=names[0], **attributes))
            self._results_of[key] = names
            self._own_names.update(names)
        return self._results_of[key]

    def tell_shape(self, tensor: str, shape: Sequence[int]) -> None:
        """Write the shape of a float32 tensor into the graph: of an operator that ONNX Runtime cannot infer it for.

        Only a tensor of a known size is written where another lies that nobody asks for any more.
        """
        self._told[tensor] = tuple(shape)

    def product(self, left: str, right: str, shape: tuple[int, int], *, transA: int = 0, transB: int = 0) -> str:
        """The product of two matrices, of this shape, to which `plus` may add something."""
        transposed = {key: 1 for key, value in (("transA", transA), ("transB", transB)) if value}
        name = self.op("Gemm", left, right, **transposed)
        self._products[name] = (left, right, shape, transposed)
        return name

    def plus(self, product: str, tensor: str, factor: float, shape: Sequence[int]) -> str | None:
        """product + factor · tensor, both of `shape`, by the product itself; None where `product` is not one.

        ONNX Runtime starts the product from factor · tensor: a copy in place of a product and a sum.
        """
        recorded = self._products.get(self._reshaped_from.get(product, product))
        if recorded is None:
            return None
        left, right, flat, transposed = recorded
        total = self.op("Gemm", left, right, self.reshape(tensor, flat), beta=factor, **transposed)
        return self.reshape(total, shape)

    def reshape(self, tensor: str, shape: Sequence[int]) -> str:
        """`tensor` with another shape; a chain of reshapes becomes one."""
        source = self._reshaped_from.get(tensor, tensor)
        if self.any_batch:
            shape = [-1 if self._is_batch(n) else n for n in shape]
        name = self.op("Reshape", source, self.ints(shape))
        self._reshaped_from[name] = source
        return name

    def expand(self, tensor: str, shape: Sequence[int]) -> str:
        """`tensor` broadcast to a shape; a batch of any size must be the tensor's own already."""
        return self.op("Expand", tensor, self.ints([1 if self._is_batch(n) else n for n in shape]))

    def spread(self, tensor: str, shape: Sequence[int]) -> str:
        """`tensor` broadcast to a shape whose batch, of any size, is not its own: that of the graph's first input."""
        if not any(self._is_batch(n) for n in shape):
            return self.expand(tensor, shape)
        batch = self.op("Shape", self._inputs[0].name, start=0, end=1)
        extents = [self.op("Mul", batch, self.ints([n // ANY])) if self._is_batch(n) else self.ints([n]) for n in shape]
        return self.op("Expand", tensor, self.op("Concat", *extents, axis=0))

    def repeats(self, tensor: str, matrix: str) -> None:
        """Note that `tensor` is `matrix` again and again, for every row of its leading axes."""
        self._repeated[tensor] = matrix

    def right_side(self, tensor: str) -> str:
        """What a product takes as its right side in place of `tensor`: one matrix where that only repeats it.

        ONNX Runtime would keep every copy: 17 GB of weights for attention over 197 tokens in a ViT-B.
        """
        return self._repeated.get(tensor, tensor)

    def transpose(self, tensor: str, perm: Sequence[int]) -> str:
        """`tensor` with its axes permuted."""
        if list(perm) == sorted(perm):
            return tensor
        return self.op("Transpose", tensor, perm=list(perm))

    def cast(self, tensor: str, dtype: torch.dtype) -> str:
        """`tensor` as another type."""
        return self.op("Cast", tensor, to=int(ONNX_TYPE[dtype]))

    def slice(
        self,
        tensor: str,
        axes: Sequence[int],
        starts: Sequence[int],
        ends: Sequence[int],
        steps: Sequence[int] | None = None,
    ) -> str:
        """`tensor[..., start:end:step, ...]` on the named axes."""
        last = [self.ints(steps)] if steps is not None and set(steps) != {1} else []
        return self.op("Slice", tensor, self.ints(starts), self.ints(ends), self.ints(axes), *last)

    def to_bytes(self) -> bytes:
        """The finished model, checked and pruned of what no output needs."""
        for node in self._nodes:
            for names in (node.input, node.output):
                for i, name in enumerate(names):
                    names[i] = self._published.get(name, name)
        self._published = {}
        needed = {value.name for value in self._outputs}
        kept_nodes: list[onnx.NodeProto] = []
        for node in reversed(self._nodes):
            if needed.intersection(node.output):
                needed.update(node.input)
                kept_nodes.append(node)
        constants = [tensor for tensor in self._initializers if tensor.name in needed]
        inner = {name for node in kept_nodes for name in node.output} - {value.name for value in self._outputs}
        told = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, self._public(shape))
            for name, shape in self._told.items()
            if name in inner
        ]
        ends = self._inputs, self._outputs
        graph = helper.make_graph(kept_nodes[::-1], self._name, *ends, constants, value_info=told)
        domains = {node.domain for node in kept_nodes if node.domain}
        opsets = [helper.make_opsetid("", OPSET), *(helper.make_opsetid(domain, 1) for domain in sorted(domains))]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
        model.producer_name = "protofleet"
        if not domains and not any(
            t.data_location == TensorProto.EXTERNAL for t in constants
        ):  # the checker wants to open the weights
            onnx.checker.check_model(model)
        return model.SerializeToString(deterministic=True)

    def _is_batch(self, extent: int) -> bool:
        return self.any_batch and extent > 0 and extent % ANY == 0

    def _public(self, shape: Sequence[int]) -> list[int | str]:
        return ["batch" if self.any_batch and n == ANY else n for n in shape]

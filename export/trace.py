"""Recording a torch function as a functional graph of `aten` operators that have a translation.

Two passes. The first runs the function on fake tensors, which have shapes but no numbers, and records what it does,
in-place writes included. The second replays that with every write turned into a value, and with operators that have
no translation of their own replaced by torch's decompositions. Batch normalisation is never decomposed: training
statistics outside a BatchNorm module would let padding in, so the translation refuses them by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from contract.errors import ExportError
from export.constants import fold_constants
from export.graph import Graph
from export.torch_cache import load_dynamo
from export.translate import NOTHING_TRAINED, TABLE, translate

__all__ = ["record", "to_onnx"]

for _room in ("elementwise", "shape", "reduce", "conv", "pool", "norm"):  # each fills the table when it is imported
    importlib.import_module(f"export.translate_{_room}")

_NEVER_DECOMPOSED = ("aten::native_batch_norm", "aten::_native_batch_norm_legit", "aten::cudnn_batch_norm")


def record(function: Callable[..., Any], example: Sequence[Tensor], *, decomposed: bool = True) -> fx.GraphModule:
    """Trace `function` on tensors shaped like `example` (their numbers do not matter).

    Args:
        decomposed: whether operators without a translation are replaced; not in what is to be recorded again.

    Raises:
        ExportError: when the function writes into tensors that outlive it, or cannot run on such shapes.
    """
    load_dynamo()
    rules = {op: rule for op, rule in _decompositions().items() if op not in TABLE} if decomposed else {}
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, _plain_attention():
            shapes = [fake.from_tensor(tensor) for tensor in example]
            recorded = make_fx(lambda *inputs: function(*inputs))(*shapes)
            trace = make_fx(functionalize(recorded), decomposition_table=rules)(*shapes)
    except ExportError:
        raise
    except Exception as error:  # a stranger's code may raise anything
        raise ExportError(
            "the backbone cannot be recorded",
            expected="a function of images whose way does not depend on their pixels",
            got=f"{type(error).__name__}: {error}",
            hint=NOTHING_TRAINED,
        ) from None
    for node in trace.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            raise ExportError(
                "the backbone writes to a buffer", expected="a pure function of images and weights", got=schema.name
            )
    fold_constants(trace)
    trace.graph.eliminate_dead_code()
    return trace


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Torch's own, less batch normalisation's; torch takes a quarter of a second to draw them up."""
    found = core_aten_decompositions().items()
    return {op: rule for op, rule in found if not op.name().startswith(_NEVER_DECOMPOSED)}


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Attention as the products and the softmax that it is: torch's fused kernels have no ONNX operator, nor gradients
    that any decomposition knows."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def to_onnx(trace: fx.GraphModule, graph: Graph, inputs: Sequence[str], outputs: Sequence[str]) -> bytes:
    """Translate a recorded function whose inputs the graph has already declared under these names.

    Raises:
        ExportError: for an operator without translation.
    """
    translate(trace, graph, {name: name for name in inputs}, outputs)
    return graph.to_bytes()

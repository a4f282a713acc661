"""Recording a torch function as a functional graph of `aten` operators that have a translation.

1. The first pass runs the function on fake tensors, which have shapes but no numbers. It records what the function
   does, in-place writes included.
2. The second pass replays that. Every write becomes a value, and torch's decompositions replace operators that have no
   translation of their own.

Batch normalisation is never decomposed. Training statistics outside a BatchNorm module would count padding, so the
translation refuses them by name.
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

from protofleet.contract.errors import ExportError, ProtofleetError
from protofleet.export.graphs.graph_builder import Graph
from protofleet.export.modules.torch_cache import load_dynamo
from protofleet.export.operators.constants import fold_constants
from protofleet.export.operators.translation import NOTHING_TRAINED, TABLE, translate

__all__ = ["record", "to_onnx"]

for _room in ("elementwise", "shape", "reduce", "conv", "pool", "norm"):  # each fills the table when it is imported
    importlib.import_module(f"protofleet.export.operators.{_room}")

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
            recorded.graph.eliminate_dead_code()
            recorded.recompile()
            trace = make_fx(functionalize(recorded), decomposition_table=rules)(*shapes)
    except ProtofleetError:
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
    rules = core_aten_decompositions().items()
    return {op: rule for op, rule in rules if not op.name().startswith(_NEVER_DECOMPOSED)}


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Within the block, torch computes attention as plain products and a softmax.

    Its fused kernels have no ONNX operator, and no decomposition has their gradients.
    """
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

"""What the tests of a training step's cost share: what rides on the products of its own graph."""

from __future__ import annotations

from protofleet.hw_profiles.workload.model import Workload


def riding(step: Workload) -> set[str]:
    """Layers that read or write a parameter or its optimizer's state where a weight's gradient is made.

    A weight's decay or momentum is added by the product itself, in Gemm's C (docs/decisions/200).
    """
    state = {name for name, tensor in step.tensors.items() if tensor.role in ("parameter", "optimizer")}
    state |= {f"{name}.next" for name in state}
    found = [layer for layer in step.phase("weight_gradient").layers if state & {*layer.reads, *layer.writes}]
    assert {layer.op for layer in found} <= {"Gemm", "Reshape"}
    return {layer.name for layer in found}


def update_operations(step: Workload) -> int:
    """Those of the update, with what rides on products: for each number of such a tensor a product and a sum."""
    names = riding(step)
    ridden = {n for layer in step.layers if layer.name in names for n in layer.reads if n in step.tensors}
    sizes = [step.tensors[n].elements for n in ridden if step.tensors[n].role in ("parameter", "optimizer")]
    return sum(layer.vector_ops for layer in step.phase("update").layers) + 2 * sum(sizes)

"""Gradient accumulation: the training step in two graphs, so that a batch can be trained in parts that fit the memory.

    gradients.onnx   x, y, …, of b samples, state but the optimizer's  →  loss, gradient.<param>…, <buffer>.next…
    update.onnx      lr, gradient.<param>…, param…, optimizer…         →  <param>.next…, <optimizer>.next…

1. gradients.onnx is the forward and backward pass of the step (export/steps/step.py), for b samples in place of B.
2. The device adds up the gradients of the parts, each times its share of the samples. If the objective is a mean over
   samples, the sum is the gradient of the whole batch. A method says whether it is (`Method.mean_over_samples`).
3. update.onnx is the update of the step (export/steps/optimizers.py).

Batch normalisation takes the statistics of each part, and moves its running statistics once for each part.

Both graphs together are compared with torch, as one step of b samples (`TwoGraphs`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from protofleet.contract.bundle.onnx_runtime import ORT_ERRORS, ort
from protofleet.contract.errors import ExportError
from protofleet.export.graphs.graph_builder import Graph
from protofleet.export.operators.trace import record, to_onnx
from protofleet.export.steps.optimizers import update
from protofleet.export.steps.step import Preprocess, StepPlan, TrainingStep, example_inputs

__all__ = ["TwoGraphs", "export_micro"]


class GradientStep(TrainingStep):
    """Loss, gradients and running statistics; takes the plan's inputs, then its state but the optimizer's."""

    moved: tuple[str, ...] = ()

    def names(self) -> tuple[str, ...]:
        """What `forward` takes, in order."""
        return tuple(name for name in super().names() if name not in self._plan.names("optimizer"))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Loss, the gradient of each tensor that has one, and the running statistics."""
        tensors, loss, grads = self.gradients(inputs)
        self.moved = tuple(grads)
        new = {**tensors, **self._context.new_running()}
        return (loss.detach(), *grads.values(), *(new[name] for name in self._plan.names("buffer")))


class UpdateStep(nn.Module):
    """The optimizer's step on gradients that were added up."""

    def __init__(self, plan: StepPlan, moved: Sequence[str]) -> None:
        super().__init__()
        self._plan, self._moved = plan, moved

    def names(self) -> tuple[str, ...]:
        """What `forward` takes, in order."""
        return ("lr", *(f"gradient.{name}" for name in self._moved), *self._plan.names("param", "optimizer"))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The parameters and the optimizer's state after it."""
        plan, tensors = self._plan, dict(zip(self.names(), inputs, strict=True))
        grads = {name: tensors[f"gradient.{name}"] for name in self._moved}
        new = {**tensors, **update(tensors, grads, torch.ones_like(tensors["lr"]), plan.method, plan.hyper)}
        return tuple(new[name] for name in plan.names("param", "optimizer"))


def export_micro(
    net: nn.Module, preprocess: Preprocess, plan: StepPlan, samples: int, input_shape: tuple[int, int, int]
) -> tuple[bytes, bytes]:
    """The bytes of gradients.onnx, for parts of `samples`, and of update.onnx.

    Raises:
        ExportError: for an operator without translation.
    """
    step, shapes = GradientStep(net, preprocess, plan, samples), {t.name: t.shape for t in plan.state}
    example = example_inputs(plan, samples, input_shape) | {n: torch.zeros(s) for n, s in shapes.items()}
    outputs = lambda: ["loss", *(f"gradient.{n}" for n in step.moved), *(f"{n}.next" for n in plan.names("buffer"))]  # noqa: E731
    gradients = _graph("gradients", step, step.names(), example, outputs)
    last = UpdateStep(plan, step.moved)
    example |= {f"gradient.{name}": torch.zeros(shapes[name]) for name in step.moved}
    moved = [f"{name}.next" for name in plan.names("param", "optimizer")]
    return gradients, _graph("update", last, last.names(), example, lambda: moved)


def _graph(name: str, step: nn.Module, inputs: Sequence[str], example: Mapping[str, Tensor], outputs: Any) -> bytes:
    graph = Graph(name)
    for input_name in inputs:
        graph.input(input_name, example[input_name].dtype, example[input_name].shape)
    trace = record(step, [example[input_name] for input_name in inputs])
    return to_onnx(trace, graph, list(inputs), outputs())


class TwoGraphs:
    """Both graphs one after the other, run as a session of one training step is."""

    def __init__(self, gradients: bytes, update: bytes) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.enable_mem_pattern = options.enable_cpu_mem_arena = False
        try:
            self._sessions = [
                ort.InferenceSession(part, options, providers=["CPUExecutionProvider"]) for part in (gradients, update)
            ]
        except ORT_ERRORS as error:
            raise ExportError("ONNX Runtime cannot load the graph", expected="a valid graph", got=error) from None

    def run(self, outputs: Sequence[str], feed: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """The named outputs of a step."""
        tensors = dict(feed)
        for session in self._sessions:
            inputs = {value.name: tensors[value.name] for value in session.get_inputs()}
            names = [value.name for value in session.get_outputs()]
            tensors |= dict(zip(names, session.run(names, inputs), strict=True))
        return [tensors[name] for name in outputs]

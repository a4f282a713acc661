"""The graphs and weights of a bundle, recorded and verified: from a torch module, or from an ONNX file of features.

- A torch module gives `features.onnx`. It gives `train_step.onnx` if the method trains, and also `trunk.onnx` and
  `tail.onnx` if only its tail is trained. All of them run in stock ONNX Runtime and are compared with plain torch.
- An ONNX file gives features only, for methods that train nothing. Its graph is compared with the file itself
  (export/bundles/onnx_features.py).

A disagreement ends the export.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx, nn

from protofleet.contract.bundle.bundle_file import Activation, StateTensor, pack_params
from protofleet.contract.bundle.native_kernels import FORM, runnable_forms, uses_kernels
from protofleet.contract.errors import UsageError
from protofleet.contract.heads.sphere import orthonormal_frame
from protofleet.contract.methods import Method
from protofleet.export.backbones.backbone import Backbone, Norm
from protofleet.export.backbones.backbone_names import PREFIX
from protofleet.export.backbones.weights import file_sha256
from protofleet.export.bundles.features import export_features, export_halves
from protofleet.export.bundles.onnx_features import read_onnx, verify_onnx
from protofleet.export.graphs.blocked_kernels import LANES, block_here, uses_lanes
from protofleet.export.graphs.graph_builder import Graph
from protofleet.export.graphs.placement import place_weights, weight_names
from protofleet.export.modules.random_layers import chance_of
from protofleet.export.operators.trace import to_onnx
from protofleet.export.steps.micro import TwoGraphs, export_micro
from protofleet.export.steps.step import Preprocess, StepPlan, TrainingStep, example_inputs, trace_step
from protofleet.export.verify.agreement import Agreement
from protofleet.export.verify.verify import verify_features, verify_step

__all__ = [
    "Clock",
    "Graphs",
    "Progress",
    "export_forms",
    "export_step",
    "graphs_from_onnx",
    "graphs_from_torch",
    "initial_state",
]

Progress = Callable[[str], None]
State = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Graphs:
    """The verified graphs and weights of a bundle, and their facts, named as in `Manifest` and `Backbone`."""

    width: int
    input_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    state: tuple[StateTensor, ...]
    features: bytes
    step: bytes | None
    stored: State
    agreement: Agreement
    origin: str
    facts: str
    ignored: tuple[str, ...] = ()
    switched_off: tuple[str, ...] = ()
    cut: tuple[Activation, ...] = ()
    trunk: bytes | None = None
    tail: bytes | None = None
    forms: Mapping[str, bytes] = field(default_factory=dict)
    micro: tuple[bytes, bytes] | None = None


def graphs_from_torch(
    clock: Clock,
    backbone: Backbone,
    preprocess: Preprocess,
    plan: StepPlan,
    head: str,
    batch: int,
    seed: int,
    for_x86: bool = False,
    micro: int = 0,
    for_kernels: bool = False,
) -> Graphs:
    """Steps 3 and 4 of `build.py` for a torch module.

    Args:
        micro: samples of a part of a batch, for gradients.onnx and update.onnx; 0 for no such graphs.
    """
    net, shape, entry = backbone.net, backbone.input_shape, plan.method
    with clock.stage("features", "exporting features.onnx"):
        features = export_features(net, preprocess, plan.state, shape, unit=entry.unit_features)
        plan = plan.reading(weight_names(features))
        state = initial_state(net, plan, seed)
        stored = {name: state[name] for name in plan.names("param", "buffer", "frozen", "trunk")}
        halves = None if plan.cut is None else export_halves(plan.cut, unit=entry.unit_features)
    step = None
    if entry.trains:
        with clock.stage("train_step", f"exporting train_step.onnx ({entry.objective}, {head} head, batch {batch})"):
            step = export_step(net, preprocess, plan, batch, shape)
    forms: dict[str, bytes] = {}
    if entry.trains and (for_x86 or for_kernels):
        forms = export_forms(net, preprocess, plan, batch, shape, lanes=for_x86, kernels=for_kernels)
    parts = None
    if entry.trains and micro:
        with clock.stage("micro_batch", f"exporting gradients.onnx and update.onnx (micro-batch {micro})"):
            parts = export_micro(net, preprocess, plan, micro, shape)
    with clock.stage("verify", "running both in ONNX Runtime against torch"):
        packed = pack_params(stored)
        placed = [place_weights(graph, packed) for graph in (features, *(halves or ()))]
        agreement = verify_features(placed[0], net, preprocess, state, input_shape=shape, unit=entry.unit_features)
        if step is not None:
            trunk = placed[1] if halves else None
            lanes_here = forms.get(f"lanes{block_here()}") if for_x86 else None  # of the others, each device finds out
            for form in (step, lanes_here, runnable_forms(forms).get(FORM)):
                if form is not None:
                    worst = verify_step(form, net, preprocess, plan, state, batch=batch, input_shape=shape, trunk=trunk)
                    agreement = max(agreement, worst, key=lambda a: a.error)
        if parts is not None:
            trunk, both = placed[1] if halves else None, TwoGraphs(*parts)
            worst = verify_step(both, net, preprocess, plan, state, batch=micro, input_shape=shape, trunk=trunk)
            agreement = max(agreement, worst, key=lambda a: a.error)
        if halves:
            worst = verify_features(placed[1:], net, preprocess, state, input_shape=shape, unit=entry.unit_features)
            agreement = max(agreement, worst, key=lambda a: a.error)
    return Graphs(
        width=backbone.width,
        input_shape=shape,
        mean=_numbers(preprocess.mean),
        std=_numbers(preprocess.std),
        state=plan.state,
        features=features,
        step=step,
        stored=stored,
        agreement=agreement,
        origin=backbone.origin,
        facts=backbone.facts,
        ignored=backbone.ignored,
        switched_off=chance_of(net) if entry.trains else (),
        cut=plan.cut.activations if plan.cut is not None else (),
        trunk=halves[0] if halves else None,
        tail=halves[1] if halves else None,
        forms=forms,
        micro=parts,
    )


def graphs_from_onnx(
    clock: Clock,
    backbone: str,
    entry: Method,
    shape: tuple[int, int, int] | None,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    weights: str | Path | None,
    norm: Norm | None,
) -> Graphs:
    """Steps 1, 3 and 4 of `build.py` for an ONNX file of features. No training step can be derived from it."""
    if entry.trains:
        expected = "one that trains nothing with onnx:FILE"
        raise UsageError(f"--method {entry.name}", expected=expected, got=backbone, hint="--method ffc")
    if weights is not None or norm is not None:
        got = "--weights or --norm"
        raise UsageError(f"--backbone {backbone}", expected="the file's own weights and norms", got=got)
    if mean is None or std is None:
        raise UsageError(
            "--mean and --std", expected="those of x / 255 that the file's network was trained with", got="none"
        )
    path, unit = Path(backbone.removeprefix(PREFIX)), entry.unit_features
    with clock.stage("features", f"reading {path}"):
        network = read_onnx(path, shape, tuple(mean), tuple(std), unit=unit)
    with clock.stage("verify", "running it in ONNX Runtime beside the file"):
        agreement = verify_onnx(network, path, unit=unit)
    return Graphs(
        width=network.width,
        input_shape=network.input_shape,
        mean=network.mean,
        std=network.std,
        state=tuple(StateTensor(name, value.shape, "param") for name, value in network.weights.items()),
        features=network.graph,
        step=None,
        stored=dict(network.weights),
        agreement=agreement,
        origin=f"loaded from {path.name}",
        facts=f"sha256 {file_sha256(path)}",
    )


def export_step(
    net: nn.Module,
    preprocess: Preprocess,
    plan: StepPlan,
    batch: int,
    input_shape: tuple[int, int, int],
    lanes: int | None = None,
    kernels: bool = False,
) -> bytes:
    """The bytes of train_step.onnx. Inputs: the plan's inputs, then its state. Outputs: loss, then `<name>.next`.

    Args:
        lanes: for the form of export/graphs/blocked_kernels.py with this block size; `batch` is a multiple of it.
        kernels: for the form of export/operators/kernel_nodes.py.

    Raises:
        ExportError: for an operator without translation.
    """
    return _emitted(_recorded(net, preprocess, plan, batch, input_shape), plan, lanes, kernels)


def export_forms(
    net: nn.Module,
    preprocess: Preprocess,
    plan: StepPlan,
    batch: int,
    input_shape: tuple[int, int, int],
    *,
    lanes: bool = True,
    kernels: bool = False,
) -> dict[str, bytes]:
    """The further forms of the step, by name.

    Args:
        lanes: those of export/graphs/blocked_kernels.py. There are none if no block fits the batch, or nothing is
            depthwise.
        kernels: that of export/operators/kernel_nodes.py; there is none if nothing is a convolution.
    """
    recorded = _recorded(net, preprocess, plan, batch, input_shape)
    blocks = [n for n in LANES if lanes and batch % n == 0]
    forms = {f"lanes{n}": graph for n in blocks if uses_lanes(graph := _emitted(recorded, plan, n))}
    if kernels and uses_kernels(graph := _emitted(recorded, plan, None, kernels=True)):
        forms[FORM] = graph
    return forms


@dataclass(frozen=True)
class _Recorded:
    """A step's trace, and its inputs as the graph declares them: name, type, shape."""

    trace: fx.GraphModule
    inputs: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


def _recorded(
    net: nn.Module, preprocess: Preprocess, plan: StepPlan, batch: int, input_shape: tuple[int, int, int]
) -> _Recorded:
    kinds = example_inputs(plan, batch, input_shape)
    example = (*(kinds[name] for name in plan.inputs), *(torch.empty(t.shape) for t in plan.step_state))
    names = [*plan.inputs, *(t.name for t in plan.step_state)]
    trace = trace_step(TrainingStep(net, preprocess, plan, batch), example)
    inputs = tuple((name, t.dtype, tuple(t.shape)) for name, t in zip(names, example, strict=True))
    return _Recorded(trace, inputs)


def _emitted(recorded: _Recorded, plan: StepPlan, lanes: int | None, kernels: bool = False) -> bytes:
    graph = Graph("train_step", lanes=lanes, kernels=kernels)
    names = [graph.input(*declared) for declared in recorded.inputs]
    return to_onnx(recorded.trace, graph, names, ["loss", *(f"{name}.next" for name in plan.updated)])


def initial_state(net: nn.Module, plan: StepPlan, seed: int) -> State:
    """Float32 values of every state tensor before the first step.

    The local head is initialised as nn.Linear is. The frozen head is the orthonormal frame of `seed`. The method says
    how its own tensors start (`Method.state`).
    """
    own = {f"backbone.{name}": t.detach().numpy() for name, t in net.state_dict().items()}
    if "head.bias" in plan.names("param"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            linear = nn.Linear(plan.features, plan.classes)
        own["head.weight"], own["head.bias"] = linear.weight.detach().numpy(), linear.bias.detach().numpy()
    elif "head.weight" in plan.names("frozen"):
        own["head.weight"] = orthonormal_frame(plan.classes, plan.features, seed)
    own |= {name: start.values() for name, start in plan.method.state(plan.classes, plan.features, seed).items()}
    return {t.name: np.array(own.get(t.name, np.zeros(t.shape)), dtype=np.float32) for t in plan.state}


class Clock:
    """Announces each stage and keeps how long it took."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.seconds: dict[str, float] = {}
        self._name, self._start = "", 0.0

    def stage(self, name: str, line: str) -> Clock:
        self._progress(line)
        self._name, self._start = name, time.perf_counter()
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self.seconds[self._name] = time.perf_counter() - self._start


def _numbers(tensor: torch.Tensor) -> tuple[float, ...]:
    """Float32 values as the shortest decimals that give the same float32."""
    return tuple(float(str(value)) for value in tensor.numpy())

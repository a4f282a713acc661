"""The graphs and weights of a bundle, recorded and verified: from a torch module, or from a features graph in a file.

A torch module gives `features.onnx`, and `train_step.onnx` where the method trains; where only its tail is trained,
`trunk.onnx` and `tail.onnx` too. All run in stock ONNX Runtime against plain torch. A file gives features only, for
methods that train nothing, and runs beside itself (export/onnx_features.py). What disagrees ends the export.
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

from contract.bundle import Activation, StateTensor, pack_params
from contract.errors import UsageError
from contract.methods import Method
from contract.sphere import orthonormal_frame
from export.agreement import Agreement
from export.backbone_names import PREFIX
from export.backbones import Backbone, Norm
from export.chance import chance_of
from export.features import export_features, export_halves
from export.graph import Graph
from export.lanes import LANES, block_here, uses_lanes
from export.micro import TwoGraphs, export_micro
from export.onnx_features import read_onnx, verify_onnx
from export.placement import place_weights, weight_names
from export.step import Preprocess, StepPlan, TrainingStep, example_inputs, trace_step
from export.trace import to_onnx
from export.verify import verify_features, verify_step
from export.weights import file_sha256

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
    """The graphs and weights of a bundle, verified, and what is known of them; as in `Manifest` and `Backbone`."""

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
    found: Backbone,
    preprocess: Preprocess,
    plan: StepPlan,
    head: str,
    batch: int,
    seed: int,
    for_x86: bool = False,
    micro: int = 0,
) -> Graphs:
    """Steps 3 and 4 for a torch module; `micro` is the samples of a part of a batch, 0 for no such graphs."""
    net, shape, entry = found.net, found.input_shape, plan.method
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
    forms = export_forms(net, preprocess, plan, batch, shape) if entry.trains and for_x86 else {}
    parts = None
    if entry.trains and micro:
        with clock.stage("micro_batch", f"exporting gradients.onnx and update.onnx (micro-batch {micro})"):
            parts = export_micro(net, preprocess, plan, micro, shape)
    with clock.stage("verify", "running both in ONNX Runtime against torch"):
        packed = pack_params(stored)
        placed = [place_weights(each, packed) for each in (features, *(halves or ()))]
        agreement = verify_features(placed[0], net, preprocess, state, input_shape=shape, unit=entry.unit_features)
        if step is not None:
            trunk = placed[1] if halves else None
            here = forms.get(f"lanes{block_here()}") if forms else None  # of the others, each device finds out
            for each in (step, here):
                if each is not None:
                    worst = verify_step(each, net, preprocess, plan, state, batch=batch, input_shape=shape, trunk=trunk)
                    agreement = max(agreement, worst, key=lambda a: a.error)
        if parts is not None:
            trunk, both = placed[1] if halves else None, TwoGraphs(*parts)
            worst = verify_step(both, net, preprocess, plan, state, batch=micro, input_shape=shape, trunk=trunk)
            agreement = max(agreement, worst, key=lambda a: a.error)
        if halves:
            worst = verify_features(placed[1:], net, preprocess, state, input_shape=shape, unit=entry.unit_features)
            agreement = max(agreement, worst, key=lambda a: a.error)
    return Graphs(
        width=found.width,
        input_shape=shape,
        mean=_numbers(preprocess.mean),
        std=_numbers(preprocess.std),
        state=plan.state,
        features=features,
        step=step,
        stored=stored,
        agreement=agreement,
        origin=found.origin,
        facts=found.facts,
        ignored=found.ignored,
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
    """Steps 1, 3 and 4 for a features graph that is given as an ONNX file: there is nothing to derive a step from."""
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
        found = read_onnx(path, shape, tuple(mean), tuple(std), unit=unit)
    with clock.stage("verify", "running it in ONNX Runtime beside the file"):
        agreement = verify_onnx(found, path, unit=unit)
    return Graphs(
        width=found.width,
        input_shape=found.input_shape,
        mean=found.mean,
        std=found.std,
        state=tuple(StateTensor(name, value.shape, "param") for name, value in found.weights.items()),
        features=found.graph,
        step=None,
        stored=dict(found.weights),
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
) -> bytes:
    """The bytes of train_step.onnx: the plan's inputs and then its state; outputs loss and then `<name>.next`.

    Args:
        lanes: for the form of export/lanes.py with this block size; `batch` is a multiple of it.

    Raises:
        ExportError: for an operator without translation.
    """
    return _emitted(_recorded(net, preprocess, plan, batch, input_shape), plan, lanes)


def export_forms(
    net: nn.Module, preprocess: Preprocess, plan: StepPlan, batch: int, input_shape: tuple[int, int, int]
) -> dict[str, bytes]:
    """The further forms of the step, by name; none where the batch fits no block, or nothing is depthwise."""
    recorded = _recorded(net, preprocess, plan, batch, input_shape)
    forms = {f"lanes{n}": _emitted(recorded, plan, n) for n in LANES if batch % n == 0}
    return {name: graph for name, graph in forms.items() if uses_lanes(graph)}


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


def _emitted(recorded: _Recorded, plan: StepPlan, lanes: int | None) -> bytes:
    graph = Graph("train_step", lanes=lanes)
    names = [graph.input(*each) for each in recorded.inputs]
    return to_onnx(recorded.trace, graph, names, ["loss", *(f"{name}.next" for name in plan.updated)])


def initial_state(net: nn.Module, plan: StepPlan, seed: int) -> State:
    """Float32 values of every state tensor before the first step.

    The local head is initialised as nn.Linear is, the frozen one is the orthonormal frame of `seed`. Tensors of the
    method's own start as it says (`Method.state`).
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
    """Float32 values as the shortest decimals that name them."""
    return tuple(float(str(value)) for value in tensor.numpy())

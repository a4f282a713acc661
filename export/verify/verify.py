"""The comparison of a new graph with torch.

`verify` runs both graphs of a bundle in stock ONNX Runtime on random images, including a padded batch. It compares
every output with plain torch: the backbone itself, the eager objective, `loss.backward()` and torch's optimizers, on
the real samples alone.

- The allowed difference follows from float64 and from the error of torch's own float32 (export/verify/agreement.py). No
  number depends on the processor.
- Every step starts from the same state, so rounding does not add up.
- The learning rate changes from step to step. In the last step it is 1. So the change is not lost in the rounding of
  the weight, and a graph that does not read the rate is found out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from protofleet.contract.bundle.native_kernels import register_kernels
from protofleet.contract.bundle.onnx_runtime import ORT_ERRORS, ort
from protofleet.contract.errors import ExportError
from protofleet.export.backbones.weights import put_tensors
from protofleet.export.graphs.placement import weight_names
from protofleet.export.objectives import Scene, find_objective, unit_features
from protofleet.export.steps.cut import Cut
from protofleet.export.steps.optimizers import torch_optimizers
from protofleet.export.steps.step import Preprocess, StepPlan, quiet
from protofleet.export.verify.agreement import Agreement, distances, uneven, worst_agreement
from protofleet.export.verify.memory import LARGE_STATE_BYTES, affordable, frozen_heap, give_back

__all__ = ["EagerStep", "Images", "features_of", "random_images", "run_step", "verify_features", "verify_step"]

State = Mapping[str, NDArray[np.float32]]
Outputs = Mapping[str, NDArray]


@dataclass(frozen=True)
class Images:
    """One batch of random data; the samples of `real` (B,) count, the rest is padding."""

    x: NDArray[np.uint8]
    y: NDArray[np.int64]
    prototypes: NDArray[np.float32]
    mask: NDArray[np.float32]
    real: NDArray[np.bool_]
    further: Mapping[str, NDArray[np.float32]]

    @property
    def weight(self) -> NDArray[np.float32]:
        """(B,) 1 for real samples, 0 for padding."""
        return self.real.astype(np.float32)

    def inputs(self, rows: slice | NDArray[np.bool_] = slice(None)) -> dict[str, NDArray]:
        """The step's inputs but `x` and `lr`, by name, of these samples."""
        return {
            "y": self.y[rows],
            "sample_weight": self.weight[rows],
            "prototypes": self.prototypes,
            "prototype_mask": self.mask,
            **self.further,
        }


class EagerStep:
    """Plain torch: the backbone, the eager objective, autograd and torch's optimizers, in a precision of choice."""

    def __init__(self, backbone: nn.Module, preprocess: Preprocess, plan: StepPlan, dtype: torch.dtype) -> None:
        whole = copy.deepcopy(backbone)
        self.net = (quiet(whole) if plan.cut is None else _only(whole, plan.cut)).to(dtype)
        self._preprocess, self._plan, self._dtype = preprocess, plan, dtype

    def run(self, state: State, images: Images, lr: float) -> dict[str, NDArray[np.floating]]:
        """The loss and the state after one step on the real samples, by output name without `.next`.

        Nothing is copied without need, because the state may be large. The returned arrays are the memory of the
        network's parameters; the next step gives the parameters other memory.
        """
        plan, real, dtype = self._plan, images.real, self._dtype
        in_net = {n: value for n, value in state.items() if n.startswith("backbone.")}
        tensors = {name: self._copied(value) for name, value in state.items() if name not in in_net}
        for parameter in self.net.parameters():
            parameter.data = torch.empty_like(parameter.data)
        put_tensors(self.net, {n.removeprefix("backbone."): _viewed(value) for n, value in in_net.items()})
        trained = {f"backbone.{n}": p for n, p in self.net.named_parameters()}
        trained = {name: p for name, p in trained.items() if name in plan.names("param")}
        for name in plan.names("param"):
            if not name.startswith("backbone."):
                trained[name] = nn.Parameter(tensors[name])
        optimizers = torch_optimizers(trained, plan.method, plan.hyper, lr)
        for optimizer in optimizers:
            _load(optimizer, trained, tensors)
        features = self.net(_pixels(self._preprocess, torch.from_numpy(images.x[real]), dtype))
        given = {name: self._tensor(value) for name, value in images.inputs(real).items()}
        loss = find_objective(plan.method.objective or "")(
            Scene.of(features, given, {**tensors, **trained}), plan.hyper
        )
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()  # nobody looks at gradients again
        running = {f"backbone.{n}": t.clone() for n, t in self.net.named_buffers()}
        after = {**tensors, **running, **trained}
        for optimizer in optimizers:
            after |= _stored(optimizer, trained)
        return {"loss": loss.detach().numpy(), **{name: after[name].detach().numpy() for name in plan.updated}}

    def _copied(self, value: NDArray) -> Tensor:
        return _viewed(value).to(self._dtype, copy=True)

    def _tensor(self, value: NDArray) -> Tensor:
        tensor = torch.from_numpy(value)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def _viewed(value: NDArray) -> Tensor:
    return torch.from_numpy(value if value.flags.writeable else np.array(value))  # torch warns of what it may not write


def _only(net: nn.Module, cut: Cut) -> nn.Module:
    """The network as its tail is trained, in place."""
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name in cut.trained)
    return net.eval()


def _pixels(preprocess: Preprocess, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The input of the network from images x (B, H, W, c), in a precision of choice: (B, c, H, W)."""
    mean, std = preprocess.mean.to(dtype), preprocess.std.to(dtype)
    return ((x.to(dtype) / 255.0 - mean) / std).permute(0, 3, 1, 2)


_ADAM = {"exp_avg": "adam.mean", "exp_avg_sq": "adam.square"}


def _load(optimizer: torch.optim.Optimizer, trained: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
    """Give torch's optimizer the step's tensors as its state. It writes to them."""
    for name, p in _own(optimizer, trained):
        if isinstance(optimizer, torch.optim.Adam):
            own = {key: tensors[f"{prefix}.{name}"] for key, prefix in _ADAM.items()}
            optimizer.state[p].update(own, step=tensors["adam.steps"].to(torch.float32).clone())
        elif f"momentum.{name}" in tensors:
            optimizer.state[p]["momentum_buffer"] = tensors[f"momentum.{name}"]


def _stored(optimizer: torch.optim.Optimizer, trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The state of torch's optimizer after a step, by the names of the step's tensors."""
    tensors: dict[str, Tensor] = {}
    for name, p in _own(optimizer, trained):
        state = optimizer.state[p]
        if isinstance(optimizer, torch.optim.Adam):
            tensors |= {f"{prefix}.{name}": state[key] for key, prefix in _ADAM.items()}
            tensors["adam.steps"] = state["step"]
        elif state.get("momentum_buffer") is not None:
            tensors[f"momentum.{name}"] = state["momentum_buffer"]
    return tensors


def _own(optimizer: torch.optim.Optimizer, trained: Mapping[str, nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [(name, p) for name, p in trained.items() if id(p) in mine]


def verify_step(
    graph: bytes | ort.InferenceSession,
    backbone: nn.Module,
    preprocess: Preprocess,
    plan: StepPlan,
    state: State,
    *,
    batch: int,
    input_shape: tuple[int, int, int],
    trunk: bytes | None = None,
    steps: int = 3,
    seed: int = 0,
) -> Agreement:
    """Compare train_step.onnx with torch over several steps.

    The second step takes a padded batch. If torch would need too much memory for a whole batch, all steps do
    (export/verify/memory.py).

    Args:
        graph: the file, or a session that has loaded it.
        state: initial values of every state tensor, float32.
        trunk: trunk.onnx, where only the tail is trained.

    Raises:
        ExportError: when an output disagrees, or ONNX Runtime cannot run the graph.
    """
    start = uneven(state, plan.names("param", "buffer", "frozen", "trunk"), seed)
    session = _session(graph, {}) if isinstance(graph, bytes) else graph
    feeding = None if trunk is None else _Trunk(trunk, plan, start)
    sides = _Sides(session, backbone, preprocess, plan, start, feeding)
    rng, worst = np.random.default_rng(seed), Agreement(0.0, 0.0, "loss")
    fits = affordable(sides.net, input_shape, batch)
    sides.bounded = fits < batch or sum(value.nbytes for value in start.values()) > LARGE_STATE_BYTES
    with frozen_heap() if sides.bounded else nullcontext():
        for step in range(steps):
            lr = 1.0 if step + 1 == steps else float(plan.hyper["lr"]) / 2**step
            real = min(fits, batch - batch // 3 if step == 1 else batch)
            draw = partial(random_images, plan, batch, input_shape, real, rng)
            agreement = worst_agreement(partial(sides.compare, draw, lr), "train_step.onnx")
            worst = max(worst, agreement, key=lambda a: a.error)
            sides.advance()
    return worst


class _Sides:
    """The graph and torch, in float64 and in float32, each taking the same step from the same state."""

    def __init__(
        self,
        session: ort.InferenceSession,
        backbone: nn.Module,
        preprocess: Preprocess,
        plan: StepPlan,
        state: State,
        trunk: _Trunk | None,
    ) -> None:
        self._session, self._plan, self._state, self._trunk = session, plan, dict(state), trunk
        self._exact, self._single = (EagerStep(backbone, preprocess, plan, d) for d in (torch.float64, torch.float32))
        self._after: Outputs = {}
        self.bounded = False  # whether a whole batch would take too much memory, or the state is large

    def compare(self, draw: Callable[[], Images], lr: float) -> list[Agreement]:
        """One step on a new batch."""
        images = draw()
        exact = self._exact.run(self._state, images, lr)
        self._between()
        self._after = self._single.run(self._state, images, lr)
        self._between()
        activations = None if self._trunk is None else self._trunk.run(images.x)
        ours = run_step(self._session, self._plan, self._state, images, lr, activations)
        self._between()
        return distances(ours, exact, self._after, self._state)

    def _between(self) -> None:
        """Give freed memory back where memory is scarce. Otherwise not: collecting takes longer than a small step."""
        if self.bounded:
            give_back()

    @property
    def net(self) -> nn.Module:
        """The backbone as torch trains it."""
        return self._single.net

    def advance(self) -> None:
        """Continue from the state after torch's last step."""
        self._state.update({name: self._after[name] for name in self._plan.updated})


class _Trunk:
    """trunk.onnx with its weights, which no step changes."""

    def __init__(self, graph: bytes, plan: StepPlan, state: State) -> None:
        self._names = [activation.name for activation in plan.cut.activations] if plan.cut else []
        self._session = _session(graph, {name: state[name] for name in weight_names(graph)})

    def run(self, x: NDArray[np.uint8]) -> dict[str, NDArray[np.float32]]:
        """(B, H, W, c) → the activations by name."""
        return dict(zip(self._names, _run(self._session, self._names, {"x": x}), strict=True))


def verify_features(
    graph: bytes | Sequence[bytes],
    backbone: nn.Module,
    preprocess: Preprocess,
    state: State,
    *,
    input_shape: tuple[int, int, int],
    unit: bool,
    seed: int = 0,
) -> Agreement:
    """Compare features.onnx with torch, on one image and on five. Weights are supplied as a device supplies them.

    All weights of the backbone are changed first. A graph that holds a copy of them, or does not read one, would ignore
    what a device has trained; so it is found out.

    Args:
        graph: features.onnx; or trunk.onnx and tail.onnx, which together must give the same.

    Raises:
        ExportError: as `verify_step`.
    """
    trained_weights = {name: value for name, value in state.items() if name.startswith("backbone.")}
    floats = {f"backbone.{n}": t.numpy() for n, t in backbone.state_dict().items() if t.is_floating_point()}
    own, rng = floats | trained_weights, np.random.default_rng(seed)
    own = uneven({n: (v * rng.uniform(0.9, 1.1, v.shape)).astype(v.dtype) for n, v in own.items()}, own, seed)
    graphs = [graph] if isinstance(graph, bytes) else graph
    sessions = [_session(part, {name: own[name] for name in weight_names(part)}) for part in graphs]
    what = "features.onnx" if len(graphs) == 1 else "tail.onnx"
    exact, single = (_Inference(backbone, preprocess, own, unit, d) for d in (torch.float64, torch.float32))

    def attempt(count: int) -> list[Agreement]:
        x = rng.integers(0, 256, (count, *input_shape), dtype=np.uint8)
        feed: dict[str, NDArray] = {"x": x}
        for session in sessions:
            names = [output.name for output in session.get_outputs()]
            feed = dict(zip(names, _run(session, names, feed), strict=True))
        return distances(feed, {"z": exact.run(x)}, {"z": single.run(x)}, {})

    return max((worst_agreement(partial(attempt, count), what) for count in (1, 5)), key=lambda a: a.error)


def features_of(graph: bytes, params: State, x: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The features (n, D) of images (n, H, W, c) by features.onnx with these weights, on the CPU.

    Raises:
        ExportError: when ONNX Runtime cannot run the graph.
    """
    weights = {name: value for name, value in params.items() if name.startswith("backbone.")}
    return _run(_session(graph, weights), ["z"], {"x": x})[0]


class _InFloat64(TorchDispatchMode):
    """While it is active, a module makes float64 where it would make float32: its constants, a result of `.float()`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operator on float64 tensors, its result in float64."""
        given, named = tree_map(_in_float64, (args, kwargs or {}))
        return tree_map(_in_float64, func(*given, **named))


def _in_float64(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype == torch.float32:
        return value.double()
    return torch.float64 if value is torch.float32 else value


class _Inference:
    """Plain torch: the backbone in inference mode, in a precision of choice."""

    def __init__(
        self, backbone: nn.Module, preprocess: Preprocess, weights: State, unit: bool, dtype: torch.dtype
    ) -> None:
        self._net = copy.deepcopy(backbone).eval()
        own = {name.removeprefix("backbone."): torch.from_numpy(np.array(v)) for name, v in weights.items()}
        put_tensors(self._net, own)
        self._net.to(dtype)
        self._preprocess, self._unit, self._dtype = preprocess, unit, dtype

    def run(self, x: NDArray[np.uint8]) -> NDArray[np.floating]:
        """(B, H, W, c) → (B, D)."""
        in_float64 = _InFloat64() if self._dtype == torch.float64 else nullcontext()
        with torch.no_grad(), in_float64:
            z = self._net(_pixels(self._preprocess, torch.from_numpy(x), self._dtype))
            return (unit_features(z) if self._unit else z).numpy()


def run_step(
    session: ort.InferenceSession,
    plan: StepPlan,
    state: State,
    images: Images,
    lr: float,
    activations: Mapping[str, NDArray[np.float32]] | None = None,
) -> dict[str, NDArray[np.float32]]:
    """One step in ONNX Runtime: the loss and the new state, by output name without `.next`.

    Args:
        activations: what the step takes in place of the images, where only the tail is trained.
    """
    feed = {
        **({"x": images.x} if activations is None else activations),
        **images.inputs(),
        "lr": np.asarray(lr, dtype=np.float32),
        **{t.name: state[t.name] for t in plan.step_state},
    }
    outputs = ["loss", *(f"{name}.next" for name in plan.updated)]
    values = _run(session, outputs, feed)
    return {name.removesuffix(".next"): value for name, value in zip(outputs, values, strict=True)}


def random_images(
    plan: StepPlan, batch: int, input_shape: tuple[int, int, int], real: int, rng: np.random.Generator
) -> Images:
    """A batch of images of coarse random patches under fine noise, with random labels and prototypes.

    Every third class has no prototype. `real` samples of the batch count: the first one, and others at random places.

    Images of pure noise would all look alike once averaged over a plane, and BatchNorm would divide by nearly zero.
    """
    height, width, channels = input_shape
    patches = rng.integers(16, 240, (batch, 4, 4, channels))
    rows, columns = (np.arange(n) * 4 // n for n in (height, width))
    noise = rng.integers(-16, 17, (batch, *input_shape))
    labels = rng.integers(0, plan.classes, batch)
    further = {}
    sizes = {"classes": plan.classes, "features": plan.features}
    for name, axes in plan.method.step_inputs(plan.hyper).items():
        shape = [sizes[axis] for axis in axes]
        further[name] = rng.dirichlet(np.ones(shape[-1]), tuple(shape[:-1])).astype(np.float32)
    if plan.method.uses_unlabelled(plan.hyper):
        labels[1::2] = -1
    return Images(
        x=(patches[:, rows][:, :, columns] + noise).astype(np.uint8),
        y=labels,
        prototypes=rng.standard_normal((plan.classes, plan.features)).astype(np.float32),
        mask=(np.arange(plan.classes) % 3 != 1).astype(np.float32),
        real=np.concatenate([[real > 0], rng.permutation(np.arange(1, batch) < real)]),
        further=further,
    )


def _session(graph: bytes, weights: State) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.enable_mem_pattern = options.enable_cpu_mem_arena = False  # either would hold a step's memory to the end
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    if not weights:  # a step, as a device opens it (edge_client/training/onnx_session.py)
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    values = {n: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(v)) for n, v in weights.items()}
    register_kernels(options, graph)
    if values:
        options.add_external_initializers(list(values), list(values.values()))
    try:
        return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except ORT_ERRORS as error:
        raise ExportError("ONNX Runtime cannot load the graph", expected="a valid graph", got=error) from None


def _run(session: ort.InferenceSession, names: list[str], feed: Mapping[str, NDArray]) -> list[NDArray[np.float32]]:
    try:
        return session.run(names, dict(feed))
    except ORT_ERRORS as error:
        raise ExportError("ONNX Runtime cannot run the graph", expected="a valid graph", got=error) from None

"""Does the graph that has just been written do what torch does?

`verify` runs both graphs of a bundle in stock ONNX Runtime on random images, a padded batch among them, and compares
every output with plain torch: the backbone itself, the eager objective, `loss.backward()` and `torch.optim.SGD` on the
real samples alone.

What counts as equal. Float32 training is ill-conditioned where BatchNorm sees few values: torch in float32 may itself
be 1 % away from exact arithmetic there. So torch also runs in float64, which stands for exact, and each tensor's change
in one step must be as close to that as torch's own float32 is, within a factor, or within 1e-4 of the change outright.
Every step starts from the same state, so that rounding does not pile up. Where rounding turns a ReLU or the choice of a
maximum over, one batch may differ by more; a batch that disagrees is therefore followed by another, and a wrong formula
is wrong on all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from contract.errors import ExportError
from export.objectives import OBJECTIVES, Scene, unit_features
from export.optimizers import torch_optimizers
from export.step import Preprocess, StepPlan, quiet
from export.weights import put_tensors

__all__ = ["Agreement", "EagerStep", "Images", "random_images", "run_step", "verify_features", "verify_step"]

_TOLERANCE = 1e-4  # relative to a tensor's change in one step
_FACTOR = 20.0  # how much further from exact arithmetic than torch's float32 a tensor may be
_SMALL = 1e-3  # a change below this share of the whole step's is compared with that share
_ATTEMPTS = 6
_ORT_ERRORS = (ort.capi.onnxruntime_pybind11_state.Fail, RuntimeError)
State = Mapping[str, NDArray[np.float32]]
Outputs = Mapping[str, NDArray]


@dataclass(frozen=True)
class Agreement:
    """The worst difference found.

    Attributes:
        error: relative to exact arithmetic.
        torch_error: torch's own in float32, on the same tensor.
        tensor: which output.
    """

    error: float
    torch_error: float
    tensor: str


@dataclass(frozen=True)
class Images:
    """One batch of random data; `real` of its samples count, the rest is padding."""

    x: NDArray[np.uint8]
    y: NDArray[np.int64]
    prototypes: NDArray[np.float32]
    mask: NDArray[np.float32]
    real: int
    further: Mapping[str, NDArray[np.float32]]

    @property
    def weight(self) -> NDArray[np.float32]:
        """(B,) 1 for real samples, 0 for padding."""
        return (np.arange(len(self.y)) < self.real).astype(np.float32)

    def inputs(self, rows: slice = slice(None)) -> dict[str, NDArray]:
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
        self._net = quiet(copy.deepcopy(backbone)).to(dtype)
        self._preprocess, self._plan, self._dtype = preprocess, plan, dtype

    def run(self, state: State, images: Images, lr: float) -> dict[str, NDArray[np.floating]]:
        """The loss and the state after one step on the real samples, by output name without `.next`."""
        plan, real, dtype = self._plan, images.real, self._dtype
        tensors = {name: torch.from_numpy(np.array(value)).to(dtype) for name, value in state.items()}
        own = {n.removeprefix("backbone."): t for n, t in tensors.items() if n.startswith("backbone.")}
        put_tensors(self._net, own)
        trained = {f"backbone.{n}": p for n, p in self._net.named_parameters()}
        trained = {name: p for name, p in trained.items() if name in plan.names("param")}
        for name in plan.names("param"):
            if not name.startswith("backbone."):
                trained[name] = nn.Parameter(tensors[name])
        optimizers = torch_optimizers(trained, plan.hyper, lr)
        for optimizer in optimizers:
            _load(optimizer, trained, tensors)
        features = self._net(self._pixels(torch.from_numpy(images.x[:real])))
        given = {name: self._tensor(value) for name, value in images.inputs(slice(real)).items()}
        loss = OBJECTIVES[plan.objective](Scene.of(features, given, {**tensors, **trained}), plan.hyper)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        after = {f"backbone.{n}": t for n, t in self._net.state_dict().items()} | trained
        for optimizer in optimizers:
            after |= _stored(optimizer, trained)
        result = {name: after.get(name, tensors[name]).detach().numpy().copy() for name in plan.updated}
        return {"loss": loss.detach().numpy(), **result}

    def _tensor(self, value: NDArray) -> Tensor:
        tensor = torch.from_numpy(value)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def _pixels(self, x: Tensor) -> Tensor:
        mean, std = self._preprocess.mean.to(self._dtype), self._preprocess.std.to(self._dtype)
        return ((x.to(self._dtype) / 255.0 - mean) / std).permute(0, 3, 1, 2)


_ADAM = {"exp_avg": "adam.mean", "exp_avg_sq": "adam.square"}


def _load(optimizer: torch.optim.Optimizer, trained: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
    """Give torch's optimizer the state that the step's tensors hold."""
    for name, p in _own(optimizer, trained):
        if isinstance(optimizer, torch.optim.Adam):
            own = {key: tensors[f"{prefix}.{name}"].clone() for key, prefix in _ADAM.items()}
            optimizer.state[p].update(own, step=tensors["adam.steps"].to(torch.float32).clone())
        elif f"momentum.{name}" in tensors:
            optimizer.state[p]["momentum_buffer"] = tensors[f"momentum.{name}"].clone()


def _stored(optimizer: torch.optim.Optimizer, trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The state of torch's optimizer after a step, by the names of the step's tensors."""
    found: dict[str, Tensor] = {}
    for name, p in _own(optimizer, trained):
        state = optimizer.state[p]
        if isinstance(optimizer, torch.optim.Adam):
            found |= {f"{prefix}.{name}": state[key] for key, prefix in _ADAM.items()}
            found["adam.steps"] = state["step"]
        elif state.get("momentum_buffer") is not None:
            found[f"momentum.{name}"] = state["momentum_buffer"]
    return found


def _own(optimizer: torch.optim.Optimizer, trained: Mapping[str, nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [(name, p) for name, p in trained.items() if id(p) in mine]


def verify_step(
    graph: bytes,
    backbone: nn.Module,
    preprocess: Preprocess,
    plan: StepPlan,
    state: State,
    *,
    batch: int,
    input_shape: tuple[int, int, int],
    steps: int = 3,
    seed: int = 0,
) -> Agreement:
    """Compare train_step.onnx with torch over several steps, the second of them on a padded batch.

    Args:
        state: initial values of every state tensor, float32.

    Raises:
        ExportError: when an output disagrees, or ONNX Runtime cannot run the graph.
    """
    session = _session(graph, {})
    exact, single = (EagerStep(backbone, preprocess, plan, dtype) for dtype in (torch.float64, torch.float32))
    rng, lr, state = np.random.default_rng(seed), float(plan.hyper["lr"]), dict(state)
    worst = Agreement(0.0, 0.0, "loss")
    for step in range(steps):
        real = batch - batch // 3 if step == 1 else batch
        for attempt in range(_ATTEMPTS):
            images = random_images(plan, batch, input_shape, real, rng)
            wanted, torchs = exact.run(state, images, lr), single.run(state, images, lr)
            found = _compare(run_step(session, plan, state, images, lr), wanted, torchs, state)
            if _agrees(found):
                break
            if attempt + 1 == _ATTEMPTS:
                raise ExportError(
                    f"train_step.onnx disagrees with torch at {found.tensor}; the bundle was not written",
                    expected=f"a relative difference near torch's own {found.torch_error:.1e}",
                    got=f"{found.error:.1e}",
                    hint="reporting this backbone",
                )
        worst = max(worst, found, key=lambda a: a.error)
        state.update({name: torchs[name] for name in plan.updated})
    return worst


def _compare(ours: Outputs, exact: Outputs, torchs: Outputs, before: State) -> Agreement:
    """The tensor that is furthest beyond what torch's float32 is off by."""
    changes = {name: np.asarray(value, np.float64) - before.get(name, 0.0) for name, value in exact.items()}
    overall = float(np.sqrt(sum(np.sum(change**2) for name, change in changes.items() if name in before)))
    found = []
    for name, value in exact.items():
        size = float(np.linalg.norm(value)) if name == "loss" else 0.0
        scale = max(float(np.linalg.norm(changes[name])), size, _SMALL * overall, 1e-30)
        errors = [float(np.linalg.norm(np.asarray(t[name], np.float64) - value)) / scale for t in (ours, torchs)]
        found.append(Agreement(errors[0], errors[1], name))
    failed = [agreement for agreement in found if not _agrees(agreement)]
    return max(failed or found, key=lambda a: a.error if np.isfinite(a.error) else np.inf)


def _agrees(found: Agreement) -> bool:
    return found.error <= max(_TOLERANCE, _FACTOR * found.torch_error)


def verify_features(
    graph: bytes,
    backbone: nn.Module,
    preprocess: Preprocess,
    state: State,
    *,
    input_shape: tuple[int, int, int],
    unit: bool,
    seed: int = 0,
) -> Agreement:
    """Compare features.onnx, its weights supplied as a device does, with torch on one image and on five.

    Once more with all of the backbone's weights moved: a graph that holds a copy of the first ones, or reads none,
    would ignore what a device has trained.

    Raises:
        ExportError: as `verify_step`.
    """
    net = copy.deepcopy(backbone).eval()
    rng, worst = np.random.default_rng(seed), 0.0
    first = {n: v for n, v in state.items() if n.startswith("backbone.")}
    own = {f"backbone.{n}": t.numpy() for n, t in net.state_dict().items() if t.is_floating_point()} | first
    moved = {n: (v * rng.uniform(0.9, 1.1, v.shape)).astype(np.float32) for n, v in own.items()}
    for weights, count in ((own, 1), (own, 5), (moved, 1)):
        session = _session(graph, {name: weights[name] for name in first})
        put_tensors(net, {n.removeprefix("backbone."): torch.from_numpy(v) for n, v in weights.items()})
        x = rng.integers(0, 256, (count, *input_shape), dtype=np.uint8)
        with torch.no_grad():
            z = net(preprocess(torch.from_numpy(x)))
            wanted = (unit_features(z) if unit else z).numpy()
        found = _run(session, ["z"], {"x": x})[0]
        worst = max(worst, float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-30)))
    if not worst <= _TOLERANCE:
        raise ExportError(
            "features.onnx disagrees with torch; the bundle was not written",
            expected=f"a relative difference below {_TOLERANCE:.0e}",
            got=f"{worst:.1e}",
            hint="reporting this backbone",
        )
    return Agreement(worst, 0.0, "z")


def run_step(
    session: ort.InferenceSession, plan: StepPlan, state: State, images: Images, lr: float
) -> dict[str, NDArray[np.float32]]:
    """One step in ONNX Runtime: the loss and the new state, by output name without `.next`."""
    feed = {
        "x": images.x,
        **images.inputs(),
        "lr": np.asarray(lr, dtype=np.float32),
        **{t.name: state[t.name] for t in plan.state},
    }
    outputs = ["loss", *(f"{name}.next" for name in plan.updated)]
    values = _run(session, outputs, feed)
    return {name.removesuffix(".next"): value for name, value in zip(outputs, values, strict=True)}


def random_images(
    plan: StepPlan, batch: int, input_shape: tuple[int, int, int], real: int, rng: np.random.Generator
) -> Images:
    """Images of coarse random patches under fine noise, random labels and prototypes, every third class without one.

    Pure noise would not do: averaged over a plane, one image of noise is like any other, and BatchNorm would divide by
    next to nothing.
    """
    height, width, channels = input_shape
    patches = rng.integers(16, 240, (batch, 4, 4, channels))
    rows, columns = (np.arange(n) * 4 // n for n in (height, width))
    noise = rng.integers(-16, 17, (batch, *input_shape))
    labels = rng.integers(0, plan.classes, batch)
    further = {}
    if "soft_predictions" in plan.inputs:
        further["soft_predictions"] = rng.dirichlet(np.ones(plan.classes), plan.classes).astype(np.float32)
    if "class_priors" in plan.inputs:
        further["class_priors"] = rng.dirichlet(np.ones(plan.classes)).astype(np.float32)
        labels[1::2] = -1
    return Images(
        x=(patches[:, rows][:, :, columns] + noise).astype(np.uint8),
        y=labels,
        prototypes=rng.standard_normal((plan.classes, plan.features)).astype(np.float32),
        mask=(np.arange(plan.classes) % 3 != 1).astype(np.float32),
        real=real,
        further=further,
    )


def _session(graph: bytes, weights: State) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    values = {n: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(v)) for n, v in weights.items()}
    if values:
        options.add_external_initializers(list(values), list(values.values()))
    try:
        return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except _ORT_ERRORS as error:
        raise ExportError("ONNX Runtime cannot load the graph", expected="a valid graph", got=error) from None


def _run(session: ort.InferenceSession, names: list[str], feed: Mapping[str, NDArray]) -> list[NDArray[np.float32]]:
    try:
        return session.run(names, dict(feed))
    except _ORT_ERRORS as error:
        raise ExportError("ONNX Runtime cannot run the graph", expected="a valid graph", got=error) from None

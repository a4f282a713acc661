"""Backbone + method → bundle: the whole of `protofleet export` but its command line.

1. build the backbone, cut at its features, and load weights into it if any are given;
2. settle the method's head and hyper-parameters, and list the state tensors of its training step;
3. record and translate `features.onnx` and, where the method trains, `train_step.onnx`;
4. run both in stock ONNX Runtime against plain torch (export/verify.py), and stop if they disagree;
5. write the bundle, whole or not at all.

The same arguments give the same bytes. See docs/bundle.md.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from contract.bundle import SCHEMA, Manifest, pack_params, write_bundle
from contract.errors import UsageError
from contract.methods import Head, Method, method
from contract.sphere import orthonormal_frame
from export.agreement import Agreement
from export.backbones import Backbone, Norm, find_backbone
from export.chance import chance_of
from export.features import export_features
from export.graph import OPSET, Graph
from export.placement import place_weights, weight_names
from export.step import Preprocess, StepPlan, TrainingStep, plan_step, trace_step
from export.trace import to_onnx
from export.verify import verify_features, verify_step

__all__ = ["DEFAULT_BATCH", "Exported", "build_bundle", "export_step", "initial_state"]

DEFAULT_BATCH = 16
Progress = Callable[[str], None]
State = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Exported:
    """What an export made.

    Attributes:
        path: the bundle.
        sha256: 32 bytes, its identity.
        manifest: as written (`members` apart).
        ignored: tensors of the weights file that the backbone does not have.
        agreement: the worst difference from torch that verification found.
        bundle_bytes: size of the file.
        seconds: by stage.
        switched_off: what the network would have left to chance while it trains.
    """

    path: Path
    sha256: bytes
    manifest: Manifest
    ignored: tuple[str, ...]
    agreement: Agreement
    bundle_bytes: int
    seconds: Mapping[str, float]
    switched_off: tuple[str, ...] = ()


def build_bundle(
    *,
    backbone: str,
    method_name: str,
    labels: Sequence[str],
    input_shape: tuple[int, int, int] | None = None,
    out: str | Path,
    weights: str | Path | None = None,
    head: Head | None = None,
    norm: Norm | None = None,
    hyper: Mapping[str, object] | None = None,
    batch: int = DEFAULT_BATCH,
    seed: int = 0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    provenance: str | None = None,
    bundle_version: int = 1,
    private_key: bytes | None = None,
    progress: Progress = lambda line: None,
) -> Exported:
    """Export a backbone with a method's training step into one bundle file.

    Args:
        backbone: a name, or a library's or a user's with the prefix that says so (export/backbones.py).
        method_name: a method of the table.
        labels: C class names, in the order of the class numbers.
        input_shape: (H, W, c) of the uint8 images; None is what a library's network is used to.
        out: the file to write.
        weights: safetensors or a torch state dict for the backbone, or "pretrained" for those that its library
            publishes; initial weights from `seed` when None.
        head: `local`, `frozen` or `none`; the method's default when None.
        norm: normalisation of the backbone, where it has a choice.
        hyper: hyper-parameters that differ from the method's defaults.
        batch: B of the training step.
        seed: of initial weights and of a frozen head.
        mean, std: per channel or one for all, of x / 255; by default those the backbone is used to.
        provenance: how the weights were obtained, in words; a library's hash and licence are added to them.
        bundle_version: must grow with each export for one fleet.
        private_key: 32 bytes Ed25519 seed, to sign the manifest.
        progress: called with one line before each stage.

    Raises:
        UsageError, MethodError: for arguments out of range.
        ExportError: when the backbone cannot be exported, or its graph disagrees with torch.
        DownloadError: when pretrained weights cannot be fetched.
        BundleError: when the file cannot be written.
    """
    entry = method(method_name)
    settled = entry.settle(hyper or {})
    chosen = _settle_head(entry, head)
    _check_arguments(labels, batch, bundle_version)
    clock = _Clock(progress)
    with clock.stage("backbone", f"building {backbone}"):
        _check_shape(input_shape)
        found = find_backbone(backbone, input_shape, norm, seed=seed, weights=weights)
        net, width, input_shape = found.net, found.width, found.input_shape
        switched_off = chance_of(net) if entry.trains else ()
        preprocess = Preprocess(*_statistics(found, mean, std))
        entry.check(settled, len(labels), width)
        plan = plan_step(net, entry, settled, chosen, len(labels), width)
    with clock.stage("features", "exporting features.onnx"):
        features = export_features(net, preprocess, plan.state, input_shape, unit=entry.unit_features)
        plan = plan.reading(weight_names(features))
        state = initial_state(net, plan, seed)
        stored = {name: state[name] for name in plan.names("param", "buffer", "frozen")}
        extractor = _identity(features, stored)
        features = place_weights(features, pack_params(stored))
    step = None
    if entry.trains:
        with clock.stage("train_step", f"exporting train_step.onnx ({entry.objective}, {chosen} head, batch {batch})"):
            step = export_step(net, preprocess, plan, batch, input_shape)
    with clock.stage("verify", "running both in ONNX Runtime against torch"):
        agreement = verify_features(features, net, preprocess, state, input_shape=input_shape, unit=entry.unit_features)
        if step is not None:
            worst = verify_step(step, net, preprocess, plan, state, batch=batch, input_shape=input_shape)
            agreement = max(agreement, worst, key=lambda a: a.error)
    manifest = Manifest(
        schema=SCHEMA,
        version=bundle_version,
        protofleet=_own_version(),
        backbone=backbone,
        provenance=_provenance(found, provenance, switched_off),
        method=entry.name,
        head=chosen,
        hyper=settled,
        labels=tuple(labels),
        features=width,
        input_shape=input_shape,
        mean=_numbers(preprocess.mean),
        std=_numbers(preprocess.std),
        batch=batch,
        opset=OPSET,
        state=plan.state,
        members={},
        extractor=extractor,
    )
    with clock.stage("write", f"writing {out}"):
        sha256 = write_bundle(out, manifest, features=features, train_step=step, params=stored, private_key=private_key)
    path = Path(out)
    size = path.stat().st_size
    return Exported(path, sha256, manifest, found.ignored, agreement, size, clock.seconds, switched_off)


def export_step(
    net: nn.Module, preprocess: Preprocess, plan: StepPlan, batch: int, input_shape: tuple[int, int, int]
) -> bytes:
    """The bytes of train_step.onnx: the plan's inputs and then its state; outputs loss and then `<name>.next`.

    Raises:
        ExportError: for an operator without translation.
    """
    kinds = {
        "x": torch.zeros((batch, *input_shape), dtype=torch.uint8),
        "y": torch.zeros(batch, dtype=torch.int64),
        "sample_weight": torch.ones(batch),
        "prototypes": torch.zeros(plan.classes, plan.features),
        "prototype_mask": torch.zeros(plan.classes),
        "lr": torch.tensor(0.0),
    }
    sizes = {"classes": plan.classes, "features": plan.features}
    for name, shape in plan.method.step_inputs(plan.hyper).items():
        kinds[name] = torch.zeros([sizes[axis] for axis in shape])
    example = (*(kinds[name] for name in plan.inputs), *(torch.zeros(t.shape) for t in plan.state))
    graph = Graph("train_step")
    names = [*plan.inputs, *(t.name for t in plan.state)]
    for name, tensor in zip(names, example, strict=True):
        graph.input(name, tensor.dtype, tensor.shape)
    trace = trace_step(TrainingStep(net, preprocess, plan), example)
    return to_onnx(trace, graph, names, ["loss", *(f"{name}.next" for name in plan.updated)])


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
    own |= {name: start.value for name, start in plan.method.state(plan.classes, plan.features, seed).items()}
    return {t.name: np.array(own.get(t.name, np.zeros(t.shape)), dtype=np.float32) for t in plan.state}


def _identity(features: bytes, stored: Mapping[str, NDArray[np.float32]]) -> str:
    """The extractor's sha256 (hex): the features graph before weights are placed in it, and the backbone's weights."""
    weights = {name: value for name, value in stored.items() if name.startswith("backbone.")}
    return hashlib.sha256(hashlib.sha256(features).digest() + pack_params(weights)).hexdigest()


class _Clock:
    """Announces each stage and keeps how long it took."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.seconds: dict[str, float] = {}
        self._name, self._start = "", 0.0

    def stage(self, name: str, line: str) -> _Clock:
        self._progress(line)
        self._name, self._start = name, time.perf_counter()
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self.seconds[self._name] = time.perf_counter() - self._start


def _settle_head(entry: Method, head: Head | None) -> Head:
    if head is None:
        return entry.heads[0]
    if head not in entry.heads:
        raise UsageError("--head", expected=f"{' or '.join(entry.heads)} for {entry.name}", got=head)
    return head


def _check_shape(shape: tuple[int, int, int] | None) -> None:
    if shape is not None and (len(shape) != 3 or min(shape) < 1):
        raise UsageError("--input", expected="HxWxc, each at least 1", got=shape)


def _check_arguments(labels: Sequence[str], batch: int, bundle_version: int) -> None:
    rules = (
        (len(labels) >= 2, "--classes", "at least 2 classes", len(labels)),
        (len(set(labels)) == len(labels), "--classes", "names that differ", "a repeated name"),
        (all(labels), "--classes", "names that are not empty", "an empty name"),
        (1 <= batch <= 4096, "--batch", "1 to 4096", batch),
        (bundle_version >= 0, "--bundle-version", "0 or more", bundle_version),
    )
    for holds, option, expected, got in rules:
        if not holds:
            raise UsageError(option, expected=expected, got=got)


def _statistics(
    found: Backbone, mean: Sequence[float] | None, std: Sequence[float] | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    channels = found.input_shape[2]
    given = (found.mean if mean is None else tuple(mean), found.std if std is None else tuple(std))
    given = tuple(values * channels if len(values) == 1 else values for values in given)
    for option, values in zip(("--mean", "--std"), given, strict=True):
        if len(values) != channels or not np.isfinite(values).all():
            raise UsageError(option, expected=f"{channels} numbers, one per channel", got=values)
    if min(given[1]) <= 0:
        raise UsageError("--std", expected="numbers above 0", got=given[1])
    return given[0], given[1]


def _numbers(tensor: torch.Tensor) -> tuple[float, ...]:
    """Float32 values as the shortest decimals that name them."""
    return tuple(float(str(value)) for value in tensor.numpy())


def _provenance(found: Backbone, words: str | None, switched_off: Sequence[str]) -> str:
    """A person's words or how the weights were obtained; then, of weights from elsewhere, what is known of them."""
    told = [words or found.origin]
    told += [found.facts] if found.facts and (words is None or "licence" in found.facts) else []
    told += [f"off while training: {', '.join(switched_off)}"] if switched_off and words is None else []
    return "; ".join(told)


def _own_version() -> str:
    try:
        return version("protofleet")
    except PackageNotFoundError:
        return "unknown"

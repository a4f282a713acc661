"""What a report is about: a features graph at any batch, and how its training step is derived from it.

`profile` and `cost` both take a bundle; `cost` takes one of the SphereFed paper's backbones by name, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

from protofleet.contract.bundle.bundle_file import Bundle, Manifest, read_bundle
from protofleet.contract.errors import UsageError
from protofleet.contract.methods import METHODS, Method
from protofleet.hw_profiles.workload.baselines import features_width, fedavg
from protofleet.hw_profiles.workload.calibration_step import Calibrating, method_calibration
from protofleet.hw_profiles.workload.constant_folding import fold_weights
from protofleet.hw_profiles.workload.from_onnx import any_batch, bundle_halves, bundle_workloads, read_workload
from protofleet.hw_profiles.workload.model import Workload
from protofleet.hw_profiles.workload.paper_networks import build_network
from protofleet.hw_profiles.workload.training import Training, bundle_training, method_training
from protofleet.hw_profiles.workload.training_step import training_step

__all__ = ["Subject", "bundle_subject", "load_subject"]


@dataclass(frozen=True, eq=False)
class Subject:
    """A network and how it is trained; each graph is read once for each batch.

    Attributes:
        source: where it comes from, in words.
        batch: B of what is reported.
        forward_at: the features graph at batch B.
        manifest: of the bundle, or None for a named backbone.
        step: the bundle's own training step, at its own batch.
        published: whether it is one of the networks of SphereFed's paper.
        halves_at: where the bundle trains only the tail of the network: its trunk and its tail at batch B.
    """

    name: str
    source: str
    classes: int
    batch: int
    forward_at: Callable[[int], Workload]
    manifest: Manifest | None = None
    step: Workload | None = None
    halves_at: Callable[[int], tuple[Workload, Workload]] | None = None
    published: bool = False

    def trained_at(self, batch: int) -> Workload:
        """What of the network a step trains, at batch B: all of it, or its tail."""
        return self.forward_at(batch) if self.halves_at is None else self.halves_at(batch)[1]

    @cached_property
    def trunk(self) -> Workload | None:
        """What each photo goes through once, where only the tail is trained, as a runtime runs it."""
        return None if self.halves_at is None else fold_weights(self.halves_at(1)[0])

    @cached_property
    def inference(self) -> Workload:
        """The features graph as a runtime runs it."""
        return self.inference_at(self.batch)

    def inference_at(self, batch: int) -> Workload:
        """The features graph as a runtime runs it, at batch B."""
        return fold_weights(self.forward_at(batch))

    @property
    def normalised(self) -> bool:
        """Whether the graph ends in unit features, as a bundle's of such a method does."""
        return self.manifest is not None and METHODS[self.manifest.method].unit_features

    def baseline(self) -> Training:
        """FedAvg, trained as the bundle is, or as the papers train."""
        forward = self.forward_at(1)
        if self.manifest is None or not self.manifest.trainable:
            return fedavg(forward, self.classes)
        own = bundle_training(self.manifest, self.classes)
        return fedavg(forward, self.classes, update_of=own.update_of, bias=own.bias)

    def training(self, method: Method) -> Training:
        """A step of a method: the bundle's own as it was exported, another by its defaults."""
        if self.manifest is not None and self.manifest.method == method.name:
            return bundle_training(self.manifest, self.classes)
        width = features_width(self.forward_at(1))
        return method_training(method, self.classes, width, normalised=self.normalised)

    def calibration(self, method: Method, samples: int) -> Calibrating:
        """A round of a method that trains nothing, prepared as the bundle says."""
        hyper = method.resolved_in(self.manifest.hyper if self.manifest else {})
        width = features_width(self.forward_at(1))
        return method_calibration(method, samples, self.classes, width, hyper=hyper, normalised=self.normalised)

    def derived_step(self, batch: int, training: Training | None = None) -> Workload:
        """A training step at any batch, derived layer by layer from what is trained: the bundle's, or another."""
        if training is None:
            assert self.manifest is not None
            training = bundle_training(self.manifest, self.classes)
        return training_step(self.trained_at(batch), training)


def load_subject(
    target: str, *, classes: int | None = None, side: int | None = None, batch: int | None = None
) -> Subject:
    """A bundle file, a plain ONNX file, or one of the paper's backbones by name.

    Args:
        classes: C; a bundle's own is used unless given, others take 100.
        side: input side of a named backbone; default 32.
        batch: B; default the bundle's own, or 64.

    Raises:
        BundleError: the bundle cannot be read, or its graph keeps a dynamic shape.
        UsageError: an unknown name, a size that makes no sense, or an ONNX file that cannot be read at any batch.
    """
    for name, value in (("classes", classes), ("batch", batch)):
        if value is not None and value < 1:
            raise UsageError(name, expected="a positive integer", got=value)
    is_file = target.endswith((".onnx", ".bundle")) or Path(target).is_file()
    if side is not None and is_file:
        raise UsageError("--side", expected="one of SphereFed's backbones by name", got=f"{target}, which has its own")
    if target.endswith(".onnx"):
        return _onnx_subject(Path(target), classes=classes, batch=batch)
    if is_file:
        return bundle_subject(read_bundle(target), f"bundle {Path(target).name}", classes=classes, batch=batch)

    @lru_cache(maxsize=64)
    def forward_at(size: int) -> Workload:
        return read_workload(build_network(target, side=side or 32), batch=size, name=target)

    forward_at(1)
    source = f"SphereFed's tables, {side or 32}x{side or 32} input"
    return Subject(target, source, classes or 100, batch or 64, forward_at, published=True)


def _onnx_subject(path: Path, *, classes: int | None, batch: int | None) -> Subject:
    """A graph from anywhere; its first output stands for the features, (B, D), to which a head is added in training."""
    try:
        graph = any_batch(path.read_bytes(), path.name)
    except OSError as error:
        raise UsageError(f"cannot read {path}", expected="an ONNX file", got=error.strerror) from None

    @lru_cache(maxsize=64)
    def forward_at(size: int) -> Workload:
        forward = read_workload(graph, batch=size, name=path.stem)
        shape = forward.tensors[forward.outputs[0]].shape
        if len(shape) != 2 or shape[0] != size:
            raise UsageError(
                f"{path.name}: first output", expected=f"features of shape ({size}, width) for a batch of {size}",
                got=" x ".join(map(str, shape)), hint="a graph that ends in a flattened layer, with a symbolic batch",
            )  # fmt: skip
        return forward

    tensors = forward_at(2).tensors.values()
    inputs = ["x".join(map(str, t.shape[1:])) for t in tensors if t.role == "input"]
    return Subject(path.stem, f"{path.name}, {' and '.join(inputs)} input", classes or 100, batch or 64, forward_at)


def bundle_subject(
    bundle: Bundle, named: str = "bundle", *, classes: int | None = None, batch: int | None = None
) -> Subject:
    """A bundle that has been read; `named` is what its source calls it.

    Raises:
        BundleError: a graph cannot be read, or keeps a dynamic shape.
    """
    manifest = bundle.manifest
    features = replace(bundle, train_step=None)  # the step's batch is fixed; it is read once, below

    @lru_cache(maxsize=64)
    def forward_at(size: int) -> Workload:
        return bundle_workloads(features, batch=size)[0]

    @lru_cache(maxsize=64)
    def halves_at(size: int) -> tuple[Workload, Workload]:
        halves = bundle_halves(bundle, batch=size)
        assert halves is not None
        return halves

    source = f"{named}, {'x'.join(map(str, manifest.input_shape))} input, method {manifest.method}"
    return Subject(
        manifest.backbone,
        source,
        classes or manifest.classes,
        batch or manifest.batch,
        forward_at,
        manifest,
        bundle_workloads(bundle)[1],
        halves_at if manifest.cut else None,
    )

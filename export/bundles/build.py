"""Backbone + method → bundle: the whole of `protofleet export`, except its command line.

1. Build the backbone, cut at its features, and load weights into it if any are given. Divide it if only its tail is to
   be trained (export/steps/cut.py).
2. Choose the method's head and hyper-parameters, and list the state tensors of its training step.
3. Record and translate `features.onnx` and, if the method trains, `train_step.onnx`.
4. Run both in stock ONNX Runtime, compare them with plain torch (export/verify/verify.py), and stop if they disagree.
   Where half weights are asked for, round them now, and compare that graph with the one before over rounded weights.
5. Let ONNX Runtime on the CPU compute the features of a few images, as test vectors (contract/bundle/test_vectors.py).
6. Write the bundle, whole or not at all.

Guarantee: the same arguments give the same bytes, except the last digits of the test vectors on another kind of
processor. See docs/bundle.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.bundle.bundle_file import SCHEMA, Manifest, pack_params, write_bundle
from protofleet.contract.bundle.class_names import check_names
from protofleet.contract.bundle.test_vectors import TOLERANCE, Vectors, distance, probe_images
from protofleet.contract.errors import ExportError, UsageError
from protofleet.contract.methods import Head, Method, Value, method
from protofleet.export.backbones.backbone import Backbone, Norm, find_backbone
from protofleet.export.backbones.backbone_names import PREFIX
from protofleet.export.bundles.bundle_graphs import (
    Clock,
    Graphs,
    Progress,
    export_step,
    graphs_from_onnx,
    graphs_from_torch,
    initial_state,
)
from protofleet.export.graphs.graph_builder import OPSET
from protofleet.export.graphs.half_weights import halved, rounded
from protofleet.export.graphs.placement import place_weights
from protofleet.export.modules.preprocess import check_statistics
from protofleet.export.modules.torch_cache import load_dynamo
from protofleet.export.modules.torch_threads import one_thread
from protofleet.export.steps.cut import cut_network
from protofleet.export.steps.step import Preprocess, plan_step
from protofleet.export.verify.agreement import Agreement
from protofleet.export.verify.memory import frozen_heap
from protofleet.export.verify.verify import features_of

__all__ = ["DEFAULT_BATCH", "Exported", "build_bundle", "export_step", "initial_state"]

DEFAULT_BATCH = 16


@dataclass(frozen=True)
class Exported:
    """The result of an export.

    Attributes:
        path: the bundle.
        sha256: 32 bytes, its identity.
        manifest: as written, except its `members`.
        ignored: tensors of the weights file that the backbone does not have.
        agreement: the worst difference from torch that verification found.
        bundle_bytes: size of the file.
        seconds: by stage.
        switched_off: the random layers of the network that are off while it trains.
    """

    path: Path
    sha256: bytes
    manifest: Manifest
    ignored: tuple[str, ...]
    agreement: Agreement
    bundle_bytes: int
    seconds: Mapping[str, float]
    switched_off: tuple[str, ...] = ()


# arguments: a program's `export`: by name, with the defaults of the command
@one_thread()
@frozen_heap()
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
    train_from: str | None = None,
    trainable_blocks: int | None = None,
    for_x86: bool = False,
    for_kernels: bool = False,
    micro_batch: int = 0,
    half_weights: bool = False,
    progress: Progress = lambda line: None,
) -> Exported:
    """Export a backbone with a method's training step into one bundle file.

    Args:
        backbone: a name, or a library's or a user's with the prefix that says so (export/backbones/backbone.py).
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
        train_from: the first layer that is trained; what lies before it is frozen.
        trainable_blocks: how many blocks are trained, from the last; instead of `train_from`.
        for_x86: also hold the training step in the forms of export/graphs/blocked_kernels.py. Devices with such
            processors try them.
        for_kernels: also hold the training step in the form of export/operators/kernel_nodes.py. Devices with the
            wheel protofleet-kernels try it.
        micro_batch: samples of a part of a batch, for devices whose memory does not hold a whole one; 0 for no such
            graphs.
        half_weights: store the weights as float16, for a method that trains nothing (export/graphs/half_weights.py).
        progress: called with one line before each stage.

    Raises:
        UsageError, MethodError: for arguments out of range.
        ExportError: when the backbone cannot be exported, or its graph disagrees with torch.
        DownloadError: when pretrained weights cannot be fetched.
        BundleError: when the file cannot be written.
    """
    entry = method(method_name)
    tail = train_from is not None or trainable_blocks is not None
    if tail:
        _check_tail(entry, backbone, train_from, trainable_blocks)
    settled = entry.resolve({**(tail_hyper(entry) if tail else {}), **(hyper or {})})
    chosen = _checked_head(entry, head)
    _check_arguments(labels, batch, bundle_version)
    if micro_batch:
        _check_micro(entry, settled, batch, micro_batch)
    if half_weights and entry.trains:
        raise UsageError("--half-weights", expected="a method that trains nothing", got=entry.name, hint="--method ffc")
    _check_shape(input_shape)
    load_dynamo()
    clock = Clock(progress)
    if backbone.startswith(PREFIX):
        graphs = graphs_from_onnx(clock, backbone, entry, input_shape, mean, std, weights, norm)
    else:
        with clock.stage("backbone", f"building {backbone}"):
            network = find_backbone(backbone, input_shape, norm, seed=seed, weights=weights)
            preprocess = Preprocess(*_statistics(network, mean, std))
            cut = None
            if tail:
                tail_start = {"layer": train_from, "blocks": trainable_blocks}
                cut = cut_network(network.net, preprocess, network.input_shape, **tail_start)  # type: ignore[arg-type]
            plan = plan_step(network.net, entry, settled, chosen, len(labels), network.width, cut)
        further = {"for_x86": for_x86, "for_kernels": for_kernels, "micro": micro_batch}
        graphs = graphs_from_torch(clock, network, preprocess, plan, chosen, batch, seed, **further)
    entry.check(settled, len(labels), graphs.width)
    if half_weights:
        with clock.stage("half_weights", "rounding the weights to float16"):
            graphs = _halved(graphs)
    manifest = Manifest(
        schema=SCHEMA,
        version=bundle_version,
        protofleet=_own_version(),
        backbone=backbone,
        provenance=_provenance(graphs, provenance) + "; weights as float16" * half_weights,
        method=entry.name,
        head=chosen,
        hyper=settled,
        labels=tuple(labels),
        features=graphs.width,
        input_shape=graphs.input_shape,
        mean=graphs.mean,
        std=graphs.std,
        batch=batch,
        micro_batch=micro_batch,
        opset=OPSET,
        state=graphs.state,
        members={},
        extractor=_identity(graphs.features, graphs.stored),
        cut=graphs.cut,
    )
    with clock.stage("write", f"writing {out}"):
        packed = pack_params(graphs.stored)
        features = place_weights(graphs.features, packed)
        halves = (graphs.trunk, graphs.tail)
        trunk, tail_graph = (None if graph is None else place_weights(graph, packed) for graph in halves)
        x = probe_images(graphs.input_shape)
        sha256 = write_bundle(
            out,
            manifest,
            features=features,
            train_step=graphs.step,
            params=graphs.stored,
            vectors=Vectors(x, features_of(features, graphs.stored, x)),
            trunk=trunk,
            tail=tail_graph,
            forms=graphs.forms,
            micro=graphs.micro,
            private_key=private_key,
        )
    path = Path(out)
    size = path.stat().st_size
    return Exported(path, sha256, manifest, graphs.ignored, graphs.agreement, size, clock.seconds, graphs.switched_off)


def _identity(features: bytes, stored: Mapping[str, NDArray[np.float32]]) -> str:
    """The extractor's sha256 (hex): the features graph before weights are placed in it, and the backbone's weights."""
    weights = {name: value for name, value in stored.items() if name.startswith("backbone.")}
    return hashlib.sha256(hashlib.sha256(features).digest() + pack_params(weights)).hexdigest()


def _halved(graphs: Graphs) -> Graphs:
    """The same with weights as float16.

    Raises:
        ExportError: a weight is too large, or the graph does not compute what the one before does over such weights.
    """
    stored = rounded(graphs.stored)
    features, x = halved(graphs.features, stored), probe_images(graphs.input_shape)
    whole = {name: value.astype(np.float32) for name, value in stored.items()}
    before, after = (
        features_of(place_weights(graph, pack_params(weights)), weights, x)
        for graph, weights in ((graphs.features, whole), (features, stored))
    )
    if not (error := distance(after, before)) <= TOLERANCE:
        raise ExportError("features.onnx with float16 weights", expected="the features of rounded weights", got=error)
    return replace(graphs, features=features, stored=stored)


def tail_hyper(entry: Method) -> dict[str, float]:
    """Defaults if only the tail of a network is trained: a tenth of the method's learning rate.

    So the first steps do not destroy what the network has learned before.
    """
    return {"lr": float(entry.hyper["lr"].default) / 10.0} if "lr" in entry.hyper else {}


def _check_tail(entry: Method, backbone: str, train_from: str | None, trainable_blocks: int | None) -> None:
    option = "--train-from" if train_from is not None else "--trainable-blocks"
    if train_from is not None and trainable_blocks is not None:
        raise UsageError("--train-from and --trainable-blocks", expected="one of them", got="both")
    if not entry.trains:
        raise UsageError(option, expected="a method that trains", got=entry.name, hint="leaving it out")
    if backbone.startswith(PREFIX):
        raise UsageError(option, expected="a network of torch", got=backbone)


def _check_micro(entry: Method, settled: Mapping[str, Value], batch: int, micro_batch: int) -> None:
    if not entry.trains:
        raise UsageError("--micro-batch", expected="a method that trains", got=entry.name, hint="leaving it out")
    if not 1 <= micro_batch < batch:
        raise UsageError("--micro-batch", expected=f"1 to {batch - 1}, less than --batch", got=micro_batch)
    if not entry.mean_over_samples(settled):
        got = f"{entry.name} as it is set, whose loss is none"
        raise UsageError("--micro-batch", expected="a loss that is a mean over samples", got=got)


def _checked_head(entry: Method, head: Head | None) -> Head:
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
        (1 <= batch <= 4096, "--batch", "1 to 4096", batch),
        (bundle_version >= 0, "--bundle-version", "0 or more", bundle_version),
    )
    for holds, option, expected, got in rules:
        if not holds:
            raise UsageError(option, expected=expected, got=got)
    check_names(labels)


def _statistics(
    network: Backbone, mean: Sequence[float] | None, std: Sequence[float] | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    statistics = (network.mean if mean is None else tuple(mean), network.std if std is None else tuple(std))
    return check_statistics(*statistics, network.input_shape[2])


def _provenance(graphs: Graphs, description: str | None) -> str:
    """How the weights were obtained, in the person's words if there are any; then the facts of foreign weights."""
    parts = [description or graphs.origin]
    parts += [graphs.facts] if graphs.facts and (description is None or "licence" in graphs.facts) else []
    if graphs.switched_off and description is None:
        parts.append(f"off while training: {', '.join(graphs.switched_off)}")
    return "; ".join(parts)


def _own_version() -> str:
    try:
        return version("protofleet")
    except PackageNotFoundError:
        return "unknown"

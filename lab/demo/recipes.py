"""What the demo needs before a fleet can start: data for each device, and a bundle.

1. A small balanced part of the training images is set aside as *public*: no device ever gets one of them.
2. The shared backbone, or each of several, is pretrained on the public images in torch. Four fifths train it, one fifth
   says how well it does. That is how the backbone was obtained, and the manifest and the report say so.
3. It is exported into a bundle, and the other training images are divided unevenly over the devices.

`recipe` holds the settings of each method (`Method.first_run`). They were chosen on Fashion-MNIST training images that
are in neither split of the shipped subset; the test images played no part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from contract.bundle import Bundle, read_bundle
from contract.errors import DataError
from contract.methods import DEFAULT, Value, method
from edge_client.data import LocalData
from export.backbones import build_backbone
from export.build import build_bundle
from lab.data.datasets import DataSet, take
from lab.data.make_subset import draw_balanced
from lab.data.partition import Partition, partition
from lab.engine.local_training import EagerModel, save_weights, train_eager

__all__ = ["BATCH", "Prepared", "Recipe", "channel_statistics", "divide", "export_shared", "pretrain", "recipe"]

BATCH = 16  # a board's peak memory grows with it
PUBLIC_PER_CLASS = 100
_VALIDATION_PER_CLASS_SHARE = 5
_ALPHA = 0.5


@dataclass(frozen=True)
class Recipe:
    """How the demo runs a method.

    Attributes:
        objective: of the public pretraining.
        frozen: whether its head is.
        pretraining: hyper-parameters of it.
        hyper: the bundle's hyper-parameters that differ from the method's defaults.
        rounds: when the user names no number.
    """

    objective: str
    frozen: bool
    pretraining: Mapping[str, Value]
    hyper: Mapping[str, Value] = field(default_factory=dict)
    rounds: int = 5


_CROSS_ENTROPY = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.0, "epochs": 10, "lambda": 0.0}
_SQUARED_ERROR = {"lr": 0.5, "momentum": 0.9, "weight_decay": 1e-5, "epochs": 20}


@dataclass(frozen=True, eq=False)
class Division:
    """The training images, divided.

    Attributes:
        public: indices of the public images.
        shares: indices of each device's images.
        unused: how many images no device got.
    """

    public: NDArray[np.int64]
    shares: list[NDArray[np.int64]]
    unused: int


@dataclass(frozen=True, eq=False)
class Prepared:
    """What the fleet starts from."""

    bundle: Bundle
    bundle_path: Path
    public_accuracy: float


def recipe(name: str) -> Recipe:
    """The recipe of a method: a backbone whose head is frozen is pretrained against it, others by cross-entropy.

    Raises:
        MethodError: when there is no such method.
    """
    found = method(name)
    frozen = found.heads[0] == "frozen"
    objective = found.objective if frozen else method(DEFAULT).objective
    pretraining = _SQUARED_ERROR if frozen else _CROSS_ENTROPY
    return Recipe(str(objective), frozen, pretraining, found.first_run, found.rounds)


def divide(data: DataSet, clients: int, *, seed: int) -> Division:
    """Set the public images aside and divide the others unevenly; no device has all classes.

    Raises:
        DataError: when there are too few images for that many devices.
    """
    labels = data.train.y
    per_class = min(PUBLIC_PER_CLASS, int(np.bincount(labels, minlength=data.classes).min()) // 6)
    if per_class < _VALIDATION_PER_CLASS_SHARE:
        least = 6 * _VALIDATION_PER_CLASS_SHARE
        raise DataError(f"{data.name}", expected=f"at least {least} training images of each class", got="fewer")
    if data.classes < 3:
        raise DataError(f"{data.name}", expected="3 classes or more, since no device has all", got=data.classes)
    public = draw_balanced(labels, per_class, np.random.default_rng(seed))
    rest = np.setdiff1d(np.arange(len(labels)), public)
    spec = Partition("uneven", clients, _ALPHA)
    shares = [rest[part] for part in partition(labels[rest], spec, seed=seed)]
    return Division(public, shares, len(rest) - sum(len(share) for share in shares))


def pretrain(
    data: DataSet,
    public: LocalData,
    recipe: Recipe,
    backbone: str,
    *,
    seed: int,
    on_epoch: Callable[[int, float], None],
) -> tuple[EagerModel, float]:
    """Train a backbone with a head on public images; returns it and its accuracy on the fifth that it did not see."""
    mean, std = channel_statistics(public.x)
    net, width = build_backbone(backbone, data.input_shape, seed=seed)
    model = EagerModel(
        net,
        classes=data.classes,
        features=width,
        mean=mean,
        std=std,
        head="frozen" if recipe.frozen else "local",
        seed=seed,
    )
    held = draw_balanced(
        public.y, len(public) // data.classes // _VALIDATION_PER_CLASS_SHARE, np.random.default_rng(seed)
    )
    seen = take(public, np.setdiff1d(np.arange(len(public)), held))
    epochs, lr = int(recipe.pretraining["epochs"]), float(recipe.pretraining["lr"])
    train_eager(
        model,
        seen,
        recipe.objective,
        recipe.pretraining,
        epochs=epochs,
        batch=BATCH,
        lr=lr,
        seed=seed,
        on_epoch=on_epoch,
    )
    unseen = take(public, held)
    return model, float((model.predict(unseen.x) == unseen.y).mean())


def channel_statistics(x: NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of x / 255 per channel, for images (N, H, W, c), rounded to four digits."""
    scaled = x.reshape(-1, x.shape[-1]).astype(np.float64) / 255.0
    mean, std = scaled.mean(axis=0), np.maximum(scaled.std(axis=0), 1e-3)
    return tuple(round(float(v), 4) for v in mean), tuple(round(float(v), 4) for v in std)


def export_shared(
    model: EagerModel,
    recipe: Recipe,
    name: str,
    backbone: str,
    data: DataSet,
    accuracy: float,
    *,
    public: int,
    out: Path,
    seed: int,
    mark: str = "",
) -> Prepared:
    """Export the pretrained backbone as a bundle of method `name` into `out`, and read it back.

    Args:
        mark: tells the files of several backbones apart.
    """
    weights, target = out / f"backbone{mark}.safetensors", out / f"fleet{mark}.bundle"
    save_weights(model, weights)
    build_bundle(
        backbone=backbone,
        method_name=name,
        labels=data.labels,
        input_shape=data.input_shape,
        out=target,
        weights=weights,
        hyper=dict(recipe.hyper),
        batch=BATCH,
        seed=seed,
        mean=model.mean,
        std=model.std,
        provenance=(
            f"pretrained in this run from random weights (seed {seed}) on {public * 4 // 5} of {public} public images "
            f"of {data.name} that no device holds; {accuracy:.1%} right on the other public images"
        ),
    )
    return Prepared(read_bundle(target), target, accuracy)

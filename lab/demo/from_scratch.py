"""A bundle that is made in the demo: pretraining and export. Needs the extras of the workstation, torch before all.

1. The shared backbone, or each of several, is pretrained in torch on the public images (`lab/demo/story.py`). Four
   fifths train it, one fifth says how well it does. That is how the backbone was obtained: manifest and report say so.
2. It is exported into a bundle, as `protofleet export` would.

`recipe` holds the settings of each method (`Method.first_run`). They were chosen on Fashion-MNIST training images that
are in neither split of the shipped subset; the test images played no part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from contract.bundle import read_bundle
from contract.errors import UsageError
from contract.methods import DEFAULT, Value, method
from edge_client.data import LocalData
from export.backbones import build_backbone
from export.build import build_bundle
from lab.data.datasets import DataSet, take
from lab.data.make_subset import draw_balanced
from lab.demo.story import Images, Prepared, public_classes, rows_of
from lab.engine.local_training import EagerModel, save_weights, train_eager
from lab.reporting.progress import Stage

__all__ = ["BATCH", "Recipe", "channel_statistics", "divided", "export_shared", "prepare", "pretrain", "recipe"]

BATCH = 16  # a board's peak memory grows with it
_VALIDATION_SHARE = 5


@dataclass(frozen=True)
class Recipe:
    """How the demo runs a method.

    Attributes:
        objective: of the public pretraining.
        frozen: whether its head is.
        pretraining: hyper-parameters of it.
        hyper: the bundle's hyper-parameters that differ from the method's defaults.
    """

    objective: str
    frozen: bool
    pretraining: Mapping[str, Value]
    hyper: Mapping[str, Value] = field(default_factory=dict)


_CROSS_ENTROPY = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.0, "epochs": 20, "lambda": 0.0}
_SQUARED_ERROR = {"lr": 0.5, "momentum": 0.9, "weight_decay": 1e-5, "epochs": 20}


def recipe(name: str) -> Recipe:
    """The recipe of a method: a backbone whose head is frozen is pretrained against it, others by cross-entropy.

    Raises:
        MethodError: when there is no such method.
    """
    found = method(name)
    frozen = found.heads[0] == "frozen"
    objective = found.objective if frozen else method(DEFAULT).objective
    pretraining = _SQUARED_ERROR if frozen else _CROSS_ENTROPY
    return Recipe(str(objective), frozen, pretraining, found.first_run)


def divided(data: DataSet, *, seed: int) -> Images:
    """A data set as the demo's images.

    Raises:
        DataError: when it has too few images or classes.
    """
    public, dealt = rows_of(data.train.y, data.classes, seed, data.name)
    unused = len(data.train) - len(public) - len(dealt)
    return Images(data.name, data.labels, take(data.train, public), take(data.train, dealt), data.test, unused)


def prepare(
    backbones: Sequence[str], images: Images, name: str, out: Path, *, seed: int, shown: Stage
) -> list[Prepared]:
    """What each device starts from, in the devices' order; devices with one backbone share one bundle.

    Args:
        backbones: each device's.
        name: of the method.

    Raises:
        UsageError: an unknown backbone, or several whose features differ in width.
    """
    distinct = list(dict.fromkeys(backbones))
    widths = {each: build_backbone(each, images.input_shape, seed=seed)[1] for each in distinct}
    if len(set(widths.values())) > 1:
        got = ", ".join(f"{each} {width}" for each, width in widths.items())
        raise UsageError("--backbone", expected="backbones of one feature width", got=got)
    made = {}
    for number, each in enumerate(distinct, start=1):
        mark, which = (f"-{number}", f" ({each})") if len(distinct) > 1 else ("", "")
        made[each] = _prepare_one(each, images, name, out, mark, which, seed, shown)
    return [made[each] for each in backbones]


def _prepare_one(
    backbone: str, images: Images, name: str, out: Path, mark: str, which: str, seed: int, shown: Stage
) -> Prepared:
    plan = recipe(name)
    text = f"pretraining on {len(images.public):,} public images{which}"
    with shown.part("pretraining", text, int(plan.pretraining["epochs"])) as part:

        def on_epoch(number: int, loss: float) -> None:
            part.at(number, f"loss {loss:.3f}")

        model, accuracy = pretrain(images.public, images.classes, plan, backbone, seed=seed, on_epoch=on_epoch)
        part.say(f"{accuracy:.1%} on unseen ones")
    with shown.part("export", f"exporting the bundle{which}") as part:
        target, weights = out / f"fleet{mark}.bundle", out / f"backbone{mark}.safetensors"
        export_shared(model, plan, name, backbone, images, accuracy, out=target, weights=weights, seed=seed)
        prepared = Prepared(read_bundle(target), target)
        part.say(f"{target.stat().st_size / 1e6:.1f} MB, {prepared.bundle.sha256.hex()[:12]}")
    return prepared


def pretrain(
    public: LocalData,
    classes: int,
    recipe: Recipe,
    backbone: str,
    *,
    seed: int,
    on_epoch: Callable[[int, float], None],
) -> tuple[EagerModel, float]:
    """Train a backbone with a head of so many classes on public images, which need not show all of them; returns it and
    its accuracy on the fifth that it did not see."""
    mean, std = channel_statistics(public.x)
    height, width, channels = public.x.shape[1:]
    net, features = build_backbone(backbone, (height, width, channels), seed=seed)
    head = "frozen" if recipe.frozen else "local"
    model = EagerModel(net, classes=classes, features=features, mean=mean, std=std, head=head, seed=seed)
    fewest = int(np.unique(public.y, return_counts=True)[1].min())
    held = draw_balanced(public.y, fewest // _VALIDATION_SHARE, np.random.default_rng(seed))
    seen = take(public, np.setdiff1d(np.arange(len(public)), held))
    train_eager(
        model,
        seen,
        recipe.objective,
        recipe.pretraining,
        epochs=int(recipe.pretraining["epochs"]),
        batch=BATCH,
        lr=float(recipe.pretraining["lr"]),
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
    images: Images,
    accuracy: float,
    *,
    out: Path,
    weights: Path,
    seed: int,
    by: str = "in this run",
) -> None:
    """Export the pretrained backbone as a bundle of method `name` to `out`.

    Args:
        weights: where the backbone's weights are written on the way.
        by: who did it, for the provenance.
    """
    save_weights(model, weights)
    known = [images.labels[number] for number in public_classes(images.classes)]
    build_bundle(
        backbone=backbone,
        method_name=name,
        labels=images.labels,
        input_shape=images.input_shape,
        out=out,
        weights=weights,
        hyper=dict(recipe.hyper),
        batch=BATCH,
        seed=seed,
        mean=model.mean,
        std=model.std,
        provenance=(
            f"pretrained {by} from random weights (seed {seed}) on four fifths of {len(images.public):,} public images "
            f"of {images.name} that no device holds and that show {len(known)} of its {images.classes} classes "
            f"({', '.join(known)}); {accuracy:.1%} right on the last fifth"
        ),
    )

"""Makes a bundle in the demo: pretraining and export. It needs the workstation's extras, above all torch.

1. The shared backbone, or each of several, is pretrained in torch on the public images (`lab/demo/story.py`). Four
   fifths train it, one fifth measures it. The manifest and the report state this origin.
2. It is exported into a bundle, as by `protofleet export`.

`recipe` gives the settings of each method (`Method.first_run`). They were chosen on Fashion-MNIST training images that
are in neither split of the shipped subset. The test images played no part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.errors import UsageError
from protofleet.contract.methods import DEFAULT, Value, method
from protofleet.edge_client.data import LocalData
from protofleet.export.backbones.backbone import build_backbone
from protofleet.export.bundles.build import build_bundle
from protofleet.lab.data.datasets import DataSet, channel_statistics, take
from protofleet.lab.data.make_subset import draw_balanced
from protofleet.lab.demo.story import Images, Prepared, public_classes, rows_of
from protofleet.lab.reporting.progress import Stage
from protofleet.lab.training.local_training import EagerModel, save_weights, train_eager

__all__ = ["BATCH", "Recipe", "divided", "export_shared", "prepare", "pretrain", "recipe"]

BATCH = 16  # a board's peak memory grows with it
_VALIDATION_SHARE = 5


@dataclass(frozen=True)
class Recipe:
    """The demo's settings for a method.

    Attributes:
        objective: objective of the public pretraining.
        frozen: whether its head is frozen.
        pretraining: hyper-parameters of the pretraining.
        hyper: the bundle's hyper-parameters that differ from the method's defaults.
    """

    objective: str
    frozen: bool
    pretraining: Mapping[str, Value]
    hyper: Mapping[str, Value] = field(default_factory=dict)


_CROSS_ENTROPY = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.0, "epochs": 20, "lambda": 0.0}
_SQUARED_ERROR = {"lr": 0.5, "momentum": 0.9, "weight_decay": 1e-5, "epochs": 20}


def recipe(name: str) -> Recipe:
    """The recipe of a method. A backbone with a frozen head is pretrained against it, others by cross-entropy.

    Raises:
        MethodError: there is no such method.
    """
    named = method(name)
    frozen = named.heads[0] == "frozen"
    objective = named.objective if frozen else method(DEFAULT).objective
    pretraining = _SQUARED_ERROR if frozen else _CROSS_ENTROPY
    return Recipe(str(objective), frozen, pretraining, named.first_run)


def divided(data: DataSet, *, seed: int) -> Images:
    """A data set, divided into the demo's images.

    Raises:
        DataError: the set has too few images or classes.
    """
    public, dealt = rows_of(data.train.y, data.classes, seed, data.name)
    unused = len(data.train) - len(public) - len(dealt)
    return Images(data.name, data.labels, take(data.train, public), take(data.train, dealt), data.test, unused)


def prepare(
    backbones: Sequence[str], images: Images, name: str, out: Path, *, seed: int, shown: Stage
) -> list[Prepared]:
    """The bundle of each device, in their order. Devices with the same backbone share one bundle.

    Args:
        backbones: the backbone of each device.
        name: name of the method.

    Raises:
        UsageError: an unknown backbone, or several whose features differ in width.
    """
    distinct = list(dict.fromkeys(backbones))
    widths = {backbone: build_backbone(backbone, images.input_shape, seed=seed)[1] for backbone in distinct}
    if len(set(widths.values())) > 1:
        got = ", ".join(f"{backbone} {width}" for backbone, width in widths.items())
        raise UsageError("--backbone", expected="backbones of one feature width", got=got)
    prepared = {}
    for number, backbone in enumerate(distinct, start=1):
        mark, which = (f"-{number}", f" ({backbone})") if len(distinct) > 1 else ("", "")
        prepared[backbone] = _prepare_one(backbone, images, name, out, mark, which, seed, shown)
    return [prepared[backbone] for backbone in backbones]


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
    """Train a backbone with a head of `classes` classes on public images, which may show fewer classes.

    Returns:
        the backbone, and its accuracy on the fifth of the images that did not train it.
    """
    mean, std = channel_statistics(public.x)
    height, width, channels = public.x.shape[1:]
    net, features = build_backbone(backbone, (height, width, channels), seed=seed)
    head = "frozen" if recipe.frozen else "local"
    model = EagerModel(net, classes=classes, features=features, mean=mean, std=std, head=head, seed=seed)
    fewest = int(np.unique(public.y, return_counts=True)[1].min())
    validation_rows = draw_balanced(public.y, fewest // _VALIDATION_SHARE, np.random.default_rng(seed))
    training = take(public, np.setdiff1d(np.arange(len(public)), validation_rows))
    train_eager(
        model,
        training,
        recipe.objective,
        recipe.pretraining,
        epochs=int(recipe.pretraining["epochs"]),
        batch=BATCH,
        lr=float(recipe.pretraining["lr"]),
        seed=seed,
        on_epoch=on_epoch,
    )
    unseen = take(public, validation_rows)
    return model, float((model.predict(unseen.x) == unseen.y).mean())


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
        weights: file for the backbone's weights, written on the way.
        by: the command, for the provenance.
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

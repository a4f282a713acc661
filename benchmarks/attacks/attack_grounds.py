"""What the attacks of benchmarks/attacks/prototype_attacks.py are tried on: images, their unit features, and whose
they are.

    fashion   Fashion-MNIST through the `small_cnn` of the demo's shipped bundle (D = 128, ONNX Runtime)
    cifar     CIFAR-10 through EfficientNet-Lite0, pretrained on ImageNet (D = 1,280;
    benchmarks/heads/frozen_features.py)

Devices hold training images; the attacker's public images are others, of the test split where that is enough. No image
that the shipped backbone was trained on is in either part.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.attacks.attack_releases import Part
from benchmarks.heads import frozen_features
from protofleet.contract.heads.sphere import unit_rows
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.data.samples import pixel_hash
from protofleet.edge_client.training.compiled_graphs import CompiledGraphs
from protofleet.lab.data.datasets import load_dataset, take
from protofleet.lab.demo.shipped import read_images, shipped_bundle

__all__ = ["GROUNDS", "Ground"]

CIFAR_TARGETS = 16_000
FASHION_TARGETS = 45_000
IMAGE_PX = 128


@dataclass(frozen=True, eq=False)
class Ground:
    """A data set through a backbone.

    Attributes:
        targets: what devices hold, and candidates that they do not.
        public: the attacker's.
    """

    name: str
    targets: Part
    public: Part

    @property
    def classes(self) -> int:
        return int(self.public.y.max()) + 1

    @property
    def width(self) -> int:
        return self.public.z.shape[1]


def fashion(data: Path, cache: Path) -> Ground:
    """Fashion-MNIST's training images as targets, its test images as the attacker's."""
    found, extractor = load_dataset(str(data / "fashion_mnist")), CompiledGraphs(shipped_bundle()).shared_extractor()
    pretrained_on = {pixel_hash(image) for image in read_images().public.x}

    def part(samples: LocalData) -> Part:
        kept = take(samples, np.array([pixel_hash(image) not in pretrained_on for image in samples.x]))
        return Part(kept.x, unit_rows(extractor.features(kept.x).astype(np.float64)), kept.y)

    return Ground(
        "Fashion-MNIST, small_cnn, D = 128", part(take(found.train, np.arange(FASHION_TARGETS))), part(found.test)
    )


def cifar(data: Path, cache: Path) -> Ground:
    """16,000 of CIFAR-10's training images as targets; 4,000 others and 4,000 test images as the attacker's."""
    features = frozen_features.pretrained(str(data / "cifar10"), IMAGE_PX, cache)
    found, rng = load_dataset(str(data / "cifar10")), np.random.default_rng(0)  # in the order of those features
    sizes = (frozen_features.TRAIN, frozen_features.TEST)
    train, test = (
        take(part, rng.permutation(len(part))[:size])
        for part, size in zip((found.train, found.test), sizes, strict=True)
    )
    assert np.array_equal(train.y, features.fit[1])
    assert np.array_equal(test.y, features.test[1])
    cut = CIFAR_TARGETS
    public = [np.concatenate(pair) for pair in ((train.x[cut:], test.x), (features.fit[0][cut:], features.test[0]))]
    return Ground(
        "CIFAR-10, EfficientNet-Lite0, D = 1,280",
        Part(train.x[:cut], features.fit[0][:cut], train.y[:cut]),
        Part(public[0], public[1], np.concatenate([train.y[cut:], test.y])),
    )


GROUNDS = {"fashion": fashion, "cifar": cifar}

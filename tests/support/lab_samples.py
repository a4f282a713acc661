"""Small real data for the lab's tests: images of the shipped Fashion-MNIST subset, and bundles made from it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import shared

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.edge_client.data import LocalData
from protofleet.lab.algorithms.head_calibration import client_gram
from protofleet.lab.data.datasets import SHIPPED, DataSet, load_dataset, take
from protofleet.lab.data.make_subset import draw_balanced
from protofleet.lab.training.local_training import EagerModel

LABELS = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


@cache
def shipped() -> DataSet:
    return load_dataset("fashion_mnist_subset")


def some(split: LocalData, per_class: int, seed: int = 0) -> LocalData:
    """A balanced few of a split, shuffled."""
    rng = np.random.default_rng(seed)
    return take(split, rng.permutation(draw_balanced(split.y, per_class, rng)))


def shares() -> list[LocalData]:
    """Three devices with different classes and sizes."""
    data = some(shipped().train, 30)
    held = ((0, 1, 2, 3), (2, 3, 4, 5, 6), (6, 7, 8, 9))
    return [
        take(data, np.flatnonzero(np.isin(data.y, classes))[:limit])
        for classes, limit in zip(held, (90, 60, 75), strict=True)
    ]


def small_directory(root: Path, per_class: int = 60, test_per_class: int = 10) -> Path:
    """The shipped subset, fewer images, as a user's own parquet directory."""
    root.mkdir(parents=True, exist_ok=True)
    for split, few in (("train", per_class), ("test", test_per_class)):
        table = pq.read_table(SHIPPED["fashion_mnist_subset"] / f"{split}.parquet")
        chosen = draw_balanced(table["label"].to_numpy(), few, np.random.default_rng(0))
        pq.write_table(table.take(chosen), root / f"{split}.parquet")
    return root


def summed(model: EagerModel, held: list[LocalData]) -> FeatureGram:
    """What FFC's server has of these clients."""
    total = FeatureGram.zero(*model.head_weight.shape)
    for share in held:
        total = total.merge(client_gram(model.features(share.x), share.y, total.classes))
    return total


def bundle_of(path: Path, method: str, backbone: str, **hyper: object) -> Bundle:
    """A bundle of random weights for the shipped images, in batches of 16."""
    shared.export_to(
        backbone=backbone,
        method_name=method,
        labels=shipped().labels,
        input_shape=(28, 28, 1),
        out=path,
        hyper={"lr": 0.01, "epochs": 1, **hyper},
        batch=16,
        seed=3,
    )
    return read_bundle(path)

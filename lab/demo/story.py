"""The demo's images: the public ones, those of each device, and the test images.

1. *Public* images show only every other class. The bundle's backbone is pretrained on them, and no device gets one.
   The colour photos (`photos.py`) have none: their extractor comes with a package.
2. Each device *holds* a few classes, and every class is on some device. So neither the maker of the bundle nor any
   device has seen all classes.
3. All devices are tested on the *test* images of all classes.

The draw is balanced, and small enough that a demo takes seconds: at most `DEALT_PER_CLASS` images of each class are
dealt, whatever the data set has. How many, and which classes are public, was chosen on Fashion-MNIST training images
that are in neither split of the shipped subset (`benchmarks/heads/demo_story.py`, decision 108).

Nothing here needs more than numpy: flwr-datasets, which divides data in the lab, would bring pandas and pyarrow into
the demo's installation.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.errors import DataError
from protofleet.edge_client.data import LocalData

if TYPE_CHECKING:
    from protofleet.lab.demo.photos import PhotoFiles

__all__ = [
    "DEALT_PER_CLASS",
    "PUBLIC_PER_CLASS",
    "Images",
    "Prepared",
    "deal",
    "dealt_rows",
    "held_classes",
    "public_classes",
    "rows_of",
]

PUBLIC_PER_CLASS = 200
DEALT_PER_CLASS = 200
_LEAST_PER_CLASS = 15  # of which a third is public: enough to keep a fifth of those for validation
_HELD_SHARE = 0.3


@dataclass(frozen=True, eq=False)
class Images:
    """A data set, divided as the demo needs it.

    Attributes:
        name: name of the data set.
        labels: C class names.
        public: images of `public_classes` for the pretraining of the backbone; None where it was trained elsewhere.
        dealt: images that are divided over the devices.
        test: test images of all classes.
        unused: training images that are neither public nor dealt.
        held_share: share of the classes that a device holds, where that leaves no class without a device.
        files: the files that `dealt` and `test` were decoded from; None where they are arrays.
    """

    name: str
    labels: tuple[str, ...]
    public: LocalData | None
    dealt: LocalData
    test: LocalData
    unused: int
    held_share: float = _HELD_SHARE
    files: tuple[PhotoFiles, ...] | None = None

    @property
    def classes(self) -> int:
        """C."""
        return len(self.labels)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(H, W, c)."""
        height, width, channels = self.test.x.shape[1:]
        return height, width, channels

    @property
    def new(self) -> NDArray[np.bool_]:
        """(C,) mask of the classes that the public images do not show: all, where there are none."""
        if self.public is None:
            return np.ones(self.classes, dtype=bool)
        return ~np.isin(np.arange(self.classes), public_classes(self.classes))


@dataclass(frozen=True, eq=False)
class Prepared:
    """A bundle for a device, and its path."""

    bundle: Bundle
    path: Path


def public_classes(classes: int) -> NDArray[np.int64]:
    """The class numbers that the public images show: every other class."""
    return np.arange(0, classes, 2)


def rows_of(labels: NDArray[np.int64], classes: int, seed: int, name: str) -> tuple[NDArray[np.int64], ...]:
    """The public and the dealt training images: two rising arrays of indices into `labels` (N,).

    Raises:
        DataError: there are fewer than three classes, or too few images of one.
    """
    if classes < 3:
        raise DataError(name, expected="3 classes or more, since no device has all", got=classes)
    fewest = int(np.bincount(labels, minlength=classes).min())
    if fewest < _LEAST_PER_CLASS:
        raise DataError(name, expected=f"at least {_LEAST_PER_CLASS} training images of each class", got=fewest)
    rng, public, dealt = np.random.default_rng(seed), [], []
    known = set(public_classes(classes).tolist())
    for number in range(classes):
        order = rng.permutation(np.flatnonzero(labels == number))
        taken = min(PUBLIC_PER_CLASS, fewest // 3) if number in known else 0
        public.append(order[:taken])
        dealt.append(order[taken : taken + DEALT_PER_CLASS])
    return np.sort(np.concatenate(public)), np.sort(np.concatenate(dealt))


def held_classes(classes: int, devices: int, seed: int, share: float = _HELD_SHARE) -> list[NDArray[np.int64]]:
    """The classes that each device holds.

    All hold the same number: three of ten, or more where that is needed for every class to be on some device. It is
    never all of them.
    """
    per_device = max(2, round(share * classes), -(-classes // devices))
    per_device = min(per_device, classes - 1)
    order = np.random.default_rng(seed).permutation(classes)
    around = np.resize(order, devices * per_device)  # (devices · each,) the order again and again
    return [np.sort(part) for part in around.reshape(devices, per_device)]


def deal(images: Images, devices: int, seed: int) -> list[LocalData]:
    """Each device's images, as `dealt_rows` divides them."""
    return [LocalData(images.dealt.x[rows], images.dealt.y[rows]) for rows in dealt_rows(images, devices, seed)]


def dealt_rows(images: Images, devices: int, seed: int) -> list[NDArray[np.int64]]:
    """Rows of the dealt images, rising, for each device. Every class is divided evenly over the devices that hold it.

    With one device only, there are classes that no device holds. They are not dealt.

    Raises:
        DataError: a device would have no image of one of its classes.
    """
    held_by_device = held_classes(images.classes, devices, seed, images.held_share)
    rng = np.random.default_rng(seed)
    parts: list[list[NDArray[np.int64]]] = [[] for _ in held_by_device]
    for number in range(images.classes):
        owners = [device for device, numbers in enumerate(held_by_device) if number in numbers]
        rows = rng.permutation(np.flatnonzero(images.dealt.y == number))
        if len(rows) < len(owners):
            raise DataError(
                f"{images.name}: {len(rows)} images of {images.labels[number]} for {len(owners)} devices",
                expected="one for each",
                got="fewer",
                hint="fewer --clients",
            )
        for owner, part in zip(owners, np.array_split(rows, max(len(owners), 1)), strict=False):
            parts[owner].append(part)
    return [np.sort(np.concatenate(part)) for part in parts]

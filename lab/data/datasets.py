"""Data sets for the lab and the demo: a name or a path → uint8 arrays, integer labels, class names.

Three kinds of name, tried in this order:

1. `fashion_mnist_subset`, which ships with the package (see `lab/data/fashion_mnist/README.md`);
2. a path: whatever a device reads (docs/data.md), by the device's own code (`edge_client/data`);
3. a data set of the Hugging Face Hub, through `datasets.load_dataset`, which keeps its own cache (`hub.py`).

`A+B` joins several sets with the same number of classes into one. It has the shape and the class names of the first,
and knows the source of each sample.

The test samples are the split `test`, or else `valid`. A set without both holds out a tenth of every class.

All images get one shape: the requested one; else their own, if all have the same and it is small; else 64 x 64.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import DataError, near_names
from protofleet.edge_client.data import UNLABELLED, LocalData
from protofleet.edge_client.data.decode import image_shape
from protofleet.edge_client.data.listing import Listing
from protofleet.edge_client.data.load import read_images
from protofleet.edge_client.data.sources import list_source
from protofleet.edge_client.data.splits import train_and_held_rows

__all__ = ["SHIPPED", "DataSet", "Outline", "channel_statistics", "load_dataset", "outline", "take"]

logger = logging.getLogger(__name__)

SHIPPED = {"fashion_mnist_subset": Path(__file__).parent / "fashion_mnist"}
_TESTED_SHARE = 0.1
_SIDE = 64
_LARGEST_SIDE = 256  # larger ones are photos, which no network of the lab takes as they are

Shape = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class DataSet:
    """A named data set with its training and test split.

    Attributes:
        sources: (N,) number of the set of each training sample, from 0; None for a single set.
    """

    name: str
    labels: tuple[str, ...]
    train: LocalData
    test: LocalData
    sources: NDArray[np.int64] | None = None

    @property
    def classes(self) -> int:
        """C."""
        return len(self.labels)

    @property
    def input_shape(self) -> Shape:
        """(H, W, c)."""
        height, width, channels = self.train.x.shape[1:]
        return height, width, channels


@dataclass(frozen=True)
class Outline:
    """A data set without its images: C, (H, W, c), and the number of training samples."""

    classes: int
    input_shape: Shape
    samples: int


def outline(name: str) -> Outline:
    """The outline of a shipped data set. At most one image is decoded.

    Raises:
        DataError: it does not ship.
    """
    if name not in SHIPPED:
        raise DataError(f"data {name}", expected=f"what ships: {', '.join(SHIPPED)}", got="another")
    listing = _listing(name)
    labels, names = _classes(listing)
    train, _ = train_and_held_rows(replace(listing, labels=labels, names=names), _TESTED_SHARE, seed=0)
    return Outline(len(names), _shape(listing, train[:1]), len(train))


def take(data: LocalData, indices: NDArray[np.integer] | NDArray[np.bool_]) -> LocalData:
    """The samples at `indices`, in this order."""
    return LocalData(data.x[indices], data.y[indices])


def load_dataset(name: str, input_shape: Shape | None = None) -> DataSet:
    """Load a data set by its shipped name, its path, or its name on the Hub.

    Args:
        input_shape: (H, W, c) that images are resized to.

    Raises:
        DataError: there is no such set, the Hub is out of reach, or the samples cannot be used.
    """
    if "+" in name and not Path(name).exists():
        return _several(name, input_shape)
    listing = _listing(name)
    labels, names = _classes(listing)
    listing = replace(listing, labels=labels, names=names)
    train, test = train_and_held_rows(listing, _TESTED_SHARE, seed=0)
    train, test = train[labels[train] != UNLABELLED], test[labels[test] != UNLABELLED]
    shape = input_shape or _shape(listing, np.concatenate([train, test]))
    parts = []
    for split, rows in (("train", train), ("test", test)):
        if not len(rows):
            raise DataError(f"{name}: images to {split} with", expected="one at least, with a label", got="none")
        x, kept = read_images(listing, rows, shape)
        parts.append(LocalData(x, labels[kept]))
    return DataSet(Path(name).resolve().name if Path(name).exists() else name, names, *parts)


def _several(name: str, input_shape: Shape | None) -> DataSet:
    """Load and join the sets of `A+B`."""
    first, *others = name.split("+")
    loaded = [load_dataset(first, input_shape)]
    loaded += [load_dataset(other, loaded[0].input_shape) for other in others]
    for dataset in loaded:
        if dataset.classes != loaded[0].classes:
            raise DataError(
                f"{name}: {dataset.name}", expected=f"{loaded[0].classes} classes, as the first", got=dataset.classes
            )
    train, test = (
        LocalData(np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts]))
        for parts in ([dataset.train for dataset in loaded], [dataset.test for dataset in loaded])
    )
    sources = np.repeat(np.arange(len(loaded)), [len(dataset.train) for dataset in loaded])
    return DataSet("+".join(dataset.name for dataset in loaded), loaded[0].labels, train, test, sources)


def _listing(name: str) -> Listing:
    if name in SHIPPED:
        return list_source(SHIPPED[name])
    if Path(name).exists():
        return list_source(name)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise DataError(
            f"no data at {name}",
            expected="a folder of images, a .csv, a .npz or parquet",
            got="no such directory",
            hint="--data " + next(iter(SHIPPED)),
        )
    from protofleet.lab.data.hub import list_hub

    return list_hub(name, near_names(name, SHIPPED) + ", or a path")


def _classes(listing: Listing) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """(N,) class numbers, and the class names in the source's order, or else in alphabetical order."""
    labels, names = listing.labels, listing.names
    if names is None:
        names = tuple(str(number) for number in range(int(labels.max()) + 1))
    low, high = int(labels.min()), int(labels.max())
    if low < UNLABELLED or high >= len(names):
        raise DataError(
            f"{listing.where}: a label is out of range",
            expected=f"0 to {len(names) - 1}",
            got=low if low < UNLABELLED else high,
        )
    if listing.own_numbers:
        return labels, names
    ordered = sorted(name for name in names if name != "unlabelled")
    places = {name: place for place, name in enumerate(ordered)}
    numbers = np.array([*(places.get(name, UNLABELLED) for name in names), UNLABELLED], np.int64)
    return numbers[labels], tuple(ordered)


def _shape(listing: Listing, rows: NDArray[np.int64]) -> Shape:
    """The common shape of these images, or one to resize them to."""
    if isinstance(listing.images, np.ndarray):
        height, width, channels = listing.images.shape[1:]
        return height, width, channels
    shapes = set(_shapes(listing, np.sort(rows)))
    if not shapes:
        return _SIDE, _SIDE, 3  # none can be read, and reading says so
    if len(shapes) == 1 and max(shape := next(iter(shapes))) <= _LARGEST_SIDE:
        return shape
    colours = max(shape[2] for shape in shapes)
    sizes = {shape[:2] for shape in shapes}
    if len(sizes) == 1 and max(size := next(iter(sizes))) <= _LARGEST_SIDE:
        return (*size, colours)
    sizes_text = f"images of {len(sizes):,} sizes are resized to {_SIDE} x {_SIDE} (--input for another size)"
    logger.info(f"{listing.where}: {sizes_text}")
    return _SIDE, _SIDE, colours


def _shapes(listing: Listing, rows: NDArray[np.int64]) -> Iterator[Shape]:
    assert not isinstance(listing.images, np.ndarray)
    for source in listing.images.read(rows):
        shape = image_shape(source)
        if shape is not None:
            yield shape


def channel_statistics(x: NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of x / 255 per channel, for images (N, H, W, c), rounded to four digits."""
    scaled = x.reshape(-1, x.shape[-1]).astype(np.float64) / 255.0
    mean, std = scaled.mean(axis=0), np.maximum(scaled.std(axis=0), 1e-3)
    return tuple(round(float(v), 4) for v in mean), tuple(round(float(v), 4) for v in std)

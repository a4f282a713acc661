"""Data sets for the lab and the demo: a name or a path → uint8 arrays, integer labels, class names.

Three kinds of name, tried in this order:

1. `fashion_mnist_subset`, which ships with the package (see `lab/data/fashion_mnist/README.md`);
2. a path: whatever a device reads (docs/data.md), by the device's own code (`edge_client/data`);
3. a data set of the Hugging Face Hub, through `datasets.load_dataset`, which keeps its own cache (`hub.py`).

`A+B` joins several sets into one. It has the shape of the first, and knows the source of each sample. A class is found
by its name, and has all that any set has; a set that only numbers its classes has the numbers of the first that names
them.

The test samples are the split `test`, or else `valid`. A set without both holds out a tenth of every class.

All images get one shape: the requested one; else their own, if all have the same and it is small; else 64 x 64.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
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
    names = _joint_names(name, loaded)
    places = {label: place for place, label in enumerate(names)}
    trains, tests = [], []
    for dataset in loaded:
        own = range(dataset.classes) if _numbered(dataset.labels) else [places[label] for label in dataset.labels]
        numbers = np.array(own, np.int64)
        trains.append(LocalData(dataset.train.x, numbers[dataset.train.y]))
        tests.append(LocalData(dataset.test.x, numbers[dataset.test.y]))
    train, test = (
        LocalData(np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts]))
        for parts in (trains, tests)
    )
    sources = np.repeat(np.arange(len(loaded)), [len(dataset.train) for dataset in loaded])
    return DataSet("+".join(dataset.name for dataset in loaded), names, train, test, sources)


def _joint_names(name: str, loaded: Sequence[DataSet]) -> tuple[str, ...]:
    """The class names of all sets, those of the first before what others add; a line says where sets differ.

    Raises:
        DataError: a set that only numbers its classes has more than the names of the others.
    """
    named = [dataset for dataset in loaded if not _numbered(dataset.labels)]
    if not named:  # all by number
        return max((dataset.labels for dataset in loaded), key=len)
    names = tuple(dict.fromkeys(label for dataset in named for label in dataset.labels))
    for dataset in loaded:
        if _numbered(dataset.labels) and dataset.classes > named[0].classes:
            expected = f"numbers of the {named[0].classes} classes of {named[0].name}"
            raise DataError(f"{name}: {dataset.name}", expected=expected, got=f"{dataset.classes} classes")
    if any(set(dataset.labels) != set(names) for dataset in named):
        each = ", ".join(f"{dataset.name} has {dataset.classes}" for dataset in loaded)
        logger.info(f"{name}: {len(names)} classes in all, found by their names; {each}")
    return names


def _numbered(labels: Sequence[str]) -> bool:
    """Whether classes are called 0 to C - 1, as where a set has no names for them."""
    return all(label == str(number) for number, label in enumerate(labels))


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

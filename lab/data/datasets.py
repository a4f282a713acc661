"""Data sets for the lab and the demo: a name or a path → uint8 arrays, integer labels, class names.

Three kinds of name, tried in this order:

1. `fashion_mnist_subset`, which ships with the package (see `lab/data/fashion_mnist/README.md`);
2. a path: whatever a device reads (docs/data.md), by the device's own code (`edge_client/data`);
3. a data set of the Hugging Face Hub, through `datasets.load_dataset`, which keeps its own cache (`hub.py`).

`A+B` is several of them, of the same number of classes and one shape, that of the first: one set, which knows of each
sample where it is from. The names of classes are the first's.

A set is tested with its split `test`, or else `valid`; where it declares neither, with a tenth that is held out of
every class. A network takes images of one shape: the one that is asked for; else their own, if all have the same and
it is small; else 64 x 64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from contract.errors import DataError, near_names
from edge_client.data import UNLABELLED, LocalData
from edge_client.data.decode import image_shape
from edge_client.data.listing import Listing
from edge_client.data.load import read_images
from edge_client.data.sources import list_source
from edge_client.data.splits import train_and_held_rows

__all__ = ["SHIPPED", "DataSet", "Outline", "load_dataset", "outline", "take"]

SHIPPED = {"fashion_mnist_subset": Path(__file__).parent / "fashion_mnist"}
_TESTED_SHARE = 0.1
_SIDE = 64
_LARGEST_SIDE = 256  # larger ones are photos, which no network of the lab takes as they are

Shape = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class DataSet:
    """A named data set with its training and test split.

    Attributes:
        sources: (N,) which of several sets each training sample is of, from 0; None for a single one.
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
    """A data set without its images: C, (H, W, c), and how many training samples it has."""

    classes: int
    input_shape: Shape
    samples: int


def outline(name: str) -> Outline:
    """Of a data set that ships, without decoding more than one image.

    Raises:
        DataError: it does not ship.
    """
    if name not in SHIPPED:
        raise DataError(f"data {name}", expected=f"what ships: {', '.join(SHIPPED)}", got="another")
    listing = _listing(name, lambda line: None)
    labels, names = _classes(listing)
    train, _ = train_and_held_rows(replace(listing, labels=labels, names=names), _TESTED_SHARE, seed=0)
    return Outline(len(names), _shape(listing, train[:1], lambda line: None), len(train))


def take(data: LocalData, indices: NDArray[np.integer] | NDArray[np.bool_]) -> LocalData:
    """Some of the samples, in the order of `indices`."""
    return LocalData(data.x[indices], data.y[indices])


def load_dataset(
    name: str, input_shape: Shape | None = None, *, log: Callable[[str], None] = lambda line: None
) -> DataSet:
    """Load a data set by its shipped name, its path, or its name on the Hub.

    Args:
        input_shape: (H, W, c) that images are resized to.
        log: takes a line about images that are left out or resized.

    Raises:
        DataError: when there is no such set, the Hub is out of reach, or its samples cannot be used.
    """
    if "+" in name and not Path(name).exists():
        return _several(name, input_shape, log)
    listing = _listing(name, log)
    labels, names = _classes(listing)
    listing = replace(listing, labels=labels, names=names)
    train, test = train_and_held_rows(listing, _TESTED_SHARE, seed=0)
    train, test = train[labels[train] != UNLABELLED], test[labels[test] != UNLABELLED]
    shape = input_shape or _shape(listing, np.concatenate([train, test]), log)
    parts = []
    for split, rows in (("train", train), ("test", test)):
        if not len(rows):
            raise DataError(f"{name}: images to {split} with", expected="one at least, with a label", got="none")
        x, kept = read_images(listing, rows, shape, log=log)
        parts.append(LocalData(x, labels[kept]))
    return DataSet(Path(name).resolve().name if Path(name).exists() else name, names, *parts)


def _several(name: str, input_shape: Shape | None, log: Callable[[str], None]) -> DataSet:
    """Every one of `A+B`, one after another."""
    first, *others = name.split("+")
    found = [load_dataset(first, input_shape, log=log)]
    found += [load_dataset(other, found[0].input_shape, log=log) for other in others]
    for each in found:
        if each.classes != found[0].classes:
            raise DataError(
                f"{name}: {each.name}", expected=f"{found[0].classes} classes, as the first", got=each.classes
            )
    train, test = (
        LocalData(np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts]))
        for parts in ([each.train for each in found], [each.test for each in found])
    )
    sources = np.repeat(np.arange(len(found)), [len(each.train) for each in found])
    return DataSet("+".join(each.name for each in found), found[0].labels, train, test, sources)


def _listing(name: str, log: Callable[[str], None]) -> Listing:
    if name in SHIPPED:
        return list_source(SHIPPED[name], log)
    if Path(name).exists():
        return list_source(name, log)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise DataError(
            f"no data at {name}",
            expected="a folder of images, a .csv, a .npz or parquet",
            got="no such directory",
            hint="--data " + next(iter(SHIPPED)),
        )
    from lab.data.hub import list_hub

    return list_hub(name, near_names(name, SHIPPED) + ", or a path")


def _classes(listing: Listing) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """(N,) class numbers, and the classes' names: the source's own order, or that of the alphabet."""
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


def _shape(listing: Listing, rows: NDArray[np.int64], log: Callable[[str], None]) -> Shape:
    """The shape that all of these images have, or one to resize them to."""
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
    log(f"{listing.where}: images of {len(sizes):,} sizes are resized to {_SIDE} x {_SIDE} (--input for another size)")
    return _SIDE, _SIDE, colours


def _shapes(listing: Listing, rows: NDArray[np.int64]) -> Iterator[Shape]:
    assert not isinstance(listing.images, np.ndarray)
    for source in listing.images.read(rows):
        shape = image_shape(source)
        if shape is not None:
            yield shape

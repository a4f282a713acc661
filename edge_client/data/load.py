"""Read the device's own samples: once, checked once.

- `load_data` lists what is at a path and takes the rows that training or testing wants. It decodes them, or takes them
  from the cache. It gives one `LocalData` that fits the bundle, whatever the source.
- `load_held_out` gives two: what to train on and what to test with.
- `from_arrays` takes samples in memory, and `hold_back` divides them.

With `Draws`, `load_held_out` and `hold_back` look at each sample alone. Which side it is on, and whether the bundle can
use it, follows from no other sample. A sample that the bundle cannot use is left out by itself.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.contract.console.logs import Private
from protofleet.contract.errors import DataError
from protofleet.edge_client.data.draws import Draws
from protofleet.edge_client.data.listing import Listing
from protofleet.edge_client.data.npz import class_numbers, pixels
from protofleet.edge_client.data.samples import (
    UNLABELLED,
    UNUSABLE,
    LeavesOut,
    LocalData,
    Purpose,
    class_number,
    pixel_hash,
)
from protofleet.edge_client.data.sources import list_source
from protofleet.edge_client.data.splits import (
    declared_rows,
    fewer_rows,
    held_out,
    ranks_of,
    rows_each_alone,
    train_and_held_rows,
)

if TYPE_CHECKING:
    from protofleet.edge_client.data.learned import Learned

__all__ = ["from_arrays", "hold_back", "load_data", "load_held_out", "read_images"]

logger = logging.getLogger(__name__)

Rows = NDArray[np.int64]
Shape = tuple[int, int, int]
_MANY = 1_000  # images whose decoding is announced
_WITHOUT_CACHE_BYTES = 64 << 20  # of pixels that are held in memory where the disk refuses


def load_data(
    path: str | Path,
    manifest: Manifest,
    *,
    purpose: Purpose = "train",
    cache: Path | None = None,
    learned: Learned | None = None,
) -> LocalData:
    """The samples at `path`, as the bundle's shape and classes ask for them; those without a label last.

    Args:
        path: an image folder, a CSV of paths, a `.npz`, a `.parquet` or a directory of such (docs/data.md).
        purpose: `train` or `test` picks the split where the source declares splits; a test set has labels only.
        cache: the directory that keeps decoded images; None to decode them into memory.
        learned: examples beside them, which train. A sample at `path` that is among these is left out, so that nothing
            may be left of a test set.

    Raises:
        DataError: one line: what is wrong with which file, and what was expected.
    """
    listing = _with_bundle_classes(list_source(path), manifest)
    rows = declared_rows(listing, purpose)
    listing, rows, leaves_out = _with_learned(listing, rows, rows[:0], manifest, learned, purpose)
    x, kept = read_images(listing, rows, manifest.input_shape, name=purpose, cache=cache, leaves_out=leaves_out)
    data = LocalData(x, listing.labels[kept])
    if leaves_out is not None and purpose == "test" and not len(data):
        return data
    return _checked(data, manifest, listing.where, purpose)


def load_held_out(
    path: str | Path,
    manifest: Manifest,
    *,
    share: float = 0.1,
    seed: int = 0,
    least: int = 1,
    most: int | None = None,
    cache: Path | None = None,
    learned: Learned | None = None,
    draws: Draws | None = None,
) -> tuple[LocalData, LocalData]:
    """The samples at `path` to train on, and those that are held back to test with.

    Held back is the declared split `test`, or else `valid`. A source without these splits gives `share` of every class,
    chosen by the samples' names (`splits.py`). This choice is the same at every start, and nearly the same when samples
    are added. Both results are views of one array, so a large set is copied nowhere.

    Args:
        share, seed: of the hold-out.
        least: a class with fewer samples has none held back.
        most: at most so many samples in all. Samples without a label are left out first. Then both sides keep the same
            share of every class, and at least one sample of each class that they have. No other sample is decoded. None
            for all.
        path, cache, learned: as of `load_data`; what is learned does not change which others are held back.
        draws: divide by each sample alone (`splits.rows_each_alone`), instead of by classes; `seed` and `least` then
            mean nothing.

    Returns:
        (to train on, held back); the latter may be empty, and with `draws` the former.

    Raises:
        DataError, UsageError: as `load_data`, and where `share` is out of range.
    """
    if draws is None:
        listing = _with_bundle_classes(list_source(path), manifest)
        train, held_rows = train_and_held_rows(listing, share, seed, least=least)
    else:
        listing = _usable(list_source(path, each_alone=True), manifest)
        train, held_rows = rows_each_alone(listing, share, draws)
    if most is not None and len(train) + len(held_rows) > most:
        labelled = train[listing.labels[train] >= 0]
        fraction, whole = min(most / (len(labelled) + len(held_rows)), 1.0), len(train) + len(held_rows)
        train, held_rows = (fewer_rows(listing, side, fraction, seed) for side in (labelled, held_rows))
        logger.info(f"{len(train) + len(held_rows):,} of {whole:,} photos are looked at")
    listing, rows, leaves_out = _with_learned(listing, train, held_rows, manifest, learned, "train")
    x, kept = read_images(listing, rows, manifest.input_shape, name="train", cache=cache, leaves_out=leaves_out)
    trained = int((~np.isin(kept, held_rows, assume_unique=True)).sum())  # rows that could be read keep their order
    first = LocalData(x[:trained], listing.labels[kept[:trained]])
    last = LocalData(x[trained:], listing.labels[kept[trained:]])
    if draws is None or not len(last):
        first = _checked(first, manifest, listing.where, "train")
    return first, _checked(last, manifest, listing.where, "test") if len(last) else last


def _with_learned(
    listing: Listing, train: Rows, held_rows: Rows, manifest: Manifest, learned: Learned | None, purpose: Purpose
) -> tuple[Listing, Rows, LeavesOut | None]:
    """A source with the learned examples beside it, the order of its rows, and which of its images are left out.

    The order is: rows to train on that have a label, the learned examples, rows without a label, rows held back.
    """
    if learned is None or not len(learned):
        return listing, np.concatenate([train, held_rows]), None
    own = train[:0]
    if purpose == "train":
        listing, own = learned.beside(listing, manifest)
    else:
        listing = replace(listing, stamp=listing.stamp and learned.stamp(listing.stamp))
    labelled = int((listing.labels[train] >= 0).sum())
    rows = np.concatenate([train[:labelled], own, train[labelled:], held_rows])
    return listing, rows, _leaves_out(labelled, labelled + len(own), learned)


def _leaves_out(first: int, last: int, learned: Learned) -> LeavesOut:
    """Whatever was learned is left out, but for the places of the examples themselves."""
    return lambda place, hashed: not first <= place < last and learned.is_duplicate(hashed)


def from_arrays(images: NDArray[Any], labels: NDArray[Any], manifest: Manifest) -> LocalData:
    """Samples that are in memory: uint8 images (N, H, W, c) of the bundle's shape, and class numbers (N,).

    Raises:
        DataError: as `load_data`.
    """
    where = "the arrays"
    x, y = pixels(images, where), class_numbers(labels, where)
    if len(x) != len(y):
        raise DataError(where, expected=f"a label for each of {len(x)} images", got=f"{len(y)} labels")
    _check_shape(x, manifest.input_shape, where)
    return _checked(LocalData(x, y), manifest, where, "train")


def hold_back(
    data: LocalData, *, share: float = 0.1, seed: int = 0, least: int = 1, draws: Draws | None = None
) -> tuple[LocalData, LocalData]:
    """Samples in memory as `load_held_out` divides a source without splits; rows that are added later move few.

    Args:
        share, seed, least, draws: as of `load_held_out`.

    Returns:
        (to train on, held back), copies where something is held back.

    Raises:
        UsageError: when `share` is out of range.
    """
    if draws is None:
        ranks = ranks_of((f"row {row}" for row in range(len(data))), len(data), seed)
        is_held = held_out(data.y, share, seed, ranks=ranks, least=least)
    else:
        is_held = draws.held_out_pixels(data.x, share) & (data.y >= 0)
    if not is_held.any():
        return data, LocalData(data.x[:0], data.y[:0])
    return LocalData(data.x[~is_held], data.y[~is_held]), LocalData(data.x[is_held], data.y[is_held])


def read_images(
    listing: Listing,
    rows: NDArray[np.int64],
    shape: Shape,
    *,
    name: str = "images",
    cache: Path | None = None,
    leaves_out: LeavesOut | None = None,
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The pixels of some rows of a listing, in that order, without those that cannot be read or are left out.

    Args:
        rows: (N,) no row twice.
        shape: (H, W, c) that images are brought to; pixels of a `.npz` must have it.
        name: what the cache's file is called.
        leaves_out: says of an image by its place in `rows` and the hash of its pixels that it is not wanted.

    Returns:
        (K, H, W, c) uint8, read only where a cache gives it; and (K,) which rows these are.

    Raises:
        DataError: no row, none that can be read, another shape than a `.npz` has, no room for the cache.
    """
    if isinstance(listing.images, np.ndarray):
        _check_shape(listing.images, shape, listing.where)
        if leaves_out is not None:
            unwanted = [leaves_out(place, pixel_hash(listing.images[row])) for place, row in enumerate(rows)]
            rows = rows[~np.array(unwanted, bool)]
        everything = len(rows) == len(listing) and bool((np.diff(rows) > 0).all())
        return (listing.images if everything else listing.images[rows]), rows
    from protofleet.edge_client.data.decode import check_channels, decode_all, gather

    check_channels(shape, listing.where)

    def decode(places: Rows) -> Iterator[Any]:
        if len(places) >= _MANY:
            kept = "" if cache is None else f" into {cache}"
            logger.info(f"decoding {len(places):,} images{kept}")
        return decode_all(_encoded(listing, rows[places]), shape)

    decoded = None
    if cache is not None and listing.stamp:
        from protofleet.edge_client.data.cache import ImageCache, cache_key

        try:
            key = cache_key(listing.stamp, rows, shape)
            ids = None if listing.ids is None else listing.ids[rows]
            decoded = ImageCache(cache).fetch(name, key, len(rows), shape, decode, ids=ids, leaves_out=leaves_out)
        except OSError as error:
            _without_cache(error, cache, len(rows), shape)
    decoded = decoded or gather(decode(np.arange(len(rows))), len(rows), shape, leaves_out)
    decoded.tell(listing.where)
    return decoded.x, rows[decoded.kept]


def _encoded(listing: Listing, rows: NDArray[np.int64]) -> Iterator[tuple[str, str | bytes]]:
    """(name, path or bytes) of rows in any order: rising stretches of them are read one after another."""
    assert not isinstance(listing.images, np.ndarray)
    for stretch in np.split(rows, np.flatnonzero(np.diff(rows) < 0) + 1):
        for row, source in zip(stretch, listing.images.read(stretch), strict=True):
            yield listing.images.name(int(row)), source


def _without_cache(error: OSError, cache: Path, count: int, shape: Shape) -> None:
    """Say why there is no cache.

    Raises:
        DataError: when the images are too many to be held in memory instead.
    """
    needed, why = count * math.prod(shape), error.strerror or str(error)
    if needed > _WITHOUT_CACHE_BYTES:
        raise DataError(
            f"{count:,} images, decoded {needed / 1e6:,.0f} MB, cannot be kept in {cache}",
            expected="room on its disk",
            got=why,
            hint="another --state, or fewer images",
        ) from None
    logger.warning(f"decoded images are not kept for the next start: {cache}: {why}")


def _with_bundle_classes(listing: Listing, manifest: Manifest) -> Listing:
    """The listing with the bundle's class numbers.

    Classes are matched by name. They are matched by the source's own numbers where the bundle's classes are numbers and
    none of the source's names is one of them. It is enough if the classes of an earlier bundle, which had fewer, are
    numbers.

    Raises:
        DataError: a class that the bundle has not.
    """
    if listing.names is None or (listing.own_numbers and _means_numbers(listing.names, manifest)):
        return listing
    numbers = np.full(len(listing.names) + 1, UNLABELLED, np.int64)  # the last is what -1 leads to
    for label in np.unique(listing.labels):
        if label == UNLABELLED:  # the Hub's number for a label that is missing, too
            continue
        where = f"{listing.where}: {listing.name(int(np.flatnonzero(listing.labels == label)[0]))}"
        if not 0 <= label < len(listing.names):
            raise DataError(f"{where}: label", expected=f"0 to {len(listing.names) - 1}", got=label)
        numbers[label] = class_number(listing.names[label], manifest, where)
    return replace(listing, labels=numbers[listing.labels], names=manifest.labels)


def _usable(listing: Listing, manifest: Manifest) -> Listing:
    """The listing with the bundle's class numbers, and `UNUSABLE` for each sample whose label means nothing to it."""
    labels, unknown = listing.labels, list[str]()
    if listing.names is not None and not (listing.own_numbers and _means_numbers(listing.names, manifest)):
        numbers = np.full(len(listing.names) + 1, UNUSABLE, np.int64)
        for number, name in enumerate(listing.names):
            try:
                numbers[number] = class_number(name, manifest, listing.where)
            except DataError:
                unknown.append(name)
        known = (labels >= 0) & (labels < len(listing.names))
        labels = np.where(labels == UNLABELLED, UNLABELLED, numbers[np.where(known, labels, -1)])
    least = UNLABELLED if "pu_weight" in manifest.hyper else 0
    labels = np.where((labels >= least) & (labels < manifest.classes), labels, UNUSABLE)
    left_out = int((labels == UNUSABLE).sum())
    if left_out:
        of_all = f"{left_out:,} of {len(listing):,} photos"
        named = Private(f": {', '.join(sorted(unknown)[:3])}" if unknown else "", "")
        logger.warning("%s: %s are of no class of the bundle, left out%s", listing.where, of_all, named)
    return replace(listing, labels=labels, names=manifest.labels)


def _means_numbers(names: tuple[str, ...], manifest: Manifest) -> bool:
    first = min([manifest.classes, *manifest.extended.values()])
    numbered = manifest.labels[:first] == tuple(str(index) for index in range(first))
    known = len(names) <= first or first == manifest.classes
    return numbered and known and not set(names) & set(manifest.labels)


def _check_shape(x: NDArray[np.uint8], shape: Shape, where: str) -> None:
    if x.shape[1:] != shape:
        raise DataError(f"{where}: x", expected=f"(N, {shape[0]}, {shape[1]}, {shape[2]})", got=x.shape)


def _checked(data: LocalData, manifest: Manifest, where: str, purpose: Purpose) -> LocalData:
    if not len(data):
        raise DataError(f"{where} is empty", expected="at least one image", got="none")
    least = UNLABELLED if purpose == "train" and "pu_weight" in manifest.hyper else 0
    low, high = int(data.y.min()), int(data.y.max())
    if low < least or high >= manifest.classes:
        raise DataError(
            f"{where}: a label is out of range",
            expected=f"0 to {manifest.classes - 1}" + (f", or {UNLABELLED} for none" if least else ""),
            got=low if low < least else high,
        )
    if high < 0:
        raise DataError(f"{where}", expected="labels for some images at least", got="none")
    return data

"""The device's own samples, as values: images that are exactly of the bundle's shape, labels that are of its classes.

Images stay uint8. No float copy of the set is ever made, because the graph turns uint8 into normalised floats
(docs/bundle.md). The images may lie in a file that is mapped into memory (`cache.py`), so nobody writes to them.
"""

from __future__ import annotations

import hashlib
import mmap
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.contract.errors import DataError, near_names

__all__ = [
    "UNLABELLED",
    "UNUSABLE",
    "LeavesOut",
    "LocalData",
    "Purpose",
    "class_number",
    "pixel_hash",
    "release_pages",
    "sample_keys",
]

Purpose = Literal["train", "test"]
LeavesOut = Callable[[int, bytes], bool]
"""Whether an image is not wanted, by its place among others and the hash of its pixels."""
UNLABELLED = -1
UNUSABLE = -2  # the label of a sample that the bundle cannot use, where such are left out
_UNLABELLED_NAME = "unlabelled"
DIGEST_BYTES, CLASS_BYTES = 16, 2  # of a key of `sample_keys`
_RELEASED_AT_BYTES = 1 << 20  # of a mapped array that has been read


@dataclass(frozen=True, eq=False)
class LocalData:
    """Images and labels of one device.

    Attributes:
        x: (N, H, W, c) uint8.
        y: (N,) int64, class numbers; `UNLABELLED` for a sample without a label.
    """

    x: NDArray[np.uint8]
    y: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.y)

    def counts(self, classes: int) -> NDArray[np.int64]:
        """(C,) how many samples each class has."""
        return np.bincount(self.y[self.y >= 0], minlength=classes)

    @property
    def labelled(self) -> LocalData:
        """The samples that have a label: itself when all have one, and no copy when they are the first."""
        known = self.y >= 0
        if known.all():
            return self
        count = int(known.sum())
        chosen = slice(count) if known[:count].all() else known
        return LocalData(self.x[chosen], self.y[chosen])


def release_pages(x: NDArray[Any]) -> None:
    """Give back the memory that pages of a mapped array take once they have been read; they are read again when needed.

    Without this, all of a large set would count as the process's memory after its first epoch. For an array in memory,
    nothing happens.
    """
    base: Any = x
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    if isinstance(base, mmap.mmap):
        base.madvise(mmap.MADV_DONTNEED)


def pixel_hash(image: NDArray[np.uint8]) -> bytes:
    """16 bytes that follow from an image's shape and pixels."""
    digest = hashlib.blake2b(repr(image.shape).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(image).data)
    return digest.digest()


def class_number(label: str, manifest: Manifest, where: object) -> int:
    """The number of a class name; `UNLABELLED` for the folder `unlabelled`, where the method knows such samples. A disk
    may write a name's accents as characters of their own.

    Raises:
        DataError: when the bundle has no such class; the line names the nearest ones.
    """
    try:
        return manifest.labels.index(label)
    except ValueError:
        if label == _UNLABELLED_NAME and "pu_weight" in manifest.hyper:
            return UNLABELLED
        composed = unicodedata.normalize("NFC", label)
        same = [n for n, name in enumerate(manifest.labels) if unicodedata.normalize("NFC", name) == composed]
        if len(same) == 1:
            return same[0]
        raise DataError(
            f"{where}: unknown class",
            expected=f"a class of the bundle's {manifest.classes}",
            got=repr(label)[:80],
            hint=_class_below(label, manifest, str(where)) or near_names(label, manifest.labels[:1000]),
        ) from None


def _class_below(label: str, manifest: Manifest, where: str) -> str:
    """What to do where a folder of class folders was taken for a class: `photos: kitchen/cat/1.jpg`."""
    first, *folders = where.rpartition(": ")[2].split("/")[:-1] or [""]
    class_folder = next((folder for folder in folders if folder in manifest.labels), None)
    if first != label or class_folder is None:
        return ""
    return f"--data with the folder {label}, in which {class_folder} lies"


def sample_keys(data: LocalData) -> list[bytes]:
    """A key for each labelled sample: 16 bytes of the SHA-256 of its pixels, and its class."""
    keys, unreleased_bytes = [], 0
    for image, label in zip(data.x, data.y, strict=True):
        digest = hashlib.sha256(np.ascontiguousarray(image).data).digest()[:DIGEST_BYTES]
        keys.append(digest + int(label).to_bytes(CLASS_BYTES, "big"))
        unreleased_bytes += image.nbytes
        if unreleased_bytes >= _RELEASED_AT_BYTES:
            release_pages(data.x)
            unreleased_bytes = 0
    release_pages(data.x)
    return keys

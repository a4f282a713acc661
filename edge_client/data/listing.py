"""What a source holds before an image is decoded: for each sample where it is, which class, which split."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Images", "Listing", "Stamp"]


class Images(Protocol):
    """Encoded images, by row."""

    def name(self, row: int) -> str:
        """What a person finds the image by, within the source; the same wherever the source lies."""
        ...

    def read(self, rows: NDArray[np.int64]) -> Iterator[str | bytes]:
        """The images of rising rows: each a path, or the bytes of an image file."""
        ...


@dataclass(frozen=True, eq=False)
class Listing:
    """The N samples of a source, in an order that is the same at every start.

    Attributes:
        where: what an error calls the source.
        images: the encoded images; for a `.npz`, the pixels themselves, (N, H, W, c) uint8.
        labels: (N,) int64: numbers into `names`, or class numbers where there are none; `UNLABELLED` for no label.
        splits: (N,) uint8, the code of each sample's declared split (`splits.py`); 0 for none.
        names: the source's class names.
        own_numbers: whether `labels` are numbers that the source itself gave to its classes.
        stamp: changes when what was listed does: names, sizes, times of change.
        ids: (N,) uint64, the stamp of each single sample, where images are encoded.
    """

    where: str
    images: Images | NDArray[np.uint8]
    labels: NDArray[np.int64]
    splits: NDArray[np.uint8]
    names: tuple[str, ...] | None
    own_numbers: bool
    stamp: bytes
    ids: NDArray[np.uint64] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, row: int) -> str:
        """What a person finds a sample by."""
        return f"row {row}" if isinstance(self.images, np.ndarray) else self.images.name(row)


class Stamp:
    """The identity of files that are listed one after another, of all and of each."""

    def __init__(self) -> None:
        self._hash, self._digests = hashlib.sha256(), bytearray()

    def add(self, name: str, status: os.stat_result | None) -> None:
        """One more file; None where there is none."""
        mark = "absent" if status is None else f"{status.st_size}\0{status.st_mtime_ns}"
        line = f"{name}\0{mark}\n".encode(errors="surrogateescape")
        self._hash.update(line)
        self._digests += hashlib.blake2b(line, digest_size=8).digest()

    def digest(self) -> bytes:
        """32 bytes."""
        return self._hash.digest()

    def ids(self) -> NDArray[np.uint64]:
        """(N,) a number for each file."""
        return np.frombuffer(bytes(self._digests), "<u8")

"""The activations of a frozen trunk for a device's photos, kept so that each photo goes through the trunk once.

A file is `NAME-KEY.activations`. KEY is a hash of all that its numbers follow from: the trunk's graph and weights, ONNX
Runtime's version, and the photos' pixels. When one of these changes, the old file is of no use and is removed. To hash
the pixels takes about a second for a gigabyte; to compute activations takes minutes.

    numbers      (K, F) float32: of each photo all that the trunk hands to the tail, end to end
    footer       the key, 32 bytes

Where the budget is spent, only the first K of N photos are kept. Training computes the others again each time. A file
is written whole or not at all. The directory belongs to the device's process alone, like the journal beside it.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.files.atomic_files import whole_file
from protofleet.contract.printable import counted
from protofleet.edge_client.data.samples import release_pages

__all__ = ["ActivationStore"]

logger = logging.getLogger(__name__)

Float32 = NDArray[np.float32]
_LEFT_FREE_BYTES = 64 << 20  # of the disk, for whoever else needs it
_HASHED_TOGETHER = 256  # photos


class ActivationStore:
    """The activations of one device, or in memory of several.

    Args:
        directory: made, for its owner alone, when it is first needed; None to keep them in memory.
        budget_bytes: for all that is kept together.
    """

    def __init__(self, directory: Path | None, budget_bytes: int) -> None:
        self._directory, self._budget = directory, budget_bytes
        self._used: dict[str, int] = {}

    def fetch(
        self, name: str, identity: bytes, x: NDArray[np.uint8], width: int, compute: Callable[[int], Float32]
    ) -> Float32:
        """The activations of the first of the photos, as many as the budget has room for; computed where they are not
        there.

        Args:
            name: what the photos are for; one file is kept for each name.
            identity: of the trunk.
            x: (N, H, W, c).
            width: F, how many numbers a photo has.
            compute: gives those of row i, (F,).

        Returns:
            (K, F), read only; K up to N, and 0 where the disk refuses.
        """
        try:
            return self._fetched(name, identity, x, width, compute)
        except OSError as error:
            self._used.pop(name, None)
            logger.warning(f"activations cannot be kept ({error.strerror}): the trunk runs again in each epoch")
            return np.empty((0, width), np.float32)

    def _fetched(
        self, name: str, identity: bytes, x: NDArray[np.uint8], width: int, compute: Callable[[int], Float32]
    ) -> Float32:
        others = sum(used for other, used in self._used.items() if other != name)
        room = self._room(name)
        count = max(min(len(x), (room - others) // (4 * width)), 0)
        self._used[name] = 4 * width * count
        if count < len(x):
            logger.info(
                f"activations of {count:,} of {len(x):,} photos are kept ({self._used[name] / 1e6:,.0f} MB): the trunk"
                f" runs again for the other {len(x) - count:,} in each epoch; "
                + ("--activations MB for more" if room == self._budget else "the disk has no room for more")
            )
        if not count:
            return np.empty((0, width), np.float32)
        if self._directory is None:
            return np.stack([compute(row) for row in range(count)])
        key = _key(identity, x[:count], width)
        path = self._directory / f"{name}-{key.hex()[:32]}.activations"
        stored = _read(path, key, count, width)
        return self._write(name, path, key, count, width, compute) if stored is None else stored

    def _room(self, name: str) -> int:
        """Bytes that may be taken: the budget, and no more than the disk has beside what this name has now."""
        if self._directory is None:
            return self._budget
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = sum(path.stat().st_size for path in self._directory.glob(f"{name}-*.activations"))
        free = shutil.disk_usage(self._directory).free
        return min(self._budget, max(free - _LEFT_FREE_BYTES, 0) + own)

    def _write(
        self, name: str, path: Path, key: bytes, count: int, width: int, compute: Callable[[int], Float32]
    ) -> Float32:
        assert self._directory is not None
        for old in [*self._directory.glob(f"{name}-*.activations"), *self._directory.glob("*.partial")]:
            old.unlink(missing_ok=True)
        logger.info(
            f"running the trunk once over {counted(count, 'photo')}; {4 * width * count / 1e6:,.1f} MB stay in "
            f"{self._directory}"
        )
        with whole_file(path) as file:
            os.chmod(file.fileno(), 0o600)
            for row in range(count):
                file.write(np.ascontiguousarray(compute(row)).data)
            file.write(key)
        stored = _read(path, key, count, width)
        if stored is None:
            raise OSError(5, "cannot be read again", str(path))
        return stored


def _key(identity: bytes, x: NDArray[np.uint8], width: int) -> bytes:
    """32 bytes: of the trunk and of these photos."""
    digest = hashlib.blake2b(identity + repr((x.shape, width)).encode(), digest_size=32)
    for start in range(0, len(x), _HASHED_TOGETHER):
        digest.update(np.ascontiguousarray(x[start : start + _HASHED_TOGETHER]).data)
        release_pages(x)
    return digest.digest()


def _read(path: Path, key: bytes, count: int, width: int) -> Float32 | None:
    """The numbers of a file, mapped; None where there is no whole file of just these."""
    size = 4 * width * count
    try:
        with path.open("rb") as file:
            file.seek(size)
            if os.fstat(file.fileno()).st_size != size + len(key) or file.read() != key:
                return None
            mapped = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except OSError:
        return None
    return np.frombuffer(mapped, np.float32).reshape(count, width)

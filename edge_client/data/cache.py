"""Decoded images in a memory-mapped file, so that each is decoded once and none is held in memory.

A file is `NAME-KEY.images`. KEY is a hash of all that its pixels follow from: which files in which order, their sizes
and times of change, the wanted shape, and the versions of this module and of the decoder. When one of these changes:

1. A new file is written. Images that were decoded before are copied into it, as far as the disk has room for both.
2. The old file is removed. So a directory holds one file for each name, whatever happens to the photos.

    pixels       (K, H, W, c) uint8, those of the images that could be read
    ids          K uint64: what each follows from, 0 where that is not known
    hashes       K of 16 bytes: of their pixels
    kept         N bits: which of the N images these are
    facts        JSON: the key, the shape, the first few that could not be read, how many were left out
    footer       the lengths of kept and facts as two uint64, little-endian, and the 8 bytes `PFIMAGES`

A file is written whole or not at all, by one process at a time (`lock`). Another process that wants the same file
waits and then reads it. A process that is killed while it writes leaves a `.partial` file; the next one removes it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import mmap
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.files.atomic_files import lock, whole_file
from protofleet.edge_client.data.decode import FEW, Broken, Decoded
from protofleet.edge_client.data.samples import LeavesOut, pixel_hash, release_pages

__all__ = ["ImageCache", "NoRoomError", "cache_key"]

logger = logging.getLogger(__name__)

Decode = Callable[[NDArray[np.int64]], Iterable[NDArray[np.uint8] | Broken]]
_HASH_BYTES = 16
_VERSION = 2  # grows when the file's form changes, or what the decoder makes of an image
_FOOTER = struct.Struct("<QQ8s")
_MAGIC = b"PFIMAGES"
_LEFT_FREE_BYTES = 64 << 20  # of the disk, for whoever else needs it
_POLL_S = 0.2


class NoRoomError(OSError):
    """The disk has too little room for the images."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(28, f"{needed / 1e6:,.0f} MB are needed, {free / 1e6:,.0f} MB are free")
        self.needed_bytes, self.free_bytes = needed, free


def cache_key(stamp: bytes, rows: NDArray[np.int64], shape: tuple[int, int, int]) -> str:
    """The hash of what decoded images follow from, in hex: a listing's stamp, which of its rows, their shape."""
    facts = json.dumps([_VERSION, *shape]).encode()
    return hashlib.sha256(stamp + facts + np.ascontiguousarray(rows, "<i8").tobytes()).hexdigest()


class ImageCache:
    """The decoded images of a directory.

    Args:
        directory: made, for its owner alone, when it is first needed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def fetch(
        self,
        name: str,
        key: str,
        count: int,
        shape: tuple[int, int, int],
        decode: Decode,
        *,
        ids: NDArray[np.uint64] | None = None,
        leaves_out: LeavesOut | None = None,
    ) -> Decoded:
        """Images from the disk; decoded first where they are not there.

        Args:
            name: what the images are for; the directory keeps one file for each.
            key: of `cache_key`.
            count: N, how many images there are.
            shape: (H, W, c).
            decode: gives those at these places, rising.
            ids: (N,) what each image follows from: one that an older file of this name has is not decoded again.
            leaves_out: as of `gather`; what it says follows from the key.

        Raises:
            OSError: the directory cannot be written; `NoRoomError` when it is too small.
        """
        path = self._directory / f"{name}-{key[:32]}.images"
        stored = _read(path, key, count, shape)
        if stored is not None:
            if len(self._files(name)) > 1:  # of a process that was killed before it could remove the older one
                with self._turn():
                    self._remove_others(name, but=path)
            return stored.decoded
        self._directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory.mkdir(mode=0o700, exist_ok=True)
        with self._turn():
            stored = _read(path, key, count, shape)  # another process may have written it meanwhile
            if stored is not None:
                return stored.decoded
            before = self._older(name, shape, ids, count)
            if before is None:
                self._remove_others(name)
            self._check_room(count * math.prod(shape))
            decoded = self._write(path, key, shape, _Wanted(count, ids, decode, leaves_out, before))
            self._remove_others(name, but=path)
            return decoded

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Until this process is the only one that writes here."""
        waited = False
        while True:
            try:
                descriptor = lock(self._directory / "lock")
                break
            except BlockingIOError:
                if not waited:
                    logger.info(f"waiting for another process that decodes images into {self._directory}")
                waited = True
                time.sleep(_POLL_S)
        try:
            yield
        finally:
            os.close(descriptor)

    def _files(self, name: str) -> list[Path]:
        return list(self._directory.glob(f"{name}-*.images"))

    def _remove_others(self, name: str, but: Path | None = None) -> None:
        for old in [*self._files(name), *self._directory.glob("*.partial")]:
            if old != but:
                old.unlink(missing_ok=True)

    def _older(
        self, name: str, shape: tuple[int, int, int], ids: NDArray[np.uint64] | None, count: int
    ) -> _Stored | None:
        """The newest file of this name, where it helps and the disk has room for another beside it."""
        paths = sorted(self._files(name), key=lambda path: path.stat().st_mtime_ns)
        if not paths or ids is None or not self._has_room(count * math.prod(shape)):
            return None
        return _read(paths[-1], None, None, shape)

    def _has_room(self, needed: int) -> bool:
        return needed + _LEFT_FREE_BYTES <= shutil.disk_usage(self._directory).free

    def _check_room(self, needed: int) -> None:
        if not self._has_room(needed):
            raise NoRoomError(needed + _LEFT_FREE_BYTES, shutil.disk_usage(self._directory).free)

    def _write(self, path: Path, key: str, shape: tuple[int, int, int], wanted: _Wanted) -> Decoded:
        """Write the file and map it; where no image is left, there is none."""
        kept, broken, left_out = np.zeros(wanted.count, dtype=bool), list[Broken](), 0
        ids, hashes = bytearray(), bytearray()
        try:
            with whole_file(path) as file:
                os.chmod(file.fileno(), 0o600)
                for index, (result, hashed) in enumerate(wanted.images()):
                    if isinstance(result, Broken):
                        broken += [result] if len(broken) < FEW else []
                    elif wanted.leaves_out is not None and wanted.leaves_out(index, hashed):
                        left_out += 1
                    else:
                        kept[index] = True
                        hashes += hashed
                        ids += (0 if wanted.ids is None else int(wanted.ids[index])).to_bytes(8, "little")
                        file.write(np.ascontiguousarray(result).data)
                if not kept.any():
                    raise _NothingKeptError
                bits = np.packbits(kept).tobytes()
                few = [[failure.name, failure.why] for failure in broken]
                facts = json.dumps({"key": key, "shape": shape, "broken": few, "left_out": left_out}).encode()
                file.write(ids + hashes + bits + facts + _FOOTER.pack(len(bits), len(facts), _MAGIC))
        except _NothingKeptError:
            return Decoded(np.empty((0, *shape), np.uint8), kept, tuple(broken), left_out)
        stored = _read(path, key, wanted.count, shape)
        if stored is None:
            raise OSError(5, "cannot be read again", str(path))
        return stored.decoded


class _NothingKeptError(Exception):
    """No image is left: the file that was begun is not to stay."""


@dataclass(frozen=True, eq=False)
class _Stored:
    """A file that was read: its images, and what each follows from, with the hash of its pixels."""

    decoded: Decoded
    ids: NDArray[np.uint64]
    hashes: NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class _Wanted:
    """What a new file is to hold; see `ImageCache.fetch`."""

    count: int
    ids: NDArray[np.uint64] | None
    decode: Decode
    leaves_out: LeavesOut | None
    before: _Stored | None

    def images(self) -> Iterator[tuple[NDArray[np.uint8] | Broken, bytes]]:
        """Each image in its turn with the hash of its pixels, copied where it was decoded before."""
        places = self._places()
        fresh = iter(self.decode(np.flatnonzero(places < 0)))
        for place in places:
            if place >= 0 and self.before is not None:
                yield self.before.decoded.x[place], self.before.hashes[place].tobytes()
                release_pages(self.before.decoded.x)
                continue
            result = next(fresh)
            yield result, b"" if isinstance(result, Broken) else pixel_hash(result)

    def _places(self) -> NDArray[np.int64]:
        """(N,) where in the older file each image lies; -1 where it is not there."""
        if self.before is None or self.ids is None:
            return np.full(self.count, -1, np.int64)
        known = self.before.ids
        order = np.argsort(known, kind="stable")
        nearest = np.minimum(np.searchsorted(known[order], self.ids), len(known) - 1)
        places = order[nearest]
        return np.where((known[places] == self.ids) & (self.ids != 0), places, -1)


def _read(path: Path, key: str | None, count: int | None, shape: tuple[int, int, int]) -> _Stored | None:
    """The images of a file, mapped; None where there is no whole file of just these, or of any where `key` is None."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(size - _FOOTER.size)
            bits, length, magic = _FOOTER.unpack(file.read())
            file.seek(size - _FOOTER.size - bits - length)
            kept = np.unpackbits(np.frombuffer(file.read(bits), np.uint8), count=count).astype(bool)
            facts = json.loads(file.read(length))
            rows = int(kept.sum())
            image_bytes = math.prod(shape)
            whole = rows * (image_bytes + 8 + _HASH_BYTES) + bits + length + _FOOTER.size == size
            if magic != _MAGIC or key not in (None, facts["key"]) or facts["shape"] != list(shape) or not rows:
                return None
            if not whole:
                return None
            file.seek(rows * image_bytes)
            ids, hashes = np.frombuffer(file.read(8 * rows), "<u8"), file.read(_HASH_BYTES * rows)
            mapped = mmap.mmap(file.fileno(), rows * image_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            broken, left_out = tuple(Broken(*one) for one in facts["broken"]), facts["left_out"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, struct.error):
        return None
    x = np.frombuffer(mapped, np.uint8).reshape(rows, *shape)
    decoded = Decoded(x, kept, broken, left_out)
    return _Stored(decoded, ids, np.frombuffer(hashes, np.uint8).reshape(rows, _HASH_BYTES))

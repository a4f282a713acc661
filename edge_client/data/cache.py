"""Decoded images in a memory-mapped file, so that each is decoded once and none is held in memory.

A file is `NAME-KEY.images`; KEY is a hash of all that its pixels follow from: which files in which order, their sizes
and times of change, the wanted shape, this module's and the decoder's version. When one of these changes, the old file
is of no use and goes; so a directory holds one file for each name, whatever happens to the photos.

    pixels       (K, H, W, c) uint8, those of the images that could be read
    kept         N bits: which of the N images these are
    facts        JSON: the key, the shape, and the first few that could not be read
    footer       the lengths of kept and facts as two uint64, little-endian, and the 8 bytes `PFIMAGES`

It is written whole or not at all, by one process at a time (`lock`); another that wants the same waits and then reads
it. Who is killed while it writes leaves a `.partial` that the next one removes.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from contract.files import lock, whole_file
from edge_client.data.decode import FEW, Broken, Decoded

__all__ = ["ImageCache", "NoRoomError", "cache_key"]

Results = Iterable[NDArray[np.uint8] | Broken]
_VERSION = 1  # grows when the file's form changes, or what the decoder makes of an image
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
        log: takes a line for a person when something takes long.
    """

    def __init__(self, directory: Path, log: Callable[[str], None] = lambda line: None) -> None:
        self._directory, self._log = directory, log

    def fetch(
        self, name: str, key: str, count: int, shape: tuple[int, int, int], decode: Callable[[], Results]
    ) -> Decoded:
        """Images from the disk; decoded first where they are not there.

        Args:
            name: what the images are for; the directory keeps one file for each.
            key: of `cache_key`.
            count: N, how many images `decode` gives.
            shape: (H, W, c).

        Raises:
            OSError: the directory cannot be written; `NoRoomError` when it is too small.
        """
        path = self._directory / f"{name}-{key[:32]}.images"
        found = _read(path, key, count, shape)
        if found is not None:
            return found
        self._directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory.mkdir(mode=0o700, exist_ok=True)
        with self._turn():
            found = _read(path, key, count, shape)  # another process may have written it meanwhile
            if found is None:
                self._remove_others(name)
                self._check_room(count * math.prod(shape))
                found = self._write(path, key, count, shape, decode)
        return found

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
                    self._log(f"waiting for another process that decodes images into {self._directory}")
                waited = True
                time.sleep(_POLL_S)
        try:
            yield
        finally:
            os.close(descriptor)

    def _remove_others(self, name: str) -> None:
        for old in [*self._directory.glob(f"{name}-*.images"), *self._directory.glob("*.partial")]:
            old.unlink(missing_ok=True)

    def _check_room(self, needed: int) -> None:
        free = shutil.disk_usage(self._directory).free
        if needed + _LEFT_FREE_BYTES > free:
            raise NoRoomError(needed + _LEFT_FREE_BYTES, free)

    def _write(
        self, path: Path, key: str, count: int, shape: tuple[int, int, int], decode: Callable[[], Results]
    ) -> Decoded:
        """Write the file and map it; where no image can be read, there is none."""
        kept, broken = np.zeros(count, dtype=bool), list[Broken]()
        try:
            with whole_file(path) as file:
                os.chmod(file.fileno(), 0o600)
                for index, result in enumerate(decode()):
                    if isinstance(result, Broken):
                        broken += [result] if len(broken) < FEW else []
                    else:
                        kept[index] = True
                        file.write(np.ascontiguousarray(result).data)
                if not kept.any():
                    raise _NothingKeptError
                bits = np.packbits(kept).tobytes()
                facts = json.dumps({"key": key, "shape": shape, "broken": [[b.name, b.why] for b in broken]}).encode()
                file.write(bits + facts + _FOOTER.pack(len(bits), len(facts), _MAGIC))
        except _NothingKeptError:
            return Decoded(np.empty((0, *shape), np.uint8), kept, tuple(broken))
        found = _read(path, key, count, shape)
        if found is None:
            raise OSError(5, "cannot be read again", str(path))
        return found


class _NothingKeptError(Exception):
    """No image could be read: the file that was begun is not to stay."""


def _read(path: Path, key: str, count: int, shape: tuple[int, int, int]) -> Decoded | None:
    """The images of a file, mapped; None where there is no whole file of just these."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(size - _FOOTER.size)
            bits, length, magic = _FOOTER.unpack(file.read())
            file.seek(size - _FOOTER.size - bits - length)
            kept = np.unpackbits(np.frombuffer(file.read(bits), np.uint8), count=count).astype(bool)
            facts = json.loads(file.read(length))
            rows = int(kept.sum())
            pixels = rows * math.prod(shape)
            whole = pixels + bits + length + _FOOTER.size == size
            if magic != _MAGIC or facts["key"] != key or not rows or not whole:
                return None
            mapped = mmap.mmap(file.fileno(), pixels, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None
    x = np.frombuffer(mapped, np.uint8).reshape(rows, *shape)
    return Decoded(x, kept, tuple(Broken(*one) for one in facts["broken"]))

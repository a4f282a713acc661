"""A number for each photo that follows from its content and a key alone, whatever other photos there are.

Where noise protects what is sent, one photo more may move no other photo into or out of the sums. So photos are not
held out by a quota of a class, nor by a draw over all photos. A photo is held out if its own number is small.

- The number is a keyed hash (BLAKE2b) of the image file's length and first 256 KiB, or of the pixels where there is no
  file. Copies of one file get one number.
- The key is the device's own (`Journal.draw_key`), so nobody else can tell which photos are held out. A device that has
  lost its key draws anew. The new choice is again fixed for every photo.

`STATE/photo-draws` keeps the numbers, 16 bytes for each present photo, so that a file is read for it once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.files.atomic_files import whole_file
from protofleet.edge_client.data.listing import Listing
from protofleet.edge_client.data.samples import pixel_hash

__all__ = ["Draws"]

FILE = "photo-draws"  # of a state directory
_READ_BYTES = 1 << 18
_Numbers = NDArray[np.uint64]
_NONE = np.empty(0, "<u8")


class Draws:
    """The numbers of a device's photos.

    Args:
        key: 32 bytes.
        state: the directory that keeps them; None to compute them each time.
    """

    def __init__(self, key: bytes, state: Path | None = None) -> None:
        self._key, self._path = key, None if state is None else state / FILE
        self._mark = hashlib.blake2b(b"photo draws", key=key, digest_size=16).digest()

    def held_out(self, listing: Listing, rows: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
        """(N,) which of some rising rows of a listing are held out: each with probability `share`, by itself.

        Raises:
            DataError: a file of many images cannot be read.
        """
        if not share:
            return np.zeros(len(rows), bool)
        if isinstance(listing.images, np.ndarray):
            return self.held_out_pixels(listing.images[rows], share)
        return self._below(self._file_numbers(listing, rows), share)

    def held_out_pixels(self, x: NDArray[np.uint8], share: float) -> NDArray[np.bool_]:
        """(N,) the same of pixels (N, H, W, c)."""
        return self._below(np.fromiter((self._number(pixel_hash(image)) for image in x), np.uint64, len(x)), share)

    @staticmethod
    def _below(numbers: _Numbers, share: float) -> NDArray[np.bool_]:
        return np.asarray(numbers < np.uint64(share * 2.0**64))

    def _file_numbers(self, listing: Listing, rows: NDArray[np.int64]) -> _Numbers:
        """Those that are known by their files' names, sizes and times, and of the others by reading them."""
        assert not isinstance(listing.images, np.ndarray)
        ids = np.zeros(len(rows), "<u8") if listing.ids is None else listing.ids[rows]
        numbers, is_known = np.zeros(len(rows), "<u8"), np.zeros(len(rows), bool)
        known, kept = self._kept()
        if len(known):
            nearest = np.minimum(np.searchsorted(known, ids), len(known) - 1)
            is_known = (known[nearest] == ids) & (ids != 0)
            is_known &= kept[nearest] != 0  # what could not be read may be by now
            numbers[is_known] = kept[nearest[is_known]]
        new = np.flatnonzero(~is_known)
        for place, source in zip(new, listing.images.read(rows[new]), strict=True):
            numbers[place] = self._number(source) if isinstance(source, bytes) else self._file_number(source)
        if len(new) or len(known) > len(rows):
            self._keep(ids, numbers)
        return numbers

    def _file_number(self, path: str) -> int:
        """Of one that cannot be read 0: it is in no sum."""
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                return 0
            with open(path, "rb") as file:
                return self._number(file.read(_READ_BYTES), os.fstat(file.fileno()).st_size)
        except OSError:
            return 0

    def _number(self, content: bytes, length: int | None = None) -> int:
        digest = hashlib.blake2b(key=self._key, digest_size=8)
        digest.update((len(content) if length is None else length).to_bytes(8, "big"))
        digest.update(content[:_READ_BYTES])
        return int.from_bytes(digest.digest(), "big")

    def _kept(self) -> tuple[_Numbers, _Numbers]:
        """Rising ids and their numbers; none where there are none of this key."""
        raw = b""
        if self._path is not None:
            with contextlib.suppress(OSError):
                raw = self._path.read_bytes()
        mark, body = raw[:16], raw[16:]
        if mark != self._mark or len(body) % 16:
            return _NONE, _NONE
        pairs = np.frombuffer(body, "<u8").reshape(2, -1)
        return pairs[0], pairs[1]

    def _keep(self, ids: _Numbers, numbers: _Numbers) -> None:
        """A disk that does not take them lets them be computed again."""
        if self._path is None:
            return
        order = np.argsort(ids, kind="stable")
        with contextlib.suppress(OSError), whole_file(self._path, private=True) as file:
            file.write(self._mark + ids[order].tobytes() + numbers[order].tobytes())

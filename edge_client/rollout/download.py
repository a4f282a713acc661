"""A bundle that is fetched in pieces: what to ask for next, and what arrived. See docs/wire.md.

- Pieces are appended to `bundles/SHA256.part` in order. So the file's length is the progress, also after kill -9. A
  piece that comes out of order, twice or beyond the end is dropped, because it is asked for again.
- A request is answered with a few pieces. The next request goes out when these are here. If some were lost or nobody
  answers, it goes out after a while that grows.
- Bytes are forced to the disk now and then. The whole file is hashed at the end, which finds what a power cut has
  damaged.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from protofleet.contract.errors import StoreError
from protofleet.contract.wire.rollout_messages import MAX_PIECES, Offer, Piece, Request

__all__ = ["Download"]

ASKED_BYTES = 512 << 10  # in one request
_SYNC_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 20
_MARGIN_BYTES = 16 << 20  # of the disk that stays free
_FIRST_S, _LAST_S = 10.0, 600.0  # until a request that nobody answers is made again
_GAP_S = 5.0  # without a further piece, some were lost


class Download:
    """The download of one offer.

    Args:
        path: of the part.
        offer: what is fetched.
        rng: spreads the requests of many devices.

    Raises:
        StoreError: the disk has no room, or refuses.
    """

    def __init__(self, path: Path, offer: Offer, rng: random.Random) -> None:
        self.offer, self.path, self._rng = offer, path, rng
        self._until, self._left = 0, 0  # the end of what was asked for, and pieces that may still come
        self._due_s, self._wait_s = float("-inf"), _FIRST_S
        self._unsynced = 0
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _refused(path, error) from None
        self.have = os.fstat(self._descriptor).st_size
        if self.have > offer.size_bytes:
            self.begin_again()
        try:
            self._check_room()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the file; what is there stays."""
        os.close(self._descriptor)

    @property
    def is_whole(self) -> bool:
        """Whether all bytes are here."""
        return self.have >= self.offer.size_bytes

    def request(self, run: bytes, now_s: float) -> Request | None:
        """What to ask for now, if anything; `asked` says that it went out."""
        if self.is_whole or now_s < self._due_s:
            return None
        return Request(run, self.offer.digest, self.have, min(ASKED_BYTES, self.offer.size_bytes - self.have))

    def asked(self, request: Request, now_s: float) -> None:
        """A request went out."""
        self._until, self._left = request.offset + request.wanted_bytes, MAX_PIECES
        self._due_s = now_s + self._wait_s * self._rng.uniform(0.75, 1.25)
        self._wait_s = min(2 * self._wait_s, _LAST_S)

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until there is something to ask for; None once all is here."""
        return None if self.is_whole else max(0.0, self._due_s - now_s)

    def connected(self) -> None:
        """A new connection: what was on its way is lost, and may be asked for at once."""
        self._due_s, self._wait_s = float("-inf"), _FIRST_S

    def take(self, piece: Piece, now_s: float) -> None:
        """A piece arrived.

        Raises:
            StoreError: the disk refuses; what it took counts.
        """
        if piece.bundle != self.offer.digest or piece.offset != self.have or self.is_whole:
            return
        data = memoryview(piece.data)[: self.offer.size_bytes - self.have]
        try:
            self._write(data)
            self._sync_now_and_then(len(data))
        except OSError as error:
            raise _refused(self.path, error) from None
        finally:
            self.have = os.fstat(self._descriptor).st_size
        self._left -= 1
        self._wait_s = _FIRST_S
        answered = self.have >= self._until or self._left <= 0
        self._due_s = now_s if answered else now_s + _GAP_S

    def is_right(self, on_block: Callable[[], None] = lambda: None) -> bool:
        """Whether the bytes here have the hash that was offered. They are on the disk on return.

        Args:
            on_block: called now and then.

        Raises:
            StoreError: the disk refuses.
        """
        digest = hashlib.sha256()
        try:
            os.fsync(self._descriptor)
            for offset in range(0, self.have, _BLOCK_BYTES):
                digest.update(os.pread(self._descriptor, _BLOCK_BYTES, offset))
                on_block()
        except OSError as error:
            raise _refused(self.path, error) from None
        return digest.digest() == self.offer.sha256

    def begin_again(self) -> None:
        """Drop all bytes, because their hash is wrong."""
        os.ftruncate(self._descriptor, 0)
        self.have = 0
        self._due_s = float("-inf")

    def _write(self, data: memoryview) -> None:
        while len(data):
            data = data[os.write(self._descriptor, data) :]

    def _sync_now_and_then(self, count: int) -> None:
        self._unsynced += count
        if self._unsynced >= _SYNC_BYTES:
            os.fdatasync(self._descriptor)
            self._unsynced = 0

    def _check_room(self) -> None:
        needed = self.offer.size_bytes - self.have + _MARGIN_BYTES
        free = shutil.disk_usage(self.path.parent).free
        if free < needed:
            raise StoreError(
                f"no room for the bundle that is offered in {self.path.parent}",
                expected=f"{needed / 1e6:,.0f} MB free",
                got=f"{free / 1e6:,.0f} MB",
                hint="freeing space; it is tried again",
            )


def _refused(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"cannot write {path}",
        expected="a disk that takes it",
        got=error.strerror,
        hint="freeing space; it goes on then",
    )

"""Contributions that are larger than a message: cut, resent where lost, and put together again. No sockets, no clock.

1. `split` cuts an encoded contribution into chunks that each fit the limit.
2. An `Assembler` on the other side takes chunks in any order, any number of times.
3. It returns the contribution's bytes once all chunks are there and have the hash that the chunks name.

Guarantees:

- A contribution is admitted whole or not at all.
- Memory is bounded: one contribution in progress for each device and method, and `capacity_bytes` in all. The one that
  was not touched for longest is dropped first. It is not lost, because its device keeps it until a receipt comes.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from protofleet.contract.errors import WireError
from protofleet.contract.wire.messages import Chunk

__all__ = ["OVERHEAD_BYTES", "Assembler", "bitmap", "in_bitmap", "split"]

OVERHEAD_BYTES = 128  # more than the CBOR around a chunk's data ever takes
PART_COST_BYTES = 512  # more than Python's objects around a held chunk take: its bytes, its place, its contribution's


def split(payload: bytes, limit_bytes: int, *, run: bytes, round: int, method: str) -> list[Chunk]:
    """Chunks of `payload`, each of at most `limit_bytes` when encoded.

    Raises:
        WireError: when the limit leaves no room for data, or more than 65,535 chunks would be needed.
    """
    size = limit_bytes - OVERHEAD_BYTES
    count = -(-len(payload) // size) if size > 0 else 0
    if not 1 <= count <= 65_535:
        raise WireError(
            f"{len(payload)} bytes in chunks", expected="1 to 65535 chunks", got=f"a limit of {limit_bytes} bytes"
        )
    digest = hashlib.sha256(payload).digest()[:8]
    return [
        Chunk(run, round, method, index, count, len(payload), digest, payload[index * size : (index + 1) * size])
        for index in range(count)
    ]


@dataclass
class _Pending:
    first: Chunk
    parts: dict[int, bytes] = field(default_factory=dict)
    data_bytes: int = 0


@dataclass
class Assembler:
    """Puts chunks together.

    Attributes:
        capacity_bytes: the most that contributions in progress may take together.
        max_contribution_bytes: a contribution that says it is larger is refused.
    """

    capacity_bytes: int = 256 << 20
    max_contribution_bytes: int = 64 << 20
    _pending: OrderedDict[tuple[str, str], _Pending] = field(default_factory=OrderedDict)
    _held_bytes: int = 0

    def add(self, device: str, chunk: Chunk) -> bytes | None:
        """The whole contribution when `chunk` completes it, else None.

        Raises:
            WireError: when it is too large, contradicts the chunks before it, or does not hash to its digest.
        """
        largest = min(self.max_contribution_bytes, self.capacity_bytes)
        if chunk.total_bytes > largest:
            raise WireError("contribution", expected=f"at most {largest} bytes", got=chunk.total_bytes)
        pending = self._open(device, chunk)
        if chunk.index not in pending.parts:
            if pending.data_bytes + len(chunk.data) > chunk.total_bytes:
                self._drop((device, chunk.method))
                raise WireError("chunks", expected=f"{chunk.total_bytes} bytes in all", got="more")
            pending.parts[chunk.index] = chunk.data
            pending.data_bytes += len(chunk.data)
            self._held_bytes += len(chunk.data) + PART_COST_BYTES
        if len(pending.parts) == chunk.count:
            return self._finish(device, chunk)
        self._make_room()
        return None

    @property
    def held_bytes(self) -> int:
        """What the contributions in progress take."""
        return self._held_bytes

    def __len__(self) -> int:
        """The number of contributions in progress."""
        return len(self._pending)

    def missing(self, device: str, method: str) -> bytes | None:
        """A bitmap of the chunks not yet here, or None when nothing of that device and method is in progress."""
        pending = self._pending.get((device, method))
        if pending is None:
            return None
        missing = np.ones(pending.first.count, bool)
        missing[list(pending.parts)] = False
        return np.packbits(missing, bitorder="little").tobytes()

    def forget(self, device: str, method: str) -> None:
        """Drop what is in progress for that device and method, if anything is."""
        if (device, method) in self._pending:
            self._drop((device, method))

    def _open(self, device: str, chunk: Chunk) -> _Pending:
        key = (device, chunk.method)
        pending = self._pending.get(key)
        if pending is not None and not _same_whole(pending.first, chunk):
            self._drop(
                key
            )  # the device began a newer contribution, the older one will be sent again if it still matters
            pending = None
        if pending is None:
            pending = self._pending[key] = _Pending(chunk)
        self._pending.move_to_end(key)
        return pending

    def _finish(self, device: str, chunk: Chunk) -> bytes:
        pending = self._pending[(device, chunk.method)]
        self._drop((device, chunk.method))
        payload = b"".join(pending.parts[index] for index in range(chunk.count))
        if len(payload) != chunk.total_bytes or hashlib.sha256(payload).digest()[:8] != chunk.digest:
            raise WireError(
                "chunks", expected=f"{chunk.total_bytes} bytes of digest {chunk.digest.hex()}", got="other bytes"
            )
        return payload

    def _drop(self, key: tuple[str, str]) -> None:
        pending = self._pending.pop(key)
        self._held_bytes -= pending.data_bytes + PART_COST_BYTES * len(pending.parts)

    def _make_room(self) -> None:
        while self._held_bytes > self.capacity_bytes:
            self._drop(next(iter(self._pending)))


def bitmap(indices: set[int], count: int) -> bytes:
    """A set of chunk numbers as bits, lowest bit of the first byte for chunk 0."""
    bits = np.zeros(count, bool)
    bits[list(indices)] = True
    return np.packbits(bits, bitorder="little").tobytes()


def in_bitmap(index: int, bits: bytes) -> bool:
    """Whether chunk `index` is in the set."""
    return index // 8 < len(bits) and bool(bits[index // 8] >> index % 8 & 1)


def _same_whole(first: Chunk, second: Chunk) -> bool:
    return (first.run, first.round, first.count, first.total_bytes, first.digest) == (
        second.run,
        second.round,
        second.count,
        second.total_bytes,
        second.digest,
    )

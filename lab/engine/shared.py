"""Values that other processes of this machine take over: arrays in memory that all of them map, the rest pickled.

`Shared` holds one value for any number of readers. Its arrays are written once, into a file that exists in memory only
and has no name (memfd_create), and mapped copy-on-write by whoever loads it: a hundred tasks on two workers take the
memory of one copy. A `Box` goes with one task there and back: the sender puts the item in, the worker replaces it by
what came of it. Both are files of the sender alone, so nothing is left when it is killed, and a worker that is killed
while it writes takes nothing with it; what travels beside is a path of some bytes, which a pipe takes whole or not.

Tensors travel as numpy arrays. Everything is read by processes that the sender started, so pickling is no door.
"""

from __future__ import annotations

import itertools
import mmap
import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from types import TracebackType
from typing import Any

import numpy as np

__all__ = ["Box", "Handle", "Shared", "pack", "replace", "sendable", "unpack"]

_ALIGNED = 64  # bytes, so that vectors are loaded as from memory of one's own
_numbers = itertools.count()


@dataclass(frozen=True)
class Handle:
    """Where a value lies.

    Attributes:
        path: of the sender's open file.
        sizes: in bytes, of the pickled part and of each array behind it.
    """

    path: str
    key: str
    sizes: tuple[int, ...]

    def load(self) -> Any:
        """The value; its arrays are of the shared memory until they are written to.

        Raises:
            OSError: the sender is gone.
        """
        with open(self.path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        view, parts, start = memoryview(mapped), [], 0
        for size in self.sizes:
            parts.append(view[start : start + size])
            start += _room(size)
        return pickle.loads(parts[0], buffers=parts[1:])


class Shared:
    """A value for others; theirs for as long as this is open.

    Raises:
        TypeError, AttributeError, pickle.PicklingError: it holds what cannot be pickled.
    """

    def __init__(self, value: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        parts: list[Any] = [_pickled(value, buffers), *(each.raw() for each in buffers)]
        self._descriptor = os.memfd_create("protofleet")
        start = 0
        for part in parts:
            _write(self._descriptor, part, start)
            start += _room(len(part))
        os.ftruncate(self._descriptor, start)
        self.handle = Handle(_path(self._descriptor), f"{os.getpid()}-{next(_numbers)}", tuple(map(len, parts)))

    def __enter__(self) -> Shared:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)


class Box:
    """One task's item, and what came of it."""

    def __init__(self, item: bytes) -> None:
        self._descriptor = os.memfd_create("protofleet")
        self.path = _path(self._descriptor)
        _write(self._descriptor, item, 0)

    def take(self) -> bytes:
        """What a worker has put there, all of it; the box is gone then."""
        try:
            return os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
        finally:
            self.close()

    def close(self) -> None:
        """Nobody waits for it any more."""
        os.close(self._descriptor)


def replace(path: str, value: bytes) -> None:
    """What came of the item in the box at `path`."""
    with open(path, "wb") as file:
        file.write(value)


def pack(value: Any) -> bytes:
    """Bytes for `unpack`."""
    return _pickled(value, None)


def unpack(packed: bytes) -> Any:
    """What was packed, by a process of ours."""
    return pickle.loads(packed)


def sendable(error: Exception) -> Exception:
    """The error, or where it cannot be sent, one that says the same."""
    try:
        unpack(pack(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class _Pickler(pickle.Pickler):
    """Plain tensors as arrays: torch's own way is a file in a file, and twenty times slower."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(value) is not torch.Tensor or value.requires_grad:
            return NotImplemented
        return _tensor, (value.numpy(),)


def _tensor(array: np.ndarray[Any, Any]) -> Any:
    import torch

    return torch.from_numpy(array)


def _pickled(value: Any, buffers: list[pickle.PickleBuffer] | None) -> bytes:
    file = BytesIO()
    _Pickler(file, protocol=5, buffer_callback=None if buffers is None else buffers.append).dump(value)
    return file.getvalue()


def _path(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _room(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _write(descriptor: int, part: Sequence[int], start: int) -> None:
    view = memoryview(part)  # type: ignore[arg-type]
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], start + done)

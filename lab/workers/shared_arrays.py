"""Passes values to other processes of this machine: arrays in memory that all of them map, the rest pickled.

`Shared` holds one value for any number of readers. Its arrays are written once, into a file that exists only in memory
and has no name (memfd_create). Readers map it copy-on-write, so a hundred tasks on two workers take the memory of one
copy. A `Box` belongs to one task. The sender puts the item in, and the worker replaces it by the result.

Guarantees:

- Both are files of the sender alone. Nothing is left when the sender is killed, and nothing is lost when a worker is
  killed while it writes.
- Only a path of some bytes is sent. A pipe takes it completely or not at all.
- Everything is read by processes that the sender started, so pickling is safe.

Tensors travel as numpy arrays.
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
    """The place of a value.

    Attributes:
        path: path of the sender's open file.
        sizes: sizes in bytes of the pickled part and of each array behind it.
    """

    path: str
    key: str
    sizes: tuple[int, ...]

    def load(self) -> Any:
        """Load the value. Its arrays lie in the shared memory until they are written to.

        Raises:
            OSError: the sender has ended.
        """
        with open(self.path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        view, parts, start = memoryview(mapped), [], 0
        for size in self.sizes:
            parts.append(view[start : start + size])
            start += _room(size)
        return pickle.loads(parts[0], buffers=parts[1:])


class Shared:
    """A value for other processes. They can load it while this is open.

    Raises:
        TypeError, AttributeError, pickle.PicklingError: a part of the value cannot be pickled.
    """

    def __init__(self, value: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        parts: list[Any] = [_pickled(value, buffers), *(buffer.raw() for buffer in buffers)]
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
    """One task's item, and then its result."""

    def __init__(self, item: bytes) -> None:
        self._descriptor = os.memfd_create("protofleet")
        self.path = _path(self._descriptor)
        _write(self._descriptor, item, 0)

    def take(self) -> bytes:
        """The result from the worker. The box is closed then."""
        try:
            return os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
        finally:
            self.close()

    def close(self) -> None:
        """Close the box without its result."""
        os.close(self._descriptor)


def replace(path: str, value: bytes) -> None:
    """Replace the item in the box at `path` by the result."""
    with open(path, "wb") as file:
        file.write(value)


def pack(value: Any) -> bytes:
    """Pickle a value into bytes for `unpack`."""
    return _pickled(value, None)


def unpack(packed: bytes) -> Any:
    """The value from bytes of `pack`, made by one of our processes."""
    return pickle.loads(packed)


def sendable(error: Exception) -> Exception:
    """The error, or an equivalent one where it cannot be pickled."""
    try:
        unpack(pack(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class _Pickler(pickle.Pickler):
    """Pickles plain tensors as arrays: torch's own format is a file in a file, and twenty times slower."""

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

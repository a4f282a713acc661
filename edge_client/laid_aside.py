"""A bundle's weights, laid aside in a file that is mapped: a device that waits does not hold them.

Training and answers read them at their start, and then for hours nobody does. Mapped privately and read only, their
pages are let go of with those of code (`code_pages.py`) and come back when they are touched. The file is the process's
own and has no name, so nobody can write to it or cut it off under a reader, as whoever copies a new bundle over the old
one would; it is written once at a start and ends with the process. A disk without the room leaves them in memory.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["laid_aside"]

_ALIGN = 64


def laid_aside(weights: Mapping[str, NDArray[np.float32]], directory: Path) -> Mapping[str, NDArray[np.float32]]:
    """The same numbers by the same names, read only, in a file without a name in `directory`; as they are where the
    system refuses that."""
    places: dict[str, int] = {}
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            for name, value in weights.items():
                file.write(bytes(-file.tell() % _ALIGN))
                places[name] = file.tell()
                file.write(np.ascontiguousarray(value, np.float32).data)
            file.flush()
            mapped = mmap.mmap(file.fileno(), file.tell(), flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    except (OSError, ValueError):  # a disk that is full; nothing to map
        return weights
    whole = np.frombuffer(mapped, np.uint8)
    return {
        name: whole[place : place + weights[name].nbytes].view(np.float32).reshape(weights[name].shape)
        for name, place in places.items()
    }

"""A bundle's weights in a mapped file, so that a waiting device does not hold them in memory.

Training and answers read the weights at their start, and then nobody reads them for hours. They are mapped privately
and read only. Their pages are released with those of code (`code_pages.py`) and come back when they are touched.

The file belongs to the process and has no name. So nobody can write to it or cut it off under a reader, as a person
would who copies a new bundle over the old one. It is written once at a start and ends with the process. If the disk has
no room for it, the weights stay in memory.
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
    """The same arrays by the same names, read only, in a file without a name in `directory`.

    They are returned unchanged where the system refuses that.
    """
    places: dict[str, int] = {}
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            for name, value in weights.items():
                file.write(bytes(-file.tell() % _ALIGN))
                places[name] = file.tell()
                file.write(np.ascontiguousarray(value).data)
            file.flush()
            mapped = mmap.mmap(file.fileno(), file.tell(), flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    except (OSError, ValueError):  # a disk that is full; nothing to map
        return weights
    whole = np.frombuffer(mapped, np.uint8)
    return {
        name: whole[place : place + weights[name].nbytes].view(weights[name].dtype).reshape(weights[name].shape)
        for name, place in places.items()
    }

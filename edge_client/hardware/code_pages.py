"""Pages of code that has run are released while a device waits, and mapped again when the code runs again.

Half of what a waiting device has resident is no memory of its own. It is the code and the constants of Python, numpy
and ONNX Runtime that were touched once, some of them at the start only. The kernel would take such pages back when
memory is short; until then they count as the process's. So the device unmaps them itself.

The pages stay in the page cache for as long as nothing else needs the room. They come back sixteen at a time when they
are touched. Where the room was needed, they come back from the disk (docs/decisions/175).

Only pages that are equal to the file are unmapped: pages of a mapping that cannot be written to, and of which the
kernel says that nothing in it is anonymous. Pages that relocation wrote into exist nowhere else, and stay.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["clean_mappings", "release_code"]

_SMAPS = Path("/proc/self/smaps")
_MADV_DONTNEED = 4
_READ_ONLY = ("r-xp", "r--p")


def release_code() -> None:
    """Unmap the pages of files that this process only reads; where the system has no such account, nothing happens."""
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is None:
        return
    try:
        lines = _SMAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for start, length in clean_mappings(lines):
        advise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_DONTNEED)


def clean_mappings(lines: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Address and length of each mapping of a file in `/proc/self/smaps` that is private, read only and unchanged."""
    mapping: tuple[int, int] | None = None
    for line in lines:
        if not line[:1].isupper():  # low-high perms offset device inode path; two dozen lines of facts follow
            span, *rest = line.split(maxsplit=5)
            is_file = len(rest) == 5 and rest[4].startswith("/")
            mapping = _span(span) if is_file and rest[0] in _READ_ONLY else None
        elif mapping is not None and line.startswith("Anonymous:") and line.split()[1] == "0":
            yield mapping


def _span(span: str) -> tuple[int, int]:
    low, high = (int(edge, 16) for edge in span.split("-"))
    return low, high - low

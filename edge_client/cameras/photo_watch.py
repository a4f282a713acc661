"""Photos as they come: a folder that is looked into again and again.

`new_files` polls the folder. So it needs nothing of the system and works on network shares.

- A file is taken when it looks the same as at the look before and is not empty. So a file that is still being written
  is left for later.
- A file that is written again is another photo.
- A file that looked finished and was broken is told of once, and again when it has changed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from protofleet.edge_client.data.folder import is_image

__all__ = ["new_files"]

_Look = tuple[int, int, int]  # inode, size, time of change


def new_files(
    folders: Sequence[Path], every_s: float, *, sleep: Callable[[float], None] = time.sleep
) -> Iterator[tuple[str, str]]:
    """The photos of these folders, at any depth, those that are there first and then each that comes; never ends.

    Args:
        every_s: seconds between two looks.

    Yields:
        (name, path), once for each time that a file was written.
    """
    taken: dict[str, _Look] = {}
    before: dict[str, _Look] = {}
    while True:
        now = {path: look for folder in folders for path, look in _looks(folder)}
        taken = {path: look for path, look in taken.items() if path in now}
        for path, look in sorted(now.items()):
            if look[1] and before.get(path) == look and taken.get(path) != look:
                taken[path] = look
                yield path, path
        before = now
        sleep(every_s)


def _looks(folder: Path) -> Iterator[tuple[str, _Look]]:
    for where, below, names in os.walk(folder):
        below[:] = [name for name in below if not name.startswith(".")]
        for name in names:
            if not name.startswith(".") and is_image(name):
                path = os.path.join(where, name)
                try:
                    status = os.stat(path)
                except OSError:  # gone since it was listed
                    continue
                yield path, (status.st_ino, status.st_size, status.st_mtime_ns)

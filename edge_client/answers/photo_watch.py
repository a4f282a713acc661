"""Photos as they come: a folder that is looked into again and again, and a camera.

`new_files` polls the folder. So it needs nothing of the system and works on network shares.

- A file is taken when it looks the same as at the look before and is not empty. So a file that is still being written
  is left for later.
- A file that is written again is another photo.
- A file that looked finished and was broken is told of once, and again when it has changed.

`camera_pictures` reads a camera through OpenCV (extra `camera`). It has been run with a simulated camera only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import DataError, UsageError
from protofleet.contract.extras import install_command
from protofleet.edge_client.data.decode import fit_pixels
from protofleet.edge_client.data.folder import is_image

__all__ = ["camera_pictures", "new_files"]

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


def camera_pictures(number: int, shape: tuple[int, int, int], every_s: float) -> Iterator[NDArray[np.uint8]]:
    """Pictures of a camera, one every so many seconds, brought to a bundle's shape; ends when the camera gives none.

    Raises:
        UsageError: OpenCV is not installed.
        DataError: there is no such camera.
    """
    try:
        import cv2
    except ModuleNotFoundError:
        hint = install_command("camera")
        raise UsageError("--camera", expected="OpenCV (cv2)", got="nothing", hint=hint) from None
    camera = cv2.VideoCapture(number)
    try:
        if not camera.isOpened():
            raise DataError(f"camera {number}", expected="a camera that opens", got="none", hint="ls /dev/video*")
        while True:
            is_read, picture = camera.read()  # (H, W, 3) uint8, blue first
            if not is_read:
                return
            yield fit_pixels(np.ascontiguousarray(picture[..., ::-1]), shape)
            time.sleep(every_s)
    finally:
        camera.release()

"""What all kinds of cameras share: a picture, the reader that gives pictures, and how they come at a steady pace.

A picture is what the camera gave: a file's path, an encoded image, or pixels. `Picture.fitted` brings it to a bundle's
shape as a photo of the same pixels would be, and names it. The name is such that the picture can be found by it again:

- where there is a file, by the file: its path, and for a video the second in it (`door.mp4#t=12.480`);
- else by when it was taken and by the hash of its pixels (`20261126T160503.120Z-5f1c0a9be2d4`). By this hash the file
  of learned examples knows it, too (`edge_client/data/learned.py`).
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.console.durations import seconds
from protofleet.contract.errors import DataError, UsageError
from protofleet.edge_client.data.samples import pixel_hash

if TYPE_CHECKING:
    from protofleet.edge_client.data.decode import Broken, Crop, Shape

__all__ = [
    "LARGEST_BYTES",
    "CameraGoneError",
    "Newest",
    "Pace",
    "Picture",
    "Reader",
    "checked_crop",
    "read_crop",
    "read_every",
]

LARGEST_BYTES = 16 << 20  # of an encoded picture that comes from elsewhere
_CROP = re.compile(r"(\d{1,5}),(\d{1,5}),([1-9]\d{0,4}),([1-9]\d{0,4})")


class CameraGoneError(Exception):
    """A camera gives no pictures now, and may again. It says why, in words that hold no address and no password."""


@dataclass(frozen=True, eq=False)
class Picture:
    """One picture of a camera.

    Attributes:
        content: a file's path, an encoded image, or (H, W, 3) uint8 RGB.
        taken_s: when it was taken, in seconds of Unix time.
        file: the file that it is found in again, and where in it; empty where there is none.
    """

    content: str | bytes | NDArray[np.uint8]
    taken_s: float
    file: str = ""

    def fitted(self, shape: Shape, crop: Crop | None = None) -> tuple[str, NDArray[np.uint8] | Broken]:
        """The picture's name, and the picture as (H, W, c) uint8, or why that cannot be.

        Args:
            shape: (H, W, c) of a bundle.
            crop: the part of the picture that counts; None for all of it.
        """
        from protofleet.edge_client.data.decode import Broken  # Pillow: not before there is a picture

        try:
            x = self._pixels(shape, crop)
        except DataError as error:
            name = self.file or self._time()
            return name, Broken(name, str(error.got))
        return self.file or f"{self._time()}-{pixel_hash(x).hex()[:12]}", x

    def _pixels(self, shape: Shape, crop: Crop | None) -> NDArray[np.uint8]:
        from protofleet.edge_client.data.decode import decode_image, fit_pixels, image_shape

        if isinstance(self.content, str):
            return decode_image(self.content, shape, crop)
        if isinstance(self.content, bytes):
            height, width, _ = image_shape(self.content) or (0, 0, 0)
            check_pixels(width, height)
            return decode_image(self.content, shape, crop)
        height, width, _ = self.content.shape
        check_pixels(width, height)
        return fit_pixels(self.content, shape, crop)

    def _time(self) -> str:
        return datetime.fromtimestamp(self.taken_s, UTC).strftime("%Y%m%dT%H%M%S.%f")[:-3] + "Z"


def check_pixels(width: int, height: int) -> None:
    """Refuse a picture of more than 25 megapixels, whatever it would be scaled to.

    Raises:
        DataError: it is larger.
    """
    from protofleet.edge_client.data.decode import MAX_PIXELS

    if width * height > MAX_PIXELS:
        got = f"{width} x {height} pixels, more than {MAX_PIXELS:,}"
        raise DataError("the picture", expected="one that can be used", got=got)


class Reader(Protocol):
    """One camera.

    Attributes:
        shown: what it is called, without password and path.
        ends: whether its end is one, as of a file, and not a fault.
    """

    @property
    def shown(self) -> str: ...

    @property
    def ends(self) -> bool: ...

    def pictures(self, every_s: float) -> Iterator[Picture]:
        """Pictures, one every so many seconds.

        Raises:
            CameraGoneError: it gives none, for now.
            ProtofleetError: it never will.
        """
        ...


class Pace:
    """Steady turns: each begins so many seconds after the one before, or at once where that has taken longer."""

    def __init__(self, every_s: float) -> None:
        self._every_s, self._due_s = every_s, time.monotonic()

    def wait(self) -> None:
        """Wait for the next turn."""
        now = time.monotonic()
        if now < self._due_s:
            time.sleep(self._due_s - now)
        self._due_s = max(self._due_s, now) + self._every_s


class Newest:
    """Room for one picture, between a thread that reads and one that uses: a newer one takes its place."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._picture: Picture | None = None
        self._why = ""

    def put(self, picture: Picture) -> None:
        """A new picture."""
        with self._changed:
            self._picture = picture
            self._changed.notify_all()

    def end(self, why: str) -> None:
        """No further pictures come."""
        with self._changed:
            self._why = why
            self._changed.notify_all()

    def take(self, patience_s: float | None = None) -> Picture:
        """The newest picture that was not taken yet; waits for one.

        Raises:
            CameraGoneError: none comes, or not in this time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._picture is not None or self._why, patience_s):
                raise CameraGoneError(f"no picture in {patience_s:g} s")
            picture, self._picture = self._picture, None
        if picture is None:
            raise CameraGoneError(self._why)
        return picture


def read_every(label: str, value: str | float) -> float:
    """The seconds between two pictures.

    Raises:
        UsageError: it is no duration, or none from 0.01 s to a day.
    """
    every_s = seconds(label, value)
    if not 0.01 <= every_s <= 86_400:
        raise UsageError(label, expected="0.01s to 1d", got=value)
    return every_s


def read_crop(text: str, option: str = "--crop") -> Crop:
    """The part of a picture of `X,Y,WIDTH,HEIGHT`, in pixels.

    Raises:
        UsageError: it is no such text.
    """
    found = _CROP.fullmatch(text)
    if found is None:
        raise UsageError(option, expected="X,Y,WIDTH,HEIGHT in pixels", got=text, hint=f"{option} 100,50,640,480")
    x, y, width, height = map(int, found.groups())
    return x, y, width, height


def checked_crop(option: str, value: str) -> str:
    """The text of a crop as it stands, once `read_crop` takes it."""
    read_crop(value, option)
    return value

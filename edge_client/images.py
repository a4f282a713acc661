"""Images from files: a folder with one subfolder for each class, and the decoding that parquet shares.

Any format that Pillow reads by these suffixes is taken, turned upright as its EXIF data says, converted to the
bundle's number of channels and resized to its height and width. Files are read in the order of their names, so the
same folder is the same data set on every start.

A camera that lost power leaves half a file: what cannot be read is skipped and told (`Skipped`), and the rest is used.
A picture of very many pixels is decoded at a fraction of its size where its format can (JPEG), and skipped where not,
so that no file can take a small board's memory.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from contract.bundle import Manifest
from contract.errors import DataError
from edge_client.data import LocalData, class_number

__all__ = ["SUFFIXES", "Skipped", "check_channels", "decode_image", "read_image_folder"]

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_LARGE_PIXELS = 16_000_000  # above, a JPEG is decoded at half its size or less, down to an eighth
_MAX_PIXELS = 25_000_000  # of what is decoded: 75 MB as RGB. Pillow itself refuses to open more than 89 million
_TOLD = 5  # lines about broken files


class Skipped:
    """Images that could not be read: the first few are told one by one, then how many there were.

    Args:
        source: where the images come from.
        log: takes one line for a person.
    """

    def __init__(self, source: Path, log: Callable[[str], None]) -> None:
        self._source, self._log = source, log
        self._images, self._count, self._first = 0, 0, ""

    def seen(self, images: int) -> None:
        """So many were tried, readable or not."""
        self._images += images

    def add(self, error: DataError) -> None:
        """One more."""
        self._first = self._first or str(error)
        self._count += 1
        if self._count <= _TOLD:
            self._log(f"skipped: {error}")

    def end(self) -> None:
        """Tell how many there were.

        Raises:
            DataError: when none is left.
        """
        if self._images and self._count == self._images:
            raise DataError(f"{self._source}: no image of {self._images} can be read", got=self._first)
        if self._count:
            self._log(f"skipped {self._count} of {self._images} images of {self._source}, which cannot be read")


def read_image_folder(root: Path, manifest: Manifest, log: Callable[[str], None] = lambda line: None) -> LocalData:
    """All readable images under `root/CLASS/`, at any depth below the class.

    Raises:
        DataError: no class folders, a folder that is no class of the bundle, no image, or none that can be read.
    """
    check_channels(manifest.input_shape, root)
    folders = sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not folders:
        raise DataError(
            f"{root} is empty" if not any(root.iterdir()) else f"{root} has no class folders",
            expected="one subfolder of images for each class",
            got="no subfolder",
            hint=f"{root}/{manifest.labels[0]}/image.png",
        )
    found = [(file, class_number(folder.name, manifest, root)) for folder in folders for file in _image_files(folder)]
    if not found:
        raise DataError(
            f"{root} is empty", expected="images in its class folders", got="none", hint=", ".join(sorted(SUFFIXES))
        )
    x = np.empty((len(found), *manifest.input_shape), np.uint8)
    y, skipped = np.empty(len(found), np.int64), Skipped(root, log)
    rows = 0
    for file, number in found:
        try:
            x[rows], y[rows] = decode_image(file, manifest.input_shape, file), number
            rows += 1
        except DataError as error:
            skipped.add(error)
    skipped.seen(len(found))
    skipped.end()
    return LocalData(x[:rows], y[:rows])


def check_channels(shape: tuple[int, int, int], name: object) -> None:
    """Refuse a bundle whose channels no image file has.

    Raises:
        DataError: c is not 1, 3 or 4.
    """
    if shape[2] not in _MODES:
        raise DataError(
            f"{name}", expected="a bundle of 1, 3 or 4 channels to decode images for", got=shape[2], hint="a .npz"
        )


def decode_image(source: Path | bytes, shape: tuple[int, int, int], name: object) -> NDArray[np.uint8]:
    """One image as (H, W, c) uint8.

    Args:
        source: a file, or the bytes of one.
        name: what an error calls it.

    Raises:
        DataError: when it is not an image that Pillow reads whole, it has too many pixels, or c is not 1, 3 or 4.
    """
    check_channels(shape, name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
                return _decoded(image, shape)
    except Exception as error:  # Pillow's readers raise nearly anything on a broken file
        got = str(error) or type(error).__name__
        raise DataError(f"{name} is not a readable image", expected="a whole image file", got=got) from None


def _decoded(image: Image.Image, shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    height, width, channels = shape
    if image.width * image.height > _LARGE_PIXELS:
        image.draft(None, (2 * max(width, height), 2 * max(width, height)))  # JPEG only: others stay as they are
    if image.width * image.height > _MAX_PIXELS:
        raise ValueError(f"{image.width} x {image.height} pixels, more than {_MAX_PIXELS:,}")
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I;16"):  # Pillow would clip sixteen bits to eight instead of scaling them
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode != _MODES[channels]:
        image = image.convert(_MODES[channels])
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(image, dtype=np.uint8).reshape(height, width, channels)


def _image_files(folder: Path) -> list[Path]:
    with os.scandir(folder):  # one that may not be looked into is an error: `rglob` would take it for empty
        pass
    return sorted(
        file
        for file in folder.rglob("*")
        if file.suffix.lower() in SUFFIXES and file.is_file() and not file.name.startswith(".")
    )

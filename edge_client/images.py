"""Images from files: a folder with one subfolder for each class, and the decoding that parquet shares.

Any format that Pillow reads by these suffixes is taken, turned upright as its EXIF data says, converted to the
bundle's number of channels and resized to its height and width. Files are read in the order of their names, so the
same folder is the same data set on every start.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from contract.bundle import Manifest
from contract.errors import DataError
from edge_client.data import LocalData, class_number

__all__ = ["SUFFIXES", "decode_image", "read_image_folder"]

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def read_image_folder(root: Path, manifest: Manifest) -> LocalData:
    """All images under `root/CLASS/`, at any depth below the class.

    Raises:
        DataError: no class folders, a folder that is no class of the bundle, no image, or an image that is broken.
    """
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
    for row, (file, _) in enumerate(found):
        x[row] = decode_image(file, manifest.input_shape, file)
    return LocalData(x, np.array([number for _, number in found], np.int64))


def decode_image(source: Path | bytes, shape: tuple[int, int, int], name: object) -> NDArray[np.uint8]:
    """One image as (H, W, c) uint8.

    Args:
        source: a file, or the bytes of one.
        name: what an error calls it.

    Raises:
        DataError: when it is not an image that Pillow reads whole, or c is not 1, 3 or 4.
    """
    height, width, channels = shape
    if channels not in _MODES:
        raise DataError(
            f"{name}", expected="a bundle of 1, 3 or 4 channels to decode images for", got=channels, hint="a .npz"
        )
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            upright = ImageOps.exif_transpose(image)
            if upright.mode.startswith("I;16"):  # Pillow would clip sixteen bits to eight instead of scaling them
                upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
            converted = upright.convert(_MODES[channels])
            if converted.size != (width, height):
                converted = converted.resize((width, height), Image.Resampling.BILINEAR)
            return np.asarray(converted, dtype=np.uint8).reshape(height, width, channels)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{name} is not a readable image", expected="a whole image file", got=error) from None


def _image_files(folder: Path) -> list[Path]:
    return sorted(
        file
        for file in folder.rglob("*")
        if file.suffix.lower() in SUFFIXES and file.is_file() and not file.name.startswith(".")
    )

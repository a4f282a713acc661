"""A folder with one subfolder of images for each class, or with `train/`, `valid/` and `test/` above these.

    photos/cat/1.jpg  photos/dog/2.PNG            photos/train/cat/1.jpg  photos/test/dog/2.jpg

- Images lie at any depth below their class.
- Hidden files and folders, and files of other kinds, are no samples.
- A symbolic link that leads out of the folder is not followed, so that only what the folder shows trains. The number of
  such links is logged.
- `unlabelled/` holds images without a label, for methods that use such.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.console.logs import Private
from protofleet.contract.errors import DataError
from protofleet.edge_client.data.listing import Listing, Stamp
from protofleet.edge_client.data.splits import split_code

__all__ = ["SUFFIXES", "PathImages", "is_image", "list_folder", "parquet_files"]

logger = logging.getLogger(__name__)

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
_NAMED_AS_UNREADABLE = frozenset({".heic", ".heif"})  # a phone's photos: left out with a line, not in silence


class PathImages:
    """Image files by their paths relative to `root`."""

    def __init__(self, root: Path, files: list[str]) -> None:
        self._root, self._files = str(root), files

    def name(self, row: int) -> str:
        """The relative path."""
        return self._files[row]

    def read(self, rows: NDArray[np.int64]) -> Iterator[str | bytes]:
        """The paths."""
        for row in rows:
            yield os.path.join(self._root, self._files[row])


def list_folder(root: Path) -> Listing:
    """All images under `root/CLASS/` or `root/SPLIT/CLASS/`.

    Raises:
        DataError: no class folders, or no image in them.
        OSError: a folder that may not be looked into.
    """
    walker, stamp = _Walker(root), Stamp()
    files, labels, splits = [], [], []
    names: dict[str, int] = {}
    for code, prefix, label in _class_folders(root, walker):
        number = names.setdefault(label, len(names))
        for relative, status in walker.images(f"{prefix}{label}"):
            stamp.add(relative, status)
            files.append(relative)
            labels.append(number)
            splits.append(code)
    walker.tell()
    if not files:
        led_out = f"none but {walker.led_out} links that lead out of it" if walker.led_out else "none"
        raise DataError(
            f"{root} is empty", expected="images in its class folders", got=led_out, hint=", ".join(sorted(SUFFIXES))
        )
    return Listing(
        where=str(root),
        images=PathImages(root, files),
        labels=np.array(labels, np.int64),
        splits=np.array(splits, np.uint8),
        names=tuple(names),
        own_numbers=False,
        stamp=stamp.digest(),
        ids=stamp.ids(),
    )


def parquet_files(root: Path) -> list[Path]:
    """The parquet files of a folder as it is downloaded from the Hub: in it, or up to two folders below."""
    files = [file for pattern in ("*", "*/*", "*/*/*") for file in root.glob(f"{pattern}.parquet")]
    return sorted(file for file in files if not any(p.startswith(".") for p in file.relative_to(root).parts))


def _class_folders(root: Path, walker: _Walker) -> list[tuple[int, str, str]]:
    """(split's code, what comes before the class, class) of each class folder."""
    above = walker.folders("")
    if not above:
        anything = any(root.iterdir())
        raise DataError(
            f"{root} has no class folders" if anything else f"{root} is empty",
            expected="one subfolder of images for each class",
            got="no subfolder",
            hint=f"{root}/CLASS/image.jpg",
        )
    codes = {name: split_code(name) for name in above}
    if all(code and walker.holds_only_folders(name) for name, code in codes.items()):
        return [(code or 0, f"{name}/", label) for name, code in codes.items() for label in walker.folders(f"{name}/")]
    return [(0, "", label) for label in above]


class _Walker:
    """Looks into folders below `root`, each in the order of its names."""

    def __init__(self, root: Path) -> None:
        self._root, self._real = str(root), os.path.realpath(root)
        self._led_out: set[str] = set()

    @property
    def led_out(self) -> int:
        """How many links were not followed."""
        return len(self._led_out)

    def tell(self) -> None:
        """Say which links were not followed."""
        if self._led_out:
            few = Private(", ".join(sorted(self._led_out)[:3]))
            links = f"{self.led_out} symbolic links that lead out of it are not followed"
            logger.warning("%s: %s (%s); use a .csv", self._root, links, few)

    def folders(self, relative: str) -> list[str]:
        """The names of the folders in one."""
        return [entry.name for entry in self._entries(relative) if entry.is_dir()]

    def holds_only_folders(self, relative: str) -> bool:
        """Whether a folder holds folders, and no image beside them."""
        entries = self._entries(relative)
        return any(entry.is_dir() for entry in entries) and not any(is_image(entry.name) for entry in entries)

    def images(self, relative: str) -> Iterator[tuple[str, os.stat_result]]:
        """The image files below a folder: relative path, and what the system says of it."""
        for entry in self._entries(relative):
            path = f"{relative}/{entry.name}"
            if entry.is_dir():
                if not entry.is_symlink():  # one within the folder would give its images twice
                    yield from self.images(path)
            elif is_image(entry.name) and entry.is_file():
                yield path, entry.stat()

    def _entries(self, relative: str) -> list[os.DirEntry[str]]:
        with os.scandir(os.path.join(self._root, relative)) as scanned:
            entries = [entry for entry in scanned if not entry.name.startswith(".")]
        kept = [entry for entry in entries if not entry.is_symlink() or self._stays(entry, relative)]
        return sorted(kept, key=lambda entry: entry.name)

    def _stays(self, entry: os.DirEntry[str], relative: str) -> bool:
        stays = os.path.realpath(entry.path).startswith(self._real + os.sep)
        if not stays:
            self._led_out.add(os.path.join(relative, entry.name))
        return stays and os.path.exists(entry.path)  # not for one that leads to itself, of which nothing can be asked


def is_image(name: str) -> bool:
    """Whether the name of this file is that of an image.

    If such a file cannot be read, that is reported when it is read.
    """
    suffix = os.path.splitext(name)[1].lower()
    return suffix in SUFFIXES or suffix in _NAMED_AS_UNREADABLE

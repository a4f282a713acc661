"""What the demo ships, so that its first run needs no torch: a bundle and the images it is shown with.

`shipped/fleet.bundle` and `shipped/images.npz` were made by `python -m lab.demo.make_bundle`; `shipped/README.md` says
from what, and the sha256 of both. The images are those of `fashion_mnist_subset` that the demo takes from it
(`lab/demo/story.py`), as plain arrays, since reading parquet needs pyarrow.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from contract.bundle import Bundle, read_bundle
from contract.errors import DataError
from edge_client.data import LocalData
from lab.demo.story import Images

__all__ = ["BACKBONE", "BUNDLE", "DATA", "IMAGES", "METHOD", "read_images", "shipped_bundle", "write_images"]

DATA = "fashion_mnist_subset"
METHOD = "ffc"
BACKBONE = "small_cnn"
BUNDLE, IMAGES = (Path(__file__).parent / "shipped" / name for name in ("fleet.bundle", "images.npz"))
_PARTS = ("public", "dealt", "test")


def shipped_bundle() -> Bundle:
    """The bundle as it was shipped."""
    return read_bundle(BUNDLE)


def read_images(path: Path = IMAGES) -> Images:
    """The images as they were shipped.

    Raises:
        DataError: when the file is not whole.
    """
    try:
        with np.load(path, allow_pickle=False) as found:
            parts = {name: LocalData(found[f"{name}_x"], found[f"{name}_y"].astype(np.int64)) for name in _PARTS}
            return Images(str(found["name"]), tuple(map(str, found["labels"])), **parts, unused=int(found["unused"]))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}", expected="the demo's images", got=error, hint="installing Protofleet anew") from None


def write_images(images: Images, path: Path) -> None:
    """Write what `read_images` reads."""
    arrays = {f"{name}_x": getattr(images, name).x for name in _PARTS}
    arrays |= {f"{name}_y": getattr(images, name).y.astype(np.uint8) for name in _PARTS}
    facts = {"name": np.array(images.name), "labels": np.array(images.labels), "unused": np.array(images.unused)}
    np.savez_compressed(path, **facts, **arrays)

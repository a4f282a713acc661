"""The files that the demo ships, so that its first run needs no torch: a bundle and images.

`shipped/fleet.bundle` and `shipped/images.npz` were made by `python -m protofleet.lab.demo.make_bundle`;
`shipped/README.md` names their source and the sha256 of both. The images are the demo's part of `fashion_mnist_subset`
(`lab/demo/story.py`). They are plain arrays, since reading parquet needs pyarrow.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.errors import DataError
from protofleet.edge_client.data import LocalData
from protofleet.lab.demo.story import Images

__all__ = ["BACKBONE", "BUNDLE", "DATA", "IMAGES", "METHOD", "read_images", "shipped_bundle", "write_images"]

DATA = "fashion_mnist_subset"
METHOD = "ffc"
BACKBONE = "small_cnn"
BUNDLE, IMAGES = (Path(__file__).parent / "shipped" / name for name in ("fleet.bundle", "images.npz"))
_PARTS = ("public", "dealt", "test")


def shipped_bundle() -> Bundle:
    """The shipped bundle."""
    return read_bundle(BUNDLE)


def read_images(path: Path = IMAGES) -> Images:
    """Read the shipped images.

    Raises:
        DataError: the file is incomplete.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            parts = {name: LocalData(arrays[f"{name}_x"], arrays[f"{name}_y"].astype(np.int64)) for name in _PARTS}
            return Images(str(arrays["name"]), tuple(map(str, arrays["labels"])), **parts, unused=int(arrays["unused"]))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}", expected="the demo's images", got=error, hint="installing Protofleet anew") from None


def write_images(images: Images, path: Path) -> None:
    """Write images for `read_images`."""
    arrays = {f"{name}_x": getattr(images, name).x for name in _PARTS}
    arrays |= {f"{name}_y": getattr(images, name).y.astype(np.uint8) for name in _PARTS}
    facts = {"name": np.array(images.name), "labels": np.array(images.labels), "unused": np.array(images.unused)}
    np.savez_compressed(path, **facts, **arrays)

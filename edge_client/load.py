"""Read the device's own samples: once, checked once.

`load_data` looks at the path and picks a reader: a directory of class folders (`images.py`), a `.npz` with x and y
(here), or the Hub's parquet layout (`parquet.py`). `from_arrays` takes what is in memory. Whatever the source, the
result is one `LocalData` that fits the bundle.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.bundle import Manifest
from contract.errors import DataError
from edge_client.data import UNLABELLED, LocalData, Purpose

__all__ = ["from_arrays", "load_data"]


def load_data(
    path: str | Path,
    manifest: Manifest,
    *,
    purpose: Purpose = "train",
    log: Callable[[str], None] = lambda line: None,
) -> LocalData:
    """The samples at `path`, as the bundle's shape and classes ask for them.

    Args:
        path: an image folder with one subfolder for each class; a `.npz` with `x` uint8 (N, H, W, c) and `y`; a
            `.parquet` file, or a directory of them.
        log: takes a line about each of the first images that cannot be read and are left out.
        purpose: `train` also asks for two classes when the bundle trains; it picks the split of a parquet directory.

    Raises:
        DataError: one line: what is wrong with which file, and what was expected.
    """
    source = Path(path)
    try:
        data = _read(source, manifest, purpose, log)
    except OSError as error:
        named = error.filename if isinstance(error.filename, str) else source
        raise DataError(
            f"cannot read {named}", expected="data that this user may read", got=error.strerror, hint=f"ls -ld {named}"
        ) from None
    return _checked(data, manifest, source, purpose)


def _read(source: Path, manifest: Manifest, purpose: Purpose, log: Callable[[str], None]) -> LocalData:
    if not source.exists():
        raise DataError(
            f"no data at {source}",
            expected="an image folder, a .npz or a .parquet",
            got="nothing there",
            hint=f"ls {source.parent}",
        )
    if source.is_dir() and not any(source.glob("*.parquet")):
        from edge_client.images import read_image_folder

        return read_image_folder(source, manifest, log)
    if source.is_dir() or source.suffix == ".parquet":
        from edge_client.parquet import read_parquet

        return read_parquet(source, manifest, purpose, log)
    if source.suffix == ".npz":
        return _read_npz(source, manifest)
    raise DataError(
        f"cannot tell what {source} is", expected="a folder, a .npz or a .parquet", got=source.suffix or "a file"
    )


def from_arrays(images: NDArray[Any], labels: NDArray[Any], manifest: Manifest) -> LocalData:
    """Samples that are in memory: uint8 images (N, H, W, c) of the bundle's shape, and class numbers (N,).

    Raises:
        DataError: as `load_data`.
    """
    source = Path("the arrays")
    return _checked(LocalData(_images(images, manifest, source), _labels(labels, source)), manifest, source, "train")


def _read_npz(path: Path, manifest: Manifest) -> LocalData:
    try:
        with np.load(path, allow_pickle=False) as archive:
            names = set(archive.files)
            if not {"x", "y"} <= names:
                found = ", ".join(sorted(names)) or "none"
                raise DataError(f"{path}", expected="arrays x and y", got=found, hint="np.savez(path, x=…, y=…)")
            x, y = archive["x"], archive["y"]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is not a whole .npz", expected="arrays x and y", got=error) from None
    return LocalData(_images(x, manifest, path), _labels(y, path))


def _images(x: NDArray[Any], manifest: Manifest, path: Path) -> NDArray[np.uint8]:
    shape = manifest.input_shape
    if x.dtype != np.uint8:
        nan = x.dtype.kind == "f" and bool(np.isnan(x).any())
        raise DataError(
            f"{path}: x",
            expected="uint8 pixels, 0 to 255",
            got=f"{x.dtype}{' with NaN' if nan else ''}",
            hint="saving the raw pixels; the bundle normalises them itself",
        )
    if x.ndim == 3 and shape[2] == 1:
        x = x[..., None]  # (N, H, W) grey images are common and mean only one thing
    if x.ndim != 4 or x.shape[1:] != shape:
        raise DataError(f"{path}: x", expected=f"(N, {shape[0]}, {shape[1]}, {shape[2]})", got=x.shape)
    return np.ascontiguousarray(x)


def _labels(y: NDArray[Any], path: Path) -> NDArray[np.int64]:
    if y.ndim != 1 or y.dtype.kind not in "iu":
        nan = y.dtype.kind == "f" and bool(np.isnan(y).any())
        raise DataError(
            f"{path}: y", expected="(N,) integer labels", got=f"{y.dtype} {y.shape}{' with NaN' if nan else ''}"
        )
    return y.astype(np.int64)


def _checked(data: LocalData, manifest: Manifest, source: Path, purpose: Purpose) -> LocalData:
    if len(data.x) != len(data.y):
        raise DataError(f"{source}", expected=f"a label for each of {len(data.x)} images", got=f"{len(data.y)} labels")
    if not len(data):
        raise DataError(f"{source} is empty", expected="at least one image", got="none")
    least = UNLABELLED if purpose == "train" and "pu_weight" in manifest.hyper else 0
    low, high = int(data.y.min()), int(data.y.max())
    if low < least or high >= manifest.classes:
        raise DataError(
            f"{source}: a label is out of range",
            expected=f"0 to {manifest.classes - 1}" + (f", or {UNLABELLED} for none" if least else ""),
            got=low if low < least else high,
        )
    known = data.labelled.y
    if not known.size:
        raise DataError(f"{source}", expected="labels for some images at least", got="none")
    low, high = int(known.min()), int(known.max())
    if purpose == "train" and manifest.trainable and low == high:
        raise DataError(
            f"{source} has one class only",
            expected="two classes or more, since the bundle trains",
            got=f"{len(known)} images of {manifest.labels[low]!r}",
            hint="adding images of another class",
        )
    return data

"""A `.npz` of pixels: arrays `x` uint8 (N, H, W, c) and `y` (N,), or `x_train`, `y_train`, `x_test`, `y_test`.

It is read into memory as it is: nothing is decoded or resized. For sets that do not fit, use a folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import DataError
from protofleet.edge_client.data.listing import Listing
from protofleet.edge_client.data.splits import split_code

__all__ = ["class_numbers", "list_npz", "pixels"]


def list_npz(path: Path) -> Listing:
    """The samples of an archive, its splits one after another.

    Raises:
        DataError: not an archive of these arrays, or not uint8 pixels and integer labels.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            parts = _parts(archive, path)
    except (DataError, MemoryError):
        raise
    except Exception as error:  # numpy's and zipfile's readers raise nearly anything on a file that is not theirs
        raise DataError(f"{path} is not a whole .npz", expected="arrays x and y", got=error) from None
    for _, x, y in parts:
        if len(x) != len(y):
            raise DataError(f"{path}", expected=f"a label for each of {len(x)} images", got=f"{len(y)} labels")
    shapes = {x.shape[1:] for _, x, _ in parts}
    if len(shapes) > 1:
        raise DataError(f"{path}", expected="splits of one shape", got=" and ".join(map(str, sorted(shapes))))
    whole = parts[0][1] if len(parts) == 1 else np.concatenate([x for _, x, _ in parts])
    return Listing(
        where=str(path),
        images=whole,
        labels=np.concatenate([y for _, _, y in parts]),
        splits=np.concatenate([np.full(len(y), code, np.uint8) for code, _, y in parts]),
        names=None,
        own_numbers=True,
        stamp=b"",
    )


def _parts(archive: Mapping[str, NDArray[Any]], path: Path) -> list[tuple[int, NDArray[np.uint8], NDArray[np.int64]]]:
    names = sorted(archive)
    if {"x", "y"} <= set(names):
        return [(0, pixels(archive["x"], path), class_numbers(archive["y"], path))]
    splits = [name[2:] for name in names if name.startswith("x_") and split_code(name[2:]) and f"y_{name[2:]}" in names]
    if not splits:
        present = ", ".join(names) or "none"
        raise DataError(f"{path}", expected="arrays x and y", got=present, hint="np.savez(path, x=…, y=…)")
    return [
        (split_code(split) or 0, pixels(archive[f"x_{split}"], path), class_numbers(archive[f"y_{split}"], path))
        for split in splits
    ]


def pixels(x: NDArray[Any], where: object) -> NDArray[np.uint8]:
    """Images (N, H, W, c), from (N, H, W) where they are grey.

    Raises:
        DataError: not uint8, or of another rank.
    """
    if x.dtype != np.uint8:
        nan = x.dtype.kind == "f" and bool(np.isnan(x).any())
        raise DataError(
            f"{where}: x",
            expected="uint8 pixels, 0 to 255",
            got=f"{x.dtype}{' with NaN' if nan else ''}",
            hint="saving the raw pixels; the bundle normalises them itself",
        )
    if x.ndim == 3:
        x = x[..., None]  # grey images without a channel axis are common and mean only one thing
    if x.ndim != 4:
        raise DataError(f"{where}: x", expected="(N, H, W, c)", got=x.shape)
    return np.ascontiguousarray(x)


def class_numbers(y: NDArray[Any], where: object) -> NDArray[np.int64]:
    """Labels (N,).

    Raises:
        DataError: not integers, or of another rank.
    """
    if y.ndim != 1 or y.dtype.kind not in "iu":
        nan = y.dtype.kind == "f" and bool(np.isnan(y).any())
        raise DataError(
            f"{where}: y", expected="(N,) integer labels", got=f"{y.dtype} {y.shape}{' with NaN' if nan else ''}"
        )
    return y.astype(np.int64)

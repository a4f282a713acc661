"""Data sets for the lab and the demo: a name or a directory → uint8 arrays, integer labels, class names.

Three kinds of name, tried in this order:

1. `fashion_mnist_subset`, which ships with the package (see `lab/data/fashion_mnist/README.md`);
2. a directory with `train.parquet` and `test.parquet` (or `train-*.parquet`, `test-*.parquet`) in the Hub's layout: an
   image column (struct of encoded `bytes` and `path`) and an integer label column, class names in the schema's
   `huggingface` metadata;
3. a data set of the Hugging Face Hub, through `datasets.load_dataset`, which keeps its own cache.

Images keep their size and channels: one data set, one shape. A set without a test split gives every tenth image to one.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.errors import DataError, near_names

__all__ = ["SHIPPED", "DataSet", "ImageSet", "load_dataset"]

SHIPPED = {"fashion_mnist_subset": Path(__file__).parent / "data" / "fashion_mnist"}


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images x (N, H, W, c) uint8 and labels y (N,) int64 in 0…C−1."""

    x: NDArray[np.uint8]
    y: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.y)

    def take(self, indices: NDArray[np.integer] | NDArray[np.bool_]) -> ImageSet:
        """Some of the images, in the order of `indices`."""
        return ImageSet(self.x[indices], self.y[indices])


@dataclass(frozen=True, eq=False)
class DataSet:
    """A named data set with its training and test split."""

    name: str
    labels: tuple[str, ...]
    train: ImageSet
    test: ImageSet

    @property
    def classes(self) -> int:
        """C."""
        return len(self.labels)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(H, W, c)."""
        height, width, channels = self.train.x.shape[1:]
        return height, width, channels


def load_dataset(name: str) -> DataSet:
    """Load a data set by its shipped name, its directory, or its name on the Hub.

    Raises:
        DataError: when there is no such set, the Hub is out of reach, or its images differ in shape.
    """
    if name in SHIPPED:
        return _load_directory(SHIPPED[name], name)
    path = Path(name)
    if path.is_dir():
        return _load_directory(path, path.resolve().name)
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise DataError(
            f"no data at {name}",
            expected="a directory with train.parquet and test.parquet",
            got="a file" if path.exists() else "no such directory",
            hint="--data " + next(iter(SHIPPED)),
        )
    return _load_from_hub(name)


# ── a directory of parquet files ────────────────────────────────────────────────────────────────────────────────────


def _load_directory(path: Path, name: str) -> DataSet:
    train, labels = _read_split(path, "train")
    test_files = _split_files(path, "test")
    test, _ = _read_split(path, "test") if test_files else (None, ())
    return _data_set(name, labels, train, test)


def _split_files(path: Path, split: str) -> list[Path]:
    return sorted([*path.glob(f"{split}.parquet"), *path.glob(f"{split}-*.parquet")])


def _read_split(path: Path, split: str) -> tuple[ImageSet, tuple[str, ...]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = _split_files(path, split)
    if not files:
        raise DataError(
            f"no {split} split in {path}", expected=f"{split}.parquet", got="no such file", hint="another --data"
        )
    try:
        table = pa.concat_tables([pq.read_table(file) for file in files])
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"cannot read {files[0]}", expected="parquet", got=error) from None
    image_column, label_column = _columns(table.schema, files[0])
    blobs = table[image_column].combine_chunks().field("bytes").to_pylist()
    y = np.asarray(table[label_column].to_numpy(), dtype=np.int64)
    return ImageSet(_decode(blobs, files[0]), y), _class_names(table.schema, label_column, y)


def _columns(schema: Any, path: Path) -> tuple[str, str]:
    import pyarrow as pa

    images = [f.name for f in schema if pa.types.is_struct(f.type) and f.type.get_field_index("bytes") >= 0]
    labels = [f.name for f in schema if pa.types.is_integer(f.type)]
    preferred = [name for name in ("label", "labels", "fine_label") if name in labels]
    if not images or not labels:
        raise DataError(
            f"{path}: columns", expected="an image struct with bytes, and an integer label", got=", ".join(schema.names)
        )
    return images[0], (preferred or labels)[0]


def _class_names(schema: Any, column: str, y: NDArray[np.int64]) -> tuple[str, ...]:
    header = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    names = header.get("info", {}).get("features", {}).get(column, {}).get("names")
    return tuple(names) if names else tuple(str(number) for number in range(int(y.max()) + 1))


def _decode(blobs: list[bytes | None], path: object) -> NDArray[np.uint8]:
    from PIL import Image, UnidentifiedImageError

    images = []
    for row, blob in enumerate(blobs):
        try:
            images.append(_pixels(Image.open(io.BytesIO(blob or b""))))
        except (UnidentifiedImageError, OSError) as error:
            raise DataError(f"{path}: row {row} is not an image", expected="an encoded image", got=error) from None
    return _stack(images, path)


def _pixels(image: Any) -> NDArray[np.uint8]:
    if image.mode != "L":
        image = image.convert("RGB")
    pixels = np.asarray(image, dtype=np.uint8)
    return pixels[..., None] if pixels.ndim == 2 else pixels  # (H, W, c)


def _stack(images: list[NDArray[np.uint8]], path: object) -> NDArray[np.uint8]:
    shapes = {image.shape for image in images}
    if len(shapes) != 1:
        got = "no images" if not shapes else " and ".join(str(shape) for shape in sorted(shapes)[:3])
        raise DataError(f"{path}", expected="images of one shape", got=got)
    return np.stack(images)


# ── the Hub ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _load_from_hub(name: str) -> DataSet:
    import datasets

    hint = near_names(name, SHIPPED) + ", or a directory with train.parquet"
    _check_on_hub(name, hint)
    try:
        splits = datasets.load_dataset(name)
    except (OSError, datasets.exceptions.DatasetsError, ValueError) as error:
        raise DataError(f"cannot load {name!r} from the Hub", expected="a data set", got=error, hint=hint) from None
    if "train" not in splits:
        raise DataError(f"{name}", expected="a train split", got=", ".join(splits), hint=hint)
    train, labels = _hub_split(splits["train"], name)
    test = _hub_split(splits["test"], name)[0] if "test" in splits else None
    return _data_set(name, labels, train, test)


def _check_on_hub(name: str, hint: str) -> None:
    """One short question, so that a wrong name or a missing network is known before half a minute of retries."""
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        HfApi().dataset_info(name, timeout=10)
    except OfflineModeIsEnabled:  # the user asks for the cache
        return
    except RepositoryNotFoundError:
        raise DataError("unknown data set", expected="a name of the Hub", got=name, hint=hint) from None
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise DataError(
            f"data set {name!r} does not ship, and the Hub cannot be asked", expected="an answer", got=error, hint=hint
        ) from None


def _hub_split(split: Any, name: str) -> tuple[ImageSet, tuple[str, ...]]:
    import datasets

    images = [column for column, kind in split.features.items() if isinstance(kind, datasets.Image)]
    labels = [column for column, kind in split.features.items() if isinstance(kind, datasets.ClassLabel)]
    if not images or not labels:
        raise DataError(f"{name}", expected="an image and a class label column", got=", ".join(split.column_names))
    x = _stack([_pixels(image) for image in split[images[0]]], name)
    return ImageSet(x, np.asarray(split[labels[0]], dtype=np.int64)), tuple(split.features[labels[0]].names)


# ── both ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _data_set(name: str, labels: tuple[str, ...], train: ImageSet, test: ImageSet | None) -> DataSet:
    if test is None:
        held = np.arange(len(train)) % 10 == 9
        train, test = train.take(~held), train.take(held)
    for split, images in (("train", train), ("test", test)):
        if not len(images) or int(images.y.min()) < 0 or int(images.y.max()) >= len(labels):
            raise DataError(f"{name}: labels of {split}", expected=f"0 to {len(labels) - 1}", got="others, or none")
    if train.x.shape[1:] != test.x.shape[1:]:
        raise DataError(f"{name}: test images", expected=train.x.shape[1:], got=test.x.shape[1:])
    return DataSet(name, labels, train, test)

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
from edge_client.data import LocalData
from edge_client.images import decode_image

__all__ = ["SHIPPED", "DataSet", "load_dataset", "take"]

SHIPPED = {"fashion_mnist_subset": Path(__file__).parent / "fashion_mnist"}


@dataclass(frozen=True, eq=False)
class DataSet:
    """A named data set with its training and test split."""

    name: str
    labels: tuple[str, ...]
    train: LocalData
    test: LocalData

    @property
    def classes(self) -> int:
        """C."""
        return len(self.labels)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(H, W, c)."""
        height, width, channels = self.train.x.shape[1:]
        return height, width, channels


def take(data: LocalData, indices: NDArray[np.integer] | NDArray[np.bool_]) -> LocalData:
    """Some of the samples, in the order of `indices`."""
    return LocalData(data.x[indices], data.y[indices])


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


def _read_split(path: Path, split: str) -> tuple[LocalData, tuple[str, ...]]:
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
    return LocalData(_decode(blobs, files[0]), y), _class_names(table.schema, label_column, y)


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


def _decode(blobs: list[bytes | None], where: object) -> NDArray[np.uint8]:
    """Images of the first one's shape; another size, or a set of no images, is refused rather than stretched."""
    from PIL import Image, UnidentifiedImageError

    if not blobs:
        raise DataError(f"{where}", expected="at least one image", got="none")
    shape, x = None, np.empty(0, np.uint8)
    for row, blob in enumerate(blobs):
        try:
            with Image.open(io.BytesIO(blob or b"")) as image:
                found = (image.height, image.width, 1 if image.mode in ("1", "L") else 3)
        except (UnidentifiedImageError, OSError) as error:
            raise DataError(f"{where}: row {row}", expected="an encoded image", got=error) from None
        if shape is None:
            shape, x = found, np.empty((len(blobs), *found), np.uint8)
        elif found != shape:
            raise DataError(f"{where}: row {row}", expected=f"an image of shape {shape}", got=found)
        x[row] = decode_image(blob or b"", shape, f"{where}: row {row}")
    return x


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


def _hub_split(split: Any, name: str) -> tuple[LocalData, tuple[str, ...]]:
    import datasets

    images = [column for column, kind in split.features.items() if isinstance(kind, datasets.Image)]
    labels = [column for column, kind in split.features.items() if isinstance(kind, datasets.ClassLabel)]
    if not images or not labels:
        raise DataError(f"{name}", expected="an image and a class label column", got=", ".join(split.column_names))
    encoded = split.cast_column(images[0], datasets.Image(decode=False))[images[0]]
    x = _decode([cell["bytes"] for cell in encoded], name)
    return LocalData(x, np.asarray(split[labels[0]], dtype=np.int64)), tuple(split.features[labels[0]].names)


# ── both ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _data_set(name: str, labels: tuple[str, ...], train: LocalData, test: LocalData | None) -> DataSet:
    if test is None:
        held = np.arange(len(train)) % 10 == 9
        train, test = take(train, ~held), take(train, held)
    for split, images in (("train", train), ("test", test)):
        if not len(images) or int(images.y.min()) < 0 or int(images.y.max()) >= len(labels):
            raise DataError(f"{name}: labels of {split}", expected=f"0 to {len(labels) - 1}", got="others, or none")
    if train.x.shape[1:] != test.x.shape[1:]:
        raise DataError(f"{name}: test images", expected=train.x.shape[1:], got=test.x.shape[1:])
    return DataSet(name, labels, train, test)

"""Images from parquet in the Hub's layout: a struct column {bytes, path} and an integer label column.

- Labels are read first. Images are read a few at a time when they are wanted: as many rows as eight megabytes hold.
- The class names in the schema's `huggingface` metadata are mapped to the bundle's, so that the two may number their
  classes differently. A bundle whose classes are only numbered (0, 1, …), and a file without names, are matched by
  number.
- A directory may hold several files, and several splits. The first word of a file's name, or of a folder above it, says
  the split, as on the Hub: `train-00000-of-00002.parquet`, `data/test.parquet`, `default/train/0000.parquet`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import DataError
from protofleet.contract.extras import install_command
from protofleet.edge_client.data.listing import Listing, Stamp
from protofleet.edge_client.data.samples import UNUSABLE
from protofleet.edge_client.data.splits import split_code

if TYPE_CHECKING:
    import pyarrow.parquet as pq

__all__ = ["list_parquet"]

_LABELS = ("label", "labels", "fine_label", "class")
_READ_BYTES = 8 << 20
_READ_ROWS = 256


@dataclass(frozen=True)
class _File:
    """One parquet file: its image column, and its rows' place among all."""

    path: Path
    name: str
    column: str
    first: int
    rows: int


class ParquetImages:
    """The image cells of some files, one file after another."""

    def __init__(self, files: list[_File], *, each_alone: bool = False) -> None:
        self._files, self._each_alone = files, each_alone

    def name(self, row: int) -> str:
        """The file and its row."""
        file = next(file for file in self._files if row < file.first + file.rows)
        return f"{file.name} row {row - file.first}"

    def read(self, rows: NDArray[np.int64]) -> Iterator[str | bytes]:
        """The bytes of image files; with `each_alone` none for a cell without an image.

        Raises:
            DataError: a cell without an image, or a file that is not whole.
        """
        for file in self._files:
            wanted = rows[(rows >= file.first) & (rows < file.first + file.rows)] - file.first
            if len(wanted):
                yield from self._read_file(file, wanted)

    def _read_file(self, file: _File, wanted: NDArray[np.int64]) -> Iterator[bytes]:
        with _opened(file.path) as source:
            start = 0
            for batch in source.iter_batches(batch_size=_rows_at_once(source, file.path), columns=[file.column]):
                rows = wanted[(wanted >= start) & (wanted < start + len(batch))]
                cells = batch.column(file.column)
                for row in rows:
                    cell = cells[int(row) - start].as_py()
                    image = cell.get("bytes") if cell else None
                    if not image and not self._each_alone:
                        raise DataError(f"{file.path} row {row}", expected="image bytes and a label", got="a null")
                    yield image or b""
                start += len(batch)


def list_parquet(source: Path, paths: list[Path], *, each_alone: bool = False) -> Listing:
    """The rows of a parquet file, or of a directory's files.

    If some files belong to a split, files that belong to none are left out.

    Args:
        each_alone: a row without a label is `UNUSABLE`, and one without an image has an empty one, instead of an error.

    Raises:
        DataError: pyarrow missing, not parquet, no image or label column, a null label, classes that differ by file.
    """
    codes = {path: _split_of(path, source) for path in paths}
    if any(codes.values()):
        paths = [path for path in paths if codes[path]]
    stamp, first = Stamp(), 0
    files, labels, names = [], [], set[tuple[str, ...] | None]()
    for path in paths:
        name = path.name if path == source else str(path.relative_to(source))
        stamp.add(name, path.stat())
        with _opened(path) as table:
            image, label = _columns(table, path)
            names.add(_class_names(table, label))
            labels.append(_labels(table, label, path, each_alone))
        files.append(_File(path, name, image, first, len(labels[-1])))
        first += len(labels[-1])
    if len(names) > 1:
        raise DataError(f"{source}", expected="one list of classes in all its files", got=f"{len(names)} that differ")
    return Listing(
        where=str(source),
        images=ParquetImages(files, each_alone=each_alone),
        labels=np.concatenate(labels),
        splits=np.concatenate([np.full(file.rows, codes[file.path], np.uint8) for file in files]),
        names=names.pop(),
        own_numbers=True,
        stamp=stamp.digest(),
        ids=np.concatenate([_ids(number, file.rows) for number, file in zip(stamp.ids(), files, strict=True)]),
    )


def _ids(file: int, rows: int) -> NDArray[np.uint64]:
    """A number for each row of a file: far from those of other files, which are hashes."""
    return np.uint64(file) + np.arange(rows, dtype=np.uint64)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise DataError(
            f"reading {path}",
            expected="the package pyarrow",
            got="no such package",
            hint=f"{install_command('parquet')}, or a .npz",
        ) from None
    try:
        with pq.ParquetFile(path) as source:
            yield source
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a whole parquet file", expected="the Hub's layout", got=error) from None


def _rows_at_once(source: pq.ParquetFile, path: Path) -> int:
    """As many rows as eight megabytes hold: photos of a camera are megabytes each."""
    row_bytes = path.stat().st_size // max(source.metadata.num_rows, 1) + 1
    return max(1, min(_READ_ROWS, _READ_BYTES // row_bytes))


def _split_of(path: Path, source: Path) -> int:
    """The code of the split that a file's name begins with, or else a folder's above it, the nearest first.

    A file that was itself asked for is taken whole, whatever its name.
    """
    parts = () if path == source else reversed(path.relative_to(source).parts)
    names = (re.match(r"[a-z]*", part.lower()) for part in parts)
    codes = (split_code(name.group()) for name in names if name)
    return next((code for code in codes if code), 0)


def _columns(source: pq.ParquetFile, path: Path) -> tuple[str, str]:
    schema = source.schema_arrow
    images = [field.name for field in schema if _is_image(field.type)]
    integers = [field.name for field in schema if re.fullmatch(r"u?int\d+", str(field.type))]
    labels = [name for name in _LABELS if name in integers] or integers[:1]
    if not images or not labels:
        raise DataError(
            f"{path}",
            expected="a column of image structs {bytes, path} and one of integer labels",
            got=", ".join(f"{field.name} {field.type}" for field in schema),
        )
    return images[0], labels[0]


def _is_image(kind: Any) -> bool:
    fields = [kind.field(index) for index in range(kind.num_fields)] if str(kind).startswith("struct") else []
    return any(field.name == "bytes" and "binary" in str(field.type) for field in fields)


def _labels(source: pq.ParquetFile, column: str, path: Path, each_alone: bool) -> NDArray[np.int64]:
    cells = source.read(columns=[column]).column(column)
    if cells.null_count and each_alone:
        cells = cells.fill_null(UNUSABLE)
    elif cells.null_count:
        row = next(row for row, cell in enumerate(cells) if not cell.is_valid)
        raise DataError(f"{path} row {row}", expected="image bytes and a label", got="a null")
    return np.asarray(cells.to_numpy(), dtype=np.int64)


def _class_names(source: pq.ParquetFile, label: str) -> tuple[str, ...] | None:
    """The class names of the file by its own numbers, or None when it has none."""
    raw = (source.schema_arrow.metadata or {}).get(b"huggingface")
    try:
        names = json.loads(raw)["info"]["features"][label].get("names") if raw else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return tuple(str(name) for name in names) if isinstance(names, list) else None

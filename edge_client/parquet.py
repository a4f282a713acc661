"""Images from parquet in the Hub's layout: a struct column {bytes, path} and an integer label column.

The file is read a few hundred rows at a time, so what is in memory is the decoded uint8 set and one such slice. The
class names in the schema's `huggingface` metadata are mapped to the bundle's, so that the two may number their classes
differently; a bundle whose classes are only numbered (0, 1, …), and a file without names, are matched by number.
A directory may hold several files, and several splits told apart by the beginning of their names, as on the Hub.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from contract.bundle import Manifest
from contract.errors import DataError
from edge_client.data import UNLABELLED, LocalData, Purpose, class_number
from edge_client.images import Skipped, check_channels, decode_image

if TYPE_CHECKING:
    import pyarrow.parquet as pq

__all__ = ["read_parquet"]

_LABELS = ("label", "labels", "fine_label", "class")
_ROWS_AT_ONCE = 256
_SPLITS = {"train": ("train",), "test": ("test", "validation", "valid")}


def read_parquet(
    path: Path, manifest: Manifest, purpose: Purpose, log: Callable[[str], None] = lambda line: None
) -> LocalData:
    """All rows of a parquet file, or of a directory's files of the split that `purpose` names.

    Raises:
        DataError: pyarrow missing, not parquet, no image or label column, a null, an unknown class, no readable image.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise DataError(
            f"reading {path}",
            expected="the package pyarrow",
            got="no such package",
            hint="pip install 'protofleet[parquet]', or a .npz",
        ) from None
    files = [path] if path.is_file() else _of_split(sorted(path.glob("*.parquet")), purpose)
    parts, skipped = [], Skipped(path, log)
    for file in files:
        try:
            with pq.ParquetFile(file) as source:
                parts.append(_read_file(source, file, manifest, skipped))
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file} is not a whole parquet file", expected="the Hub's layout", got=error) from None
    skipped.end()
    return LocalData(np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts]))


def _of_split(files: list[Path], purpose: Purpose) -> list[Path]:
    prefixes = tuple(prefix for group in _SPLITS.values() for prefix in group)
    if not any(file.name.startswith(prefixes) for file in files):
        return files
    chosen = [file for file in files if file.name.startswith(_SPLITS[purpose])]
    if not chosen:
        raise DataError(
            f"{files[0].parent} has no {purpose} split",
            expected=f"{purpose}*.parquet",
            got=", ".join(file.name for file in files[:4]),
        )
    return chosen


def _read_file(source: pq.ParquetFile, file: Path, manifest: Manifest, skipped: Skipped) -> LocalData:
    check_channels(manifest.input_shape, file)
    image, label = _columns(source, file)
    numbers = _numbering(source, label, manifest, file)
    rows = source.metadata.num_rows
    x, y = np.empty((rows, *manifest.input_shape), np.uint8), np.empty(rows, np.int64)
    row = kept = 0
    for batch in source.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[image, label]):
        cells, labels = batch.column(image).to_pylist(), batch.column(label).to_pylist()
        for cell, number in zip(cells, labels, strict=True):
            where = f"{file} row {row}"
            if not cell or not cell.get("bytes") or number is None:
                raise DataError(where, expected="image bytes and a label", got="a null")
            y[kept] = _number(number, numbers, manifest, where)
            row += 1
            try:
                x[kept] = decode_image(cell["bytes"], manifest.input_shape, where)
                kept += 1
            except DataError as error:
                skipped.add(error)
    skipped.seen(row)
    return LocalData(x[:kept], y[:kept])


def _columns(source: pq.ParquetFile, file: Path) -> tuple[str, str]:
    schema = source.schema_arrow
    images = [field.name for field in schema if _is_image(field.type)]
    labels = [name for name in _LABELS if name in schema.names and "int" in str(schema.field(name).type)]
    if not images or not labels:
        raise DataError(
            f"{file}",
            expected="a column of image structs {bytes, path} and one of integer labels",
            got=", ".join(f"{field.name} {field.type}" for field in schema),
        )
    return images[0], labels[0]


def _is_image(kind: Any) -> bool:
    fields = [kind.field(index) for index in range(kind.num_fields)] if str(kind).startswith("struct") else []
    return any(field.name == "bytes" and "binary" in str(field.type) for field in fields)


def _numbering(source: pq.ParquetFile, label: str, manifest: Manifest, file: Path) -> list[str] | None:
    """The class names of the file by its own numbers, or None when classes are matched by number."""
    raw = (source.schema_arrow.metadata or {}).get(b"huggingface")
    try:
        names = json.loads(raw)["info"]["features"][label].get("names") if raw else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    numbered = manifest.labels == tuple(str(index) for index in range(manifest.classes))
    return [str(name) for name in names] if isinstance(names, list) and not numbered else None


def _number(number: int, names: list[str] | None, manifest: Manifest, where: str) -> int:
    if names is None or number == UNLABELLED:  # the Hub's number for a label that is missing
        return number
    if not 0 <= number < len(names):
        raise DataError(f"{where}: label", expected=f"0 to {len(names) - 1}", got=number)
    return class_number(names[number], manifest, where)

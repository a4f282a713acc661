"""A CSV that names images: columns `path`, `label` and, if there are splits, `split`.

    path,label,split
    2024/IMG_0001.JPG,cat,train
    /media/usb/dog.png,dog,test

The first line names the columns, in any order. Other columns are ignored. Paths are relative to the CSV's folder, or
absolute. A row without a label is a sample without a label, for methods that use such. A row without a split trains.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np

from protofleet.contract.errors import DataError
from protofleet.edge_client.data.folder import PathImages
from protofleet.edge_client.data.listing import Listing, Stamp
from protofleet.edge_client.data.samples import UNLABELLED, UNUSABLE
from protofleet.edge_client.data.splits import SPLITS, split_code

__all__ = ["list_csv"]


def list_csv(path: Path, *, each_alone: bool = False) -> Listing:
    """The samples that a CSV names, in its order.

    Args:
        each_alone: a line with an empty path, or a split that is none, is `UNUSABLE` instead of an error.

    Raises:
        DataError: not a CSV with these columns, an empty path, a split that is none, no row.
        OSError: it cannot be read.
    """
    stamp, names = Stamp(), dict[str, int]()
    files, labels, splits = [], [], []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            _check_columns(reader.fieldnames, path)
            for row in reader:
                where = f"{path} line {reader.line_num}"
                try:
                    relative, split = _path(row["path"], where), _split(row.get("split"), where)
                except DataError:
                    if not each_alone:
                        raise
                    relative, split, row["label"] = "", 0, None
                files.append(relative)
                splits.append(split)
                label = (row["label"] or "").strip()
                labels.append(names.setdefault(label, len(names)) if label else UNLABELLED if relative else UNUSABLE)
                stamp.add(files[-1], _stat(os.path.join(path.parent, files[-1])))
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a CSV", expected="text, columns path,label[,split]", got=error) from None
    if not files:
        raise DataError(f"{path} is empty", expected="a line for each image", got="none")
    codes = np.array(splits, np.uint8)
    return Listing(
        where=str(path),
        images=PathImages(path.parent, files),
        labels=np.array(labels, np.int64),
        splits=np.where(codes == 0, np.uint8(1), codes) if codes.any() else codes,
        names=tuple(names),
        own_numbers=False,
        stamp=stamp.digest(),
        ids=stamp.ids(),
    )


def _check_columns(header: object, path: Path) -> None:
    columns = list(header) if isinstance(header, list | tuple) else []
    if not {"path", "label"} <= set(columns):
        raise DataError(
            f"{path}: first line", expected="the columns path,label[,split]", got=",".join(map(str, columns)) or "none"
        )


def _path(text: str | None, where: str) -> str:
    if not text or "\0" in text:
        raise DataError(f"{where}: path", expected="a file's path", got="none")
    return text


def _split(text: str | None, where: str) -> int:
    if not (text or "").strip():
        return 0
    code = split_code(text or "")
    if code is None:
        raise DataError(f"{where}: split", expected=", ".join(SPLITS[1:]), got=text)
    return code


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:  # told with the images that cannot be read
        return None

"""A data set of the Hugging Face Hub by its name, listed like any other source.

`datasets` downloads it and keeps it in its own cache; a device takes the same files as a downloaded folder of parquet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import DataError
from protofleet.edge_client.data.listing import Listing
from protofleet.edge_client.data.splits import split_code

__all__ = ["list_hub"]


class HubImages:
    """The encoded images of some splits, one after another."""

    def __init__(self, splits: list[tuple[str, Any]]) -> None:
        """`splits` are (name, column of cells {bytes, path})."""
        self._splits = splits

    def _place(self, row: int) -> tuple[str, Any, int]:
        for name, cells in self._splits:
            if row < len(cells):
                return name, cells, row
            row -= len(cells)
        raise IndexError(row)

    def name(self, row: int) -> str:
        """The split and its row."""
        split, _, index = self._place(row)
        return f"{split} row {index}"

    def read(self, rows: NDArray[np.int64]) -> Iterator[str | bytes]:
        """The bytes, or the path where the data set has only that."""
        for row in rows:
            _, cells, index = self._place(int(row))
            cell = cells[index] or {}
            yield cell.get("bytes") or cell.get("path") or b""


def list_hub(name: str, hint: str) -> Listing:
    """The splits train, valid and test of a data set.

    Args:
        name: `owner/name`, or `owner/name:part` of a set that comes in parts.
        hint: what else a person could try.

    Raises:
        DataError: no such set, the Hub out of reach, no image or class column, no split to train on.
    """
    import datasets

    place, _, part = name.partition(":")
    _check_on_hub(place, hint)
    try:
        loaded = datasets.load_dataset(place, part or None)
    except (OSError, datasets.exceptions.DatasetsError, ValueError) as error:
        raise DataError(f"cannot load {name!r} from the Hub", expected="a data set", got=error, hint=hint) from None
    return list_splits(dict(loaded), name, hint)


def list_splits(splits: dict[str, Any], name: str, hint: str) -> Listing:
    """The splits of a loaded data set, by name.

    Raises:
        DataError: as `list_hub`.
    """
    import datasets

    coded = [(split, code) for split in splits if (code := split_code(split))]
    if 1 not in [code for _, code in coded]:
        raise DataError(f"{name}", expected="a train split", got=", ".join(splits), hint=hint)
    cells, labels, codes, names = [], [], [], tuple[str, ...]()
    for split, code in coded:
        table = splits[split]
        images = [column for column, kind in table.features.items() if isinstance(kind, datasets.Image)]
        classes = [column for column, kind in table.features.items() if isinstance(kind, datasets.ClassLabel)]
        if not images or not classes:
            raise DataError(f"{name}", expected="an image and a class label column", got=", ".join(table.column_names))
        cells.append((split, table.cast_column(images[0], datasets.Image(decode=False))[images[0]]))
        labels.append(np.asarray(table[classes[0]], dtype=np.int64))
        codes.append(np.full(len(table), code, np.uint8))
        names = tuple(table.features[classes[0]].names)
    return Listing(
        where=name,
        images=HubImages(cells),
        labels=np.concatenate(labels),
        splits=np.concatenate(codes),
        names=names,
        own_numbers=True,
        stamp=b"",
    )


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

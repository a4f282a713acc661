"""The device's own samples, as values: images that are exactly of the bundle's shape, labels that are of its classes.

Images stay uint8: no float copy of the set is ever made, since turning uint8 into normalised floats is the graph's work
(docs/bundle.md). `edge_client/load.py` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from contract.bundle import Manifest
from contract.errors import DataError, near_names

__all__ = ["UNLABELLED", "LocalData", "Purpose", "class_number"]

Purpose = Literal["train", "test"]
UNLABELLED = -1
_UNLABELLED_NAME = "unlabelled"


@dataclass(frozen=True, eq=False)
class LocalData:
    """Images and labels of one device.

    Attributes:
        x: (N, H, W, c) uint8.
        y: (N,) int64, class numbers; `UNLABELLED` for a sample without a label.
    """

    x: NDArray[np.uint8]
    y: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.y)

    def counts(self, classes: int) -> NDArray[np.int64]:
        """(C,) how many samples each class has."""
        return np.bincount(self.y[self.y >= 0], minlength=classes)

    @property
    def labelled(self) -> LocalData:
        """The samples that have a label: itself when all have one."""
        known = self.y >= 0
        return self if known.all() else LocalData(self.x[known], self.y[known])


def class_number(label: str, manifest: Manifest, where: object) -> int:
    """The number of a class name; `UNLABELLED` for the folder `unlabelled`, where the method knows such samples.

    Raises:
        DataError: when the bundle has no such class; the line names the nearest ones.
    """
    try:
        return manifest.labels.index(label)
    except ValueError:
        if label == _UNLABELLED_NAME and "pu_weight" in manifest.hyper:
            return UNLABELLED
        raise DataError(
            f"{where}: unknown class",
            expected=f"a class of the bundle's {manifest.classes}",
            got=repr(label)[:80],
            hint=near_names(label, manifest.labels[:1000]),
        ) from None

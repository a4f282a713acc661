"""The features of a device's images under weights that never change: extracted once, while the images stay the same.

A device of a frozen network asks for the features of its training images several times a round: for what it sends, for
its own class means, and for the figures without the fleet that its answers are compared with. It asks for those of its
test images after each global state. An extractor takes nearly all of that time, and gives the same numbers each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from protofleet.edge_client.data.samples import release_pages
from protofleet.edge_client.training.extractor import Extractor

__all__ = ["KEPT_BYTES", "KeptFeatures"]

KEPT_BYTES = 8 << 20  # of the features of one set of images; 1,638 images at 1,280 features
_Blocks = list[tuple[slice, NDArray[np.float32]]]


class KeptFeatures(Extractor):
    """An extractor that keeps the features of whole sets of images, of each set that fits `KEPT_BYTES`.

    Args:
        width: D.
        extractor: opens the extractor; it is not called where all that is asked for is kept.
        sets: (N, H, W, c) uint8 each; only of these arrays features are kept.
    """

    def __init__(self, width: int, extractor: Callable[[], Extractor], *sets: NDArray[np.uint8]) -> None:
        self._width, self._open = width, extractor
        row_bytes = width * np.float32().itemsize
        self._sets = [x for x in sets if len(x) * row_bytes <= KEPT_BYTES]
        self._kept: dict[int, _Blocks] = {}

    @property
    def width(self) -> int:
        return self._width

    def features(self, x: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Of images (N, H, W, c), whichever they are: (N, D) float32, extracted anew."""
        return self._open().features(x)

    def blocks(self, x: NDArray[np.uint8], samples: int | None = None) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        """As `Extractor.blocks`. Of a known set they are the very same blocks each time, which nobody may change."""
        place = self._place(x) if samples is None else -1
        if place in self._kept:
            yield from self._kept[place]
            return
        found: _Blocks = []
        for block in self._open().blocks(x, samples):
            if place >= 0:
                found.append(block)
            yield block
        if place >= 0:
            self._kept[place] = found

    def chosen(
        self, x: NDArray[np.uint8], rows: NDArray[np.intp], samples: int
    ) -> Iterator[tuple[NDArray[np.intp], NDArray[np.float32]]]:
        """The features of some images, block by block: (which rows, their features).

        Args:
            x: (N, H, W, c) uint8.
            rows: of `x`, in any order.
            samples: of a block.
        """
        kept = self._kept.get(self._place(x), [])
        extractor = None if kept else self._open()
        for start in range(0, len(rows), samples):
            some = rows[start : start + samples]
            if extractor is None:
                yield some, _gathered(kept, some, self._width)
                continue
            images = x[some]  # a copy: what it was made of is not needed any more
            release_pages(x)
            yield some, extractor.features(images)

    def _place(self, x: NDArray[np.uint8]) -> int:
        """Of a set among those that are known; -1 for another."""
        return next((place for place, known in enumerate(self._sets) if known is x), -1)


def _gathered(kept: _Blocks, rows: NDArray[np.intp], width: int) -> NDArray[np.float32]:
    """The features (n, D) of these rows."""
    found = np.empty((len(rows), width), np.float32)
    for block, features in kept:
        here = (block.start <= rows) & (rows < block.stop)
        found[here] = features[rows[here] - block.start]
    return found

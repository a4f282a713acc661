"""Groups photos that are copies or near copies: frames of a burst, a file saved again, a camera that sees the same.

1. A photo becomes a thumbnail of 8 × 8, by the mean over areas. Its mean is subtracted, and all channels together are
   scaled to length 1. So light and noise hardly change it.
2. The surroundings of a photo are the distance to its tenth nearest neighbour. Neighbours nearer than 3 % of the usual
   distance between two photos do not count. So a long burst is not its own surroundings.
3. Two photos are near copies if their distance is below a third of the surroundings of both, or if their pixels are
   equal. A copy of a copy belongs to the same group.

Two reasons (decision 223 has the figures):

- Thumbnails and not features: features of pretrained networks differ as much for two frames of a moving camera as for
  two different photos of a hand.
- A threshold relative to the surroundings: different digits are nearer to each other than different landscapes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from protofleet.edge_client.data.samples import pixel_hash

__all__ = ["near_copies"]

SIDE = 8
NEIGHBOUR = 10  # the neighbour whose distance is the surroundings; of fewer than 100 photos, a tenth of them
ALIKE = 1 / 3  # of the surroundings
_NO_SURROUNDINGS = 0.03  # of the usual distance between two photos
_ROWS = 512

Images = NDArray[np.uint8]
Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]


def near_copies(parts: list[Images]) -> Int64:
    """(N,) a group number for each photo: the smallest index in its group of copies and near copies.

    Args:
        parts: arrays of photos (n, H, W, c) uint8. They are read block by block.
    """
    thumbs, group = _thumbnails(parts), _Groups(_equal(parts))
    count = len(thumbs)
    if count < 3:
        return group.numbers()
    neighbour = min(NEIGHBOUR, max(1, count // 10))
    sample = np.linspace(0, count - 1, min(count, 500)).astype(np.int64)
    usual = float(np.median([np.median(row) for _, rows in _distances(thumbs, sample) for row in rows]))
    around = np.empty(count, np.float32)
    for places, rows in _distances(thumbs, np.arange(count)):
        around[places] = [_nth(np.where(row < _NO_SURROUNDINGS * usual, np.inf, row), neighbour) for row in rows]
    for places, rows in _distances(thumbs, np.arange(count)):
        for one, other in zip(*np.nonzero(rows < ALIKE * np.minimum(around[places, None], around)), strict=True):
            group.join(int(places[one]), int(other))
    return group.numbers()


def _thumbnails(parts: list[Images]) -> Float32:
    """(N, SIDE² c) thumbnails of length 1, or 0 for a photo of one colour."""
    thumbnails = []
    for images in parts:
        for start in range(0, len(images), _ROWS):
            x = images[start : start + _ROWS]
            down, across = _means(x.shape[1]), _means(x.shape[2])
            small = np.tensordot(np.tensordot(x.astype(np.float32), down, (1, 1)), across, (1, 1)).reshape(len(x), -1)
            small -= small.mean(axis=1, keepdims=True)
            length = np.linalg.norm(small, axis=1, keepdims=True)
            thumbnails.append(np.divide(small, length, out=np.zeros_like(small), where=length > 1e-3))
    return np.concatenate(thumbnails) if thumbnails else np.zeros((0, SIDE * SIDE), np.float32)


def _means(length: int) -> Float32:
    """(SIDE, length) the share of each of `length` rows of pixels in each row of a thumbnail."""
    edges, pixels = np.linspace(0, length, SIDE + 1), np.arange(length)
    overlap = np.minimum(pixels + 1, edges[1:, None]) - np.maximum(pixels, edges[:-1, None])
    return (np.maximum(overlap, 0) * SIDE / length).astype(np.float32)


def _equal(parts: list[Images]) -> Int64:
    """(N,) a number for each photo, equal for equal pixels."""
    numbers: dict[bytes, int] = {}
    hashes = (pixel_hash(image) for images in parts for image in images)
    return np.array([numbers.setdefault(digest, len(numbers)) for digest in hashes], np.int64)


def _distances(thumbs: Float32, places: Int64) -> Iterator[tuple[Int64, Float32]]:
    """Blocks of `places`, each with its distances (n, N) to all photos. The distance to itself is infinite."""
    for start in range(0, len(places), _ROWS):
        some = places[start : start + _ROWS]
        distances = np.sqrt(np.maximum(2.0 - 2.0 * (thumbs[some] @ thumbs.T), 0.0))
        distances[np.arange(len(some)), some] = np.inf
        yield some, distances


def _nth(distances: Float32, number: int) -> float:
    """The `number`-th smallest of distances (N,)."""
    return float(np.partition(distances, number - 1)[number - 1])


class _Groups:
    """Disjoint sets of photos (union-find). A set is named by its smallest photo."""

    def __init__(self, first: Int64) -> None:
        """From (N,) numbers that are equal for those of one set."""
        _, places, back = np.unique(first, return_index=True, return_inverse=True)
        self._above: list[int] = places[back].tolist()

    def join(self, one: int, other: int) -> None:
        a, b = sorted((self._root(one), self._root(other)))
        self._above[b] = a

    def numbers(self) -> Int64:
        return np.array([self._root(place) for place in range(len(self._above))], np.int64)

    def _root(self, place: int) -> int:
        while self._above[place] != place:
            self._above[place] = self._above[self._above[place]]
            place = self._above[place]
        return place

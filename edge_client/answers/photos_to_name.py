"""Which of the kept photos to name next: near copies once, then the ranking of `suggestions`; what is unknown apart.

1. Photos that are named or set aside are left out.
2. Near copies are put together: a photo belongs to the newest one whose features are nearer than a tenth of the usual
   squared distance between two kept photos, or than `_SAME`, which is what noise of a still camera makes. The newest
   stands for all of them.
3. A photo that is unlike all that the fleet knows is in a row of its own: it may belong to a class that the fleet has
   not got. The most unlike comes first.
4. The others come in the order of `suggestions.suggested`: what is like no named photo, and unsure, first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protofleet.edge_client.answers.suggestions import RANDOM, suggested
from protofleet.edge_client.photos.kept_photo import KeptPhoto

__all__ = ["ToName", "alike", "photos_to_name"]

_NEAR = 0.1  # of the usual squared distance
_SAME = 0.005  # squared distance of unit features
_SAMPLE = 400  # photos from which the usual distance is taken
_WHY_UNKNOWN = "unknown"


@dataclass(frozen=True)
class ToName:
    """A photo to name.

    Attributes:
        photo: the newest of its near copies.
        alike: these, itself included.
        why: as of `Suggestion`, or `unknown`.
    """

    photo: KeptPhoto
    alike: tuple[KeptPhoto, ...]
    why: str

    @property
    def times(self) -> int:
        """How many pictures it stands for."""
        return sum(photo.times for photo in self.alike)


def photos_to_name(
    photos: Sequence[KeptPhoto],
    features: NDArray[np.float32],
    named: Collection[bytes],
    count: int,
    *,
    labelled: NDArray[np.float32] | None = None,
    seed: int = 0,
    random_share: float = RANDOM,
) -> tuple[list[ToName], list[ToName]]:
    """Photos to name, the most useful first; and those that are unknown to the fleet.

    Args:
        photos: that are kept, newest first.
        features: (N, D) of these, of length 1.
        named: hashes of the pixels that have a label.
        count: of either, at most.
        labelled: (M, D) features of all named photos, where they are known; else those that are kept are taken.
        seed, random_share: as of `suggested`.
    """
    is_named = np.array([photo.pixels in named for photo in photos], bool)
    free = [row for row, photo in enumerate(photos) if not is_named[row] and not photo.aside]
    groups = alike(features, free)
    unknown = [group for group in groups if photos[group[0]].is_unknown]
    known = [group for group in groups if not photos[group[0]].is_unknown]
    unknown.sort(key=lambda group: -(photos[group[0]].novelty or 0.0))
    labelled = features[is_named] if labelled is None else labelled
    found = []
    if known:
        first = [group[0] for group in known]
        uncertainty = np.array([photos[row].uncertainty for row in first])
        chosen = suggested(features[first], uncertainty, labelled, count, seed=seed, random_share=random_share)
        found = [(known[suggestion.row], suggestion.why) for suggestion in chosen]
    rows = [*found, *((group, _WHY_UNKNOWN) for group in unknown[:count])]
    ready = [ToName(photos[group[0]], tuple(photos[row] for row in group), why) for group, why in rows]
    return ready[: len(found)], ready[len(found) :]


def alike(features: NDArray[np.float32], rows: Sequence[int]) -> list[list[int]]:
    """Groups of near copies of these rows, each group and each photo in it in the order of `rows`."""
    if not rows:
        return []
    near = max(_NEAR * _usual(features[list(rows)]), _SAME)
    firsts: list[int] = []
    groups: list[list[int]] = []
    for row in rows:
        squares = 2.0 - 2.0 * (features[firsts] @ features[row]) if firsts else np.empty(0)
        nearest = int(squares.argmin()) if len(squares) else -1
        if nearest >= 0 and squares[nearest] < near:
            groups[nearest].append(row)
        else:
            firsts.append(row)
            groups.append([row])
    return groups


def _usual(features: NDArray[np.float32]) -> float:
    """The median squared distance between two photos."""
    some = features[:: max(len(features) // _SAMPLE, 1)]
    if len(some) < 2:
        return 0.0
    squares = 2.0 - 2.0 * (some @ some.T)
    return float(np.median(squares[np.triu_indices(len(some), 1)]))

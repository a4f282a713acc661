"""Which unlabelled photos would teach most if they were named: from features alone, nothing is written or sent.

1. All photos, named and unnamed, are put into groups of alike ones (k-means on unit features). There are as many groups
   as named photos and suggestions together, so that a group is about one photo's worth.
2. Groups without a named photo come first, in the order of their uncertainty: the sum over their photos of the entropy
   of the answer. A large group that the head is unsure of comes before a single odd photo. Of each group the photo
   nearest to its middle is suggested, so near copies are asked about once.
3. Groups with a named photo follow, where the first ones are too few.
4. A share of the suggestions is drawn at random, every one with the same chance. So what the head is wrongly sure of is
   asked about, too, and the named photos stay a fair sample of what there is.

`benchmarks/answers/labelling.py` compares it with random choice; docs/decisions/250 says what else was tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.heads.answers import softmax

__all__ = ["RANDOM", "Suggestion", "groups_of", "suggested", "uncertainty_of"]

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]
RANDOM = 0.1  # share of suggestions
_STEPS = 20  # of k-means at most
_MOST_GROUPS = 512
_USUAL_TEMPERATURE = 0.5  # of scores without a calibration, in units of their scale: only their order counts
_BLOCK = 4_096  # photos whose distances to all middles are in memory at once


@dataclass(frozen=True)
class Suggestion:
    """A photo to name.

    Attributes:
        row: of the unlabelled photos.
        why: `new` for a group without a named photo, `unsure` for one with, `random` for a random one.
        alike: how many unlabelled photos are in its group, itself included.
        uncertainty: the entropy of the answer, 0 (sure) to 1 (all classes are equally likely).
    """

    row: int
    why: str
    alike: int
    uncertainty: float


def suggested(
    features: Float32,
    uncertainty: NDArray[np.floating],
    labelled: Float32,
    count: int,
    *,
    seed: int = 0,
    random_share: float = RANDOM,
) -> list[Suggestion]:
    """Photos to name, the most useful first.

    Args:
        features: (N, D) unit features of unlabelled photos.
        uncertainty: (N,) of their answers, 0 to 1; ones where there is no answer yet.
        labelled: (M, D) unit features of named photos.
        count: how many are wanted; fewer come where there are fewer photos.
        seed: of groups and random suggestions.
        random_share: 0 to 1.
    """
    count = min(count, len(features))
    if not count:
        return []
    rng = np.random.default_rng(seed)
    everything = np.concatenate([features, labelled])
    wanted = min(len(labelled) + count, _MOST_GROUPS, len(everything))
    group, middles = groups_of(everything, wanted, rng)
    own, named = group[: len(features)], np.bincount(group[len(features) :], minlength=len(middles)) > 0
    alike = np.bincount(own, minlength=len(middles))
    weight = np.bincount(own, weights=np.maximum(uncertainty, 1e-6), minlength=len(middles))
    by_chance = _randomly(count, random_share, len(features), rng)
    chosen: list[Suggestion] = []
    taken = set(by_chance)
    order = [number for number in np.lexsort((-weight, named)) if alike[number]]
    room = count - len(by_chance)
    turns = 0
    while len(chosen) < room and turns <= int(alike.max()):
        for number in order:
            row = _nearest(features, own, middles, int(number), taken)
            if row is not None and len(chosen) < room:
                taken.add(row)
                why = "unsure" if named[number] or turns else "new"
                chosen.append(Suggestion(row, why, int(alike[number]), float(uncertainty[row])))
        turns += 1
    for row in by_chance:
        chosen.append(Suggestion(row, "random", int(alike[own[row]]), float(uncertainty[row])))
    return chosen


def uncertainty_of(
    scores: NDArray[np.float64], scale: float, probabilities: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """The entropy (N,) of answers, 0 (sure) to 1 (all classes that can be answered are equally likely).

    Args:
        scores: (N, C), −inf for a class that is never answered.
        scale: of the scores (`Answer.scale`).
        probabilities: (N, C), where they are calibrated.
    """
    found = softmax(scores / scale / _USUAL_TEMPERATURE) if probabilities is None else probabilities
    classes = max(int(np.isfinite(scores[0]).sum()), 2)
    entropy = -(found * np.log(np.maximum(found, 1e-12))).sum(axis=1) / np.log(classes)
    return np.asarray(np.clip(entropy, 0.0, 1.0), dtype=np.float64)


def groups_of(features: Float32, count: int, rng: np.random.Generator) -> tuple[Int64, Float32]:
    """K-means: the group of each photo (N,), and the middle of each group (K, D), at most `count` of them.

    The first middles are drawn as k-means++ draws them (Arthur and Vassilvitskii, SODA 2007). A group that loses all
    its photos keeps its middle.
    """
    middles = _first_middles(features, count, rng)
    group = _nearest_middles(features, middles)
    for _ in range(_STEPS):
        counts = np.bincount(group, minlength=len(middles))
        sums = np.zeros_like(middles, dtype=np.float64)
        np.add.at(sums, group, features)
        middles = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], middles).astype(np.float32)
        newer = _nearest_middles(features, middles)
        if np.array_equal(newer, group):
            break
        group = newer
    return group, middles


def _first_middles(features: Float32, count: int, rng: np.random.Generator) -> Float32:
    first = int(rng.integers(len(features)))
    chosen, squares = [first], _squares(features, features[first])
    while len(chosen) < count and squares.max() > 1e-6:
        chosen.append(int(rng.choice(len(features), p=squares / squares.sum())))
        squares = np.minimum(squares, _squares(features, features[chosen[-1]]))
    return np.array(features[chosen])


def _squares(features: Float32, middle: Float32) -> NDArray[np.float64]:
    """Squared distances (N,) of unit features to one of them."""
    return np.maximum(2.0 - 2.0 * (features @ middle).astype(np.float64), 0.0)


def _nearest_middles(features: Float32, middles: Float32) -> Int64:
    half = 0.5 * (middles.astype(np.float64) ** 2).sum(axis=1)
    blocks = range(0, len(features), _BLOCK)
    return np.concatenate([(features[s : s + _BLOCK] @ middles.T - half).argmax(axis=1) for s in blocks])


def _nearest(features: Float32, own: Int64, middles: Float32, number: int, taken: set[int]) -> int | None:
    """The photo nearest to a group's middle, of those that are not taken."""
    rows = [row for row in np.flatnonzero(own == number) if row not in taken]
    if not rows:
        return None
    apart = features[rows] @ middles[number]
    return int(rows[int(apart.argmax())])


def _randomly(count: int, share: float, photos: int, rng: np.random.Generator) -> Sequence[int]:
    wanted = min(round(share * count), count)
    return [int(row) for row in rng.choice(photos, wanted, replace=False)]

"""Devices whose labels other devices contradict: found from class means alone, without any data on the server.

Devices i and h that both hold class j contradict each other when i's mean of j lies nearer to what h calls another
class than to what h calls j, or the other way round, and by more than chance explains (docs/decisions/158):

1. Take the class means of every device, of classes of which it has at least `LEAST` samples.
2. Measure chance: how far means of one class lie apart by chance, for each pair of classes. It is a median over the
   pairs of each device, and then over devices, so that less than half of the devices cannot shift it.
3. A mean of j contradicts when it goes towards class k farther than half the way, and farther than chance goes in one
   of `ALARMS` honest rounds.
4. Accuse the device that is contradicted by more devices than may lie at all, a third of them (`LIARS`), and by at
   least two. Then the next device is judged without those already accused. No honest device is accused, whatever it
   holds and whatever liars say together, while no more than that lie and honest devices do not contradict each other.
5. Suspect a device, and nothing more, when most of the devices that share classes with it contradict it.
6. A device that the operator vouches for, such as one with its own photos of every class, is never accused. A device
   that contradicts it is accused. For classes that vouched devices hold, only they accuse, whatever all others say
   together.

So a class that only one device holds accuses nobody. Where few devices share classes, liars are not named unless a
device is vouched for: a wrong accusation costs a fleet its rare classes, a missed one only what `--max-share` leaves to
a liar.

Features may have any length, and any statistic with rows of features will do. FFC's sums have such rows; their squares
are not used.

Memory: at most `REFERENCES` devices serve for comparison, chosen by the hash of their names, and their means take at
most `_REFERENCE_BYTES`. All other devices are read once, one at a time. Chance may choose too many liars as references.
So correspondingly more of the references than a third must then contradict, up to half.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from protofleet.aggregator.screening.class_displacements import (
    LEAST,
    Means,
    References,
    Screen,
    crossed,
    displacement,
    displacement_back,
)
from protofleet.contract.sums.merge_rules import Source
from protofleet.contract.sums.statistics import Statistic

__all__ = ["ALARMS", "LEAST", "LIARS", "REFERENCES", "Contradicted", "Some", "agreeing", "contradicted", "has_means"]

LIARS = 3  # one device of so many may lie, rounded
ALARMS = 1_000  # honest rounds, of which one accuses somebody by chance if means are normally distributed
REFERENCES = 256
_REFERENCE_BYTES = 32 << 20
_DRAWN = 4.0  # deviations of how many of the liars are among the references
_MEDIAN = 0.6745  # of the absolute value of a standard normal variable

Float64 = NDArray[np.float64]
Some = Callable[[Collection[str]], Iterator[Statistic]]


@dataclass(frozen=True)
class Contradicted:
    """A device that others contradict.

    Attributes:
        accused: whether more devices than may lie contradict it, or one that is vouched for. Otherwise most of the
            devices that could tell do.
        by: how many devices contradict it, of `of` devices that share a class with it.
        label, looks_like: the class in which most contradict it, and which of the others' classes that looks like.
        vouched: whether `by` and `of` count only devices that are vouched for.
    """

    device: str
    accused: bool
    by: int
    of: int
    label: int
    looks_like: int
    vouched: bool = False

    def words(self, labels: Sequence[str] = ()) -> str:
        """The reason in words, with the names of the classes, or their numbers without labels."""
        label, other = (
            labels[number] if number < len(labels) else str(number) for number in (self.label, self.looks_like)
        )
        by = f"contradicted by {self.by} of {self.of} devices" + (" that are vouched for" if self.vouched else "")
        return f"what it calls {label} is like what others call {other}: {by}"


def has_means(kind: type[Statistic]) -> bool:
    """Whether a statistic has class means of features to compare."""
    return any(field.width == "features" for field in kind.row_fields())


def contradicted(
    source: Source, devices: Sequence[str], vouched: Collection[str] = (), some: Some | None = None
) -> list[Contradicted]:
    """The contradicted devices: accused ones first, then the most contradicted first.

    Args:
        source: yields one statistic for each device, in that order, every time; one that `has_means`.
        devices: fewer than three contradict nobody.
        vouched: the names of devices that do not lie; some of them may not be among `devices`.
        some: yields the statistics of the given devices alone, in their order, where that reads less than `source`.
    """
    if len(devices) < 3:
        return []
    classes, width = next((statistic.classes, statistic.width) for statistic in source())
    chosen = _chosen(devices, classes, width, vouched)
    places = sorted(chosen)
    if some is None:
        chosen_means = [Means.of(statistic) for index, statistic in enumerate(source()) if index in chosen]
    else:
        chosen_means = list(map(Means.of, some([devices[index] for index in places])))
    references = References.of(chosen_means, classes)
    sure = np.array([devices[place] in vouched for place in places])
    spread = _spread(chosen_means, references, sure)
    if spread is None:
        return []
    everyone = iter(chosen_means) if len(chosen_means) == len(devices) else map(Means.of, source())
    return _Verdicts.of(everyone, references, places, sure, spread, len(devices)).contradicted(devices)


def agreeing(some: Some, devices: Sequence[str], among: Collection[str]) -> tuple[str, ...]:
    """The largest group of devices in `among` that share classes and do not contradict each other, each with each.

    A group grows from each device. The other devices join in the order of how many they agree with. Of two equally
    large groups, the first by name is taken.

    What chance does is measured on all devices, as in `contradicted`, so that the few do not set the measure.

    Args:
        some: as of `contradicted`.
        devices: all devices of the round.
        among: some of them; at most `REFERENCES` are looked at, chosen as the references are.
    """
    chosen = sorted(set(among) & set(devices))
    if len(chosen) < 2:
        return tuple(chosen)
    classes, width = next((statistic.classes, statistic.width) for statistic in some(chosen[:1]))
    places = sorted(_chosen(devices, classes, width, ()))
    compared = list(map(Means.of, some([devices[place] for place in places])))
    spread = _spread(compared, References.of(compared, classes), np.zeros(len(places), bool))
    if spread is None:
        return ()
    chosen = [chosen[place] for place in sorted(_chosen(chosen, classes, width, ()))]
    means, indices = list(map(Means.of, some(chosen))), range(len(chosen))
    nobody, among_them = np.zeros(len(chosen), bool), References.of(means, classes)
    verdicts = _Verdicts.of(iter(means), among_them, indices, nobody, spread, len(devices))
    could, against = verdicts.could[: len(chosen)], verdicts.against[: len(chosen)]
    agree = (could | could.T) & ~(against | against.T)
    order, largest = sorted(indices, key=lambda index: -int(agree[index].sum())), list[int]()
    for first in indices:
        group = [first]
        for index in order:
            if agree[index, group].all():  # nobody with itself
                group.append(index)
        largest = max(largest, sorted(group), key=len)
    return tuple(chosen[index] for index in largest)


def _chosen(devices: Sequence[str], classes: int, width: int, vouched: Collection[str]) -> set[int]:
    """The places of those to compare with: who is vouched for, and others by name, so that order plays no part.

    All names together decide, so that liars who name themselves cannot take the places of all others.
    """
    most = max(16, min(REFERENCES, _REFERENCE_BYTES // (4 * classes * max(classes, width))))
    names = hashlib.sha256(" ".join(sorted(devices)).encode()).hexdigest()

    def rank(index: int) -> tuple[bool, bytes]:
        return devices[index] not in vouched, hashlib.sha256(f"{names} {devices[index]}".encode()).digest()

    return set(sorted(range(len(devices)), key=rank)[:most])


@dataclass(frozen=True, eq=False)
class _Spread:
    """What chance does.

    Attributes:
        total: the squared distance of two means of one class, times the samples (1/n + 1/m): twice none, once each.
        along: (C, C) deviation of a mean of class j along the way to class k, in the same units.
    """

    total: float
    along: Float64


def _spread(means: Sequence[Means], references: References, sure: NDArray[np.bool_]) -> _Spread | None:
    """From the references among themselves; None where no two share a class.

    No more than chance goes in all directions together, which those that are vouched for say alone where two share a
    class: so liars who are the most of a class's holders, or of all devices, are not the measure of their lie.
    """
    # (K, R) each
    apart = [_distances(*pair, references, index) for index, pair in enumerate(crossed(means, references))]
    total = _median(np.array([_median(distances) for distances in apart]))
    if not np.isfinite(total):
        return None
    among = [distances[:, sure].ravel() for distances, vouched in zip(apart, sure, strict=True) if vouched]
    total = float(np.fmin(total, _median(np.concatenate([np.zeros(0), *among]))))
    count, nearest = references.inverse.shape[1], []
    by_pair = np.full((len(means), count, count), np.nan)
    for index, (device_means, products) in enumerate(crossed(means, references)):
        moved = displacement(device_means, references, products, total, but=index)
        distances = np.abs(moved.chance)  # (K, R, C)
        by_pair[index, device_means.classes] = _median_along(distances, axis=1)
        closest = np.argmax(moved.beyond, axis=2, keepdims=True)
        nearest.append(_median(np.take_along_axis(distances, closest, axis=2)))
    usual = _median(np.array(nearest))
    if not np.isfinite(usual):
        return None
    by_pair[:, np.isfinite(by_pair).sum(axis=0) < 3] = np.nan  # of one or two, a liar would be its own measure
    along = np.minimum(np.fmax(_median_along(by_pair, axis=0), usual), math.sqrt(total))
    return _Spread(total, along / _MEDIAN)


def _distances(device_means: Means, products: NDArray[np.float32], references: References, but: int) -> Float64:
    """(K, R) squared distances of means of the same class, over (1/n + 1/m); NaN where there is none."""
    same = np.take_along_axis(products, device_means.classes[:, None, None], axis=2)[..., 0].astype(np.float64)
    squares = references.squares.T[device_means.classes]  # (K, R)
    inverse = references.inverse[:, device_means.classes].T.copy()
    inverse[:, but] = np.nan
    distance = squares + squares[:, but : but + 1] - 2.0 * same
    return np.asarray(np.maximum(distance, 0.0) / (device_means.inverse[:, None] + inverse))


@dataclass(frozen=True, eq=False)
class _Verdicts:
    """Who contradicts whom.

    Attributes:
        places: (R,) of the references among the devices.
        sure: (R,) whether a reference is vouched for.
        against: (N, R) whether that reference and the device contradict each other.
        could: (N, R) whether they could.
        judged: (N,) whether those that are vouched for hold every class that a device does.
        worst: (N, 2) the class that speaks most against a device, and which it looks like.
    """

    places: Sequence[int]
    sure: NDArray[np.bool_]
    against: NDArray[np.bool_]
    could: NDArray[np.bool_]
    judged: NDArray[np.bool_]
    worst: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        everyone: Iterator[Means],
        references: References,
        places: Sequence[int],
        sure: NDArray[np.bool_],
        spread: _Spread,
        devices: int,
    ) -> _Verdicts:
        class_counts = np.isfinite(references.inverse).sum(axis=1)
        limit = NormalDist().inv_cdf(1.0 - 1.0 / (ALARMS * devices * max(1.0, float(class_counts.mean()))))
        against, could = np.zeros((devices, len(places)), bool), np.zeros((devices, len(places)), bool)
        worst, at_reference = np.full((devices, 2), -1), {place: index for index, place in enumerate(places)}
        weight = 1 + len(places) * devices * sure  # who is vouched for says what is told, if it says anything
        known_classes: NDArray[np.bool_] = np.isfinite(references.inverse[sure]).max(axis=0, initial=False)
        judged = np.zeros(devices, bool)
        screen = Screen(references, spread.total, limit * spread.along)
        for index, (device_means, products) in enumerate(crossed(everyone, references)):
            judged[index] = known_classes[device_means.classes].all()
            if not len(device_means.classes):
                continue
            votes = np.zeros((len(device_means.classes), references.inverse.shape[1]), np.int64)
            candidates = screen.seen(device_means, products)
            own_along, total = spread.along[device_means.classes], spread.total
            could[index] = candidates.possible
            forward, back, ways = candidates.displacement, candidates.displacement_back, []
            if len(forward[0]):
                ways.append(
                    (
                        forward,
                        displacement(device_means, references, products, total, forward, at_reference.get(index)),
                        own_along,
                        False,
                    )
                )
            if len(back[0]):
                ways.append(
                    (
                        back,
                        displacement_back(device_means, references, products, total, back),
                        own_along[:, device_means.classes],
                        True,
                    )
                )
            for (label, by), moved, along, is_back in ways:
                beyond_chance = ((moved.beyond > 0) & (moved.chance > limit * along[label])).any(axis=1)
                label, by, nearest = label[beyond_chance], by[beyond_chance], moved.beyond[beyond_chance].argmax(axis=1)
                against[index, by] = True
                np.add.at(votes, (nearest, device_means.classes[label]) if is_back else (label, nearest), weight[by])
            if index in at_reference:
                against[index, at_reference[index]] = could[index, at_reference[index]] = False
            row, column = np.unravel_index(int(votes.argmax()), votes.shape)
            worst[index] = device_means.classes[row], column
        return cls(places, sure, against, could, judged, worst)

    def contradicted(self, devices: Sequence[str]) -> list[Contradicted]:
        """Accused and suspected devices."""
        believed = np.ones(len(self.places), bool)  # references that are not accused
        at_reference = {place: index for index, place in enumerate(self.places)}
        may_lie, most = _may_lie(len(self.places), len(devices)), _may_lie(len(devices), len(devices))
        unjudged, accused = np.ones(len(devices), bool), list[Contradicted]()
        unjudged[np.array(self.places)[self.sure]] = False
        liars = np.flatnonzero((self.against & self.sure).any(axis=1) & unjudged)
        for index in sorted(map(int, liars), key=lambda index: devices[index]):
            accused.append(self._contradicted(index, devices, True, self.sure, vouched=True))
            unjudged[index] = False
            if index in at_reference:
                believed[at_reference[index]] = False
        by_all = (self.against & believed).sum(axis=1)
        while len(accused) < most:
            by = by_all * (unjudged & ~self.judged)
            worst = min((int(index) for index in np.flatnonzero(by == by.max())), key=lambda index: devices[index])
            if by[worst] <= max(1, may_lie - int((~believed).sum())):
                break
            accused.append(self._contradicted(worst, devices, True, believed))
            unjudged[worst] = False
            if worst in at_reference:
                believed[at_reference[worst]] = False
                by_all -= self.against[:, at_reference[worst]]
        by, could_judge = (self.against & believed).sum(axis=1), (self.could & believed).sum(axis=1)
        doubted = [int(index) for index in np.flatnonzero(unjudged & (by > 1) & (2 * by > could_judge))]
        return accused + [
            self._contradicted(index, devices, False, believed)
            for index in sorted(doubted, key=lambda index: -by[index])
        ]

    def _contradicted(
        self, index: int, devices: Sequence[str], accused: bool, believed: NDArray[np.bool_], vouched: bool = False
    ) -> Contradicted:
        by, could_judge = int((self.against[index] & believed).sum()), int((self.could[index] & believed).sum())
        return Contradicted(
            devices[index], accused, by, could_judge, int(self.worst[index, 0]), int(self.worst[index, 1]), vouched
        )


def _may_lie(compared: int, devices: int) -> int:
    """How many may lie of those that are compared with: the nearest to a third of all devices, one at least.

    Where not all are compared with, chance may have drawn more: `_DRAWN` deviations more, and no more than half.
    """
    share = 1.0 / LIARS
    drawn = _DRAWN * math.sqrt(compared * share * (1.0 - share) * (1.0 - compared / devices))
    return max(1, round(min(compared * share + drawn, max(compared * share, compared / 2))))


def _median(values: Float64) -> float:
    """The lower middle of those that are there; NaN for none."""
    return float(_median_along(values.ravel(), axis=0)) if values.size else float("nan")


def _median_along(values: Float64, axis: int) -> Float64:
    """The lower middle along an axis of those that are there; NaN for none."""
    ordered = np.sort(values, axis=axis)  # NaN last
    finite = np.isfinite(ordered).sum(axis=axis, keepdims=True)
    return np.take_along_axis(ordered, np.maximum((finite - 1) // 2, 0), axis=axis).squeeze(axis)

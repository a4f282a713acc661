"""Whose labels the others contradict: found from class means alone, without any data on the server.

Devices i and h that both hold class j contradict each other when i's mean of j lies nearer to what h calls another
class than to what h calls j, or the other way round, and by more than chance explains (docs/decisions/158):

1. of every device its class means, of classes of which it has `LEAST` samples or more;
2. from all pairs how far means of one class lie apart by chance, for each pair of classes: a median over pairs of each
   device, and of these over devices, so that less than half of the devices cannot shift it;
3. a mean of j that goes farther towards class k than half the way, and than chance goes in one of `ALARMS` honest
   rounds, contradicts;
4. accused is who is contradicted by more devices than may lie at all, a third of them (`LIARS`), and by two at least;
   then the next, with those that are accused taken off. While no more than that lie, and honest devices do not
   contradict each other, no honest device is accused, whatever it holds and whatever liars say together;
5. suspected, and nothing more, is who is contradicted by most of those that share classes with it;
6. a device that the operator vouches for, one with photos of its own of every class, say, is never accused, and one
   that contradicts it is. Of classes that such devices hold they alone accuse, whatever all others say together.

So a class that one device alone holds accuses nobody, and where few devices share classes liars go unnamed unless a
device is vouched for: a wrong accusation costs a fleet its rare classes, a missed one what `--max-share` leaves to a
liar.

Features of any length and any statistic with rows of features will do; FFC's sums have them, their squares are not
looked at. Memory: at most `REFERENCES` devices are compared with, chosen by the hash of their names, and their means
take `_REFERENCE_BYTES` at most; everybody else is read once, one at a time. As many more of them than a third must then
contradict, up to half, as chance may draw too many liars.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from aggregator.class_ways import LEAST, Means, References, Screen, crossed, way, way_back
from contract.rules import Source
from contract.statistics import Statistic

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
        accused: whether by more than may lie, or by one that is vouched for; otherwise by most of those that could
            tell.
        by: how many devices contradict it, of `of` that it was compared with in classes that both hold.
        label, looks_like: the class that it is contradicted in most, and which of the others' classes that looks like.
        vouched: whether `by` and `of` are of those alone that are vouched for.
    """

    device: str
    accused: bool
    by: int
    of: int
    label: int
    looks_like: int
    vouched: bool = False

    def words(self, labels: Sequence[str] = ()) -> str:
        """Why, with the names of the classes, or their numbers where there are none."""
        label, other = (labels[at] if at < len(labels) else str(at) for at in (self.label, self.looks_like))
        by = f"contradicted by {self.by} of {self.of} devices" + (" that are vouched for" if self.vouched else "")
        return f"its mean of class {label} lies where others have class {other}: {by}"


def has_means(kind: type[Statistic]) -> bool:
    """Whether a statistic has class means of features to compare."""
    return any(field.width == "features" for field in kind.row_fields())


def contradicted(
    source: Source, devices: Sequence[str], vouched: Collection[str] = (), some: Some | None = None
) -> list[Contradicted]:
    """Who is contradicted, accused ones first, most contradicted first.

    Args:
        source: yields one statistic for each device, in that order, every time; one that `has_means`.
        devices: fewer than three contradict nobody.
        vouched: the names of those that do not lie; some of them may be no devices here.
        some: yields the statistics of these devices alone, in their order, where that takes less than `source`.
    """
    if len(devices) < 3:
        return []
    classes, width = next((statistic.classes, statistic.width) for statistic in source())
    chosen = _chosen(devices, classes, width, vouched)
    places = sorted(chosen)
    if some is None:
        known = [Means.of(each) for at, each in enumerate(source()) if at in chosen]
    else:
        known = list(map(Means.of, some([devices[at] for at in places])))
    references = References.of(known, classes)
    sure = np.array([devices[place] in vouched for place in places])
    spread = _spread(known, references, sure)
    if spread is None:
        return []
    everyone = iter(known) if len(known) == len(devices) else map(Means.of, source())
    return _Verdicts.of(everyone, references, places, sure, spread, len(devices)).told(devices)


def agreeing(some: Some, devices: Sequence[str], among: Collection[str]) -> tuple[str, ...]:
    """Those of `among` that share classes and do not contradict each other, each with each: of the groups that grow
    from one device each, by whom most agree with, the largest; the first by name of two as large.

    What chance does is measured on all devices, as where they are compared, so that it is not the measure of the few.

    Args:
        some: as of `contradicted`.
        devices: all of the round.
        among: some of them; at most `REFERENCES` are looked at, chosen as those that are compared with.
    """
    asked = sorted(set(among) & set(devices))
    if len(asked) < 2:
        return tuple(asked)
    classes, width = next((statistic.classes, statistic.width) for statistic in some(asked[:1]))
    places = sorted(_chosen(devices, classes, width, ()))
    compared = list(map(Means.of, some([devices[place] for place in places])))
    spread = _spread(compared, References.of(compared, classes), np.zeros(len(places), bool))
    if spread is None:
        return ()
    asked = [asked[place] for place in sorted(_chosen(asked, classes, width, ()))]
    known, at = list(map(Means.of, some(asked))), range(len(asked))
    nobody, among_them = np.zeros(len(asked), bool), References.of(known, classes)
    found = _Verdicts.of(iter(known), among_them, at, nobody, spread, len(devices))
    could, against = found.could[: len(asked)], found.against[: len(asked)]
    agree = (could | could.T) & ~(against | against.T)
    order, largest = sorted(at, key=lambda one: -int(agree[one].sum())), list[int]()
    for first in at:
        group = [first]
        for one in order:
            if agree[one, group].all():  # nobody with itself
                group.append(one)
        largest = max(largest, sorted(group), key=len)
    return tuple(asked[one] for one in largest)


def _chosen(devices: Sequence[str], classes: int, width: int, vouched: Collection[str]) -> set[int]:
    """The places of those to compare with: who is vouched for, and others by name, so that order plays no part.

    All names together decide, so that liars who name themselves cannot take the places of all others.
    """
    most = max(16, min(REFERENCES, _REFERENCE_BYTES // (4 * classes * max(classes, width))))
    names = hashlib.sha256(" ".join(sorted(devices)).encode()).hexdigest()

    def rank(at: int) -> tuple[bool, bytes]:
        return devices[at] not in vouched, hashlib.sha256(f"{names} {devices[at]}".encode()).digest()

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
    apart = [_distances(*each, references, at) for at, each in enumerate(crossed(means, references))]  # (K, R) each
    total = _median(np.array([_median(each) for each in apart]))
    if not np.isfinite(total):
        return None
    among = [each[:, sure].ravel() for each, vouched in zip(apart, sure, strict=True) if vouched]
    total = float(np.fmin(total, _median(np.concatenate([np.zeros(0), *among]))))
    count, nearest = references.inverse.shape[1], []
    by_pair = np.full((len(means), count, count), np.nan)
    for at, (each, products) in enumerate(crossed(means, references)):
        gone = way(each, references, products, total, but=at)
        away = np.abs(gone.chance)  # (K, R, C)
        by_pair[at, each.classes] = _median_along(away, axis=1)
        closest = np.argmax(gone.beyond, axis=2, keepdims=True)
        nearest.append(_median(np.take_along_axis(away, closest, axis=2)))
    usual = _median(np.array(nearest))
    if not np.isfinite(usual):
        return None
    by_pair[:, np.isfinite(by_pair).sum(axis=0) < 3] = np.nan  # of one or two, a liar would be its own measure
    along = np.minimum(np.fmax(_median_along(by_pair, axis=0), usual), math.sqrt(total))
    return _Spread(total, along / _MEDIAN)


def _distances(mine: Means, products: NDArray[np.float32], references: References, but: int) -> Float64:
    """(K, R) squared distances of means of the same class, over (1/n + 1/m); NaN where there is none."""
    same = np.take_along_axis(products, mine.classes[:, None, None], axis=2)[..., 0].astype(np.float64)
    squares = references.squares.T[mine.classes]  # (K, R)
    inverse = references.inverse[:, mine.classes].T.copy()
    inverse[:, but] = np.nan
    away = squares + squares[:, but : but + 1] - 2.0 * same
    return np.asarray(np.maximum(away, 0.0) / (mine.inverse[:, None] + inverse))


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
        held = np.isfinite(references.inverse).sum(axis=1)
        limit = NormalDist().inv_cdf(1.0 - 1.0 / (ALARMS * devices * max(1.0, float(held.mean()))))
        against, could = np.zeros((devices, len(places)), bool), np.zeros((devices, len(places)), bool)
        worst, at_reference = np.full((devices, 2), -1), {place: at for at, place in enumerate(places)}
        weight = 1 + len(places) * devices * sure  # who is vouched for says what is told, if it says anything
        known: NDArray[np.bool_] = np.isfinite(references.inverse[sure]).max(axis=0, initial=False)
        judged = np.zeros(devices, bool)
        screen = Screen(references, spread.total, limit * spread.along)
        for at, (mine, products) in enumerate(crossed(everyone, references)):
            judged[at] = known[mine.classes].all()
            if not len(mine.classes):
                continue
            votes = np.zeros((len(mine.classes), references.inverse.shape[1]), np.int64)
            seen, own, total = screen.seen(mine, products), spread.along[mine.classes], spread.total
            could[at], there, back, ways = seen.possible, seen.way, seen.way_back, []
            if len(there[0]):
                ways.append((there, way(mine, references, products, total, there, at_reference.get(at)), own, False))
            if len(back[0]):
                ways.append((back, way_back(mine, references, products, total, back), own[:, mine.classes], True))
            for (label, by), gone, along, is_back in ways:
                found = ((gone.beyond > 0) & (gone.chance > limit * along[label])).any(axis=1)
                label, by, nearest = label[found], by[found], gone.beyond[found].argmax(axis=1)
                against[at, by] = True
                np.add.at(votes, (nearest, mine.classes[label]) if is_back else (label, nearest), weight[by])
            if at in at_reference:
                against[at, at_reference[at]] = could[at, at_reference[at]] = False
            row, column = np.unravel_index(int(votes.argmax()), votes.shape)
            worst[at] = mine.classes[row], column
        return cls(places, sure, against, could, judged, worst)

    def told(self, devices: Sequence[str]) -> list[Contradicted]:
        """Accused and suspected devices."""
        here = np.ones(len(self.places), bool)  # references that are not accused
        at_reference = {place: at for at, place in enumerate(self.places)}
        may_lie, most = _may_lie(len(self.places), len(devices)), _may_lie(len(devices), len(devices))
        left, found = np.ones(len(devices), bool), list[Contradicted]()
        left[np.array(self.places)[self.sure]] = False
        liars = np.flatnonzero((self.against & self.sure).any(axis=1) & left)
        for at in sorted(map(int, liars), key=lambda at: devices[at]):
            found.append(self._of(at, devices, True, self.sure, vouched=True))
            left[at] = False
            if at in at_reference:
                here[at_reference[at]] = False
        by_all = (self.against & here).sum(axis=1)
        while len(found) < most:
            by = by_all * (left & ~self.judged)
            worst = min((int(at) for at in np.flatnonzero(by == by.max())), key=lambda at: devices[at])
            if by[worst] <= max(1, may_lie - int((~here).sum())):
                break
            found.append(self._of(worst, devices, True, here))
            left[worst] = False
            if worst in at_reference:
                here[at_reference[worst]] = False
                by_all -= self.against[:, at_reference[worst]]
        by, of = (self.against & here).sum(axis=1), (self.could & here).sum(axis=1)
        doubted = [int(at) for at in np.flatnonzero(left & (by > 1) & (2 * by > of))]
        return found + [self._of(at, devices, False, here) for at in sorted(doubted, key=lambda at: -by[at])]

    def _of(
        self, at: int, devices: Sequence[str], accused: bool, here: NDArray[np.bool_], vouched: bool = False
    ) -> Contradicted:
        by, of = int((self.against[at] & here).sum()), int((self.could[at] & here).sum())
        return Contradicted(devices[at], accused, by, of, int(self.worst[at, 0]), int(self.worst[at, 1]), vouched)


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
    there = np.isfinite(ordered).sum(axis=axis, keepdims=True)
    return np.take_along_axis(ordered, np.maximum((there - 1) // 2, 0), axis=axis).squeeze(axis)

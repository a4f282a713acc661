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
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from contract.rules import Source
from contract.statistics import Statistic

__all__ = ["ALARMS", "LEAST", "LIARS", "REFERENCES", "Contradicted", "contradicted", "has_means"]

LEAST = 3  # samples of a class: a mean over fewer may be one odd photo
LIARS = 3  # one device of so many may lie, rounded
ALARMS = 1_000  # honest rounds, of which one accuses somebody by chance if means are normally distributed
REFERENCES = 256
_REFERENCE_BYTES = 32 << 20
_DRAWN = 4.0  # deviations of how many of the liars are among the references
_MEDIAN = 0.6745  # of the absolute value of a standard normal variable

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


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


@dataclass(frozen=True, eq=False)
class _Means:
    """Class means of a device.

    Attributes:
        classes: (K,) which it has enough of, rising.
        rows: (K, D) float32.
        inverse: (K,) one over the samples of each.
    """

    classes: NDArray[np.int64]
    rows: Float32
    inverse: Float64

    @classmethod
    def of(cls, statistic: Statistic) -> _Means:
        field = next(each for each in statistic.row_fields() if each.width == "features")
        groups, classes = statistic.GROUPS, statistic.classes
        sums = statistic.rows(field).reshape(classes, groups, -1).sum(axis=1) if groups > 1 else statistic.rows(field)
        counts = statistic.counts.reshape(classes, groups).sum(axis=1)
        held = np.flatnonzero(counts >= LEAST)
        return cls(held, (sums[held] / counts[held, None]).astype(np.float32), 1.0 / counts[held])


@dataclass(frozen=True, eq=False)
class _References:
    """The devices that everybody is compared with; R of them, NaN where one lacks a class.

    Attributes:
        rows: (R, C, D) float32, zero where there is no mean.
        inverse: (R, C) one over the samples.
        products: (R, C, C) of a device's rows with each other.
    """

    rows: Float32
    inverse: Float64
    products: Float64

    @classmethod
    def of(cls, means: Sequence[_Means], classes: int) -> _References:
        width = means[0].rows.shape[1]
        rows, inverse = np.zeros((len(means), classes, width), np.float32), np.full((len(means), classes), np.nan)
        for at, each in enumerate(means):
            rows[at, each.classes], inverse[at, each.classes] = each.rows, each.inverse
        products = np.matmul(rows, rows.transpose(0, 2, 1)).astype(np.float64)
        return cls(rows, inverse, products)


@dataclass(frozen=True, eq=False)
class _Way:
    """How far a device's means (K) go from the references' means of the same class towards each of their others.

    Attributes:
        chance: (K, R, C) that way, in units in which chance has one deviation for all classes; NaN where there is none.
        beyond: (K, R, C) how much of it is beyond the middle between the two, once chance's part is taken off; −∞ where
            there is none.
    """

    chance: Float64
    beyond: Float64


def has_means(kind: type[Statistic]) -> bool:
    """Whether a statistic has class means of features to compare."""
    return any(field.width == "features" for field in kind.row_fields())


def contradicted(source: Source, devices: Sequence[str], vouched: Collection[str] = ()) -> list[Contradicted]:
    """Who is contradicted, accused ones first, most contradicted first.

    Args:
        source: yields one statistic for each device, in that order, every time; one that `has_means`.
        devices: fewer than three contradict nobody.
        vouched: the names of those that do not lie; some of them may be no devices here.
    """
    if len(devices) < 3:
        return []
    classes, width = next((statistic.classes, statistic.width) for statistic in source())
    chosen = _chosen(devices, classes, width, vouched)
    known = {at: each for at, each in enumerate(map(_Means.of, source())) if at in chosen}
    places = sorted(known)
    references = _References.of([known[at] for at in places], classes)
    sure = np.array([devices[place] in vouched for place in places])
    spread = _spread([known[at] for at in places], references, sure)
    if spread is None:
        return []
    everyone = iter(known.values()) if len(known) == len(devices) else map(_Means.of, source())
    return _Verdicts.of(everyone, references, places, sure, spread, len(devices)).told(devices)


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


def _spread(means: Sequence[_Means], references: _References, sure: NDArray[np.bool_]) -> _Spread | None:
    """From the references among themselves; None where no two share a class.

    No more than chance goes in all directions together, which those that are vouched for say alone where two share a
    class: so liars who are the most of a class's holders, or of all devices, are not the measure of their lie.
    """
    apart = [_distances(each, references, at) for at, each in enumerate(means)]  # (K, R) each
    total = _median(np.array([_median(each) for each in apart]))
    if not np.isfinite(total):
        return None
    among = [each[:, sure].ravel() for each, vouched in zip(apart, sure, strict=True) if vouched]
    total = float(np.fmin(total, _median(np.concatenate([np.zeros(0), *among]))))
    count, nearest = references.inverse.shape[1], []
    by_pair = np.full((len(means), count, count), np.nan)
    for at, each in enumerate(means):
        way = _way(each, references, _cross(each, references), total, but=at)
        away = np.abs(way.chance)  # (K, R, C)
        by_pair[at, each.classes] = _median_along(away, axis=1)
        closest = np.argmax(way.beyond, axis=2, keepdims=True)
        nearest.append(_median(np.take_along_axis(away, closest, axis=2)))
    usual = _median(np.array(nearest))
    if not np.isfinite(usual):
        return None
    by_pair[:, np.isfinite(by_pair).sum(axis=0) < 3] = np.nan  # of one or two, a liar would be its own measure
    along = np.minimum(np.fmax(_median_along(by_pair, axis=0), usual), math.sqrt(total))
    return _Spread(total, along / _MEDIAN)


def _cross(mine: _Means, references: _References) -> Float64:
    """(K, R, C) products of a device's means with the references'."""
    shape = (len(mine.classes), *references.inverse.shape)
    return (mine.rows @ references.rows.reshape(-1, mine.rows.shape[1]).T).reshape(shape).astype(np.float64)


def _distances(mine: _Means, references: _References, but: int) -> Float64:
    """(K, R) squared distances of means of the same class, over (1/n + 1/m); NaN where there is none."""
    cross = _cross(mine, references)
    same = np.take_along_axis(cross, mine.classes[:, None, None], axis=2)[..., 0]
    squares = np.einsum("rcc->cr", references.products)[mine.classes]  # (K, R)
    inverse = references.inverse[:, mine.classes].T.copy()
    inverse[:, but] = np.nan
    away = squares + squares[:, but : but + 1] - 2.0 * same
    return np.asarray(np.maximum(away, 0.0) / (mine.inverse[:, None] + inverse))


def _way(mine: _Means, references: _References, cross: Float64, total: float, but: int | None = None) -> _Way:
    """How far `mine` go among the references' rows; `but` is its own place there."""
    own, inverse = references.products[:, mine.classes].transpose(1, 0, 2), references.inverse.T  # (K, R, C), (C, R)
    squares = np.einsum("rcc->rc", references.products)  # (R, C)
    same = np.take_along_axis(cross, mine.classes[:, None, None], axis=2)
    here = squares.T[mine.classes][..., None]  # (K, R, 1)
    theirs = inverse[mine.classes].copy()  # (K, R)
    if but is not None:
        theirs[:, but] = np.nan
    length = squares + here - 2.0 * own  # squared, from class j to class k of the same device
    gone = cross - same - (own - here) - total * theirs[..., None]  # times that length
    noise = mine.inverse[:, None] + theirs
    return _compared(gone, length, noise[..., None], total * (theirs[..., None] + references.inverse))


def _way_back(mine: _Means, references: _References, cross: Float64, total: float) -> _Way:
    """How far the references' means go among the rows of `mine`: (K, R, K)."""
    products = (mine.rows @ mine.rows.T).astype(np.float64)
    squares = np.diag(products)
    among = cross[:, :, mine.classes].transpose(2, 1, 0)  # (K, R, K): of class j with my class k
    same = np.einsum("jrj->jr", among)[..., None]
    length = (squares + squares[:, None] - 2.0 * products)[:, None]
    gone = among - same - (products - squares[:, None])[:, None] - total * mine.inverse[:, None, None]
    noise = references.inverse[:, mine.classes].T + mine.inverse[:, None]
    return _compared(gone, length, noise[..., None], total * (mine.inverse[:, None, None] + mine.inverse))


def _compared(gone: Float64, length: Float64, noise: Float64, blur: Float64) -> _Way:
    """A way that was gone times its length; `blur` is what chance adds to the squared length."""
    with np.errstate(divide="ignore", invalid="ignore"):
        chance = gone / np.sqrt(length * noise)
    chance[~np.isfinite(chance + blur)] = np.nan  # the same class, the same rows, or none
    beyond = np.where(np.isnan(chance), np.nan, gone - np.maximum(length - blur, 0.0) / 2.0)
    return _Way(chance, np.where(np.isnan(beyond), -np.inf, beyond))


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
        everyone: Iterator[_Means],
        references: _References,
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
        for at, mine in enumerate(everyone):
            judged[at] = known[mine.classes].all()
            if not len(mine.classes):
                continue
            votes = np.zeros((len(mine.classes), references.inverse.shape[1]), np.int64)
            cross = _cross(mine, references)
            there = _way(mine, references, cross, spread.total, at_reference.get(at))
            back = _way_back(mine, references, cross, spread.total)
            own = spread.along[mine.classes]
            for way, along, is_back in ((there, own, False), (back, own[:, mine.classes], True)):
                found = ((way.beyond > 0) & (way.chance > limit * along[:, None, :])).any(axis=2)  # (K, R)
                against[at] |= found.any(axis=0)
                could[at] |= np.isfinite(way.chance).any(axis=(0, 2))
                label, by = np.nonzero(found)
                nearest = way.beyond.argmax(axis=2)[found]
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
        while len(found) < most:
            by = (self.against & here).sum(axis=1) * (left & ~self.judged)
            worst = min((int(at) for at in np.flatnonzero(by == by.max())), key=lambda at: devices[at])
            if by[worst] <= max(1, may_lie - int((~here).sum())):
                break
            found.append(self._of(worst, devices, True, here))
            left[worst] = False
            if worst in at_reference:
                here[at_reference[worst]] = False
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

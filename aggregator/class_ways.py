"""How far a device's class means go from other devices' means of the same class towards those of other classes.

The geometry of `aggregator/contradictions.py`. A way is what its docstring says in step 3, worked out for pairs of
a class of one device and a reference. For the references among themselves all pairs are wanted, for what chance does.
For everybody else only the few are that may go beyond the middle between two means and beyond chance: `Screen` finds
them from products alone, in float32 and with room for its rounding, and only these are worked out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contract.statistics import Statistic

__all__ = ["LEAST", "Means", "References", "Screen", "Way", "cross", "crossed", "way", "way_back"]

LEAST = 3  # samples of a class: a mean over fewer may be one odd photo
_AT_ONCE_BYTES = 4 << 20  # of products with the references
_ROUNDING = 1e-5  # of the longest mean's square: far more than float32 rounds off a product

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Means:
    """Class means of a device.

    Attributes:
        classes: (K,) which it has enough of, rising.
        rows: (K, D) float32.
        inverse: (K,) one over the samples of each.
    """

    classes: Places
    rows: Float32
    inverse: Float64

    @classmethod
    def of(cls, statistic: Statistic) -> Means:
        """Those of its statistic."""
        field = next(each for each in statistic.row_fields() if each.width == "features")
        groups, classes = statistic.GROUPS, statistic.classes
        sums = statistic.rows(field).reshape(classes, groups, -1).sum(axis=1) if groups > 1 else statistic.rows(field)
        counts = statistic.counts.reshape(classes, groups).sum(axis=1)
        held = np.flatnonzero(counts >= LEAST)
        return cls(held, (sums[held] / counts[held, None]).astype(np.float32), 1.0 / counts[held])


@dataclass(frozen=True, eq=False)
class References:
    """The devices that everybody is compared with; R of them, NaN where one lacks a class.

    Attributes:
        rows: (R, C, D) float32, zero where there is no mean.
        inverse: (R, C) one over the samples.
        products: (R, C, C) of a device's rows with each other.
        squares: (R, C) of its rows with themselves.
    """

    rows: Float32
    inverse: Float64
    products: Float64
    squares: Float64

    @classmethod
    def of(cls, means: Sequence[Means], classes: int) -> References:
        """Of the devices with these means."""
        width = means[0].rows.shape[1]
        rows, inverse = np.zeros((len(means), classes, width), np.float32), np.full((len(means), classes), np.nan)
        for at, each in enumerate(means):
            rows[at, each.classes], inverse[at, each.classes] = each.rows, each.inverse
        products = np.matmul(rows, rows.transpose(0, 2, 1)).astype(np.float64)
        return cls(rows, inverse, products, np.einsum("rcc->rc", products))


@dataclass(frozen=True, eq=False)
class Way:
    """How far means go from others of the same class towards each of the others' classes.

    Attributes:
        chance: (…, C) that way, in units in which chance has one deviation for all classes; NaN where there is none.
        beyond: (…, C) how much of it is beyond the middle between the two, once chance's part is taken off; −∞ where
            there is none.
    """

    chance: Float64
    beyond: Float64


def cross(mine: Means, references: References) -> Float32:
    """(K, R, C) products of a device's means with the references'."""
    shape = (len(mine.classes), *references.inverse.shape)
    return np.asarray(mine.rows @ references.rows.reshape(-1, mine.rows.shape[1]).T).reshape(shape)


def crossed(everyone: Iterable[Means], references: References) -> Iterator[tuple[Means, Float32]]:
    """Each device's means with `cross` of them, worked out for several at once."""
    waiting: list[Means] = []
    most = max(1, _AT_ONCE_BYTES // (4 * references.inverse.size))  # rows

    def done() -> Iterator[tuple[Means, Float32]]:
        rows = np.concatenate([each.rows for each in waiting])
        products = (rows @ references.rows.reshape(-1, rows.shape[1]).T).reshape(-1, *references.inverse.shape)
        at = 0
        for each in waiting:
            yield each, products[at : at + len(each.rows)]
            at += len(each.rows)
        waiting.clear()

    count = 0
    for each in everyone:
        count += len(each.rows)
        if waiting and count > most:
            yield from done()
            count = len(each.rows)
        waiting.append(each)
    if waiting:
        yield from done()


def _everywhere(mine: Means, references: References) -> tuple[Places, Places]:
    return np.arange(len(mine.classes))[:, None], np.arange(len(references.inverse))[None]


def way(
    mine: Means,
    references: References,
    products: Float32,
    total: float,
    at: tuple[Places, Places] | None = None,
    but: int | None = None,
) -> Way:
    """How far `mine` go among the references' rows: (…, C).

    Args:
        products: `cross` of the two.
        total: see `contradictions._Spread`.
        at: (…) places among the device's classes, and (…) places of references; all of them when None: (K, R, C).
        but: the device's own place among the references.
    """
    label, by = _everywhere(mine, references) if at is None else at
    of = mine.classes[label]
    own, squares, inverse = references.products[by, of], references.squares[by], references.inverse[by]
    here, gone_to = references.squares[by, of][..., None], products[label, by].astype(np.float64)
    same = products[label, by, of].astype(np.float64)[..., None]
    theirs = np.where(by == (-1 if but is None else but), np.nan, references.inverse[by, of])
    length = squares + here - 2.0 * own  # squared, from class j to class k of the same device
    gone = gone_to - same - (own - here) - total * theirs[..., None]  # times that length
    noise = mine.inverse[label] + theirs
    return _compared(gone, length, noise[..., None], total * (theirs[..., None] + inverse))


def way_back(
    mine: Means, references: References, products: Float32, total: float, at: tuple[Places, Places] | None = None
) -> Way:
    """How far the references' means go among the rows of `mine`: (…, K)."""
    label, by = _everywhere(mine, references) if at is None else at
    of, among = mine.classes[label], (mine.rows @ mine.rows.T).astype(np.float64)
    squares, own, inverse = np.diag(among), among[label], mine.inverse[label][..., None]
    gone_to = np.moveaxis(products[:, by, of], 0, -1).astype(np.float64)  # of class j with my class k
    same = products[label, by, of].astype(np.float64)[..., None]
    length = squares + squares[label][..., None] - 2.0 * own
    gone = gone_to - same - (own - squares[label][..., None]) - total * inverse
    noise = references.inverse[by, of] + mine.inverse[label]
    return _compared(gone, length, noise[..., None], total * (inverse + mine.inverse))


def _compared(gone: Float64, length: Float64, noise: Float64, blur: Float64) -> Way:
    """A way that was gone times its length; `blur` is what chance adds to the squared length."""
    with np.errstate(divide="ignore", invalid="ignore"):
        chance = gone / np.sqrt(length * noise)
    chance[~np.isfinite(chance + blur)] = np.nan  # the same class, the same rows, or none
    beyond = np.where(np.isnan(chance), np.nan, gone - np.maximum(length - blur, 0.0) / 2.0)
    return Way(chance, np.where(np.isnan(beyond), -np.inf, beyond))


@dataclass(frozen=True, eq=False)
class Seen:
    """What is worth working out of a device beside the references.

    Attributes:
        possible: (R,) with which references it can be compared.
        way, way_back: where these may go beyond the middle and chance: places among the device's classes, and of
            references.
    """

    possible: NDArray[np.bool_]
    way: tuple[Places, Places]
    way_back: tuple[Places, Places]


class Screen:
    """Which ways may go beyond the middle and than chance goes, and which there are at all.

    Args:
        total: as of `way`.
        most: (C, C) how far chance goes from class j towards class k, in the units of `Way.chance`.
    """

    def __init__(self, references: References, total: float, most: Float64) -> None:
        self._references, self._total, self._most = references, total, most
        inverse, squares = references.inverse.T, references.squares.T[..., None]  # (C, R), (C, R, 1)
        own = references.products.transpose(1, 0, 2)  # (C, R, C)
        length = references.squares + squares - 2.0 * own
        blur = total * (inverse[..., None] + references.inverse)
        there = (length > 0) & np.isfinite(blur)
        surely = np.sqrt(np.maximum(length, 0.0) * inverse[..., None])  # with no noise of the device's own
        beyond = np.maximum(np.maximum(length - blur, 0.0) / 2.0, most[:, None] * surely)
        least = own - squares + total * inverse[..., None] + beyond
        self._least = np.where(there, least, np.inf).astype(np.float32)
        self._there: NDArray[np.bool_] = np.asarray(there.any(axis=2))  # (C, R)
        self._longest = float(references.squares.max(initial=0.0))

    def seen(self, mine: Means, products: Float32) -> Seen:
        """What is left of a device with at least one class; `products` are `cross` of it and the references."""
        among = (mine.rows @ mine.rows.T).astype(np.float64)
        squares = np.diag(among)
        length = squares + squares[:, None] - 2.0 * among  # (K, K) squared, from one to another
        back = np.isfinite(self._references.inverse[:, mine.classes]) & (length > 0).any(axis=1)  # (R, K)
        same = self._same(mine, products)
        return Seen(
            np.asarray(self._there[mine.classes].any(axis=0) | back.any(axis=1)),
            self._way(mine, products, same),
            self._way_back(mine, products, same, among, length),
        )

    def _way(self, mine: Means, products: Float32, same: Float32) -> tuple[Places, Places]:
        least = self._least[mine.classes] + same[..., None]
        label, by, _ = np.unravel_index(np.flatnonzero(products > least), least.shape)
        return self._once(label, by)

    def _way_back(
        self, mine: Means, products: Float32, same: Float32, among: Float64, length: Float64
    ) -> tuple[Places, Places]:
        squares, inverse = np.diag(among)[:, None], mine.inverse[:, None]
        surely = self._most[np.ix_(mine.classes, mine.classes)] * np.sqrt(np.maximum(length, 0.0) * inverse)
        middle = np.maximum(length - self._total * (inverse + mine.inverse), 0.0) / 2.0
        least = among - squares + self._total * inverse + np.maximum(middle, surely)  # (K, K)
        least[~(length > 0)] = np.inf
        turned = least.T.astype(np.float32)[:, None] + same.T
        holds_all = len(mine.classes) == products.shape[2]  # then there is nothing to pick, and nothing is copied
        found = np.flatnonzero((products if holds_all else products[:, :, mine.classes]) > turned)
        _, by, label = np.unravel_index(found, turned.shape)
        known = np.isfinite(self._references.inverse[by, mine.classes[label]])
        return self._once(label[known], by[known])

    def _same(self, mine: Means, products: Float32) -> Float32:
        """(K, R) products with means of the same class, less what rounding may be."""
        longest = max(self._longest, float(np.square(mine.rows, dtype=np.float64).sum(axis=1).max(initial=0.0)))
        same = products[np.arange(len(mine.classes)), :, mine.classes]
        return np.asarray(same - np.float32(_ROUNDING * longest))

    def _once(self, label: Places, by: Places) -> tuple[Places, Places]:
        return np.divmod(np.unique(label * len(self._references.inverse) + by), len(self._references.inverse))

"""How far a device's class means go from other devices' means of the same class towards those of other classes.

This is the geometry of `aggregator/screening/contradictions.py`. A displacement is what step 3 of that docstring
describes, computed for pairs of a device's class and a reference.

- Among the references all pairs are computed, to measure chance.
- For the other devices only the few pairs matter that may go beyond the middle between two means and beyond chance.
  `Screen` finds them from products alone, in float32 and with room for its rounding. Only these are computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.sums.statistics import Statistic

__all__ = [
    "LEAST",
    "Displacement",
    "Means",
    "References",
    "Screen",
    "cross",
    "crossed",
    "displacement",
    "displacement_back",
]

LEAST = 3  # samples of a class: a mean over fewer may be one odd photo
_AT_ONCE_BYTES = 4 << 20  # of products with the references
_ROUNDING = 1e-5  # of the longest mean's square: far more than float32 rounds off a product

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Means:
    """The class means of a device.

    Attributes:
        classes: (K,) the classes of which it has enough samples, rising.
        rows: (K, D) float32.
        inverse: (K,) one over the samples of each.
    """

    classes: Places
    rows: Float32
    inverse: Float64

    @classmethod
    def of(cls, statistic: Statistic) -> Means:
        """The class means of a device's statistic."""
        field = next(each for each in statistic.row_fields() if each.width == "features")
        groups, classes = statistic.GROUPS, statistic.classes
        sums = statistic.rows(field).reshape(classes, groups, -1).sum(axis=1) if groups > 1 else statistic.rows(field)
        counts = statistic.counts.reshape(classes, groups).sum(axis=1)
        enough = np.flatnonzero(counts >= LEAST)
        return cls(enough, (sums[enough] / counts[enough, None]).astype(np.float32), 1.0 / counts[enough])


@dataclass(frozen=True, eq=False)
class References:
    """The R devices that all devices are compared with; NaN where one lacks a class.

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
        """The devices with these means."""
        width = means[0].rows.shape[1]
        rows, inverse = np.zeros((len(means), classes, width), np.float32), np.full((len(means), classes), np.nan)
        for index, device_means in enumerate(means):
            rows[index, device_means.classes] = device_means.rows
            inverse[index, device_means.classes] = device_means.inverse
        products = np.matmul(rows, rows.transpose(0, 2, 1)).astype(np.float64)
        return cls(rows, inverse, products, np.einsum("rcc->rc", products))


@dataclass(frozen=True, eq=False)
class Displacement:
    """How far means go from others of the same class towards each of the others' classes.

    Attributes:
        chance: (…, C) the displacement, in units in which chance has one deviation for all classes; NaN where there is
            none.
        beyond: (…, C) the part of it beyond the middle between the two means, without the part of chance; −∞ where
            there is none.
    """

    chance: Float64
    beyond: Float64


def cross(means: Means, references: References) -> Float32:
    """(K, R, C) products of a device's means with the references'."""
    shape = (len(means.classes), *references.inverse.shape)
    return np.asarray(means.rows @ references.rows.reshape(-1, means.rows.shape[1]).T).reshape(shape)


def crossed(everyone: Iterable[Means], references: References) -> Iterator[tuple[Means, Float32]]:
    """Each device's means with `cross` of them, computed for several devices at once."""
    waiting: list[Means] = []
    most = max(1, _AT_ONCE_BYTES // (4 * references.inverse.size))  # rows

    def done() -> Iterator[tuple[Means, Float32]]:
        rows = np.concatenate([means.rows for means in waiting])
        products = (rows @ references.rows.reshape(-1, rows.shape[1]).T).reshape(-1, *references.inverse.shape)
        start = 0
        for means in waiting:
            yield means, products[start : start + len(means.rows)]
            start += len(means.rows)
        waiting.clear()

    count = 0
    for means in everyone:
        count += len(means.rows)
        if waiting and count > most:
            yield from done()
            count = len(means.rows)
        waiting.append(means)
    if waiting:
        yield from done()


def _everywhere(means: Means, references: References) -> tuple[Places, Places]:
    return np.arange(len(means.classes))[:, None], np.arange(len(references.inverse))[None]


def displacement(
    means: Means,
    references: References,
    products: Float32,
    total: float,
    at: tuple[Places, Places] | None = None,
    but: int | None = None,
) -> Displacement:
    """How far `means` go among the references' rows: (…, C).

    Args:
        products: `cross` of the two.
        total: see `contradictions._Spread`.
        at: (…) places among the device's classes, and (…) places of references; all of them when None: (K, R, C).
        but: the device's own place among the references.
    """
    label, by = _everywhere(means, references) if at is None else at
    own_class = means.classes[label]
    own, squares, inverse = references.products[by, own_class], references.squares[by], references.inverse[by]
    from_own, towards = references.squares[by, own_class][..., None], products[label, by].astype(np.float64)
    same = products[label, by, own_class].astype(np.float64)[..., None]
    reference_inverse = np.where(by == (-1 if but is None else but), np.nan, references.inverse[by, own_class])
    length = squares + from_own - 2.0 * own  # squared, from class j to class k of the same device
    moved = towards - same - (own - from_own) - total * reference_inverse[..., None]  # times that length
    noise = means.inverse[label] + reference_inverse
    return _compared(moved, length, noise[..., None], total * (reference_inverse[..., None] + inverse))


def displacement_back(
    means: Means, references: References, products: Float32, total: float, at: tuple[Places, Places] | None = None
) -> Displacement:
    """How far the references' means go among the rows of `means`: (…, K)."""
    label, by = _everywhere(means, references) if at is None else at
    own_class, among = means.classes[label], (means.rows @ means.rows.T).astype(np.float64)
    squares, own, inverse = np.diag(among), among[label], means.inverse[label][..., None]
    towards = np.moveaxis(products[:, by, own_class], 0, -1).astype(np.float64)  # of class j with my class k
    same = products[label, by, own_class].astype(np.float64)[..., None]
    length = squares + squares[label][..., None] - 2.0 * own
    moved = towards - same - (own - squares[label][..., None]) - total * inverse
    noise = references.inverse[by, own_class] + means.inverse[label]
    return _compared(moved, length, noise[..., None], total * (inverse + means.inverse))


def _compared(moved: Float64, length: Float64, noise: Float64, blur: Float64) -> Displacement:
    """A way that was gone times its length; `blur` is what chance adds to the squared length."""
    with np.errstate(divide="ignore", invalid="ignore"):
        chance = moved / np.sqrt(length * noise)
    chance[~np.isfinite(chance + blur)] = np.nan  # the same class, the same rows, or none
    beyond = np.where(np.isnan(chance), np.nan, moved - np.maximum(length - blur, 0.0) / 2.0)
    return Displacement(chance, np.where(np.isnan(beyond), -np.inf, beyond))


@dataclass(frozen=True, eq=False)
class Candidates:
    """The pairs of a device's classes and references that are worth computing.

    Attributes:
        possible: (R,) the references that the device can be compared with.
        displacement, displacement_back: the pairs that may go beyond the middle and beyond chance: places among the
            device's classes, and places of references.
    """

    possible: NDArray[np.bool_]
    displacement: tuple[Places, Places]
    displacement_back: tuple[Places, Places]


class Screen:
    """Which displacements may go beyond the middle and beyond chance, and which there are at all.

    Args:
        total: as of `displacement`.
        most: (C, C) how far chance goes from class j towards class k, in the units of `Displacement.chance`.
    """

    def __init__(self, references: References, total: float, most: Float64) -> None:
        self._references, self._total, self._most = references, total, most
        inverse, squares = references.inverse.T, references.squares.T[..., None]  # (C, R), (C, R, 1)
        own = references.products.transpose(1, 0, 2)  # (C, R, C)
        length = references.squares + squares - 2.0 * own
        blur = total * (inverse[..., None] + references.inverse)
        comparable = (length > 0) & np.isfinite(blur)
        noiseless = np.sqrt(np.maximum(length, 0.0) * inverse[..., None])  # with no noise of the device's own
        beyond = np.maximum(np.maximum(length - blur, 0.0) / 2.0, most[:, None] * noiseless)
        least = own - squares + total * inverse[..., None] + beyond
        self._least = np.where(comparable, least, np.inf).astype(np.float32)
        self._comparable: NDArray[np.bool_] = np.asarray(comparable.any(axis=2))  # (C, R)
        self._longest = float(references.squares.max(initial=0.0))

    def seen(self, means: Means, products: Float32) -> Candidates:
        """The candidates of a device with at least one class; `products` are `cross` of it and the references."""
        among = (means.rows @ means.rows.T).astype(np.float64)
        squares = np.diag(among)
        length = squares + squares[:, None] - 2.0 * among  # (K, K) squared, from one to another
        back = np.isfinite(self._references.inverse[:, means.classes]) & (length > 0).any(axis=1)  # (R, K)
        same = self._same(means, products)
        return Candidates(
            np.asarray(self._comparable[means.classes].any(axis=0) | back.any(axis=1)),
            self._candidates(means, products, same),
            self._candidates_back(means, products, same, among, length),
        )

    def _candidates(self, means: Means, products: Float32, same: Float32) -> tuple[Places, Places]:
        least = self._least[means.classes] + same[..., None]
        label, by, _ = np.unravel_index(np.flatnonzero(products > least), least.shape)
        return self._once(label, by)

    def _candidates_back(
        self, means: Means, products: Float32, same: Float32, among: Float64, length: Float64
    ) -> tuple[Places, Places]:
        squares, inverse = np.diag(among)[:, None], means.inverse[:, None]
        noiseless = self._most[np.ix_(means.classes, means.classes)] * np.sqrt(np.maximum(length, 0.0) * inverse)
        middle = np.maximum(length - self._total * (inverse + means.inverse), 0.0) / 2.0
        least = among - squares + self._total * inverse + np.maximum(middle, noiseless)  # (K, K)
        least[~(length > 0)] = np.inf
        turned = least.T.astype(np.float32)[:, None] + same.T
        holds_all = len(means.classes) == products.shape[2]  # then there is nothing to pick, and nothing is copied
        passing = np.flatnonzero((products if holds_all else products[:, :, means.classes]) > turned)
        _, by, label = np.unravel_index(passing, turned.shape)
        has_class = np.isfinite(self._references.inverse[by, means.classes[label]])
        return self._once(label[has_class], by[has_class])

    def _same(self, means: Means, products: Float32) -> Float32:
        """(K, R) products with means of the same class, less what rounding may be."""
        longest = max(self._longest, float(np.square(means.rows, dtype=np.float64).sum(axis=1).max(initial=0.0)))
        same = products[np.arange(len(means.classes)), :, means.classes]
        return np.asarray(same - np.float32(_ROUNDING * longest))

    def _once(self, label: Places, by: Places) -> tuple[Places, Places]:
        return np.divmod(np.unique(label * len(self._references.inverse) + by), len(self._references.inverse))

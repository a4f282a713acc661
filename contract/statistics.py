"""Statistics: what is computed from local data and may leave a device.

All are small immutable values over float64 sums, so that merging is addition: commutative, associative up to
rounding, and equal to the statistic of the pooled data. Class sums and counts are kept, never only means.

- `ClassMeans` (FedProto, eq. 1 and 4): per class the sum of features and the count. Merging adds; the means of the
  merge are the count-weighted means. Prototypes that were learned (FedHP) travel in it too, as `from_means`.
- `HyperKnowledge` (FedHKD): beside the class sums of features those of soft predictions. Merging adds.
- `FeatureGram` (SphereFed's FFC, eq. 10 to 12): A = Σ z zᵀ as a packed upper triangle and b = Σ z yᵀ, with counts.
  Merging adds; the closed-form head follows from the sums alone.

Classes with fewer than `min_samples` local examples are withheld: `shareable` says which samples may enter at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from contract.errors import StatisticError

__all__ = ["ClassMeans", "FeatureGram", "HyperKnowledge", "Statistic", "pack_triangle", "shareable", "unpack_triangle"]

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
MAX_COUNT = 2**53  # counts stay exact in float64


@dataclass(frozen=True, eq=False)
class ClassMeans:
    """Class sums of features, and counts.

    Attributes:
        sums: (C, D) float64, Σ f(x) over each class's examples; zero where the count is zero.
        counts: (C,) int64.

    Raises:
        StatisticError: on a wrong shape, a non-finite sum, a negative count, or a sum without examples.
    """

    sums: Float64
    counts: Int64

    def __post_init__(self) -> None:
        _freeze(self, "sums", np.float64, 2)
        _freeze(self, "counts", np.int64, 1)
        _check_counts(self.counts, len(self.sums))
        if self.sums[self.counts == 0].any():
            raise StatisticError("class means", expected="zero sums where a class has no examples", got="a sum")

    @classmethod
    def zero(cls, classes: int, width: int) -> ClassMeans:
        """The statistic of no data: the neutral element of `merge`."""
        return cls(np.zeros((classes, width)), np.zeros(classes, np.int64))

    @classmethod
    def of(cls, features: ArrayLike, labels: ArrayLike, classes: int) -> ClassMeans:
        """The statistic of features (N, D) and labels (N,) in 0…C−1."""
        z, y = _samples(features, labels, classes)
        sums = np.zeros((classes, z.shape[1]))
        np.add.at(sums, y, z)
        return cls(sums, np.bincount(y, minlength=classes))

    @classmethod
    def from_means(cls, means: ArrayLike, counts: ArrayLike) -> ClassMeans:
        """From per-class means (C, D) and counts (C,), as they travel."""
        counts = np.asarray(counts, dtype=np.int64)
        return cls(np.asarray(means, dtype=np.float64) * counts[:, None], counts)

    @property
    def classes(self) -> int:
        return len(self.counts)

    @property
    def width(self) -> int:
        return self.sums.shape[1]

    @property
    def present(self) -> NDArray[np.bool_]:
        """(C,) whether a class has examples."""
        return self.counts > 0

    @property
    def means(self) -> Float64:
        """(C, D) class means; zero where a class has no examples."""
        return self.sums / np.maximum(self.counts, 1)[:, None]

    def merge(self, other: ClassMeans) -> ClassMeans:
        """The statistic of both data sets together."""
        _same(self, other)
        return ClassMeans(self.sums + other.sums, self.counts + other.counts)


@dataclass(frozen=True, eq=False)
class HyperKnowledge:
    """FedHKD's class sums of features and of soft predictions, and counts.

    Attributes:
        sums: (C, D) float64, Σ f(x) over each class's examples; zero where the count is zero.
        soft_sums: (C, C) float64, Σ softmax(logits / T) over each class's examples; zero where the count is zero.
        counts: (C,) int64.

    Raises:
        StatisticError: on a wrong shape, a non-finite sum, a negative count, or a sum without examples.
    """

    sums: Float64
    soft_sums: Float64
    counts: Int64

    def __post_init__(self) -> None:
        _freeze(self, "sums", np.float64, 2)
        _freeze(self, "soft_sums", np.float64, 2)
        _freeze(self, "counts", np.int64, 1)
        _check_counts(self.counts, len(self.sums))
        if self.soft_sums.shape != (len(self.counts), len(self.counts)):
            raise StatisticError("soft predictions", expected="C rows of C", got=self.soft_sums.shape)
        absent = self.counts == 0
        if self.sums[absent].any() or self.soft_sums[absent].any():
            raise StatisticError("hyper-knowledge", expected="zero sums where a class has no examples", got="a sum")

    @classmethod
    def zero(cls, classes: int, width: int) -> HyperKnowledge:
        """The statistic of no data: the neutral element of `merge`."""
        return cls(np.zeros((classes, width)), np.zeros((classes, classes)), np.zeros(classes, np.int64))

    @classmethod
    def of(cls, features: ArrayLike, soft: ArrayLike, labels: ArrayLike, classes: int) -> HyperKnowledge:
        """The statistic of features (N, D), soft predictions (N, C) and labels (N,) in 0…C−1."""
        z, y = _samples(features, labels, classes)
        q, _ = _samples(soft, labels, classes)
        sums, soft_sums = np.zeros((classes, z.shape[1])), np.zeros((classes, q.shape[1]))
        np.add.at(sums, y, z)
        np.add.at(soft_sums, y, q)
        return cls(sums, soft_sums, np.bincount(y, minlength=classes))

    @classmethod
    def from_means(cls, means: ArrayLike, soft: ArrayLike, counts: ArrayLike) -> HyperKnowledge:
        """From per-class means (C, D) and (C, C) and counts (C,), as they travel."""
        n = np.asarray(counts, dtype=np.int64)
        sums, soft_sums = (np.asarray(rows, dtype=np.float64) * n[:, None] for rows in (means, soft))
        return cls(sums, soft_sums, n)

    @property
    def classes(self) -> int:
        return len(self.counts)

    @property
    def width(self) -> int:
        return self.sums.shape[1]

    @property
    def present(self) -> NDArray[np.bool_]:
        """(C,) whether a class has examples."""
        return self.counts > 0

    @property
    def means(self) -> Float64:
        """(C, D) mean features; zero where a class has no examples."""
        return self.sums / np.maximum(self.counts, 1)[:, None]

    @property
    def soft_means(self) -> Float64:
        """(C, C) mean soft predictions; zero where a class has no examples."""
        return self.soft_sums / np.maximum(self.counts, 1)[:, None]

    def merge(self, other: HyperKnowledge) -> HyperKnowledge:
        """The statistic of both data sets together."""
        _same(self, other)
        return HyperKnowledge(self.sums + other.sums, self.soft_sums + other.soft_sums, self.counts + other.counts)


@dataclass(frozen=True, eq=False)
class FeatureGram:
    """FFC's sums over one shared extractor.

    Attributes:
        gram: (D(D+1)/2,) float64, the upper triangle of Σ z zᵀ, row by row.
        cross: (C, D) float64, row j is Σ z over class j (the transpose of the paper's b, for one-hot labels).
        counts: (C,) int64.

    Raises:
        StatisticError: on a wrong shape, a non-finite value, a negative diagonal, or a sum without examples.
    """

    gram: Float64
    cross: Float64
    counts: Int64

    def __post_init__(self) -> None:
        _freeze(self, "gram", np.float64, 1)
        _freeze(self, "cross", np.float64, 2)
        _freeze(self, "counts", np.int64, 1)
        _check_counts(self.counts, len(self.cross))
        width = self.cross.shape[1]
        if self.gram.size != width * (width + 1) // 2:
            raise StatisticError("feature gram", expected=f"{width * (width + 1) // 2} numbers", got=self.gram.size)
        if (self.gram[_diagonal(width)] < 0).any():
            raise StatisticError("feature gram", expected="a diagonal of squares", got="a negative entry")
        if self.cross[self.counts == 0].any():
            raise StatisticError("feature gram", expected="zero sums where a class has no examples", got="a sum")

    @classmethod
    def zero(cls, classes: int, width: int) -> FeatureGram:
        """The statistic of no data: the neutral element of `merge`."""
        return cls(np.zeros(width * (width + 1) // 2), np.zeros((classes, width)), np.zeros(classes, np.int64))

    @classmethod
    def of(cls, features: ArrayLike, labels: ArrayLike, classes: int) -> FeatureGram:
        """The statistic of features (N, D) and labels (N,) in 0…C−1."""
        z, y = _samples(features, labels, classes)
        cross = np.zeros((classes, z.shape[1]))
        np.add.at(cross, y, z)
        return cls(pack_triangle(z.T @ z), cross, np.bincount(y, minlength=classes))

    @property
    def classes(self) -> int:
        return len(self.counts)

    @property
    def width(self) -> int:
        return self.cross.shape[1]

    @property
    def present(self) -> NDArray[np.bool_]:
        """(C,) whether a class has examples."""
        return self.counts > 0

    @property
    def matrix(self) -> Float64:
        """(D, D) the full symmetric Σ z zᵀ."""
        return unpack_triangle(self.gram, self.width)

    def merge(self, other: FeatureGram) -> FeatureGram:
        """The statistic of both data sets together."""
        _same(self, other)
        return FeatureGram(self.gram + other.gram, self.cross + other.cross, self.counts + other.counts)


Statistic = ClassMeans | HyperKnowledge | FeatureGram


def shareable(labels: ArrayLike, classes: int, min_samples: int) -> NDArray[np.bool_]:
    """(N,) whether a sample's class has at least `min_samples` local examples, so that its statistic may be sent."""
    y = np.asarray(labels, dtype=np.int64)
    return np.asarray(np.bincount(y, minlength=classes)[y] >= max(min_samples, 1))


def pack_triangle(matrix: ArrayLike) -> Float64:
    """The upper triangle of a symmetric (D, D) matrix, row by row: (D(D+1)/2,)."""
    full = np.asarray(matrix, dtype=np.float64)
    return full[np.triu_indices(len(full))]


def unpack_triangle(packed: Float64, width: int) -> Float64:
    """The symmetric (D, D) matrix of a packed upper triangle."""
    full = np.zeros((width, width))
    rows, columns = np.triu_indices(width)
    full[rows, columns] = packed
    full[columns, rows] = packed
    return full


def _diagonal(width: int) -> Int64:
    """Where the diagonal's entries stand in a packed upper triangle."""
    rows = np.arange(width)
    return rows * width - rows * (rows - 1) // 2


def _freeze(owner: object, name: str, dtype: type, ndim: int) -> None:
    given = np.asarray(getattr(owner, name))
    if given.ndim != ndim or given.dtype.kind not in "fiu":
        raise StatisticError(name, expected=f"{ndim} dimensions of numbers", got=f"{given.dtype} {given.shape}")
    if given.dtype.kind == "f" and not np.isfinite(given).all():
        raise StatisticError(name, expected="finite numbers", got="NaN or infinity")
    value: NDArray[Any] = np.array(given, dtype=dtype, order="C")
    value.flags.writeable = False
    object.__setattr__(owner, name, value)


def _check_counts(counts: Int64, rows: int) -> None:
    if counts.shape != (rows,):
        raise StatisticError("counts", expected=f"{rows} counts", got=counts.shape)
    if (counts < 0).any() or (counts > MAX_COUNT).any():
        raise StatisticError("counts", expected="0 to 2^53", got=counts[(counts < 0) | (counts > MAX_COUNT)][0])


def _samples(features: ArrayLike, labels: ArrayLike, classes: int) -> tuple[Float64, Int64]:
    z, y = np.asarray(features, dtype=np.float64), np.asarray(labels)
    if z.ndim != 2 or y.shape != (len(z),) or y.dtype.kind not in "iu":
        raise StatisticError("samples", expected="features (N, D) and N labels", got=f"{z.shape} and {y.shape}")
    if y.size and not 0 <= int(y.min()) <= int(y.max()) < classes:
        raise StatisticError("labels", expected=f"0 to {classes - 1}", got=f"{int(y.min())} to {int(y.max())}")
    return z, y.astype(np.int64)


def _same(one: Statistic, other: Statistic) -> None:
    if type(one) is not type(other) or (one.classes, one.width) != (other.classes, other.width):
        raise StatisticError(
            "merge",
            expected=f"{type(one).__name__} of {one.classes} classes, width {one.width}",
            got=f"{type(other).__name__} of {other.classes} classes, width {other.width}",
        )

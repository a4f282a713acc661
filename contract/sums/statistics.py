"""Statistics: what is computed from local data and may leave a device.

A statistic is a small immutable value over float64 sums. It keeps class sums and counts, never only means.

Guarantees:

- Merging is addition. It is commutative, associative up to rounding, and equals the statistic of the pooled data.
- A statistic consists of declared fields of two kinds: `Rows`, numbers for each class, and a `Triangle`, the upper half
  of a symmetric matrix. A count for each class comes with them. A device cannot send anything else, because no message
  has room for it (`contract/wire/messages.cddl`).

The statistics of this module:

- `ClassMeans` (FedProto, eq. 1 and 4): per class the sum of features, and the count. Merging adds; the means of the
  result are the count-weighted means. Learned prototypes (FedHP) travel in it too, by `from_means`.
- `FeatureGram` (SphereFed's FFC, eq. 10 to 12): A = Σ z zᵀ as a packed upper triangle, b = Σ z yᵀ, and counts. Merging
  adds; the closed-form head follows from the sums alone.
- `FactoredGram`: the same sums on their way up, with a factor in place of the triangle.
- `Participation`: no field; it says only that the round was done.

A method with a statistic of its own declares it in its own file (`contract/methods/`), as FedHKD does.

Classes with fewer than `min_samples` local examples are withheld: `shareable` says which samples may enter. Statistics
that are not `COUNTED` withhold no class: there noise hides the samples, and whether a class has enough of them would
tell something about them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from protofleet.contract.errors import StatisticError
from protofleet.contract.sums.factor import Factor
from protofleet.contract.sums.triangle import add_products, pack_triangle, unpack_triangle

__all__ = [
    "ClassMeans",
    "FactoredGram",
    "FeatureGram",
    "Field",
    "Participation",
    "Rows",
    "Statistic",
    "Triangle",
    "class_sums",
    "shareable",
]

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
_Array = TypeVar("_Array", bound=NDArray[Any])
MAX_COUNT = 2**53  # counts stay exact in float64
MAX_GROUPS = 8
MAX_FIELDS = 4  # fields of rows in one statistic, and in the message that carries it


@dataclass(frozen=True)
class Rows:
    """A field of a statistic: one row of numbers for each class.

    Attributes:
        name: the attribute that holds its class sums, (C, D) or (C, C) float64, zero where the count is zero.
        width: how long a row is: D `features` (D' where a method projects them), C `classes`, or `one`.
        travels: as class `means`, or as `sums`.
        holds: what was summed: `features` of any length, `unit-features`, or `probabilities`. `noised` means sums of
            unit features, or counts, with the noise of the method's mechanism. It decides what an aggregator can check.
    """

    name: str
    width: Literal["features", "classes", "one"] = "features"
    travels: Literal["means", "sums"] = "means"
    holds: Literal["features", "unit-features", "probabilities", "noised"] = "features"

    def columns(self, classes: int, width: int) -> int:
        """The length of a row for C classes and features of width D."""
        return width if self.width == "features" else classes if self.width == "classes" else 1

    def sums(self, sent: NDArray[Any], counts: Int64) -> Float64:
        """Class sums (K, …) in float64 of rows as they travel, over `counts` (K,) samples."""
        sums = np.array(sent, dtype=np.float64)
        if self.travels == "means":
            sums *= counts.astype(np.float64)[:, None]
        return _final(sums)

    def means(self, sent: NDArray[np.floating], counts: NDArray[np.integer]) -> NDArray[np.floating]:
        """Class means (K, …) of rows as they travel, over `counts` (K,) samples, 1 or more each."""
        return np.asarray(sent / counts[:, None]) if self.travels == "sums" else sent


@dataclass(frozen=True)
class Triangle:
    """A field of a statistic: the packed upper triangle of Σ z zᵀ, (D(D+1)/2,) float64, row by row.

    Attributes:
        name: the attribute that holds it.
        noised: whether noise was added to it. Then numbers on its diagonal may be below 0.
    """

    name: str
    noised: bool = False


Field = Rows | Triangle


class Statistic:
    """The base of every statistic: a frozen dataclass with an attribute for each of `FIELDS`, in order, then `counts`.

    Attributes:
        NAME: the name of its kind in reports.
        FIELDS: its fields, in order.
        GROUPS: how many rows a class may have, each over a part of its examples; 1 unless a method needs several. A
            shape with C rows then has C · GROUPS rows, and the rows of a class stand together.
        COUNTED: whether `counts` are numbers of examples. If not, they say nothing of the data: a device counts 1 for
            every class, and no class is withheld for having few examples.
        STANDS_FOR: the kind of statistic that it is another form of; None where it is none.
        counts: (C,) int64, examples of each class.
        factor: the factor of its triangle; None unless it is the form with one.

    Raises:
        StatisticError: on a wrong shape, a non-finite number, a negative count, or a sum without examples; and where a
            subclass declares fields that no message can carry.
    """

    NAME: ClassVar[str]
    FIELDS: ClassVar[tuple[Field, ...]] = ()
    GROUPS: ClassVar[int] = 1
    COUNTED: ClassVar[bool] = True
    STANDS_FOR: ClassVar[type[Statistic] | None] = None
    counts: Int64

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        rows, triangles = cls.row_fields(), len(cls.FIELDS) - len(cls.row_fields())
        if len(rows) > MAX_FIELDS:
            raise StatisticError(cls.__name__, expected=f"at most {MAX_FIELDS} fields of rows", got=len(rows))
        if not 1 <= cls.GROUPS <= MAX_GROUPS:
            raise StatisticError(cls.__name__, expected=f"1 to {MAX_GROUPS} groups of a class", got=cls.GROUPS)
        if triangles and (triangles > 1 or not rows or rows[0].width != "features"):
            fields = ", ".join(field.name for field in cls.FIELDS)
            raise StatisticError(cls.__name__, expected="one triangle, beside rows of features first", got=fields)

    def __post_init__(self) -> None:
        _freeze(self, "counts", np.int64, 1)
        for field in self.FIELDS:
            _freeze(self, field.name, np.float64, 2 if isinstance(field, Rows) else 1)
        counts, width = self.counts, self.width
        _check_counts(counts, len(self.rows(self.row_fields()[0])) if self.row_fields() else len(counts))
        absent = counts == 0 if np.count_nonzero(counts) < len(counts) else None
        for field, value in zip(self.FIELDS, self.arrays(), strict=True):
            if isinstance(field, Triangle):
                _check_triangle(value, width, self.NAME, signed=field.noised)
                continue
            columns = field.columns(self.classes, width)
            if value.shape != (len(counts), columns):
                raise StatisticError(field.name, expected=f"{len(counts)} rows of {columns}", got=value.shape)
            if absent is not None and value[absent].any():
                raise StatisticError(self.NAME, expected="zero sums where a class has no examples", got="a sum")

    # ── made ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @classmethod
    def zero(cls, classes: int, width: int) -> Self:
        """The statistic of no data: the neutral element of `merge`."""
        arrays = [np.zeros(shape) for shape in cls.shapes(classes, width)]
        return cls.build(arrays, np.zeros(classes * cls.GROUPS, np.int64))

    @classmethod
    def build(cls, arrays: Sequence[NDArray[Any]], counts: NDArray[Any]) -> Self:
        """From the values of its fields, in order, and its counts."""
        return cls(*arrays, counts)  # type: ignore[call-arg]

    @classmethod
    def travelled(cls, rows: Sequence[ArrayLike], triangle: ArrayLike | None, counts: ArrayLike) -> Self:
        """From the arrays of a message: dense rows (C, …) of each `Rows` field, in order, and the triangle.

        Raises:
            StatisticError: when these are not its fields.
        """
        n, remaining = np.asarray(counts, dtype=np.int64), iter(rows)
        if len(rows) != len(cls.row_fields()) or (triangle is None) == cls.has_triangle():
            fields = ", ".join(field.name for field in cls.FIELDS) or "no field"
            raise StatisticError(cls.NAME, expected=fields, got="other fields")
        arrays = []
        for field in cls.FIELDS:
            if isinstance(field, Triangle):
                arrays.append(np.asarray(triangle, dtype=np.float64))
            else:
                arrays.append(field.sums(np.asarray(next(remaining)), n))
        return cls.build(arrays, n)

    @classmethod
    def of_checked(cls, rows: Sequence[NDArray[np.floating]], counts: Int64) -> Self:
        """As `travelled`, but nothing is checked again.

        The kind must have no checks of its own (`has_checks`). The caller knows that the rows are its fields, finite,
        and zero where a count is zero.
        """
        statistic = object.__new__(cls)
        for field, row_values in zip(cls.row_fields(), rows, strict=True):
            object.__setattr__(statistic, field.name, field.sums(row_values, counts))
        object.__setattr__(statistic, "counts", _final(counts))
        return statistic

    # ── asked ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @classmethod
    @functools.cache
    def row_fields(cls) -> tuple[Rows, ...]:
        """The fields that are rows of each class, in order."""
        return tuple(field for field in cls.FIELDS if isinstance(field, Rows))

    @classmethod
    def shapes(cls, classes: int, width: int) -> list[tuple[int, ...]]:
        """The shapes of its fields, in order, for C classes and features of width D."""
        rows, packed = classes * cls.GROUPS, width * (width + 1) // 2
        return [(rows, f.columns(classes, width)) if isinstance(f, Rows) else (packed,) for f in cls.FIELDS]

    @classmethod
    @functools.cache
    def has_triangle(cls) -> bool:
        """Whether one of its fields is a triangle."""
        return any(isinstance(field, Triangle) for field in cls.FIELDS)

    @classmethod
    def takes_factor(cls) -> bool:
        """Whether a factor may travel in place of its triangle: not where noise was added."""
        return any(isinstance(field, Triangle) and not field.noised for field in cls.FIELDS)

    @classmethod
    @functools.cache
    def has_checks(cls) -> bool:
        """Whether it checks more than the shapes and numbers that a message has checked already."""
        derived = cls.__mro__[: cls.__mro__.index(Statistic)]
        own = {name for base in derived for name in vars(base)}
        return cls.has_triangle() or not own.isdisjoint({"__post_init__", "travelled", "build"})

    @classmethod
    def numbers(cls, classes: int, width: int) -> int:
        """How many numbers a device with every class sends for its fields."""
        row_numbers = [classes * cls.GROUPS * f.columns(classes, width) for f in cls.row_fields()]
        return sum(row_numbers) + (width * (width + 1) // 2) * (len(cls.FIELDS) - len(row_numbers))

    @classmethod
    def is_class_means(cls) -> bool:
        """Whether it is class means and nothing else, so that a median over devices makes sense."""
        rows = cls.row_fields()
        plain = all(f.travels == "means" and f.holds != "probabilities" for f in rows)
        return issubclass(cls, ClassMeans) and rows == cls.FIELDS and plain and cls.GROUPS == 1

    @property
    def classes(self) -> int:
        return len(self.counts) // self.GROUPS

    @property
    def width(self) -> int:
        """D, the width of its rows of features and of its triangle; 0 where it has no such rows."""
        for field in self.row_fields():
            if field.width == "features":
                return self.rows(field).shape[1]
        return 0

    @property
    def present(self) -> NDArray[np.bool_]:
        """(C,) whether a class has examples."""
        return self.counts > 0

    def arrays(self) -> tuple[Float64, ...]:
        """The values of its fields, in order."""
        return tuple(getattr(self, field.name) for field in self.FIELDS)

    def rows(self, field: Rows) -> Float64:
        """The class sums of a field: (C, …)."""
        return np.asarray(getattr(self, field.name))

    def as_sent(self, field: Rows) -> Float64:
        """The rows of a field as they travel, (C, …): means or sums."""
        sums = self.rows(field)
        return sums / np.maximum(self.counts, 1)[:, None] if field.travels == "means" else sums

    @property
    def triangle(self) -> Float64 | None:
        """Its packed triangle, or None."""
        return next((getattr(self, f.name) for f in self.FIELDS if isinstance(f, Triangle)), None)

    @property
    def factor(self) -> Factor | None:
        """The factor of its triangle, where it has one."""
        return None

    # ── done with ───────────────────────────────────────────────────────────────────────────────────────────────────

    def merge(self, other: Self) -> Self:
        """The statistic of both data sets together."""
        if type(self) is not type(other) or (self.classes, self.width) != (other.classes, other.width):
            raise StatisticError(
                "merge",
                expected=f"{type(self).__name__} of {self.classes} classes, width {self.width}",
                got=f"{type(other).__name__} of {other.classes} classes, width {other.width}",
            )
        parts = zip(self.arrays(), other.arrays(), strict=True)
        return self.build([mine + theirs for mine, theirs in parts], self.counts + other.counts)

    def lightened(self, factor: float) -> Self:
        """The same statistic over fewer samples: means stay, sums shrink with the counts. No present class is lost.

        Args:
            factor: 0 to 1, the share of each count that stays.
        """
        counts = np.maximum(self.counts * factor, self.present).astype(np.int64)
        scaled = []
        for field, value in zip(self.FIELDS, self.arrays(), strict=True):
            means = isinstance(field, Rows) and field.travels == "means"
            scaled.append(value / np.maximum(self.counts, 1)[:, None] * counts[:, None] if means else value * factor)
        return self.build(scaled, counts)


@dataclass(frozen=True, eq=False)
class Participation(Statistic):
    """That a device took part, and nothing of its data: the counts are zero.

    Raises:
        StatisticError: also on a count above zero.
    """

    NAME: ClassVar[str] = "participation"

    counts: Int64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.counts.any():
            raise StatisticError(self.NAME, expected="counts of zero", got=int(self.counts.max()))


@dataclass(frozen=True, eq=False)
class ClassMeans(Statistic):
    """Class sums of features, and counts.

    Attributes:
        sums: (C, D) float64, Σ f(x) over each class's examples; zero where the count is zero.
        counts: (C,) int64.
    """

    NAME: ClassVar[str] = "class-means"
    FIELDS: ClassVar[tuple[Field, ...]] = (Rows("sums"),)

    sums: Float64
    counts: Int64

    @classmethod
    def of(cls, features: ArrayLike, labels: ArrayLike, classes: int) -> Self:
        """The statistic of features (N, D) and labels (N,) in 0…C−1."""
        return cls(*class_sums(features, labels, classes))

    @classmethod
    def from_means(cls, means: ArrayLike, counts: ArrayLike) -> Self:
        """From per-class means (C, D) and counts (C,), as they travel."""
        counts = np.asarray(counts, dtype=np.int64)
        return cls(np.asarray(means, dtype=np.float64) * counts[:, None], counts)

    @property
    def means(self) -> Float64:
        """(C, D) class means; zero where a class has no examples."""
        return self.sums / np.maximum(self.counts, 1)[:, None]


@dataclass(frozen=True, eq=False)
class FeatureGram(Statistic):
    """FFC's sums over one shared extractor.

    Attributes:
        gram: (D(D+1)/2,) float64, the upper triangle of Σ z zᵀ, row by row.
        cross: (C, D) float64, row j is Σ z over class j (the transpose of the paper's b, for one-hot labels).
        counts: (C,) int64.

    Raises:
        StatisticError: also on a negative diagonal.
    """

    NAME: ClassVar[str] = "feature-gram"
    FIELDS: ClassVar[tuple[Field, ...]] = (Triangle("gram"), Rows("cross", travels="sums", holds="unit-features"))

    gram: Float64
    cross: Float64
    counts: Int64

    @classmethod
    def of(cls, features: ArrayLike, labels: ArrayLike, classes: int) -> Self:
        """The statistic of features (N, D) and labels (N,) in 0…C−1."""
        return cls.over([(np.asarray(features, dtype=np.float64), np.asarray(labels))], classes, np.shape(features)[-1])

    @classmethod
    def over(cls, blocks: Iterable[tuple[Float64, NDArray[np.integer]]], classes: int, width: int) -> Self:
        """The statistic of blocks of features (n, D) float64 and labels (n,), as they come."""
        upper, cross, counts = np.zeros((width, width)), np.zeros((classes, width)), np.zeros(classes, np.int64)
        for features, labels in blocks:
            _add_by_class(cross, counts, features, labels)
            add_products(upper, features)
        return cls(pack_triangle(upper), cross, counts)

    @property
    def matrix(self) -> Float64:
        """(D, D) the full symmetric Σ z zᵀ."""
        return unpack_triangle(self.gram, self.width)


@dataclass(frozen=True, eq=False)
class FactoredGram(Statistic):
    """FFC's sums as a device with few samples sends them: `FeatureGram` with a factor in place of its triangle.

    Attributes:
        cross: (C, D) float64, as in `FeatureGram`, of the rounded rows.
        counts: (C,) int64.
        products: the factor of Σ z zᵀ.
    """

    NAME: ClassVar[str] = "feature-gram by factor"
    FIELDS: ClassVar[tuple[Field, ...]] = (Rows("cross", travels="sums", holds="unit-features"),)
    STANDS_FOR: ClassVar[type[Statistic] | None] = FeatureGram

    cross: Float64
    counts: Int64
    products: Factor

    @classmethod
    def of(
        cls, features: Float64, labels: NDArray[np.integer], classes: int, generator: np.random.Generator
    ) -> Self | None:
        """The statistic of features (N, D) and labels (N,) in 0…C−1; None where a factor would be too coarse.

        Args:
            generator: of the rotation (`Factor.of`).
        """
        counts = class_sums(np.zeros((len(features), 0)), labels, classes)[1]
        made = Factor.of(features, generator)
        if made is None:
            return None
        factor, turn = made
        by_class = class_sums(turn.T, labels, classes)[0]  # (C, r): Yᵀ Qᵀ
        return cls(by_class @ factor.values, counts, factor)

    @property
    def factor(self) -> Factor:
        return self.products

    @property
    def whole(self) -> FeatureGram:
        """The sums with the triangle that the factor stands for, as an aggregator reads them."""
        return FeatureGram(self.products.triangle(), self.cross, self.counts)


def class_sums(rows: ArrayLike, labels: ArrayLike, classes: int) -> tuple[Float64, Int64]:
    """Sums (C, W) of rows (N, W) by their labels (N,) in 0…C−1, and how many there are (C,).

    Raises:
        StatisticError: for other shapes, or a label that is no class.
    """
    sums, counts = np.zeros((classes, np.shape(rows)[-1])), np.zeros(classes, np.int64)
    _add_by_class(sums, counts, np.asarray(rows, dtype=np.float64), np.asarray(labels))
    return sums, counts


def _add_by_class(sums: Float64, counts: Int64, z: Float64, y: NDArray[np.integer]) -> None:
    """Add rows (N, W) to the sums of their classes (C, W), and their numbers to the counts (C,), in place."""
    if z.ndim != 2 or y.shape != (len(z),) or y.dtype.kind not in "iu":
        raise StatisticError("samples", expected="features (N, D) and N labels", got=f"{z.shape} and {y.shape}")
    if y.size and not 0 <= int(y.min()) <= int(y.max()) < len(counts):
        raise StatisticError("labels", expected=f"0 to {len(counts) - 1}", got=f"{int(y.min())} to {int(y.max())}")
    for label, row in zip(y.tolist(), z, strict=True):  # an eighth of np.add.at's time where rows are long
        sums[label] += row
    counts += np.bincount(y.astype(np.int64), minlength=len(counts))


def shareable(labels: ArrayLike, classes: int, min_samples: int) -> NDArray[np.bool_]:
    """(N,) whether a sample's class has at least `min_samples` local examples, so that its statistic may be sent."""
    y = np.asarray(labels, dtype=np.int64)
    return np.asarray(np.bincount(y, minlength=classes)[y] >= max(min_samples, 1))


def _check_triangle(packed: Float64, width: int, name: str, *, signed: bool) -> None:
    if packed.size != width * (width + 1) // 2:
        raise StatisticError(name, expected=f"{width * (width + 1) // 2} numbers", got=packed.size)
    rows = np.arange(width)
    if not signed and (packed[rows * width - rows * (rows - 1) // 2] < 0).any():  # where the diagonal's entries stand
        raise StatisticError(name, expected="a diagonal of squares", got="a negative entry")


def _final(array: _Array) -> _Array:
    """Make an array read-only, so that a statistic takes it without a copy. Nobody else may have a reference to it."""
    array.flags.writeable = False
    return array


def _freeze(owner: object, name: str, dtype: type, ndim: int) -> None:
    array = np.asarray(getattr(owner, name))
    if array.ndim != ndim or array.dtype.kind not in "fiu":
        raise StatisticError(name, expected=f"{ndim} dimensions of numbers", got=f"{array.dtype} {array.shape}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise StatisticError(name, expected="finite numbers", got="NaN or infinity")
    flags = array.flags
    if array.dtype == dtype and flags.owndata and flags.c_contiguous and not flags.writeable:
        value: NDArray[Any] = array
    else:
        value = np.array(array, dtype=dtype, order="C")
        value.flags.writeable = False
    object.__setattr__(owner, name, value)


def _check_counts(counts: Int64, rows: int) -> None:
    if counts.shape != (rows,):
        raise StatisticError("counts", expected=f"{rows} counts", got=counts.shape)
    if counts.view(np.uint64).max(initial=0) > MAX_COUNT:  # as which a negative one is larger
        raise StatisticError("counts", expected="0 to 2^53", got=counts[(counts < 0) | (counts > MAX_COUNT)][0])

"""The encodings of tensors on the wire, in one table: how numbers become arrays, and how far off they then may be.

A further one is a class here and its line at the end of `ENCODINGS`: the place in the table is its number on the wire.
Reading what it writes is in `protofleet.contract.wire.tensors`, which goes by the arrays' types alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import WireError
from protofleet.contract.sums.plausibility import INT8_STEPS
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.contract.wire.scaled_integers import scaled_rows, scaled_triangle

__all__ = ["ENCODINGS", "SUMS_ENCODINGS", "SUMS_FORMS", "Encoding", "Form", "SumsForm", "encoding_of"]

Encoding = Literal["f64", "f32", "f16", "int8", "int32"]
SumsForm = Literal["factor", "f64", "f32", "f16", "int32"]

Numbers = NDArray[np.floating]
Arrays = tuple[NDArray[Any], ...]  # the numbers, or scales and integers


@dataclass(frozen=True, kw_only=True)
class Form(ABC):
    """How numbers travel.

    Attributes:
        number_bytes: of one number.
        rank: in order of what is lost, 0 for nothing.
        for_sums: whether sums over many examples may travel so.
    """

    number_bytes: int
    rank: int
    for_sums: bool = True

    @abstractmethod
    def rows(self, rows: Numbers) -> Arrays:
        """Of rows (K, D).

        Raises:
            WireError: the numbers do not fit.
        """

    @abstractmethod
    def triangle(self, values: Numbers) -> Arrays:
        """Of a packed triangle (D(D+1)/2,); raises as `rows`."""

    @abstractmethod
    def slack(self, statistic: FeatureGram) -> float:
        """How far the rounding may move an eigenvalue of M, or the trace: see `aggregator/ingest/validation.py`."""


@dataclass(frozen=True)
class _Floats(Form):
    """IEEE 754, little-endian.

    Attributes:
        rounding: ε, the share of itself by which a number may be off.
        subnormal: by how much it may be off where it is small.
    """

    dtype: np.dtype[np.floating]
    rounding: float = 0.0
    subnormal: float = 0.0

    def rows(self, rows: Numbers) -> Arrays:
        return (_cast(rows, self.dtype),)

    def triangle(self, values: Numbers) -> Arrays:
        return (_cast(values, self.dtype),)

    def slack(self, statistic: FeatureGram) -> float:
        sizes = statistic.width + np.sqrt(statistic.classes * statistic.width)
        return float(2.0 * self.rounding * statistic.counts.sum() + self.subnormal * sizes)


class _Int8(Form):
    """A float32 scale for each row, and the whole multiples of it."""

    def rows(self, rows: Numbers) -> Arrays:
        scales = _cast(np.abs(rows).max(axis=-1, initial=0.0) / 127.0, np.dtype("<f4"))
        safe = np.where(scales > 0, scales, 1.0)[..., None]
        return scales, np.clip(np.rint(rows / safe), -127, 127).astype(np.int8)

    def triangle(self, values: Numbers) -> Arrays:
        scales, quantised = self.rows(values[None])
        return scales, quantised[0]

    def slack(self, statistic: FeatureGram) -> float:
        """One step for all of A, and one for each row of B."""
        largest = float(np.abs(statistic.gram).max(initial=0.0))
        by_class = np.abs(statistic.cross).max(axis=1, initial=0.0)  # (C,)
        width = statistic.width
        return float((width * largest + np.sqrt(width * (by_class**2).sum())) / INT8_STEPS)


class _Int32(Form):
    """Float64 units, and whole multiples of them: see `protofleet.contract.wire.scaled_integers`."""

    def rows(self, rows: Numbers) -> Arrays:
        return scaled_rows(rows)

    def triangle(self, values: Numbers) -> Arrays:
        return scaled_triangle(values)

    def slack(self, statistic: FeatureGram) -> float:
        """Half a step is 2⁻³² of n at most."""
        return float(2.0**-32 * (1.0 + np.sqrt(statistic.width)) * statistic.counts.sum())


ENCODINGS: Mapping[Encoding, Form] = MappingProxyType(
    {
        "f64": _Floats(np.dtype("<f8"), number_bytes=8, rank=0),
        "f32": _Floats(np.dtype("<f4"), number_bytes=4, rank=2, rounding=2.0**-24),
        "f16": _Floats(np.dtype("<f2"), number_bytes=2, rank=3, rounding=2.0**-11, subnormal=2.0**-25),
        "int8": _Int8(number_bytes=1, rank=4, for_sums=False),
        "int32": _Int32(number_bytes=4, rank=1),
    }
)
SUMS_ENCODINGS = tuple(name for name, form in ENCODINGS.items() if form.for_sums)
SUMS_FORMS = ("factor", *SUMS_ENCODINGS)  # factor: of few samples as one, where noise hides nothing; else f64
_OF_FLOATS = {form.dtype: name for name, form in ENCODINGS.items() if isinstance(form, _Floats)}


def encoding_of(array: Numbers) -> Encoding:
    """The encoding in which an array of floats travels unchanged."""
    return _OF_FLOATS[array.dtype]


def _cast(values: Numbers, dtype: np.dtype[np.floating]) -> Numbers:
    with np.errstate(over="ignore"):
        cast = values.astype(dtype)
    if not np.isfinite(cast).all():
        expected, got = f"numbers that fit {_OF_FLOATS[dtype]}", float(np.abs(values).max())
        raise WireError("tensor", expected=expected, got=got, hint="a wider encoding")
    return cast

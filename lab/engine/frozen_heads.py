"""Heads over frozen features: the bytes that each method sends for its head, and the accuracy of the head.

Where nothing is trained, features are computed once. Every method can then be tried on plain arrays, in seconds. A
`Rung` is a method with its settings, as it would be deployed:

1. Each device summarises its features (`Method.summarise`).
2. Its contribution is encoded and decoded as on the wire, and its bytes are counted.
3. The method merges all contributions and makes its rows. The rung's result is the largest device's bytes and the
   accuracy of the answers.

`measure` takes one rung, `ladder` several. Nothing is chosen here: a method chooses only from the contributions.
Neither torch nor a bundle is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import MethodError
from protofleet.contract.methods import Value, method
from protofleet.contract.methods.base import Extractor, Merged
from protofleet.contract.privacy.secret_noise import SecretNoise, key_of
from protofleet.contract.sums.statistics import ClassMeans, Statistic, shareable
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import ClassRows, Contribution, Encoding

__all__ = ["RUNGS", "Features", "Measured", "Rung", "ladder", "measure", "merge"]

_RUN, _BUNDLE = bytes(4), bytes(32)


@dataclass(frozen=True, eq=False)
class Features:
    """Frozen features of some samples.

    Attributes:
        z: (N, D) floats of any length; a method scales them to the unit sphere itself.
        y: (N,) int64, classes.
    """

    z: NDArray[np.floating]
    y: NDArray[np.int64]


@dataclass(frozen=True)
class Rung:
    """One method for a head, with its settings.

    Attributes:
        title: name for a person.
        method: a method that trains nothing.
        hyper: its hyper-parameters that differ from the defaults.
        encoding: encoding of the numbers on the wire; None for the method's own.
    """

    title: str
    method: str
    hyper: Mapping[str, Value] = field(default_factory=dict)
    encoding: Encoding | None = None


RUNGS: tuple[Rung, ...] = (
    Rung("nearest class mean", "ncm"),
    *(Rung(f"FedCOF, {n} group{'s' * (n > 1)} a class", "fedcof", {"groups": n}) for n in (1, 2, 4, 8)),
    Rung("FFC, 256 columns, ridge", "ffc", {"project": 256, "form": "ridge"}),
    Rung("FFC, 256 columns, discriminant", "ffc", {"project": 256, "form": "discriminant"}),
    Rung("FFC in half precision, ridge", "ffc", {"form": "ridge"}, encoding="f16"),
    Rung("FFC in half precision, discriminant", "ffc", {"form": "discriminant"}, encoding="f16"),
    Rung("FFC, ridge", "ffc", {"form": "ridge"}),
    Rung("FFC, discriminant", "ffc", {"form": "discriminant"}),
)


@dataclass(frozen=True, eq=False)
class Measured:
    """The result of a rung.

    Attributes:
        uplink_bytes: the largest payload of a device.
        accuracy: share of right answers.
        of_class: (C,) the same for each class; NaN for a class without test samples.
        told: what the method chose, in words.
        doubt: why the head may be bad; empty where there is no doubt.
    """

    rung: Rung
    uplink_bytes: int
    accuracy: float
    of_class: NDArray[np.float64]
    told: str
    doubt: str

    @property
    def balanced(self) -> float:
        """Accuracy in which every class has the same weight."""
        return float(np.nanmean(self.of_class))


def ladder(
    shares: Sequence[Features],
    asked: Features,
    classes: int,
    rungs: Sequence[Rung] = RUNGS,
    *,
    min_samples: int = 1,
    seed: int = 0,
) -> list[Measured]:
    """Measure the rungs in their order. A rung that projects to more columns than the features have is left out.

    Args:
        shares: features of each device.
        asked: test samples that no device has.
        min_samples: a device withholds classes, and groups of a class, with fewer samples.
        seed: seed of the random groups.
    """
    width = asked.z.shape[1]
    fitting = [rung for rung in rungs if int(rung.hyper.get("project", 0)) <= width]
    return [measure(rung, shares, asked, classes, min_samples=min_samples, seed=seed) for rung in fitting]


def measure(
    rung: Rung, shares: Sequence[Features], asked: Features, classes: int, *, min_samples: int = 1, seed: int = 0
) -> Measured:
    """Measure one rung. Arguments as for `ladder`.

    Raises:
        MethodError: the settings do not fit, or the method trains.
        StatisticError: no device has a sample.
    """
    rung_method, width = method(rung.method), asked.z.shape[1]
    hyper = rung_method.resolve(rung.hyper)
    merged, largest = merge(rung, shares, classes, width, min_samples=min_samples, seed=seed)
    state = GlobalState(_RUN, 1, 1, dict[str, ClassRows](rung_method.next_rows({}, merged, hyper)))
    answer = rung_method.shared_answers(state, classes, width, hyper)[rung_method.way]
    right = answer(np.asarray(asked.z, dtype=np.float32)) == asked.y
    class_counts = np.bincount(asked.y, minlength=classes)
    of_class = np.where(
        class_counts > 0, np.bincount(asked.y, weights=right, minlength=classes) / np.maximum(class_counts, 1), np.nan
    )
    told, doubt = rung_method.told(merged, hyper), rung_method.doubt(merged, hyper)
    return Measured(rung, largest, float(right.mean()), of_class, told, doubt)


def merge(
    rung: Rung, shares: Sequence[Features], classes: int, width: int, *, min_samples: int = 1, seed: int = 0
) -> tuple[Merged, int]:
    """The merged contributions of all devices, and the bytes of the largest one. Arguments as for `ladder`.

    Raises:
        MethodError, StatisticError: as `measure`.
    """
    rung_method = method(rung.method)
    if rung_method.trains or rung_method.extractor != "bundle":
        raise MethodError(rung.title, expected="a method over frozen features", got=rung.method)
    hyper = rung_method.resolve(rung.hyper)
    rung_method.check(hyper, classes, width)
    encoding = rung.encoding or rung_method.encoding
    statistics, largest = [], 0
    rows = rung_method.factor_rows(hyper, width, encoding)
    for number, share in enumerate(shares):
        local = _Local(share, classes, hyper, min_samples if rung_method.statistic.COUNTED else 1, (seed, number), rows)
        if local.counts.any() or not rung_method.statistic.COUNTED:
            statistic, size = _travelled(rung_method.name, rung_method.summarise(local), encoding)
            statistics.append(statistic)
            largest = max(largest, size)
    return rung_method.merge(lambda: iter(statistics), "mean", hyper), largest


def _travelled(name: str, statistic: Statistic, encoding: Encoding) -> tuple[Statistic, int]:
    """A statistic as it arrives, and the size of its message in bytes."""
    sent = Contribution.of(statistic, run=_RUN, round=1, method=name, bundle=_BUNDLE, extractor=_BUNDLE)
    payload = encode(sent, encoding)
    message = decode(payload, limit_bytes=max(len(payload), 1 << 16))
    assert isinstance(message, Contribution)
    return message.statistic(statistic.STANDS_FOR or type(statistic), statistic.classes, statistic.width), len(payload)


class _Local:
    """One device's features, as a method sees them (`protofleet.contract.methods.base.Local`)."""

    has_samples = True
    params: Mapping[str, NDArray[np.float32]] = {}

    def __init__(
        self,
        share: Features,
        classes: int,
        hyper: Mapping[str, Value],
        min_samples: int,
        seed: tuple[int, int],
        factor_rows: int,
    ) -> None:
        kept = shareable(share.y, classes, min_samples)
        self.asked: NDArray[np.bool_] = np.ones(classes, dtype=bool)
        self._z, self._y = np.asarray(share.z[kept], dtype=np.float32), share.y[kept]
        self._seed, self.factor_rows = seed, factor_rows
        self.classes, self.width, self.hyper, self.min_samples = classes, share.z.shape[1], hyper, min_samples
        self.counts: NDArray[np.int64] = np.bincount(self._y, minlength=classes)

    def features(self, extractor: Extractor) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int64]]]:
        """All features in one block."""
        yield self._z, self._y

    def class_means(self) -> ClassMeans:
        """Class means of these features."""
        return ClassMeans.of(self._z, self._y, self.classes)

    def noise(self) -> np.random.Generator:
        """Random numbers that the seed and the device's place fix."""
        return np.random.default_rng(self._seed)

    def secret_noise(self, *context: bytes | NDArray[np.generic]) -> SecretNoise:
        """Secret noise from the same seed."""
        return SecretNoise(key_of(repr(self._seed).encode(), *context))

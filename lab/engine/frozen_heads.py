"""Heads over frozen features, from bytes to accuracy: what each way of making one sends, and how well it answers.

Where nothing is trained, features need be computed once; every way of making a head of them can then be tried on plain
arrays, in seconds. A `Rung` is a method with its settings, as it would be deployed:

1. each device summarises its features (`Method.summarise`);
2. what it sends is encoded and decoded as on the wire, and its bytes are counted;
3. the method merges all and makes its rows; the largest device's bytes and the answers' accuracy are the rung's.

`measure` takes one rung, `ladder` several. Nothing is chosen here: what a method chooses, it chooses from what was
sent. Neither torch nor a bundle is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from contract.errors import MethodError
from contract.messages import ClassRows, Contribution, Encoding
from contract.methods import Value, method
from contract.methods.base import Extractor, Merged
from contract.secret_noise import SecretNoise, key_of
from contract.state import GlobalState
from contract.statistics import ClassMeans, Statistic, shareable
from contract.wire import decode, encode

__all__ = ["RUNGS", "Features", "Measured", "Rung", "ladder", "measure", "merge"]

_RUN, _BUNDLE = bytes(4), bytes(32)


@dataclass(frozen=True, eq=False)
class Features:
    """Frozen features of some samples.

    Attributes:
        z: (N, D) floating, of any length; a method puts them on the unit sphere itself.
        y: (N,) int64, classes.
    """

    z: NDArray[np.floating]
    y: NDArray[np.int64]


@dataclass(frozen=True)
class Rung:
    """One way of making a head.

    Attributes:
        title: for a person.
        method: one that trains nothing.
        hyper: its hyper-parameters, where they are not the defaults.
        encoding: how numbers travel; as the method says where None.
    """

    title: str
    method: str
    hyper: Mapping[str, Value] = field(default_factory=dict)
    encoding: Encoding | None = None


RUNGS: tuple[Rung, ...] = (
    Rung("nearest class mean", "ncm"),
    *(Rung(f"FedCOF, {n} group{'s' * (n > 1)} a class", "fedcof", {"groups": n}) for n in (1, 2, 4, 8)),
    Rung("FFC, 256 columns, ridge", "ffc", {"project": 256}),
    Rung("FFC, 256 columns, discriminant", "ffc", {"project": 256, "form": "discriminant"}),
    Rung("FFC in half precision, ridge", "ffc", encoding="f16"),
    Rung("FFC in half precision, discriminant", "ffc", {"form": "discriminant"}, encoding="f16"),
    Rung("FFC, ridge", "ffc"),
    Rung("FFC, discriminant", "ffc", {"form": "discriminant"}),
)


@dataclass(frozen=True, eq=False)
class Measured:
    """What came of a rung.

    Attributes:
        uplink_bytes: the payload of the device that sends most.
        accuracy: share of the samples asked about that are answered rightly.
        of_class: (C,) the same of each class; NaN where none of it was asked about.
        told: what the method chose, in words.
        doubt: why it may be bad; empty where nothing speaks against it.
    """

    rung: Rung
    uplink_bytes: int
    accuracy: float
    of_class: NDArray[np.float64]
    told: str
    doubt: str

    @property
    def balanced(self) -> float:
        """Accuracy with every class counting alike."""
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
    """Each rung that these features can have, in the order given; a projection to more columns than there are is none.

    Args:
        shares: of each device.
        asked: samples that no device has.
        min_samples: no class, and no group of one, of fewer samples leaves a device.
        seed: of the random groups.
    """
    width = asked.z.shape[1]
    fitting = [rung for rung in rungs if int(rung.hyper.get("project", 0)) <= width]
    return [measure(rung, shares, asked, classes, min_samples=min_samples, seed=seed) for rung in fitting]


def measure(
    rung: Rung, shares: Sequence[Features], asked: Features, classes: int, *, min_samples: int = 1, seed: int = 0
) -> Measured:
    """One rung; arguments as `ladder` has them.

    Raises:
        MethodError: the settings do not fit, or the method trains.
        StatisticError: no device has a sample.
    """
    found, width = method(rung.method), asked.z.shape[1]
    hyper = found.settle(rung.hyper)
    merged, largest = merge(rung, shares, classes, width, min_samples=min_samples, seed=seed)
    state = GlobalState(_RUN, 1, 1, dict[str, ClassRows](found.next_rows({}, merged, hyper)))
    answer = found.shared_answers(state, classes, width, hyper)[found.way]
    right = answer(np.asarray(asked.z, dtype=np.float32)) == asked.y
    held = np.bincount(asked.y, minlength=classes)
    of_class = np.where(held > 0, np.bincount(asked.y, weights=right, minlength=classes) / np.maximum(held, 1), np.nan)
    told, doubt = found.told(merged, hyper), found.doubt(merged, hyper)
    return Measured(rung, largest, float(right.mean()), of_class, told, doubt)


def merge(
    rung: Rung, shares: Sequence[Features], classes: int, width: int, *, min_samples: int = 1, seed: int = 0
) -> tuple[Merged, int]:
    """What the devices of a rung send, merged, and the bytes of the one that sends most; arguments as of `ladder`.

    Raises:
        MethodError, StatisticError: as `measure`.
    """
    found = method(rung.method)
    if found.trains or found.extractor != "bundle":
        raise MethodError(rung.title, expected="a method over frozen features", got=rung.method)
    hyper = found.settle(rung.hyper)
    found.check(hyper, classes, width)
    encoding = rung.encoding or found.encoding
    statistics, largest = [], 0
    for number, share in enumerate(shares):
        local = _Local(share, classes, hyper, min_samples if found.statistic.COUNTED else 1, (seed, number))
        if local.counts.any() or not found.statistic.COUNTED:
            statistic, size = _travelled(found.name, found.summarise(local), encoding)
            statistics.append(statistic)
            largest = max(largest, size)
    return found.merge(lambda: iter(statistics), "mean", hyper), largest


def _travelled(name: str, statistic: Statistic, encoding: Encoding) -> tuple[Statistic, int]:
    """A statistic as it arrives, and the bytes of its message."""
    sent = Contribution.of(statistic, run=_RUN, round=1, method=name, bundle=_BUNDLE, extractor=_BUNDLE)
    payload = encode(sent, encoding)
    message = decode(payload, limit_bytes=max(len(payload), 1 << 16))
    assert isinstance(message, Contribution)
    return message.statistic(type(statistic), statistic.classes, statistic.width), len(payload)


class _Local:
    """One device's features, as a method sees them (`contract.methods.base.Local`)."""

    has_samples = True
    params: Mapping[str, NDArray[np.float32]] = {}

    def __init__(
        self, share: Features, classes: int, hyper: Mapping[str, Value], min_samples: int, seed: tuple[int, int]
    ) -> None:
        kept = shareable(share.y, classes, min_samples)
        self.asked: NDArray[np.bool_] = np.ones(classes, dtype=bool)
        self._z, self._y = np.asarray(share.z[kept], dtype=np.float32), share.y[kept]
        self._seed = seed
        self.classes, self.width, self.hyper, self.min_samples = classes, share.z.shape[1], hyper, min_samples
        self.counts: NDArray[np.int64] = np.bincount(self._y, minlength=classes)

    def features(self, extractor: Extractor) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int64]]]:
        """All of them at once."""
        yield self._z, self._y

    def class_means(self) -> ClassMeans:
        """Of these features."""
        return ClassMeans.of(self._z, self._y, self.classes)

    def noise(self) -> np.random.Generator:
        """Fixed by the seed and the device's place."""
        return np.random.default_rng(self._seed)

    def secret_noise(self, *of: bytes | NDArray[np.generic]) -> SecretNoise:
        """The same."""
        return SecretNoise(key_of(repr(self._seed).encode(), *of))

"""What a device offers its method in a round: features of its samples, under the weights it has now.

This is the device's side of `protofleet.contract.methods.Local`. Features come block by block, so that a large data set
is never held as N × D floats. Samples of classes with fewer examples than may be told of are left out of everything.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.methods import Value
from protofleet.contract.methods.base import Extractor as ExtractorName
from protofleet.contract.privacy.secret_noise import SecretNoise, key_of
from protofleet.contract.sums.statistics import ClassMeans, shareable
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.training.extractor import Extractor
from protofleet.edge_client.training.trainer import Weights

__all__ = ["LocalSamples", "OwnMeans", "Remembered", "own_means"]


@dataclass(frozen=True, eq=False)
class OwnMeans:
    """What a device knows of its own classes under its present weights.

    Nothing is withheld: it is used on the device only.

    Attributes:
        classes: its class means, and counts.
        spread: (C,) float64, mean squared distance of a class's features from their mean; 0 where it has none.
        head: (C, D) float64, the device's personal head, where its method has one.
    """

    classes: ClassMeans
    spread: NDArray[np.float64]
    head: NDArray[np.float64] | None = None


class LocalSamples:
    """The samples of one device, as a method sees them.

    Args:
        data: the labelled ones.
        classes, width: C and D.
        hyper: of the round's method, resolved.
        params: the device's present weights by state-tensor name.
        extractor: makes an extractor of those weights, or of the bundle's.
        min_samples: classes with fewer examples are left out; 1 leaves none out.
        chosen: (N,) the samples that are summed, where not all of them are.
        withheld: classes that the fleet has forgotten, which are left out, too.
        own_means: gives what is known of all samples under the present weights.
        secret, what: what noise is drawn from: a secret of the device, and the run, the round, its method and bundle.
        factor_rows: up to so many samples, a factor may be sent in place of a triangle.
    """

    # arguments: what is kept of a data set, by name
    def __init__(
        self,
        data: LocalData,
        *,
        classes: int,
        width: int,
        hyper: Mapping[str, Value],
        params: Weights,
        extractor: Callable[[ExtractorName], Extractor],
        own_means: Callable[[], OwnMeans],
        min_samples: int = 1,
        chosen: NDArray[np.bool_] | None = None,
        withheld: Collection[int] = (),
        secret: bytes = b"",
        what: bytes = b"",
        factor_rows: int = 0,
    ) -> None:
        self.classes, self.width, self.hyper, self.params = classes, width, hyper, params
        self._data, self._extractor, self._own_means = data, extractor, own_means
        self._secret, self._what = secret, what
        self.min_samples, self.factor_rows = min_samples, factor_rows
        self._kept = shareable(data.y, classes, min_samples) if chosen is None else chosen  # (N,)
        self.asked: NDArray[np.bool_] = ~np.isin(np.arange(classes), list(withheld))
        if withheld:
            self._kept = self._kept & ~np.isin(data.y, list(withheld))
        self.counts: NDArray[np.int64] = np.bincount(data.y[self._kept], minlength=classes)

    def features(self, extractor: ExtractorName) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int64]]]:
        """Blocks of features (n, D) and their labels (n,), by the device's own weights or the bundle's."""
        for rows, features in self._extractor(extractor).blocks(self._data.x):
            kept = self._kept[rows]
            if kept.any():
                yield features[kept], self._data.y[rows][kept]

    def class_means(self) -> ClassMeans:
        """The class means of the device's own features."""
        means, present = self._own_means().classes, self.counts > 0
        return ClassMeans(np.where(present[:, None], means.sums, 0.0), np.where(present, means.counts, 0))

    def own_head(self) -> NDArray[np.float64] | None:
        """The device's personal head."""
        return self._own_means().head

    def noise(self) -> np.random.Generator:
        """A generator that is fixed by the device's secret, the run and the round."""
        return np.random.default_rng(int.from_bytes(hmac.digest(self._secret, self._what, hashlib.sha256), "big"))

    def secret_noise(self, *parts: bytes | NDArray[np.generic]) -> SecretNoise:
        """Noise that is fixed by the device's secret, the run, the round, its method and bundle, and these numbers."""
        return SecretNoise(key_of(self._secret, self._what, *parts))


class Remembered:
    """What a device kept of its samples (`edge_client/journal/journal.py`), as a method sees them: enough to answer.

    Args:
        hyper: of the method, resolved.
        params: the weights that the means were computed under.
        means: None where nothing was kept.
    """

    min_samples = 1
    factor_rows = 0

    def __init__(
        self, classes: int, width: int, hyper: Mapping[str, Value], params: Weights, means: OwnMeans | None
    ) -> None:
        self.classes, self.width, self.hyper, self.params = classes, width, hyper, params
        self._means = ClassMeans.zero(classes, width) if means is None else means.classes
        self._head = None if means is None else means.head
        self.asked: NDArray[np.bool_] = np.ones(classes, dtype=bool)
        self.counts: NDArray[np.int64] = self._means.counts

    def features(self, extractor: ExtractorName) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int64]]]:
        """Nothing: the samples are not here."""
        return iter(())

    def class_means(self) -> ClassMeans:
        """Those that were kept."""
        return self._means

    def own_head(self) -> NDArray[np.float64] | None:
        """That which was kept."""
        return self._head

    def noise(self) -> np.random.Generator:
        """Of no use, since nothing is sent."""
        return np.random.default_rng()

    def secret_noise(self, *parts: bytes | NDArray[np.generic]) -> SecretNoise:
        """Of no use either."""
        return SecretNoise(key_of(os.urandom(32), *parts))


def own_means(extractor: Extractor, data: LocalData, *, classes: int) -> OwnMeans:
    """The class means of `data` as the extractor gives them, and each class's spread, in one pass."""
    total, squares = ClassMeans.zero(classes, extractor.width), np.zeros(classes)
    for rows, features in extractor.blocks(data.x):
        total = total.merge(ClassMeans.of(features, data.y[rows], classes))
        np.add.at(squares, data.y[rows], (features.astype(np.float64) ** 2).sum(axis=1))
    mean_square = squares / np.maximum(total.counts, 1)
    return OwnMeans(total, np.maximum(mean_square - (total.means**2).sum(axis=1), 0.0))

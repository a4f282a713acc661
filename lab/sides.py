"""What travels beside weights in the federations that average them: prototypes, hyper-knowledge, FedNH's head.

One class for each, with the same five verbs, called in this order in every round:

1. `guide()`: what clients train against, None before there is anything;
2. `gather(...)`: after a client's training, its statistic over its own samples;
3. `merge(...)`: the round's statistics become the next global ones;
4. `install(...)`: what of it belongs into the model;
5. `answers(...)`: how test images are classified by it.

Sums and means are `contract.statistics`, merged by `aggregator.rules`: what the lab simulates of a method here is what
an aggregator would do. Bytes are those of the tensors as float32, without an envelope.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from aggregator.rules import merge
from contract.methods import Value
from contract.sphere import unit_rows
from contract.statistics import ClassMeans
from edge_client.data import LocalData
from edge_client.evaluate import nearest_answer
from lab.eager import EagerModel, Guide

__all__ = ["SIDES", "NormalisedHead", "Prototypes", "Side"]

Features = NDArray[np.float32]


class Side(Protocol):
    """The verbs; see the module."""

    def guide(self) -> Guide | None: ...

    def gather(self, model: EagerModel, share: LocalData, rng: np.random.Generator) -> int:
        """Keep the client's statistic for `merge`; returns its bytes."""
        ...

    def merge(self) -> None: ...

    def install(self, model: EagerModel) -> None: ...

    def answers(self, features: Features) -> dict[str, NDArray[np.int64]]: ...


class Prototypes:
    """FedPR (Qiao et al.), eq. 2 to 4: class means; the global one is the plain mean over the clients that hold the
    class."""

    def __init__(self, classes: int, width: int, hyper: Mapping[str, Value]) -> None:
        self._round: list[ClassMeans] = []
        self._global = ClassMeans.zero(classes, width)

    def guide(self) -> Guide | None:
        return _guide(self._global)

    def gather(self, model: EagerModel, share: LocalData, rng: np.random.Generator) -> int:
        own = ClassMeans.of(model.features(share.x), share.y, self._global.classes)
        self._round.append(own)
        return _bytes(own)

    def merge(self) -> None:
        self._global = _replaced(self._global, self._round)
        self._round = []

    def install(self, model: EagerModel) -> None:
        """Nothing: prototypes are no part of the model."""

    def answers(self, features: Features) -> dict[str, NDArray[np.int64]]:
        if not self._global.present.any():
            return {}
        return {"prototype": nearest_answer(self._global.means, self._global.present)(features)}


class NormalisedHead:
    """FedNH (Dai et al., AAAI 2023), eq. 5 and 6: the head's rows are unit prototypes W. Clients train against them
    and send class means of unit features; the server moves W_j ← ρ W_j + (1 − ρ) μ_j/‖μ_j‖ and normalises."""

    def __init__(self, classes: int, width: int, hyper: Mapping[str, Value]) -> None:
        self._smoothing = float(hyper["smoothing"])
        self._round: list[ClassMeans] = []
        self._classes, self._merged = classes, ClassMeans.zero(classes, width)

    def guide(self) -> Guide | None:
        return None

    def gather(self, model: EagerModel, share: LocalData, rng: np.random.Generator) -> int:
        own = ClassMeans.of(unit_rows(model.features(share.x)), share.y, self._classes)
        self._round.append(own)
        return _bytes(own)

    def merge(self) -> None:
        merged = merge(lambda: self._round)
        assert isinstance(merged, ClassMeans)
        self._merged, self._round = merged, []

    def install(self, model: EagerModel) -> None:
        """Move the prototypes of the classes that the round has seen."""
        old = model.head_weight.numpy().astype(np.float64)
        moved = unit_rows(self._smoothing * old + (1.0 - self._smoothing) * unit_rows(self._merged.means))
        rows = np.where(self._merged.present[:, None], moved, old)
        model.head_weight.copy_(torch.from_numpy(rows))

    def answers(self, features: Features) -> dict[str, NDArray[np.int64]]:
        return {}


SIDES = {"prototypes": Prototypes, "normalised-head": NormalisedHead}


def _replaced(before: ClassMeans, received: Sequence[ClassMeans]) -> ClassMeans:
    """The round's merged means; a class that nobody sent keeps what it had."""
    if not received:
        return before
    merged = merge(lambda: received, weighting="client")
    assert isinstance(merged, ClassMeans)
    here = merged.present
    return ClassMeans(np.where(here[:, None], merged.sums, before.sums), np.where(here, merged.counts, before.counts))


def _guide(means: ClassMeans) -> Guide | None:
    if not means.present.any():
        return None
    return Guide(torch.from_numpy(means.means.astype(np.float32)), torch.from_numpy(means.present.astype(np.float32)))


def _bytes(statistic: ClassMeans) -> int:
    return 4 * int(statistic.present.sum()) * (statistic.width + 1)

"""What travels beside weights in the federations that average them: prototypes, hyper-knowledge, FedNH's head.

One class for each, with the same five verbs, called in this order in every round:

1. `guide()`: what clients train against, None before there is anything;
2. `gather(...)`: after a client's training, its statistic over its own samples;
3. `merge(...)`: the round's statistics become the next global ones;
4. `install(...)`: what of it belongs into the model;
5. `answers(...)`: how test images are classified by it.

`state` and `restore` are a checkpoint's.

Sums and means are `contract.statistics`, merged by `aggregator.rules`: what the lab simulates of a method here is what
an aggregator would do. Bytes are those of the tensors as float32, without an envelope.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aggregator.rules import merge
from contract.methods import Value
from contract.sphere import unit_rows
from contract.statistics import ClassMeans, HyperKnowledge
from edge_client.data import LocalData
from edge_client.evaluate import nearest_answer
from edge_client.privacy import Mechanism
from lab.engine.local_training import EagerModel, Guide

__all__ = ["SIDES", "Knowledge", "NormalisedHead", "Prototypes", "Side"]

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

    def state(self) -> dict[str, Tensor]:
        """What is global between two rounds, beside the model's own tensors."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None: ...


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
        found = merge(lambda: self._round, weighting="client")
        assert isinstance(found, ClassMeans)
        here = found.present  # a class that nobody sent keeps what it had
        sums = np.where(here[:, None], found.sums, self._global.sums)
        self._global, self._round = ClassMeans(sums, np.where(here, found.counts, self._global.counts)), []

    def install(self, model: EagerModel) -> None:
        """Nothing: prototypes are no part of the model."""

    def answers(self, features: Features) -> dict[str, NDArray[np.int64]]:
        if not self._global.present.any():
            return {}
        return {"prototype": nearest_answer(self._global.means, self._global.present)(features)}

    def state(self) -> dict[str, Tensor]:
        return {"sums": torch.tensor(self._global.sums), "counts": torch.tensor(self._global.counts)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._global = ClassMeans(state["sums"].numpy(), state["counts"].numpy())


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

    def state(self) -> dict[str, Tensor]:
        return {}  # the head is the model's

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Nothing."""


class Knowledge:
    """FedHKD (Chen, Wang, Vikalo, ICLR 2023): class means of features and of soft predictions, with the Gaussian
    mechanism where `noise` is not 0, weighted by counts."""

    def __init__(self, classes: int, width: int, hyper: Mapping[str, Value]) -> None:
        self._mechanism, self._temperature = Mechanism.of(hyper), float(hyper["temperature"])
        self._round: list[HyperKnowledge] = []
        self._global = HyperKnowledge.zero(classes, width)

    def guide(self) -> Guide | None:
        found = self._global
        if not found.present.any():
            return None
        return Guide(_float(found.means), _float(found.present), _float(found.soft_means))

    def gather(self, model: EagerModel, share: LocalData, rng: np.random.Generator) -> int:
        features = model.features(share.x)
        scaled = model.logits(features).astype(np.float64) / self._temperature  # (N, C)
        soft = np.exp(scaled - scaled.max(axis=1, keepdims=True))
        soft /= soft.sum(axis=1, keepdims=True)
        own = HyperKnowledge.of(self._mechanism.clipped(features), soft, share.y, self._global.classes)
        self._round.append(self._mechanism.released(own, rng.bytes(32), b"lab"))
        return 4 * int(own.present.sum()) * (own.width + own.classes + 1)

    def merge(self) -> None:
        found, before = merge(lambda: self._round), self._global
        assert isinstance(found, HyperKnowledge)
        here = found.present
        self._global = HyperKnowledge(
            np.where(here[:, None], found.sums, before.sums),
            np.where(here[:, None], found.soft_sums, before.soft_sums),
            np.where(here, found.counts, before.counts),
        )
        self._round = []

    def install(self, model: EagerModel) -> None:
        """Nothing: hyper-knowledge is no part of the model."""

    def answers(self, features: Features) -> dict[str, NDArray[np.int64]]:
        means = ClassMeans(self._global.sums, self._global.counts)
        return {"prototype": nearest_answer(means.means, means.present)(features)} if means.present.any() else {}

    def state(self) -> dict[str, Tensor]:
        found = self._global
        tables = {"sums": found.sums, "soft_sums": found.soft_sums, "counts": found.counts}
        return {name: torch.tensor(table) for name, table in tables.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._global = HyperKnowledge(*(state[name].numpy() for name in ("sums", "soft_sums", "counts")))


SIDES = {"knowledge": Knowledge, "normalised-head": NormalisedHead, "prototypes": Prototypes}


def _guide(means: ClassMeans) -> Guide | None:
    if not means.present.any():
        return None
    return Guide(_float(means.means), _float(means.present), torch.zeros(means.classes, means.classes))


def _float(values: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))


def _bytes(statistic: ClassMeans) -> int:
    return 4 * int(statistic.present.sum()) * (statistic.width + 1)

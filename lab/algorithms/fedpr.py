"""FedPR as published (Qiao et al., eq. 2 to 4): weights are averaged, and class means travel beside them.

The global prototype of a class is the plain mean over the clients that hold the class. In algorithm 1 each client
summarises with the weights that it has just trained. With `prototypes=merged` it uses the averaged weights instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from protofleet.contract.methods import Hyper, Value
from protofleet.contract.sums.merge_rules import merge
from protofleet.contract.sums.statistics import ClassMeans
from protofleet.edge_client.data import LocalData
from protofleet.lab.algorithms.base import Algorithm
from protofleet.lab.algorithms.prototypes import guide, nearest, newer_rows, row_bytes
from protofleet.lab.training.local_training import EagerModel, Guide

__all__ = ["FedPR"]


class FedPR(Algorithm):
    name = "fedpr-averaged"
    summary = "FedPR as published: weights averaged, prototypes beside"
    source = "Qiao et al., eq. 2 to 4"
    objective = "fedpr"
    statistic = ClassMeans
    hyper: ClassVar = {
        "prototypes": Hyper("trained", "by which weights, Algorithm 1: the client's own", ("trained", "merged"))
    }

    def __init__(self, classes: int, width: int, hyper: Mapping[str, Value], clients: int) -> None:
        self._merged = hyper.get("prototypes") == "merged"
        self._round: list[ClassMeans] = []
        self._global = ClassMeans.zero(classes, width)

    @property
    def afterwards(self) -> bool:
        return self._merged

    def guide(self) -> Guide | None:
        return guide(self._global)

    def summarise(self, model: EagerModel, share: LocalData, rng: np.random.Generator) -> ClassMeans:
        return ClassMeans.of(model.features(share.x), share.y, self._global.classes)

    def gather(self, statistic: ClassMeans) -> int:
        self._round.append(statistic)
        return row_bytes(statistic.present, statistic.width)

    def merge(self) -> None:
        merged, before = merge(lambda: self._round, weighting="client"), self._global
        assert isinstance(merged, ClassMeans)
        present = merged.present
        sums = newer_rows(merged.sums, before.sums, present)
        self._global, self._round = ClassMeans(sums, newer_rows(merged.counts, before.counts, present)), []

    def answers(self, features: NDArray[np.float32]) -> dict[str, NDArray[np.int64]]:
        return nearest(self._global, features)

    def state(self) -> dict[str, Any]:
        return {"sums": torch.tensor(self._global.sums), "counts": torch.tensor(self._global.counts)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._global = ClassMeans(state["sums"].numpy(), state["counts"].numpy())

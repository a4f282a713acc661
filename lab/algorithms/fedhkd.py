"""FedHKD as published (Chen, Wang, Vikalo, ICLR 2023): weights are averaged, and hyper-knowledge travels beside them.

Hyper-knowledge is the class means of features and of soft predictions, weighted by counts, under the Gaussian mechanism
where `noise` is not 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from protofleet.contract.heads.answers import softmax
from protofleet.contract.methods import METHODS, Hyper, Value
from protofleet.contract.methods.fedhkd import HyperKnowledge
from protofleet.contract.privacy.mechanism import RowNoise
from protofleet.contract.sums.merge_rules import merge
from protofleet.contract.sums.statistics import ClassMeans
from protofleet.edge_client.data import LocalData
from protofleet.lab.algorithms.base import Algorithm
from protofleet.lab.algorithms.prototypes import guide, nearest, newer_rows, row_bytes
from protofleet.lab.training.local_training import EagerModel, Guide

__all__ = ["FedHKD"]


class FedHKD(Algorithm):
    name = "fedhkd-averaged"
    summary = "FedHKD as published: weights averaged, hyper-knowledge beside"
    source = "Chen, Wang, Vikalo, ICLR 2023"
    objective = "fedhkd"
    statistic = HyperKnowledge
    hyper: ClassVar = {
        **{name: METHODS["fedhkd"].hyper[name] for name in ("lr", "epochs", "optimizer")},
        "feature_loss": Hyper("l2", "as printed, a norm; squared: the mean of squares, public code", ("l2", "squared")),
    }

    def __init__(self, classes: int, width: int, hyper: Mapping[str, Value], clients: int) -> None:
        self._mechanism, self._temperature = RowNoise.of(hyper), float(hyper["temperature"])
        self._round: list[HyperKnowledge] = []
        self._global = HyperKnowledge.zero(classes, width)

    def guide(self) -> Guide | None:
        return guide(self._means(), self._global.soft_means)

    def summarise(self, model: EagerModel, share: LocalData, rng: np.random.Generator) -> HyperKnowledge:
        features = model.features(share.x)
        soft = softmax(model.logits(features).astype(np.float64) / self._temperature)  # (N, C)
        mechanism, classes = self._mechanism, self._global.classes
        own = HyperKnowledge.of(features if mechanism is None else mechanism.clipped(features), soft, share.y, classes)
        return own if mechanism is None else mechanism.released(own, rng)

    def gather(self, statistic: HyperKnowledge) -> int:
        self._round.append(statistic)
        return row_bytes(statistic.present, statistic.width, statistic.classes)

    def merge(self) -> None:
        merged, before = merge(lambda: self._round), self._global
        assert isinstance(merged, HyperKnowledge)
        self._global = HyperKnowledge(
            *(
                newer_rows(getattr(merged, table), getattr(before, table), merged.present)
                for table in ("sums", "soft_sums", "counts")
            )
        )
        self._round = []

    def answers(self, features: NDArray[np.float32]) -> dict[str, NDArray[np.int64]]:
        return nearest(self._means(), features)

    def state(self) -> dict[str, Any]:
        return {name: torch.tensor(getattr(self._global, name)) for name in ("sums", "soft_sums", "counts")}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._global = HyperKnowledge(*(state[name].numpy() for name in ("sums", "soft_sums", "counts")))

    def _means(self) -> ClassMeans:
        return ClassMeans(self._global.sums, self._global.counts)

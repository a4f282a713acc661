"""FedHP: prototypes are trained beside the backbone, and fixed anchors keep them apart. There is no classifier.

Fonio et al., "FedHP: Federated Learning with Hyperspherical Prototypical Regularization", ESANN 2024.

    anchors     spread evenly over the unit sphere, the same for all devices               eq. 3
    loss        −log softmax_j(−‖f(x) − π_j‖₂)[y] + λ · mean_j (1 − cos(π̄_j, π_j))         eq. 1, 2, 4
    statistic   the learned prototypes π_ij and n_ij
    merged      π_j = Σ_i w_ij π_ij / Σ_i w_ij with w_ij = n_ij / n_i                       eq. 5, see `aggregation`
    answer      arg min_j ‖f(x) − π_j‖₂

A round starts from the global prototypes. For a class without a global prototype, a device keeps its own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.heads.sphere import uniform_prototypes
from protofleet.contract.methods.base import Head, Hyper, Local, LossTerm, StartState, Value, sgd
from protofleet.contract.methods.fedproto import FedProto
from protofleet.contract.methods.optimizers import Update
from protofleet.contract.sums.merge_rules import Weighting
from protofleet.contract.sums.statistics import ClassMeans, Statistic

__all__ = ["FedHP"]

_PAPER = "FedHP (Fonio et al., ESANN 2024)"
_LEARNED = "prototypes.learned"
_ANCHORS = "prototypes.anchors"


class FedHP(FedProto):
    name = "fedhp"
    title = "FedHP"
    source = f"{_PAPER}, eq. 1 to 5"
    summary = "learned prototypes held at fixed anchors"
    sends = "the prototypes it had learned"
    objective = "fedhp"
    heads: ClassVar[tuple[Head, ...]] = ("none",)
    loss: ClassVar[tuple[LossTerm, ...]] = ("all-prototypes", "anchors")
    weighting: ClassVar[Weighting] = "share"
    shared_state = (_ANCHORS,)
    privacy = "prototypes that were trained on the samples, without noise"
    first_run: ClassVar[Mapping[str, Value]] = MappingProxyType({"epochs": 1, "prototype_lr": 0.05})
    hyper: ClassVar[Mapping[str, Hyper]] = MappingProxyType(
        {
            **sgd(f"{_PAPER}, setting", lr=0.01, momentum=0.9, weight_decay=1e-4, epochs=5),
            "prototype_lr": Hyper(0.005, f"{_PAPER}, setting: Adam on the prototypes", low=1e-9, high=100.0),
            "lambda": Hyper(0.1, f"{_PAPER}, eq. 4"),
            "anchor_pull": Hyper("mean", f"decision 009, fluke's code; sum: {_PAPER}, eq. 2", ("mean", "sum")),
            "aggregation": Hyper("share", f"{_PAPER}, eq. 5, normalised as in fluke's code", ("share", "printed")),
        }
    )

    def state(self, classes: int, width: int, seed: int) -> dict[str, StartState]:
        anchors = functools.cache(lambda: uniform_prototypes(classes, width, seed))  # found once, where they are needed
        return {
            _LEARNED: StartState((classes, width), anchors, trained=True),
            _ANCHORS: StartState((classes, width), anchors, trained=False),
        }

    def update_of(self, name: str, hyper: Mapping[str, Value]) -> Update:
        if name == _LEARNED:
            return Update("adam", float(hyper["prototype_lr"]))
        return super().update_of(name, hyper)

    def start(
        self, params: Mapping[str, NDArray[np.float32]], given: Mapping[str, NDArray[np.float32]]
    ) -> dict[str, NDArray[np.float32]]:
        has_global = given["prototype_mask"][:, None] > 0
        return {_LEARNED: np.where(has_global, given["prototypes"], params[_LEARNED])}

    def summarise(self, local: Local) -> Statistic:
        return ClassMeans.from_means(local.params[_LEARNED], local.counts)

    def own_prototypes(self, local: Local) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        learned = local.params[_LEARNED].astype(np.float64)
        return learned, np.ones(len(learned), dtype=bool)

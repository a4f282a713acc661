"""FedProto: class means of a device's own features, averaged over devices, pull each device's features to them.

Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022.

    statistic   c_ij = mean of f(x) over device i's samples of class j                      eq. 1
    merged      c̄_j = Σ_i n_ij c_ij / Σ_i n_ij, over the devices that hold the class        eq. 4, see `aggregation`
    loss        CE(head(f(x)), y) + λ · d(f(x), c̄_y)                                        eq. 5, 6
    answer      arg min_j ‖f(x) − c̄_j‖₂                                                     eq. 2

If a device has unlabelled samples, the risk of Lin et al., ICML 2022, can be added (`pu_weight`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.methods.base import (
    Head,
    Hyper,
    Local,
    LossTerm,
    Merged,
    Method,
    RowWidth,
    Value,
    newer_rows,
    sgd,
)
from protofleet.contract.sums.statistics import ClassMeans, Statistic
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import ClassRows

__all__ = ["FedProto"]

_PAPER = "FedProto (Tan et al., AAAI 2022)"
_FEDPU = "FedPU (Lin et al., ICML 2022)"
_PRIORS = "class_priors"


class FedProto(Method):
    name = "fedproto"
    title = "FedProto"
    source = f"{_PAPER}, eq. 1, 2, 4, 5, 6"
    summary = "class prototypes"
    sends = "class prototypes"
    inference = "nearest prototype"
    way = "prototype"
    objective = "fedproto"
    heads: ClassVar[tuple[Head, ...]] = ("local", "frozen")
    loss: ClassVar[tuple[LossTerm, ...]] = ("cross-entropy", "prototype-distance")
    statistic = ClassMeans
    global_rows: ClassVar[Mapping[str, RowWidth]] = MappingProxyType({"prototypes": "features"})
    warm_prototypes = True
    privacy = "the mean feature of each class, without noise: of a class with one sample, that sample's feature"
    first_run: ClassVar[Mapping[str, Value]] = MappingProxyType({"momentum": 0.9})
    hyper: ClassVar[Mapping[str, Hyper]] = MappingProxyType(
        {
            **sgd(f"{_PAPER}, setting", lr=0.01, momentum=0.5, weight_decay=0.0, epochs=1),
            "lambda": Hyper(1.0, f"{_PAPER}, eq. 5; 1 for MNIST, 0.1 for CIFAR-10"),
            "distance": Hyper("squared", f"{_PAPER}, eq. 6 and its public code", ("squared", "l2", "l1")),
            "reading": Hyper("sample", "public code: distance per sample", ("sample", "class_mean")),
            "aggregation": Hyper(
                "count",
                f"{_PAPER}, eq. 4 without its second division, with it: twice; client: its public code",
                ("count", "client", "twice"),
            ),
            "pu_weight": Hyper(0.0, f"{_FEDPU}: weight of the risk of unlabelled samples; 0 leaves them out"),
        }
    )

    def uses_unlabelled(self, hyper: Mapping[str, Value]) -> bool:
        return bool(hyper.get("pu_weight"))

    def mean_over_samples(self, hyper: Mapping[str, Value]) -> bool:
        return hyper.get("reading") != "class_mean" and super().mean_over_samples(hyper)

    def step_inputs(self, hyper: Mapping[str, Value]) -> dict[str, tuple[Literal["classes", "features"], ...]]:
        return {_PRIORS: ("classes",)} if self.uses_unlabelled(hyper) else {}

    def inputs(
        self, counts: NDArray[np.int64], state: GlobalState, classes: int, width: int
    ) -> dict[str, NDArray[np.float32]]:
        priors = (counts / max(int(counts.sum()), 1)).astype(np.float32)  # (C,) among the labelled
        return {**super().inputs(counts, state, classes, width), _PRIORS: priors}

    def summarise(self, local: Local) -> Statistic:
        return local.class_means()

    def next_rows(
        self, previous: Mapping[str, ClassRows], merged: Merged, hyper: Mapping[str, Value]
    ) -> dict[str, ClassRows]:
        """A class that someone held gets a new prototype; a class that nobody held keeps the one it had."""
        assert isinstance(merged, ClassMeans)
        return {"prototypes": newer_rows(previous.get("prototypes"), merged.means, merged.present)}

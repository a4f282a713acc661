"""FedHKD*: mean features and mean soft predictions of each class, averaged over devices, teach each device's head.

Chen, Wang, Vikalo, "The Best of Both Worlds: Accurate Global and Personalized Models through Federated Learning with
Data-Free Hyper-Knowledge Distillation", ICLR 2023. FedHKD* is the paper's variant that sends hyper-knowledge, and no
weights to average. With averaged weights it is an algorithm of the lab (`lab/algorithms/fedhkd.py`).

    statistic   h_ij = mean of f(x), q_ij = mean of softmax(logits / T), over device i's samples of class j
    noise       Gaussian, on features clipped to ζ and, unless `noise_on` says otherwise, on soft predictions
    merged      H_j = Σ_i p_ij h_ij, Q_j = Σ_i p_ij q_ij, p_ij = n_ij / Σ_i n_ij
    loss        CE + λ · (1/C) Σ_j ‖softmax(G(H_j) / T) − Q_j‖₂ + γ · mean ‖f(x) − H_y‖₂
    answer      the device's own head
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from protofleet.contract.heads.answers import linear_logits, softmax
from protofleet.contract.methods.base import Head, Hyper, Local, LossTerm, Merged, Method, RowWidth, Value, newer_rows
from protofleet.contract.privacy.mechanism import RowNoise
from protofleet.contract.sums.statistics import Field, Rows, Statistic, class_sums
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import ClassRows

__all__ = ["FedHKD", "HyperKnowledge"]

_PAPER = "FedHKD (Chen, Wang, Vikalo, ICLR 2023)"
_SOFT = "soft_predictions"


@dataclass(frozen=True, eq=False)
class HyperKnowledge(Statistic):
    """Class sums of features and of soft predictions, and counts.

    Attributes:
        sums: (C, D) float64, Σ f(x) over each class's examples; zero where the count is zero.
        soft_sums: (C, C) float64, Σ softmax(logits / T) over each class's examples; zero where the count is zero.
        counts: (C,) int64.
    """

    NAME: ClassVar[str] = "hyper-knowledge"
    FIELDS: ClassVar[tuple[Field, ...]] = (Rows("sums"), Rows("soft_sums", "classes", holds="probabilities"))

    sums: NDArray[np.float64]
    soft_sums: NDArray[np.float64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, features: ArrayLike, soft: ArrayLike, labels: ArrayLike, classes: int) -> Self:
        """The statistic of features (N, D), soft predictions (N, C) and labels (N,) in 0…C−1."""
        sums, counts = class_sums(features, labels, classes)
        return cls(sums, class_sums(soft, labels, classes)[0], counts)

    @classmethod
    def from_means(cls, means: ArrayLike, soft: ArrayLike, counts: ArrayLike) -> Self:
        """From per-class means (C, D) and (C, C) and counts (C,), as they travel."""
        return cls.travelled([means, soft], None, counts)

    @property
    def means(self) -> NDArray[np.float64]:
        """(C, D) mean features; zero where a class has no examples."""
        return self.as_sent(self.row_fields()[0])

    @property
    def soft_means(self) -> NDArray[np.float64]:
        """(C, C) mean soft predictions; zero where a class has no examples."""
        return self.as_sent(self.row_fields()[1])


class FedHKD(Method):
    name = "fedhkd"
    title = "FedHKD*"
    source = f"{_PAPER}, FedHKD*: hyper-knowledge without its averaged weights"
    summary = "hyper-knowledge without weights (FedHKD*)"
    sends = "class means of its features and soft predictions"
    inference = "local head"
    way = "head"
    objective = "fedhkd"
    heads: ClassVar[tuple[Head, ...]] = ("local",)
    loss: ClassVar[tuple[LossTerm, ...]] = ("cross-entropy", "soft-predictions", "prototype-distance")
    statistic = HyperKnowledge
    global_rows: ClassVar[Mapping[str, RowWidth]] = MappingProxyType({"prototypes": "features", "soft": "classes"})
    privacy = "mean features and soft predictions of each class, under the Gaussian mechanism where `noise` is not 0"
    first_run: ClassVar[Mapping[str, Value]] = MappingProxyType({"epochs": 1})
    hyper: ClassVar[Mapping[str, Hyper]] = MappingProxyType(
        {
            "lr": Hyper(1e-3, f"{_PAPER}, public code: Adam", low=1e-9, high=100.0),
            "weight_decay": Hyper(0.0, f"{_PAPER}, public code"),
            "epochs": Hyper(5, f"{_PAPER}, setting", low=1, high=10_000),
            "optimizer": Hyper("adam", f"{_PAPER}, public code", ("adam", "sgd")),
            "momentum": Hyper(0.0, "of the optimizer sgd", high=0.9999),
            "lambda": Hyper(0.1, f"{_PAPER}, public code: of the soft predictions' distance"),
            "gamma": Hyper(0.1, f"{_PAPER}, public code: of the features' distance"),
            "temperature": Hyper(0.5, f"{_PAPER}, public code", low=1e-3, high=1e3),
            "clip": Hyper(1.0, f"{_PAPER}: bound of a feature's norm, where noise is added", low=1e-9, high=1e9),
            "noise": Hyper(0.0, f"{_PAPER}: noise multiplier of the Gaussian mechanism; 0 for none", high=1e6),
            "noise_on": Hyper("all", "ours: soft predictions too; features: as published", ("all", "features")),
            "delta": Hyper(1e-5, "of (ε, δ), as stated", low=1e-12, high=0.5),
        }
    )

    def agreement(self, hyper: Mapping[str, Value]) -> dict[str, object]:
        return {**super().agreement(hyper), "temperature": hyper.get("temperature")}

    def step_inputs(self, hyper: Mapping[str, Value]) -> dict[str, tuple[Literal["classes", "features"], ...]]:
        return {_SOFT: ("classes", "classes")}

    def inputs(
        self, counts: NDArray[np.int64], state: GlobalState, classes: int, width: int
    ) -> dict[str, NDArray[np.float32]]:
        soft, _ = state.dense("soft", classes, classes)
        return {**super().inputs(counts, state, classes, width), _SOFT: soft}

    def mechanism(self, hyper: Mapping[str, Value]) -> RowNoise | None:
        return RowNoise.of(hyper)

    def summarise(self, local: Local) -> Statistic:
        """Class sums of features, clipped where noise is to come, and of softmax(logits / T); with the noise."""
        weight, bias = local.params["head.weight"], local.params.get("head.bias")
        temperature, mechanism = float(local.hyper["temperature"]), self.mechanism(local.hyper)
        total = HyperKnowledge.zero(local.classes, local.width)
        for features, labels in local.features("local"):
            soft = softmax(linear_logits(features, weight, bias) / temperature)
            bounded = features if mechanism is None else mechanism.clipped(features)
            total = total.merge(HyperKnowledge.of(bounded, soft, labels, local.classes))
        if mechanism is None:
            return total
        return mechanism.released(total, local.secret_noise(repr(mechanism).encode(), *total.arrays(), total.counts))

    def next_rows(
        self, previous: Mapping[str, ClassRows], merged: Merged, hyper: Mapping[str, Value]
    ) -> dict[str, ClassRows]:
        """A class that someone held gets new knowledge; a class that nobody held keeps what it had."""
        assert isinstance(merged, HyperKnowledge)
        return {
            "prototypes": newer_rows(previous.get("prototypes"), merged.means, merged.present),
            "soft": newer_rows(previous.get("soft"), merged.soft_means, merged.present),
        }

"""NCM-DP: NCM with noise on what a device sends, which makes it (ε, δ)-differentially private for each of its samples.

A device answers with the nearest class mean of frozen unit features (`ncm.py`). The means follow from sums and counts
that each device has noised.

    statistic   B = Σ e_y zᵀ and n = Σ e_y over unit features z, both with normal noise: contract/privacy/noised_sums.py
    merged      sums of both: K devices have √K times the noise of one
    means       B over n, drawn towards the mean of all by what noise explains: contract/privacy/noised_heads.py
    answer      arg min_j ‖z − μ_j‖

Guarantee: the choice of what is sent tells nothing of the samples. Every class is always sent, whatever the device has,
and `min_samples` withholds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.heads.answers import Answer, nearest_answer
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods.base import (
    Extractor,
    Hyper,
    Local,
    Merged,
    Method,
    RowWidth,
    Value,
    newer_rows,
    noised,
)
from protofleet.contract.privacy.noised_heads import noised_means, told_apart
from protofleet.contract.privacy.noised_sums import SumNoise, feature_sums, on_grid
from protofleet.contract.sums.statistics import Field, Rows, Statistic
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import ClassRows

__all__ = ["NCMDP", "NoisedMeans"]


@dataclass(frozen=True, eq=False)
class NoisedMeans(Statistic):
    """Class sums of unit features and numbers of samples, both noised.

    Attributes:
        sums: (C, D) float64.
        sizes: (C, 1) float64, signed fractions.
        counts: (C,) int64, 1 of each class for each device.
    """

    NAME: ClassVar[str] = "noised-means"
    FIELDS: ClassVar[tuple[Field, ...]] = (
        Rows("sums", travels="sums", holds="noised"),
        Rows("sizes", "one", travels="sums", holds="noised"),
    )
    COUNTED: ClassVar[bool] = False

    sums: NDArray[np.float64]
    sizes: NDArray[np.float64]
    counts: NDArray[np.int64]


class NCMDP(Method):
    name = "ncm-dp"
    title = "NCM-DP"
    source = "nearest class mean (Mensink et al., TPAMI 2013) by the Gaussian mechanism, decision 144"
    summary = "class means of frozen features, with noise for ε"
    sends = "class sums of frozen features and counts, noised"
    inference = "nearest class mean"
    way = "class_mean"
    statistic = NoisedMeans
    extractor: ClassVar[Extractor] = "bundle"
    unit_features = True
    global_rows: ClassVar[Mapping[str, RowWidth]] = MappingProxyType({"means": "features"})
    privacy = "the sum of frozen features and the number of samples of each class, with noise for a stated ε"
    rounds = 1
    hyper: ClassVar[Mapping[str, Hyper]] = MappingProxyType(
        {
            **noised(),
            "count_share": Hyper(0.05, "decision 146: of the budget, for the counts", low=1e-6, high=0.999),
        }
    )

    def agreement(self, hyper: Mapping[str, Value]) -> dict[str, object]:
        return {name: hyper[name] for name in ("noise_multiplier", "count_share")}

    def mechanism(self, hyper: Mapping[str, Value]) -> SumNoise:
        return SumNoise(float(hyper["noise_multiplier"]), 0.0, float(hyper["count_share"]))

    def summarise(self, local: Local) -> Statistic:
        """Exact sums of what `local` has, with the noise; of a class that is withheld, nothing."""
        sums, sizes = np.zeros((local.classes, local.width)), np.zeros(local.classes, np.int64)
        for features, labels in local.features(self.extractor):
            z = on_grid(unit_rows(features.astype(np.float64)))
            sums += feature_sums(z, labels, local.classes)
            sizes += np.bincount(labels, minlength=local.classes)
        mechanism, released = self.mechanism(local.hyper), local.asked
        normal = local.secret_noise(repr(mechanism).encode(), sums, sizes, released)
        rows, counts = mechanism.noised_rows(sums, normal), mechanism.noised_counts(sizes, normal)
        return NoisedMeans(rows * released[:, None], counts * released[:, None], released.astype(np.int64))

    def next_rows(
        self, previous: Mapping[str, ClassRows], merged: Merged, hyper: Mapping[str, Value]
    ) -> dict[str, ClassRows]:
        """A new mean for each class that has samples, as far as noise lets see; another keeps the one it had."""
        assert isinstance(merged, NoisedMeans)
        mechanism, devices, sizes = self.mechanism(hyper), np.sqrt(merged.counts), merged.sizes[:, 0]
        present = merged.present & told_apart(sizes, devices * mechanism.count_deviation)
        means = noised_means(merged.sums, sizes, devices * mechanism.row_deviation, present)
        return {"means": newer_rows(previous.get("means"), means, present)}

    def shared_answers(
        self, state: GlobalState, classes: int, width: int, hyper: Mapping[str, Value]
    ) -> dict[str, Answer]:
        """`class_mean`: the nearest class mean of unit features of the bundle's extractor."""
        if "means" not in state.rows or not len(state.rows["means"].classes):
            return {}
        means, present = state.rows["means"].dense(classes, width)
        return {self.way: nearest_answer(means, present, unit=True)}

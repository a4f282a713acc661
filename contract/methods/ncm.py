"""NCM: class means of frozen features; a device answers with the nearest one. Nothing is trained.

The nearest class mean is old, and strong on pretrained features (Mensink et al., TPAMI 2013; in federated learning it
is the first step of Legate et al., "Guiding the last layer", NeurIPS 2023). It runs on any bundle, over the bundle's
own extractor. It sends C rows of D numbers, where FFC's sums have D²/2.

    statistic   mean of unit features z = f(x)/‖f(x)‖ over a device's samples of each class
    merged      μ_j = Σ_i n_ij μ_ij / Σ_i n_ij: exactly the means of the pooled data
    answer      arg min_j ‖z − μ_j‖
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from protofleet.contract.heads.answers import Answer, nearest_answer
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods.base import Extractor, Local, Merged, Method, RowWidth, Value, newer_rows
from protofleet.contract.sums.statistics import ClassMeans, Field, Rows, Statistic
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import ClassRows

__all__ = ["NCM", "UnitMeans"]


@dataclass(frozen=True, eq=False)
class UnitMeans(ClassMeans):
    """Class sums of unit features, and counts; as `ClassMeans`, but that no mean is longer than 1."""

    NAME: ClassVar[str] = "unit-means"
    FIELDS: ClassVar[tuple[Field, ...]] = (Rows("sums", holds="unit-features"),)


class NCM(Method):
    name = "ncm"
    title = "NCM"
    source = "nearest class mean (Mensink et al., TPAMI 2013) of frozen unit features"
    summary = "class means of frozen features"
    sends = "class means of frozen features"
    inference = "nearest class mean"
    way = "class_mean"
    statistic = UnitMeans
    extractor: ClassVar[Extractor] = "bundle"
    unit_features = True
    global_rows: ClassVar[Mapping[str, RowWidth]] = MappingProxyType({"means": "features"})
    privacy = "the mean frozen feature of each class, without noise: of a class with one sample, that sample's feature"
    rounds = 1
    stands = True

    def summarise(self, local: Local) -> Statistic:
        total = UnitMeans.zero(local.classes, local.width)
        for features, labels in local.features(self.extractor):
            total = total.merge(UnitMeans.of(unit_rows(features.astype(np.float64)), labels, local.classes))
        return total

    def next_rows(
        self, previous: Mapping[str, ClassRows], merged: Merged, hyper: Mapping[str, Value]
    ) -> dict[str, ClassRows]:
        """A class that someone held gets a new mean; a class that nobody held keeps the one it had."""
        assert isinstance(merged, UnitMeans)
        return {"means": newer_rows(previous.get("means"), merged.means, merged.present)}

    def shared_answers(
        self, state: GlobalState, classes: int, width: int, hyper: Mapping[str, Value]
    ) -> dict[str, Answer]:
        """`class_mean`: the nearest class mean of unit features of the bundle's extractor."""
        if "means" not in state.rows or not len(state.rows["means"].classes):  # nobody is left who sent any
            return {}
        means, present = state.rows["means"].dense(classes, width)
        return {self.way: nearest_answer(means, present, unit=True)}

"""FedCOF: class means of frozen features; their spread over devices tells the server the covariance, too.

Goswami et al., "Covariances for Free: Exploiting Mean Distributions for Federated Learning with Pre-Trained Models",
NeurIPS 2025, arXiv 2412.14326. It sends the bytes of class means, and gives nearly the head of FFC's sums.

    statistic   means of unit features over random groups of a device's samples of each class, and their sizes
    merged      class means, and the covariance within classes from how the groups' means scatter (prop. 1)
    head        the linear discriminant of these, its ridge chosen by the error it expects
                (contract/heads/discriminant.py)
    answer      arg max_j (W z + w)_j

The paper's devices send one mean of each class. Where there are few devices, several groups of each class tell more. No
group is smaller than the aggregator's `min_samples`. With only one group of every class in all there is no spread, and
the head is the nearest class mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from protofleet.contract.heads.answers import Answer, linear_answer
from protofleet.contract.heads.covariance import MeanSpread, random_groups
from protofleet.contract.heads.discriminant import chosen_in_words, discriminant_head, doubted_choice
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods.base import Extractor, Hyper, Local, Merged, Method, RowWidth, Solves, Value
from protofleet.contract.methods.ncm import UnitMeans
from protofleet.contract.printable import counted
from protofleet.contract.sums.merge_rules import Rule, Source
from protofleet.contract.sums.statistics import MAX_GROUPS, Field, Rows, Statistic
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import ClassRows

__all__ = ["FedCOF", "GroupMeans"]

_PAPER = "FedCOF (Goswami et al., NeurIPS 2025)"
_HEAD, _BIAS = "discriminant", "discriminant-bias"


@dataclass(frozen=True, eq=False)
class GroupMeans(UnitMeans):
    """Sums of unit features of up to eight groups of each class, (8 C, D), and how many samples each has, (8 C,)."""

    NAME: ClassVar[str] = "group-means"
    FIELDS: ClassVar[tuple[Field, ...]] = (Rows("sums", holds="unit-features"),)
    GROUPS: ClassVar[int] = MAX_GROUPS


class FedCOF(Method):
    name = "fedcof"
    title = "FedCOF"
    source = f"{_PAPER}, prop. 1; one covariance for all classes and its ridge: decision 093"
    summary = "class means of frozen features, and the covariance that their spread tells"
    sends = "class means of frozen features, of several random groups"
    inference = "linear discriminant"
    way = "discriminant"
    statistic = GroupMeans
    extractor: ClassVar[Extractor] = "bundle"
    unit_features = True
    solves: ClassVar[Solves] = "ridge"
    solved_with: ClassVar[tuple[str, ...]] = ("ridge",)
    global_rows: ClassVar[Mapping[str, RowWidth]] = MappingProxyType({_HEAD: "features", _BIAS: "one"})
    privacy = "mean frozen features of random groups of each class, without noise; no group below min-samples"
    rounds = 1
    hyper: ClassVar[Mapping[str, Hyper]] = MappingProxyType(
        {
            "groups": Hyper(4, f"ours: means of a class from each device; 1: {_PAPER}", low=1, high=MAX_GROUPS),
            "ridge": Hyper(
                "auto", "decision 093: of trace(Σ)/D, chosen from the means", ("auto",), high=1e6, number=True
            ),
        }
    )

    def groups(self, hyper: Mapping[str, Value]) -> int:
        return int(hyper["groups"])

    def variants(self, width: int) -> tuple[Mapping[str, Value], ...]:
        """Twice as many groups cost twice the bytes."""
        return tuple({"groups": groups} for groups in (1, 2, 4, 8))

    @property
    def merged(self) -> type:
        return MeanSpread

    def summarise(self, local: Local) -> Statistic:
        """Each sample goes to one of its class's groups, at random, before its features are known."""
        order = np.repeat(np.arange(local.classes), local.counts)  # (N,) the samples, class by class
        groups = random_groups(order, self.groups(local.hyper), local.min_samples, local.noise())
        upcoming = np.concatenate([[0], np.cumsum(local.counts)[:-1]])  # (C,) each class's next place in `order`
        places = local.classes * GroupMeans.GROUPS
        total = GroupMeans.zero(local.classes, local.width)
        for features, labels in local.features(self.extractor):
            drawn_groups = np.empty(len(labels), np.int64)
            for row, label in enumerate(labels):
                drawn_groups[row] = groups[upcoming[label]]
                upcoming[label] += 1
            z = unit_rows(features.astype(np.float64))
            total = total.merge(GroupMeans.of(z, labels * GroupMeans.GROUPS + drawn_groups, places))
        return total

    def merge(self, source: Source, rule: Rule, hyper: Mapping[str, Value]) -> Merged:
        """The groups' means, added up to what a discriminant needs of them; no group is kept."""
        total: MeanSpread | None = None
        for statistic in source():
            assert isinstance(statistic, GroupMeans)
            labels = np.arange(len(statistic.counts)) // GroupMeans.GROUPS
            part = MeanSpread.of(statistic.means, statistic.counts, labels, statistic.classes)
            total = part if total is None else total.merge(part)
        if total is None:
            return super().merge(source, rule, hyper)  # raises, and says that there is none
        return total

    def next_rows(
        self, previous: Mapping[str, ClassRows], merged: Merged, hyper: Mapping[str, Value]
    ) -> dict[str, ClassRows]:
        assert isinstance(merged, MeanSpread)
        head = discriminant_head(merged.within, _given_ridge(hyper))
        bias = np.where(merged.present, head.bias, 0.0)[:, None]  # (C, 1)
        return {_HEAD: ClassRows.of(head.weights, merged.present), _BIAS: ClassRows.of(bias, merged.present)}

    def told(self, merged: Merged, hyper: Mapping[str, Value]) -> str:
        assert isinstance(merged, MeanSpread)
        choice = chosen_in_words(merged.within, _given_ridge(hyper))
        groups, classes = int(merged.groups.sum()), int(merged.present.sum())
        return f"{counted(groups, 'group')} of {counted(classes, 'class', 'classes')}, {choice}"

    def doubt(self, merged: Merged, hyper: Mapping[str, Value]) -> str:
        assert isinstance(merged, MeanSpread)
        return doubted_choice(merged.within) if hyper["ridge"] == "auto" else ""

    def shared_answers(
        self, state: GlobalState, classes: int, width: int, hyper: Mapping[str, Value]
    ) -> dict[str, Answer]:
        """`discriminant`: the linear discriminant on unit features of the bundle's extractor."""
        if _HEAD not in state.rows or _BIAS not in state.rows or not len(state.rows[_HEAD].classes):
            return {}
        head, present = state.rows[_HEAD].dense(classes, width)
        bias, _ = state.rows[_BIAS].dense(classes, 1)
        return {self.way: linear_answer(head, bias[:, 0], present=present, unit=True)}


def _given_ridge(hyper: Mapping[str, Value]) -> float | None:
    """A given ridge, or None where it is chosen."""
    return None if hyper["ridge"] == "auto" else float(hyper["ridge"])

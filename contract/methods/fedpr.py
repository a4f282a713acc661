"""FedPR: as FedProto, but each device that holds a class has one vote on its prototype.

Qiao et al., "Prototype Regularized Federated Learning", eq. 2, 3, 4, without its averaged weights, which no message of
ours can carry; with them it is an algorithm of the lab (`lab/algorithms/fedpr.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from protofleet.contract.methods.base import Head, Hyper, sgd
from protofleet.contract.methods.fedproto import FedProto
from protofleet.contract.sums.merge_rules import Weighting

__all__ = ["FedPR"]

_PAPER = "FedPR (Qiao et al.)"


class FedPR(FedProto):
    name = "fedpr"
    title = "FedPR"
    source = f"{_PAPER}, eq. 2, 3, 4, without its averaged weights"
    summary = "class prototypes, each holder one vote"
    heads: ClassVar[tuple[Head, ...]] = ("local",)
    weighting: ClassVar[Weighting] = "client"
    hyper: ClassVar[Mapping[str, Hyper]] = MappingProxyType(
        {
            **sgd(f"{_PAPER}, setting", lr=0.01, momentum=0.5, weight_decay=0.0, epochs=1),
            "lambda": Hyper(1.0, f"{_PAPER}, eq. 4"),
            "distance": Hyper("squared", f"{_PAPER}, eq. 4, over D", ("squared", "l2", "sum")),
        }
    )

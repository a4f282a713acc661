"""FedAvg (McMahan et al., AISTATS 2017): every weight is averaged, by the clients' shares of the samples."""

from __future__ import annotations

from protofleet.lab.algorithms.base import CrossEntropy, WeightRule

__all__ = ["FedAvg"]


class FedAvg(CrossEntropy):
    name = "fedavg"
    summary = "cross-entropy, all weights averaged each round"
    source = WeightRule.source

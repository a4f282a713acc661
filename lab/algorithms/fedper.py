"""FedPer (Arivazhagan et al., 2019): backbones are averaged, each client keeps its own head."""

from __future__ import annotations

from protofleet.lab.algorithms.base import CrossEntropy

__all__ = ["FedPer"]


class FedPer(CrossEntropy):
    name = "fedper"
    summary = "backbones averaged, each client keeps its head"
    source = "Arivazhagan et al., 2019"
    kept = "head"

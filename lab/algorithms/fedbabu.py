"""FedBABU (Oh et al., ICLR 2022): backbones are averaged against a head that stays as it was drawn."""

from __future__ import annotations

from protofleet.lab.algorithms.base import CrossEntropy

__all__ = ["FedBABU"]


class FedBABU(CrossEntropy):
    name = "fedbabu"
    summary = "backbones averaged, the head stays as drawn"
    source = "Oh et al., ICLR 2022"
    head = "initial"

"""FedNH (Dai et al., AAAI 2023, eq. 5 and 6): the head's rows are unit prototypes W that the server moves.

Clients train against them and send class means μ of unit features. The server sets W_j ← ρ W_j + (1 − ρ) μ_j/‖μ_j‖ for
the classes of the round, and normalises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch

from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import Hyper, Value
from protofleet.contract.sums.merge_rules import merge
from protofleet.contract.sums.statistics import ClassMeans
from protofleet.edge_client.data import LocalData
from protofleet.lab.algorithms.base import Algorithm
from protofleet.lab.algorithms.prototypes import row_bytes
from protofleet.lab.training.local_training import EagerModel

__all__ = ["FedNH"]

_PAPER = "Dai et al., AAAI 2023"


class FedNH(Algorithm):
    name = "fednh"
    summary = "backbones averaged, a head of unit prototypes moved by the server"
    source = _PAPER
    objective = "fednh"
    head = "normalised"
    loss_terms = ("cross-entropy",)
    statistic = ClassMeans
    hyper: ClassVar = {"smoothing": Hyper(0.9, f"ρ, {_PAPER}", high=1.0)}

    def __init__(self, classes: int, width: int, hyper: Mapping[str, Value], clients: int) -> None:
        self._smoothing = float(hyper["smoothing"])
        self._round: list[ClassMeans] = []
        self._classes, self._merged = classes, ClassMeans.zero(classes, width)

    def summarise(self, model: EagerModel, share: LocalData, rng: np.random.Generator) -> ClassMeans:
        return ClassMeans.of(unit_rows(model.features(share.x)), share.y, self._classes)

    def gather(self, statistic: ClassMeans) -> int:
        self._round.append(statistic)
        return row_bytes(statistic.present, statistic.width)

    def merge(self) -> None:
        merged = merge(lambda: self._round)
        assert isinstance(merged, ClassMeans)
        self._merged, self._round = merged, []

    def install(self, model: EagerModel) -> None:
        """Move the prototypes of the classes that the round has seen."""
        old = model.head_weight.cpu().numpy().astype(np.float64)
        moved = unit_rows(self._smoothing * old + (1.0 - self._smoothing) * unit_rows(self._merged.means))
        rows = np.where(self._merged.present[:, None], moved, old)
        model.head_weight.copy_(torch.from_numpy(rows))

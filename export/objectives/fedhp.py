"""FedHP's objective: distances to prototypes that are learned, which fixed anchors hold apart."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from protofleet.contract.methods import Value
from protofleet.contract.names import named
from protofleet.export.objectives.loss_terms import Scene, cross_entropy, norms, unit_features

__all__ = ["loss"]


def loss(scene: Scene, hyper: Mapping[str, Value]) -> Tensor:
    """FedHP, eq. 1, 2 and 4: mean of −log softmax_j(−‖f(x) − π_j‖₂)[y] + λ·(1/C)·Σ_j (1 − cos(π̄_j, π_j)).

    Args:
        hyper: `lambda`; `anchor_pull`, whether the second term is the mean over classes or the printed sum.
    """
    learned, anchors = scene.given["prototypes.learned"], scene.given["prototypes.anchors"]  # (C, D), (C, D) unit rows
    difference = scene.features.unsqueeze(1) - learned.unsqueeze(0)  # (B, C, D)
    distance = norms((difference * difference).sum(dim=2))  # (B, C)
    total = cross_entropy(-distance, scene.onehot(), scene.labelled)
    cosine = (unit_features(learned) * anchors).sum(dim=1)  # (C,)
    apart = 1.0 - cosine
    pull = named({"mean": torch.mean, "sum": torch.sum}, str(hyper["anchor_pull"]), "anchor_pull")(apart)
    real = torch.clamp(scene.labelled.sum(), max=1.0)  # a batch of padding costs nothing
    return total + float(hyper["lambda"]) * real * pull

"""FedHKD's objective: the others teach what the head says of global mean features, and where features lie."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from protofleet.contract.methods import Value
from protofleet.export.objectives.loss_terms import Scene, cross_entropy, norms, sample_pull

__all__ = ["loss"]


def loss(scene: Scene, hyper: Mapping[str, Value]) -> Tensor:
    """FedHKD's local loss: CE + λ·(1/C)·Σ_j ‖softmax(G(H_j)/T) − Q_j‖₂ + γ·mean of ‖f(x) − H_y‖₂.

    H are the global mean features, Q the global soft predictions and G the head. Classes without global knowledge are
    left out of both sums, so that the first round is cross-entropy alone.

    Args:
        hyper: `lambda`, `gamma`, `temperature` T; in the lab also `feature_loss`, the last term's distance.
    """
    taught = scene.given["soft_predictions"]  # (C, C) Q, row j for class j
    onehot = scene.onehot()
    total = cross_entropy(scene.logits, onehot, scene.labelled)
    soft = torch.softmax(scene.answers(scene.prototypes) / float(hyper["temperature"]), dim=1)  # (C, C)
    difference = soft - taught
    apart = norms((difference * difference).sum(dim=1)) * scene.prototype_mask  # (C,)
    real = torch.clamp(scene.labelled.sum(), max=1.0)
    pull = sample_pull(scene, onehot, str(hyper.get("feature_loss", "l2")))
    return total + float(hyper["lambda"]) * real * apart.mean() + float(hyper["gamma"]) * pull

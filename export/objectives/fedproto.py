"""FedProto's objective, with the risk of unlabelled samples beside; FedPR minimises the same."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from protofleet.contract.methods import Value
from protofleet.contract.names import named
from protofleet.export.objectives.loss_terms import Scene, cross_entropy, row_distance, sample_pull

__all__ = ["loss"]


def loss(scene: Scene, hyper: Mapping[str, Value]) -> Tensor:
    """FedProto, eq. 5 and 6, and FedPR, eq. 4: CE(head(f(x)), y) + λ·d(f(x), c̄_y).

    Args:
        hyper: `lambda`; `distance` (squared: ‖·‖²/D, l2: ‖·‖, l1: ‖·‖₁/D, sum: ‖·‖²); `reading` (sample: per sample,
            meaned over the batch; class_mean: of the batch's class means, summed over classes); `pu_weight`, of the
            unlabelled samples' risk (FedPU).

    Returns:
        The loss, a scalar.
    """
    logits, onehot = scene.logits, scene.onehot()
    total = cross_entropy(logits, onehot, scene.labelled)
    if hyper["lambda"]:
        pull = named(_READINGS, str(hyper.get("reading", "sample")), "reading")
        total = total + float(hyper["lambda"]) * pull(scene, onehot, str(hyper["distance"]))
    if hyper.get("pu_weight"):
        total = total + float(hyper["pu_weight"]) * _positive_unlabelled_risk(scene, logits, onehot)
    return total


def _class_mean_pull(scene: Scene, onehot: Tensor, kind: str) -> Tensor:
    """Sum over classes in the batch of the distance between the class's mean feature and its prototype."""
    members = (onehot * scene.labelled.unsqueeze(1)).T  # (C, B)
    count = members.sum(dim=1)  # (C,)
    present = count > 0
    mean = (members @ scene.features) / torch.where(present, count, torch.ones_like(count)).unsqueeze(1)  # (C, D)
    return (row_distance(mean - scene.prototypes, kind) * scene.prototype_mask * present.to(torch.float32)).sum()


_READINGS = {"sample": sample_pull, "class_mean": _class_mean_pull}


def _positive_unlabelled_risk(scene: Scene, logits: Tensor, onehot: Tensor) -> Tensor:
    """The non-negative risk of one-vs-rest classifiers on labelled and unlabelled samples, mean over classes held.

    For class j with prior π_j and logit g_j, under the logistic loss ℓ: π_j·E_j[ℓ(g_j)] + max(0, E_u[ℓ(−g_j)] −
    π_j·E_j[ℓ(−g_j)]), E_j over the batch's samples labelled j and E_u over its unlabelled ones (Kiryo et al., NeurIPS
    2017; over classes as in FedPU, Lin et al., ICML 2022). A class or a batch without such samples adds nothing.
    """
    priors = scene.given["class_priors"]  # (C,)
    members = onehot * scene.labelled.unsqueeze(1)  # (B, C)
    unlabelled = (scene.sample_weight - scene.labelled).unsqueeze(1)  # (B, 1)
    positive, negative = _softplus(-logits), _softplus(logits)  # (B, C): ℓ(g), ℓ(−g)
    of_class = [_column_mean(loss, members) for loss in (positive, negative)]
    excess = _column_mean(negative, unlabelled.expand_as(negative)) - priors * of_class[1]
    risk = priors * of_class[0] + torch.relu(excess)  # (C,)
    has_prior = (priors > 0).to(torch.float32)
    return (risk * has_prior).sum() / torch.clamp(has_prior.sum(), min=1.0)


def _softplus(x: Tensor) -> Tensor:
    """log(1 + eˣ), of plain operators."""
    return torch.relu(x) + torch.log(1.0 + torch.exp(-x.abs()))


def _column_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Σ w v / Σ w for each column of (B, C), and 0 where all weights are 0."""
    total = weight.sum(dim=0)
    return (values * weight).sum(dim=0) / torch.where(total > 0, total, torch.ones_like(total))

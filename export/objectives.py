"""What a training step minimises: one function per objective, written once, in torch.

The lab calls these eagerly; `export` traces the same functions into the graph that a device runs. Each is a mean over
the batch weighted by `sample_weight`, so that padding with weight 0 adds nothing, and each is zero for a batch of
padding only. Sources are cited with the reading that `papers/` settles where paper and public code disagree; `hyper`
holds the method's settled hyper-parameters (contract/methods.py).

    fedproto    cross-entropy of the head, plus λ times the distance of features to the global prototypes
    spherefed   squared error between a frozen orthonormal head on unit features and the one-hot label
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from contract.methods import Value

__all__ = ["OBJECTIVES", "Objective", "fedproto", "spherefed", "unit_features"]

Objective = Callable[
    [Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Mapping[str, Value]],
    Tensor,
]


def fedproto(
    features: Tensor,
    head_weight: Tensor,
    head_bias: Tensor | None,
    y: Tensor,
    sample_weight: Tensor,
    prototypes: Tensor,
    prototype_mask: Tensor,
    hyper: Mapping[str, Value],
) -> Tensor:
    """FedProto, eq. 5 and 6: CE(head(f(x)), y) + λ·d(f(x), c̄_y).

    Args:
        features: f(x), (B, D) float32.
        head_weight: (C, D) float32, trained or frozen.
        head_bias: (C,) float32, or None for a frozen head.
        y: (B,) int64 in [0, C).
        sample_weight: (B,) float32 ≥ 0; 0 is padding.
        prototypes: c̄, (C, D) float32; rows whose mask is 0 are not read into the loss.
        prototype_mask: (C,) float32, 1 where a global prototype exists.
        hyper: `lambda`, `distance` (squared: ‖·‖²/D, l2: ‖·‖, l1: ‖·‖₁/D), `reading` (sample: per sample, meaned over
            the batch; class_mean: of the batch's class means, summed over classes).

    Returns:
        The loss, a scalar.
    """
    logits = features @ head_weight.T  # (B, C)
    if head_bias is not None:
        logits = logits + head_bias
    onehot = _onehot(y, head_weight.shape[0])  # (B, C)
    entropy = -(torch.log_softmax(logits, dim=1) * onehot).sum(dim=1)  # (B,)
    loss = _weighted_mean(entropy, sample_weight)
    if not hyper["lambda"]:
        return loss
    pull = _CLASS_PULL[str(hyper["reading"])](
        features, y, onehot, sample_weight, prototypes, prototype_mask, str(hyper["distance"])
    )
    return loss + float(hyper["lambda"]) * pull


def spherefed(
    features: Tensor,
    head_weight: Tensor,
    head_bias: Tensor | None,
    y: Tensor,
    sample_weight: Tensor,
    prototypes: Tensor,
    prototype_mask: Tensor,
    hyper: Mapping[str, Value],
) -> Tensor:
    """SphereFed, eq. 4 and 5: mean over batch and classes of (W·z − onehot(y))², z = f(x)/‖f(x)‖, W W ᵀ = I.

    Args and returns as `fedproto`; the head is frozen and has no bias, the prototypes are not used.
    """
    scores = unit_features(features) @ head_weight.T  # (B, C)
    error = scores - _onehot(y, head_weight.shape[0])
    return _weighted_mean((error * error).mean(dim=1), sample_weight)


OBJECTIVES: dict[str, Objective] = {"fedproto": fedproto, "spherefed": spherefed}


def unit_features(features: Tensor) -> Tensor:
    """Each row of (B, D) divided by its Euclidean norm, with a floor of 1e-12."""
    return torch.nn.functional.normalize(features, dim=1, eps=1e-12)


def _onehot(y: Tensor, classes: int) -> Tensor:
    return (y.unsqueeze(1) == torch.arange(classes, device=y.device)).to(torch.float32)  # (B, C)


def _weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Σ w v / Σ w, and 0 where all weights are 0."""
    total = weight.sum()
    return (values * weight).sum() / torch.where(total > 0, total, torch.ones_like(total))


def _distance(difference: Tensor, kind: str) -> Tensor:
    """d of eq. 6 for rows of differences (rows, D) → (rows,)."""
    if kind == "squared":
        return (difference * difference).mean(dim=1)
    if kind == "l1":
        return difference.abs().mean(dim=1)
    squares = (difference * difference).sum(dim=1)
    # The norm has no gradient at 0; rows there get the gradient 0.
    away = squares > 0
    roots = torch.sqrt(torch.where(away, squares, torch.ones_like(squares)))
    return torch.where(away, roots, torch.zeros_like(squares))


def _sample_pull(
    features: Tensor, y: Tensor, onehot: Tensor, weight: Tensor, prototypes: Tensor, mask: Tensor, kind: str
) -> Tensor:
    """Mean over the batch of each sample's distance to its class's prototype; 0 where there is none."""
    target = torch.index_select(prototypes, 0, y)  # (B, D)
    return _weighted_mean(_distance(features - target, kind) * torch.index_select(mask, 0, y), weight)


def _class_mean_pull(
    features: Tensor, y: Tensor, onehot: Tensor, weight: Tensor, prototypes: Tensor, mask: Tensor, kind: str
) -> Tensor:
    """Sum over classes in the batch of the distance between the class's mean feature and its prototype."""
    members = (onehot * weight.unsqueeze(1)).T  # (C, B)
    count = members.sum(dim=1)  # (C,)
    present = count > 0
    mean = (members @ features) / torch.where(present, count, torch.ones_like(count)).unsqueeze(1)  # (C, D)
    return (_distance(mean - prototypes, kind) * mask * present.to(torch.float32)).sum()


_CLASS_PULL = {"sample": _sample_pull, "class_mean": _class_mean_pull}

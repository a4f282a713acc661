"""What an objective sees of one training step, and the terms that objectives share.

Every term is a mean over the batch weighted by `sample_weight`, so that padding with weight 0 adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from protofleet.contract.names import named

__all__ = [
    "DISTANCES",
    "Scene",
    "cross_entropy",
    "norms",
    "row_distance",
    "sample_pull",
    "unit_features",
    "weighted_mean",
]


@dataclass(frozen=True, eq=False)
class Scene:
    """The data of one training step, for an objective.

    Attributes:
        features: f(x), (B, D) float32.
        y: (B,) int64 in [0, C), or −1 for a sample without a label.
        sample_weight: (B,) float32 ≥ 0; 0 is padding.
        head_weight: (C, D), trained or frozen; None where the method has no head.
        head_bias: (C,), or None for a frozen head.
        prototypes: global prototypes, (C, D); rows whose mask is 0 are not read into the loss.
        prototype_mask: (C,) 1 where a global prototype exists.
        given: the other inputs of the step and the other state tensors that the method has, by name.
    """

    features: Tensor
    y: Tensor
    sample_weight: Tensor
    head_weight: Tensor | None
    head_bias: Tensor | None
    prototypes: Tensor
    prototype_mask: Tensor
    given: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, features: Tensor, given: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> Scene:
        """From the step's inputs and state tensors by their names in the bundle."""
        return cls(
            features=features,
            y=given["y"],
            sample_weight=given["sample_weight"],
            head_weight=state.get("head.weight"),
            head_bias=state.get("head.bias"),
            prototypes=given["prototypes"],
            prototype_mask=given["prototype_mask"],
            given={**given, **state},
        )

    @property
    def logits(self) -> Tensor:
        """The head's answers to the features, (B, C)."""
        return self.answers(self.features)

    def answers(self, features: Tensor) -> Tensor:
        """The head's answers to any features (rows, D) → (rows, C)."""
        assert self.head_weight is not None
        logits = features @ self.head_weight.T
        return logits if self.head_bias is None else logits + self.head_bias

    @property
    def labelled(self) -> Tensor:
        """(B,) the sample weights, 0 for samples without a label."""
        return self.sample_weight * (self.y >= 0).to(self.sample_weight.dtype)

    @property
    def classes(self) -> Tensor:
        """(B,) int64 labels with 0 for samples without one, to index by; `labelled` leaves those out."""
        return torch.clamp(self.y, min=0)

    def onehot(self) -> Tensor:
        """(B, C) float32; a row of zeros for a sample without a label."""
        numbers = torch.arange(self.prototypes.shape[0], device=self.y.device)
        return (self.y.unsqueeze(1) == numbers).to(torch.float32)


def unit_features(features: Tensor) -> Tensor:
    """Each row of (B, D) divided by its Euclidean norm, with a floor of 1e-12."""
    return torch.nn.functional.normalize(features, dim=1, eps=1e-12)


def weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Σ w v / Σ w, and 0 where all weights are 0."""
    total = weight.sum()
    return (values * weight).sum() / torch.where(total > 0, total, torch.ones_like(total))


def cross_entropy(logits: Tensor, onehot: Tensor, weight: Tensor) -> Tensor:
    return weighted_mean(-(torch.log_softmax(logits, dim=1) * onehot).sum(dim=1), weight)


def norms(squares: Tensor) -> Tensor:
    """Square roots. At 0 the root has no gradient; here its gradient is 0."""
    away = squares > 0
    roots = torch.sqrt(torch.where(away, squares, torch.ones_like(squares)))
    return torch.where(away, roots, torch.zeros_like(squares))


def row_distance(difference: Tensor, kind: str) -> Tensor:
    """d of FedProto's eq. 6 for rows of differences (rows, D) → (rows,).

    Args:
        kind: of `DISTANCES`.
    """
    return named(DISTANCES, kind, "distance")(difference)


DISTANCES: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(  # of rows (rows, D) → (rows,)
    {
        "squared": lambda rows: (rows * rows).mean(dim=1),
        "l1": lambda rows: rows.abs().mean(dim=1),
        "sum": lambda rows: (rows * rows).sum(dim=1),
        "l2": lambda rows: norms((rows * rows).sum(dim=1)),
    }
)


def sample_pull(scene: Scene, onehot: Tensor, kind: str) -> Tensor:
    """Mean over the batch of each sample's distance to its class's prototype; 0 where there is none."""
    target = torch.index_select(scene.prototypes, 0, scene.classes)  # (B, D)
    has_prototype = torch.index_select(scene.prototype_mask, 0, scene.classes)  # (B,)
    return weighted_mean(row_distance(scene.features - target, kind) * has_prototype, scene.labelled)

"""SphereFed's objective: squared error between a frozen orthonormal head on unit features and the one-hot label."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from protofleet.contract.methods import Value
from protofleet.export.objectives.loss_terms import Scene, unit_features, weighted_mean

__all__ = ["loss"]


def loss(scene: Scene, hyper: Mapping[str, Value]) -> Tensor:
    """SphereFed, eq. 4 and 5: mean over batch and classes of (W·z − onehot(y))², z = f(x)/‖f(x)‖, W W ᵀ = I."""
    assert scene.head_weight is not None
    error = unit_features(scene.features) @ scene.head_weight.T - scene.onehot()  # (B, C)
    return weighted_mean((error * error).mean(dim=1), scene.labelled)

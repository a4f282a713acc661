"""From camera bytes to the input of a backbone: uint8 (B, H, W, c) → float32 (B, c, H, W), (x / 255 − mean) / std.

It is part of both graphs, so no device can get it wrong. It is one operator of Protofleet's own, so each side can use
its fastest form:

- In eager torch: arithmetic on the images as they lie. This leaves the channels last, and convolutions quick.
- In ONNX: first planes, then BatchNormalization with fixed statistics, one pass (export/operators/norm.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from protofleet.contract.errors import UsageError

__all__ = ["Preprocess", "check_statistics"]


def check_statistics(
    mean: tuple[float, ...], std: tuple[float, ...], channels: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Both per channel; one number is every channel's.

    Raises:
        UsageError: when they are too few or too many, not finite, or a std is not above 0.
    """
    per_channel = [values * channels if len(values) == 1 else values for values in (mean, std)]
    for option, values in zip(("--mean", "--std"), per_channel, strict=True):
        if len(values) != channels or not all(map(math.isfinite, values)):
            raise UsageError(option, expected=f"{channels} numbers, one per channel", got=values)
    if min(per_channel[1]) <= 0:
        raise UsageError("--std", expected="numbers above 0", got=per_channel[1])
    return per_channel[0], per_channel[1]


class Preprocess(nn.Module):
    """The operator with its statistics: `mean` and `std` of x / 255, (c,) float32."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(tuple(mean), dtype=torch.float32), persistent=False)
        self.register_buffer("std", torch.tensor(tuple(std), dtype=torch.float32), persistent=False)
        self._mean, self._std = list(mean), list(std)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, H, W, c) uint8 → (B, c, H, W) float32."""
        return torch.ops.protofleet.preprocess(x, self._mean, self._std)


def _preprocess(x: Tensor, mean: list[float], std: list[float]) -> Tensor:
    centre, scale = (torch.tensor(values, device=x.device) for values in (mean, std))
    scaled = (x.to(torch.float32) / 255.0 - centre) / scale
    return scaled.permute(0, 3, 1, 2)


_library = torch.library.Library("protofleet", "FRAGMENT")
_library.define("preprocess(Tensor x, float[] mean, float[] std) -> Tensor")
_library.impl("preprocess", _preprocess, "CompositeExplicitAutograd")
torch.library.register_fake(
    "protofleet::preprocess", lambda x, mean, std: torch.empty_like(x, dtype=torch.float32).permute(0, 3, 1, 2)
)

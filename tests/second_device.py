"""A second device for torch where there is no GPU: its lazy one, which computes and refuses the processor's tensors."""

from __future__ import annotations

from functools import cache

import torch
import torch._lazy.ts_backend
from torch import Tensor

from export.preprocess import Preprocess

__all__ = ["second_device"]


@cache
def second_device() -> torch.device:
    """Ready to be computed on; it can be made ready but once in a process.

    It has no views within an operator of our own, so that images are prepared on the processor.
    """
    torch._lazy.ts_backend.init()
    torch.library.impl("protofleet::preprocess", "Lazy")(_preprocess)
    return torch.device("lazy")


def _preprocess(x: Tensor, mean: list[float], std: list[float]) -> Tensor:
    return Preprocess(mean, std)(x.cpu()).to(x.device)
